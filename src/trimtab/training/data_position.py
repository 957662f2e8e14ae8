"""The position of a run in its training data: which rows follow a step, however they are split into micro-batches."""

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain, islice
from typing import Any

import torch

from trimtab.randomness import preserve_host_random_state


class DataPosition:
    """Map optimizer steps to batches of the training data."""

    def __init__(self, batches: Any, steps_per_epoch: int) -> None:
        self._batches = batches
        self._steps_per_epoch = steps_per_epoch
        self._is_retry = False  # the epoch is iterated again from its middle, in smaller micro-batches
        self.num_passed_over = 0  # batches that a rewind skipped

    def data_fingerprint(self) -> Any:
        """Return a fingerprint by which a resumed run checks that its rows are the same."""
        return self._batches.dataset.content_digest()

    def locate(self, step: int) -> tuple[int, int]:
        """Return the epoch of the batch after `step`, and how many batches of that epoch precede it."""
        return divmod(step + self.num_passed_over, self._steps_per_epoch)

    def seek(self, step: int, *, is_retry: bool = False) -> None:
        """Make the loader continue with the batch after `step`.

        Args:
            step: Optimizer steps done.
            is_retry: Whether a step was rolled back: its random numbers are drawn again, so the loader must draw none.
        """
        self._is_retry = is_retry or self._is_retry
        epoch, num_done = self.locate(step)
        sampler = self._batches.batch_sampler
        sampler.set_epoch(epoch)
        self._batches.go_to(epoch, sum(sampler.window_sizes()[:num_done]))

    def windows(self, step: int) -> Iterator[tuple[int, Iterator[dict[str, torch.Tensor]]]]:
        """Yield, for each batch left in the epoch, its number of micro-batches and an iterator that loads them."""
        epoch, num_done = self.locate(step)
        sampler = self._batches.batch_sampler
        sampler.set_epoch(epoch)  # it determines the sizes; the loader itself sets it with its first batch
        micro_batches = iter(self._batches)
        # The first batch starts the loader, which draws a random number and the order of all processes: before a step
        # begins, which another process may take back.
        with preserve_host_random_state() if self._is_retry else nullcontext():
            micro_batches = chain(list(islice(micro_batches, 1)), micro_batches)
        self._is_retry = False
        for size in sampler.window_sizes()[num_done:]:
            yield size, islice(micro_batches, size)

    def rows_of(self, step: int) -> list[int]:
        """Return the indices of the rows that optimizer step `step` was computed with."""
        epoch, num_done = self.locate(step - 1)
        sampler = self._batches.batch_sampler
        epoch_now = sampler.epoch
        sampler.set_epoch(epoch)
        rows = [row for micro_batch in sampler.windows()[num_done] for row in micro_batch]
        sampler.set_epoch(epoch_now)
        return rows
