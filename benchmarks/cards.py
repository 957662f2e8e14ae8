"""Writes what fits on cards of 4 to 80 GB into docs/memory.md: `python benchmarks/cards.py`, or `… 4 8` for two sizes.

Each job has ways to train it, a list of settings each. All are predicted for every card, without a GPU, and the fastest
that fits is a line of the page; the fastest exact one, too, if another one is faster. To add a way, add it to JOBS.
"""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trimtab.errors import RecipeError
from trimtab.garbage_collection import gc_disabled
from trimtab.planner.survey import planner_for
from trimtab.planner.target import Target, known_target
from trimtab.recipe.load import load_recipe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "memory.md"
RECIPES = ROOT / "benchmarks" / "memory" / "cards"
BEGIN = "<!-- from here to the end mark: python benchmarks/cards.py -->"
END = "<!-- end -->"
GIB = 2**30


@dataclass(frozen=True)
class Card:
    """A size of memory, and a GPU that has it."""

    size_gb: int
    gpu: str
    memory: str | None = None  # less than all of it

    @property
    def arguments(self) -> str:
        """For `trimtab plan`."""
        return f"--gpu {self.gpu}" + ("" if self.memory is None else f" --memory {self.memory}")

    @property
    def target(self) -> Target:
        return replace(known_target(self.gpu, self.memory), host_bytes=None)  # a column of the page says what is needed


@dataclass(frozen=True)
class Job:
    """Something to train, and ways to do it, the plainest first."""

    name: str
    recipe: str  # in benchmarks/memory/cards
    length: int
    common: str
    ways: tuple[str, ...]
    finds_longest: bool = False


@dataclass(frozen=True)
class Result:
    """A way on a card."""

    sets: tuple[str, ...]
    fits: bool
    total_bytes: int
    host_bytes: int
    tokens_s: float
    length: int | None = None  # the longest row that fits

    @property
    def is_exact(self) -> bool:
        """Whether it computes what the job asks for, in the usual precision and with unrounded optimizer state."""
        others = ("train.optimizer=", "train.precision=", "train.max_grad_norm=", "adapter.base=", "adapter=qlora")
        return not any(text.startswith(others) for text in self.sets)


CARDS = (
    Card(4, "rtx-4060", "4GB"),
    Card(8, "rtx-4060"),
    Card(16, "rtx-4060-ti"),
    Card(24, "rtx-4090"),
    Card(48, "l40s"),
    Card(80, "h100"),
)
_ALL = "memory.gradient_checkpointing=all"
_PURE = "train.precision=bf16-pure train.optimizer=adamw8bit"
_IN_BACKWARD = f"{_PURE} train.max_grad_norm=null memory.update=in-backward memory.micro_batch=8 {_ALL}"
_SMALL = f"memory.micro_batch=1 {_ALL}"
_FULL_WEIGHTS = (
    "memory.micro_batch=8",
    "memory.micro_batch=1",
    f"memory.micro_batch=8 {_ALL}",
    f"memory.update=host memory.micro_batch=8 {_ALL}",
    f"memory.update=host memory.offload_activations=all memory.tile_tokens=1024 {_SMALL}",
    f"train.optimizer=adamw8bit memory.micro_batch=8 {_ALL}",
    f"train.optimizer=adamw8bit {_SMALL}",
    f"{_PURE} memory.micro_batch=1",
    f"{_PURE} memory.micro_batch=8 {_ALL}",
    _IN_BACKWARD,
    f"{_IN_BACKWARD} memory.offload_activations=all memory.tile_tokens=1024",
    _IN_BACKWARD.replace("memory.micro_batch=8", "train.batch_size=1"),
    f"{_IN_BACKWARD.replace('memory.micro_batch=8', 'train.batch_size=1')} memory.offload_state=host",
    f"{_PURE} memory.update=streamed {_SMALL}",
    f"train.precision=bf16-pure memory.update=host memory.offload_activations=all memory.tile_tokens=1024 {_SMALL}",
    f"{_IN_BACKWARD.replace('memory.micro_batch=8', 'train.batch_size=1')} memory.stream_weights=all",
    f"memory.update=host memory.stream_weights=all memory.offload_activations=all memory.tile_tokens=1024 {_SMALL}",
)
_SMALL_STEPS = (
    "memory.micro_batch=8",
    "memory.micro_batch=2",
    "memory.micro_batch=1",
    f"memory.micro_batch=8 {_ALL}",
    _SMALL,
    f"memory.kernels=liger {_SMALL}",
    f"memory.kernels=liger memory.offload_activations=all memory.tile_tokens=1024 {_SMALL}",
    f"memory.offload=embeddings memory.kernels=liger {_SMALL}",
    f"memory.offload=embeddings memory.kernels=liger memory.tile_tokens=1024 {_SMALL}",
    f"memory.stream_weights=all memory.kernels=liger memory.micro_batch=4 {_ALL}",
    f"memory.stream_weights=all memory.offload=embeddings memory.kernels=liger memory.tile_tokens=1024 {_SMALL}",
)
_LORA_STEPS = tuple(f"adapter=lora {way}" for way in _SMALL_STEPS)
_LONG = (
    f"adapter.rank=32 train.batch_size=1 memory.padding=longest memory.offload_activations=all "
    f"memory.tile_tokens=1024 memory.offload=embeddings memory.kernels=liger {_SMALL}"
)
JOBS = (
    Job(
        "BERT-base, a classifier, 32 × 512 tokens, all weights",
        "bert-base",
        512,
        "",
        ("memory.micro_batch=32", "memory.micro_batch=8", "memory.micro_batch=2", f"memory.micro_batch=16 {_ALL}"),
    ),
    Job("Llama 1 B, 8 × 2,048, all weights", "llama-1b", 2048, "", _FULL_WEIGHTS),
    Job(
        "Llama 1 B, 8 × 2,048, LoRA or QLoRA",
        "llama-1b",
        2048,
        "train.lr=2e-4",
        (*_LORA_STEPS, f"adapter=qlora {_SMALL}"),
    ),
    Job(
        "Llama 8 B, 8 × 2,048, LoRA",
        "llama-8b",
        2048,
        "train.lr=2e-4",
        (
            *_LORA_STEPS,
            "adapter=lora adapter.base=fp8 memory.micro_batch=1",
            f"adapter=lora adapter.base=fp8 memory.micro_batch=8 {_ALL}",
        ),
    ),
    Job("Llama 8 B, 8 × 2,048, QLoRA", "llama-8b", 2048, "train.lr=2e-4 adapter=qlora", _SMALL_STEPS),
    Job("Llama 8 B, 8 × 2,048, all weights", "llama-8b", 2048, "", _FULL_WEIGHTS),
    Job("Llama 8 B, QLoRA, one row", "llama-8b", 2048, "train.lr=2e-4 adapter=qlora", (_LONG,), finds_longest=True),
)


