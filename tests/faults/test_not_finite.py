"""A loss that is not a number: the run stops and explains, or leaves the step out, or goes back and around it, once."""

import json
import math
import shlex
from pathlib import Path

import pytest
from fault_stage import assert_same_end, goes_on_from, notes_of, saved_steps, seen_rows, status_of, steps_by_process

from tiny_runs import GOOD, lines_of, reviews, write_csv
from trimtab.runs.journal import VOLATILE_KEYS

BAD_LENGTH = 14  # in tokens: no other row is so long
BAD_TEXT = " ".join(GOOD * 3)
NUM_ROWS = 80


@pytest.fixture(scope="module")
def recipe_of(stage):
    """Makes recipes whose data have one row without a loss, for 10 steps an epoch."""
    rows = write_csv(stage.folder / "bad.csv", [*reviews(NUM_ROWS - 1), {"text": BAD_TEXT, "label": "good"}])
    held_out = write_csv(stage.folder / "held-out.csv", reviews(9, first=100))

    def make(**train):
        data = {"train": str(rows), "eval": str(held_out)}
        # by this seed the row comes at step 7 and at step 19, some steps after states that were saved
        return stage.recipe(train={"log_every": 1, **train}, data=data, seed=9)

    return make


def order_of_rows(stage, recipe):
    """The rows of each step of a run of two epochs in which the bad one does no harm; made once."""
    path = stage.folder / "no-harm.seen"
    if not path.exists():
        harmless = recipe | {"out": str(stage.folder / "no-harm"), "train": recipe["train"] | {"epochs": 2}}
        stage.finish(harmless, loss={"seen": str(path)})
    return [rows for _, rows in seen_rows(path)]


def steps_of_the_bad_row(stage, recipe):
    """At which steps the bad row comes."""
    return [step for step, rows in enumerate(order_of_rows(stage, recipe), 1) if BAD_LENGTH in map(len, rows)]


def bad_rows(run, step):
    return [json.loads(line) for line in (Path(run) / f"bad-rows-step-{step}.jsonl").read_text().splitlines()]


def lines_after(run, step):
    return [
        {key: value for key, value in line.items() if key not in VOLATILE_KEYS}
        for line in lines_of(run)
        if line["step"] > step
    ]


@pytest.mark.slow
def test_stop_explains_and_the_command_that_it_names_goes_on(stage, recipe_of):
    recipe = recipe_of(epochs=1)
    (bad,) = [step for step in steps_of_the_bad_row(stage, recipe) if step <= 10]
    assert bad > 5, "the test wants a state before it"
    child = stage.train(recipe, loss={"bad_length": BAD_LENGTH})
    assert child.wait() == 1
    said = child.said
    assert f"LossNotFinite: the loss or the gradients of step {bad} are not finite" in said
    assert f"The rows of that step are in {recipe['out']}/bad-rows-step-{bad}.jsonl" in said
    for number, words in ((1, "train.lr"), (2, "train.max_grad_norm"), (3, "train.on_nan: skip")):
        assert any(line.strip().startswith(f"{number}.") and words in line for line in said.splitlines())
    assert "Traceback" not in said
    assert status_of(recipe["out"])["state"] == "failed"
    # the rows are those of the step, with the words that a user can look for
    rows = bad_rows(recipe["out"], bad)
    assert sorted(row["input_ids"] for row in rows) == sorted(order_of_rows(stage, recipe)[bad - 1])
    assert any(BAD_TEXT in row["text"] for row in rows)
    # no state of the broken model was saved, and the run resumes as the message says
    assert saved_steps(recipe["out"]) == [5]
    command = shlex.split(said.split("the last good checkpoint is that of step 5: ")[1].splitlines()[0])
    assert command == ["trimtab", "resume", recipe["out"], "--from", "step-5", "--set", "train.on_nan=skip"]
    options = {"from_step": command[4], "sets": command[6:]}
    said = stage.finish(recipe, command="resume", options=options, loss={"bad_length": BAD_LENGTH})
    assert goes_on_from(said) == 5
    assert f"step {bad} is not finite and was skipped" in said
    assert status_of(recipe["out"])["state"] == "finished"
    assert all(math.isfinite(line["loss"]) for line in lines_after(recipe["out"], bad) if "loss" in line)


@pytest.mark.slow
def test_skip_leaves_the_step_out(stage, recipe_of):
    """Weights, moments and schedule are those of before; killed after it, the run still ends with the same bits."""
    recipe = recipe_of(epochs=2, on_nan="skip", log_every=3)
    bad = steps_of_the_bad_row(stage, recipe)
    loss = {"bad_length": BAD_LENGTH}
    said = stage.finish(recipe, loss=loss)
    assert len(bad) == 2
    for step in bad:
        assert f"step {step} is not finite and was skipped; its rows are in {recipe['out']}/bad-rows" in said
        assert any(BAD_TEXT in row["text"] for row in bad_rows(recipe["out"], step))
    assert notes_of(recipe["out"])["fit"]["step"] == 20
    state = json.loads((Path(recipe["out"]) / "checkpoints" / "step-20" / "state.json").read_text())
    assert state["scheduler"]["last_epoch"] == 20 - len(bad)
    again = recipe_of(epochs=2, on_nan="skip", log_every=3)
    assert stage.train(again, loss=loss, at={"12": "saved 10; die"}).wait() == -9
    assert goes_on_from(stage.finish(again, loss=loss)) == 10 > bad[0]
    assert_same_end(again["out"], recipe["out"])


