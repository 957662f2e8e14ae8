"""A snapshot is the state of one moment, in host memory that does not grow from one to the next."""

import os

import pytest
import torch

from trimtab.checkpoint import tensor_file
from trimtab.checkpoint.codec import decode, encode
from trimtab.checkpoint.snapshot import Snapshots, free_host_bytes
from trimtab.checkpoint.store import StoredCheckpoint, write_checkpoint


def state(factor=1.0):
    base = torch.arange(100.0) * factor
    return {
        "whole": base.reshape(10, 10),
        "shared": base,
        "turned": (torch.arange(35.0) * factor).reshape(5, 7).t(),
        "large": (torch.arange(3000.0) * factor).reshape(50, 60).t(),
        "half": (torch.arange(13) * factor).bfloat16(),
        "none": torch.empty(0, 3),
        "one": torch.tensor(7.5 * factor),
        "byte": torch.arange(5, dtype=torch.uint8),
        "step": 3,
    }


def restored(copied, folder):
    write_checkpoint(folder, copied)
    stored = StoredCheckpoint(folder)
    return decode(stored.trees["p"], stored.tensor_reader("p"))


def assert_same(value, other):
    assert value.keys() == other.keys()
    for key, item in value.items():
        if isinstance(item, torch.Tensor):
            assert item.dtype == other[key].dtype
            assert torch.equal(item, other[key])


@pytest.mark.parametrize("slab_bytes", [1, 7, 64, 1000, 2**20])
def test_it_is_the_state_of_its_moment(tmp_path, slab_bytes, monkeypatch):
    """Whatever slabs and pieces the tensors span, and whatever happens to them afterwards."""
    monkeypatch.setattr(tensor_file, "PIECE_BYTES", 1000)
    value, snapshots = state(), Snapshots(slab_bytes)
    parts = {"p": encode(value), "empty": encode({"n": 1})}
    copied, ready = snapshots.take(parts)
    for tensor in parts["p"].tensors.values():
        tensor.zero_()
    ready()
    assert_same(restored(copied, tmp_path / "c"), state())


def test_memory_is_kept_and_does_not_grow(tmp_path):
    snapshots = Snapshots(64)
    places = []
    for factor in (1.0, 2.0, 3.0):
        parts = {"p": encode(state(factor))}
        missing = snapshots.num_bytes_missing(parts)
        copied, _ = snapshots.take(parts)
        assert snapshots.num_bytes_missing(parts) == 0
        assert (missing > 0) == (factor == 1.0)
        places.append([piece.data_ptr() for tensor in copied["p"].tensors.values() for piece in tensor.pieces()])
        assert_same(restored(copied, tmp_path / "c"), state(factor))
    assert places[0] == places[1] == places[2]
    total = sum(tensor.numel() * tensor.element_size() for tensor in parts["p"].tensors.values())
    assert total <= snapshots.num_bytes_held < total + 64
    snapshots.take({"p": encode({"x": torch.ones(3)})})
    assert snapshots.num_bytes_held == 64
    snapshots.drop()
    assert snapshots.num_bytes_held == 0


# ---------------------------------------------------------------------- free memory


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="reads /proc/meminfo")
def test_free_memory_is_what_the_system_says():
    free = free_host_bytes()
    with open("/proc/meminfo") as lines:
        total = int(next(line for line in lines if line.startswith("MemTotal")).split()[1]) * 1024
    assert 0 < free <= total
