"""Packed batches give the outputs and gradients of padded ones, for every type of model that may use them."""

import copy

import pytest
import torch
from torch.nn import functional

import packed_rows as pr
from trimtab.model import padding_free
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.attention_kernels import use_attention
from trimtab.model.packed_attention import Kernel
from trimtab.model.padding_free import enable, find_problem
from trimtab.techniques.recomputation import checkpoint_layers

ROW, MASKED, CAUSAL = "sequence-classification", "masked-lm", "causal-lm"
ENCODERS = sorted(padding_free._ENCODERS)
DECODERS = sorted(padding_free._DECODERS)
ALL = [(kind, ROW) for kind in ENCODERS] + [(kind, MASKED) for kind in ENCODERS] + [(kind, CAUSAL) for kind in DECODERS]
ONE_OF_EACH = [("bert", ROW), ("roberta", MASKED), ("modernbert", ROW), ("llama", CAUSAL)]
MIXTURES = ["granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"]
WINDOWED = {  # windows shorter than rows; some types decide by layer
    "cohere2": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "exaone4": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gemma3_text": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral": {"sliding_window": 6},
    "ministral3": {"sliding_window": 6},
    "olmo3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {"sliding_window": 6},
    "qwen2": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "starcoder2": {"sliding_window": 6},
}


def check_equality(model, model_kind, rows=None):
    rows = pr.some_rows() if rows is None else rows
    wanted = pr.step(pr.logits_of_padded, model, rows, model_kind)
    assert find_problem(model, model_kind, Kernel.ROWS) is None
    enable(model, model_kind, Kernel.ROWS)
    found = pr.step(pr.logits_of_packed, model, rows, model_kind)
    pr.assert_same_step(found, wanted)
    return wanted


@pytest.mark.parametrize(("model_type", "model_kind"), ALL)
def test_equals_padded(model_type, model_kind):
    check_equality(pr.small_model(model_type, model_kind), model_kind)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_router_losses_do_not_count_filler(model_type):
    model, rows = pr.small_model(model_type, CAUSAL), pr.some_rows()
    wanted = model(**pr.padded_batch(rows), use_cache=False).aux_loss
    enable(model, CAUSAL, Kernel.ROWS)
    found = [model(**pr.packed_batch(rows, filler)).aux_loss for filler in (0, pr.FILLER, 40)]
    for loss in found:
        torch.testing.assert_close(loss, wanted, rtol=16 * torch.finfo().eps, atol=0)


@pytest.mark.parametrize("model_type", sorted(WINDOWED))
def test_windows_of_decoders(model_type):
    model = pr.small_model(model_type, CAUSAL, **WINDOWED[model_type])
    wide = pr.small_model(model_type, CAUSAL, **WINDOWED[model_type] | {"sliding_window": 64})
    rows = pr.some_rows()
    logits, _ = check_equality(model, CAUSAL, rows)
    assert not torch.allclose(logits, pr.logits_of_padded(wide, rows, CAUSAL), atol=1e-3)  # the window matters


@pytest.mark.parametrize(("num_tokens", "filler"), [((64,), 0), ((1, 1, 1), 0), ((1,), 3), ((0, 5), 0), ((5, 0), 0)])
@pytest.mark.parametrize(("model_type", "model_kind"), ONE_OF_EACH)
def test_shapes_of_batches(model_type, model_kind, num_tokens, filler):
    if model_kind == CAUSAL and max(num_tokens) == 1:
        pytest.skip("nothing to predict")
    model, rows = pr.small_model(model_type, model_kind), pr.some_rows(num_tokens)
    wanted = pr.step(pr.logits_of_padded, model, rows, model_kind)
    enable(model, model_kind, Kernel.ROWS)
    found = pr.step(lambda *of: pr.logits_of_packed(*of, filler=filler), model, rows, model_kind)
    pr.assert_same_step(found, wanted)


