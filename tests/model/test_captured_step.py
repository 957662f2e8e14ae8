"""Captured micro-batches: the gradients of the plain step, at fixed addresses, and a way back.

A graph is replaced by a stand-in that calls the captured function again, so these tests run without a GPU: they show
that a replay reads nothing but its own tensors and that the accumulation is exact. tests/gpu/test_graphs.py has the
same with CUDA graphs.
"""

import copy

import pytest
import torch

from repeated_graphs import Repeats
from trimtab import Engine
from trimtab.errors import RecipeError
from trimtab.model import captured_step
from trimtab.model.captured_step import capture_micro_batches, compute_captured, compute_plainly, compute_uncaptured
from trimtab.model.losses import StepLoss
from trimtab.training.step import take_step, window_gradients


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, input_ids):
        return self.second(torch.tanh(self.first(input_ids)))


def weighted_on_device(model, batch):
    """A mean over the positions with a label, whose number the host does not know."""
    logits, labels = model(batch["input_ids"]), batch["labels"]
    weight = (labels >= 0).sum()
    total = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
    return StepLoss(total / weight.clamp(min=1), weight, logits.detach())


def weighted_on_host(model, batch):
    logits = model(batch["input_ids"])
    return StepLoss(torch.nn.functional.cross_entropy(logits, batch["labels"].clamp(min=0)), len(logits), logits)


LOSSES = {"device": weighted_on_device, "host": weighted_on_host}


