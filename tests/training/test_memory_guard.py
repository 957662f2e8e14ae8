"""A run whose memory runs out anywhere in a step continues as if its micro-batches had been smaller from there on."""

import itertools
import json
import os
import random
import weakref

import numpy
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab.training.loop
from tiny_runs import NO_DROPOUT, Watch, lines_of, reviews, same_bits
from trimtab import Recipe, fit
from trimtab.engine.engine import Engine
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.garbage_collection import gc_frozen
from trimtab.optim.build import build_optimizer
from trimtab.optim.host_update import HostGradients
from trimtab.optim.in_backward import InBackward, updates_of
from trimtab.planner import decide as deciding
from trimtab.techniques.base import StepSpec
from trimtab.techniques.weight_update import WeightUpdate
from trimtab.training.evaluate import Evaluator
from trimtab.training.loop import Trainer
from trimtab.training.rehearsal import Rehearsal
from trimtab.training.rollback import OutOfMemory, Rollback

ROWS = reviews(32)
HELD_OUT = reviews(24, first=1000)
pytestmark = pytest.mark.usefixtures("own_folder")
window_gradients = trimtab.training.loop.window_gradients


class RunsOut(TorchDispatchMode):
    """Raises at one operation, as an allocator would."""

    def __init__(self, at, error=None):
        super().__init__()
        self.num_operations, self._at = 0, at
        self._error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_operations += 1
        if self.num_operations == self._at:
            raise self._error
        return function(*args, **kwargs or {})


class Faults:
    """Replaces `window_gradients`: in some calls memory runs out at some operation.

    Args:
        monkeypatch: Installs it.
        at: The operation that fails, by the number of the call.
    """

    def __init__(self, monkeypatch, at, error=None):
        self.num_calls, self.num_operations, self._at, self._error = 0, [], at, error
        monkeypatch.setattr("trimtab.training.loop.window_gradients", self)

    def __call__(self, *parts, **options):
        self.num_calls += 1
        with RunsOut(self._at.get(self.num_calls), self._error) as mode:
            try:
                return window_gradients(*parts, **options)
            finally:
                self.num_operations.append(mode.num_operations)


@pytest.fixture
def train(tiny, tmp_path):
    """Trains a tiny BERT for four steps; keywords are sections of the recipe, in the place of the usual ones."""
    numbers = itertools.count()

    def train(callbacks=(), resume=False, **sections):
        usual = {
            "model": tiny.folder("bert", **NO_DROPOUT["bert"]),
            "data": {"train": ROWS, "eval": HELD_OUT},
            "train": {"epochs": 1, "lr": 1e-3, "log_every": 1},
            "checkpoint": {"every": "1 steps", "keep": 9},
            "out": str(tmp_path / f"run-{next(numbers)}"),
        }
        options = {"callbacks": callbacks, "progress": "quiet", "device": "cpu", "resume": resume}
        return fit(Recipe(**usual | sections), **options)

    return train


# ---------------------------------------------------------------------- rollback


def everything(trainer):
    """All that a step may change, except the loader, which is iterated again."""
    parts = {part.name: part for part in trainer._engine._saved_state.parts()}
    state = {name: part.capture() for name, part in parts.items() if name not in ("object", "loader")}
    gradients = {name: p.grad for name, p in trainer._model.named_parameters() if p.grad is not None}
    buffers = dict(trainer._model.named_buffers())
    return copied([state, gradients, buffers, vars(trainer._engine.scaler).get("_overflows"), trainer.state.step])


def copied(value):
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype), value.detach().numpy().tobytes())
    if isinstance(value, numpy.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copied(item) for item in value]
    return value


class Enough(Exception):
    pass


SETTINGS = {
    "plain": {},
    "micro-batches": {"memory": {"micro_batch": 4}},
    "fp16": {"memory": {"micro_batch": 4}, "train": {"epochs": 1, "precision": "fp16"}},
    "recomputed": {"memory": {"gradient_checkpointing": "all"}},
    "left-out": {"train": {"epochs": 1, "on_nan": "skip"}},
}