def results(job: Job, card: Card) -> list[Result]:
    """Every way of a job on a card that is possible there."""
    return [found for way in job.ways if (found := predict(job, card, _settings(job, way)))]


def _settings(job: Job, way: str) -> tuple[str, ...]:
    """The settings of a way, in the order of a recipe's sections."""
    order = ("adapter", "train", "memory")
    return tuple(sorted(f"{job.common} {way}".split(), key=lambda text: order.index(re.split(r"[.=]", text)[0])))


@gc_disabled()
def predict(job: Job, card: Card, sets: tuple[str, ...]) -> Result | None:
    """One way on a card; None if the card does not support it."""
    recipe = load_recipe(RECIPES / f"{job.recipe}.yaml", {}, sets).recipe
    length: int | None = job.length
    try:
        planner = planner_for(recipe, card.target, None, length)
        rows = planner.choose().rows
        if job.finds_longest:
            length = planner.longest(rows[0].spec)
            planner = planner_for(recipe, card.target, None, length or job.length)
            rows = planner.choose().rows
    except RecipeError:  # such as fp8 on a GPU without
        return None
    if not rows:  # such as embeddings on the host that are the output layer, too
        return None
    (row,) = rows
    estimate = row.estimate
    return Result(
        sets,
        estimate.fits,
        planner.needed_bytes(row) + estimate.outside_bytes,
        planner.host(row.spec).memory,
        estimate.tokens_s,
        length if job.finds_longest else None,
    )


def lines_of(job: Job, card: Card) -> Iterator[str]:
    """The lines of a job in the table of a card."""
    found = results(job, card)
    fitting = sorted((each for each in found if each.fits), key=lambda each: -each.tokens_s)
    if not fitting:
        smallest = min(found, key=lambda each: each.total_bytes)
        yield f"| {job.name} | does not fit: at least | {_gib(smallest.total_bytes)} | | |"
        return
    chosen = fitting[:1]
    if not chosen[0].is_exact:
        chosen += [each for each in fitting if each.is_exact][:1]
    for number, each in enumerate(chosen):
        yield line_of(job.name if number == 0 else "the same, exact", each)


def line_of(name: str, result: Result) -> str:
    """A line of a table."""
    if result.length is not None:
        name += f" of {result.length:,} tokens"
    memory = f"{_gib(result.total_bytes)} | {_gib(result.host_bytes)}"
    return f"| {name} | `{_flags(result)}` | {memory} | {_rounded(result.tokens_s):,} |"


def _flags(result: Result) -> str:
    return " ".join(f"--set {text}" for text in result.sets)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}"


def _rounded(number: float) -> int:
    """Three digits: times are predicted to about 20%."""
    digits = max(0, math.floor(math.log10(number)) - 2)
    return round(number / 10**digits) * 10**digits


def section(card: Card, jobs: tuple[Job, ...] = JOBS) -> list[str]:
    """What fits on a card."""
    of_it = "" if card.memory is None else f", of which {card.memory} are used"
    return [
        f"### {card.size_gb} GB",
        "",
        f"{card.gpu} ({_gib(card.target.device.memory_bytes)} GiB{of_it}): `trimtab plan RECIPE {card.arguments}`",
        "",
        "| job | write | GiB | host GiB | tokens/s |",
        "|---|---|---|---|---|",
        *(line for job in jobs for line in lines_of(job, card)),
        "",
    ]


def written(card: Card) -> list[str]:
    """The section of a card in the page."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    found = text.partition(f"### {card.size_gb} GB\n")[2].partition("\n### ")[0]
    return [f"### {card.size_gb} GB", "", *found.strip("\n").splitlines(), ""]


if __name__ == "__main__":
    chosen = [card for card in CARDS if str(card.size_gb) in sys.argv[1:] or not sys.argv[1:]]
    made: list[str] = []
    for each_card in CARDS:
        lines = section(each_card) if each_card in chosen else written(each_card)
        print("\n".join(lines) if each_card in chosen else f"{each_card.size_gb} GB: unchanged", flush=True)
        made += lines
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", "", *made, END]) + rest.partition(END)[2])
