"""`Engine.forward_backward`: the gradients of `Engine.backward`, with CUDA graphs and without.

A graph is replaced by the stand-in of tests/model/test_captured_step.py, which calls the captured function again.
tests/gpu/test_engine_graphs.py has the same with CUDA graphs.
"""

import copy
import functools
import logging
from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from repeated_graphs import Repeats
from trimtab import Engine
from trimtab.distributed.world import World
from trimtab.engine import forward_backward
from trimtab.errors import DataError, LossError, PrepareError
from trimtab.model import captured_step
from trimtab.model.compiled_blocks import compile_blocks, compiled_blocks_of


@pytest.fixture
def recorder(monkeypatch):
    made = Repeats()
    monkeypatch.setattr(captured_step, "CudaRecorder", lambda: made)
    return made


@pytest.fixture(autouse=True)
def _said_is_kept(caplog, monkeypatch):
    caplog.set_level(logging.INFO, logger="trimtab")
    monkeypatch.setattr("trimtab.log._logged_once", set())


class Model(torch.nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
        self.other_head, self.drop = torch.nn.Linear(8, 3), torch.nn.Dropout(dropout)

    def forward(self, x, labels=None, head="second"):
        logits = getattr(self, head)(self.drop(torch.tanh(self.first(x))))
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels.clamp(min=0))
        return SimpleNamespace(logits=logits, loss=loss)


def weighted_on_device(model, batch):
    weight = (batch["labels"] >= 0).sum()
    logits = model(batch["x"]).logits
    total = torch.nn.functional.cross_entropy(logits, batch["labels"], ignore_index=-1, reduction="sum")
    return total / weight.clamp(min=1), weight


def weighted_on_host(model, batch):
    return model(**batch).loss, len(batch["x"])


def unweighted(model, batch):
    return model(**batch).loss


LOSSES = {"device": weighted_on_device, "host": weighted_on_host, "none": unweighted, "model's": None}


def rows(num_rows, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        {"x": torch.randn(4, generator=draw), "labels": torch.randint(-1, 3, (), generator=draw)}
        for _ in range(num_rows)
    ]


