"""Every scheduler and optimizer of torch goes on from a checkpoint with the same bits; tensors are loaded by copy."""

import functools

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils

from trimtab import Engine

NUM_BEFORE, NUM_AFTER = 4, 7
DATA = torch.randn(32, 8, 6, generator=torch.Generator().manual_seed(0))


class Dense(torch.nn.Module):
    """Weights of two and of one dimension, and one of none."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(6, 5), torch.nn.Linear(5, 1)
        self.scale = torch.nn.Parameter(torch.rand(()) + 1)

    def forward(self, x):
        return (self.scale * self.last(torch.tanh(self.first(x)))).square().mean()


class Looked(torch.nn.Module):
    """A model whose only weights have sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 3, sparse=True)

    def forward(self, x):
        return self.table((x.abs() * 3).long().clamp(max=9)).square().mean()


def bits(tensors):
    return [tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).tolist() for tensor in tensors]


class Run:
    """Objects built from a seed, and the learning rates that they went through."""

    def __init__(self, seed, optimizer, scheduler=None, model=Dense):
        torch.manual_seed(seed)
        self.model, self.engine, self.num_steps, self.rates = model(), Engine(device="cpu"), 0, []
        plain = optimizer(self.model)
        parts = [self.model, plain] if scheduler is None else [self.model, plain, scheduler(plain)]
        _, self.optimizer, *self.scheduler = self.engine.prepare(*parts)

    def train(self, num_steps):
        for _ in range(num_steps):
            self.step(DATA[self.num_steps])
            self.num_steps += 1
        return self

    def step(self, batch):
        def closure():
            self.optimizer.zero_grad()
            loss = self.model(batch)
            self.engine.backward(loss)
            return loss

        if isinstance(self.optimizer.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        for scheduler in self.scheduler:
            plateau = isinstance(scheduler.scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*([1.0 + self.num_steps % 3] if plateau else []))
        self.optimizer.zero_grad()
        self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])


def assert_goes_on(tmp_path, **parts):
    """Steps, a save, more steps; the same steps in fresh objects of another seed, with and without the state."""
    whole = Run(1, **parts).train(NUM_BEFORE)
    whole.engine.save_state(tmp_path / "ckpt")
    whole.train(NUM_AFTER)
    resumed, fresh = Run(2, **parts), Run(2, **parts)
    resumed.engine.load_state(tmp_path / "ckpt")
    for run in (resumed, fresh):
        run.num_steps = NUM_BEFORE
        run.train(NUM_AFTER)
    assert resumed.rates == whole.rates[NUM_BEFORE:]
    assert bits(resumed.model.parameters()) == bits(whole.model.parameters())
    assert bits(fresh.model.parameters()) != bits(whole.model.parameters())
    return resumed, fresh


# ---------------------------------------------------------------------- schedulers


def schedulers_of_torch():
    found = [*vars(lr_scheduler).values(), *vars(swa_utils).values()]
    classes = [v for v in found if isinstance(v, type) and issubclass(v, lr_scheduler.LRScheduler)]
    return {c.__name__ for c in classes} - {"LRScheduler", "_LRScheduler"}