def test_token_types():
    model, rows = pr.small_model("bert", ROW), pr.some_rows()
    types = [torch.arange(len(row)) // 4 % 2 for row in rows]
    enable(model, ROW, Kernel.ROWS)
    padded_types = torch.nn.utils.rnn.pad_sequence([row for row in types if len(row)], batch_first=True)
    wanted = model(**pr.padded_batch(rows), token_type_ids=padded_types).logits
    packed_types = torch.cat([*types, torch.zeros(pr.FILLER, dtype=torch.long)])[None]
    found = model(**pr.packed_batch(rows), token_type_ids=packed_types).logits
    pr.assert_close(found[[0, 1, 2, 3, 5]], wanted, 1e-5, "logits")
    assert not torch.allclose(wanted, pr.logits_of_padded(model, rows, ROW), atol=1e-3)


@pytest.mark.parametrize(("model_type", "model_kind"), ONE_OF_EACH)
def test_adapters(model_type, model_kind):
    model = pr.small_model(model_type, model_kind)
    add_adapter(model, LoraSpec(rank=4))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    _, gradients = check_equality(model, model_kind)
    assert any("lora_A" in name for name in gradients)


@pytest.mark.parametrize("which", ["all", "ops", "transformers"])
@pytest.mark.parametrize(("model_type", "model_kind"), ONE_OF_EACH)
def test_gradient_checkpointing(model_type, model_kind, which):
    """A padded forward before backward does not change how blocks of the packed batch are recomputed."""
    model, rows = pr.small_model(model_type, model_kind), pr.some_rows()
    wanted = pr.step(pr.logits_of_padded, model, rows, model_kind)
    enable(model, model_kind, Kernel.ROWS)
    if which == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        checkpoint_layers(model, which)
    model.zero_grad()
    logits = pr.logits_of_packed(model, rows, model_kind)
    with torch.no_grad():
        pr.logits_of_padded(model, rows, model_kind)
    pr.loss_of(logits, rows, model_kind).backward()
    found = logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    pr.assert_same_step(found, wanted)


@pytest.mark.parametrize(("model_type", "model_kind"), ONE_OF_EACH)
def test_padded_batches_stay_the_same(model_type, model_kind):
    model, rows = pr.small_model(model_type, model_kind), pr.some_rows()
    untouched = copy.deepcopy(model)
    enable(model, model_kind, Kernel.ROWS)
    for _ in range(2):
        found = pr.step(pr.logits_of_padded, model, rows, model_kind)
        wanted = pr.step(pr.logits_of_padded, untouched, rows, model_kind)
        assert torch.equal(found[0], wanted[0])
        assert all(torch.equal(found[1][name], gradient) for name, gradient in wanted[1].items())
        pr.step(pr.logits_of_packed, model, rows, model_kind)


def test_no_cache():
    model = pr.small_model("llama", CAUSAL)
    enable(model, CAUSAL, Kernel.ROWS)
    assert model(**pr.packed_batch(pr.some_rows())).past_key_values is None
    assert model(**pr.padded_batch(pr.some_rows())).past_key_values is not None


def test_generation_stays_the_same():
    model = pr.small_model("llama", CAUSAL).eval()
    inputs = pr.padded_batch(pr.some_rows((6, 6)))
    settings = {"max_new_tokens": 5, "do_sample": False}
    wanted = model.generate(**inputs, **settings)
    enable(model, CAUSAL, Kernel.ROWS)
    pr.logits_of_packed(model, pr.some_rows(), CAUSAL)
    assert torch.equal(model.generate(**inputs, **settings), wanted)


def test_parts_of_a_model_build_masks_after_an_error():
    model, rows = pr.small_model("bert", ROW), pr.some_rows()
    wanted = model.bert(**pr.padded_batch(rows)).last_hidden_state
    enable(model, ROW, Kernel.ROWS)
    with pytest.raises(ValueError, match="max_length_q is 3"):
        model(**pr.packed_batch(rows) | {"max_length_q": 3})
    assert torch.equal(model.bert(**pr.padded_batch(rows)).last_hidden_state, wanted)


def test_copies_of_a_model():
    model, rows = pr.small_model("roberta", ROW), pr.some_rows()
    wanted = pr.logits_of_padded(model, rows, ROW)
    enable(model, ROW, Kernel.ROWS)
    enable(model, ROW, Kernel.ROWS)  # positions are moved once
    copied = copy.deepcopy(model)
    for one in (copied, model):
        pr.assert_close(pr.logits_of_packed(one, rows, ROW), wanted, 1e-5, "logits")
    assert copied.config._attn_implementation == model.config._attn_implementation


def test_another_implementation_chosen_later():
    """The technique that chooses attention kernels may change a model before or after it is enabled."""
    model, rows = pr.small_model("llama", CAUSAL), pr.some_rows()
    wanted = pr.step(pr.logits_of_padded, model, rows, CAUSAL)
    use_attention(model, "math")
    assert find_problem(model, CAUSAL, Kernel.ROWS) is None
    enable(model, CAUSAL, Kernel.ROWS)
    pr.assert_same_step(pr.step(pr.logits_of_packed, model, rows, CAUSAL), wanted)
    model.set_attn_implementation("sdpa")
    pr.assert_same_step(pr.step(pr.logits_of_packed, model, rows, CAUSAL), wanted)
    pr.assert_same_step(pr.step(pr.logits_of_padded, model, rows, CAUSAL), wanted)


@pytest.mark.parametrize(("model_type", "model_kind"), ONE_OF_EACH)
def test_rows_do_not_see_each_other(model_type, model_kind):
    model, rows = pr.small_model(model_type, model_kind), pr.some_rows()
    enable(model, model_kind, Kernel.ROWS)
    changed = [row if index != 2 else 5 + (row + 3) % 80 for index, row in enumerate(rows)]
    before, after = (pr.logits_of_packed(model, batch, model_kind).detach() for batch in (rows, changed))
    is_changed = torch.zeros(len(before), dtype=torch.bool)
    first = 2 if model_kind == ROW else sum(map(len, rows[:2]))
    is_changed[first : first + (1 if model_kind == ROW else len(rows[2]))] = True
    pr.assert_close(after[~is_changed], before[~is_changed], 1e-6, "other rows")
    assert (after[is_changed] - before[is_changed]).abs().max() > 0.01


# ---------------------------------------------------------------------- on the meta device


@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("kernel", "dtype"), [(Kernel.FLASH, torch.bfloat16), (Kernel.EFFICIENT, torch.float32), (Kernel.ROWS, None)]
)
@pytest.mark.parametrize(("model_type", "model_kind"), [("bert", ROW), ("llama", CAUSAL), ("gpt2", CAUSAL)])
def test_step_without_data(model_type, model_kind, kernel, dtype, recomputes):
    model = pr.small_model(model_type, model_kind).to("meta", dtype)
    enable(model, model_kind, kernel)
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logits = model(**pr.on_device(pr.packed_batch(pr.some_rows()), "meta")).logits
    num_rows, num_tokens = len(pr.LENGTHS), sum(pr.LENGTHS) + pr.FILLER
    assert logits.shape == ((num_rows, pr.NUM_LABELS) if model_kind == ROW else (1, num_tokens, pr.VOCAB))
    labels = torch.zeros(logits[..., 0].numel(), dtype=torch.long, device="meta")
    functional.cross_entropy(logits.flatten(0, -2), labels).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


