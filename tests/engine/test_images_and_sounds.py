"""Loops of one's own over images, pairs of texts and images, and sounds: predicted from the batch of their loader."""

import logging
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader, default_collate
from transformers import (
    CLIPConfig,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from allocated_bytes import peak_bytes
from tiny_models import same_weights
from trimtab import Engine
from trimtab.errors import DoesNotFit
from trimtab.planner import own_loop
from trimtab.planner.largest_batch import largest_batch
from trimtab.planner.memory import predict
from trimtab.planner.target import known_target, target_here
from trimtab.planner.trace.cuda import CudaRules, Gpu
from trimtab.planner.trace.own_step import OwnStep
from trimtab.techniques.apply import plain_spec

WIDTHS = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 256}
PIXELS = {"image_size": 64, "patch_size": 16}
TEXTS = {"vocab_size": 90, "max_position_embeddings": 16, "bos_token_id": 88, "eos_token_id": 89, "pad_token_id": 0}
SOUNDS = {
    f"{half}_{name}": value for half in ("encoder", "decoder") for name, value in (("layers", 4), ("ffn_dim", 256))
}
SOUNDS |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 64, "vocab_size": 90}
SOUNDS |= {"num_mel_bins": 20, "max_source_positions": 100, "dropout": 0.0, "decoder_start_token_id": 1}
SOUNDS |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": None}


@pytest.fixture(autouse=True)
def _said_is_kept(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")


def vit(kind=ViTForImageClassification, size=64):
    config = ViTConfig(**WIDTHS, **PIXELS | {"image_size": size})
    config.num_labels = 3
    rows = [{"pixel_values": torch.randn(3, size, size), "labels": torch.tensor(number % 3)} for number in range(16)]
    return kind(config), rows, default_collate


def clip(size=64, **more):
    pixels = WIDTHS | PIXELS | {"image_size": size}
    model = CLIPModel(CLIPConfig(text_config=WIDTHS | TEXTS, vision_config=pixels, projection_dim=32))
    rows = [
        {
            "input_ids": torch.randint(1, 88, (12,)),
            "attention_mask": torch.ones(12, dtype=torch.long),
            "pixel_values": torch.randn(3, size, size),
        }
        for _ in range(16)
    ]
    return model, rows, lambda examples: default_collate(examples) | more


def contrastive():
    return clip(return_loss=True)


def whisper():
    rows = [{"input_features": torch.randn(20, 200), "labels": torch.randint(3, 90, (12,))} for _ in range(16)]
    return WhisperForConditionalGeneration(WhisperConfig(**SOUNDS, begin_suppress_tokens=None)), rows, default_collate


def parts(make):
    torch.manual_seed(7)
    model, rows, collate = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, DataLoader(rows, batch_size=8, collate_fn=collate)


def predicted(made, target, recomputed="none", precision="fp32"):
    model, optimizer, loader = made
    spec = plain_spec(8, precision, optimizer="AdamW", gradient_checkpointing=recomputed)
    return target.as_here(predict(OwnStep(model, optimizer, 1, target).trace(spec, largest_batch(loader))))


def cpu():
    return replace(target_here("cpu", None), outside_bytes=0)


def train(engine, model, optimizer, loader):
    torch.manual_seed(5)
    model.train()
    for batch in loader:
        engine.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    "make", [vit, *(pytest.param(make, marks=pytest.mark.slow) for make in (contrastive, whisper))]
)
def test_a_budget_recomputes_and_the_weights_stay_the_same(make, monkeypatch, caplog):
    budget = int(predicted(parts(make), cpu(), "all").allocated / 0.97)
    assert budget < predicted(parts(make), cpu()).allocated
    monkeypatch.setattr(own_loop, "target_here", lambda *asked: replace(target_here(*asked), outside_bytes=0))
    plain = train(engine := Engine(device="cpu"), *engine.prepare(*parts(make)))
    engine = Engine(device="cpu", memory_budget=budget)
    ours = train(engine, *engine.prepare(*parts(make)))
    assert engine._memory_planner.chosen.spec["gradient_checkpointing"] != "none"
    assert any("_trimtab_plain_block" in module.__dict__ for module in ours.modules())
    assert same_weights(ours, plain)
    assert "recompute" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("make", [vit, contrastive, whisper])