class Falling:
    """A callable with state, which a checkpoint must contain."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, step):
        self.num_calls += 1
        return 0.95**self.num_calls


def tenth(step):
    return 1 / (1 + step / 10)


def in_sequence(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 9)]
    return lr_scheduler.SequentialLR(optimizer, [*parts, lr_scheduler.StepLR(optimizer, 1)], milestones=[3, 6])


def chained(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.1, 6), lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)]
    return lr_scheduler.ChainedScheduler([*parts, lr_scheduler.LambdaLR(optimizer, Falling())], optimizer)


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, tenth),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, [Falling(), tenth]),
    "LambdaLR of a partial": lambda o: lr_scheduler.LambdaLR(o, functools.partial(tenth)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 1 - step / 50),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 9], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=8),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "SequentialLR": in_sequence,
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 9, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=2, cooldown=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=True),
    "CyclicLR of an object": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Falling(), scale_mode="cycle"),
    "CyclicLR exp_range": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=12),
    "OneCycleLR of three phases": lambda o: lr_scheduler.OneCycleLR(
        o, 0.1, total_steps=12, three_phase=True, anneal_strategy="linear"
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.2, anneal_epochs=8),
    "SWALR linear": lambda o: swa_utils.SWALR(o, 0.2, anneal_epochs=8, anneal_strategy="linear"),
}


def two_groups(model):
    groups = [{"params": model.first.parameters()}, {"params": [*model.last.parameters(), model.scale], "lr": 0.02}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def test_every_scheduler_of_torch_is_tried():
    assert {name.partition(" ")[0] for name in SCHEDULERS} == schedulers_of_torch()
    assert len(schedulers_of_torch()) > 15


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on(tmp_path, name):
    resumed, fresh = assert_goes_on(tmp_path, optimizer=two_groups, scheduler=SCHEDULERS[name])
    assert resumed.rates != fresh.rates, "the schedule does not show whether its state was loaded"


# ---------------------------------------------------------------------- optimizers


def of_all(kind, **options):
    return lambda model: kind(model.parameters(), **options)


def rates_as_tensors(model):
    groups = [{"params": [p], "lr": torch.tensor(0.01 * (index + 1))} for index, p in enumerate(model.parameters())]
    return torch.optim.Adam(groups, lr=torch.tensor(0.01))


def optimizers_of_torch():
    """Those that a new torch may add are tried with their defaults."""
    classes = [v for v in vars(torch.optim).values() if isinstance(v, type) and issubclass(v, torch.optim.Optimizer)]
    names = {c.__name__ for c in classes} - {"Optimizer", "SparseAdam", "Muon"}
    return {name: of_all(getattr(torch.optim, name)) for name in names}


class Matrix(torch.nn.Linear):
    """Muon takes matrices only."""

    def __init__(self):
        super().__init__(6, 5, bias=False)

    def forward(self, x):
        return super().forward(x).square().mean()


class OwnState(torch.optim.SGD):
    """Keeps state that belongs to no parameter, and keys that are no text, as some optimizers do."""

    def step(self, closure=None):
        count = self.state.setdefault("count", {"steps": 0, "seen": {}})
        count["steps"] += 1
        for group in self.param_groups:
            for p in group["params"]:
                memory = self.state[p].setdefault((0, "memory"), torch.zeros_like(p))
                memory.add_(p.grad, alpha=1 / count["steps"])
                p.data.sub_(memory, alpha=group["lr"])


OPTIMIZERS = optimizers_of_torch() | {
    "SGD nesterov": of_all(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam amsgrad": of_all(torch.optim.Adam, lr=0.1, amsgrad=True, foreach=False),
    "Adam with tensor rates": rates_as_tensors,
    "AdamW fused": of_all(torch.optim.AdamW, lr=0.1, fused=True),
    "AdamW with names": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.1),
    "RMSprop centered": of_all(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
    "Adagrad started": of_all(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.5, lr_decay=0.1),
    "LBFGS with line search": of_all(torch.optim.LBFGS, lr=0.5, line_search_fn="strong_wolfe", history_size=3),
    "own state": of_all(OwnState, lr=0.1),
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_an_optimizer_goes_on(tmp_path, name):
    resumed, _ = assert_goes_on(tmp_path, optimizer=OPTIMIZERS[name])
    assert resumed.optimizer.state or name == "SGD"


def test_state_of_the_optimizers_own_making_is_filled(tmp_path):
    """An optimizer that says how its state is made gets it filled, and for no parameter that has none saved."""
    made = []

    class Choosy(torch.optim.SGD):
        def allocate_state(self, parameters):
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)
                    made.append(self.state[p]["momentum_buffer"].data_ptr())

    first, second = (Run(seed, of_all(Choosy, lr=0.1, momentum=0.9)) for seed in (1, 2))
    for run in (first, second):
        run.model.scale.requires_grad_(False)
        run.model.scale.data.fill_(1.0)
    saved_and_loaded(tmp_path, first, second)
    state = second.optimizer.state
    assert second.model.scale not in state
    assert [state[p]["momentum_buffer"].data_ptr() for p in second.model.parameters() if p in state] == made
    assert len(made) == 4
    assert bits(v["momentum_buffer"] for v in state.values()) == bits(
        v["momentum_buffer"] for v in first.optimizer.state.values()
    )


def test_the_optimizers_of_torch_are_found():
    assert {"Adam", "AdamW", "LBFGS", "Adafactor", "Rprop"} <= optimizers_of_torch().keys()


def test_muon_goes_on(tmp_path):
    assert_goes_on(tmp_path, optimizer=of_all(torch.optim.Muon, lr=0.1), model=Matrix)


def test_sparse_adam_goes_on(tmp_path):
    assert_goes_on(tmp_path, optimizer=of_all(torch.optim.SparseAdam, lr=0.1), model=Looked)


def test_sparse_gradients_that_wait_are_kept(tmp_path):
    run, other = (Run(seed, of_all(torch.optim.SparseAdam), model=Looked) for seed in (1, 2))
    run.engine.backward(run.model(DATA[0]))
    run.engine.save_state(tmp_path / "ckpt")
    other.engine.load_state(tmp_path / "ckpt")
    assert other.model.table.weight.grad.is_sparse
    assert torch.equal(other.model.table.weight.grad.to_dense(), run.model.table.weight.grad.to_dense())


# ---------------------------------------------------------------------- loading by copy


def saved_and_loaded(tmp_path, first, second):
    first.train(2).engine.save_state(tmp_path / "ckpt")
    second.engine.load_state(tmp_path / "ckpt")


def test_weights_and_state_stay_where_they_are(tmp_path):
    first, second = Run(1, of_all(torch.optim.AdamW)), Run(2, of_all(torch.optim.AdamW)).train(1)

    def places():
        state = [v.data_ptr() for values in second.optimizer.state.values() for v in values.values()]
        return [id(p) for p in second.model.parameters()], [p.data_ptr() for p in second.model.parameters()], state

    before = places()
    saved_and_loaded(tmp_path, first, second)
    assert places() == before
    assert len(before[2]) == 15
    assert bits(second.model.parameters()) == bits(first.model.parameters())


def test_state_that_the_checkpoint_does_not_have_is_forgotten(tmp_path):
    first, second = Run(1, of_all(torch.optim.AdamW)), Run(2, of_all(torch.optim.AdamW)).train(2)
    first.engine.save_state(tmp_path / "ckpt")
    second.engine.load_state(tmp_path / "ckpt")
    assert not second.optimizer.state


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x)).square().mean()


def test_tied_weights_are_written_once_and_stay_tied(tmp_path):
    parts = {"optimizer": of_all(torch.optim.AdamW), "model": Tied}
    resumed, _ = assert_goes_on(tmp_path, **parts)
    assert resumed.model.head.weight is resumed.model.embedding.weight
    assert (tmp_path / "ckpt" / "model.safetensors").stat().st_size < 2 * 6 * 6 * 4 + 200


class Half(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 3, dtype=torch.bfloat16)

    def forward(self, x):
        return super().forward(x.bfloat16()).float().square().mean()


class Fp32Momentum(torch.optim.SGD):
    """Keeps fp32 state for bf16 weights; torch's own load_state_dict would round it."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                moment = self.state[p].setdefault("moment", torch.zeros_like(p, dtype=torch.float32))
                moment.mul_(0.9).add_(p.grad.float() / 3)
                p.data.add_(moment.to(p.dtype), alpha=-0.1)