@pytest.mark.parametrize(
    "settings", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in [*SETTINGS][1:])]
)
def test_a_window_is_rolled_back_from_every_operation(train, tiny, monkeypatch, settings):
    """Memory runs out at each operation of the second step in turn, with dropout; then the step succeeds.

    With other settings at every fifth operation, which reaches each part of the window.
    """
    done, stride = [], 1 if settings == "plain" else 5

    def experiment(trainer):
        trainer._model.train()
        trainer._memory_guard.rehearse(lambda text: None)
        sampler = trainer.parts.batches.batch_sampler
        planned = sampler.micro_batch_size
        size, micro_batches = next(trainer._position.windows(trainer.state.step))
        assert trainer._one_step(micro_batches, size)
        trainer.seek_data()
        before = everything(trainer)
        for at in itertools.count(1, stride):
            faults = Faults(monkeypatch, {1: at})
            windows = trainer._position.windows(trainer.state.step)
            size, micro_batches = next(windows)
            before = everything(trainer) if at == 1 else before  # an epoch that begins draws a number
            if trainer._one_step(micro_batches, size):
                assert at - stride <= faults.num_operations[0] < at
                done.append(at)
                raise Enough
            assert sampler.micro_batch_size == planned // 2
            assert everything(trainer) == before
            windows.close()
            sampler.set_micro_batch_size(planned)

    def with_little_garbage(trainer):  # as in `fit`: else each collection of Python's takes half a second
        with gc_frozen():
            experiment(trainer)

    monkeypatch.setattr(Trainer, "fit", with_little_garbage)
    with pytest.raises(Enough):
        train(model=tiny.folder("bert"), **SETTINGS[settings])
    assert done[0] > 150


@pytest.mark.parametrize(
    ("task", "name", "changes", "sections"),
    [
        pytest.param("classify", "bert", {}, {}, marks=pytest.mark.slow),  # with dropout
        pytest.param(
            *("causal-lm", "gpt2", NO_DROPOUT["gpt2"]),
            {"memory": {"loss": "chunked", "gradient_checkpointing": "all"}},
            marks=pytest.mark.slow,
        ),
        ("classify", "bert", NO_DROPOUT["bert"], {"train": {"precision": "fp16", "max_grad_norm": 0.1}}),
        pytest.param("masked-lm", "bert", NO_DROPOUT["bert"], {}, marks=pytest.mark.slow),
    ],
)
def test_a_retried_run_equals_one_with_smaller_micro_batches(train, tiny, monkeypatch, task, name, changes, sections):
    """Bit for bit, wherever in forward, loss, backward or clipping memory runs out; rows have unequal lengths."""
    rows = ROWS if task == "classify" else [{"text": row["text"]} for row in ROWS]
    data = {"train": rows, "eval_share": 0} | ({"max_length": 9} if task == "causal-lm" else {})
    settings = {"max_steps": 4, "lr": 1e-3, "batch_size": 4, **sections.get("train", {})}
    sections = {"task": task, "data": data, "model": tiny.folder(name, **changes)} | sections | {"train": settings}
    counted, expected = Faults(monkeypatch, {}), Watch()
    whole = train(**sections)
    memory = {**sections.get("memory", {}), "micro_batch": 2}
    train([expected], resume="step-1", out=str(whole.folder), **sections | {"memory": memory})
    assert len(expected.weights) == 3
    for share in (0.1, 0.2, 0.5, 0.7, 0.9):
        ours, faults = Watch(), Faults(monkeypatch, {2: int(share * counted.num_operations[1])})
        assert train([ours], **sections).fit.micro_batch_size == 2
        assert faults.num_calls == 5
        assert all(same_bits(*pair) for pair in zip(ours.weights[1:], expected.weights, strict=True)), share


def test_memory_may_run_out_again_and_again(train, monkeypatch):
    faults, watch = Faults(monkeypatch, {1: 40, 2: 90, 3: 60, 5: 10}), Watch()
    with pytest.raises(DoesNotFit, match="at step 2 with a micro-batch size of 1") as caught:
        train([watch])
    assert caught.value.exit_code == 3
    assert "cure: a larger memory.budget" in str(caught.value)
    assert len(watch.weights) == 1
    assert faults.num_calls == 5


