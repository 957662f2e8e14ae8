"""The same rows as a padded and as a packed batch, small models for them, and losses that must agree."""

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification

VOCAB, PAD, NUM_LABELS, MAX_POSITIONS, FILLER = 97, 1, 3, 64, 5
LENGTHS = (23, 1, 40, 7, 0, 12)  # with filler more tokens than positions
HEADS = {
    "causal-lm": AutoModelForCausalLM,
    "masked-lm": AutoModelForMaskedLM,
    "sequence-classification": AutoModelForSequenceClassification,
}
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCAB,
    "max_position_embeddings": MAX_POSITIONS + 2,
    "pad_token_id": PAD,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True}
OTHER_NAMES = {
    "granitemoe": {"num_local_experts": 4, "output_router_logits": True},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 24},
    "qwen3_moe": _EXPERTS | {"head_dim": 8},
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48},
    "gemma3_text": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "modernbert": {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 6, "global_attn_every_n_layers": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "qwen3": {"head_dim": 8},
}
DROPOUTS = (
    *(
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "attn_pdrop",
        "embd_pdrop",
        "dropout",
        "classifier_dropout",
    ),
    *("residual_dropout", "embedding_dropout", "attention_probs_dropout_prob", "hidden_dropout_prob", "embed_dropout"),
    *("activation_dropout", "seq_classif_dropout", "summary_last_dropout", "mlp_dropout", "classifier_dropout_prob"),
)


def small_model(model_type, model_kind, **settings):
    """A model whose attention is far from uniform, without dropout, in training mode."""
    shared = {"num_key_value_heads": 2} if model_kind == "causal-lm" else {"num_labels": NUM_LABELS}
    config = AutoConfig.for_model(model_type, **(SIZES | shared | OTHER_NAMES.get(model_type, {}) | settings))
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    model = HEADS[model_kind].from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def some_rows(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCAB, (length,), generator=generator) for length in lengths]


def padded_batch(rows):
    rows = [row for row in rows if len(row)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask}


def packed_batch(rows, filler=FILLER):
    lengths = [*map(len, rows), filler]
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    positions = [torch.arange(len(row)) for row in rows] + [torch.zeros(filler, dtype=torch.long)]
    return {
        "input_ids": torch.cat([*rows, torch.full((filler,), PAD)])[None],
        "position_ids": torch.cat(positions)[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def on_device(batch, device):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def logits_of_padded(model, rows, model_kind):
    """Logits of tokens, or of rows, without those of padding."""
    batch = on_device(padded_batch(rows), model.device)
    logits = model(**batch, **_without_cache(model_kind)).logits
    return logits if model_kind == "sequence-classification" else logits[batch["attention_mask"].bool()]


def logits_of_packed(model, rows, model_kind, filler=FILLER):
    """The same logits from a packed batch, without those of filler and empty rows."""
    logits = model(**on_device(packed_batch(rows, filler), model.device), **_without_cache(model_kind)).logits
    if model_kind == "sequence-classification":
        assert len(logits) == len(rows)
        return logits[[index for index, row in enumerate(rows) if len(row)]]
    assert logits.shape[1] == sum(map(len, rows)) + filler
    return logits[0, : sum(map(len, rows))]


def _without_cache(model_kind):
    return {"use_cache": False} if model_kind == "causal-lm" else {}


def loss_of(logits, rows, model_kind):
    """Mean over rows, or over the tokens to predict: the next one, or every third one."""
    rows = [row for row in rows if len(row)]
    if model_kind == "sequence-classification":
        labels = torch.arange(len(rows)) % NUM_LABELS
    elif model_kind == "causal-lm":
        labels = torch.cat([torch.cat([row[1:], torch.tensor([-100])]) for row in rows])
    else:
        labels = torch.cat([torch.where(torch.arange(len(row)) % 3 == 0, row, -100) for row in rows])
    return functional.cross_entropy(logits.float(), labels.to(logits.device))


def step(logits_of, model, rows, model_kind):
    """Logits and gradients of a model."""
    model.zero_grad(set_to_none=True)
    logits = logits_of(model, rows, model_kind)
    loss_of(logits, rows, model_kind).backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(found, wanted, bound=1e-5):
    """Compare logits and gradients, relative to the largest value of each tensor.

    Gradients of key biases are 0 but for rounding: attention does not depend on them. So the scale of a gradient is at
    least a hundredth of the largest gradient.
    """
    assert_close(found[0], wanted[0], bound, "logits")
    assert found[1].keys() == wanted[1].keys() != set()
    largest = max(float(gradient.abs().max()) for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        assert_close(found[1][name], gradient, bound, name, at_least=largest / 100)


def assert_close(found, wanted, bound, name, at_least=0.0):
    assert found.shape == wanted.shape, name
    scale = max(float(wanted.detach().abs().max()), at_least)
    difference = float((found.detach().float() - wanted.detach().float()).abs().max())
    assert difference <= bound * scale, f"{name} differs by {difference:.2e}, its values go up to {scale:.2e}"
