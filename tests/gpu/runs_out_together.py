"""What each of the two processes does: see `test_out_of_memory_together.py`."""

import os
import random
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tiny_models import config_of
from tiny_runs import lines_of, same_bits
from trimtab import Recipe, fit
from trimtab.distributed.group import GroupWorld
from trimtab.hardware.memory import cap_memory, non_allocator_memory

WORDS = ["the", "film", "was", "a", "story", "about", "this", "cast", "very", "long"]
MIB = 2**20
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}


class Squeeze:
    """After the first step one process has half of the memory that its steps need."""

    def __init__(self, rank, peak):
        self._is_meant, self._peak = rank == dist.get_rank(), peak

    def on_step(self, state):
        if state.step == 1 and self._is_meant:
            torch.cuda.empty_cache()
            device, held = torch.device("cuda", 0), torch.cuda.memory_allocated()
            outside = non_allocator_memory(device)
            cap_memory(device, int(held + (self._peak - held) * 0.6) + 32 * MIB + outside, outside)


class WatchOnHost:
    """Keeps the weights after each step, where memory does not run out."""

    def __init__(self):
        self.weights = []

    def on_step(self, state):
        self.weights.append({name: value.cpu() for name, value in state.model.state_dict().items()})


class Agreements:
    """How long hosts wait for each other's word."""

    def __init__(self):
        self.seconds = []
        anyone = GroupWorld.anyone

        def timed(world, flag):
            began = time.perf_counter()
            try:
                return anyone(world, flag)
            finally:
                self.seconds.append(time.perf_counter() - began)

        GroupWorld.anyone = timed


def train(folder, name, callbacks=(), resume=False, **memory):
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=120)) for _ in range(160)]
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {**config_of("bert"), **SHAPE, **dropout, "vocab_size": 300, "max_position_embeddings": 256}
    recipe = Recipe(
        model={"config": config, "tokenizer": "train"},
        data={
            "train": [{"text": text, "label": ("good", "bad")[number % 2]} for number, text in enumerate(texts)],
            "eval_share": 0,
            "max_length": 200,
        },
        train={"epochs": 1, "batch_size": 32, "precision": "fp32", "lr": 1e-3},
        memory={"gradient_checkpointing": "none", **memory},
        checkpoint={"every": "1 steps", "keep": 9},
        out=str(folder / name),
    )
    return fit(recipe, callbacks=callbacks, progress="quiet", resume=resume)


def main(folder: Path) -> None:
    dist.init_process_group("cpu:gloo,cuda:gloo")
    agreements = Agreements()
    free = train(folder, "free")
    assert (free.fit.step, free.fit.micro_batch_size) == (5, 32), free.fit
    print(f"{len(agreements.seconds)} agreements, {1e3 * statistics.median(agreements.seconds):.2f} ms each")
    peak = free.fit.peak_memory_bytes
    expected = WatchOnHost()
    train(folder, "free", [expected], resume="step-1", micro_batch=8)
    for rank in range(2):
        torch.cuda.set_per_process_memory_fraction(1.0)
        watch = WatchOnHost()
        result = train(folder, f"squeezed-{rank}", [Squeeze(rank, peak), watch])
        torch.cuda.set_per_process_memory_fraction(1.0)
        assert (result.fit.step, result.fit.micro_batch_size) == (5, 16), result.fit
        notes = [line["note"] for line in lines_of(result.folder) if "note" in line]
        assert len(notes) == 1, notes
        assert "at step 2" in notes[0], notes
        for ours, theirs in zip(watch.weights[1:], expected.weights, strict=True):
            assert same_bits(ours, theirs)
        print(f"process {rank} ran out: {notes[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
