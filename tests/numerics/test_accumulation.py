"""Any split of a batch into micro-batches gives the gradient of the whole. SGD, because AdamW hides a wrong factor."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from trimtab import Engine
from trimtab.engine.gradients import _multiply
from trimtab.errors import LossError, RecipeError

VOCAB, LENGTH, ROWS = 11, 7, 12
IGNORED = -100
# Of the gradient's norm: the order of sums over 84 tokens in fp32; the operands of products in the half dtypes.
TOLERANCE = {
    "no": 32 * torch.finfo(torch.float32).eps,
    "fp16": 4 * torch.finfo(torch.float16).eps,
    "bf16": 4 * torch.finfo(torch.bfloat16).eps,
}


def a_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(VOCAB, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, VOCAB))


def rows_with_labels(seed: int, share_ignored: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < share_ignored] = IGNORED
    labels[0, 0] = 1  # never all of them
    return ids, labels


def mean_loss(model, ids, labels, smoothing=0.0):
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), label_smoothing=smoothing)


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def whole_batch_gradient(ids, labels, smoothing=0.0) -> torch.Tensor:
    model = a_model()
    mean_loss(model, ids, labels, smoothing).backward()
    return gradients(model)


def split_gradient(pieces, smoothing=0.0, **settings_) -> torch.Tensor:
    """The gradient that the optimizer sees after one window over `pieces`."""
    engine = Engine(device="cpu", gradient_accumulation_steps=len(pieces), **settings_)
    if engine.mixed_precision == "fp16":  # a first scale at which nothing overflows
        engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 1024.0})
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = engine.prepare(model, optimizer)
    for ids, labels in pieces:
        with engine.accumulate(model):
            loss = mean_loss(model, ids, labels, smoothing)
            engine.backward(loss, weight=(labels != IGNORED).sum())
            optimizer.step()
    assert engine.sync_gradients
    return gradients(model)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    cuts=st.sets(st.integers(1, ROWS - 1), max_size=ROWS - 1),
    smoothing=st.sampled_from([0.0, 0.1]),
    share_ignored=st.sampled_from([0.0, 0.5, 0.97]),
)
def test_any_split_gives_the_gradient_of_the_whole(seed, cuts, smoothing, share_ignored):
    ids, labels = rows_with_labels(seed, share_ignored)
    edges = [0, *sorted(cuts), ROWS]
    pieces = [(ids[a:b], labels[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    expected = whole_batch_gradient(ids, labels, smoothing)
    assert relative_difference(split_gradient(pieces, smoothing), expected) <= TOLERANCE["no"]


def test_a_forgotten_correction_would_be_seen():
    """The test above can fail: plain averaging of unequal micro-batches is far off."""
    ids, labels = rows_with_labels(0)
    model = a_model()
    for a, b in ((0, 2), (2, ROWS)):
        (mean_loss(model, ids[a:b], labels[a:b]) / 2).backward()
    assert relative_difference(gradients(model), whole_batch_gradient(ids, labels)) > 0.05


@pytest.mark.parametrize("precision", ["no", "fp16"])
@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_micro_batch_without_labels_contributes_nothing(precision, empty):
    ids, labels = rows_with_labels(5)
    labels[4 * empty : 4 * empty + 4] = IGNORED
    pieces = [(ids[i : i + 4], labels[i : i + 4]) for i in range(0, ROWS, 4)]
    assert math.isnan(mean_loss(a_model(), *pieces[empty]).item())
    found = split_gradient(pieces, mixed_precision=precision)
    assert torch.isfinite(found).all()
    assert relative_difference(found, whole_batch_gradient(ids, labels)) <= TOLERANCE[precision]


def test_a_weightless_loss_whose_backward_is_nan_contributes_nothing():
    """A mean written by hand as sum / count has NaN derivatives where the count is 0; none comes through."""
    engine = Engine(device="cpu", gradient_accumulation_steps=2)
    model, optimizer = engine.prepare(layer := torch.nn.Linear(2, 1), torch.optim.SGD(layer.parameters(), lr=1.0))
    for count in (3, 0):
        with engine.accumulate(model):
            loss = (model(torch.ones(3, 2)).sum() * min(count, 1)) / torch.tensor(float(count))
            engine.backward(loss, weight=count)
            optimizer.step()
    assert torch.equal(layer.weight.grad, torch.ones(1, 2))


def test_a_window_without_any_label_steps_with_zero_gradients():
    ids, labels = rows_with_labels(1)
    labels[:] = IGNORED
    pieces = [(ids[:6], labels[:6]), (ids[6:], labels[6:])]
    engine = Engine(device="cpu", gradient_accumulation_steps=2)
    model = a_model()
    before = [p.clone() for p in model.parameters()]
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for ids, labels in pieces:
        with engine.accumulate(model):
            engine.backward(mean_loss(model, ids, labels), weight=(labels != IGNORED).sum())
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows_of_ten())


def rows_of_ten():
    ids, labels = rows_with_labels(8, share_ignored=0.0)
    return [(ids[i], labels[i]) for i in range(10)]


@pytest.mark.parametrize("data", ["map", "iterable", "lying-length"])
def test_the_last_partial_window_of_an_epoch_is_exact(data):
    """10 rows, micro-batches of 2, windows of 3: the second window holds 2 micro-batches."""
    loader = DataLoader(Stream() if data == "iterable" else rows_of_ten(), batch_size=2)
    if data == "lying-length":
        sampler = torch.utils.data.BatchSampler(range(10), 2, drop_last=False)
        loader = DataLoader(rows_of_ten(), batch_sampler=LyingBatchSampler(sampler))
    engine = Engine(device="cpu", gradient_accumulation_steps=3)
    model = a_model()
    model, optimizer, loader = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), loader)
    seen, windows = [], []
    for ids, labels in loader:
        seen.append((ids, labels))
        with engine.accumulate(model):
            engine.backward(mean_loss(model, ids, labels))
            optimizer.step()
            if engine.sync_gradients:
                windows.append((len(seen), gradients(model)))
                seen = []
            optimizer.zero_grad()
    ids, labels = rows_with_labels(8, share_ignored=0.0)
    assert [length for length, _ in windows] == [3, 2]
    assert relative_difference(windows[0][1], whole_batch_gradient(ids[:6], labels[:6])) <= TOLERANCE["no"]
    assert relative_difference(windows[1][1], whole_batch_gradient(ids[6:10], labels[6:10])) <= TOLERANCE["no"]


class LyingBatchSampler:
    """Promises more batches than it has, as samplers that drop or merge rows do."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches) + 7


