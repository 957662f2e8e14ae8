"""The text of a ladder: a table with bars, the reason for the chosen row, and changes that would help if none fits."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.planner.search import Row
from trimtab.techniques.apply import describe, describe_method
from trimtab.techniques.base import StepSpec
from trimtab.units import format_bytes, format_seconds

GIB = 2**30
# a letter for each part of the anatomy, in the order of the bar
LETTERS = {
    "weights": "w",
    "gradients": "g",
    "optimizer state": "o",
    "activations": "a",
    "logits and loss": "l",
    "temporaries": "t",
    "allocator slack": "s",
    "outside the allocator": "x",
}
_WIDE_TERMINAL, _WIDE_BAR, _NARROW_BAR = 120, 32, 20
_MOST_SHOWN = 12
_WORTH_NAMING = 1.01  # times the speed of the chosen plan: smaller differences are within the noise of a prediction


@dataclass(frozen=True)
class Rung:
    """A row of the ladder with everything that its table shows.

    Attributes:
        spec: The specification of the step.
        parts: Bytes by anatomy, including the allocator's slack and device memory outside the allocator.
        tokens_s: Tokens per second.
        step_s: Seconds per step.
        run_s: Seconds of the whole run; None if its length is unknown.
        fits: Whether it runs within the budget.
        is_chosen: Whether it is the chosen plan.
        is_alternative: Whether it uses another method, which a plan never chooses.
        most_rows: With `--max-batch`, the largest batch that fits as one micro-batch with these techniques.
        longest: With `--longest`, the longest rows that fit with these techniques and the smallest micro-batch.
        longest_host_bytes: The host memory that those rows need.
        excess_host_bytes: The host memory that it needs, if it fits on the device, but not on the host.
    """

    spec: StepSpec
    parts: Mapping[str, int]
    tokens_s: float
    step_s: float
    run_s: float | None
    fits: bool
    is_chosen: bool = False
    is_alternative: bool = False
    most_rows: int | None = None
    longest: int | None = None
    longest_host_bytes: int | None = None
    excess_host_bytes: int | None = None

    @property
    def verdict(self) -> str:
        """What does not fit; empty if it fits."""
        if self.excess_host_bytes is not None:
            return f"needs {format_bytes(self.excess_host_bytes)} on the host"
        return "" if self.fits else "too large"

    @property
    def total_bytes(self) -> int:
        """Bytes needed on the device."""
        return sum(self.parts.values())


def rung(row: Row, needed_bytes: int, num_steps: int | None) -> Rung:
    """Build the rung of a search row.

    Args:
        row: The row.
        needed_bytes: The smallest allocator limit under which it runs.
        num_steps: Steps of the run; None if unknown.
    """
    estimate = row.estimate
    slack = max(0, needed_bytes - estimate.allocated_bytes)
    parts = {**estimate.parts, "allocator slack": slack, "outside the allocator": estimate.outside_bytes}
    run_s = None if num_steps is None else estimate.start_s + num_steps * estimate.step_s
    excess = estimate.excess_host_bytes
    return Rung(row.spec, parts, estimate.tokens_s, estimate.step_s, run_s, estimate.fits, excess_host_bytes=excess)


def words_of(spec: StepSpec, reference: StepSpec | None = None) -> str:
    """Describe a specification, such as "micro-batch 4, recompute all, loss chunked".

    Args:
        spec: The specification.
        reference: The recipe's own values, which are left out of the text.
    """
    method = describe_method(spec)
    others = [words for words in describe(spec, reference or spec) if words not in method]
    return ", ".join([*method, f"micro-batch {spec.micro_batch}", *others])


def shown(rungs: Sequence[Rung]) -> list[Rung]:
    """At most a dozen rungs. First dropped: rungs beaten by the same techniques, then the largest that do not fit."""
    kept = list(rungs)
    while len(kept) > _MOST_SHOWN:
        own = [one for one in kept if not one.is_alternative]
        dispensable = [one for one in own[1:] if not one.is_chosen and one is not _smallest(own)]
        if not dispensable:
            break
        drop = max(dispensable, key=lambda one: (_is_outdone(one, own), not one.fits, one.total_bytes))
        kept = [one for one in kept if one is not drop]
    return kept


def _is_outdone(one: Rung, others: Sequence[Rung]) -> bool:
    """Whether another micro-batch size with the same techniques makes this rung redundant."""
    for other in others:
        if other is not one and other.spec.values == one.spec.values:
            if one.fits and other.fits and other.tokens_s > one.tokens_s:
                return True
            if not one.fits and not other.fits and other.total_bytes < one.total_bytes:
                return True
    return False


def _smallest(rungs: Sequence[Rung]) -> Rung:
    return min(rungs, key=lambda one: one.total_bytes)


def table(rungs: Sequence[Rung], budget_bytes: int, reference: StepSpec) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows for the terminal: figures first, and last the plan, whose words may be many."""
    has_run = any(one.run_s is not None for one in rungs)
    asked = [(name, key) for name, key in (("largest batch", "most_rows"), ("longest rows", "longest"))]
    asked = [(name, key) for name, key in asked if any(getattr(one, key) is not None for one in rungs)]
    has_host = len({one.longest_host_bytes for one in rungs}) > 1
    unit, unit_name = unit_of([one.total_bytes for one in rungs])
    header = ["", unit_name, "tokens/s", *(["run"] if has_run else []), *(name for name, _ in asked)]
    header += [*(["host memory"] if has_host else []), "", "memory (| is the budget)", "plan"]
    whole = max([budget_bytes, *(one.total_bytes for one in rungs)])
    if budget_bytes > 4 * max(one.total_bytes for one in rungs):  # otherwise the bars would be too short to read
        whole = max(one.total_bytes for one in rungs)
    rows = []
    for one in rungs:
        cells = ["→" if one.is_chosen else "", f"{one.total_bytes / unit:,.2f}", f"{one.tokens_s:,.0f}"]
        cells += [format_seconds(one.run_s) if one.run_s is not None else ""] if has_run else []
        cells += [f"{getattr(one, key):,}" if getattr(one, key) is not None else "none" for _, key in asked]
        if has_host:
            cells += ["" if one.longest_host_bytes is None else format_bytes(one.longest_host_bytes)]
        cells += [one.verdict, bar(one.parts, budget_bytes, whole), words_of(one.spec, reference)]
        rows.append(cells)
    return header, rows


