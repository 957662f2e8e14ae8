"""Loops with DDP that end, in each way that there is, right after a backward whose collectives may still run.

The end of the interpreter is part of them, which the fork server spares its children otherwise.
"""

import ctypes
import os
import signal
import sys

import torch
import torch.distributed as dist

from trimtab import Engine
from trimtab.accelerate import Accelerator


def main(end: str, drop_in: bool, store: str | None = None) -> None:
    """Train one step, and end.

    Args:
        end: How: a function of this file.
        drop_in: Whether the engine is Accelerate's.
        store: A file, if the loop makes the process group (of one process) itself; otherwise the engine makes it.
    """
    if store is not None:
        dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    engine = Accelerator(cpu=True) if drop_in else Engine(device="cpu")
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    model = engine.prepare(model)
    code = 0
    try:
        if end == "interrupted_in_backward":
            model.module[0].weight.register_post_accumulate_grad_hook(lambda _: signal.raise_signal(signal.SIGINT))
        engine.backward(model(torch.randn(4, 16)).sum())
        globals()[end](engine, model)
    except (ValueError, KeyboardInterrupt):
        sys.excepthook(*sys.exc_info())
        code = 1
    if end.startswith("globals_"):
        globals()["kept"] = model  # as in a script, whose names end with the interpreter
    if end == "destroyed_first":
        dist.destroy_process_group()
    del model, engine
    ctypes.pythonapi.Py_Exit(code)


def returned(engine, model):
    """Leave everything to the interpreter."""


globals_returned = destroyed_first = returned


# How each ends, with its exit code; "globals_" leaves the model to the end of the interpreter.
ENDS = {
    **dict.fromkeys(("returned", "globals_returned", "ended_training", "destroyed", "globals_destroyed"), 0),
    **dict.fromkeys(("destroyed_first", "ended_training_and_destroyed"), 0),
    **dict.fromkeys(("raised", "globals_raised", "interrupted", "interrupted_in_backward"), 1),
    "terminated": -signal.SIGTERM,
}

ERRORS = {
    **dict.fromkeys(("raised", "globals_raised"), "ValueError: no good"),
    **dict.fromkeys(("interrupted", "interrupted_in_backward"), "KeyboardInterrupt"),
}


def ended_training(engine, model):
    engine.end_training()


def destroyed(engine, model):
    dist.destroy_process_group()


def globals_destroyed(engine, model):
    dist.destroy_process_group()


def ended_training_and_destroyed(engine, model):
    engine.end_training()
    dist.destroy_process_group()


def raised(engine, model):
    raise ValueError("no good")


globals_raised = raised


def interrupted(engine, model):
    os.kill(os.getpid(), signal.SIGINT)


def interrupted_in_backward(engine, model):
    raise AssertionError("no interrupt")


def terminated(engine, model):
    os.kill(os.getpid(), signal.SIGTERM)
