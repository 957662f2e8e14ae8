"""Schedules against those of transformers, against their formulas, and in edge cases."""

import math
import pickle

import pytest
import torch

from trimtab.checkpoint.codec import decode, encode
from trimtab.errors import RecipeError
from trimtab.optim.schedules import SCHEDULES, build_schedule

NUM_STEPS = 50


def make_optimizer(lr=0.5):
    """Two groups with rates of their own: a schedule multiplies each."""
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr * scale} for scale in (1, 2)]
    return torch.optim.SGD(groups, lr=lr)


def rates(scheduler, num=NUM_STEPS):
    """The learning rates that the optimizer steps really take."""
    seen = []
    for _ in range(num):
        seen.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("warmup", [0, 1, 7, 40])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("linear", "linear"),
        ("cosine", "cosine"),
        ("constant", "constant_with_warmup"),
        ("inverse-sqrt", "inverse_sqrt"),
        ("warmup-stable-decay", "warmup_stable_decay"),
    ],
)
def test_same_as_transformers(name, theirs, warmup):
    from transformers import get_scheduler

    own = {"num_decay_steps": NUM_STEPS // 5, "decay_type": "linear"} if name == "warmup-stable-decay" else None
    reference = get_scheduler(theirs, make_optimizer(), warmup, NUM_STEPS, scheduler_specific_kwargs=own)
    ours = build_schedule(name, make_optimizer(), num_steps=NUM_STEPS, warmup_steps=warmup)
    assert torch.allclose(torch.tensor(rates(ours)), torch.tensor(rates(reference)), rtol=1e-6, atol=1e-9)


def test_noam():
    scale, d_model, warmup = 2.0, 512, 20
    scheduler = build_schedule("noam", make_optimizer(scale), num_steps=None, warmup_steps=warmup, d_model=d_model)
    seen = [first for first, _ in rates(scheduler, 100)]
    expected = [scale * d_model**-0.5 * min(n**-0.5, n * warmup**-1.5) for n in range(1, 101)]
    assert seen == pytest.approx(expected, rel=1e-12)
    assert seen.index(max(seen)) == warmup - 1


def test_the_peak_of_noam_is_reported(caplog):
    """The usual 5e-5 as its scale would train nothing."""
    with caplog.at_level("INFO", logger="trimtab"):
        build_schedule("noam", make_optimizer(1.0), num_steps=None, warmup_steps=4000, d_model=512)
    assert "rises to 7.0e-04 at step 4000" in caplog.text


@pytest.mark.parametrize("name", ["linear", "cosine", "warmup-stable-decay"])
@pytest.mark.parametrize("warmup", [0, 5, 50, 80])
def test_bounded_always_and_zero_after_the_end(name, warmup):
    scheduler = build_schedule(name, make_optimizer(1.0), num_steps=NUM_STEPS, warmup_steps=warmup)
    seen = [first for first, _ in rates(scheduler, 2 * NUM_STEPS)]
    assert all(0.0 <= rate <= 1.0 for rate in seen)
    assert seen[NUM_STEPS:] == pytest.approx([0.0] * NUM_STEPS, abs=1e-12)
    assert any(rate > 0 for rate in seen[:NUM_STEPS])


def test_a_warmup_longer_than_the_run_is_reported(caplog):
    with caplog.at_level("INFO", logger="trimtab"):
        build_schedule("linear", make_optimizer(), num_steps=10, warmup_steps=11)
    assert "the warmup of 11 steps is longer than the run of 10" in caplog.text


@pytest.mark.parametrize("name", SCHEDULES)
def test_pickles_and_resumes(name):
    def build():
        return build_schedule(name, make_optimizer(), num_steps=NUM_STEPS, warmup_steps=6, d_model=64)

    whole = rates(build())
    assert len({rate for rate, _ in whole}) > 3
    first = build()
    rates(first, 20)
    encoded = encode(first.state_dict())
    resumed = build()
    resumed.load_state_dict(decode(encoded.tree, encoded.tensors.__getitem__))
    for group, rate in zip(resumed.optimizer.param_groups, resumed.get_last_lr(), strict=True):
        group["lr"] = rate
    assert rates(resumed, 30) == whole[20:]
    copied = pickle.loads(pickle.dumps(first))
    assert copied.get_last_lr() == first.get_last_lr()
    assert copied.lr_lambdas[0] == first.lr_lambdas[0]


@pytest.mark.parametrize(
    ("arguments", "problem", "cure"),
    [
        ({"name": "cosin"}, "did you mean cosine?", "one of linear, cosine"),
        ({"name": "inverse_sqrt"}, "did you mean inverse-sqrt?", "inverse-sqrt"),
        ({"num_steps": None}, "number of steps", "train.max_steps"),
        ({"num_steps": 0}, "a run of 0 steps", "train.epochs"),
        ({"warmup_steps": -1}, "train.warmup=-1", "of at least 0"),
        ({"name": "noam", "d_model": 8}, "needs a warmup", "train.warmup: 4000"),
        ({"name": "noam", "warmup_steps": 10}, "the width of the model", "hidden_size or d_model"),
    ],
)
def test_what_is_refused(arguments, problem, cure):
    settings = {"name": "linear", "num_steps": 10, "warmup_steps": 0, **arguments}
    with pytest.raises(RecipeError) as caught:
        build_schedule(settings.pop("name"), make_optimizer(), **settings)
    assert problem in caught.value.problem
    assert cure in caught.value.cure


@pytest.mark.parametrize("name", ["constant", "inverse-sqrt"])
def test_schedules_without_an_end_need_no_number_of_steps(name):
    scheduler = build_schedule(name, make_optimizer(1.0), num_steps=None, warmup_steps=0)
    assert all(math.isfinite(first) and first > 0 for first, _ in rates(scheduler))
