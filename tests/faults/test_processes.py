"""Two processes that train together: one is killed, both are stopped, and others resume the run."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from fault_stage import (
    NUM_STEPS,
    assert_same_end,
    draw,
    goes_on_from,
    notes_of,
    saved_steps,
    seen_rows,
    steps_by_process,
)
from safetensors.torch import load_file
from torch.distributed import TCPStore

from rounding import rounding_error
from tiny_runs import lines_of
from trimtab.runs.journal import VOLATILE_KEYS

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def whole(stage):
    recipe = stage.recipe()
    stage.finish_together(recipe)
    return Path(recipe["out"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "fault", "codes", "from_step"),
    [
        (0, {"at": {"17": "saved 15; die"}}, [-signal.SIGKILL, 1], 15),
        (0, {"at": {"16": "saved 15"}, "dies_in_evaluation": 3}, [-signal.SIGKILL, 1], 15),
        (1, {"at": {"16": "saved 15"}, "dies_in_evaluation": 2}, [1, -signal.SIGKILL], 15),
        (1, {"at": {"17": "signal SIGUSR1"}}, [75, 75], 17),
    ],
    ids=["killed", "the first killed in an evaluation", "the second killed in an evaluation", "stopped"],
)
def test_one_of_them_is_killed_or_stopped(stage, whole, rank, fault, codes, from_step):
    """The other ends as well, and names a rank that died; started again, both resume, to the same bits."""
    recipe = stage.recipe()
    started = stage.train_together(recipe, {rank: fault})
    assert [child.wait() for child in started] == codes, [child.said for child in started]
    for code, child in zip(codes, started, strict=True):
        assert code != 1 or (f"PeerError: rank {rank} " in child.said and "Traceback" not in child.said), child.said
    assert saved_steps(recipe["out"])[-1] == from_step
    assert goes_on_from(stage.finish_together(recipe)) == from_step
    assert_same_end(recipe["out"], whole)


@pytest.mark.slow
def test_clocks_that_are_set_by_hours(stage, whole):
    """On one forwards, on the other back: nobody is taken for lost, and no limit or interval in hours is over."""
    recipe = stage.recipe(train={"max_time": "1h"}, checkpoint={"every": "1h"})
    stage.finish_together(recipe, {0: {"at": {"8": "clock 10800"}}, 1: {"at": {"8": "clock -10800"}}})
    assert saved_steps(recipe["out"]) == [NUM_STEPS]
    assert_same_end(recipe["out"], whole)


# plain SGD without dropout: AdamW makes large steps of what rounding leaves of a gradient that should be zero
PLAIN = {"model": "no-dropout", "train": {"optimizer": "sgd", "lr": 0.2, "momentum": 0.5, "freeze": {}, "log_every": 4}}


def noting(run, processes):
    """Each process of a run notes its rows; where there are several, the first call of the loss is no training."""
    skip = 1 if len(processes) > 1 else 0
    return {rank: {"loss": {"seen": f"{run}.seen-{rank}", "skip_calls": skip}} for rank in processes}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "micro_batch"),
    [(2, 1, 4), (1, 2, 4), (2, 2, 2), (1, 1, 8)],
)
def test_resumed_by_another_number_of_processes(stage, before, after, micro_batch):
    """Or by another micro-batch size: the same up to rounding, no row twice and none left out."""
    recipe = stage.recipe(**PLAIN)
    seen = noting(recipe["out"], range(before))
    dies = {"at": {"17": "saved 15; die"}}
    if before == 1:
        assert stage.train(recipe, **seen[0], **dies).wait() == -signal.SIGKILL
    else:
        seen[0] |= dies
        codes = [child.wait() for child in stage.train_together(recipe, seen)]
        assert codes == [-signal.SIGKILL, 1]
    changed = recipe | {"memory": {"micro_batch": micro_batch}}
    seen = noting(f"{recipe['out']}.after", range(after))
    said = stage.finish(changed, **seen[0]) if after == 1 else stage.finish_together(changed, seen)
    assert goes_on_from(said) == 15
    if after != before:
        assert f"processes {before} then, {after} now: results are the same up to rounding" in said
    else:
        assert f"memory.micro_batch: 4 → {micro_batch} (does not change results)" in said
    assert_nearly_same_end(recipe["out"], stage.whole(**PLAIN))
    assert_every_row_once(recipe["out"], before, after, whole_rows(stage))


def assert_nearly_same_end(run, whole):
    """Up to 4 roundings in each of 40 steps; a row that is lost or comes twice changes the third digit."""
    bound = rounding_error(1.0, num_roundings=4 * NUM_STEPS)
    lines, as_they_should_be = lines_of(run), lines_of(whole)
    assert len(lines) == len(as_they_should_be) > 10
    for line, other in zip(lines, as_they_should_be, strict=True):
        assert line.keys() == other.keys()
        for key in line.keys() - VOLATILE_KEYS:
            assert line[key] == pytest.approx(other[key], rel=bound, abs=bound), (key, other)
    for name in ("model", "optimizer"):
        file = Path("checkpoints", "step-40", f"{name}.safetensors")
        one, other = load_file(Path(run) / file), load_file(whole / file)
        assert one.keys() == other.keys()
        for key in one:
            assert (one[key] - other[key]).abs().max() <= bound * max(1.0, float(other[key].abs().max())), key


def whole_rows(stage):
    """The rows of an epoch, from an undisturbed run of one process."""
    path = stage.folder / "plain.seen"
    if not path.exists():
        stage.finish(stage.recipe(**PLAIN), loss={"seen": str(path)})
    return Counter(str(row) for step, rows in seen_rows(path) for row in rows if step <= 10)


def assert_every_row_once(run, before, after, epoch):
    """Of each epoch of ten steps; steps after the 15th count for the processes that resumed."""
    rows = defaultdict(Counter)
    for name, processes, counts in (("", before, range(1, 16)), (".after", after, range(16, 41))):
        for rank in range(processes):
            for step, seen in seen_rows(f"{run}{name}.seen-{rank}"):
                if step in counts:
                    rows[(step - 1) // 10].update(map(str, seen))
    assert list(rows) == [0, 1, 2, 3]
    assert sum(epoch.values()) == 79
    for number, found in rows.items():
        assert found == epoch, f"epoch {number}"


@pytest.fixture
def elastic():
    """The environment that torchrun gives its processes: its own store, and the number of restarts."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def told(attempt, job="a-job"):
        place = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        return place | {"TORCHELASTIC_RUN_ID": job, "TORCHELASTIC_RESTART_COUNT": str(attempt)}

    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "from_step"),
    [({1: {"at": {"17": "die"}}}, 15), ({0: {"kill": {"event": "open", "path": ".recipe.yaml.writing", "nth": 1}}}, 0)],
    ids=["in the middle", "before the first step"],
)
def test_a_launcher_starts_them_again(stage, whole, elastic, killed, from_step):
    """With the same command, which does not ask to resume: it is the same job, so it does."""
    recipe = stage.recipe()
    for attempt in range(2):
        of_rank = {rank: {"resume": False, **(killed.get(rank, {}) if attempt == 0 else {})} for rank in range(2)}
        started = stage.train_together(recipe, of_rank, elastic(attempt))
        codes = [child.wait() for child in started]
        if attempt == 0:
            assert codes.count(-signal.SIGKILL) == 1
            assert sorted(codes)[1] == 1
            assert f"rank {codes.index(-signal.SIGKILL)}" in started[codes.index(1)].said
    assert codes == [0, 0], [child.said for child in started]
    assert from_step - 5 <= goes_on_from(started[0].said) <= from_step  # its last save may not have come to its end
    assert_same_end(recipe["out"], whole)
    others = stage.train_together(recipe, {rank: {"resume": False} for rank in range(2)}, elastic(2, "another-job"))
    assert [child.wait() for child in others] == [2, 2]
    assert "contains a finished run" in others[0].said


