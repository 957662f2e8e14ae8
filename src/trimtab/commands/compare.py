"""What does it buy me, and what does it cost? Variants of a recipe, each measured in fresh processes, side by side."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import as_yaml, read_value, read_yaml
from trimtab.report.compare import Comparison, Measurement, Outcome, Variant
from trimtab.report.studies import STUDIES
from trimtab.report.studies import study as make_study
from trimtab.units import format_bytes, format_seconds

_KILLED = {signal.SIGKILL: "killed (the system may have run out of memory)"}
_KEPT_OF_LIMITS = ("train", "eval", "overfit_batches")


@dataclass(frozen=True)
class Protocol:
    """How a comparison is made.

    Args:
        num_steps: Optimizer steps of each run.
        num_repeats: Runs of each variant, interleaved: A B C A B C.
        num_warmup: Steps at the beginning that are not timed; None = a tenth, at least 2 and at most 20.
        device: Where to train; found if None.
        timeout_s: A run that takes longer is ended, and counts as failed.
    """

    num_steps: int = 200
    num_repeats: int = 2
    num_warmup: int | None = None
    device: str | None = None
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 4 or not 1 <= self.warmup < self.num_steps - 1:
            raise RecipeError(
                f"of {self.num_steps} steps with {self.warmup} to warm up too few are left to time",
                "--steps 20 or more, and a --warmup-steps well below",
            )
        if self.num_repeats < 1:
            raise RecipeError(f"--repeats {self.num_repeats} measures nothing", "1 or more; 2 show a spread")

    @property
    def warmup(self) -> int:
        """Steps that are not timed."""
        return min(20, max(2, self.num_steps // 10)) if self.num_warmup is None else self.num_warmup


# ---------------------------------------------------------------------- variants


def choose_variants(recipe: Recipe, vary: Sequence[str], study: str | None, file: Path | None) -> list[Variant]:
    """The variants that the command line asks for in one of three ways."""
    if sum((bool(vary), study is not None, file is not None)) != 1:
        raise RecipeError(
            "compare wants one of --vary, --study and --variants",
            f"--vary train.precision=fp32,bf16, --study with {', '.join(STUDIES)}, or --variants FILE",
        )
    if study is not None:
        return make_study(study, recipe)
    return varied(vary) if file is None else read_variants(file)


def varied(texts: Sequence[str]) -> list[Variant]:
    """Every combination of what `--vary KEY=a,b` gives; the first values make the first variant.

    Args:
        texts: Each a key and its values; commas inside braces, brackets and quotes do not separate.
    """
    axes: list[list[tuple[str, Any]]] = []
    for text in texts:
        key, equals, values = text.partition("=")
        found = [read_value(value) for value in split_values(values)]
        if not equals or not key.strip() or not found:
            raise RecipeError(f"--vary {text!r} has no key with values", "--vary train.precision=fp32,bf16")
        axes.append([(key.strip(), value) for value in found])
    keys = [axis[0][0] for axis in axes]
    if len(set(keys)) < len(keys):
        raise RecipeError(f"--vary has {max(keys, key=keys.count)} twice", "give all its values at once: KEY=a,b,c")
    bare = {axis[0][0] for axis in axes if all(isinstance(value, str | Mapping) for _, value in axis)}
    variants = [Variant(_name(chosen, bare), dict(chosen)) for chosen in itertools.product(*axes)]
    return _with_names_of_their_own(variants)


def split_values(text: str) -> list[str]:
    """Cut a text at its commas, but not inside braces, brackets or quotes."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values if value.strip()]


def read_variants(path: Path) -> list[Variant]:
    """Variants from a YAML file: `{name: {key: value, …}, …}`; a name without keys is the recipe as it is."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}", "a YAML file: {name: {key: value}}") from None
    variants = []
    for name, changes in read_yaml(text, str(path)).values.items():
        if not isinstance(changes, Mapping | None):
            raise RecipeError(f"{path}: {name} holds {changes!r}", f"{name}: {{train.precision: bf16}}")
        variants.append(Variant(str(name), dict(changes or {})))
    return variants


def _name(chosen: Sequence[tuple[str, Any]], bare: set[str]) -> str:
    """The values, each with the last part of its key where it says little by itself, such as a number."""
    words = []
    for key, value in chosen:
        written = as_yaml(value).strip('{}"') or "none"
        words.append(written if key in bare else f"{key.rpartition('.')[2]} {written}")
    return " + ".join(words)


def _with_names_of_their_own(variants: Sequence[Variant]) -> list[Variant]:
    names = [variant.name for variant in variants]
    return [
        replace(variant, name=f"{variant.name} ({index})") if names.count(variant.name) > 1 else variant
        for index, variant in enumerate(variants, 1)
    ]


def _flat(changes: Mapping[str, Any]) -> list[str]:
    return [f"{key}={as_yaml(value)}" for key, value in changes.items()]


# ---------------------------------------------------------------------- where the results go


def make_folder(recipe: Recipe, out: Path | None) -> Path:
    """A new folder for the results: `out`, or the next free runs/EXPERIMENT/compare-N."""
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise RecipeError(f"{out} is not empty", "choose another --out, or remove the folder")
        return _made(out)
    from trimtab.build import run_name

    home = Path("runs") / run_name(recipe)
    for number in itertools.count(1):
        with contextlib.suppress(FileExistsError):
            return _made(home / f"compare-{number}", exist_ok=False)
    raise AssertionError("there is always a next number")


def _made(folder: Path, exist_ok: bool = True) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise RecipeError(f"{folder} cannot be made: {error.strerror}", "choose another --out") from error
    return folder


# ---------------------------------------------------------------------- running them


@dataclass
class Candidate:
    """A variant on its way: its recipe, or why that is refused, and what its runs gave so far."""

    variant: Variant
    recipe: dict[str, Any] | None
    runs: list[Measurement] = field(default_factory=list)
    failure: str = ""

    def outcome(self) -> Outcome:
        """What there is to report of it."""
        return Outcome(self.variant, tuple(self.runs), self.failure)


def candidates_of(recipe: Path | None, variants: Sequence[Variant], sets: Sequence[str] = ()) -> list[Candidate]:
    """The variants of a recipe, each checked; nothing is started or written.

    Args:
        recipe: The recipe's file; None where `sets` say everything.
        variants: What to compare; the first is what the others are compared with.
        sets: Changes to the recipe for all of them, such as "train.lr=3e-5".

    Raises:
        RecipeError: The recipe without any change is not valid, or no variant is.
    """
    load_recipe(recipe, {}, list(sets))
    candidates = [_checked(recipe, sets, variant) for variant in variants]
    if not candidates:
        raise RecipeError("there is nothing to compare", "--vary KEY=a,b, --study NAME or --variants FILE")
    if all(candidate.recipe is None for candidate in candidates):
        load_recipe(recipe, {}, list(sets), _flat(variants[0].changes))  # says all that is wrong with the first one
    return candidates


def compare(recipe: Recipe, candidates: Sequence[Candidate], protocol: Protocol, *, logs: Path) -> Comparison:
    """Measure every variant of a recipe, each run in a fresh process, one after the other.

    Args:
        recipe: The recipe without the changes of a variant.
        candidates: What `candidates_of` gave.
        protocol: How often and how long.
        logs: A folder that takes what the processes say.
    """
    num_valid = sum(candidate.recipe is not None for candidate in candidates)
    say(f"{num_valid} variants, {protocol.num_repeats} × {protocol.num_steps} steps of each")
    surroundings: dict[str, str] = {}
    is_complete = True
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trimtab-compare-") as home, _ended_as_by_ctrl_c():
        try:
            for repeat, (number, candidate) in itertools.product(range(protocol.num_repeats), enumerate(candidates)):
                if candidate.recipe is not None and not candidate.failure:
                    place = Path(home) / f"{number}-{repeat}"
                    log = logs / f"{number + 1}-{_as_file_name(candidate.variant.name)}-{repeat + 1}.log"
                    surroundings = _one_run(candidate, repeat, protocol, place, log) or surroundings
        except KeyboardInterrupt:
            is_complete = False
            say("stopped: what was measured so far is kept")
    return Comparison(
        outcomes=tuple(candidate.outcome() for candidate in candidates),
        protocol={
            "steps": protocol.num_steps,
            "repeats": protocol.num_repeats,
            "warmup steps": protocol.warmup,
            "each run": "a fresh process, same seed and rows, variants interleaved",
            "took": format_seconds(time.monotonic() - began),
        },
        surroundings=surroundings,
        recipe=shortened(recipe.model_dump(mode="json", exclude_defaults=True), protocol.num_steps),
        is_complete=is_complete,
    )


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """A job that is ended by its scheduler keeps what was measured, too."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _checked(recipe: Path | None, sets: Sequence[str], variant: Variant) -> Candidate:
    try:
        loaded = load_recipe(recipe, {}, list(sets), _flat(variant.changes))
    except RecipeError as error:
        reason = [line.strip() for line in error.problem.splitlines() if line.strip()][-1].removeprefix("--set: ")
        say(f"{variant.name}: refused: {reason}")
        return Candidate(variant, None, failure=reason)
    return Candidate(variant, loaded.recipe.model_dump(mode="json", exclude_defaults=True))


def shortened(values: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """The values of a recipe for a run of so many steps that is evaluated once, at its end, and keeps nothing."""
    train = {key: value for key, value in values.get("train", {}).items() if key not in ("epochs", "max_time")}
    limits = {key: value for key, value in values.get("limits", {}).items() if key in _KEPT_OF_LIMITS}
    evaluate = {key: value for key, value in values.get("evaluate", {}).items() if key != "at_start"}
    return {
        **{key: value for key, value in values.items() if key not in ("out", "name", "early_stopping", "track")},
        "track": "none",
        "train": train | {"max_steps": num_steps, "log_every": max(1, num_steps // 20)},
        "checkpoint": {"every": None, "best": False},
        "evaluate": evaluate | {"every": f"{num_steps} steps"},
        "limits": limits,
    }


def _one_run(candidate: Candidate, repeat: int, protocol: Protocol, place: Path, log: Path) -> dict[str, str]:
    """One process; what it measured, or why not, is noted in the candidate. Gives where it ran, if it did."""
    assert candidate.recipe is not None
    place.mkdir(parents=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    spec = {
        "recipe": shortened(candidate.recipe, protocol.num_steps),
        "run": str(place / "run"),
        "result": str(place / "result.json"),
        "device": protocol.device,
        "num_steps": protocol.num_steps,
        "num_warmup": protocol.warmup,
        "repeat": repeat,
        "records_memory": repeat == 0,
    }
    (place / "spec.json").write_text(json.dumps(spec))
    label = f"{candidate.variant.name}, run {repeat + 1} of {protocol.num_repeats}"
    ending = _in_a_process([sys.executable, "-m", "trimtab.commands.measure", str(place / "spec.json")], log, protocol)
    if not ending and (place / "result.json").exists():
        found = json.loads((place / "result.json").read_text())
    else:
        found = {"failure": ending or "it ended without a result"}
    if "failure" in found:
        candidate.failure = found["failure"]
        say(f"{label}: {candidate.failure}" + (f"\n  cure: {found['cure']}" if found.get("cure") else ""))
        return {}
    run = Measurement.from_json(found["measurement"])
    candidate.runs.append(run)
    say(f"{label}: {_in_short(run)}")
    surroundings: dict[str, str] = found["surroundings"]
    return surroundings


def _in_short(run: Measurement) -> str:
    peak = run.host_peak_bytes if run.allocated_peak_bytes is None else run.allocated_peak_bytes
    return (
        f"{run.num_rows / run.seconds:,.1f} samples/s, {run.num_tokens / run.seconds:,.0f} tokens/s, "
        f"peak {format_bytes(peak)}, loss {run.final_loss:.4f} ({format_seconds(run.wall_s)})"
    )


def _in_a_process(command: list[str], log: Path, protocol: Protocol) -> str:
    """Run a command to its end; why it failed, in a few words, or nothing."""
    with log.open("wb") as output:
        # a session of its own: Ctrl-C ends this process, which then ends that one and the workers it has
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = child.wait(protocol.timeout_s)
        except subprocess.TimeoutExpired:
            return f"not done after {format_seconds(protocol.timeout_s or 0)}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code == 0:
        return ""
    if code < 0:
        return _KILLED.get(signal.Signals(-code), f"ended by {signal.Signals(-code).name}")
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{said[-1].strip()[:200] if said else f'exit code {code}'} (see {log})"


def _as_file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:60]
