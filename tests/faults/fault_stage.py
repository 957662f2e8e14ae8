"""Starts runs in processes that can be killed, plays scenarios, and compares how runs end: bit for bit."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from launching import free_port
from safetensors.torch import load_file

from forked import Child, ForkServer
from tiny_runs import lines_of
from trimtab.runs.journal import VOLATILE_KEYS

# Everything that has a state takes part: accumulation, warmup, a part that thaws, dropout, early stopping, logs that
# fall between saves, evaluations that do too, and a last batch that is smaller.
STANDARD: dict[str, dict[str, Any]] = {
    "train": {
        "epochs": 4,
        "batch_size": 8,
        "lr": 3e-3,
        "weight_decay": 0.01,
        "warmup": 4,
        "log_every": 3,
        "freeze": {"*.layer.0.*": "12 steps"},
    },
    "memory": {"micro_batch": 4},
    "evaluate": {"every": "8 steps", "metric": "loss"},
    "checkpoint": {"every": "5 steps", "keep": 2},
    "early_stopping": {"metric": "loss", "patience": 50},
}
NUM_STEPS = 40


@dataclass
class Stage:
    """What all tests of a worker share: the server, models, rows, and undisturbed runs."""

    server: ForkServer
    folder: Path
    rows: Path
    models: dict[str, str] = field(default_factory=dict)
    num_runs: int = 0
    undisturbed: dict[str, Path] = field(default_factory=dict)
    begun: dict[str, Path] = field(default_factory=dict)

    def start(self, function: str, *, environment: dict[str, str] | None = None, **arguments: Any) -> Child:
        """A new process that runs a function of `faulty_runs.py`."""
        environment = {"TRIMTAB_CACHE": str(self.folder / "cache"), **(environment or {})}
        return self.server.start(f"faulty_runs:{function}", environment=environment, **arguments)

    def make_models(self, wanted: dict[str, dict[str, Any]]) -> None:
        """Make tiny models, in a process that has what is needed for it."""
        to = self.folder / f"models-{'-'.join(wanted)}.json"
        made = self.start("make_models", root=str(to.with_suffix("")), wanted=wanted, to=str(to))
        assert made.wait() == 0, made.said
        self.models |= json.loads(to.read_text())

    def recipe(self, *, model: str = "bert", out: Path | None = None, **changes: dict[str, Any]) -> dict[str, Any]:
        """The standard recipe, with an own folder, and keys of its sections changed."""
        if out is None:
            self.num_runs += 1
            out = self.folder / f"run-{self.num_runs}"
        base: dict[str, Any] = {"model": self.models[model], "data": {"train": str(self.rows)}, "out": str(out)}
        for name in STANDARD.keys() | changes.keys():
            change = changes.get(name)
            base[name] = (
                STANDARD.get(name, {}) | change if isinstance(change, dict) else changes.get(name, STANDARD.get(name))
            )
        return base

    def train(self, recipe: dict[str, Any], **arguments: Any) -> Child:
        """Start a process that trains, with the arguments of `faulty_runs.train`."""
        return self.start("train", recipe=recipe, **arguments)

    def train_together(
        self,
        recipe: dict[str, Any],
        of_rank: dict[int, dict[str, Any]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[Child]:
        """Start two processes that train together, as a cluster starts them; each has its own notes.

        Args:
            recipe: Of the run.
            of_rank: What `train` takes, for some of them.
            environment: What else the launcher tells them.
        """
        port = str(free_port())
        started = []
        for rank in range(2):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **(environment or {})}
            arguments = {"notes": f"{recipe['out']}.rank-{rank}", **(of_rank or {}).get(rank, {})}
            started.append(self.train(recipe, environment=place, **arguments))
        return started

    def finish_together(self, recipe: dict[str, Any], of_rank: dict[int, dict[str, Any]] | None = None) -> str:
        """Two processes train until the end; what the first one said."""
        started = self.train_together(recipe, of_rank)
        for child in started:
            assert child.wait() == 0, [child.said[-3000:] for child in started]
        return started[0].said

    def finish(self, recipe: dict[str, Any], **arguments: Any) -> str:
        """Train until the end in a subprocess; gives its output."""
        child = self.train(recipe, **arguments)
        assert child.wait() == 0, child.said[-4000:]
        return child.said

    def whole(self, **changes: Any) -> Path:
        """A run with these changes that nothing disturbed; made once."""
        key = json.dumps(changes, sort_keys=True)
        if key not in self.undisturbed:
            recipe = self.recipe(**changes)
            self.finish(recipe)
            self.undisturbed[key] = Path(recipe["out"])
        return self.undisturbed[key]


@dataclass(frozen=True)
class Start:
    """One process of a scenario: how it is started, and what must hold of it.

    Attributes:
        code: Its exit code.
        says: Texts in its output; those around " … " are in one line.
        omits: Texts that are not in its output.
        from_step: The step it resumes from; None for the newest checkpoint there is, 0 if there is none.
        save_failure: Text of the save failure in its result; empty for none.
        keeps_status: Whether a process that is refused leaves run.json unchanged.
        arguments: Of `faulty_runs.train`. In them and in all texts `Place.fill_in` replaces the names of folders.
    """

    code: int
    says: tuple[str, ...] = ()
    omits: tuple[str, ...] = ()
    from_step: int | None = None
    save_failure: str = ""
    keeps_status: bool = True
    arguments: dict[str, Any] = field(default_factory=dict)


def finishes(*says: str, omits=(), from_step=None, save_failure="", **arguments: Any) -> Start:
    return Start(0, says, ("Traceback", *omits), from_step, save_failure, arguments=arguments)


def killed(**arguments: Any) -> Start:
    return Start(-signal.SIGKILL, arguments=arguments)


def stopped(*says: str, **arguments: Any) -> Start:
    return Start(75, says, ("Traceback",), arguments=arguments)


def refused(*says: str, omits=(), keeps_status=True, **arguments: Any) -> Start:
    return Start(2, says, ("Traceback", *omits), keeps_status=keeps_status, arguments=arguments)


@dataclass
class Place:
    """The folders of a scenario, for the functions that damage or check them between two processes."""

    stage: Stage
    tmp: Path
    run: Path
    notes: Path
    disk: Path | None = None
    closed: list[Path] = field(default_factory=list)

    def fill_in(self, text: str) -> str:
        """Replace `{out}`, `{disk}` and `{tmp}` by the folders."""
        return text.replace("{out}", str(self.run)).replace("{disk}", str(self.disk)).replace("{tmp}", str(self.tmp))

    def chmod(self, path: Path, mode: int) -> None:
        """Change permissions until the end of the scenario."""
        self.closed.append(path)
        path.chmod(mode)


Act = Start | Callable[[Place], Any]


@dataclass(frozen=True)
class Scenario:
    """What happens to a run, one act after the other: processes, and functions that damage or check its folder.

    Attributes:
        acts: What happens. If a process finishes, the run must end like an undisturbed one.
        changes: Of the recipe.
        like: Changes of the recipe of the undisturbed run, if they are others; None compares with none.
        disk: The size of a small disk `{disk}` for the run.
        other_disk: The size of a small disk `{disk}` on which the run is not.
        out: The run's folder, if it is another one.
    """

    acts: tuple[Act, ...]
    changes: dict[str, Any] = field(default_factory=dict)
    like: dict[str, Any] | None = field(default_factory=lambda: SAME)
    disk: str = ""
    other_disk: str = ""
    out: str = ""


SAME: dict[str, Any] = {"the changes of the scenario": True}


def play(stage: Stage, scenario: Scenario, tmp: Path, disk: Path | None = None) -> None:
    """Run a scenario and check everything that must hold; a function that returns False fails it."""
    place = Place(stage, tmp, Path(), stage.folder / f"scenario-{stage.num_runs}", disk)
    out = place.fill_in(scenario.out or ("{disk}/new/run" if scenario.disk else ""))
    recipe = stage.recipe(out=Path(out) if out else None, **scenario.changes)
    place.run = Path(recipe["out"])
    try:
        for number, act in enumerate(scenario.acts):
            if not isinstance(act, Start):
                assert act(place) is not False, f"act {number} does not hold"
            elif number == 0 and not out and act.code != 2 and place.fill_in(text := json.dumps(act.arguments)) == text:
                _copy_begun(place, recipe, act)
            else:
                _run_start(place, recipe, act)
    finally:
        for path in filter(Path.exists, place.closed):
            path.chmod(0o755)
    if scenario.like is not None and any(isinstance(act, Start) and act.code == 0 for act in scenario.acts):
        whole = stage.whole(**(scenario.changes if scenario.like is SAME else scenario.like))
        assert_same_end(place.run, whole)
        assert notes_of(place.notes)["fit"]["stop_reason"] == notes_of(whole)["fit"]["stop_reason"]


def _copy_begun(place: Place, recipe: dict[str, Any], act: Start) -> None:
    """Copy a run that was made once for all scenarios that begin in the same way."""
    key = json.dumps([{**recipe, "out": ""}, act.arguments], sort_keys=True)
    if key not in place.stage.begun:
        run = place.stage.folder / f"begun-{len(place.stage.begun)}"
        _run_start(Place(place.stage, place.tmp, run, place.notes), {**recipe, "out": str(run)}, act)
        place.stage.begun[key] = run
    shutil.copytree(place.stage.begun[key], place.run)


def _run_start(place: Place, recipe: dict[str, Any], act: Start) -> None:
    before = saved_steps(place.run), _status_text(place.run)
    arguments = json.loads(place.fill_in(json.dumps(act.arguments)))
    child = place.stage.train(recipe, notes=str(place.notes), **arguments)
    assert child.wait() == act.code, (act, child.said[-4000:])
    said = child.said
    for text in map(place.fill_in, act.says):
        parts = said.splitlines() if " … " in text else [said]
        assert any(all(words in part for words in text.split(" … ")) for part in parts), (text, said[-4000:])
    for text in act.omits:
        assert text not in said, said[-4000:]
    if act.code == 2:
        assert saved_steps(place.run) == before[0]
        assert _status_text(place.run) == before[1] or not act.keeps_status
        return
    step = goes_on_from(said)
    if act.code == 0 or act.from_step is not None:
        assert step == (max(before[0], default=0) if act.from_step is None else act.from_step), said[-4000:]
    steps = steps_by_process(place.notes).get(child.pid, [])
    assert steps == list(range(step + 1, step + 1 + len(steps)))
    if act.code == 0:
        failure = notes_of(place.notes)["fit"]["save_failure"]
        assert place.fill_in(act.save_failure) in failure if act.save_failure else failure is None
    if act.code == 75:
        status = status_of(place.run)
        assert (status["state"], status["step"]) == ("stopped", saved_steps(place.run)[-1])


def _status_text(run: Path) -> str:
    path = run / "run.json"
    return path.read_text(errors="replace") if path.is_file() else ""


def notes_of(run: Path | str) -> dict[str, Any]:
    """What the process that ended a run has left."""
    return json.loads(Path(f"{run}.notes").read_text())


def steps_by_process(run: Path | str) -> dict[int, list[int]]:
    """The steps of each process that trained in a folder, by process id in the order of their first steps."""
    path = Path(f"{run}.steps")
    steps: dict[int, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        process, step = map(int, line.split())
        steps.setdefault(process, []).append(step)
    return steps


def seen_rows(seen: Path | str) -> list[tuple[int, list[list[int]]]]:
    """Each step that was taken with the rows it was taken on, as lists of tokens."""
    lines = map(json.loads, Path(seen).read_text().splitlines())
    return [(line["step"], line["rows"]) for line in lines]


def saved_steps(run: Path | str) -> list[int]:
    """The checkpoints under their final names, whatever is in them."""
    folder = Path(run) / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def goes_on_from(said: str) -> int:
    """The step after which a process went on; 0 if it says that it began anew."""
    found = [
        line.split("resuming from step-")[1].split()[0] for line in said.splitlines() if "resuming from step-" in line
    ]
    assert len(found) <= 1, said
    return int(found[0]) if found else 0


def assert_went_on(run: Path | str, said: str, at_least: int = 1) -> int:
    """That the last process really went on from a saved state, and took no step before it. Gives its step."""
    step = goes_on_from(said)
    assert step >= at_least, said
    last = list(steps_by_process(run).values())[-1]
    assert last == list(range(step + 1, step + 1 + len(last))), last
    return step


def assert_same_end(run: Path | str, whole: Path | str) -> None:
    """Weights, optimizer, random numbers, the rest of the state, the best model and every number written: the same."""
    run, whole = Path(run), Path(whole)
    one, other = (
        max((path / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:])) for path in (run, whole)
    )
    assert one.name == other.name
    assert {path.name for path in one.iterdir()} == {path.name for path in other.iterdir()}
    files = [path.name for path in other.glob("*.safetensors")]
    assert {"model.safetensors", "optimizer.safetensors", "random.safetensors"} <= set(files)
    for name in files:
        assert_same_tensors(load_file(one / name), load_file(other / name), name)
    assert _state_without_clocks(one) == _state_without_clocks(other)
    assert _lines_without_clocks(run) == _lines_without_clocks(whole)
    assert (run / "best" / "model.safetensors").read_bytes() == (whole / "best" / "model.safetensors").read_bytes()
    facts, as_it_should_be = (json.loads((path / "best" / "trimtab.json").read_text()) for path in (run, whole))
    assert (facts["step"], facts["metrics"]) == (as_it_should_be["step"], as_it_should_be["metrics"])
    for key in ("state", "step", "num_steps", "best_metric", "best_step"):
        assert status_of(run)[key] == status_of(whole)[key], key
    assert status_of(run)["state"] == "finished"
    assert _names_in(run) == _names_in(whole), "something is left over"
    assert not list((run / "checkpoints").glob(".*")), "something is left over"


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], where: str) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.dtype == other[key].dtype
        assert torch.equal(value, other[key]), f"{where}: {key} differs by {(value - other[key]).abs().max()}"


def status_of(run: Path | str) -> dict[str, Any]:
    return json.loads((Path(run) / "run.json").read_text())


def _names_in(run: Path) -> set[str]:
    """What a run's folder holds, without the lock of a process that died while it took it from another."""
    return {path.name for path in run.iterdir() if not path.name.startswith(".run.lock.")}


def _state_without_clocks(checkpoint: Path) -> dict[str, Any]:
    state = json.loads((checkpoint / "state.json").read_text())
    trainer = state["object"]
    for name, key in (("meter", "seconds"), ("evaluation", "last_s"), ("saving", "last_s")):
        assert trainer[name].pop(key) >= 0
    assert trainer["meter"]["last"].pop(0) >= 0
    assert trainer.pop("journal")[0] > 0  # a length and a checksum, to which the digits of clocks add
    return state


def _lines_without_clocks(run: Path) -> list[dict[str, Any]]:
    lines = lines_of(run)
    assert len(lines) > 5
    return [{key: value for key, value in line.items() if key not in VOLATILE_KEYS} for line in lines]


def draw(seed: int) -> random.Random:
    """Random moments that a failing test can be repeated with."""
    return random.Random(seed)
