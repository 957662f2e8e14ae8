"""Copies between host and device: neighbours in memory are one copy, and nothing else is touched."""

import torch

from trimtab.model.host_areas import empty_on_host
from trimtab.model.host_pages import HostLink, joined

CPU = torch.device("cpu")
SHAPES = [(128, 4), (256,), (7,), (64, 8), (128,)]  # the third does not fill its 512 bytes


def areas(fill):
    like = [torch.empty(shape) for shape in SHAPES]
    return [tensor.fill_(fill) for tensor in empty_on_host(like, pins=False)]


def test_neighbours_are_copied_at_once():
    targets, sources = areas(0.0), areas(1.0)
    pairs = list(zip(targets, sources, strict=True))
    found = joined(pairs)
    assert [target.nbytes for target, _ in found] == [(512 + 256 + 7) * 4, (512 + 128) * 4]
    HostLink().copy_in(pairs, CPU)
    assert all(torch.equal(*pair) for pair in pairs)


def test_what_lies_between_stays():
    targets, sources = areas(0.0), areas(1.0)
    pairs = [pair for number, pair in enumerate(zip(targets, sources, strict=True)) if number != 1]
    assert [target.nbytes for target, _ in joined(pairs)] == [2048, 28, (512 + 128) * 4]
    HostLink().copy_out(pairs, CPU)
    assert torch.equal(targets[1], torch.zeros(256))


def test_only_neighbours_on_both_sides():
    buffer, source = torch.zeros(1024), torch.ones(1024)
    pairs = [(buffer[:256], source[:256]), (buffer[256:512], source[512:768]), (buffer[512:768], source[768:])]
    assert [target.nbytes for target, _ in joined(pairs)] == [1024, 2048]
    transposed = [(torch.zeros(4, 8).t(), torch.ones(8, 4)), (buffer[:4], source[:4])]
    assert joined(transposed) == transposed
    assert joined([]) == []
