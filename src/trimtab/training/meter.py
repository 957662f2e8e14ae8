"""Sums between two looks: loss, tokens, time. The device is read only when somebody looks, or when a state is saved."""

import math
import time
from typing import Any

import torch

from trimtab.engine.engine import Engine
from trimtab.training.step import StepResult


class Meter:
    """Counts what a run does. Training time leaves evaluations out.

    Args:
        engine: Knows the other processes, whose sums belong to the same run.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_tokens: torch.Tensor | int = 0
        self._began = time.monotonic()
        self._paused_s = 0.0
        self._is_started = False
        self._before_s = 0.0  # spent by the processes that this one resumes
        self._results: list[StepResult] = []  # since the last look
        self._last = (0.0, 0)
        self._of_all: list[dict[str, Any]] | None = None

    def start(self) -> None:
        """The run begins, or goes on, now."""
        self._began, self._paused_s, self._is_started = time.monotonic(), 0.0, True

    def seconds(self) -> float:
        """Time spent on training, also by processes that this one resumes."""
        return self._before_s + self.session_seconds() - self._paused_s

    def session_seconds(self) -> float:
        """Time since this process began to train, whatever it was spent on."""
        return time.monotonic() - self._began

    def add(self, result: StepResult) -> None:
        """A step was taken."""
        self._num_tokens = self._num_tokens + result.num_tokens
        self._results.append(result)

    def paused(self) -> "_Pause":
        """A context whose time does not count as training."""
        return _Pause(self)

    def read(self) -> tuple[float, float | None, float]:
        """Mean loss and last gradient norm since the last look, and tokens a second; over all processes."""
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
        """Tokens trained on so far, by every process."""
        return int(self._engine.reduce(torch.tensor(int(self._num_tokens), dtype=torch.int64)))

    def share(self) -> None:
        """Let the first process know what the others have counted, for a state that it is about to save."""
        self._of_all = self._engine.gather_for_metrics([self._own()], use_gather_object=True)

    def _own(self) -> dict[str, Any]:
        return {
            "num_tokens": int(self._num_tokens),
            "loss_sums": torch.stack([result.loss_sum for result in self._results]).cpu() if self._results else None,
            "weights": [float(result.weight) for result in self._results],
            "grad_norm": _number(self._results[-1].grad_norm) if self._results else None,
        }

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know; steps one by one, because sums of sums would round in another way."""
        of_all, self._of_all = self._of_all or [self._own()], None
        return {"seconds": self.seconds(), "last": list(self._last), "of_all": of_all}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; with another number of processes the first one takes what all counted."""
        # the clock of this session goes on, should it be a step back in the middle of it
        passed_s = self.session_seconds() - self._paused_s if self._is_started else 0.0
        self._before_s, self._last = state["seconds"] - passed_s, (state["last"][0], state["last"][1])
        of_all = state["of_all"]
        if len(of_all) == self._engine.num_processes:
            mine = [of_all[self._engine.process_index]]
        else:
            mine = of_all if self._engine.is_main_process else []
        self._num_tokens = sum(one["num_tokens"] for one in mine)
        self._results = [
            StepResult(loss_sum.to(self._engine.device), weight, _tensor(one["grad_norm"]), 0)
            for one in mine
            for loss_sum, weight in zip(one["loss_sums"] if one["weights"] else (), one["weights"], strict=True)
        ]


class _Pause:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        self._meter._paused_s += time.monotonic() - self._since


def _number(value: torch.Tensor | None) -> float | None:
    return None if value is None else float(value)


def _tensor(value: float | None) -> torch.Tensor | None:
    return None if value is None else torch.tensor(value)
