"""Small tokenizers of the three kinds that models have, trained in memory."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from trimtab.data.rows import Rows

CORPUS = [
    "a good film with a great cast",
    "a bad film and a dull plot",
    "what is the capital of france ? paris",
    "hello there , how are you today ? fine thanks",
    "one two three four five six seven eight nine ten",
    "User Assistant System user assistant system",
]


def make_rows(**columns) -> Rows:
    return Rows({name: list(values) for name, values in columns.items()}, "mine.csv")


def make_bert() -> PreTrainedTokenizerFast:
    """Words, [CLS] … [SEP], types for pairs: like BERT."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def make_gpt(**settings) -> PreTrainedTokenizerFast:
    """Bytes, EOS and no pad token, nothing added to a text: like GPT-2. Offsets leave white space out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{line}\n\n" for line in CORPUS], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", **settings)


def make_llama() -> PreTrainedTokenizerFast:
    """The same with BOS before every text: like Llama."""
    tokenizer = make_gpt(bos_token="<s>")
    tokenizer.eos_token = "</s>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer
