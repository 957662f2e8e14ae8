"""Draws the memory of a step over time with and without each technique: `python benchmarks/timelines.py [NAME …]`.

Everything is predicted, without a GPU. Each picture is docs/images/technique-NAME.svg.
"""

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.garbage_collection import gc_disabled
from trimtab.planner.anatomy import PARTS
from trimtab.planner.survey import planner_for
from trimtab.planner.target import known_target
from trimtab.recipe.load import load_recipe
from trimtab.report.step_record import Moment

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
RECIPES = ROOT / "benchmarks" / "memory" / "cards"
GPU = "h100"
GIB = 2**30
TEXT, MUTED, SHADE = "#1f2328", "#8c959f", "#f3f4f6"
COLORS = dict(zip(PARTS, ("#57606a", "#bc4c00", "#8250df", "#54aeff", "#1a7f37", "#d4a72c"), strict=True))
LORA = "adapter=lora train.lr=2e-4"
ALL = "memory.gradient_checkpointing=all"
LONG = f"{LORA} {ALL} train.batch_size=1 memory.padding=longest"
FULL = "train.max_grad_norm=null memory.gradient_checkpointing=all"
BATCH = f"{LORA} train.batch_size=8 memory.padding=longest"
PADDED = f"{LORA} memory.padding=longest"
STUDENT = f"model.config.num_hidden_layers=8 memory.padding=longest memory.loss=plain {ALL}"


@dataclass(frozen=True)
class Picture:
    """Panels with a title and settings each, of one model and one batch.

    TEACHER in the settings is a folder with the config of the recipe's model.
    """

    title: str
    panels: tuple[tuple[str, str], ...]
    rows: int = 4
    length: int = 2048
    recipe: str = "llama-1b"


PICTURES = {
    "gradient-checkpointing": Picture(
        "LoRA on a Llama of 1 B, 4 × 2,048 tokens",
        (
            ("gradient_checkpointing: none", LORA),
            ("gradient_checkpointing: {every: 2}", f"{LORA} memory.gradient_checkpointing.every=2"),
            ("gradient_checkpointing: all", f"{LORA} {ALL}"),
        ),
    ),
    "activation-offload": Picture(
        "LoRA on a Llama of 1 B, 1 × 65,536 tokens, every block recomputed",
        (
            ("offload_activations: none", LONG),
            ("offload_activations: all", f"{LONG} memory.offload_activations=all"),
        ),
        rows=1,
        length=65536,
    ),
    "chunked-loss": Picture(
        "LoRA on a Llama of 1 B, 4 × 2,048 tokens, every block recomputed",
        (
            ("loss: plain", f"{LORA} {ALL} memory.loss=plain"),
            ("loss: fused", f"{LORA} {ALL} memory.loss=fused"),
            ("loss: chunked", f"{LORA} {ALL} memory.loss=chunked"),
        ),
    ),
    "sequence-tiles": Picture(
        "LoRA on a Llama of 1 B, 1 × 65,536 tokens, every block recomputed, activations on the host",
        (
            ("tile_tokens: none", f"{LONG} memory.offload_activations=all"),
            ("tile_tokens: 4096", f"{LONG} memory.offload_activations=all memory.tile_tokens=4096"),
        ),
        rows=1,
        length=65536,
    ),
    "weight-update": Picture(
        "All weights of a Llama of 1 B, 4 × 2,048 tokens, every block recomputed, AdamW",
        (
            ("update: device", FULL),
            ("update: in-backward", f"{FULL} memory.update=in-backward"),
            ("update: host", f"{FULL} memory.update=host"),
        ),
    ),
    "adapters": Picture(
        "A Llama of 1 B, 4 × 2,048 tokens, every block recomputed",
        (
            ("all weights", ALL),
            ("adapter: lora", f"{LORA} {ALL}"),
            ("adapter: qlora", f"adapter=qlora train.lr=2e-4 {ALL}"),
        ),
    ),
    "side-network": Picture(
        "A Llama of 1 B, 4 × 2,048 tokens",
        (
            ("adapter: lora", LORA),
            ("adapter: side", "adapter=side train.lr=2e-3"),
        ),
    ),
    "mixed-precision": Picture(
        "All weights of a Llama of 1 B, 4 × 2,048 tokens, AdamW",
        (
            ("precision: fp32", "train.precision=fp32 memory.padding=longest"),
            ("precision: bf16", "train.precision=bf16 memory.padding=longest"),
            ("precision: bf16-pure", "train.precision=bf16-pure memory.padding=longest"),
        ),
    ),
    "gradient-accumulation": Picture(
        "LoRA on a Llama of 1 B, a batch of 8 × 2,048 tokens",
        (
            ("micro_batch: 8", f"{BATCH} memory.micro_batch=8"),
            ("micro_batch: 4", f"{BATCH} memory.micro_batch=4"),
            ("micro_batch: 2", f"{BATCH} memory.micro_batch=2"),
        ),
    ),
    "optimizers": Picture(
        "All weights of a Llama of 1 B, 4 × 2,048 tokens, every block recomputed",
        (
            ("optimizer: adamw", ALL),
            ("optimizer: adamw8bit", f"{ALL} train.optimizer=adamw8bit"),
            ("optimizer: paged-adamw8bit", f"{ALL} train.optimizer=paged-adamw8bit"),
        ),
    ),
    "attention": Picture(
        "LoRA on a Llama of 1 B, 4 × 2,048 tokens",
        (
            ("attention_backend: math", f"{PADDED} memory.attention_backend=math"),
            ("attention_backend: flash", f"{PADDED} memory.attention_backend=flash"),
        ),
    ),
    "distillation": Picture(
        "A Llama of 8 layers learns from one of 16 (1 B), 4 × 2,048 tokens, every block recomputed",
        (
            ("labels alone", STUDENT),
            ("distill", f"{STUDENT} distill.teacher=TEACHER"),
            ("cache: disk, top_k: 64", f"{STUDENT} distill.teacher=TEACHER distill.cache=disk distill.top_k=64"),
        ),
    ),
    "streamed-weights": Picture(
        "LoRA on a Llama of 8 B, 1 × 2,048 tokens, every block recomputed",
        (
            ("stream_weights: none", f"{LORA} {ALL}"),
            ("stream_weights: all", f"{LORA} {ALL} memory.stream_weights=all"),
        ),
        rows=1,
        recipe="llama-8b",
    ),
}


@gc_disabled()
def moments_of(sets: str, picture: Picture) -> list[Moment]:
    """The predicted memory of a step."""
    with tempfile.TemporaryDirectory() as folder:
        return _moments(sets.replace("TEACHER", folder).split(), picture, Path(folder))