def test_without_weights_it_is_bit_equal_to_dividing_by_hand():
    ids, labels = rows_with_labels(2, share_ignored=0.0)
    by_hand = a_model()
    for i in range(0, ROWS, 4):
        (mean_loss(by_hand, ids[i : i + 4], labels[i : i + 4]) / 3).backward()
    engine = Engine(device="cpu", gradient_accumulation_steps=3)
    model = engine.prepare(a_model())
    for i in range(0, ROWS, 4):
        with engine.accumulate(model):
            engine.backward(mean_loss(model, ids[i : i + 4], labels[i : i + 4]))
    assert torch.equal(gradients(model), gradients(by_hand))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_any_clipper_sees_the_true_gradients(precision):
    """torch's own clip function, called by hand after the last backward, in every precision."""
    ids, labels = rows_with_labels(4)
    engine = Engine(precision, device="cpu", gradient_accumulation_steps=2)
    model = engine.prepare(a_model())
    for a, b in ((0, 3), (3, ROWS)):
        with engine.accumulate(model):
            engine.backward(mean_loss(model, ids[a:b], labels[a:b]), weight=(labels[a:b] != IGNORED).sum())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert norm.item() == pytest.approx(whole_batch_gradient(ids, labels).norm().item(), rel=TOLERANCE[precision])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_the_step_is_that_of_the_whole_batch(fused, precision):
    ids, labels = rows_with_labels(6)
    whole = a_model()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5, fused=fused)
    mean_loss(whole, ids, labels).backward()
    torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
    optimizer.step()
    engine = Engine(precision, device="cpu", gradient_accumulation_steps=3)
    model = a_model()
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5, fused=fused))
    start = torch.cat([p.detach().clone().flatten() for p in a_model().parameters()])
    for a, b in ((0, 1), (1, 4), (4, ROWS)):
        with engine.accumulate(model):
            engine.backward(mean_loss(model, ids[a:b], labels[a:b]), weight=(labels[a:b] != IGNORED).sum())
            engine.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    ours, theirs = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, whole))
    moved = (theirs - start).norm()
    # the step is a difference of weights, each of which was rounded
    allowed = TOLERANCE[precision] * moved + torch.finfo(torch.float32).eps * start.norm()
    assert (ours - theirs).norm() <= allowed < 0.01 * moved


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_loop_without_accumulate(precision, is_weighted):
    """The loop divides the loss itself, or passes weights, uses no_sync but for the last, and decides when to step."""
    ids, labels = rows_with_labels(9, share_ignored=0.5 if is_weighted else 0.0)
    engine = Engine(precision, device="cpu")
    model = a_model()
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(2):
        for a, b in ((0, 2), (2, 3), (3, ROWS)) if is_weighted else ((0, 4), (4, 8), (8, ROWS)):
            with engine.no_sync(model) if b < ROWS else nullcontext():
                loss = mean_loss(model, ids[a:b], labels[a:b])
                if is_weighted:
                    engine.backward(loss, weight=(labels[a:b] != IGNORED).sum().item())
                else:
                    engine.backward(loss / 3)
        found = gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        assert relative_difference(found, whole_batch_gradient(ids, labels)) <= TOLERANCE[precision]


