"""Units that visit a device: copied as one piece where they are one, and from wherever their data is otherwise."""

import pytest
import torch

from techniques.test_gradient_checkpointing import deep, forward, rows
from trimtab.model import streamed_blocks
from trimtab.model.blocks import blocks_of
from trimtab.model.device_visits import Visits
from trimtab.model.host_areas import move_to_area
from trimtab.model.host_pages import HostLink
from trimtab.model.streamed_blocks import stream_blocks, streamable
from trimtab.optim.build import build_optimizer
from trimtab.optim.in_backward import update_in_backward, updates_of
from trimtab.optim.preallocation import preallocate_state
from trimtab.optim.streamed_state import stream_state

CPU = torch.device("cpu")


class Pieces(HostLink):
    """Notes how many pieces each unit is copied in."""

    def __init__(self):
        super().__init__()
        self.fetched, self.sent = [], []

    def copy_in(self, pairs, device, after=None):
        self.fetched.append(len(pairs))
        return super().copy_in(pairs, device, after)

    def copy_out(self, pairs, device):
        self.sent.append(len(pairs))
        return super().copy_out(pairs, device)


def a_unit():
    """Odd sizes, a transposed tensor, one without elements, and one of another dtype."""
    values = torch.arange(60.0)
    unit = [values[:7].clone(), values.view(6, 10).t().clone(memory_format=torch.preserve_format)]
    return [*unit, torch.empty(0, 3), torch.arange(5, dtype=torch.uint8), torch.ones(300)]


@pytest.fixture
def visited():
    """The visits of two units, and the tensors of the first one."""
    link, units = Pieces(), [a_unit(), a_unit()]
    visits = Visits(CPU, link, "weights")
    for number, unit in enumerate(units):
        visits.set_area(number, move_to_area(unit, pins=False, key="a test"))
    return visits, units, link


def visit(visits, units, link):
    """Add one to all tensors of the first unit on the device; returns what was there, and the pieces of both copies."""
    visits.begin(units)
    visits.enter(0)
    seen = [tensor.clone() for tensor in units[0]]
    for tensor in units[0]:
        tensor.add_(1)
    visits.leave(has_changed=True)
    return seen, (link.fetched.pop(), link.sent.pop())


def same(found, expected):
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_unit_is_copied_as_one_piece(visited):
    visits, units, link = visited
    at_rest = [tensor.data_ptr() for tensor in units[0]]
    for round_ in range(2):
        seen, pieces = visit(visits, units, link)
        assert pieces == (1, 1)
        assert same(seen, [tensor + round_ for tensor in a_unit()])
        assert same(units[0], [tensor + round_ + 1 for tensor in a_unit()])
    assert [tensor.data_ptr() for tensor in units[0]] == at_rest
    assert same(units[1], a_unit())


@pytest.mark.parametrize("index", [0, 1, 3, 4])
def test_replaced_data_is_fetched_and_written_where_it_is(visited, index):
    visits, units, link = visited
    before = units[0][index].data
    other = before.clone() * 2
    units[0][index].data = other
    expected = [tensor.clone() for tensor in units[0]]
    seen, pieces = visit(visits, units, link)
    assert pieces == (5, 5)
    assert same(seen, expected)
    assert units[0][index].data_ptr() == other.data_ptr()
    assert torch.equal(other, expected[index] + 1)
    assert torch.equal(before, a_unit()[index]), "what the tensor left is not written"
    units[0][index].data = before
    seen, pieces = visit(visits, units, link)
    assert pieces == (1, 1)
    assert torch.equal(seen[index], a_unit()[index])
    assert same(seen[:index], [tensor + 1 for tensor in expected[:index]])


def test_data_at_the_same_address_with_gaps_is_copied_by_itself(visited):
    visits, units, link = visited
    whole = units[0][4].data.view(20, 15)
    units[0][4].data = whole[:, :14]
    whole[:, :14] = 5.0
    seen, pieces = visit(visits, units, link)
    assert pieces == (5, 5)
    assert torch.equal(seen[4], torch.full((20, 14), 5.0))
    assert whole.unique(return_counts=True)[1].tolist() == [20, 280], "ones in the gaps, and sixes"


def test_an_area_is_freed_with_the_last_tensor_in_it():
    unit = [torch.ones(3), torch.ones(4)]
    area = move_to_area(unit, pins=False, key="a test")
    unit[0].data = torch.ones(3)
    assert area.whole().nbytes == 1024
    unit[1].data = torch.ones(4)
    assert area.whole() is None


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_weights_and_state_of_a_block_are_one_piece_each(monkeypatch, optimizer):
    monkeypatch.setattr(streamed_blocks, "MIN_BYTES", 64)
    model = deep("llama")
    blocks = [block for _, block in blocks_of(model)]
    found = stream_blocks(model, blocks, [streamable(block, trains=True) for block in blocks], CPU)
    found.weights._link = found.link = link = Pieces()
    made = build_optimizer(optimizer, [{"params": list(model.parameters())}], lr=1e-3, device=CPU)
    update_in_backward(model, made)
    stream_state(model, found, made)
    preallocate_state(made, model.parameters())

    def step():
        link.fetched, link.sent = [], []
        updates_of(model).begin_window(1)
        forward(model, rows()).backward()
        made.step()
        return {*link.fetched}, link.sent

    assert step() == ({1}, [1] * 6), "weights and state of three blocks"
    made.load_state_dict(made.state_dict())  # torch's optimizers have new tensors now
    assert step() == ({1}, [1] * 6)
    weight = blocks[1].mlp.down_proj.weight
    weight.data = weight.data.clone()
    fetched, sent = step()
    assert fetched == {1, len(found.units[1])}
    assert sorted(sent) == [1] * 5 + [len(found.units[1])]
