"""Runs that are killed, stopped, damaged on disk or short of space: each resumes and ends with the same bits.

A row says what happens to a run, one act after the other; `play` checks every process and the end of the run.
"""

import contextlib
import json
import pickle
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from fault_stage import (
    STANDARD,
    Scenario,
    Start,
    assert_same_tensors,
    finishes,
    killed,
    play,
    refused,
    saved_steps,
    status_of,
    stopped,
)
from faulty_runs import fill
from safetensors.torch import load_file

from small_disk import mounted
from trimtab.checkpoint.export import find_export_problem
from trimtab.checkpoint.store import MANIFEST, _signed
from trimtab.recipe.load import load_recipe

FRESH = {"resume": False, "fresh": True}
RESUME = {"command": "resume"}
ROWS: dict[str, Scenario] = {}
QUICK: set[str] = set()


def row(name, *acts, **options):
    ROWS[name] = Scenario(acts, **options)


def quick(name, *acts, **options):
    QUICK.add(name)
    row(name, *acts, **options)


# ---------------------------------------------------------------------- kills

# Where a process dies: a step; the batch of an evaluation; or just before something is done to a file.
PLACES = {
    "before the first save": {"at": {"3": "die"}},
    "after a step": {"at": {"23": "die"}},
    "in the first evaluation": {"dies_in_evaluation": 1},
    "in a later evaluation": {"dies_in_evaluation": 6},
    "save begins": {"kill": {"event": "os.mkdir", "path": ".step-10.writing-", "nth": 1}},
    "weights written, optimizer not": {"kill": {"event": "open", "path": "/optimizer.safetensors", "nth": 3}},
    "all written but the manifest": {"kill": {"event": "open", "path": "-15.writing-", "nth": 7}},
    "before the rename": {"kill": {"event": "os.rename", "path": ".step-20.writing-", "nth": 1}},
    "after the rename": {"kill": {"event": "os.rename", "path": ".step-15.removing-", "nth": 1}},
    "old checkpoint half removed": {"kill": {"event": "os.rmdir", "path": "", "nth": 2}},
    "best model half written": {"kill": {"event": "open", "path": ".best.writing-", "nth": 3}},
    "best model is swapped": {"kill": {"event": "ctypes.dlsym", "path": "renameat2", "nth": 1}},
    "status half written": {"kill": {"event": "os.rename", "path": ".run.json.writing", "nth": 9}},
}
for where, how in PLACES.items():
    row(f"killed {where}", killed(**how), finishes())
THREE = ("before the first save", "weights written, optimizer not", "best model is swapped")
quick("killed three times", *(killed(**PLACES[where]) for where in THREE), finishes())
AFTER_23 = killed(**PLACES["after a step"])
CLEARING = {"event": "os.rmdir", "nth": 2}
row("killed while it clears the folder", AFTER_23, killed(**FRESH, kill=CLEARING), finishes(**FRESH, from_step=0))


def is_running(place):
    return status_of(place.run)["state"] == "running"


# before it reported the end: no step is left, so none is taken. The second checkpoint is between the two evaluations
# that stop a run early by a metric that never changes.
LAST = (killed(at={"21": "saved 20; die"}), killed(at={"end": "die"}), is_running)
row("killed after the last step", *LAST, finishes(from_step=40))
EARLY = {"early_stopping": {"metric": "length", "mode": "max", "patience": 2}}
row("killed after it stopped early", *LAST, finishes(from_step=24), changes=EARLY)


# ---------------------------------------------------------------------- signals and clocks


def signal_at(step, name):
    words = f"signal {name}: saved after step {step}; resume with: trimtab resume {{out}}"
    return stopped(f"{name}: stopping after this step and saving", words, at={str(step): f"signal {name}"})


SIGNALS = {7: "SIGTERM", 14: "SIGINT", 21: "SIGUSR1", 28: "SIGHUP", 33: "SIGXCPU"}
row("stopped by every signal", *(signal_at(*one) for one in SIGNALS.items()), finishes(**RESUME, from_step=33))
TWICE = Start(-signal.SIGINT, arguments={"at": {"13": "signal SIGINT; sleep 1.2; signal SIGINT"}})
row(
    "a second interrupt ends it without saving",
    *(TWICE, lambda place: status_of(place.run)["state"] == "stopped", finishes(from_step=10)),
)
# also an interrupt that comes again at once, as where the terminal and a launcher both send it
AT_ONCE = {"13": "signal SIGINT; signal SIGINT; signal SIGTERM; signal SIGTERM"}
quick("other second signals wait for the save", stopped("saved after step 13", at=AT_ONCE))
for file in ("step-10", "best.writing"):  # that save is finished first, then the state after the step is saved
    row(f"stopped while {file} is saved", stopped("trimtab resume", stop_at_open=file), finishes(**RESUME))


