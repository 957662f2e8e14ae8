"""Updates in backward call what watches an optimizer's steps, as a step after backward does."""

import functools

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trimtab.optim.build import build_optimizer
from trimtab.optim.in_backward import update_in_backward, updates_of


def a_model():
    """Three weights, updated in backward, and their optimizer."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer = build_optimizer("adamw", [{"params": list(model.parameters())}], lr=1e-3)
    update_in_backward(model, optimizer)
    updates_of(model).begin_window(1)
    return model, optimizer


@pytest.mark.parametrize(
    "watch",
    [
        lambda optimizer: optimizer.register_step_pre_hook,
        lambda optimizer: optimizer.register_step_post_hook,
        lambda optimizer: register_optimizer_step_pre_hook,
        lambda optimizer: register_optimizer_step_post_hook,
    ],
)
def test_hooks_see_every_update(watch):
    model, optimizer = a_model()
    seen = []
    handle = watch(optimizer)(lambda made, *_: seen.append(len(made.param_groups[0]["params"])))
    model(torch.ones(2, 4)).sum().backward()
    handle.remove()
    assert seen == [1, 1, 1], "one parameter in each"


def test_a_profiler_sees_every_update():
    model, _ = a_model()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        model(torch.ones(2, 4)).sum().backward()
    found = {event.key: event.count for event in profile.key_averages()}
    assert found["Optimizer.step#AdamW.step"] == 3


def test_what_replaces_the_step_of_a_class_is_called(monkeypatch):
    model, optimizer = a_model()
    seen, own = [], type(optimizer).step

    @functools.wraps(own)
    def counted(self, *args, **kwargs):
        seen.append(len(self.param_groups[0]["params"]))
        return own(self, *args, **kwargs)

    monkeypatch.setattr(type(optimizer), "step", counted)
    model(torch.ones(2, 4)).sum().backward()
    assert seen == [1, 1, 1]
