"""Variants of a recipe beside each other: what was measured, with its spread."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.report.anatomy import Anatomy

GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True)
class Variant:
    """One way to run a recipe: a name, and the keys that differ."""

    name: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """The median of several runs, and the least and the most of them."""

    median: float
    low: float
    high: float
    num_runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """The spread of values; None of none."""
        known = [value for value in values if not math.isnan(value)]
        return cls(statistics.median(known), min(known), max(known), len(known)) if known else None

    def is_apart_from(self, other: "Spread") -> bool:
        """Whether no run of one lies among the runs of the other."""
        return self.low > other.high or other.low > self.high

    def written(self, places: int = 1, unit: float = 1.0) -> str:
        """For a table: the median, and in brackets least and most where they are not the same."""
        middle, low, high = (f"{value / unit:,.{places}f}" for value in (self.median, self.low, self.high))
        return middle if low == high else f"{middle} ({low}–{high})"


@dataclass(frozen=True)
class Measurement:
    """What one run of one variant showed. Bytes of the device are None where it is the CPU."""

    repeat: int
    num_steps: int
    step_s: tuple[float, ...]  # of each timed step
    num_rows: int  # in the timed steps
    num_tokens: int
    host_peak_bytes: int  # resident memory of the process
    allocated_peak_bytes: int | None = None  # in the training steps; evaluation not counted
    reserved_peak_bytes: int | None = None
    outside_bytes: int | None = None  # of the device, outside the allocator
    losses: tuple[tuple[int, float], ...] = ()  # a step, and the mean loss since the one before
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric: str = ""  # the one that would choose the best model
    anatomy: Anatomy | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0  # of the whole process

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Measurement":
        """Read back what `dataclasses.asdict` gave."""
        anatomy = values.get("anatomy")
        return cls(
            **{
                **values,
                "step_s": tuple(values["step_s"]),
                "losses": tuple((int(step), float(loss)) for step, loss in values["losses"]),
                "anatomy": None if anatomy is None else Anatomy(**anatomy),
            }
        )

    @property
    def seconds(self) -> float:
        """The time of all timed steps together."""
        return sum(self.step_s)

    @property
    def final_loss(self) -> float:
        """The mean loss of the last tenth of the steps."""
        begin = self.num_steps - max(1, self.num_steps // 10)
        total, weight, before = 0.0, 0, 0
        for step, loss in self.losses:
            num_inside = max(0, step - max(begin, before))
            total, weight, before = total + loss * num_inside, weight + num_inside, step
        return total / weight if weight else math.nan


# How each number of a comparison is found in one run.
NUMBERS: dict[str, Callable[[Measurement], float]] = {
    "samples/s": lambda run: run.num_rows / run.seconds,
    "tokens/s": lambda run: run.num_tokens / run.seconds,
    "step ms": lambda run: statistics.median(run.step_s) * 1e3,
    "allocated": lambda run: math.nan if run.allocated_peak_bytes is None else run.allocated_peak_bytes,
    "reserved": lambda run: math.nan if run.reserved_peak_bytes is None else run.reserved_peak_bytes,
    "tensors": lambda run: math.nan if run.anatomy is None else run.anatomy.allocated,
    "process": lambda run: run.host_peak_bytes,
    "loss": lambda run: run.final_loss,
    "metric": lambda run: run.metrics.get(run.metric, math.nan),
}


@dataclass(frozen=True)
class Outcome:
    """A variant and its runs; `failure` says why there are none, or fewer than were wanted."""

    variant: Variant
    runs: tuple[Measurement, ...] = ()
    failure: str = ""

    @property
    def name(self) -> str:
        """The name of the variant."""
        return self.variant.name

    def spread(self, number: str) -> Spread | None:
        """One of `NUMBERS` over the runs; None if it was not measured."""
        runs = self.runs
        if number == "process":  # a run whose memory was recorded holds the record too
            runs = tuple(run for run in runs if run.anatomy is None) or runs
        return Spread.of([NUMBERS[number](run) for run in runs])

    @property
    def memory(self) -> Spread | None:
        """The peak that counts: what the allocator of an accelerator handed out; on the CPU the tensors of a step."""
        return self.spread("allocated") or self.spread("tensors") or self.spread("process")

    @property
    def anatomy(self) -> Anatomy | None:
        """What the memory was at its peak, from the first run that looked."""
        return next((run.anatomy for run in self.runs if run.anatomy is not None), None)


@dataclass(frozen=True)
class Comparison:
    """Everything that was found. The first variant is the one that the others are compared with."""

    outcomes: tuple[Outcome, ...]
    protocol: Mapping[str, Any]
    surroundings: Mapping[str, str]
    recipe: Mapping[str, Any]
    is_complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; the numbers of the tables beside those of each run."""
        from trimtab.report.verdict import verdict

        values = {
            "verdict": verdict(self),
            "is_complete": self.is_complete,
            "protocol": dict(self.protocol),
            "surroundings": dict(self.surroundings),
            "recipe": dict(self.recipe),
            "variants": [_outcome_dict(outcome) for outcome in self.outcomes],
        }
        return _finite(values)  # type: ignore[no-any-return]


def _outcome_dict(outcome: Outcome) -> dict[str, Any]:
    spreads = {number: outcome.spread(number) for number in NUMBERS}
    return {
        "name": outcome.name,
        "changes": dict(outcome.variant.changes),
        "failure": outcome.failure,
        "numbers": {number: asdict(spread) for number, spread in spreads.items() if spread is not None},
        "anatomy": None if outcome.anatomy is None else asdict(outcome.anatomy),
        "runs": [asdict(run) for run in outcome.runs],
    }


def _finite(value: Any) -> Any:
    """The same with null for what is no finite number, which JSON cannot say."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
