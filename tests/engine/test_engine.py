"""The facade: what goes into prepare, what comes out, and what is refused with which words."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trimtab import Engine
from trimtab.errors import LossError, PrepareError, RecipeError, UserError


def parts():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(6, 2)), batch_size=2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return model, optimizer, loader, scheduler


def test_parts_come_back_in_the_order_given():
    engine = Engine(device="cpu")
    model, optimizer, loader, scheduler = parts()
    a, b, c, d = engine.prepare(scheduler, loader, optimizer, model)
    assert (a.scheduler, b.loader, c.optimizer, d) == (scheduler, loader, optimizer, model)
    assert engine.prepare(a, b, c, d) == (a, b, c, d)
    assert isinstance(c, torch.optim.Optimizer)
    assert c.param_groups is optimizer.param_groups
    assert len(b) == 3
    assert b.batch_size == 2


def test_a_single_part_comes_back_alone_and_a_schedule_can_be_built_on_a_prepared_optimizer():
    engine = Engine(device="cpu")
    model = torch.nn.Linear(2, 1)
    optimizer = engine.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = engine.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    engine.backward(engine.prepare(model)(torch.ones(1, 2)).sum())
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize("thing", [None, 3, [1], "model", torch.ones(2)])
def test_something_unknown_is_named_with_its_place(thing):
    engine = Engine(device="cpu")
    model, *_ = parts()
    with pytest.raises(PrepareError, match=r"argument 2 of prepare is a .*\n  cure: "):
        engine.prepare(model, thing)
    with pytest.raises(PrepareError, match="before prepare"):  # nothing was prepared by the call that failed
        engine.backward(model(torch.ones(1, 2)).sum())


def test_bad_losses_are_refused_and_gradients_stay():
    engine = Engine(device="cpu")
    model, optimizer, _, _ = parts()
    with pytest.raises(PrepareError, match="before prepare"):
        engine.backward(model(torch.ones(1, 2)).sum())
    model, optimizer = engine.prepare(model, optimizer)
    for loss, words in [
        (None, "no labels"),
        (1.5, "float, not a tensor"),
        (model(torch.ones(3, 2)), r"shape \(3, 1\)"),
        (torch.ones(()), "does not depend on any trainable parameter"),
    ]:
        with pytest.raises(LossError, match=words):
            engine.backward(loss)
    assert model.weight.grad is None
    engine.backward(model(torch.ones(1, 2)))  # one element is a scalar for all purposes
    assert model.weight.grad is not None


def test_accumulate_wants_a_prepared_model():
    engine = Engine(device="cpu")
    with pytest.raises(PrepareError, match="Linear that was not prepared"):
        engine.accumulate(torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mixed_precision": "fp8"}, "mixed_precision='fp8'"),
        ({"device": "banana"}, "device='banana'"),
        ({"log_with": "nowhere"}, "log_with='nowhere'"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        Engine(**settings)


def test_unknown_settings_are_refused():
    with pytest.raises(TypeError, match="no_such_setting"):
        Engine(no_such_setting=1)


def test_every_user_error_says_its_cure():
    error = UserError("it broke", "mend it")
    assert str(error) == "it broke\n  cure: mend it"
    assert error.exit_code == 2


def test_two_engines_live_side_by_side():
    first, second = Engine("bf16", 4, device="cpu"), Engine("no", 1, device="cpu")
    a = first.prepare(torch.nn.Linear(2, 2))
    b = second.prepare(torch.nn.Linear(2, 2))
    with first.accumulate(a):
        first.backward(a(torch.ones(1, 2)).sum())
        assert (first.sync_gradients, second.sync_gradients) == (False, True)
        second.backward(b(torch.ones(1, 2)).sum())
    assert torch.equal(b.bias.grad, torch.ones(2))
    assert torch.equal(a.bias.grad, torch.full((2,), 0.25))
    assert (first.mixed_precision, second.mixed_precision) == ("bf16", "no")
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (4, 1)


def test_seed_makes_two_engines_draw_alike():
    Engine(seed=5, device="cpu")
    first = torch.rand(3)
    Engine(seed=5, device="cpu")
    assert torch.equal(first, torch.rand(3))


@pytest.mark.parametrize("seed", ["a", 1.5, 2**64, -(2**63) - 1])
def test_a_seed_that_torch_cannot_use_is_refused(seed):
    with pytest.raises(RecipeError, match=r"seed: found .*\n  cure: an integer"):
        Engine(seed=seed, device="cpu")


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan")])
def test_a_norm_that_would_reverse_or_erase_gradients_is_refused(max_norm):
    engine = Engine(device="cpu")
    model, *_ = parts()
    engine.backward(engine.prepare(model)(torch.ones(1, 2)).sum())
    with pytest.raises(RecipeError, match="max_norm=.*\n  cure: use a number above 0"):
        engine.clip_grad_norm_(model.parameters(), max_norm)
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_an_optimizer_of_another_model_is_reported(caplog, monkeypatch):
    monkeypatch.setattr("trimtab.log._logged_once", set())
    caplog.set_level("INFO", logger="trimtab")
    model, optimizer, *_ = parts()
    Engine(device="cpu").prepare(optimizer, model)
    engine = Engine(device="cpu")
    engine.prepare(torch.nn.Linear(2, 1))
    engine.prepare(optimizer)  # its model may come later
    assert "updates no parameter" not in caplog.text
    Engine(device="cpu").prepare(torch.nn.Linear(2, 1), optimizer)
    assert "AdamW updates no parameter of a prepared model" in caplog.text


def test_a_window_broken_off_does_not_silence_a_plain_loop():
    engine = Engine(device="cpu", gradient_accumulation_steps=4)
    model, optimizer, loader, _ = parts()
    model, optimizer, loader = engine.prepare(model, optimizer, loader)
    for (batch,) in loader:
        with engine.accumulate(model):
            engine.backward(model(batch).sum())
        break
    assert not engine.sync_gradients
    before = model.weight.detach().clone()
    engine.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not torch.equal(model.weight, before)


def test_backward_and_step_after_the_accumulate_block_belong_to_it():
    engine = Engine(device="cpu", gradient_accumulation_steps=2)
    model, optimizer, _, _ = parts()
    model, optimizer = engine.prepare(model, optimizer)
    steps = []
    for _ in range(4):
        before = model.weight.detach().clone()
        with engine.accumulate(model):
            loss = model(torch.ones(1, 2)).sum()
        engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps.append(not torch.equal(model.weight, before))
    assert steps == [False, True, False, True]


def test_an_evaluation_inside_an_epoch_does_not_end_its_window():
    engine = Engine(device="cpu", gradient_accumulation_steps=2)
    model, optimizer, loader, _ = parts()
    evaluation = DataLoader(TensorDataset(torch.ones(1, 2)), batch_size=1)
    model, optimizer, loader, evaluation = engine.prepare(model, optimizer, loader, evaluation)
    ends = []
    for (batch,) in loader:
        for (row,) in evaluation:
            model(row)
        with engine.accumulate(model):
            engine.backward(model(batch).sum())
            ends.append(engine.sync_gradients)
    assert ends == [False, True, True]


class GradScalerKwargs:
    init_scale, growth_factor, backoff_factor, growth_interval = 256.0, 4.0, 0.25, 7


class Settings:
    """Any of Accelerate's settings objects: they are read by their fields."""

    def __init__(self, **fields):
        self.__dict__.update(fields)


