"""Starts runs in processes that can be killed, and compares how runs end: bit for bit."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from launching import free_port
from safetensors.torch import load_file

from forked import Child, ForkServer
from tiny_runs import lines_of
from trimtab.runs.journal import OF_THE_MOMENT

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
    """What all tests of a worker share: the server, models, rows, and a run that nobody has disturbed."""

    server: ForkServer
    folder: Path
    rows: Path
    models: dict[str, str] = field(default_factory=dict)
    num_runs: int = 0
    undisturbed: dict[str, Path] = field(default_factory=dict)

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
        """A process that trains; `faulty_runs.train` tells what it can be told."""
        return self.start("train", recipe=recipe, **arguments)

    def train_together(
        self,
        recipe: dict[str, Any],
        of_rank: dict[int, dict[str, Any]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> list[Child]:
        """Two processes that train together, started as a cluster starts them; each has notes of its own.

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
        """Train until the end, in a process of its own; what it said."""
        child = self.train(recipe, **arguments)
        assert child.wait() == 0, child.said[-4000:]
        return child.said

    def whole(self, name: str = "standard", **changes: dict[str, Any]) -> Path:
        """A run with these changes that nobody disturbed; made once."""
        if name not in self.undisturbed:
            recipe = self.recipe(**changes)
            self.finish(recipe)
            self.undisturbed[name] = Path(recipe["out"])
        return self.undisturbed[name]


def notes_of(run: Path | str) -> dict[str, Any]:
    """What the process that ended a run has left."""
    return json.loads(Path(f"{run}.notes").read_text())


def steps_by_process(run: Path | str) -> list[list[int]]:
    """The steps that each process took which trained in a folder, in the order of the processes."""
    path = Path(f"{run}.steps")
    steps: dict[str, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        process, step = line.split()
        steps.setdefault(process, []).append(int(step))
    return list(steps.values())


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
    last = steps_by_process(run)[-1]
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
    assert trainer.pop("journal") > 0  # a length, to which the digits of clocks add
    return state


def _lines_without_clocks(run: Path) -> list[dict[str, Any]]:
    lines = lines_of(run)
    assert len(lines) > 5
    return [{key: value for key, value in line.items() if key not in OF_THE_MOMENT} for line in lines]


def draw(seed: int) -> random.Random:
    """Random moments that a failing test can be repeated with."""
    return random.Random(seed)
