"""The data of a comparison: variants of a recipe, and measurements with their spread."""

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
    """A changed recipe: a name, and the keys that differ."""

    name: str
    changes: Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """The median, minimum and maximum of several runs."""

    median: float
    low: float
    high: float
    num_runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return the spread of values, ignoring NaN; None if there are none."""
        known = [value for value in values if not math.isnan(value)]
        return cls(statistics.median(known), min(known), max(known), len(known)) if known else None

    def is_apart_from(self, other: "Spread") -> bool:
        """Whether the ranges of the two do not overlap."""
        return self.low > other.high or other.low > self.high

    def written(self, places: int = 1, unit: float = 1.0) -> str:
        """Format for a table: the median, and in brackets minimum and maximum if they differ."""
        middle, low, high = (f"{value / unit:,.{places}f}" for value in (self.median, self.low, self.high))
        return middle if low == high else f"{middle} ({low}–{high})"


@dataclass(frozen=True)
class Measurement:
    """The measurements of one run of one variant. Device memory is None on the CPU."""

    repeat: int
    num_steps: int
    step_s: tuple[float, ...]  # duration of each timed step
    num_rows: int  # number of tokens in the timed steps
    num_tokens: int
    host_peak_bytes: int  # resident memory of the process
    allocated_peak_bytes: int | None = None  # peak of the training steps, without evaluation
    reserved_peak_bytes: int | None = None
    outside_bytes: int | None = None  # used on the device outside the allocator
    losses: tuple[tuple[int, float], ...] = ()  # a step, and the mean loss since the previous one
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric: str = ""  # the metric that selects the best model
    anatomy: Anatomy | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    wall_s: float = 0.0  # seconds of the whole process

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Measurement":
        """Read the output of `dataclasses.asdict`, after a round trip through JSON."""
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
        """The total duration of the timed steps."""
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


# The numbers of a comparison, computed from one run.
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
    """A variant and its runs; `failure` explains why there are none, or fewer than requested."""

    variant: Variant
    runs: tuple[Measurement, ...] = ()
    failure: str = ""

    @property
    def name(self) -> str:
        """The name of the variant."""
        return self.variant.name

    def spread(self, number: str) -> Spread | None:
        """Return the spread of one of `NUMBERS` over the runs; None if it was not measured."""
        runs = self.runs
        if number == "process":  # a run whose memory was recorded also holds the record in memory
            runs = tuple(run for run in runs if run.anatomy is None) or runs
        return Spread.of([NUMBERS[number](run) for run in runs])

    @property
    def memory(self) -> Spread | None:
        """The peak by which variants are compared: allocated device memory; on the CPU, the tensors of a step."""
        return self.spread("allocated") or self.spread("tensors") or self.spread("process")

    @property
    def anatomy(self) -> Anatomy | None:
        """The composition of memory at its peak, from the first run that recorded it."""
        return next((run.anatomy for run in self.runs if run.anatomy is not None), None)


@dataclass(frozen=True)
class Comparison:
    """The results of all variants. All others are compared with the first one."""

    outcomes: tuple[Outcome, ...]
    protocol: Mapping[str, Any]
    surroundings: Mapping[str, str]
    recipe: Mapping[str, Any]
    is_complete: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the numbers of the tables and those of each run."""
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
    """Replace numbers that are not finite, which JSON does not have, with None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
