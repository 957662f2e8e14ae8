"""The works that benchmarks/peers.py measures: models, rows of text and their tokens, without a download.

Rows are texts of words that a tokenizer with one token per word reads, so every library starts from the same file and
the number of tokens of each row is known. Models are built from a config, with the random numbers of the seed.
"""

import json
import math
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

NUM_WORDS = 1000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<|user|>", "<|assistant|>")
PAD_ID, END_ID, USER_ID, ASSISTANT_ID = 0, 3, 5, 6
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} [SEP] {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
IGNORED = -100  # label of a position without a loss
MIN_DRAWN_ON_DEVICE = 500_000_000  # parameters; `fit` initializes smaller models on the host

BERT = {"model_type": "bert", "vocab_size": 30522, "pad_token_id": PAD_ID}
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "pad_token_id": PAD_ID,
    "bos_token_id": 2,
    "eos_token_id": END_ID,
}
LLAMA_1B = LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
LLAMA_8B = LLAMA | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL_VOCABULARY = {"vocab_size": NUM_WORDS + len(SPECIAL)}


@dataclass(frozen=True)
class Lengths:
    """Tokens per row: log-normal, cut; with `sigma` 0 all rows have the median."""

    median: float
    sigma: float = 0.0
    longest: int = 2**31

    def draw(self, num_rows: int) -> list[int]:
        random_numbers = random.Random(0)
        drawn = [random_numbers.lognormvariate(math.log(self.median), self.sigma) for _ in range(num_rows)]
        return [max(8, min(self.longest, round(length))) for length in drawn]


@dataclass(frozen=True)
class Work:
    """What is trained, and with which libraries.

    Attributes:
        words: The work in words, for the table.
        task: As in a recipe.
        config: Of the model; None: a folder with a pretrained model is given.
        lengths: Tokens per row; None: the rows are given.
        peers: Libraries with their options, as `peer_tools.parse` reads them.
        recipe: Further settings of trimtab's recipe, by section.
        budget_gib: GPU memory that the process may use.
    """

    words: str
    task: str
    config: dict[str, Any] | None
    lengths: Lengths | None
    batch_size: int
    num_steps: int
    lr: float
    peers: tuple[str, ...]
    precision: str = "bf16"
    adapter: str = "none"
    recipe: dict[str, Any] = field(default_factory=dict)
    budget_gib: float | None = None

    @property
    def is_whole_run(self) -> bool:
        """Whether the run is a whole command: its model is written, and judged on test rows."""
        return self.config is None

    def small(self) -> "Work":
        """The same with a tiny model and few steps; without what needs a GPU."""
        config = self.config and self.config | SMALL | SMALL_VOCABULARY
        if config and "num_key_value_heads" in config:
            config |= {"num_key_value_heads": 2}
        peers = [peer.replace("+liger", "").replace("+compile", "") for peer in self.peers]
        lengths = self.lengths and replace(self.lengths, median=self.lengths.median / 8, longest=64)
        return replace(
            self,
            words=f"{self.words}; in its small form",
            config=config,
            lengths=lengths,
            batch_size=4,
            num_steps=6,
            peers=tuple(dict.fromkeys(peers)),
            recipe={},
            budget_gib=None,
        )


IMDB_LENGTHS = Lengths(230, 0.72, 512)  # mean 262, that of IMDb in tokens of BERT cut at 512
ROWS_OF_2048 = Lengths(2048)
WORKS = {
    "bert-imdb": Work(
        words="BERT-base, 2 labels, rows of IMDb's lengths (mean 262 tokens, cut at 512)",
        task="classify",
        config=BERT,
        lengths=IMDB_LENGTHS,
        batch_size=32,
        num_steps=300,
        lr=5e-5,
        peers=("hf-trainer", "hf-trainer+group", "accelerate", "accelerate+group", "lightning"),
    ),
    "minilm-imdb": Work(
        words="a pretrained encoder on IMDb's reviews cut at 512 tokens, one epoch, from texts to the saved model",
        task="classify",
        config=None,
        lengths=None,
        batch_size=32,
        num_steps=0,
        lr=5e-5,
        peers=("hf-trainer", "hf-trainer+group", "accelerate", "lightning"),
    ),
    "llama-8b-lora": Work(
        words="Llama of 8 B parameters, LoRA of rank 16 on all linear modules, rows of 2,048 tokens",
        task="causal-lm",
        config=LLAMA_8B,
        lengths=ROWS_OF_2048,
        batch_size=4,
        num_steps=30,
        lr=1e-4,
        peers=("hf-trainer+liger", "accelerate+liger", "lightning+liger"),
        adapter="lora",
    ),
    "llama-8b-lora-24g": Work(
        words="Llama of 8 B parameters, LoRA of rank 16 on all linear modules, rows of 2,048 tokens, in 24 GiB",
        task="causal-lm",
        config=LLAMA_8B,
        lengths=ROWS_OF_2048,
        batch_size=4,
        num_steps=24,
        lr=1e-4,
        peers=("hf-trainer+liger+recompute", "accelerate+liger+recompute", "lightning+liger+recompute"),
        adapter="lora",
        recipe={"memory": {"budget": "24GiB"}},
        budget_gib=24,
    ),
    "llama-1b-full": Work(
        words="Llama of 1.24 B parameters, all of them trained, weights in bf16, rows of 2,048 tokens",
        task="causal-lm",
        config=LLAMA_1B,
        lengths=ROWS_OF_2048,
        batch_size=4,
        num_steps=60,
        lr=1e-5,
        peers=("hf-trainer+liger+compile", "hf-trainer+liger", "accelerate+liger", "lightning+liger"),
        precision="bf16-pure",
    ),
    "llama-8b-full": Work(
        words="Llama of 8 B parameters, all of them trained, weights in bf16, rows of 2,048 tokens",
        task="causal-lm",
        config=LLAMA_8B,
        lengths=ROWS_OF_2048,
        batch_size=1,
        num_steps=16,
        lr=1e-5,
        peers=("hf-trainer+liger+recompute",),
        precision="bf16-pure",
    ),
    "llama-8b-qlora": Work(
        words="Llama of 8 B parameters in 4 bits, LoRA of rank 16 on all linear modules, rows of 2,048 tokens",
        task="causal-lm",
        config=LLAMA_8B,
        lengths=ROWS_OF_2048,
        batch_size=4,
        num_steps=24,
        lr=1e-4,
        peers=("hf-trainer+liger+recompute", "accelerate+liger+recompute", "lightning+liger+recompute"),
        adapter="qlora",
    ),
    "instruct-1b-lora": Work(
        words="Llama of 1.24 B parameters, LoRA of rank 16 on all linear modules, questions and answers of 200 tokens "
        "on average (cut at 1,024), loss on the answers",
        task="chat",
        config=LLAMA_1B,
        lengths=Lengths(152, 0.75, 1024),
        batch_size=16,
        num_steps=80,
        lr=1e-4,
        peers=("hf-trainer+liger", "hf-trainer+liger+group", "hf-trainer+liger+flatten", "accelerate+liger")
        + ("lightning+liger",),
        adapter="lora",
    ),
}


