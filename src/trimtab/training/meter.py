"""Sums of loss, tokens and time between two reports. Reading or saving them is a host-device sync."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.engine.engine import Engine
from trimtab.training.step import StepResult


class Meter:
    """Count the work of all processes of a run. Training time excludes evaluations and saves."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_tokens: torch.Tensor | int = 0
        self._began = time.monotonic()
        self._paused_s = 0.0
        self._is_started = False
        self._before_s = 0.0  # training time of earlier sessions
        self._results: list[StepResult] = []  # since the last report
        self._last = (0.0, 0)  # training time and tokens at the last report
        self._of_all: list[dict[str, Any]] | None = None

    def start(self) -> None:
        """Start to measure the time of this session."""
        self._began, self._paused_s, self._is_started = time.monotonic(), 0.0, True

    def seconds(self) -> float:
        """Return the training time, including that of the sessions before a resume."""
        return self._before_s + self.session_seconds() - self._paused_s

    def session_seconds(self) -> float:
        """Return the time since this session started, including evaluations and saves."""
        return time.monotonic() - self._began

    def add(self, result: StepResult) -> None:
        """Add the result of a step."""
        self._num_tokens = self._num_tokens + result.num_tokens
        self._results.append(result)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of a block from the training time."""
        since = time.monotonic()
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - since

    def read(self) -> tuple[float, float | None, float]:
        """Return mean loss, last gradient norm and tokens per second since the last call, over all processes."""
        results, self._results = self._results, []
        weight = float(sum(result.weight for result in results))
        loss_sum = float(torch.stack([result.loss_sum for result in results]).sum())
        norm = results[-1].grad_norm
        num_tokens = int(self._num_tokens)
        if self._engine.use_distributed:
            sums = torch.tensor([loss_sum, weight, num_tokens], dtype=torch.float64)
            loss_sum, weight, num_tokens = self._engine.reduce(sums).tolist()
        seconds, tokens = self.seconds() - self._last[0], num_tokens - self._last[1]
        self._last = (self.seconds(), int(num_tokens))
        loss = loss_sum / weight if weight else math.nan
        return loss, None if norm is None else float(norm), tokens / max(seconds, 1e-9)

    def tokens_of_all(self) -> int:
        """Return the tokens trained on so far by all processes."""
        return int(self._engine.reduce(torch.tensor(int(self._num_tokens), dtype=torch.int64)))

    def share(self) -> None:
        """Send the sums of all processes to the main process, which is about to save them."""
        self._of_all = self._engine.gather_for_metrics([self._own()], use_gather_object=True)

    def _own(self) -> dict[str, Any]:
        norm = self._results[-1].grad_norm if self._results else None
        return {
            "num_tokens": int(self._num_tokens),
            "loss_sums": torch.stack([result.loss_sum for result in self._results]).cpu() if self._results else None,
            "weights": [float(result.weight) for result in self._results],
            "grad_norm": None if norm is None else float(norm),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of all processes, step by step: adding partial sums would round differently."""
        of_all, self._of_all = self._of_all or [self._own()], None
        return {"seconds": self.seconds(), "last": list(self._last), "of_all": of_all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; if the number of processes differs, the main one takes all sums."""
        # the clock of a running session continues: this may be a rewind
        passed_s = self.session_seconds() - self._paused_s if self._is_started else 0.0
        self._before_s, self._last = state["seconds"] - passed_s, (state["last"][0], state["last"][1])
        of_all = state["of_all"]
        if len(of_all) == self._engine.num_processes:
            mine = [of_all[self._engine.process_index]]
        else:
            mine = of_all if self._engine.is_main_process else []
        self._num_tokens = sum(one["num_tokens"] for one in mine)
        self._results = [
            StepResult(loss_sum.to(self._engine.device), weight, _as_tensor(one["grad_norm"]), 0)
            for one in mine
            for loss_sum, weight in zip(one["loss_sums"] if one["weights"] else (), one["weights"], strict=True)
        ]


def _as_tensor(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor(value)