def test_two_losses_of_one_micro_batch_add_up():
    engine = Engine(device="cpu", gradient_accumulation_steps=2)
    layer = torch.nn.Linear(2, 1, bias=False)
    model, optimizer = engine.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.0))
    for count in (1, 3):
        with engine.accumulate(model):
            for _ in range(2):
                engine.backward(model(torch.full((count, 2), float(count))).mean(), weight=count)
            optimizer.step()
    # mean over 4 rows of (1, 3, 3, 3), twice
    assert torch.allclose(layer.weight.grad, torch.full((1, 2), 2 * (1 + 9) / 4))


def test_weights_in_part_of_a_window_are_refused():
    engine = Engine(device="cpu", gradient_accumulation_steps=2)
    model = engine.prepare(torch.nn.Linear(1, 1))
    with engine.accumulate(model):
        engine.backward(model(torch.ones(1, 1)).sum(), weight=3)
    with engine.accumulate(model), pytest.raises(LossError, match="with a weight and without one"):
        engine.backward(model(torch.ones(1, 1)).sum())


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, torch.ones(2)])
def test_impossible_weights_are_refused(weight):
    engine = Engine(device="cpu")
    model = engine.prepare(torch.nn.Linear(1, 1))
    with pytest.raises(LossError, match="weight"):
        engine.backward(model(torch.ones(1, 1)).sum(), weight=weight)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, None])
def test_impossible_window_lengths_are_refused(steps):
    with pytest.raises(RecipeError, match="gradient_accumulation_steps"):
        Engine(gradient_accumulation_steps=steps)


