"""One of two ranks runs out of memory at each operation of a step in turn: both repeat the step with smaller parts."""

import itertools
import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab.training.loop
from tiny_runs import Watch, same_bits
from trimtab import Recipe, fit
from trimtab.engine.accumulation import Accumulation
from trimtab.errors import DoesNotFit, PeerError
from trimtab.training.loop import Trainer

RANK = int(os.environ.get("RANK", "0"))
window_gradients = trimtab.training.loop.window_gradients
TECHNIQUES = {
    "plain": {},
    "micro-batches": {"memory": {"micro_batch": 2}},
    "fp16": {"train": {"precision": "fp16"}, "memory": {"micro_batch": 2}},
    "recomputed": {"memory": {"gradient_checkpointing": "all"}},
    "unfrozen": {"train": {"freeze": {"base": "1 steps"}}, "memory": {"micro_batch": 2}},
    "lora": {"adapter": {"kind": "lora", "rank": 2}},
}


def allocates(function) -> bool:
    """Whether an operation makes a tensor; views, and what writes into one that is there, cannot run out."""
    made = [result for result in function._schema.returns if result.alias_info is None and "Tensor" in str(result.type)]
    return bool(made) and function.namespace != "c10d"


class RunsOut(TorchDispatchMode):
    """Raises at one of the operations that allocate, as an allocator would."""

    def __init__(self, at):
        super().__init__()
        self.num_operations, self.at = 0, at

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if allocates(function):
            self.num_operations += 1
            if self.num_operations == self.at:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")
        return function(*args, **kwargs or {})


class Faults:
    """Replaces `window_gradients`: in some calls memory runs out at some operation.

    Args:
        at: By the number of the call, the operation that fails.
    """

    def __init__(self, at):
        self.num_calls, self.num_until_exchanged, self._at = 0, [], at

    def __call__(self, *parts, **options):
        self.num_calls += 1
        correction = Accumulation.correction  # what comes next

        def noted(*arguments):
            self.num_until_exchanged.append(mode.num_operations)
            return correction(*arguments)

        with RunsOut(self._at.get(self.num_calls)) as mode, patch.object(Accumulation, "correction", noted):
            return window_gradients(*parts, **options)


class Runs:
    """Short runs of two processes."""

    def __init__(self, folder):
        self._folder, self._numbers = folder, itertools.count()
        self._model = json.loads((folder / "models.json").read_text())["bert"]

    def train(self, faults, callbacks=(), resume=False, out=None, **sections):
        trimtab.training.loop.window_gradients = faults
        settings = {"max_steps": 3, "lr": 1e-3, "batch_size": 8, "log_every": 1}
        recipe = {
            "model": self._model,
            "data": {"train": str(self._folder / "reviews.csv"), "eval_share": 0},
            "checkpoint": {"every": "1 steps", "keep": 9},
            "out": out or str(self._folder / f"run-{next(self._numbers)}"),
            **sections,
            "train": settings | sections.get("train", {}),
        }
        return fit(Recipe(**recipe), device="cpu", progress="quiet", callbacks=callbacks, resume=resume)


class Enough(Exception):
    """The experiment is over."""


def at_each_operation(runs: Runs, stride: int, **sections) -> None:
    """The second step is begun again and again, and fails at each operation up to the end of the exchange in turn.

    On the one process, on the other, and on both. Then it is done for good.
    """

    def experiment(trainer):
        trainer._model.train()
        trainer._memory_guard.rehearse(lambda text: None)
        sampler = trainer.parts.batches.batch_sampler
        planned = sampler.micro_batch_size
        counted = Faults({})
        trimtab.training.loop.window_gradients = counted
        size, micro_batches = next(trainer._position.windows(trainer.state.step))
        assert trainer._one_step(micro_batches, size)
        fewest = torch.tensor(counted.num_until_exchanged[0])  # a process with fewer rows may have fewer operations
        dist.all_reduce(fewest, op=dist.ReduceOp.MIN)
        num_operations = int(fewest)
        assert num_operations > 60
        trainer.seek_data()
        before = None
        for number, at in enumerate(range(1, num_operations + 1, stride)):
            trimtab.training.loop.window_gradients = Faults({1: at} if number % 3 in (RANK, 2) else {})
            windows = trainer._position.windows(trainer.state.step)
            size, micro_batches = next(windows)
            before = torch.get_rng_state() if before is None else before  # an epoch that begins draws a number
            assert not trainer._one_step(micro_batches, size), at
            assert sampler.micro_batch_size == planned // 2
            assert torch.equal(torch.get_rng_state(), before)
            assert all(parameter.grad is None for parameter in trainer._model.parameters())
            windows.close()
            sampler.set_micro_batch_size(planned)
        trimtab.training.loop.window_gradients = Faults({})
        size, micro_batches = next(trainer._position.windows(trainer.state.step))
        assert trainer._one_step(micro_batches, size)
        raise Enough

    fit_of, Trainer.fit = Trainer.fit, experiment
    try:
        runs.train(Faults({}), **sections)
    except Enough:
        return
    finally:
        Trainer.fit = fit_of
    raise AssertionError("the experiment did not come to its end")


def at_some_operations(runs: Runs, num_places: int) -> None:
    """Whole runs: each is, bit for bit, one whose micro-batches are smaller from the second step on."""
    counted = Faults({})
    whole = runs.train(counted)
    expected = Watch()
    runs.train(Faults({}), [expected], resume="step-1", out=str(whole.folder), memory={"micro_batch": 2})
    assert len(expected.weights) == 2
    num_operations = min(counted.num_until_exchanged[1:])
    stride = -(-num_operations // num_places)
    for number, at in enumerate(range(1 + stride // 2, num_operations, stride)):
        faults, watch = Faults({2: at} if number % 3 in (RANK, 2) else {}), Watch()
        result = runs.train(faults, [watch])
        assert (faults.num_calls, result.fit.step, result.fit.micro_batch_size) == (4, 3, 4), at
        for ours, theirs in zip(watch.weights[1:], expected.weights, strict=True):
            assert same_bits(ours, theirs), at


def too_late(runs: Runs) -> None:
    """After gradients were exchanged the other process has gone on: nothing can be taken back, and that is said."""
    counted, clipped = Faults({}), {"train": {"max_grad_norm": 0.1}}
    runs.train(counted, **clipped)
    at = {2: counted.num_until_exchanged[1] + 2} if RANK == 1 else {}
    words = "at step 2 on process 1, too late for the other processes"
    with pytest.raises(DoesNotFit, match=words) if RANK == 1 else pytest.raises(PeerError):
        runs.train(Faults(at), **clipped)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    runs = Runs(folder)
    if os.environ["WORLD_SIZE"] != "2":
        if not (folder / "quick").exists():
            at_each_operation(runs, 9)
        at_each_operation(runs, 9, train={"batch_size": 12}, memory={"micro_batch": 2})
        return
    for name, sections in TECHNIQUES.items():
        at_each_operation(runs, 1 if name == "plain" else 7, **sections)
    at_some_operations(runs, 6)
    too_late(runs)