def test_settings_objects_of_accelerate_are_honoured_by_their_fields(tmp_path):
    engine = Engine(
        "fp16",
        device="cpu",
        dataloader_config=Settings(split_batches=True, use_stateful_dataloader=True, use_seedable_sampler=False),
        gradient_accumulation_plugin=Settings(num_steps=3, sync_with_dataloader=True, sync_each_batch=False),
        project_config=Settings(project_dir=str(tmp_path), automatic_checkpoint_naming=False),
        kwargs_handlers=[GradScalerKwargs()],
    )
    assert engine.gradient_accumulation_steps == 3
    assert engine.project_dir == tmp_path
    assert engine.scaler.state_dict() == {
        "scale": 256.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gradient_accumulation_plugin": Settings(num_steps=2), "gradient_accumulation_steps": 4}, "both given"),
        ({"project_config": Settings(project_dir=".", total_limit=2)}, "total_limit"),
        ({"kwargs_handlers": [Settings(cache_enabled=True)]}, "Settings, which is not supported"),
        ({"mixed_precision": True}, "mixed_precision=True"),
    ],
)
def test_settings_of_accelerate_that_cannot_be_honoured_are_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        Engine(**settings)


def test_profile_and_save_model(tmp_path):
    from safetensors.torch import load_file

    engine = Engine(device="cpu")
    model = engine.prepare(torch.nn.Linear(2, 1))
    with engine.profile() as profile:
        model(torch.ones(1, 2))
    assert any("linear" in event.key for event in profile.key_averages())
    engine.save_model(model, tmp_path / "out")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["weight"], model.weight)


def test_settings_that_no_tracker_takes_are_refused(tmp_path):
    engine = Engine(device="cpu", log_with="journal", project_dir=tmp_path)
    with pytest.raises(RecipeError, match="init_kwargs has settings for wandb"):
        engine.init_trackers("mine", init_kwargs={"wandb": {"name": "x"}})
    engine.init_trackers("mine")
    with pytest.raises(RecipeError, match="log_kwargs has settings for journal"):
        engine.log({"loss": 1.0}, log_kwargs={"journal": {"commit": True}})
    engine.end_training()


def test_blocks_are_compiled_on_request(monkeypatch):
    from torch._dynamo.utils import counters

    from trimtab.engine import prepared_parts
    from trimtab.model.compiled_blocks import compile_blocks, compiled_blocks_of

    counters.clear()

    monkeypatch.setattr(prepared_parts, "compile_blocks", lambda model: compile_blocks(model, "aot_eager"))
    stack = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = stack

        def forward(self, x):
            for block in self.stack:
                x = block(x)
            return x

    names = list(Model().state_dict())
    engine = Engine(device="cpu", compile_blocks=True)
    model = engine.prepare(Model())
    engine.prepare(model)
    engine.backward(model(torch.ones(2, 4)).sum())
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled_blocks_of(model).failure is None
    assert list(model.state_dict()) == names