def test_rewind_goes_around_it_once(stage, recipe_of):
    """Back to the state before, and on with the rows after it: none of them twice. The next time it stops."""
    recipe = recipe_of(epochs=2, on_nan="rewind")
    first, second = steps_of_the_bad_row(stage, recipe)
    saved = (first - 1) // 5 * 5
    seen = stage.folder / "rewound.seen"
    child = stage.train(recipe, loss={"bad_length": BAD_LENGTH, "seen": str(seen)})
    assert child.wait() == 1
    rows = f"{recipe['out']}/bad-rows-step-{first}.jsonl"
    assert f"step {first} is not finite (its rows are in {rows}): rewound to step {saved}" in child.said
    # steps are counted anew from there, rows are not: step 1 after it takes the rows that would have come next
    passed_over = first - saved
    (steps,) = steps_by_process(recipe["out"]).values()
    assert steps == [*range(1, first + 1), *range(saved + 1, second - passed_over + 1)]
    assert [rows for _, rows in seen_rows(seen)] == order_of_rows(stage, recipe)[:second]
    assert f"the gradients of step {second - passed_over} are not finite" in child.said
    assert BAD_TEXT in str(bad_rows(recipe["out"], second - passed_over))


@pytest.mark.slow
def test_killed_before_and_after_a_rewind(stage, recipe_of):
    """The state to go back to is one that another process has saved; the rows that were passed over stay so."""
    whole, recipe = (recipe_of(epochs=1.2, on_nan="rewind") for _ in range(2))
    loss = {"bad_length": BAD_LENGTH}
    bad = steps_of_the_bad_row(stage, recipe)[0]
    saved = (bad - 1) // 5 * 5
    stage.finish(whole, loss=loss)
    assert stage.train(recipe, at={str(saved + 1): f"saved {saved}; die"}, loss=loss).wait() == -9
    rewound = stage.train(recipe, at={"11": "saved 10; die"}, loss=loss)
    assert rewound.wait() == -9
    assert goes_on_from(rewound.said) == saved
    assert f"rewound to step {saved}" in rewound.said
    said = stage.finish(recipe, loss=loss)
    assert goes_on_from(said) == 10
    assert "is not finite" not in said
    assert_same_end(recipe["out"], whole["out"])


@pytest.mark.slow
def test_two_processes_rewind_together(stage, recipe_of):
    """Only one of them has the bad row: both go back, both go around it, and no row comes twice."""
    recipe = recipe_of(epochs=1, on_nan="rewind")
    order = order_of_rows(stage, recipe)
    (bad,) = [step for step in steps_of_the_bad_row(stage, recipe) if step <= 10]
    seen = [stage.folder / f"rewound-together-{rank}.seen" for rank in range(2)]
    losses = [{"bad_length": BAD_LENGTH, "skip_calls": 1, "seen": str(path)} for path in seen]
    said = stage.finish_together(recipe, {rank: {"loss": loss} for rank, loss in enumerate(losses)})
    assert f"step {bad} is not finite" in said
    first, second = (seen_rows(path) for path in seen)
    assert [step for step, _ in first] == [step for step, _ in second]
    together = [sorted([*rows, *others]) for (_, rows), (_, others) in zip(first, second, strict=True)]
    assert together == [sorted(rows) for rows in order[: len(together)]]
    assert len(together) == 10 + bad - (bad - 1) // 5 * 5


@pytest.mark.slow
def test_rewind_keeps_the_best_model(stage, recipe_of):
    """The best model may be one of the steps that are taken again: it stays, and everybody says the same of it."""
    train = {"epochs": 1, "on_nan": "rewind", "lr": 0.02, "warmup": 0}  # too fast: the loss goes down and up again
    recipe = recipe_of(**train) | {"evaluate": {"every": "1 steps", "metric": "loss"}}
    stage.finish(recipe, loss={"bad_length": BAD_LENGTH})
    losses = [(line["eval_loss"], line["step"]) for line in lines_of(recipe["out"]) if "eval_loss" in line]
    best_loss, best_step = min(losses)
    facts = json.loads((Path(recipe["out"]) / "best" / "trimtab.json").read_text())
    result = notes_of(recipe["out"])["fit"]
    assert (facts["metrics"]["loss"], facts["step"]) == (best_loss, best_step)
    assert (result["best_metric"], result["best_step"]) == (best_loss, best_step)
