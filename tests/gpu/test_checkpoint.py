"""Saving from a GPU: the copy is queued behind the work of the training, which does not wait for it."""

import pytest
import torch

from trimtab.checkpoint.background import BackgroundWriter
from trimtab.checkpoint.codec import decode, encode
from trimtab.checkpoint.snapshot import Snapshots
from trimtab.checkpoint.store import StoredCheckpoint, write_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def stored(folder):
    checkpoint = StoredCheckpoint(folder)
    return decode(checkpoint.trees["p"], checkpoint.tensor_reader("p"))


def test_a_save_does_not_wait_for_the_device(tmp_path):
    weight = torch.randn(50_000_000, device="cuda")
    expected = weight.cpu()
    writer = BackgroundWriter()
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second of work that is queued
        writer.save(tmp_path / "c", {"p": encode({"w": weight})})
        assert not torch.cuda.current_stream().query(), "the save waited for the device"
        weight.zero_()
        assert writer.wait() is None
        assert torch.equal(stored(tmp_path / "c")["w"], expected)
        weight.copy_(expected)
    assert writer.close() is None


def test_a_snapshot_is_the_state_of_its_moment(tmp_path):
    value = {
        "x": torch.randn(5_000_000, device="cuda"),
        "t": torch.randn(300, 700, device="cuda").t(),
        "cpu": torch.ones(3),
    }
    expected = {name: tensor.cpu().clone() for name, tensor in value.items()}
    snapshots = Snapshots(2**20)
    for number in range(3):
        torch.cuda._sleep(1_000_000_000)  # half a second of work, which is still queued when the snapshot is taken
        copied, ready = snapshots.take({"p": encode(value)})
        # pinning memory, which only the first one does, waits for the device
        assert number == 0 or not torch.cuda.current_stream().query(), "the snapshot waited for the device"
        value["x"].zero_()
        value["t"].zero_()
        ready()
        assert all(slab.is_pinned() for slab in snapshots._slabs)
        write_checkpoint(tmp_path / "c", copied)
        found = stored(tmp_path / "c")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        value["x"].copy_(expected["x"])
        value["t"].copy_(expected["t"])
