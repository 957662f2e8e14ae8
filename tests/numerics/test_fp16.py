"""fp16: an overflow skips the optimizer and the schedule, is counted, and clipping sees true gradients."""

import copy

import pytest
import torch

from trimtab import Engine


def prepared(precision="fp16", **kwargs):
    engine = Engine(precision, device="cpu", **kwargs)
    layer = torch.nn.Linear(4, 1)
    raw = torch.optim.SGD(layer.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(raw, step_size=1, gamma=0.5)
    start_small(engine)
    return engine, *engine.prepare(layer, raw, scheduler)


def start_small(engine):
    """A first scale at which these losses do not overflow; the usual 65536 is too large for them."""
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "scale": 1024.0})


def test_an_overflow_skips_the_optimizer_and_the_schedule():
    engine, model, optimizer, scheduler = prepared()
    skipped, scales = [], []
    for step in range(4):
        before = model.weight.detach().clone()
        factor = float("inf") if step == 1 else 1.0
        engine.backward(model(torch.ones(2, 4)).mean() * factor)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        skipped.append(engine.optimizer_step_was_skipped)
        assert torch.equal(model.weight, before) is skipped[-1]
        scales.append(engine.scaler.get_scale())
    assert skipped == [False, True, False, False]
    assert engine.num_skipped_steps == 1
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert scheduler.get_last_lr() == [pytest.approx(0.1 * 0.5**3)]


def test_an_overflow_inside_a_window_skips_the_whole_window():
    engine, model, optimizer, _ = prepared(gradient_accumulation_steps=2)
    before = model.weight.detach().clone()
    for factor in (float("nan"), 1.0):
        with engine.accumulate(model):
            engine.backward(model(torch.ones(2, 4)).mean() * factor)
            optimizer.step()
            optimizer.zero_grad()
    assert engine.optimizer_step_was_skipped
    assert torch.equal(model.weight, before)


def test_the_scale_grows_after_enough_good_steps():
    engine, model, optimizer, _ = prepared()
    engine.scaler.load_state_dict({**engine.scaler.state_dict(), "growth_interval": 3})
    for _ in range(3):
        engine.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert engine.scaler.get_scale() == 2048.0


def test_two_optimizers_skip_each_for_itself_and_the_scale_moves_once():
    engine = Engine("fp16", device="cpu")
    start_small(engine)
    a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    raw = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (a, b)]
    a, b, first, second = engine.prepare(a, b, *raw)
    engine.backward(a(torch.ones(1, 2)).sum() + b(torch.ones(1, 2)).sum() * float("inf"))
    first.step()
    second.step()
    assert (first.step_was_skipped, second.step_was_skipped) == (False, True)
    assert engine.scaler.get_scale() == 512.0


def test_gradients_kept_over_a_step_keep_their_size():
    """Without zero_grad, torch adds to what is there; the scale of fp16 must not come between."""
    engine, model, optimizer, _ = prepared()
    for _ in range(3):
        engine.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
    assert torch.allclose(model.weight.grad, torch.full((1, 4), 3.0))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("loaded_in", [torch.float16, torch.bfloat16])
def test_what_trains_is_fp32_whatever_it_was_loaded_in(precision, loaded_in):
    engine = Engine(precision, device="cpu")
    if precision == "fp16":
        start_small(engine)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).to(loaded_in)
    model[0].requires_grad_(False)
    raw = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    model, optimizer = engine.prepare(model, raw)
    assert [p.dtype for p in model.parameters()] == [loaded_in] * 2 + [torch.float32] * 2
    engine.backward(model(torch.ones(2, 4)).mean())
    engine.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not engine.optimizer_step_was_skipped


def test_half_weights_that_begin_to_train_later_cannot_fail_to_unscale():
    engine = Engine("fp16", device="cpu")
    start_small(engine)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)).half()
    model[0].requires_grad_(False)
    model, optimizer = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model[0].requires_grad_(True)
    engine.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
    assert model[0].weight.dtype is torch.float32
    assert not engine.optimizer_step_was_skipped


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_forward_runs_in_the_precision_and_returns_fp32(precision):
    engine = Engine(precision, device="cpu")
    inside = []
    model = torch.nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: inside.append(output.dtype))
    wrapper = engine.prepare(Nested(model))
    output = wrapper(torch.ones(2, 4))
    assert inside == [engine._precision.compute_dtype]
    assert output["logits"].dtype is torch.float32
    assert [t.dtype for t in output["hidden"]] == [torch.float32, torch.int64]
    assert engine.mixed_precision == precision


class Nested(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        """Doubles as a check that the documentation of a forward survives."""
        hidden = self.inner(x)
        return {"logits": hidden, "hidden": (hidden, torch.ones(1, dtype=torch.long))}


def test_a_copy_of_a_prepared_model_computes_with_its_own_weights():
    engine = Engine("bf16", device="cpu")
    model = engine.prepare(Nested(torch.nn.Linear(4, 4)))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.inner.weight.zero_()
        twin.inner.bias.zero_()
    assert twin(torch.ones(1, 4))["logits"].abs().sum() == 0
    assert model(torch.ones(1, 4))["logits"].abs().sum() > 0


def test_unwrapping_gives_the_own_forward_back():
    engine = Engine("bf16", device="cpu")
    model = engine.prepare(Nested(torch.nn.Linear(4, 4)))
    assert model.forward.__doc__.startswith("Doubles")
    plain = engine.unwrap_model(model, keep_fp32_wrapper=False)
    assert plain is model
    assert "forward" not in model.__dict__
    assert plain(torch.ones(1, 4))["logits"].dtype is torch.float32