def unit_of(sizes: Sequence[int]) -> tuple[int, str]:
    """GiB, or MiB if all values are small."""
    return (GIB, "GiB") if max(sizes) >= GIB else (2**20, "MiB")


def bar(parts: Mapping[str, int], budget_bytes: int, whole_bytes: int) -> str:
    """Return the anatomy as a row of letters; `|` marks the end of the budget."""
    width = _WIDE_BAR if shutil.get_terminal_size().columns >= _WIDE_TERMINAL else _NARROW_BAR
    cells, filled, undrawn = "", 0, {}
    for part, letter in LETTERS.items():
        filled += parts.get(part, 0)
        undrawn[letter] = parts.get(part, 0)
        num_new = round(filled / whole_bytes * width) - len(cells)
        if num_new > 0:  # parts smaller than a cell share one, which has the letter of the largest
            cells += max(undrawn, key=undrawn.__getitem__) + letter * (num_new - 1)
            undrawn = {}
    end = int(budget_bytes / whole_bytes * width)
    cells = cells.ljust(width, "·")
    return f"{cells[:end]}|{cells[end:]}" if end <= width else cells


def gib(num_bytes: int) -> str:
    """Format bytes with two decimals; plans often differ only in the second."""
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB else format_bytes(num_bytes)


def legend(rungs: Sequence[Rung]) -> str:
    """Explain the letters that occur in the bars."""
    used = [part for part in LETTERS if any(one.parts.get(part) for one in rungs)]
    return "  ".join(f"{LETTERS[part]} {part}" for part in used)


