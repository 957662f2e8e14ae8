"""State allocated before the first step equals the state that the first step would allocate."""

import pytest
import torch

from trimtab.optim.build import build_optimizer
from trimtab.optim.preallocation import preallocate_state


def trained(name, dtype, is_preallocated, fused_on="cpu"):
    torch.manual_seed(0)
    parameters = [
        torch.nn.Parameter(torch.randn(6, 4, dtype=dtype).t()),  # not contiguous
        torch.nn.Parameter(torch.randn(5, dtype=dtype)),
        torch.nn.Parameter(torch.randn(3, dtype=dtype)),  # begins to train later
    ]
    optimizer = build_optimizer(
        name,
        [{"params": parameters[:1], "weight_decay": 0.1}, {"params": parameters[1:], "weight_decay": 0.0}],
        lr=1e-2,
        momentum=0.9 if name == "sgd" else 0.0,
        device=fused_on,
        rounds_stochastically=dtype is torch.bfloat16,
    )
    before = torch.get_rng_state()
    if is_preallocated:
        preallocate_state(optimizer, parameters)
        assert all(optimizer.state[parameter] for parameter in parameters)
        assert all(parameter.grad is None for parameter in parameters)
        held = {id(t) for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)}
        preallocate_state(optimizer, parameters)
        assert held == {id(t) for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)}
    assert torch.equal(before, torch.get_rng_state())
    for step in range(4):
        for parameter in parameters[: 2 if step < 2 else 3]:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        if is_preallocated:  # nothing was made anew
            now = {id(t) for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)}
            assert now == held
    states = [[(key, value) for key, value in sorted(optimizer.state[p].items())] for p in parameters]
    return parameters, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "meta"])  # the second means: not fused
@pytest.mark.parametrize("name", ["adamw", "adam", "adagrad", "adafactor", "sgd"])
def test_steps_have_the_same_bits(name, dtype, device):
    if name == "adafactor" and dtype is torch.bfloat16:
        pytest.skip("adafactor does not round stochastically")
    (ours, our_states), (plain, plain_states) = (trained(name, dtype, done, device) for done in (True, False))
    assert all(torch.equal(*pair) for pair in zip(ours, plain, strict=True))
    for one, other in zip(our_states, plain_states, strict=True):
        assert [key for key, _ in one] == [key for key, _ in other]
        for (_, mine), (_, theirs) in zip(one, other, strict=True):
            assert type(mine) is type(theirs)
            if torch.is_tensor(mine):
                assert torch.equal(mine, theirs)
                assert mine.stride() == theirs.stride()
            else:
                assert mine == theirs


def test_an_unknown_optimizer_is_not_changed():
    class Own(torch.optim.Optimizer):
        def step(self, closure=None):
            return None

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Own([parameter], {})
    preallocate_state(optimizer, [parameter])
    assert not optimizer.state