def list_runs(place):
    listed = place.stage.server.start_command("runs", str(place.run.parent))
    assert listed.wait() == 0, listed.err


for seconds in (-400 * 86_400, 4_000 * 86_400):
    jumps = {"12": f"clock {seconds}", "22": "signal SIGTERM"}
    row(f"the clock jumps by {seconds} s", stopped(at=jumps), finishes(clock=-seconds, from_step=22), list_runs)


# ---------------------------------------------------------------------- damaged checkpoints


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut_in_half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def leave_the_folder(checkpoint):
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"]["../../recipe.yaml"] = {"bytes": 1, "checksum": "crc32:00000000"}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


# of the checkpoint of each step: the damage, and words of the line that reports it
DAMAGES = {
    13: (lambda folder: flip_a_bit(folder / "optimizer.safetensors"), "optimizer.safetensors"),
    12: (lambda folder: flip_a_bit(folder / MANIFEST), "trimtab.json"),
    11: (lambda folder: cut_in_half(folder / "model.safetensors"), "model.safetensors is damaged"),
    10: (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors is missing"),
    9: (lambda folder: (folder / MANIFEST).unlink(), "is not a trimtab checkpoint"),
    8: (lambda folder: (folder / MANIFEST).write_text('{"format": 2, "fi'), "trimtab.json"),
    7: (lambda folder: [file.unlink() for file in folder.iterdir()], "it is empty"),
    6: (lambda folder: (folder / "rng.pkl").write_bytes(pickle.dumps({})), "rng.pkl (a pickle, by its extension)"),
    5: (leave_the_folder, "trimtab.json is damaged"),
}


def drop_14(place):
    """Whether the last checkpoint was completed before the kill is left to chance."""
    shutil.rmtree(place.run / "checkpoints/step-14", ignore_errors=True)


def damage(*steps):
    return lambda place: [DAMAGES[step][0](place.run / f"checkpoints/step-{step}") for step in steps]


def remove_manifests(place):
    for manifest in place.run.glob(f"checkpoints/*/{MANIFEST}"):
        manifest.unlink()


AFTER_14 = (killed(at={"14": "saved 13; die"}), drop_14)
EVERY_STEP = {"changes": {"checkpoint": {"every": "1 steps", "keep": 50}}, "like": {}}
NO_FAILURE = {"omits": ("saving a checkpoint failed",)}
SKIPPED = [f"skipping step-{step}: … {words}" for step, (_, words) in DAMAGES.items()]
row("damages of all kinds", *AFTER_14, damage(*DAMAGES), finishes(*SKIPPED, from_step=4, **NO_FAILURE), **EVERY_STEP)
# to start again would throw away what could perhaps be repaired: that is left to the user, with `fresh`
row(
    "all checkpoints are damaged",
    *(*AFTER_14, remove_manifests),
    refused("skipping step-13:", "skipping step-1:", "none of the 13 checkpoints", "--fresh"),
    finishes(**FRESH, from_step=0, **NO_FAILURE),
    **EVERY_STEP,
)
ASKED_FOR = refused("optimizer.safetensors is damaged", **RESUME, options={"from_step": "step-13"})
row("the checkpoint that was asked for is damaged", *AFTER_14, damage(13), ASKED_FOR, **EVERY_STEP)


# ---------------------------------------------------------------------- damaged best model

# a metric that never changes: the first model stays the best, with or without a checkpoint of its step
SAVED, NOT_SAVED = ({"evaluate": {"every": f"{every} steps", "metric": "length"}} for every in (5, 8))
AFTER_30 = stopped(at={"30": "signal SIGTERM"})


def flip_a_weight(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def in_best(damage, name="model.safetensors"):
    return lambda place: damage(place.run / "best" / name)


def remove_best(place):
    shutil.rmtree(place.run / "best")


def forget(*names, also=()):
    """Change checkpoints, and run.json, into those of versions that did not keep these facts."""

    def change(place):
        for path in place.run.glob(f"checkpoints/*/{MANIFEST}"):
            manifest = json.loads(path.read_text())
            del manifest["checksum"]
            for name in names:
                del manifest["facts"][name]
            path.write_bytes(_signed(manifest))
        if also:
            status = {key: value for key, value in status_of(place.run).items() if key not in also}
            (place.run / "run.json").write_text(json.dumps(status))

    return change


AGAIN = finishes("it was written again from step-5", **RESUME, from_step=30)
row("the best model is cut off", AFTER_30, in_best(cut_in_half), AGAIN, changes=SAVED)
row("the best model is changed", AFTER_30, in_best(flip_a_weight), AGAIN, changes=SAVED)
row("the best model is without weights", AFTER_30, in_best(Path.unlink), AGAIN, changes=SAVED)
row("the best model is without config", AFTER_30, in_best(Path.unlink, "config.json"), AGAIN, changes=SAVED)
row("its tokenizer is cut off", AFTER_30, in_best(cut_in_half, "tokenizer.json"), AGAIN, changes=SAVED)
row("the best model is without facts", AFTER_30, in_best(Path.unlink, "trimtab.json"), AGAIN, changes=SAVED)
UNNAMED = {"23": "remove {out}/best/trimtab.json"}
row("the facts of the best model are removed while it trains", finishes(at=UNNAMED, from_step=0))
row("the best model is missing", AFTER_30, remove_best, AGAIN, changes=SAVED)
NO_CHECKSUMS = forget("run", also=["best_files"])
row("the checksums are not known", AFTER_30, NO_CHECKSUMS, in_best(cut_in_half), AGAIN, changes=SAVED)


def other_best(place):
    """The best model is sought among those that follow, and the weights at the end are the same."""
    assert (place.run / "best-damaged-step-8").is_dir()
    best = json.loads((place.run / "best/trimtab.json").read_text())
    assert status_of(place.run)["best_step"] == best["step"] == 32
    whole = place.stage.whole(**NOT_SAVED)
    for name in ("model", "optimizer", "random"):
        file = f"checkpoints/step-40/{name}.safetensors"
        assert_same_tensors(load_file(place.run / file), load_file(whole / file), name)


def best_is_intact(place):
    return find_export_problem(place.run / "best") == ""


GONE = {"changes": NOT_SAVED, "like": None}
LOST = "the best model, of step 8, is lost: "
OTHER = finishes(LOST, "model.safetensors is damaged", **RESUME)
row("no checkpoint has the best weights", AFTER_30, in_best(cut_in_half), OTHER, other_best, best_is_intact, **GONE)
LAST_IS_BEST = "no evaluation followed the loss of the best model: the last model is kept as the best one"
DONE = finishes(LOST, LAST_IS_BEST, **RESUME, from_step=40)
row("the best model is lost after the last step", finishes(), remove_best, DONE, best_is_intact, **GONE)
row(
    "an intact best model is left alone",
    *(AFTER_30, lambda place: (place.run / "best/notes.txt").write_text("mine")),
    *(finishes(omits=("written again", "is lost"), **RESUME), lambda place: (place.run / "best/notes.txt").exists()),
    changes=NOT_SAVED,
)


# ---------------------------------------------------------------------- damaged small files of the run

AFTER_33 = killed(at={"33": "saved 30; die"})


def empty(path):
    path.write_bytes(b"")


def change_a_key(path):
    path.write_bytes(path.read_bytes().replace(b'"state"', b'"stqte"'))


def in_status(damage):
    def act(place):
        shutil.copy(place.run / "run.json", place.tmp)
        damage(place.run / "run.json")

    return act


def same_identity(place):
    before, after = (json.loads((folder / "run.json").read_text()) for folder in (place.tmp, place.run))
    return (after["id"], after["started"]) == (before["id"], before["started"])


def rebuilt(**arguments):
    return finishes("run.json is missing or damaged", **arguments, from_step=30), same_identity


row("run.json is empty", AFTER_33, in_status(empty), *rebuilt(**RESUME))
row("run.json is missing", AFTER_33, in_status(Path.unlink), *rebuilt())
row("a bit of run.json is flipped", AFTER_33, in_status(change_a_key), *rebuilt(**RESUME))
NOT_FINISHED = ("contains an unfinished run (step 33 of 40)", "--resume to resume it")
FORGOTTEN = refused(*NOT_FINISHED, omits=("remove the folder",), resume=False)
quick("run.json is empty, and --resume is forgotten", AFTER_33, in_status(empty), FORGOTTEN)
MEND = refused("repair or restore one of them")
row("run.json is missing, and all checkpoints are damaged", AFTER_33, in_status(Path.unlink), remove_manifests, MEND)


def cut_after_the_data(place):
    """What is left is a valid recipe: defaults for everything else."""
    path = place.run / "recipe.yaml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: next(n for n, line in enumerate(lines) if line.startswith("train:"))]))
    load_recipe(path, {}, [])


def recipe_is_restored(place):
    recipe = yaml.safe_load((place.run / "recipe.yaml").read_text())
    return recipe["train"]["epochs"] == STANDARD["train"]["epochs"]


SETTINGS = finishes("using the settings saved in step-30 … train.epochs, ", **RESUME, from_step=30)
row("recipe.yaml is cut off", AFTER_33, cut_after_the_data, SETTINGS, recipe_is_restored)
SETS = {"sets": ["train.epochs=5", "checkpoint.every=50 steps"]}
row(
    "a change by --set survives a kill before the next save",
    *(AFTER_33, killed(**RESUME, options=SETS, at={"33": "die"})),
    finishes("train.epochs: 4.0 → 5.0 (takes effect from now on)", omits=("using the settings",), **RESUME),
    lambda place: status_of(place.run)["step"] == 50,
    like=None,
)
NO_SETTINGS = forget("run", "settings", also=["recipe_checksum"])
row("checkpoints without the settings", AFTER_33, NO_SETTINGS, finishes(**RESUME, from_step=30))


# ---------------------------------------------------------------------- finished runs

# without an end in its schedule, a run is the beginning of a longer one; its last step is logged in any case
CONSTANT = {"train": {"schedule": "constant", "log_every": 4}}
SIX_EPOCHS = {"train": CONSTANT["train"] | {"epochs": 6}}
LONGER = finishes(
    "train.epochs: 4.0 → 6.0 (takes effect from now on)",
    "checkpoint.keep: 2 → 3 (does not change results)",
    omits=("train.log_every",),
    **RESUME,
    options={"sets": ["train.epochs=6", "checkpoint.keep=3", "train.log_every=4"]},
    from_step=40,
)
row("two more epochs", finishes(), LONGER, changes=CONSTANT, like=SIX_EPOCHS)
row(
    "nothing is left to do",
    finishes(),
    finishes("all steps of the run are done", **RESUME, from_step=40),
    changes=CONSTANT,
)
# the steps after it are taken again, and everything that was written of them is replaced
row(
    "from a checkpoint before the last",
    *(finishes(), killed(**RESUME, options={"from_step": "step-35"}, at={"37": "die"})),
    *(lambda place: saved_steps(place.run) == [35], finishes(**RESUME, from_step=35)),
    refused("choose one of: step-35, step-40", **RESUME, options={"from_step": "step-7"}),
    refused("is not the name of a checkpoint", **RESUME, options={"from_step": "banana"}),
    changes=CONSTANT,
)


# ---------------------------------------------------------------------- full disks

LIMIT = "saved 10; limit 100000"  # bytes of a file: less than the optimizer's state, more than anything else


def not_saved(why, begins, ends):
    said = [f"training continues: … step-{step} could not be written: {why}" for step in (15, 20, 25, 30)]
    return finishes(*said, nobody_special=True, at={"12": begins, "32": ends})


row("files cannot grow for a while", not_saved("File too large. free space on that disk", LIMIT, "limit -1"))
LOCKED = ("saved 10; chmod 555 {out}/checkpoints", "chmod 755 {out}/checkpoints")
row("checkpoints/ is not writable for a while", not_saved("Permission denied", *LOCKED))


def two_old_checkpoints(place):
    """Those written before are intact, nothing partial is left, and the best model is there."""
    assert saved_steps(place.run) == [5, 10]
    assert not list((place.run / "checkpoints").glob(".*"))
    model = Path("best", "model.safetensors")
    assert (place.run / model).read_bytes() == (place.stage.whole() / model).read_bytes()


TOO_LARGE = finishes(save_failure="File too large", at={"12": LIMIT})
row("files cannot grow until the end", TOO_LARGE, two_old_checkpoints, finishes(**RESUME, from_step=10))
# after a checkpoint was saved, and before the next metrics are written: those that were held back are not lost
SPACE_AGAIN = {"12": "saved 10; full", "19": "limit -1", "21": "saved 20; die"}
row("killed when there is space again", killed(at=SPACE_AGAIN), finishes(from_step=20))

NO_SPACE = "No space left on device"
NO_MODEL = f"the model could not be written to {{out}}/best: {NO_SPACE}"
FILL = "saved 10; fill {disk}"
quick(
    "the disk is full for a while",
    finishes(
        NO_MODEL,
        f"step-15 could not be written: {NO_SPACE}",
        "step 20 is not saved, because the best model could not be written",
        "the pending model was written to {out}/best",
        at={"12": FILL, "27": "remove {disk}/filler"},
    ),
    disk="3m",
)
row(
    "the disk is full until the end",
    finishes("lines of metrics are lost", save_failure=NO_MODEL, at={"12": FILL}),
    *(lambda place: (place.disk / "filler").unlink(), finishes(from_step=10)),
    disk="3m",
)


def fill_but(num_pages):
    return lambda place: fill(place.disk, 4096 * num_pages)


def only_filler(place):
    return {path.name for path in place.disk.iterdir()} == {"filler"}


FULL = refused(f"{NO_SPACE}\n  cure: free space on that disk, or choose another --out", keeps_status=False)
quick("no space at the start: nothing is left behind", fill_but(0), FULL, only_filler, disk="1m")
for num_pages in (1, 2, 3):  # whichever file finds no space first: the lock, the status, the recipe, the plan
    row(f"no space at the start but {num_pages} pages", fill_but(num_pages), FULL, disk="1m")
for num_pages in (0, 1):
    row(
        f"no space for the cache but {num_pages} pages",
        fill_but(num_pages),
        finishes("tokens are not cached in {disk}/cache", NO_SPACE, environment={"TRIMTAB_CACHE": "{disk}/cache"}),
        lambda place: not list((place.disk / "cache").rglob(".*")),
        other_disk="1m",
    )


def log_is_complete(place):
    said = (place.disk / "log").read_text(errors="replace")
    return "step 39/40" in said and "Traceback" not in said


LOG = finishes(output="{disk}/log", at={"12": "fill {disk}", "27": "remove {disk}/filler"})
row("no space for the log for a while", LOG, log_is_complete, other_disk="1m")


# ---------------------------------------------------------------------- folders that vanish or are not accessible


def new_files(place):
    """What can be written again is."""
    lines = [json.loads(line) for line in (place.run / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 40
    assert saved_steps(place.run) == [35, 40]
    assert status_of(place.run)["state"] == "finished"


REMOVED = "{out}/metrics.jsonl was removed during the run: the metrics so far are lost"
row("the run's folder vanishes", finishes(REMOVED, at={"12": "sleep 0.3; vanish {out}"}), new_files, like=None)


def close(name, mode=0):
    return lambda place: place.chmod(place.run / name, mode)


def close_cache(place):
    shutil.copytree(place.stage.folder / "cache", place.tmp / "cache")
    place.chmod(place.tmp / "cache/tokens", 0)


OWN_CACHE = {"environment": {"TRIMTAB_CACHE": "{tmp}/cache"}}
row("the cache vanishes", finishes(at={"3": "vanish {tmp}/cache"}, **OWN_CACHE))
NOT_CACHED = "tokens are not cached in {tmp}/cache: Permission denied"
row("the cache is not readable", close_cache, finishes(NOT_CACHED, nobody_special=True, **OWN_CACHE))
AFTER_22 = stopped(at={"22": "signal SIGTERM"})
DENIED = {**RESUME, "nobody_special": True}
NOT_READABLE = "{out}/checkpoints cannot be read: Permission denied\n  cure: make the folder readable for this user"
row("the checkpoints are not readable", AFTER_22, close("checkpoints"), refused(NOT_READABLE, **DENIED))
SKIPS_22 = "skipping step-22: {out}/checkpoints/step-22 cannot be read: Permission denied"
row(
    "the newest checkpoint is not readable",
    *(AFTER_22, close("checkpoints/step-22"), finishes(SKIPS_22, from_step=20, **DENIED)),
    like=None,
)
NOT_WRITABLE = "metrics.jsonl cannot be written: Permission denied\n  cure: make the folder writable"
METRICS = refused(NOT_WRITABLE, keeps_status=False, **DENIED)
row("the metrics are not writable", AFTER_22, close("metrics.jsonl"), METRICS)
COMMANDS = ({}, RESUME, FRESH)
NOT_ALLOWED = [refused("Permission denied", "make the folder writable", nobody_special=True, **c) for c in COMMANDS]
row("the folder is not writable", AFTER_23, close("", 0o555), *NOT_ALLOWED, close("", 0o755), finishes())
row(
    "no folder can be made for the run",
    lambda place: (place.tmp / "closed").mkdir(mode=0o555),
    refused("cannot be created: Permission denied", nobody_special=True),
    out="{tmp}/closed/below/it",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ROWS])
def test_scenario(stage, tmp_path, name):
    scenario, size = ROWS[name], ROWS[name].disk or ROWS[name].other_disk
    with contextlib.ExitStack() as disks:
        disk = disks.enter_context(mounted(tmp_path / "disk", size)) if size else None
        play(stage, scenario, tmp_path, disk)