# ---------------------------------------------------------------------- models that cannot


@pytest.mark.parametrize(
    ("model_type", "model_kind", "settings", "reason"),
    [
        ("deberta-v2", ROW, {}, "relative positions"),
        ("gemma2", CAUSAL, {"head_dim": 8}, "caps scores"),
        ("bloom", CAUSAL, {"n_head": 4}, "ALiBi"),
        ("stablelm", CAUSAL, {}, "do not pass row boundaries"),
        ("llama", ROW, {}, "llama models with a sequence-classification head"),
        ("bert", "seq2seq-lm", {}, "bert models with a seq2seq-lm head"),
        ("modernbert", ROW, {"classifier_pooling": "mean"}, "classifier_pooling: mean"),
        ("bert", MASKED, {"is_decoder": True}, "configured as a decoder"),
        ("gemma3_text", CAUSAL, {"use_bidirectional_attention": True}, "both directions"),
        ("llama", CAUSAL, {"attn_implementation": "eager"}, "eager, not sdpa"),
    ],
)
def test_reasons(model_type, model_kind, settings, reason):
    model = pr.small_model(model_type, model_kind if model_kind in pr.HEADS else MASKED, **settings)
    assert reason in find_problem(model, model_kind, Kernel.ROWS)


def test_reasons_of_kernels():
    model = pr.small_model("llama", CAUSAL, hidden_size=48)  # heads of 12
    assert find_problem(model, CAUSAL, Kernel.ROWS) is None
    assert "heads of size 12" in find_problem(model, CAUSAL, Kernel.FLASH)
    model.config.head_dim = 256
    assert find_problem(model, CAUSAL, Kernel.FLASH) is None
    model.config.attention_dropout = 0.1
    assert "at most 192" in find_problem(model, CAUSAL, Kernel.FLASH)
    assert "no attention kernel" in find_problem(model, CAUSAL, None)
    local = pr.small_model("modernbert", MASKED)
    assert find_problem(local, MASKED, Kernel.FLASH) is None
    assert "half precision" in find_problem(local, MASKED, Kernel.EFFICIENT)


def test_classes_of_others():
    class Mine(type(pr.small_model("bert", ROW))):
        pass

    assert "Mine is not a class of transformers" in find_problem(
        Mine(pr.small_model("bert", ROW).config), ROW, Kernel.ROWS
    )
    assert "Linear is not a class" in find_problem(torch.nn.Linear(1, 1), ROW, Kernel.ROWS)


def test_boundaries_that_are_lost():
    """A model that drops them would mix rows in silence."""
    model = pr.small_model("stablelm", CAUSAL)
    enable(model, CAUSAL, Kernel.ROWS)
    with pytest.raises(ValueError, match="did not reach StableLmAttention"):
        pr.logits_of_packed(model, pr.some_rows(), CAUSAL)
