"""A comparison of variants as a page."""

from collections.abc import Mapping
from typing import Any

from trimtab.recipe.yaml_text import as_yaml
from trimtab.report.anatomy import PARTS
from trimtab.report.compare import Comparison
from trimtab.report.page.charts import chart, places
from trimtab.report.page.document import bars, document, escape, fold, navigation, paragraph, section, table, tiles
from trimtab.report.page.memory_bars import memory_bars
from trimtab.report.tables import anatomy_table, main_table, notes, unit_of
from trimtab.report.verdict import verdict


def comparison_page(comparison: Comparison, title: str) -> str:
    """Return the page of a comparison."""
    ran = [outcome for outcome in comparison.outcomes if outcome.runs]
    losses = [(outcome.name, number, outcome.runs[0].losses) for number, outcome in enumerate(ran)]
    charts = [chart("loss", "Training loss, first run of each variant", losses)]
    charts = [one for one in charts if one["series"]]
    titled = [
        ("results", "Results", table(*main_table(comparison)) + "".join(paragraph(line) for line in notes(comparison))),
        ("memory", "Memory at the peak of a step", _memory(comparison)),
        ("speed", "Speed", _speed(comparison)),
        ("curves", "Curves", places(charts)),
        ("variants", "Variants", _variants(comparison)),
        ("surroundings", "Environment", table(["", ""], [list(row) for row in comparison.surroundings.items()], "h-")),
        ("recipe", "Recipe", table(["key", "value"], _flat(comparison.recipe), "kv")),
    ]
    state = "" if comparison.is_complete else '<span class="state stopped">stopped</span>'
    body = [f"<h1>{escape(title)}{state}</h1>", paragraph(verdict(comparison)), _best(comparison), navigation(titled)]
    body += [section(*parts) for parts in titled]
    return document(f"{title} – trimtab", "\n".join(part for part in body if part), charts)


def _best(comparison: Comparison) -> str:
    """Return the fastest variant, the smallest and the one with the lowest loss; empty if fewer than two ran."""
    ran = [outcome for outcome in comparison.outcomes if outcome.runs]
    if len(ran) < 2:
        return ""
    unit, unit_name = unit_of(comparison)
    speeds = [(outcome, spread) for outcome in ran if (spread := outcome.spread("samples/s")) is not None]
    sizes = [(outcome, spread) for outcome in ran if (spread := outcome.memory) is not None]
    losses = [(outcome, spread) for outcome in ran if (spread := outcome.spread("loss")) is not None]
    facts = []
    if speeds:
        outcome, spread = max(speeds, key=lambda pair: pair[1].median)
        facts.append(("fastest", outcome.name, f"{spread.written(1)} samples/s"))
    if sizes:
        outcome, spread = min(sizes, key=lambda pair: pair[1].median)
        facts.append(("least memory", outcome.name, f"{spread.written(2, unit)} {unit_name}"))
    if losses:
        outcome, spread = min(losses, key=lambda pair: pair[1].median)
        facts.append(("lowest training loss", outcome.name, spread.written(4)))
    return tiles(facts)


def _memory(comparison: Comparison) -> str:
    found = [(each.name, each.anatomy.parts()) for each in comparison.outcomes if each.anatomy is not None]
    if not found:
        return ""
    numbers = fold("Numbers", table(*anatomy_table(comparison)))
    return memory_bars([(name, _device_parts(parts)) for name, parts in found]) + numbers


def _device_parts(parts: Mapping[str, int | None]) -> dict[str, int | None]:
    """Return the parts on the device, without negative ones, which can result from differences of measurements."""
    return {name: size for name, size in parts.items() if name in PARTS and size is not None and size > 0}


def _speed(comparison: Comparison) -> str:
    number = "tokens/s" if any(outcome.spread("tokens/s") for outcome in comparison.outcomes) else "samples/s"
    rows = []
    for outcome in comparison.outcomes:
        speed = outcome.spread(number)
        if speed is not None:
            title = f"{speed.num_runs} runs, {speed.low:,.0f} to {speed.high:,.0f}"
            rows.append((outcome.name, [(speed.median, "var(--s0)", title)], speed.written(0)))
    return (
        bars(rows) + paragraph(f"{number}: median of the runs, minimum and maximum in brackets.", "soft")
        if rows
        else ""
    )


def _variants(comparison: Comparison) -> str:
    keys = list(dict.fromkeys(key for outcome in comparison.outcomes for key in outcome.variant.changes))
    rows = [
        [outcome.name, *(_written(outcome.variant.changes, key) for key in keys), outcome.failure]
        for outcome in comparison.outcomes
    ]
    if any(outcome.failure for outcome in comparison.outcomes):
        return table(["variant", *keys, "problem"], rows, "h" + "v" * len(keys) + "-")
    return table(["variant", *keys], [row[:-1] for row in rows], "h" + "v" * len(keys))


def _written(changes: Mapping[str, Any], key: str) -> str:
    return as_yaml(changes[key]) if key in changes else "–"


def _flat(values: Any, prefix: str = "") -> list[list[str]]:
    if not isinstance(values, Mapping) or not values:
        return [[prefix.removesuffix("."), as_yaml(values)]]
    return [row for key, value in values.items() for row in _flat(value, f"{prefix}{key}.")]