def test_the_prediction_is_what_a_step_allocates(make):
    """On a CPU, whose kernels allocate almost what CUDA's do: without dropout within 5% here."""
    made = parts(make)
    found = predicted(made, cpu()).allocated
    engine = Engine(device="cpu")
    model, optimizer, loader = engine.prepare(*made)
    batch = next(iter(loader))

    def step():
        engine.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()

    model.train()
    step()  # makes the state of the optimizer
    before = 3 * sum(p.nbytes for p in model.parameters())  # weights and state
    before += sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))
    assert found == pytest.approx(before + peak_bytes(step), rel=0.05)


@pytest.mark.parametrize(("make", "count"), [(vit, 1), (whisper, 2)])
def test_convolutions_of_inputs_are_computed_in_half_precision(make, count):
    """Images and sounds are fp32; weights and inputs of convolutions are cast, as on a GPU."""
    found = predicted(parts(make), known_target("t4", None), precision="fp16")
    computed = {op.dtype for op in found.trace.ops if op.name.startswith("aten.convolution")}
    assert sum(op.name == "aten.convolution" and op.stage == "forward" for op in found.trace.ops) == count
    assert computed == {"fp16"}


def test_a_loss_that_compares_rows_is_reported(caplog):
    engine = Engine(device="cpu", memory_budget="8GiB")
    engine.prepare(*parts(contrastive))
    assert "the loss compares the rows of a batch with each other (logits_per_image)" in caplog.text
    caplog.clear()
    Engine(device="cpu", memory_budget="8GiB").prepare(*parts(vit))
    assert "compares the rows" not in caplog.text


@pytest.mark.slow
def test_fewer_rows_to_compare_are_no_part_of_the_same_batch(monkeypatch):
    """Half the batch is another loss: it may be proposed, but not with accumulation for the same one."""

    def large():
        return clip(size=384, return_loss=True)

    needed = predicted(parts(large), gpu := known_target("a100", None), "all")
    budget = int(0.8 * gpu.needed_bytes(needed)) + needed.outside
    monkeypatch.setattr(own_loop, "target_here", lambda *_: known_target("a100", f"{budget}B"))
    with pytest.raises(DoesNotFit) as caught:
        Engine(device="cpu", memory_budget=budget).prepare(*parts(large))
    assert "gradient_accumulation_steps" not in str(caught.value)
    assert "which is another loss: fewer rows are compared" in str(caught.value)


def test_what_compares_rows_really_depends_on_the_batch():
    """The reason for the message: the mean over two halves is not the loss of the whole."""
    model, _, loader = parts(contrastive)
    batch = next(iter(loader))
    halves = [
        {name: value[part] if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for part in (slice(4), slice(4, None))
    ]
    with torch.no_grad():
        whole, *both = (model.eval()(**each).loss for each in (batch, *halves))
    assert abs(torch.stack(both).mean() - whole) > 0.1


@pytest.mark.parametrize("make", [clip, lambda: vit(ViTModel)])
def test_a_loss_of_the_loop_itself(make, caplog):
    """The model returns similarities or hidden states; everything that made them is in the prediction."""
    engine = Engine(device="cpu", memory_budget="8GiB")
    engine.prepare(*parts(make))
    assert engine._memory_planner.chosen is not None
    assert "the loss, which the model does not compute from these batches" in caplog.text
    found = predicted(parts(make), cpu())
    assert found.parts["activations"] > 2**20, "activations of the blocks are kept for backward"


def test_the_largest_images_make_the_batch():
    """Not those with most colours: sizes are numbers of pixels."""
    rows = [{"pixel_values": torch.zeros(3, 16, 16 * (1 + number % 4))} for number in range(12)]
    found = largest_batch(DataLoader(rows, batch_size=2))
    assert found.inputs["pixel_values"].shape == (2, 3, 16, 64)
    assert (found.rows, found.length) == (2, None)
    assert str(found) == "2 rows: the largest of all 12"
    assert found.resized(rows=1).inputs["pixel_values"].shape == (1, 3, 16, 64)


def test_convolutions_have_an_allowance():
    convolution, rules = torch.ops.aten.convolution.default, CudaRules(Gpu())
    image, weight = torch.empty(2, 8, 16, 16, device="meta"), torch.empty(8, 8, 4, 4, device="meta")
    shape = ([4, 4], [0, 0], [1, 1], False, [0, 0])

    def temporaries(weight, num_groups):
        args = (image, weight, None, *shape, num_groups)
        return rules.temporaries(convolution, args, convolution(*args))

    made = 2 * 8 * 4 * 4 * 4
    assert temporaries(weight, 1) == [image.nbytes + weight.nbytes + made]
    assert temporaries(weight[:, :1], 8) == []