@pytest.mark.slow
def test_torchrun_starts_them_again(stage, whole, tmp_path):
    """The real one: of two processes one kills itself, and the job ends by itself as if nothing had happened."""
    recipe = stage.recipe()
    (tmp_path / "order.json").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    search = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent / "distributed")])
    done = subprocess.run(
        [*command, str(HERE / "elastic_run.py"), str(tmp_path / "order.json")],
        env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert goes_on_from(done.stderr) in (10, 15)
    assert list(steps_by_process(f"{recipe['out']}.0.1").values()) == [[*range(1, 18)]]
    assert next(iter(steps_by_process(f"{recipe['out']}.1.1").values()))[-1] == NUM_STEPS
    assert_same_end(recipe["out"], whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_one_of_two_is_killed_at_random(stage, whole, seed):
    """Before something is done to a file, or by the clock from outside: whatever is left, both resume together."""
    random, rank, codes = draw(seed), seed % 2, [0, 0]
    whole_notes = notes_of(f"{whole}.rank-0")
    # the one that writes dies at one of its writes, the other one at any time
    nth = random.randint(1, int(0.8 * whole_notes["num_events"]))
    seconds = random.uniform(0.0, 0.8 * whole_notes["seconds"])
    while codes[rank] == 0:  # a machine that is less busy now may be done too soon
        recipe = stage.recipe()
        started = stage.train_together(recipe, {0: {"kill": {"nth": nth}}} if rank == 0 else None)
        if rank == 1:
            # once they have met: before that only a launcher can tell the other one
            started[0].wait_until((Path(recipe["out"]) / "run.json").exists)
            time.sleep(seconds)
            started[1].kill()
        codes = [child.wait() for child in started]
        nth, seconds = nth // 2, seconds / 2
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] in (0, 1), started[1 - rank].said  # 0 where it had nothing left to do with the other
    saved = saved_steps(recipe["out"])
    assert goes_on_from(stage.finish_together(recipe)) == (saved[-1] if saved else 0)
    assert_same_end(recipe["out"], whole)