def reason(rungs: Sequence[Rung], budget_bytes: int, reference: StepSpec) -> str:
    """One sentence: why this row was chosen."""
    chosen = next(one for one in rungs if one.is_chosen)
    room = f"{gib(chosen.total_bytes)} of {gib(budget_bytes)}"
    least = _WORTH_NAMING * chosen.tokens_s
    faster = [one for one in rungs if not one.is_alternative and not one.fits and one.tokens_s >= least]
    words = words_of(chosen.spec, reference)
    if not faster:
        return f"Chosen: {words}: the fastest of all, and it fits ({room})."
    near = min(faster, key=lambda one: one.total_bytes)
    gain = near.tokens_s / chosen.tokens_s - 1
    return (
        f"Chosen: {words}: the fastest that fits ({room}); {words_of(near.spec, reference)} would be "
        f"{gain:.0%} faster and {near.verdict if near.excess_host_bytes else f'needs {gib(near.total_bytes)}'}."
    )


@dataclass(frozen=True)
class Change:
    """A change that the user could make to fit into memory.

    Attributes:
        words: The setting to write.
        total_bytes: Bytes needed with the change.
        fits: Whether that is within the budget.
        excess_host_bytes: The host memory that it needs, if it fits on the device, but not on the host.
    """

    words: str
    total_bytes: int
    fits: bool
    excess_host_bytes: int | None = None

    def __str__(self) -> str:
        host = f", {gib(self.excess_host_bytes)} on the host" if self.excess_host_bytes is not None else ""
        return f"{self.words}: {gib(self.total_bytes)}{host}"


def cannot_fit(
    smallest: Rung,
    name: str,
    budget_bytes: int,
    changes: Sequence[Change],
    reference: StepSpec,
    host: str = "",
    most: int = 3,
) -> str:
    """Error text for a run that does not fit: how much is missing, and changes that would help.

    Args:
        smallest: The plan that needs the least memory.
        name: Name of the device.
        budget_bytes: The budget.
        changes: Changes that were tried; those that fit are listed first.
        reference: The recipe's own values, which are not repeated in the text.
        host: The budget of host memory.
        most: The maximum number of changes to list.
    """
    over = smallest.total_bytes - budget_bytes
    budget = f"the budget of {gib(budget_bytes)} ({name})"
    excess = f"{gib(over)} over {budget}" if over > 0 else f"which leaves no reserve in {budget}"
    if smallest.excess_host_bytes is not None:
        excess = f"and {gib(smallest.excess_host_bytes)} of host memory, over the budget of {host}"
    lines = [
        f"does not fit: needs {gib(smallest.total_bytes)}, {excess}, "
        f"with the smallest plan ({words_of(smallest.spec, reference)})"
    ]
    helping = [one for one in changes if one.fits][:most]
    if helping:
        lines.append("  would fit with:")
        lines += [f"    {one}" for one in helping]
    rest = [one for one in changes if not one.fits][: most - len(helping)]
    if rest:
        lines.append("  still too large with:")
        lines += [f"    {one}" for one in rest]
    return "\n".join(lines)


def as_dict(one: Rung) -> dict[str, object]:
    """A rung as plain values, for JSON."""
    return {
        "chosen": one.is_chosen,
        "fits": one.fits,
        "micro_batch": one.spec.micro_batch,
        **dict(one.spec.values),
        "total_bytes": one.total_bytes,
        "parts": dict(one.parts),
        "step_s": one.step_s,
        "tokens_s": one.tokens_s,
        "run_s": one.run_s,
        **({"largest_batch": one.most_rows} if one.most_rows is not None else {}),
        **({"excess_host_bytes": one.excess_host_bytes} if one.excess_host_bytes is not None else {}),
        **({"longest": one.longest} if one.longest is not None else {}),
        **({"longest_host_bytes": one.longest_host_bytes} if one.longest_host_bytes is not None else {}),
    }