# ---------------------------------------------------------------- what is written before the measurement


def write_tokenizer(folder: Path) -> None:
    """One token for each word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"w{number}" for number in range(NUM_WORDS))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special |= {"mask_token": "[MASK]", "eos_token": "[SEP]", "padding_side": "right"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **special)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))  # without one transformers warns


def made_rows(task: str, lengths: list[int]) -> list[dict[str, Any]]:
    """Rows of text whose tokens, with those that the task adds, have these lengths."""
    random_numbers = random.Random(1)

    def text(num_words: int) -> str:
        return " ".join(f"w{number}" for number in random_numbers.choices(range(NUM_WORDS), k=num_words))

    if task == "chat":  # <|user|> question [SEP] <|assistant|> answer [SEP]
        questions = [max(1, 2 * (length - 4) // 5) for length in lengths]
        pairs = zip(questions, lengths, strict=True)
        return [{"prompt": text(num), "answer": text(length - 4 - num)} for num, length in pairs]
    if task == "causal-lm":  # the end token is added
        return [{"text": text(length - 1)} for length in lengths]
    return [{"text": text(length), "label": random_numbers.randrange(2)} for length in lengths]


def write_jsonl(rows: list[dict[str, Any]], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tiny_pretrained(folder: Path) -> None:
    """A tiny encoder in place of a pretrained one, for the small form."""
    import torch
    from transformers import AutoConfig, AutoModelForMaskedLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**BERT | SMALL | SMALL_VOCABULARY)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    config_text = (folder / "config.json").read_text()
    write_tokenizer(folder)
    (folder / "config.json").write_text(config_text)


# ---------------------------------------------------------------- what the peers build from it


def read_tokens(folder: Path, work: Work, max_length: int) -> list[dict[str, list[int] | int]]:
    """Rows as the libraries' collators take them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]

    def ids_of(column: str) -> list[list[int]]:
        options = {"truncation": True, "max_length": max_length, "return_attention_mask": False}
        return tokenizer([row[column] for row in rows], **options)["input_ids"]

    if work.task == "classify":
        return [{"input_ids": ids, "labels": row["label"]} for ids, row in zip(ids_of("text"), rows, strict=True)]
    if work.task == "causal-lm":
        return [{"input_ids": [*ids, END_ID], "labels": [*ids, END_ID]} for ids in ids_of("text")]
    found = []
    for question, answer in zip(ids_of("prompt"), ids_of("answer"), strict=True):
        start, end = [USER_ID, *question, END_ID, ASSISTANT_ID], [*answer, END_ID]
        found.append({"input_ids": start + end, "labels": [IGNORED] * len(start) + end})
    return found


def build_model(folder: Path, work: Work, seed: int, device: str) -> Any:
    """The model that `fit` builds from the same recipe: the same random numbers, dtype and device."""
    import torch
    import transformers

    if work.config is None:
        auto = transformers.AutoModelForSequenceClassification
        return auto.from_pretrained(folder / f"start-{seed}", dtype=torch.float32).to(device).train()
    kind = "SequenceClassification" if work.task == "classify" else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    config = transformers.AutoConfig.for_model(**work.config)
    config.use_cache = False
    half = torch.bfloat16 if work.precision.startswith("bf16") else torch.float32
    dtype = half if work.precision == "bf16-pure" or work.adapter != "none" else torch.float32
    torch.manual_seed(seed)
    if work.adapter == "qlora":
        # bitsandbytes' modules, filled block by block: transformers quantizes only what it reads from files
        from trimtab.model.nf4 import Nf4
        from trimtab.model.quantization import build_quantized

        model = build_quantized(auto, config, dtype, Nf4(compute_dtype=half), torch.device(device))
    else:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
        with torch.device(device if size >= MIN_DRAWN_ON_DEVICE else "cpu"):
            model = auto.from_config(config, dtype=dtype)
    return model.to(device).train()