@pytest.mark.slow
def test_a_checkpoint_is_saved_before_the_run_fails(train, monkeypatch, tmp_path):
    """With checkpoints far apart the last step is not lost, and the run can be resumed from it."""
    expected = Watch()
    train([expected], memory={"micro_batch": 1})
    Faults(monkeypatch, {3: 40})
    out = tmp_path / "small"
    with pytest.raises(DoesNotFit, match="64.00 MiB more were needed"):
        train(memory={"micro_batch": 1}, checkpoint={"every": "100 steps"}, out=str(out))
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-2"]
    Faults(monkeypatch, {})
    watch = Watch()
    train([watch], memory={"micro_batch": 1}, checkpoint={"every": "100 steps"}, out=str(out), resume=True)
    assert len(watch.weights) == 2
    assert same_bits(watch.weights[-1], expected.weights[-1])


@pytest.mark.slow
def test_the_smaller_size_is_recorded_and_restored(train, monkeypatch, tmp_path):
    """The journal has a line, and a resumed run starts with the smaller size unless the recipe names another."""
    Faults(monkeypatch, {2: 77})
    result = train()
    notes = [line for line in lines_of(result.folder) if "note" in line]
    words = "out of memory (64.00 MiB more were needed) at step 2: micro-batch size 8 → 4"
    assert [(line["note"], line["micro_batch"], line["step"]) for line in notes] == [(words, 4, 1)]
    Faults(monkeypatch, {})
    for step, memory, rows in (("step-2", {}, 4), ("step-2", {"micro_batch": 2}, 2), ("step-1", {}, 8)):
        again = train(resume=step, out=str(result.folder), memory=memory)
        assert (again.fit.micro_batch_size, again.fit.step) == (rows, 4)


def test_killed_after_memory_ran_out_and_resumed(train, tiny, monkeypatch):
    """With dropout: the smaller micro-batches, their place and their random numbers are in the state."""
    model = tiny.folder("bert")
    Faults(monkeypatch, {2: 200})
    watch = Watch()
    result = train([watch], model=model)
    Faults(monkeypatch, {})
    for step in (3, 2):
        again = Watch()
        train([again], model=model, resume=f"step-{step}", out=str(result.folder))
        assert len(again.weights) == 4 - step
        assert same_bits(again.weights[-1], watch.weights[-1])


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried …"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_other_errors_are_not_retried(train, monkeypatch, error, is_retried):
    Faults(monkeypatch, {2: 100}, error)
    if is_retried:
        assert train().fit.micro_batch_size == 4
    else:
        with pytest.raises(type(error)):
            train()


def test_an_optimizer_that_fails_is_not_tried_again(train, monkeypatch, tmp_path):
    def fails(optimizer, scheduler, result):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("trimtab.training.loop.take_step", fails)
    with pytest.raises(DoesNotFit, match="in the optimizer at step 1, with some of the weights already changed"):
        train(checkpoint={"every": "100 steps"}, out=str(tmp_path / "broken"))
    assert not list((tmp_path / "broken").glob("checkpoints/*"))


def test_a_rewind_does_not_make_it_larger_again(train, monkeypatch):
    """It goes back to the state of step 3; memory had run out at step 5."""
    Faults(monkeypatch, {5: 100})
    settings = {"epochs": 2, "lr": 1e-3, "on_nan": "rewind"}
    result = train([Breaks(at=5)], train=settings, checkpoint={"every": "3 steps"})
    assert result.fit.micro_batch_size == 4
    assert result.fit.step == 8
    assert sum("note" in line for line in lines_of(result.folder)) == 1


class Breaks:
    """Makes the weights NaN once, so that the run goes back to the state before."""

    def __init__(self, at):
        self._at, self._is_done = at, False

    def on_step(self, state):
        if state.step == self._at and not self._is_done:
            self._is_done = True
            with torch.no_grad():
                state.model.classifier.bias.fill_(float("nan"))


class Statistics(torch.nn.Module):
    """Has running statistics, and draws from every generator of the host."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)
        self.register_buffer("constant", torch.ones(3))

    def forward(self, x):
        x = torch.nn.functional.dropout(self.norm(self.linear(x)), 0.5)
        return x.sum() * random.random() * numpy.random.rand()


@pytest.mark.parametrize("num_windows_before", [0, 1])
def test_buffers_and_all_generators_are_put_back(num_windows_before):
    engine = Engine(device="cpu")
    model, optimizer = Statistics(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = engine.prepare(model, optimizer)
    rollback = Rollback(engine, model)

    def work(fails):
        with engine.accumulate(model):
            engine.backward(model(torch.randn(4, 3)))
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return "done"

    for _ in range(num_windows_before):
        assert rollback.attempt(lambda: work(False)) == "done"
        optimizer.step()
        optimizer.zero_grad()
    before = copied([dict(model.state_dict()), random.getstate(), numpy.random.get_state(), torch.get_rng_state()])
    assert rollback.attempt(lambda: work(True)) == OutOfMemory()
    assert rollback.rehearse(lambda: work(False)) == "done"
    after = copied([dict(model.state_dict()), random.getstate(), numpy.random.get_state(), torch.get_rng_state()])
    assert after == before
    assert all(parameter.grad is None for parameter in model.parameters())
    rollback.attempt(lambda: work(False))
    assert {name for name, _ in model.named_buffers()} == {"norm.running_mean", "norm.running_var"} | {
        "norm.num_batches_tracked",
        "constant",
    }
    assert len(rollback._buffers._candidates) == 3


def test_activations_are_freed_before_the_next_attempt():
    """Nothing of the failed attempt is alive: neither its traceback nor its graph."""
    import gc

    engine = Engine(device="cpu")
    model, optimizer = engine.prepare(model := torch.nn.Linear(3, 3), torch.optim.SGD(model.parameters()))
    rollback, seen = Rollback(engine, model), []

    def work():
        hidden = model(torch.ones(2, 3)).relu()
        seen.append(weakref.ref(hidden))
        hidden.sum().backward()
        raise torch.OutOfMemoryError("CUDA out of memory.")

    gc.disable()
    try:
        assert isinstance(rollback.attempt(work), OutOfMemory)
    finally:
        gc.enable()
    assert seen[0]() is None


@pytest.mark.parametrize("update", ["in-backward", "streamed", "host"])
def test_activations_are_freed_after_memory_ran_out_with_a_complete_gradient(update, monkeypatch):
    """torch would keep them until the next backward: the next attempt would have less memory."""
    saved = weakref.WeakSet()

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor.detach()
            saved.add(self)

    def build_adamw(groups, device):
        return build_optimizer("adamw", groups, lr=1e-2, device=device)

    def prepared():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
        spec = StepSpec.of(8, "fp32", {"update": update, "optimizer": "adamw"})
        build = WeightUpdate().wrap_build(build_adamw, spec, model)
        optimizer = build([{"params": list(model.parameters())}], torch.device("cpu"))
        engine = Engine(device="cpu")
        return engine, *engine.prepare(model, optimizer)

    def window(engine, model, optimizer):
        updates_of(model).begin_window(1)
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda one: one.tensor):
            loss = model(torch.ones(3, 8)).tanh().sum()
        assert len(saved) > 0
        engine.backward(loss)

    owner, name = (InBackward, "_update") if update == "in-backward" else (HostGradients, "_send")
    usual, calls, captured = getattr(owner, name), itertools.count(1), []

    def run_out(self, *args):
        if next(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 …")
        usual(self, *args)

    monkeypatch.setattr(owner, name, run_out)
    ours, other = prepared(), prepared()
    rollback = Rollback(ours[0], ours[1], lambda: captured.append(len(saved)))
    before = {name: value.clone() for name, value in ours[1].state_dict().items()}
    failure = rollback.attempt(lambda: window(*ours))
    assert failure == OutOfMemory("64.00 MiB more", has_changed_weights=update == "in-backward")
    assert len(saved) == 0
    assert len(captured) == 1
    assert captured[0] > 0, "a picture shows what was in memory when it ran out"
    if failure.has_changed_weights:  # a run loads its last checkpoint
        ours[1].load_state_dict(before)
        ours[2].optimizer.state.clear()
    for parts in (ours, other):
        window(*parts)
        parts[2].step()
    assert all(torch.equal(*pair) for pair in zip(ours[1].parameters(), other[1].parameters(), strict=True))
    assert not torch.equal(before["0.weight"], ours[1][0].weight)


# ---------------------------------------------------------------------- evaluation


class EvaluationFaults:
    """In some calls of an evaluation's loss memory runs out; so it does in the update of metrics, if asked."""

    def __init__(self, monkeypatch, calls=(), updates=()):
        self.sizes, self._calls, self._updates, self._num_updates = [], set(calls), set(updates), 0
        build = Evaluator.__init__

        def init(evaluator, engine, loader, loss, make_metrics, *rest):
            if loader is None:  # a plan looks at an evaluation without memory
                return build(evaluator, engine, loader, loss, make_metrics, *rest)
            return build(evaluator, engine, loader, self._failing(loss), lambda: self._metrics(make_metrics()), *rest)

        monkeypatch.setattr(Evaluator, "__init__", init)

    def _failing(self, loss):
        def failing(model, batch):
            self.sizes.append(len(batch["labels"]))
            if len(self.sizes) in self._calls:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss(model, batch)

        return failing

    def _metrics(self, metrics):
        update = metrics.update

        def failing(*parts):
            self._num_updates += 1
            update(*parts)
            if self._num_updates in self._updates:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        metrics.update = failing
        return metrics


