"""`trimtab compare`: measure variants of a recipe, each in new processes."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.build.data import run_name
from trimtab.checkpoint.folder import refuse_impossible, temporary_folder
from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.recipe.load import LoadedRecipe, load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import as_yaml
from trimtab.report.compare import Comparison, Measurement, Outcome, Variant
from trimtab.units import format_bytes, format_seconds

_KILLED = {signal.SIGKILL: "killed (the system may have run out of memory)"}
# keys that `shorten_recipe` sets or removes
_OWN_KEYS = (
    *("out", "name", "early_stopping", "track", "checkpoint", "train.epochs", "train.max_time", "train.max_steps"),
    *("train.log_every", "evaluate.every", "evaluate.at_start", "evaluate.samples", "limits.fast_dev_run"),
)
_KEPT_OF_LIMITS = ("train", "eval", "overfit_batches")


@dataclass(frozen=True)
class Protocol:
    """The protocol of a comparison.

    Args:
        num_steps: Optimizer steps of each run.
        num_repeats: Runs of each variant, interleaved: A B C A B C.
        num_warmup: Steps at the start that are not timed; None means a tenth, at least 2 and at most 20.
        device: The device to train on; None chooses one.
        timeout_s: A run that takes longer is killed and counts as failed.
    """

    num_steps: int = 200
    num_repeats: int = 2
    num_warmup: int | None = None
    device: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 4 or not 1 <= self.warmup < self.num_steps - 1:
            raise RecipeError(
                f"{self.num_steps} steps with {self.warmup} warmup steps leave too few to time",
                "--steps 20 or more, and fewer --warmup-steps",
            )
        if self.num_repeats < 1:
            raise RecipeError(f"--repeats {self.num_repeats} measures nothing", "--repeats 2, or 1 without a spread")

    @property
    def warmup(self) -> int:
        """The number of steps that are not timed."""
        return min(20, max(2, self.num_steps // 10)) if self.num_warmup is None else self.num_warmup


@dataclass
class VariantRuns:
    """A variant with its recipe, or the reason why it is refused, and the results of its runs so far."""

    variant: Variant
    recipe: dict[str, Any] | None
    runs: list[Measurement] = field(default_factory=list)
    failure: str = ""

    def outcome(self) -> Outcome:
        """Return the result of the variant."""
        return Outcome(self.variant, tuple(self.runs), self.failure)


def make_folder(recipe: Recipe, out: Path | None) -> Path:
    """Create a folder for the results: `out`, or the next free runs/EXPERIMENT/compare-N."""
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"{out} is not empty", "choose another --out, or remove the folder")
    if out is not None:
        refuse_impossible(out)
    home = Path("runs") / run_name(recipe)
    folders = [out] if out is not None else (home / f"compare-{number}" for number in itertools.count(1))
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=out is not None)
        except FileExistsError:
            continue
        except OSError as error:
            raise RecipeError(f"{folder} cannot be created: {error.strerror}", "choose another --out") from error
        return folder
    raise AssertionError("there is always a next number")


def check_variants(
    recipe: Path | None,
    variants: Sequence[Variant],
    sets: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    origin: str = "--vary",
) -> list[VariantRuns]:
    """Load and check the recipe of each variant. Nothing is started or written.

    Args:
        recipe: The recipe's file; None if `sets` and `flags` are the whole recipe.
        variants: The variants; all others are compared with the first one.
        sets: Changes to the recipe of all variants, such as "train.lr=3e-5".
        flags: Values of plain flags by dotted key; None means that the flag was not given.
        origin: Where the variants were written: the option, or the file of `--variants`.

    Raises:
        RecipeError: The unchanged recipe is not valid, or no variant is.
    """
    load = partial(load_recipe, recipe, flags or {}, sets)
    load()
    for variant in variants:
        _refuse_own_keys(variant)
    checked = [_check(load, variant, origin) for variant in variants]
    if not checked:
        raise RecipeError("there is nothing to compare", "--vary KEY=a,b, --study NAME or --variants FILE")
    if all(one.recipe is None for one in checked):
        _load_variant(load, variants[0], origin)  # raises an error with everything that is wrong
    for one in checked:
        if one.recipe is None:
            say(f"{one.variant.name}: refused: {one.failure}")
    return checked


def _refuse_own_keys(variant: Variant) -> None:
    """Refuse changes of keys that every run of a comparison overrides."""
    for key, value in variant.changes.items():
        names = [f"{key}.{name}" for name in value] if isinstance(value, Mapping) else [key]
        for name in names:
            if any(f"{name}.".startswith(f"{own}.") for own in _OWN_KEYS):
                raise RecipeError(
                    f"{variant.name} changes {name}, which compare sets itself: all variants train the same number of "
                    "steps and save nothing",
                    f"leave out {name}, or train each variant with trimtab train and show them with trimtab report",
                )


def _check(load: Callable[..., LoadedRecipe], variant: Variant, origin: str) -> VariantRuns:
    try:
        loaded = _load_variant(load, variant, origin)
    except RecipeError as error:
        reason = [line.strip() for line in error.problem.splitlines() if line.strip()][-1].removeprefix(f"{origin}: ")
        return VariantRuns(variant, None, failure=reason)
    return VariantRuns(variant, loaded.recipe.model_dump(mode="json", exclude_defaults=True))


def _load_variant(load: Callable[..., LoadedRecipe], variant: Variant, origin: str) -> LoadedRecipe:
    changes = [f"{key}={as_yaml(value)}" for key, value in variant.changes.items()]
    return load(changes, changes_origin=origin)


def compare(recipe: Recipe, candidates: Sequence[VariantRuns], protocol: Protocol, *, logs: Path) -> Comparison:
    """Measure every variant of a recipe, one run at a time, each in a new process.

    Args:
        recipe: The recipe without the changes of a variant.
        candidates: The checked variants.
        protocol: The number of runs, and their length.
        logs: The folder for the output of the processes.
    """
    num_valid = sum(one.recipe is not None for one in candidates)
    say(f"{num_valid} variants, {protocol.num_repeats} × {protocol.num_steps} steps of each")
    surroundings: dict[str, str] = {}
    is_complete = True
    began = time.monotonic()
    with temporary_folder("compare") as home:
        try:
            for repeat, (number, one) in itertools.product(range(protocol.num_repeats), enumerate(candidates)):
                if one.recipe is not None and not one.failure:
                    folder = home / f"{number}-{repeat}"
                    log = logs / f"{number + 1}-{_as_file_name(one.variant.name)}-{repeat + 1}.log"
                    surroundings = _measure(one, repeat, protocol, folder, log) or surroundings
        except KeyboardInterrupt:
            is_complete = False
            say("stopped: the measurements so far are kept")
    return Comparison(
        outcomes=tuple(one.outcome() for one in candidates),
        protocol={
            "steps": protocol.num_steps,
            "repeats": protocol.num_repeats,
            "warmup steps": protocol.warmup,
            "each run": "a fresh process, same seed and rows, variants interleaved",
            "took": format_seconds(time.monotonic() - began),
        },
        surroundings=surroundings,
        recipe=shorten_recipe(recipe.model_dump(mode="json", exclude_defaults=True), protocol.num_steps),
        is_complete=is_complete,
    )


def shorten_recipe(values: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """Return the values of a recipe for a run of `num_steps` that is evaluated once, at its end, and saves nothing."""
    train = {key: value for key, value in values.get("train", {}).items() if key not in ("epochs", "max_time")}
    limits = {key: value for key, value in values.get("limits", {}).items() if key in _KEPT_OF_LIMITS}
    evaluate = {key: value for key, value in values.get("evaluate", {}).items() if key != "at_start"}
    return {
        **{key: value for key, value in values.items() if key not in ("out", "name", "early_stopping", "track")},
        "track": "none",
        "train": train | {"max_steps": num_steps, "log_every": max(1, num_steps // 20)},
        "checkpoint": {"every": None, "best": False},
        "evaluate": evaluate | {"every": f"{num_steps} steps", "samples": 0},
        "limits": limits,
    }


def _measure(one: VariantRuns, repeat: int, protocol: Protocol, folder: Path, log: Path) -> dict[str, str]:
    """Run a variant in a process and store its measurement, or why it failed; return the process's environment."""
    assert one.recipe is not None
    folder.mkdir(parents=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    spec = {
        "recipe": shorten_recipe(one.recipe, protocol.num_steps),
        "run": str(folder / "run"),
        "result": str(folder / "result.json"),
        "device": protocol.device,
        "num_steps": protocol.num_steps,
        "num_warmup": protocol.warmup,
        "repeat": repeat,
        "records_memory": repeat == 0,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    label = f"{one.variant.name}, run {repeat + 1} of {protocol.num_repeats}"
    command = [sys.executable, "-m", "trimtab.commands.measure", str(folder / "spec.json")]
    problem = _run_process(command, log, protocol.timeout_s)
    if not problem and (folder / "result.json").exists():
        found = json.loads((folder / "result.json").read_text())
    else:
        found = {"failure": problem or "it ended without a result"}
    if "failure" in found:
        one.failure = found["failure"]
        say(f"{label}: {one.failure}" + (f"\n  cure: {found['cure']}" if found.get("cure") else ""))
        return {}
    run = Measurement.from_json(found["measurement"])
    one.runs.append(run)
    say(f"{label}: {_describe(run)}")
    surroundings: dict[str, str] = found["surroundings"]
    return surroundings


def _describe(run: Measurement) -> str:
    peak = run.host_peak_bytes if run.allocated_peak_bytes is None else run.allocated_peak_bytes
    return (
        f"{run.num_rows / run.seconds:,.1f} samples/s, {run.num_tokens / run.seconds:,.0f} tokens/s, "
        f"peak {format_bytes(peak)}, loss {run.final_loss:.4f} ({format_seconds(run.wall_s)})"
    )


def _run_process(command: list[str], log: Path, timeout_s: float | None) -> str:
    """Run a command to its end; return why it failed, or an empty string."""
    with log.open("wb") as output:
        # in a new session: Ctrl-C reaches only this process, which then kills that one and its workers
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"not finished after {format_seconds(timeout_s or 0)}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code == 0:
        return ""
    if code < 0:
        return _KILLED.get(signal.Signals(-code), f"ended by {signal.Signals(-code).name}")
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()[:200] if lines else f'exit code {code}'} (see {log})"


def _as_file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:60]