def _moments(settings: list[str], picture: Picture, teacher: Path) -> list[Moment]:
    for key in ("memory.micro_batch", "train.batch_size"):
        if not any(text.startswith(f"{key}=") for text in settings):
            settings.append(f"{key}={picture.rows}")
    path = RECIPES / f"{picture.recipe}.yaml"
    config = load_recipe(path, {}, ()).recipe.model.config
    (teacher / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    recipe = load_recipe(path, {}, settings).recipe
    target = known_target(GPU, None)
    planner = planner_for(recipe, target, None, picture.length)
    return planner.prediction(planner.space.reference()).timeline(160, target.device)


def draw(picture: Picture, path: Path) -> None:
    """A panel for each set of settings, with one scale."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"svg.hashsalt": "trimtab", "font.size": 10, "axes.edgecolor": MUTED, "text.color": TEXT}
    pyplot.rcParams["svg.fonttype"] = "none"  # text stays text: rounding below would make outlines of letters vanish
    timelines = [moments_of(sets, picture) for _, sets in picture.panels]
    num_panels = len(timelines)
    figure, panels = pyplot.subplots(1, num_panels, figsize=(9.6, 3.5), facecolor="white", sharey=True)
    top = max(moment.num_bytes for moments in timelines for moment in moments) / GIB
    for axes, moments, (title, _) in zip(panels, timelines, picture.panels, strict=True):
        _draw_panel(axes, moments, title, top, 0.06 * num_panels)
    panels[0].set_ylabel("GiB on the GPU")
    used = [part for part in PARTS if any(moment.parts[part] for moments in timelines for moment in moments)]
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLORS[part]) for part in used]
    figure.legend(handles, used, loc="lower center", ncols=len(used), frameon=False, fontsize=9, handlelength=1.2)
    figure.suptitle(f"{picture.title} (predicted, {GPU.upper()})", fontsize=10, x=0.01, ha="left")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    if path.suffix == ".svg":  # a tenth of a point is enough, and an outline is one line
        path.write_text(re.sub(r"(\d+\.\d)\d+", r"\1", path.read_text()).replace(" \nL ", " L "))


def _draw_panel(axes: Any, moments: list[Moment], title: str, top: float, min_share: float) -> None:
    """Stacked parts over time; a stage with less than `min_share` of it has no room for its name."""
    positions = [moment.position for moment in moments]
    for number in range(len(PARTS), 0, -1):  # each part covers the lower end of those above it
        heights = [sum(moment.parts[part] for part in PARTS[:number]) / GIB for moment in moments]
        axes.fill(*_outline(positions, heights), color=COLORS[PARTS[number - 1]], linewidth=0, zorder=2)
    peak = max(moments, key=lambda moment: moment.num_bytes)
    at = min(max(peak.position, 0.12), 0.88)
    axes.annotate(
        f"{peak.num_bytes / GIB:.1f} GiB", (at, peak.num_bytes / GIB), (0, 4), textcoords="offset points", ha="center"
    )
    for number, (stage, begin, end) in enumerate(_stages(moments)):
        if number % 2:
            axes.axvspan(begin, end, color=SHADE, zorder=0)
        options = {"ha": "center", "va": "top", "fontsize": 9, "color": "#57606a"}
        height = max(moment.num_bytes for moment in moments if begin <= moment.position <= end) / GIB
        if end - begin > min_share:
            axes.text((begin + end) / 2, 1.2 * top, stage, **options)
        elif end - begin > 0.04 and height < 0.6 * top:
            axes.text((begin + end) / 2, 1.2 * top, stage, rotation=90, **options)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.25 * top)
    axes.set_xticks([])
    axes.set_xlabel("time", fontsize=9)
    axes.set_title(title, fontsize=10, family="monospace")
    axes.spines[["top", "right"]].set_visible(False)


def _outline(positions: list[float], heights: list[float]) -> tuple[list[float], list[float]]:
    """The outline of steps that stand on the axis, without points that change nothing."""
    xs, ys = [0.0], [0.0]
    for position, height in zip(positions, heights, strict=True):
        if abs(height - ys[-1]) > 0.01:
            xs += [position, position]
            ys += [ys[-1], height]
    return [*xs, 1.0, 1.0], [*ys, ys[-1], 0.0]


def _stages(moments: list[Moment]) -> list[tuple[str, float, float]]:
    """The stages of a step with their begin and end."""
    found: list[tuple[str, float, float]] = []
    for moment, following in zip(moments, [*moments[1:], None], strict=True):
        end = 1.0 if following is None else following.position
        if found and found[-1][0] == moment.stage:
            found[-1] = found[-1][0], found[-1][1], end
        else:
            found.append((moment.stage, 0.0 if not found else moment.position, end))
    return found


if __name__ == "__main__":
    for chosen in sys.argv[1:] or PICTURES:
        draw(PICTURES[chosen], IMAGES / f"technique-{chosen}.svg")
        print(chosen, flush=True)