def test_two_optimizers_that_step_one_after_the_other_in_a_window():
    """The first one's step must not hide from the second that its gradients hold a correction already."""
    engine = Engine(device="cpu", gradient_accumulation_steps=2)
    layers = [torch.nn.Linear(1, 1, bias=False) for _ in range(2)]
    models = engine.prepare(*layers)
    optimizers = engine.prepare(*(torch.optim.SGD(layer.parameters(), lr=0.0) for layer in layers))
    for rows in (1, 3):
        with engine.accumulate(*models):
            for model, optimizer in zip(models, optimizers, strict=True):
                engine.backward(model(torch.full((rows, 1), float(rows))).mean(), weight=rows)
                optimizer.step()
    assert [layer.weight.grad.item() for layer in layers] == [pytest.approx(2.5), pytest.approx(2.5)]


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_gradients_that_a_plain_loop_throws_away_count_no_more(precision):
    engine = Engine(precision, device="cpu")
    if precision == "fp16":
        engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 64.0})
    layer = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = engine.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.0))
    engine.backward(model(torch.ones(4, 1)).mean() * (float("inf") if precision == "fp16" else 1.0), weight=4)
    optimizer.zero_grad()
    engine.backward(model(torch.ones(4, 1)).mean(), weight=4)
    assert layer.weight.grad.item() == pytest.approx(1.0)
    optimizer.step()
    assert not engine.optimizer_step_was_skipped


def test_a_closure_that_is_called_many_times_sees_the_same_gradient():
    engine = Engine(device="cpu")
    layer = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = engine.prepare(layer, torch.optim.LBFGS(layer.parameters(), lr=1e-9, max_iter=3))
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 1)).mean()
        engine.backward(loss, weight=4)
        seen.append(layer.weight.grad.item())
        return loss

    optimizer.step(closure)
    assert seen == [pytest.approx(1.0)] * len(seen)
    assert len(seen) >= 2


def test_a_closure_is_refused_in_fp16():
    engine = Engine("fp16", device="cpu")
    layer = torch.nn.Linear(1, 1)
    _, optimizer = engine.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    with pytest.raises(RecipeError, match="closure"):
        optimizer.step(lambda: None)


def test_weights_on_the_device_may_begin_with_nothing(monkeypatch):
    """What a device's weights go through, on the CPU: no host read, so zero is a value like any other."""
    from trimtab.engine import accumulation

    monkeypatch.setattr(accumulation, "_checked_weight", lambda weight, device: weight.float())
    engine = Engine(device="cpu")
    layer = torch.nn.Linear(1, 1, bias=False)
    model = engine.prepare(layer)
    engine.backward(model(torch.ones(1, 1)).mean(), weight=torch.tensor(0))
    engine.backward(model(torch.ones(4, 1)).mean(), weight=torch.tensor(4))
    assert layer.weight.grad.item() == pytest.approx(1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("factor", [1.003, torch.tensor(1.003)], ids=["on the host", "on the device"])
def test_gradients_are_not_multiplied_with_a_rounded_factor(monkeypatch, dtype, factor):
    if isinstance(factor, torch.Tensor):
        monkeypatch.setattr(torch, "_foreach_mul_", _foreach_mul_as_on_an_accelerator)
    before = [torch.randn(300, 2).to(dtype), torch.randn(()).to(dtype), torch.randn(7)]
    after = [gradient.clone() for gradient in before]
    _multiply(after, factor)
    for gradient, result in zip(before, after, strict=True):
        assert torch.equal(result, (gradient.float() * 1.003).to(gradient.dtype))


def _foreach_mul_as_on_an_accelerator(tensors, factor):
    """CUDA's kernels round a factor without dimensions to the dtype of a tensor that has some; the CPU's do not."""
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.dtype) if tensor.dim() else factor)


def test_token_weights_are_exact_on_bf16_gradients():
    engine = Engine(device="cpu", gradient_accumulation_steps=3)
    model, optimizer = engine.prepare(*_a_bf16_linear())
    plain, _ = _a_bf16_linear()
    num_tokens = [3, 1000, 7]  # the expected total is that of three micro-batches like the first
    for count in num_tokens:
        inputs = torch.randn(4, 32).bfloat16()
        with engine.accumulate(model):
            engine.backward(model(inputs).float().square().mean(), weight=count)
        (plain(inputs).float().square().mean() * (count / (3 * num_tokens[0]))).backward()
    factor = 3 * num_tokens[0] / sum(num_tokens)
    assert torch.equal(model.weight.grad, (plain.weight.grad.float() * factor).bfloat16())


def _a_bf16_linear():
    torch.manual_seed(5)
    model = torch.nn.Linear(32, 32).bfloat16()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