def batches(num_windows, sizes, seed=0):
    """Windows of micro-batches with these numbers of rows; some rows have no label."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(num_windows):
        yield [
            {
                "input_ids": torch.randn(size, 4, generator=draw),
                "labels": torch.randint(-1, 3, (size,), generator=draw),
            }
            for size in sizes
        ]


def train(model, loss, windows, *, compute, precision="no", optimizer=torch.optim.AdamW, watch=lambda model: None):
    engine = Engine(precision, device="cpu")
    model, optimizer = engine.prepare(model, optimizer(model.parameters(), lr=0.05))
    scheduler = engine.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer, 1.0))
    results = []
    for window in windows:
        result = window_gradients(engine, model, loss, iter(window), len(window), 1.0, compute=compute)
        watch(model)
        results.append((result.loss_sum.clone(), torch.as_tensor(result.weight).float(), result.grad_norm))
        for batch in window:
            batch["input_ids"].fill_(torch.nan)  # a replay that reads the batch itself would show it
        take_step(optimizer, scheduler, result)
    return results


def both(loss, sizes, num_windows=5, recorder=None, **options):
    torch.manual_seed(0)
    plain = Model()
    captured = copy.deepcopy(plain)
    recorder = recorder or Repeats()
    state = capture_micro_batches(captured, recorder)
    expected = train(plain, loss, batches(num_windows, sizes), compute=compute_plainly, **options)
    found = train(captured, loss, batches(num_windows, sizes), compute=compute_captured, **options)
    # The engine divides a weight in host memory as a Python number, in double precision; a graph never does.
    same = torch.equal if loss is weighted_on_host or len(sizes) == 1 else close
    for mine, theirs in zip(found, expected, strict=True):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True))
    for name, parameter in plain.named_parameters():
        assert same(parameter, captured.get_parameter(name)), name
    return state, recorder


def close(a, b):
    """Equal but for the last bits of a few steps."""
    return torch.allclose(a, b, rtol=64 * torch.finfo(torch.float32).eps, atol=1e-6)


def test_a_rehearsal_computes_with_the_weights_of_captured_steps():
    """Else blocks would be compiled twice: for weights in fp32, and for their copies."""
    model, recorder, seen = Model(), Repeats(), []
    capture_micro_batches(model, recorder)
    model.first.register_forward_hook(lambda layer, *_: seen.append(layer.weight.dtype))
    ((window,), (other,)) = list(batches(2, (4,)))
    engine = Engine("bf16", device="cpu")
    model = engine.prepare(model)
    for batch, compute in ((window, compute_uncaptured), (window, compute_uncaptured), (other, compute_captured)):
        with engine.accumulate(model):
            compute(engine, model, weighted_on_host, batch)
    assert seen == [torch.bfloat16] * 3
    assert recorder.num_recorded == 0


# ---------------------------------------------------------------------- exactness


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("sizes", [(4,), (4, 4, 4), (5, 3, 4), (2, 6)], ids=str)
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_weights_are_those_of_the_plain_step(kind, sizes, precision):
    state, recorder = both(LOSSES[kind], sizes, precision=precision)
    assert state.num_graphs == recorder.num_recorded == len(set(sizes))
    assert recorder.num_replayed > 0


def test_a_size_runs_once_before_it_is_captured():
    _, recorder = both(weighted_on_device, (4,), num_windows=3)
    assert (recorder.num_recorded, recorder.num_replayed) == (1, 2)


def test_the_first_micro_batch_of_accumulation_is_replayed():
    """Graphs divide by the expected weight of a window: the weight of the first run of that size sets it."""
    torch.manual_seed(0)
    model, recorder = Model(), Repeats()
    state = capture_micro_batches(model, recorder)
    alone = list(batches(2, (4,)))
    windows = list(batches(2, (4, 4), seed=1))
    train(model, weighted_on_device, alone + windows, compute=compute_captured)
    assert state.num_graphs == 1
    assert recorder.num_replayed == 1 + 4


def test_micro_batches_with_and_without_a_graph_mix(monkeypatch):
    monkeypatch.setattr(captured_step, "MOST_GRAPHS", 1)
    for sizes in ((4, 6), (6, 4), (6, 4, 5)):
        state, _ = both(weighted_on_device, sizes)
        assert state.num_graphs == 1


def test_a_micro_batch_without_labels_contributes_nothing():
    torch.manual_seed(0)
    plain = Model()
    captured = copy.deepcopy(plain)
    capture_micro_batches(captured, Repeats())
    for model, compute in ((plain, compute_plainly), (captured, compute_captured)):
        windows = list(batches(4, (4, 4)))
        windows[3][0]["labels"].fill_(-1)
        train(model, weighted_on_device, windows, compute=compute)
    assert close(plain.first.weight, captured.first.weight)


# ---------------------------------------------------------------------- gradients


def test_gradients_stay_at_their_addresses_and_unused_parameters_have_none():
    addresses = []

    def watch(model):
        assert model.unused.weight.grad is None, "weight decay would change it"
        addresses.append([p.grad.data_ptr() for p in model.parameters() if p.grad is not None])

    torch.manual_seed(0)
    model = Model()
    capture_micro_batches(model, Repeats())
    train(model, weighted_on_device, batches(6, (4, 4)), compute=compute_captured, watch=watch)
    assert len(addresses[0]) == 4
    assert addresses[2] == addresses[3] == addresses[5]


def test_graphs_are_captured_again_when_parameters_are_unfrozen():
    torch.manual_seed(0)
    plain = Model()
    plain.first.requires_grad_(False)
    captured = copy.deepcopy(plain)
    recorder = Repeats()
    capture_micro_batches(captured, recorder)
    for model, compute in ((plain, compute_plainly), (captured, compute_captured)):
        seen = []

        def watch(model, seen=seen):
            seen.append(None)
            if len(seen) == 3:
                model.first.requires_grad_(True)

        train(model, weighted_on_device, batches(6, (4,)), compute=compute, watch=watch)
    assert recorder.num_recorded == 2
    assert torch.equal(plain.first.weight, captured.first.weight)
    assert torch.equal(plain.second.weight, captured.second.weight)


# ---------------------------------------------------------------------- a way back


class FailsInBackward(Repeats):
    """A capture that gets as far as the backward, whose gradients were never computed."""

    def record(self, work):
        work()
        raise RuntimeError("operation not permitted when stream is capturing")


def test_gradients_of_a_failed_capture_are_dropped():
    """Of the only micro-batch of a step, for which autograd makes new ones."""
    state, _ = both(weighted_on_device, (4,), recorder=FailsInBackward())
    assert state.failure is not None


def test_a_capture_that_fails_leads_back_to_the_plain_step(caplog):
    with caplog.at_level("INFO", "trimtab"):
        state, _ = both(weighted_on_device, (4, 6), recorder=Repeats(fails=True))
    assert sum("could not be captured" in record.message for record in caplog.records) == 1
    assert "not permitted" in state.failure
    recorder = Repeats()
    model = Model()
    other = capture_micro_batches(model, recorder)
    other.load_state_dict(state.state_dict())
    train(model, weighted_on_device, batches(3, (4,)), compute=compute_captured)
    assert not recorder.num_recorded


def test_nothing_is_captured_on_other_devices():
    model = Model()
    state = capture_micro_batches(model)
    train(model, weighted_on_device, batches(3, (4,)), compute=compute_captured)
    assert state.num_graphs == 0
    assert state.failure is None


def test_several_processes_are_refused():
    class Distributed:
        use_distributed = True

    model = Model()
    capture_micro_batches(model, Repeats())
    with pytest.raises(RecipeError, match=r"one process[^$]*train\.compile: blocks"):
        compute_captured(Distributed(), model, weighted_on_device, next(batches(1, (4,)))[0])
