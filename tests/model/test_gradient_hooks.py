"""Memory that runs out in a hook of a complete gradient: backward ends, everything is freed, and then it raises."""

import gc
import weakref

import pytest
import torch
from torch import nn

from trimtab.model.gradient_hooks import call_when_hooks_run_out, register_gradient_hook
from trimtab.optim.build import build_optimizer
from trimtab.optim.host_update import build_on_host
from trimtab.optim.in_backward import update_in_backward, updates_of
from trimtab.optim.streamed_update import build_streamed

CPU = torch.device("cpu")
MESSAGE = "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …"
NAMES = [f"{layer}.{name}" for layer in range(3) for name in ("q", "k", "v", "o")]


class Attention(nn.Module):
    """Has operations that are ready to run at the same time in backward."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, hidden):
        weights = (self.q(hidden) @ self.k(hidden).T).softmax(-1)
        return hidden + self.o(weights @ self.v(hidden)).tanh()


class Saved:
    """What autograd saves for backward, one object for each tensor."""

    def __init__(self):
        self.alive = weakref.WeakSet()

    class One:
        def __init__(self, tensor):
            self.tensor = tensor.detach()

    def pack(self, tensor):
        one = self.One(tensor)
        self.alive.add(one)
        return one

    def loss_of(self, model):
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda one: one.tensor):
            loss = model(torch.linspace(-1, 1, 12).view(3, 4)).sum()
        assert len(self.alive) > 0
        return loss


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(3)))


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


class Hooks:
    """Takes gradients as an update in backward does, and runs out of memory at one parameter."""

    def __init__(self, model, fails_at, error=torch.OutOfMemoryError):
        self.taken, self.fails_at, self.error = {}, fails_at, error
        for name, parameter in model.named_parameters():
            register_gradient_hook(parameter, self.take, name=name)

    def take(self, parameter, name):
        gradient = parameter.grad
        if name == self.fails_at:
            raise self.error(MESSAGE)
        self.taken[name], parameter.grad = gradient, None


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_freed_wherever_memory_runs_out(name):
    model, saved = small_model(), Saved()
    hooks = Hooks(model, f"{name}.weight")
    loss = saved.loss_of(model)
    gc.disable()  # nothing waits for a garbage collection
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            loss.backward()
        assert str(caught.value) == MESSAGE
        assert caught.traceback[-1].name == "take", "the traceback leads to the hook"
        assert len(saved.alive) == 0
        assert gradients_of(model) == [None] * len(gradients_of(model))
        error = weakref.ref(caught.value)
        del caught
        assert error() is None
    finally:
        gc.enable()

    hooks.fails_at, hooks.taken = None, {}
    saved.loss_of(model).backward()
    expected = small_model()
    saved.loss_of(expected).backward()
    assert all(torch.equal(hooks.taken[name], parameter.grad) for name, parameter in expected.named_parameters())


def test_no_hook_does_anything_after_the_one_that_failed():
    model = small_model()
    hooks = Hooks(model, "1.o.weight")
    with pytest.raises(torch.OutOfMemoryError):
        Saved().loss_of(model).backward()
    assert {name.partition(".")[0] for name in hooks.taken} <= {"1", "2"}
    assert len(hooks.taken) == 9, "those of the last block, and the bias"


def test_callbacks_that_others_queue_later_run_before_the_error():
    """Such as one that moves weights back to the host."""
    model, seen = small_model(), []
    hooks = Hooks(model, "2.o.weight")
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def block_comes(gradient):
        queue(lambda: seen.append("done"))

    model[0].register_forward_hook(lambda module, args, output: output.register_hook(block_comes) and None)
    with pytest.raises(torch.OutOfMemoryError):
        Saved().loss_of(model).backward()
    assert seen == ["done"]
    assert list(hooks.taken) == ["2.o.bias"]


def test_a_listener_is_called_while_activations_are_in_memory():
    model, saved, seen = small_model(), Saved(), []
    hooks = Hooks(model, "2.v.weight")
    loss = saved.loss_of(model)
    with call_when_hooks_run_out(lambda: seen.append(len(saved.alive))), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    assert len(seen) == 1
    assert seen[0] > 0
    assert hooks.fails_at not in hooks.taken


def test_other_errors_stop_backward_at_once():
    model = small_model()
    hooks = Hooks(model, "2.o.weight", ValueError)
    with pytest.raises(ValueError, match="64.00 MiB"):
        Saved().loss_of(model).backward()
    assert len(hooks.taken) <= 1


# ---------------------------------------------------------------------- lifetime


def build(groups, device):
    return build_optimizer("adamw", groups, lr=1e-2, device=device)


@pytest.mark.parametrize("update", ["in-backward", "host", "streamed"])
def test_parameters_gradients_and_optimizer_are_freed_with_the_model(update):
    """Also where hooks of parameters belong to objects that refer to them, which torch hides from Python."""

    def train_a_step():
        model = small_model()
        groups = [{"params": list(model.parameters())}]
        if update == "in-backward":
            optimizer = build(groups, CPU)
            update_in_backward(model, optimizer)
        elif update == "host":
            optimizer = build_on_host(build, groups)
        else:
            optimizer = build_streamed(build, groups, CPU, model)
        before = model[0].q.weight.detach().clone()
        updates_of(model).begin_window(1)
        Saved().loss_of(model).backward()
        optimizer.step()
        assert not torch.equal(before, model[0].q.weight)
        return [weakref.ref(thing) for thing in (model, optimizer, *model.parameters())]

    found = train_a_step()
    gc.collect()
    assert [thing() for thing in found] == [None] * len(found)
