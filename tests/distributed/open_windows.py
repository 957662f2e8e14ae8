"""Saves states in the middle of an accumulation window, loads those of other numbers of processes, ends the window.

Every run adds what it can: it saves its own state, then loads those that are there.
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from own_loops import Tagger, loss_of, mean_over_rows, rows
from torch.utils.data import DataLoader

from trimtab import Engine
from trimtab.errors import CheckpointError

NUM_BEFORE = 2  # micro-batches before the save, of three
# name: precision, whether losses have weights, whether the loop accumulates with `accumulate` or by itself
CASES = {
    "means": ("no", False, True),
    "weights": ("no", True, True),
    "weights in fp16": ("fp16", True, True),
    "means in a plain loop": ("no", False, False),
    "weights in a plain loop": ("no", True, False),
    "weights in a plain loop in fp16": ("fp16", True, False),
}


class Window:
    """One window of three micro-batches, of 5, 5 and 3 rows, none of which divides among two or three processes."""

    def __init__(self, case: str) -> None:
        precision, self.weighted, self.accumulates = CASES[case]
        self.engine = Engine(precision, gradient_accumulation_steps=3, cpu=True)
        model = Tagger()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(rows(13), batch_size=5)
        self.model, self.optimizer, self.loader = self.engine.prepare(model, optimizer, loader)

    def run(self, save_to=None, num_alone=0):
        """The gradients at the end, or where a state was saved, inside the loop: in the middle of the epoch."""
        for done, batch in enumerate(self.loader, 1):
            with self._context(done <= num_alone):
                self._backward(batch)
            if save_to is not None and done == NUM_BEFORE:
                self.engine.save_state(save_to)
                break
        return {name: p.grad.clone() for name, p in self.engine.unwrap_model(self.model).named_parameters()}

    def _context(self, is_alone):
        if self.accumulates:
            return self.engine.accumulate(self.model)
        return self.engine.no_sync(self.model) if is_alone else nullcontext()

    def _backward(self, batch):
        if self.weighted:
            loss, weight = loss_of(self.model, batch)
        else:
            loss, weight = mean_over_rows(self.model, batch), None
        self.engine.backward(loss, weight=weight)


def refuses_gradients_that_were_not_exchanged(folder):
    """After no_sync each process has gradients of its own: those of the first are not the state."""
    window = Window("weights in a plain loop")
    with pytest.raises(CheckpointError, match="gradients of the ranks differ"):
        window.run(save_to=folder / "not exchanged", num_alone=NUM_BEFORE)
    Window("weights in a plain loop").run(save_to=folder / "exchanged", num_alone=NUM_BEFORE - 1)
    window.optimizer.zero_grad()
    window.engine.save_state(folder / "nothing waits")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    count = Engine(cpu=True).num_processes
    results = {}
    for case in CASES:
        results[case, "whole"] = Window(case).run()
        own = folder / f"{case}-by-{count}"
        if not own.exists():
            window = Window(case)
            with pytest.raises(CheckpointError, match="window") if count > 1 and window.accumulates else nullcontext():
                window.run(save_to=own)
        for state in sorted(folder.glob(f"{case}-by-*")):
            fresh, used = Window(case), Window(case)
            used.run()
            used.optimizer.step()
            for name, window in (("fresh", fresh), ("used", used)):
                window.engine.load_state(state)
                results[case, state.name, name] = window.run()
    if count > 1:
        refuses_gradients_that_were_not_exchanged(folder)
    rank = Engine(cpu=True).process_index
    torch.save(results, folder / f"{count}-{rank}.pt")