def test_fp32_state_of_bf16_weights_stays_fp32(tmp_path):
    resumed, _ = assert_goes_on(tmp_path, optimizer=of_all(Fp32Momentum, lr=0.1), model=Half)
    moments = [values["moment"] for values in resumed.optimizer.state.values()]
    assert [moment.dtype for moment in moments] == [torch.float32] * 2
    assert not torch.equal(moments[0], moments[0].bfloat16().float())


def test_state_of_weights_in_channels_last_is_laid_out_like_them(tmp_path):
    class Image(torch.nn.Conv2d):
        def __init__(self):
            super().__init__(2, 3, 2)
            self.to(memory_format=torch.channels_last)

        def forward(self, x):
            return super().forward(x[:, :4].reshape(-1, 2, 2, 2)).square().mean()

    resumed, _ = assert_goes_on(tmp_path, optimizer=of_all(torch.optim.AdamW), model=Image)
    assert resumed.model.weight.is_contiguous(memory_format=torch.channels_last)
    assert resumed.optimizer.state[resumed.model.weight]["exp_avg"].stride() == resumed.model.weight.stride()


class Counted(torch.nn.Module):
    """Buffers, a running statistic, and extra state that is not a tensor."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1)
        self.register_buffer("of_this_process", torch.rand(1), persistent=False)
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return self.last(self.norm(x)).square().mean()

    def get_extra_state(self):
        return {"calls": (self.num_calls, "and more")}

    def set_extra_state(self, state):
        self.num_calls, _ = state["calls"]


def test_buffers_and_extra_state(tmp_path):
    resumed, _ = assert_goes_on(tmp_path, optimizer=of_all(torch.optim.AdamW), model=Counted)
    assert resumed.model.num_calls == NUM_BEFORE + NUM_AFTER
    assert resumed.model.norm.num_batches_tracked == NUM_BEFORE + NUM_AFTER


def test_groups_and_their_options_are_restored(tmp_path):
    """But how a step is computed belongs to the optimizer that is there."""
    first = Run(1, of_all(torch.optim.AdamW, lr=0.1, betas=(0.5, 0.6), weight_decay=0.3, foreach=False))
    second = Run(2, of_all(torch.optim.AdamW, lr=0.2, fused=True))
    saved_and_loaded(tmp_path, first, second)
    group = second.optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.5, 0.6), 0.3)
    assert (group["fused"], group["foreach"]) == (True, None)


def test_several_models_and_optimizers(tmp_path):
    def engine_of(seed):
        torch.manual_seed(seed)
        models = [Dense(), Dense()]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
        engine = Engine(device="cpu")
        return engine, *engine.prepare(*models, *optimizers)

    def step(engine, models, optimizers):
        engine.backward(models[0](DATA[0]) + models[1](DATA[1]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    runs = []
    for seed in (1, 2):
        engine, *parts = engine_of(seed)
        if seed == 1:
            step(engine, parts[:2], parts[2:])
            engine.save_state(tmp_path / "ckpt")
        else:
            engine.load_state(tmp_path / "ckpt")
        step(engine, parts[:2], parts[2:])
        runs.append([bits(model.parameters()) for model in parts[:2]])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]