def new_loop(graphs, num_rows=22, batch_size=4, dropout=0.0, **settings):
    torch.manual_seed(0)
    model = Model(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine = Engine(device="cpu", cuda_graphs=graphs, **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(rows(num_rows), batch_size=batch_size)
    return engine, *engine.prepare(model, optimizer, loader, scheduler)


def by_backward(engine, model, batch, loss):
    result = model(**batch).loss if loss is None else loss(model, batch)
    value, weight = result if isinstance(result, tuple) else (result, None)
    engine.backward(value, weight)
    return value.detach()


def train(loop, loss, compute, *, accumulates, num_epochs=3):
    engine, model, optimizer, loader, scheduler = loop
    found = []
    for _ in range(num_epochs):
        for batch in loader:
            if accumulates:
                with engine.accumulate(model):
                    value = compute(engine, model, batch, loss)
                    norm = engine.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            else:
                value = compute(engine, model, batch, loss)
                norm = engine.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append((value.clone(), norm.clone()))
            batch["x"].fill_(torch.nan)  # a replay that reads the batch itself would show it
    return found


def verb(engine, model, batch, loss):
    return engine.forward_backward(model, batch, loss)


def equal(a, b):
    """Equal bits; norms of fp16 gradients that overflow are not finite."""
    return torch.equal(a, b) or bool((a.isnan() & b.isnan()).all())


def assert_same(found, expected, model, plain, same=equal):
    for mine, theirs in zip(found, expected, strict=True):
        assert all(same(a, b) for a, b in zip(mine, theirs, strict=True)), (mine, theirs)
    for name, parameter in plain.named_parameters():
        assert same(parameter, model.get_parameter(name)), name


def close(a, b):
    return torch.allclose(a, b, rtol=64 * torch.finfo(torch.float32).eps, atol=1e-6, equal_nan=True)


# ---------------------------------------------------------------------- the results of backward


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("num_steps", [0, 1, 3], ids=["plain loop", "accumulate 1", "accumulate 3"])
@pytest.mark.parametrize("graphs", [False, True], ids=["without graphs", "graphs"])
def test_weights_are_those_of_backward(kind, precision, num_steps, graphs, recorder):
    """An epoch has six batches, or one more: the last window then has one micro-batch, and it is smaller."""
    settings = {"mixed_precision": precision, "gradient_accumulation_steps": num_steps or 1}
    for num_rows in (24, 26):
        plain, other = (new_loop(which, num_rows, **settings) for which in (False, graphs))
        expected = train(plain, LOSSES[kind], by_backward, accumulates=num_steps > 0)
        found = train(other, LOSSES[kind], verb, accumulates=num_steps > 0)
        # The engine divides a weight in host memory as a Python number, in double precision; a graph never does.
        is_rounded = graphs and kind == "device" and num_steps != 1
        assert_same(found, expected, other[1], plain[1], close if is_rounded else equal)
    assert (recorder.num_replayed > 0) is graphs


def test_a_plain_loop_that_accumulates_by_itself(recorder):
    losses, models = [], []
    for graphs, compute in ((False, by_backward), (True, verb)):
        engine, model, optimizer, loader, _ = new_loop(graphs, gradient_accumulation_steps=2)
        found = []
        for _ in range(3):
            for number, batch in enumerate(loader):
                found.append((compute(engine, model, batch, None),))
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        losses.append(found)
        models.append(model)
    assert recorder.num_replayed > 0
    assert_same(losses[1], losses[0], models[1], models[0])


def test_a_window_cut_short_as_in_accelerate(recorder):
    """Accelerate divides a shorter last window by the length of a full one."""
    from trimtab.accelerate import Accelerator

    models = []
    for graphs, compute in ((False, by_backward), (True, verb)):
        torch.manual_seed(0)
        model = Model()
        engine = Accelerator(cpu=True, gradient_accumulation_steps=4, cuda_graphs=graphs)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parts = engine.prepare(
            model, optimizer, DataLoader(rows(24), batch_size=4), torch.optim.lr_scheduler.ConstantLR(optimizer)
        )
        train((engine, *parts), None, compute, accumulates=True)
        models.append(model)
    assert recorder.num_replayed > 0
    assert_same([], [], models[1], models[0])


def test_random_draws_are_those_of_backward(recorder):
    states = []
    for graphs, compute in ((False, by_backward), (True, verb)):
        loop = new_loop(graphs, dropout=0.5)
        train(loop, None, compute, accumulates=True)
        states.append((torch.random.get_rng_state(), loop[1].first.weight.detach()))
    assert torch.equal(states[0][0], states[1][0])
    assert torch.equal(states[0][1], states[1][1])


def test_two_losses_of_one_micro_batch_are_added(recorder):
    grads = []
    for graphs, compute in ((False, by_backward), (True, verb)):
        engine, model, optimizer, loader, _ = new_loop(graphs)
        for batch in loader:
            with engine.accumulate(model):
                compute(engine, model, batch, None)
                compute(engine, model, batch, lambda model, batch: model(**batch).loss * 0.5)
                grads.append(model.first.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()
    half = len(grads) // 2
    assert recorder.num_replayed > 0
    assert all(torch.equal(a, b) for a, b in zip(grads[:half], grads[half:], strict=True))


# ---------------------------------------------------------------------- what a graph belongs to


Pair = namedtuple("Pair", "x labels")


@pytest.mark.parametrize(
    "nest",
    [
        lambda b: [b["x"], b["labels"]],
        lambda b: (b["x"], {"deep": [b["labels"], None, "word", 3]}),
        lambda b: Pair(b["x"], b["labels"]),
        lambda b: UserDict(b),
        lambda b: b["x"],
    ],
    ids=["list", "nested", "named tuple", "mapping", "tensor"],
)
def test_batches_of_any_structure(nest, recorder):
    def loss(model, batch):
        seen.append(type(batch))
        return sum(value.float().sum() for value in flat(batch) if value.dim() > 1) * model.first.weight.sum()

    def flat(value):
        if isinstance(value, torch.Tensor):
            return [value]
        values = value.values() if isinstance(value, dict | UserDict) else value
        return [t for v in values if not isinstance(v, str | int | None) for t in flat(v)]

    grads, seen = [], []
    for graphs in (False, True):
        engine, model, optimizer, loader, _ = new_loop(graphs)
        for batch in loader:
            seen.clear()
            nested = nest(batch)
            engine.forward_backward(model, nested, loss)
            assert set(seen) == {type(nested)}
            grads.append(model.first.weight.grad.clone())
            optimizer.zero_grad()
    half = len(grads) // 2
    assert recorder.num_replayed > 0
    assert all(torch.equal(a, b) for a, b in zip(grads[:half], grads[half:], strict=True))


def of_one(model, batch):
    return model(**batch).loss


def of_other(model, batch):
    return model(**batch, head="other_head").loss


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("is_in_batch", [False, True], ids=["two losses", "a value in the batch"])
def test_two_losses_share_no_graph_and_leave_other_parameters_alone(is_in_batch, precision, recorder):
    """Parameters that one of them does not use keep no gradient: weight decay would change them."""
    models = []
    for graphs, compute in ((False, by_backward), (True, verb)):
        engine, model, optimizer, loader, _ = new_loop(graphs, num_rows=48, mixed_precision=precision)
        for number, batch in enumerate(loader):
            if is_in_batch:
                compute(engine, model, {**batch, "head": "second" if number % 2 else "other_head"}, None)
            else:
                compute(engine, model, batch, of_one if number % 2 else of_other)
            unused = model.other_head if number % 2 else model.second
            assert unused.weight.grad is None
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert recorder.num_recorded == 2
    assert_same([], [], models[1], models[0])


FACTOR = 1.0


def scaled_by_a_global(model, batch):
    return model(**batch).loss * FACTOR


class Scaled:
    factor = 1.0

    def __init__(self):
        self.factor = 1.0

    def __call__(self, model, batch):
        return model(**batch).loss * self.factor

    def method(self, model, batch):
        return self(model, batch)


def test_a_global_or_an_attribute_that_changes_is_another_loss(monkeypatch):
    scaled = Scaled()
    functions = (scaled_by_a_global, scaled, scaled.method)
    before = [forward_backward._identity_of(function) for function in functions]
    assert before == [forward_backward._identity_of(function) for function in functions]
    monkeypatch.setitem(globals(), "FACTOR", 0.5)
    scaled.factor = 0.5
    for function, one in zip(functions, before, strict=True):
        assert forward_backward._identity_of(function) != one


def test_a_lambda_in_the_loop_is_one_loss_and_what_it_closes_over_counts(recorder):
    engine, model, optimizer, loader, _ = new_loop(True, num_rows=64)
    grads = {}
    for number, batch in enumerate(loader):
        factor = 1.0 if number < 8 else 2.0
        engine.forward_backward(model, batch, lambda model, batch: factor * model(**batch).loss)  # noqa: B023
        grads[number] = model.second.bias.grad.clone()
        optimizer.zero_grad()
    assert recorder.num_recorded == 2
    again = next(iter(DataLoader(rows(64)[60:], batch_size=4)))
    engine.backward(2.0 * model(**again).loss)
    assert torch.equal(grads[15], model.second.bias.grad)


def test_functions_are_told_apart():
    def make(value):
        return lambda model, batch: value

    tensor, identity_of = torch.ones(2), forward_backward._identity_of
    assert identity_of(make(3)) == identity_of(make(3)) != identity_of(make(4))
    assert identity_of(make(1)) != identity_of(make(True))
    assert identity_of(make(tensor)) == identity_of(make(tensor)) != identity_of(make(torch.ones(2)))
    assert identity_of(functools.partial(unweighted, 1)) == identity_of(functools.partial(unweighted, 1))
    assert identity_of(functools.partial(unweighted, 1)) != identity_of(functools.partial(unweighted, 2))
    one, other = Model(), Model()
    assert identity_of(one.forward) == identity_of(one.forward) != identity_of(other.forward)
    assert identity_of(weighted_on_device) != identity_of(weighted_on_host)
    gone = identity_of(make(torch.ones(1)))
    assert gone != identity_of(make(torch.ones(1)))


def test_train_and_eval_mode_and_two_models_have_their_own_graphs(recorder):
    engine, model, optimizer, loader, _ = new_loop(True, num_rows=64, dropout=0.9)
    other = engine.prepare(copy.deepcopy(model))
    (batch, *_) = list(loader)
    losses = []
    for number in range(8):
        model.train(number % 2 == 0)
        losses.append(float(engine.forward_backward(model, batch)))
        optimizer.zero_grad()
    assert recorder.num_recorded == 2
    assert len(set(losses[1::2])) == 1  # without dropout all are equal
    assert len(set(losses[::2])) > 1
    before = recorder.num_recorded
    for _ in range(2):
        engine.forward_backward(other, batch)
    assert recorder.num_recorded == before + 1
    assert all(parameter.grad is None for parameter in model.parameters())


def of_parts(head, scale, base, batch):
    return (head(base(batch["x"])) * scale).pow(2).mean()


def test_parameters_of_other_prepared_models_and_of_the_optimizer_get_gradients(recorder):
    """As a head of its own, or a temperature: their gradients must not be lost in replays."""
    states = []
    for graphs, compute in ((False, by_backward), (True, verb)):
        torch.manual_seed(0)
        base, head, scale = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1), torch.nn.Parameter(torch.ones(()))
        engine = Engine(device="cpu", cuda_graphs=graphs)
        optimizer = torch.optim.AdamW([*base.parameters(), *head.parameters(), scale], lr=0.05)
        base, head, optimizer = engine.prepare(base, head, optimizer)
        for batch in DataLoader(rows(32), batch_size=4):
            compute(engine, base, batch, functools.partial(of_parts, head, scale))
            optimizer.step()
            optimizer.zero_grad()
        states.append([parameter.detach() for parameter in (*base.parameters(), *head.parameters(), scale)])
    assert recorder.num_replayed > 0
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def test_a_loss_reads_weights_and_calls_layers_as_without_graphs(recorder):
    """In mixed precision the model computes with copies of its weights in half precision, the loss function not."""

    def loss(model, batch):
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        outputs = model(**batch)
        return outputs.loss + model.other_head(torch.ones(8)).pow(2).sum() + 0.1 * model.first.weight.norm()

    plain, other = (new_loop(graphs, 24, mixed_precision="bf16") for graphs in (False, True))
    expected = train(plain, loss, by_backward, accumulates=False)
    found = train(other, loss, verb, accumulates=False)
    assert recorder.num_replayed > 0
    assert_same(found, expected, other[1], plain[1], close)


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize("graphs", [False, True])
def test_bad_losses_are_refused(graphs, recorder):
    engine, model, _, loader, _ = new_loop(graphs)
    batch = next(iter(loader))
    for loss, words in [
        (lambda model, batch: None, "no labels"),
        (lambda model, batch: 1.5, "float, not a tensor"),
        (lambda model, batch: model(**batch), "SimpleNamespace, not a tensor"),
        (lambda model, batch: model(**batch).logits, r"shape \(4, 3\)"),
        (lambda model, batch: torch.ones(()), "does not depend on any trainable parameter"),
        (lambda model, batch: (model(**batch).loss, 1, 2), "tuple of 3 values"),
        (lambda model, batch: (model(**batch).loss, -1.0), "weight=-1.0 is not valid"),
        (lambda model, batch: (model(**batch).loss, torch.ones(2)), "weight has shape"),
    ]:
        for _ in range(3):
            with pytest.raises(LossError, match=words):
                engine.forward_backward(model, batch, loss)
    with pytest.raises(LossError, match=r"the batch is a list[^$]*cure: engine.forward_backward\(model, batch, loss="):
        engine.forward_backward(model, list(batch.values()))
    with torch.no_grad(), pytest.raises(LossError, match="does not depend"):
        engine.forward_backward(model, batch)
    with pytest.raises(PrepareError, match="forward_backward was given a Model that was not prepared"):
        engine.forward_backward(Model(), batch)


def test_weights_in_some_micro_batches_of_a_window_only(recorder):
    engine, model, optimizer, loader, _ = new_loop(True, gradient_accumulation_steps=2)
    batches = list(loader)
    for loss in (weighted_on_host, unweighted):  # both have graphs afterwards
        for batch in batches[:4]:
            with engine.accumulate(model):
                engine.forward_backward(model, batch, loss)
                optimizer.zero_grad()
    assert recorder.num_recorded == 2
    with engine.accumulate(model):
        engine.forward_backward(model, batches[0], weighted_on_host)
    with engine.accumulate(model), pytest.raises(LossError, match="with a weight and without one"):
        engine.forward_backward(model, batches[0], unweighted)


class Rows:
    def __init__(self, x):
        self.x = x


def test_batches_that_graphs_cannot_read_are_refused_with_their_place(recorder):
    engine, model, *_ = new_loop(True)
    x = torch.ones(2, 4)

    def loss(model, batch):
        return model(x).logits.sum()

    for batch, words in [
        ({"rows": [x, Rows(x)]}, r"batch\['rows'\]\[1\] is a .*Rows; CUDA graphs take dicts[^$]*cure: collate it"),
        ({"x": x.numpy()}, r"batch\['x'\] is a numpy.ndarray"),
        ((x, x.clone().requires_grad_()), r"batch\[1\] is a tensor that requires a gradient"),
        ([x.to_sparse()], r"batch\[0\] is a torch.sparse_coo tensor"),
        ({"x": x.to("meta")}, r"batch\['x'\] is on meta, and CUDA graphs read batches from cpu"),
    ]:
        with pytest.raises(DataError, match=words):
            engine.forward_backward(model, batch, loss)
    Engine(device="cpu")  # without graphs a batch is whatever the loss function takes
    plain, model, *_ = new_loop(False)
    plain.forward_backward(model, Rows(x), lambda model, batch: model(batch.x).logits.sum())


# ---------------------------------------------------------------------- where nothing is captured


def test_several_processes_are_refused(monkeypatch):
    engine = Engine(device="cpu", cuda_graphs=True)
    monkeypatch.setattr(World, "num_processes", 2)
    with pytest.raises(PrepareError, match=r"one process only, not with 2[^$]*cure: use Engine\(compile_blocks=True\)"):
        engine.prepare(torch.nn.Linear(1, 1))


def test_other_devices_compute_without_graphs_and_say_so_once(caplog):
    plain, other = (new_loop(graphs) for graphs in (False, True))
    other[0].prepare(Model())
    assert sum("nothing is captured on cpu" in record.message for record in caplog.records) == 1
    assert not other[0].captures_micro_batches
    expected = train(plain, None, by_backward, accumulates=True)
    assert_same(train(other, None, verb, accumulates=True), expected, other[1], plain[1])


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_capture_that_fails_leads_back_to_backward(recorder, caplog, precision):
    recorder.fails = True
    plain, other = (new_loop(graphs, mixed_precision=precision) for graphs in (False, True))
    expected = train(plain, None, by_backward, accumulates=True)
    assert_same(train(other, None, verb, accumulates=True), expected, other[1], plain[1])
    assert sum("could not be captured" in record.message for record in caplog.records) == 1


def test_a_weight_that_changes_between_batches_of_one_size_is_not_captured(caplog, monkeypatch):
    """A graph would repeat the first one. A capture calls the loss function, as the stand-in does here."""

    class Calls(Repeats):
        def record(self, work):
            work()
            return super().record(work)

    monkeypatch.setattr(captured_step, "CudaRecorder", Calls)
    weights = iter(range(1, 100))

    def loss(model, batch):
        return model(**batch).loss, next(weights)

    loop = new_loop(True, num_rows=24, gradient_accumulation_steps=3)
    train(loop, loss, verb, accumulates=True, num_epochs=1)
    assert "batches of one size have different weights (1 and 2)" in caplog.text


def test_micro_batches_without_weight_are_ignored(recorder):
    """Their loss may be NaN."""
    engine, model, optimizer, loader, _ = new_loop(True)
    for batch in loader:
        engine.forward_backward(model, batch, lambda model, batch: (model(**batch).loss * torch.nan, 0))
        assert model.first.weight.grad is None
        optimizer.zero_grad()
    assert recorder.num_recorded == 0


def test_too_many_sizes_are_reported_once(recorder, caplog, monkeypatch):
    monkeypatch.setattr(captured_step, "MOST_GRAPHS", 2)
    engine, model, optimizer, *_ = new_loop(True)
    for _ in range(3):
        for size in (2, 3, 4):
            engine.forward_backward(model, torch.ones(size, 4), lambda model, x: model(x).logits.sum())
            optimizer.zero_grad()
    assert recorder.num_recorded == 2
    assert sum("the maximum" in record.message for record in caplog.records) == 1


def test_a_loss_that_is_new_in_every_step_is_reported(recorder, caplog):
    engine, model, optimizer, loader, _ = new_loop(True)
    batch = next(iter(loader))
    for step in range(70):
        engine.forward_backward(model, batch, lambda model, batch: model(**batch).loss * (1 + step))  # noqa: B023
        optimizer.zero_grad()
    assert recorder.num_recorded == 0
    assert sum("nothing is captured yet" in record.message for record in caplog.records) == 1


def test_free_memory_drops_the_graphs(recorder):
    loop = new_loop(True)
    train(loop, None, verb, accumulates=False)
    loop[0].free_memory()
    assert not loop[0]._forward_backward._captured


# ---------------------------------------------------------------------- state


def test_a_failure_is_part_of_the_state(recorder, tmp_path, caplog):
    recorder.fails = True
    loop = new_loop(True)
    train(loop, None, verb, accumulates=True, num_epochs=1)
    loop[0].save_state(tmp_path / "failed")
    recorder.fails = False
    resumed = new_loop(True)
    resumed[0].load_state(tmp_path / "failed")
    train(resumed, None, verb, accumulates=True, num_epochs=1)
    assert recorder.num_recorded == 0
    train(loop, None, verb, accumulates=True, num_epochs=1)
    assert torch.equal(loop[1].first.weight, resumed[1].first.weight)
    plain = new_loop(False)
    plain[0].load_state(tmp_path / "failed")  # with other settings, too


def test_a_state_without_it_loads(recorder, tmp_path):
    """As one that was saved before there were graphs."""
    loop = new_loop(False)
    train(loop, None, verb, accumulates=True, num_epochs=1)
    assert not (loop[0].capture_state() or {}).keys() & {"execution"}
    loop[0].save_state(tmp_path / "old")
    resumed = new_loop(True)
    resumed[0].load_state(tmp_path / "old")
    train(loop, None, by_backward, accumulates=True, num_epochs=2)
    train(resumed, None, verb, accumulates=True, num_epochs=2)
    assert recorder.num_replayed > 0
    assert torch.equal(loop[1].first.weight, resumed[1].first.weight)


def test_a_state_inside_a_window_is_resumed_by_graphs(recorder, tmp_path):
    loops = [new_loop(True, num_rows=48, gradient_accumulation_steps=3) for _ in range(2)]
    engine, model, optimizer, loader, _ = loops[0]
    for number, batch in enumerate(loader):
        with engine.accumulate(model):
            engine.forward_backward(model, batch, weighted_on_host)
            if number == 7:
                engine.save_state(tmp_path / "inside")
            optimizer.step()
            optimizer.zero_grad()
    other, resumed, optimizer, loader, _ = loops[1]
    other.load_state(tmp_path / "inside")
    for batch in loader:
        with other.accumulate(resumed):
            other.forward_backward(resumed, batch, weighted_on_host)
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.num_replayed > 0
    assert torch.equal(model.first.weight, resumed.first.weight)


def test_a_state_that_cannot_be_loaded_changes_no_failure(recorder, tmp_path):
    class Refuses:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            if state_is_bad:
                raise ValueError("no")

    state_is_bad = False
    recorder.fails = True
    loop = new_loop(True)
    loop[0].register_for_checkpointing(Refuses())
    train(loop, None, verb, accumulates=True, num_epochs=1)
    loop[0].save_state(tmp_path / "failed")
    other = new_loop(True)
    other[0].register_for_checkpointing(Refuses())
    state_is_bad = True
    with pytest.raises(Exception, match="cannot load its state"):
        other[0].load_state(tmp_path / "failed")
    assert other[0]._forward_backward.state_dict() == {"models": [{"captured": {"failure": None}}]}


def test_a_failure_of_compiled_blocks_is_part_of_the_state(tmp_path, monkeypatch):
    from trimtab.engine import prepared_parts

    monkeypatch.setattr(prepared_parts, "compile_blocks", lambda model: compile_blocks(model, "aot_eager"))

    def prepared():
        engine = Engine(device="cpu", compile_blocks=True)
        blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
        return engine, engine.prepare(torch.nn.Sequential(torch.nn.ModuleList(blocks)))

    engine, model = prepared()
    compiled_blocks_of(model).failure = "Unsupported: …"
    engine.save_state(tmp_path / "failed")
    other, resumed = prepared()
    other.load_state(tmp_path / "failed")
    assert compiled_blocks_of(resumed).failure == "Unsupported: …"


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.LayerNorm(4)) for _ in range(3)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=x.pow(2).mean())


def test_compiled_blocks_are_compiled_once_and_captured(recorder, monkeypatch):
    from torch._dynamo.utils import counters

    from trimtab.engine import prepared_parts

    counters.clear()
    monkeypatch.setattr(prepared_parts, "compile_blocks", lambda model: compile_blocks(model, "aot_eager"))
    models = []
    for settings, compute in (({}, by_backward), ({"cuda_graphs": True, "compile_blocks": True}, verb)):
        torch.manual_seed(0)
        model = Blocks()
        engine = Engine("bf16", device="cpu", **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
        parts = engine.prepare(model, optimizer, DataLoader(rows(24), batch_size=4), scheduler)
        train((engine, *parts), None, compute, accumulates=True, num_epochs=2)
        models.append(model)
    assert recorder.num_replayed > 0
    assert compiled_blocks_of(models[1]).failure is None
    assert counters["stats"]["unique_graphs"] == 2  # of fp32 and of bf16 inputs, as without CUDA graphs
    assert_same([], [], models[1], models[0], close)