@pytest.mark.parametrize(
    ("calls", "updates", "sizes"),
    [
        pytest.param((), (), [8, 8, 8], marks=pytest.mark.slow),
        ((2,), (), [8, 8, 4, 4, 4, 4]),  # only that batch is done again
        pytest.param((2, 3, 4), (), [8, 8, 4, 2, 1, 1, 1, 1, 1, 1, 1, 1, *[1] * 8], marks=pytest.mark.slow),
        ((2, 4), (), [8, 8, 4, 4, 2, 2, 2, 2, 2, 2]),  # the second half of it ran out again
        ((), (2,), [8, 8, *[4] * 6]),  # sums that were added to in part are not used
    ],
)
def test_evaluation_in_halves(train, monkeypatch, calls, updates, sizes):
    expected = train().fit.metrics
    faults = EvaluationFaults(monkeypatch, calls, updates)
    result = train()
    assert result.fit.metrics == pytest.approx(expected, rel=1e-5)
    assert faults.sizes == sizes
    assert result.fit.micro_batch_size == 8, "training keeps its own size"
    held_out = json.loads((result.folder / "report.json").read_text())["held_out"]
    assert held_out["num_rows"] == sum(map(sum, held_out["confusion"])) == 24, "each row is judged once"


def test_an_evaluation_that_cannot_fit(train, monkeypatch, tmp_path):
    EvaluationFaults(monkeypatch, range(1, 5))
    with pytest.raises(DoesNotFit, match="out of memory in an evaluation of one row"):
        train(checkpoint={"every": "100 steps"}, out=str(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-4"]


# ---------------------------------------------------------------------- before the first step


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"memory": {"micro_batch": 3}},
        {"train": {"epochs": 1, "precision": "fp16"}},
        pytest.param({"train": {"epochs": 1, "freeze": {"base": "2 steps"}}}, marks=pytest.mark.slow),
        pytest.param({"train": {"epochs": 1, "optimizer": "sgd", "momentum": 0.9}}, marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_changes_nothing(train, tiny, sections):
    """With and without it, a run with dropout has the same bits after each step."""
    runs = []
    for budget in (None, "auto"):
        watch = Watch()
        memory = {**sections.get("memory", {}), "budget": budget}
        result = train([watch], model=tiny.folder("bert"), **{**sections, "memory": memory})
        runs.append((watch.weights, result))
    (without, plain), (with_it, looked) = runs
    assert all(same_bits(*pair) for pair in zip(without, with_it, strict=True))
    assert plain.fit.metrics == looked.fit.metrics
    assert not any("preflight_peak_bytes" in line for line in lines_of(plain.folder))
    last = lines_of(looked.folder)[-1]
    assert last["step"] == 4
    num_cpus = os.cpu_count() or 1
    counted_late = 2 * num_cpus * max(32, 2 * num_cpus) * os.sysconf("SC_PAGE_SIZE")  # by Linux, of resident memory
    assert 0 < last["preflight_peak_bytes"] <= last["peak_memory_bytes"] + counted_late


def test_the_worst_batch_is_what_is_tried(train, monkeypatch):
    """As many rows as a micro-batch has, among them the longest; twice, where a window has several."""
    shapes = []
    for micro_batch, num_times in (("auto", 1), (3, 2)):
        seen = []

        def looking(engine, model, loss, micro_batches, *rest, seen=seen, **options):
            seen += [tuple(batch["input_ids"].shape) for batch in micro_batches]
            return window_gradients(engine, model, loss, micro_batches, *rest, **options)

        monkeypatch.setattr("trimtab.training.rehearsal.window_gradients", looking)
        trained = []

        def watching(*parts, trained=trained, **options):
            micro_batches = list(parts[3])
            trained += [tuple(batch["input_ids"].shape) for batch in micro_batches]
            return window_gradients(*parts[:3], micro_batches, *parts[4:], **options)

        monkeypatch.setattr("trimtab.training.loop.window_gradients", watching)
        train(memory={"micro_batch": micro_batch, "budget": "auto"}, train={"epochs": 2})
        assert len(seen) == num_times
        assert len(set(seen)) == 1
        assert seen[0] == max(trained, key=lambda shape: (shape[0] * shape[1], shape[1]))
        shapes.append(seen[0])
    assert shapes[0][0] == 8
    assert shapes[1][0] == 3


def test_what_does_not_fit_is_cut_before_the_first_step(train, monkeypatch, caplog):
    real, calls = Rehearsal.train, []

    def small(preflight):
        calls.append(preflight._batches.batch_sampler.micro_batch_size)
        return OutOfMemory("1.00 GiB more") if calls[-1] > 2 else real(preflight)

    monkeypatch.setattr(Rehearsal, "train", small)
    watch, expected = Watch(), Watch()
    result = train([watch], memory={"budget": "auto"})
    assert calls == [8, 4, 2]
    assert result.fit.micro_batch_size == 2
    train([expected], memory={"micro_batch": 2})
    assert all(same_bits(*pair) for pair in zip(watch.weights, expected.weights, strict=True))
    monkeypatch.setattr(Rehearsal, "train", lambda preflight: OutOfMemory())
    with pytest.raises(DoesNotFit, match="before the first step with a micro-batch size of 1"):
        train(memory={"budget": "auto"})


def test_the_message_without_a_plan(train, monkeypatch):
    """Neither traced nor measured there is no plan: neither checkpointing nor a chunked loss was tried."""

    def cannot(*parts):
        raise NotImplementedError("no such operation")

    monkeypatch.setattr(deciding._Question, "_planner", cannot)
    monkeypatch.setattr("trimtab.planner.trial_step.can_measure_resident_peak", lambda: False)
    monkeypatch.setattr(Rehearsal, "train", lambda preflight: OutOfMemory())
    with pytest.raises(DoesNotFit, match="without a plan only smaller micro-batches were tried") as caught:
        train(memory={"budget": "auto"})
    assert "memory.gradient_checkpointing: all" in str(caught.value)


def test_an_evaluation_that_does_not_fit_is_cut_before_the_first_step(train, monkeypatch):
    faults = EvaluationFaults(monkeypatch, (1,))
    result = train(memory={"budget": "auto"})
    assert faults.sizes == [8, 4, 4, *[4] * 6]
    assert result.fit.micro_batch_size == 8


def test_state_that_does_not_fit(train, monkeypatch):
    def fails(optimizer, parameters):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("trimtab.training.memory_guard.preallocate_state", fails)
    with pytest.raises(DoesNotFit, match="its optimizer state alone"):
        train()


def test_predicted_against_measured(train, monkeypatch):
    from trimtab.training.memory_guard import MemoryGuard

    init = MemoryGuard.__init__
    monkeypatch.setattr(
        MemoryGuard, "__init__", lambda self, *p, **o: init(self, *p, **{**o, "predicted_peak_bytes": 10**9})
    )
    last = lines_of(train().folder)[-1]
    assert last["predicted_peak_bytes"] == 10**9
    assert last["peak_memory_bytes"] > 10**7


# ---------------------------------------------------------------------- the budget


def test_a_budget_larger_than_the_machine(train):
    with pytest.raises(RecipeError, match="memory.budget is 900.0 TiB, but cpu has") as caught:
        train(memory={"budget": "900TiB"})
    assert "memory.budget: auto" in str(caught.value)


def test_a_budget_on_the_cpu_is_watched(train, caplog):
    with caplog.at_level("INFO", "trimtab"):
        train(memory={"budget": "2MiB"})
    said = [record.getMessage() for record in caplog.records if "more than memory.budget" in record.getMessage()]
    assert len(said) == 1
    assert "(2.0 MiB), which cannot be enforced on this device" in said[0]
