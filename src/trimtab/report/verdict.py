"""Summarize a comparison in one sentence. A difference within the spread of the repeats is not reported."""

from trimtab.report.compare import Comparison, Outcome, Spread

_SAME = 0.005  # differences below half a percent do not matter, even if they are significant


def verdict(comparison: Comparison) -> str:
    """Compare the variants with the first one that ran, and name those that did not run."""
    ran = [outcome for outcome in comparison.outcomes if outcome.runs]
    sentences = []
    if len(ran) < 2:
        sentences.append(f"only {ran[0].name} ran: nothing to compare" if ran else "no variant ran")
    else:
        base, others = ran[0], _worth_naming(ran)
        sentences += [f"{other.name} {_against(other, base)}" for other in others]
        num_unnamed = len(ran) - 1 - len(others)
        remarks = [f"the smallest and the fastest of {len(ran)} that ran"] if num_unnamed else []
        if min(len(outcome.runs) for outcome in ran) < 2:
            remarks.append("from one run each, so the spread is unknown")
        sentences[-1] += f" ({'; '.join(remarks)})" if remarks else ""
    failed = [outcome.name for outcome in comparison.outcomes if not outcome.runs]
    if failed and ran:
        sentences.append(f"{' and '.join(failed)} did not run")
    return "; ".join(sentences) + "."


def _worth_naming(ran: list[Outcome]) -> list[Outcome]:
    """Return the variants that the sentence names: the second of two, or the smallest and the fastest of more."""
    base, *others = ran
    if len(others) == 1:
        return others
    smallest = min(others, key=lambda outcome: _middle(outcome.memory))
    fastest = max(others, key=lambda outcome: _middle(outcome.spread("samples/s")))
    return [smallest] if smallest is fastest else [smallest, fastest]


def _middle(spread: Spread | None) -> float:
    return float("nan") if spread is None else spread.median


def _against(other: Outcome, base: Outcome) -> str:
    clauses = [
        # on the CPU only the memory of tensors is comparable; that of the process is in the table
        _memory_clause(
            other.memory, base.memory, base.name, "memory" if other.spread("allocated") else "tensor memory"
        ),
        _speed_clause(other.spread("samples/s"), base.spread("samples/s"), base.name),
        _loss_clause(other, base),
    ]
    return ", ".join(clause for clause in clauses if clause)


def _is_same(one: Spread, other: Spread) -> bool:
    close = abs(one.median - other.median) <= _SAME * abs(other.median)
    return close or not one.is_apart_from(other)


def _memory_clause(one: Spread | None, other: Spread | None, name: str, what: str) -> str:
    if one is None or other is None:
        return ""
    if _is_same(one, other):
        return f"needs as much {what} as {name}"
    change = one.median / other.median - 1
    return f"needs {abs(change):.0%} {'more' if change > 0 else 'less'} {what} than {name}"


def _speed_clause(one: Spread | None, other: Spread | None, name: str) -> str:
    if one is None or other is None:
        return ""
    if _is_same(one, other):
        return "is as fast within the spread"
    ratio = one.median / other.median
    if ratio >= 1.5:
        return f"is {ratio:.1f} × as fast"
    return f"is {abs(ratio - 1):.0%} {'faster' if ratio > 1 else 'slower'}"


def _loss_clause(other: Outcome, base: Outcome) -> str:
    one, first = other.spread("loss"), base.spread("loss")
    if one is None or first is None:
        return ""
    num_steps = base.runs[0].num_steps
    if one.median == first.median:
        return f"and has the same loss after {num_steps} steps"
    if not one.is_apart_from(first):
        return f"and its loss after {num_steps} steps is the same within the spread"
    change = one.median / first.median - 1 if first.median else float("inf")
    size = "less than 0.1%" if abs(change) < 0.001 else f"{abs(change):.1%}"
    return f"and its loss after {num_steps} steps is {size} {'higher' if change > 0 else 'lower'}"
