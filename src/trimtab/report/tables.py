"""A comparison as tables, for the terminal and for Markdown, and as the files of its folder."""

import json
from collections.abc import Sequence
from pathlib import Path

from trimtab.report.anatomy import PARTS
from trimtab.report.compare import GIB, MIB, Comparison, Outcome, Spread
from trimtab.report.verdict import verdict

Table = tuple[list[str], list[list[str]]]


def main_table(comparison: Comparison) -> Table:
    """Return speed, peak memory, loss and metric of each variant: medians with minimum and maximum."""
    unit, unit_name = unit_of(comparison)
    has_device = any(outcome.spread("allocated") for outcome in comparison.outcomes)
    names = {"allocated": "peak", "reserved": "reserved", "process": "host"}
    if not has_device:
        names = {"tensors": "tensors", "process": "process"}
    memory = [number for number in names if any(outcome.spread(number) for outcome in comparison.outcomes)]
    metric = next((run.metric for outcome in comparison.outcomes for run in outcome.runs if run.metrics), "")
    header = ["variant", "samples/s", "tokens/s", "step ms", *(f"{names[number]} {unit_name}" for number in memory)]
    header += ["loss", *([f"eval {metric}"] if metric else [])]
    rows = []
    for outcome in comparison.outcomes:
        if not outcome.runs:
            rows.append([outcome.name, "failed" if outcome.failure else "not run", *[""] * (len(header) - 2)])
            continue
        row = [outcome.name, _cell(outcome, "samples/s", 1), _cell(outcome, "tokens/s", 0)]
        row += [_cell(outcome, "step ms", 1), *(_cell(outcome, number, 2, unit) for number in memory)]
        row += [_cell(outcome, "loss", 4), *([_cell(outcome, "metric", 4)] if metric else [])]
        row[0] += f" (after {len(outcome.runs)}: {outcome.failure})" if outcome.failure else ""
        rows.append(row)
    return header, rows


def anatomy_table(comparison: Comparison) -> Table:
    """Return the composition of memory at its peak, with a column for each part."""
    unit, unit_name = unit_of(comparison)
    found = [(outcome.name, outcome.anatomy) for outcome in comparison.outcomes if outcome.anatomy is not None]
    parts = [part for part in PARTS if any(anatomy.parts().get(part) for _, anatomy in found)]
    header = [f"at the peak, {unit_name}", *parts, "sum"]
    rows = []
    for name, anatomy in found:
        sizes = anatomy.parts()
        cells = [sizes.get(part) for part in parts]
        total = sum(size for part, size in sizes.items() if size is not None and part in PARTS)
        rows.append([name, *("" if size is None else f"{size / unit:,.2f}" for size in cells), f"{total / unit:,.2f}"])
    return header, rows


def unit_of(comparison: Comparison) -> tuple[int, str]:
    """Return the unit of memory: GiB, or MiB if all peaks are smaller than 1 GiB."""
    peaks = [outcome.memory.median for outcome in comparison.outcomes if outcome.memory is not None]
    return (GIB, "GiB") if peaks and max(peaks) >= GIB else (MIB, "MiB")


def _cell(outcome: Outcome, number: str, places: int, unit: float = 1.0) -> str:
    spread: Spread | None = outcome.spread(number)
    return "" if spread is None else spread.written(places, unit)


def _how_often(num_repeats: int) -> str:
    if num_repeats == 1:
        return "One run of each, so the spread is unknown"
    return f"Medians of {num_repeats} runs, minimum and maximum in brackets"


def notes(comparison: Comparison) -> list[str]:
    """Return the notes below the tables: the protocol, failures and other remarks."""
    found = [
        f"{_how_often(comparison.protocol['repeats'])}; "
        f"{comparison.protocol['steps']} steps, the first {comparison.protocol['warmup steps']} not timed; "
        f"{comparison.protocol['each run']}. The loss is the mean of the last tenth of the steps."
    ]
    if not comparison.is_complete:
        found.append("Stopped before all runs were done.")
    for outcome in comparison.outcomes:
        if outcome.failure:
            found.append(f"{outcome.name}: {outcome.failure}")
        anatomy, peak = outcome.anatomy, outcome.spread("allocated")
        if anatomy is not None and peak is not None and anatomy.allocated < 0.99 * peak.median:
            share = anatomy.allocated / peak.median
            found.append(f"The parts of {outcome.name} are from a step that reached {share:.0%} of the peak.")
    return found


def markdown(comparison: Comparison, title: str, plots: Sequence[str] = ()) -> str:
    """Return the whole comparison as a Markdown page."""
    tables = [markdown_table(*main_table(comparison))]
    if any(outcome.anatomy for outcome in comparison.outcomes):
        tables.append(markdown_table(*anatomy_table(comparison)))
    facts = [f"- {name}: {value}" for name, value in comparison.surroundings.items()]
    pictures = [f"![{Path(plot).stem}]({plot})" for plot in plots]
    blocks = [f"# {title}", verdict(comparison), *tables, *notes(comparison), *pictures, "\n".join(facts)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown, with right-aligned numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_folder(comparison: Comparison, folder: Path, title: str) -> list[Path]:
    """Write results.json, report.html, results.md and the plots, and return the files."""
    from trimtab.report.page.comparison_page import comparison_page
    from trimtab.report.page.document import PAGE
    from trimtab.report.plots import draw

    written = [folder / "results.json", folder / PAGE]
    written[0].write_text(json.dumps(comparison.as_dict(), indent=1), encoding="utf-8")
    written[1].write_text(comparison_page(comparison, title), encoding="utf-8")
    plots = draw(comparison, folder)
    page = folder / "results.md"
    page.write_text(markdown(comparison, title, [plot.name for plot in plots]), encoding="utf-8")
    return [*written, page, *plots]
