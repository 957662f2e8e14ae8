"""Streamed weights: the bits of the plain step, two blocks on the device, and host memory that is always right."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from techniques.test_gradient_checkpointing import CONFIGS, OTHERS, assert_same, deep, forward, quantize, rows, step
from tiny_models import TEXTS
from tiny_runs import lines_of, reviews
from trimtab import Recipe, fit
from trimtab.model import streamed_blocks
from trimtab.model.blocks import blocks_of
from trimtab.model.streamed_blocks import Visits, stream_blocks, streamable, streamed_blocks_of
from trimtab.runs.journal import VOLATILE_KEYS
from trimtab.techniques.recomputation import checkpoint_layers

CPU = torch.device("cpu")
RECOMPUTED = ["none", "all", {"every": 2}]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 64)


@pytest.fixture(autouse=True)
def _nothing_survives_in_a_buffer(monkeypatch):
    """What leaves the device is overwritten with NaN: whatever reads a buffer too late or too early shows it."""
    leave, begin = Visits.leave, Visits.begin

    def leave_and_poison(self, *, has_changed):
        number = self.visiting
        leave(self, has_changed=has_changed)
        if number is not None:
            self._buffers[number % 2].fill_(255)
            self._held[number % 2] = None

    def begin_with_poison(self, tensors):
        begin(self, tensors)
        for buffer in self._buffers:
            buffer.fill_(255)

    monkeypatch.setattr(Visits, "leave", leave_and_poison)
    monkeypatch.setattr(Visits, "begin", begin_with_poison)


def streamed(model, *, trains=False, which=slice(None)):
    blocks = [block for _, block in blocks_of(model)][which]
    return stream_blocks(model, blocks, [streamable(block, trains=trains) for block in blocks], CPU)


# ---------------------------------------------------------------------- a step

QUICK = ("llama", "bert", "t5", "mixtral")


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in (*CONFIGS, *OTHERS) if n != "albert"],
)
def test_the_step_is_the_plain_one_to_the_bit(name):
    """With dropout where the family has it by default, and one window of two micro-batches."""
    model = deep(name)
    batches = [rows(), rows(TEXTS[:2])]
    plain = step(model, batches=batches)
    streamed(model, trains=True)
    for which in RECOMPUTED:
        checkpoint_layers(model, which)
        assert_same(step(model, batches=batches), plain)


@pytest.mark.parametrize(
    ("quantized", "dropout"), [(False, 0.1), pytest.param(True, 0.0, marks=pytest.mark.slow)], ids=["lora", "nf4"]
)
@pytest.mark.parametrize("which", [slice(None), slice(0, None, 2)], ids=["all", "every 2"])
def test_adapters(quantized, dropout, which):
    from trimtab.model.adapters import LoraSpec, add_adapter

    model = deep("llama")
    if quantized:
        quantize(model)
    add_adapter(model, LoraSpec(rank=2, dropout=dropout, targets=["q_proj", "down_proj"]))  # others have none
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    plain = step(model)
    found = streamed(model, which=which)
    assert all(not parameter.requires_grad for unit in found.units for parameter in unit)
    for recomputed in RECOMPUTED:
        checkpoint_layers(model, recomputed)
        assert_same(step(model), plain)


# ---------------------------------------------------------------------- runs


@pytest.fixture
def train(tiny, tmp_path):
    """Trains a tiny Llama of four blocks for four steps; keywords are sections of the recipe."""
    numbers = itertools.count()

    def train(value, callbacks=(), resume=False, memory=None, **sections):
        settings = {"max_steps": 4, "lr": 1e-2, "log_every": 1, "weight_decay": 0.1, "batch_size": 8}
        usual = {
            "model": tiny.folder("llama", num_hidden_layers=4, hidden_size=64, intermediate_size=96),
            "task": "causal-lm",
            "data": {"train": reviews(32), "eval": reviews(24, first=1000), "text": "text"},
            "evaluate": {"every": "2 steps"},
            "checkpoint": {"every": "1 steps", "keep": 9},
            "out": str(tmp_path / f"run-{next(numbers)}"),
            "memory": {"stream_weights": value, **(memory or {})},
        }
        sections["train"] = settings | sections.get("train", {})
        options = {"callbacks": callbacks, "progress": "quiet", "device": "cpu", "resume": resume}
        return fit(Recipe(**usual | sections), **options)

    return train


def numbers_of(run):
    return [{k: v for k, v in line.items() if k not in VOLATILE_KEYS} for line in lines_of(run.folder)]


def tensors(folder):
    found = {f"{path.name}:{name}": t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}
    assert found
    return found


IN_BACKWARD, HOST = {"update": "in-backward"}, {"update": "host"}
UNCLIPPED = {"max_grad_norm": None}
EQUAL = {
    "lora": {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}, "memory": {"micro_batch": 3}},
    "lora, recomputed": {"adapter": "lora", "memory": {"gradient_checkpointing": "all", "offload_activations": "all"}},
    "qlora": {"adapter": {"kind": "qlora", "rank": 4}, "memory": {"gradient_checkpointing": "all"}},
    "qlora, every": {"adapter": {"kind": "qlora", "rank": 4}, "memory": {"micro_batch": 3}},
    "fp8": {"adapter": {"kind": "lora", "base": "fp8", "rank": 4}, "memory": {"micro_batch": 3}},
    "side": {"adapter": {"kind": "side", "reduction": 4}},
    "dora": {"adapter": {"kind": "lora", "rank": 4, "dora": True}},
    "in backward": {"train": UNCLIPPED, "memory": IN_BACKWARD},
    "in backward, recomputed": {"train": UNCLIPPED, "memory": IN_BACKWARD | {"gradient_checkpointing": "all"}},
    "in backward, 8 bits": {"train": UNCLIPPED | {"optimizer": "adamw8bit"}, "memory": IN_BACKWARD},
    "in backward, sgd": {"train": UNCLIPPED | {"optimizer": "sgd", "momentum": 0.9}, "memory": IN_BACKWARD},
    "in backward, adafactor": {"train": UNCLIPPED | {"optimizer": "adafactor"}, "memory": IN_BACKWARD},
    "in backward, unfrozen later": {
        "train": UNCLIPPED | {"freeze": {"*.layers.0": "2 steps"}},
        "memory": IN_BACKWARD,
    },
    "in backward, bf16": {"train": UNCLIPPED | {"precision": "bf16"}, "memory": IN_BACKWARD},
    "in backward, bf16-pure in 8 bits": {
        "train": UNCLIPPED | {"precision": "bf16-pure", "optimizer": "adamw8bit"},
        "memory": IN_BACKWARD | {"gradient_checkpointing": "all"},
    },
    "host": {"memory": HOST | {"micro_batch": 3, "gradient_checkpointing": {"every": 2}}},
    "host, bf16": {"train": {"precision": "bf16"}, "memory": HOST | {"micro_batch": 3}},
    "host, unfrozen later": {"train": {"freeze": {"*.layers.0": "2 steps"}}, "memory": HOST},
}
QUICK_RUNS = ("lora", "in backward", "host")


@pytest.mark.parametrize("case", [c if c in QUICK_RUNS else pytest.param(c, marks=pytest.mark.slow) for c in EQUAL])
def test_models_and_metrics_are_equal_to_the_bit(train, case):
    value = {"every": 2} if "every" in case else "all"
    ours, theirs = (train(how, **EQUAL[case]) for how in (value, "none"))
    assert ours.plan.stream_weights != theirs.plan.stream_weights
    assert ours.fit.step == 4
    assert numbers_of(ours) == numbers_of(theirs)
    for name in ("best", "checkpoints/step-2", "checkpoints/step-4"):
        one, other = (tensors(Path(run.folder) / name) for run in (ours, theirs))
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
