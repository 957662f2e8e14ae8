"""The two plots of a comparison: memory by its parts next to speed, and the loss curves."""

from pathlib import Path
from typing import Any

from trimtab.report.anatomy import PARTS
from trimtab.report.compare import Comparison, Outcome
from trimtab.report.part_colors import LIGHT
from trimtab.report.tables import unit_of

_INCHES_A_BAR = 0.42
_LINES = ("-", "--", ":")


def draw(comparison: Comparison, folder: Path) -> list[Path]:
    """Write memory-and-speed.png and loss.png and return the files; none if no variant ran."""
    ran = [outcome for outcome in comparison.outcomes if outcome.runs]
    if not ran:
        return []
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.8 + _INCHES_A_BAR * len(ran)
    bars, curves = Figure(figsize=(11, height), layout="constrained"), Figure(figsize=(8, 4.5), layout="constrained")
    left, right = bars.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _draw_memory(left, ran, *unit_of(comparison))
    bars.legend(fontsize="small", loc="outside upper center", ncols=len(PARTS) // 2)
    _draw_speed(right, ran)
    _draw_losses(curves.subplots(), ran)
    files = [folder / "memory-and-speed.png", folder / "loss.png"]
    for figure, file in zip((bars, curves), files, strict=True):
        FigureCanvasAgg(figure).print_png(str(file))  # type: ignore[no-untyped-call]
    return files


def _draw_memory(axes: Any, ran: list[Outcome], unit: int, unit_name: str) -> None:
    shown: set[str] = set()
    for place, outcome in enumerate(ran):
        at = 0.0
        parts = outcome.anatomy.parts() if outcome.anatomy is not None else {}
        for part, size in parts.items():
            if size:
                label = part if part not in shown else None
                axes.barh(place, size / unit, left=at, color=LIGHT[part], label=label, height=0.7)
                shown.add(part)
                at += size / unit
        if outcome.anatomy is None and outcome.memory is not None:
            axes.barh(place, outcome.memory.median / unit, color=LIGHT["temporaries"], height=0.7)
    axes.set_yticks(range(len(ran)), [outcome.name for outcome in ran])
    axes.invert_yaxis()
    axes.set_xlabel(f"memory at the peak of a step, {unit_name}")


def _draw_speed(axes: Any, ran: list[Outcome]) -> None:
    number = "tokens/s" if any(outcome.spread("tokens/s") for outcome in ran) else "samples/s"
    for place, outcome in enumerate(ran):
        speed = outcome.spread(number)
        if speed is not None:
            beyond = [[speed.median - speed.low], [speed.high - speed.median]]
            axes.barh(place, speed.median, xerr=beyond, color="#7d8f69", ecolor="#333333", capsize=3, height=0.7)
    axes.set_xlabel(f"{number}\n(error bars: minimum and maximum of the runs)")


def _draw_losses(axes: Any, ran: list[Outcome]) -> None:
    for place, outcome in enumerate(ran):
        steps, losses = zip(*outcome.runs[0].losses, strict=True) if outcome.runs[0].losses else ((), ())
        style = _LINES[place // 10 % len(_LINES)]  # there are ten colors
        axes.plot(steps, losses, style, label=outcome.name, linewidth=1.4)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(fontsize="small")
