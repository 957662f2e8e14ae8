"""The text of progress lines: one format for steps, one for evaluations."""

import math
from dataclasses import dataclass

from trimtab.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class StepLine:
    """The metrics of a run after an optimizer step."""

    step: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    memory_bytes: int
    memory_share: float | None
    num_skipped: int
    seconds_left: float


def step_text(line: StepLine, num_steps: int) -> str:
    """Format a step."""
    return " · ".join([f"step {line.step}/{num_steps}", metrics_text(line), time_left_text(line)])


def metrics_text(line: StepLine) -> str:
    """Format the metrics of a step, without its number and the time left."""
    memory = format_bytes(line.memory_bytes)
    if line.memory_share is not None:
        memory += f" ({line.memory_share:.0%})"
    parts = [
        f"epoch {line.epoch:.2f}",
        f"loss {_precise(line.loss)}",
        f"lr {line.lr:.1e}" if line.lr else "lr 0",
        "" if line.grad_norm is None else f"grad norm {_short(line.grad_norm)}",
        f"{line.tokens_per_s:,.0f} tokens/s",
        memory,
        f"skipped {line.num_skipped}",
    ]
    return " · ".join(filter(None, parts))


def time_left_text(line: StepLine) -> str:
    """Format the time left; in whole minutes if it is at least one minute."""
    seconds = line.seconds_left
    return f"{format_seconds(round(seconds) if seconds < 60 else 60 * round(seconds / 60))} left"


def evaluation_text(metrics: dict[str, float], step: int, improved: bool) -> str:
    """Format an evaluation."""
    values = [f"{name} {_precise(value)}" for name, value in metrics.items()]
    return " · ".join([f"evaluation at step {step}", *values, *(["best so far"] if improved else [])])


def _precise(value: float) -> str:
    """Format with three decimals; small values in scientific notation; nan and inf as words."""
    return f"{value:.3f}" if not math.isfinite(value) or value == 0 or abs(value) >= 0.01 else f"{value:.2e}"


def _short(value: float) -> str:
    return f"{value:#.2g}" if abs(value) < 10 else f"{value:,.0f}"
