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
