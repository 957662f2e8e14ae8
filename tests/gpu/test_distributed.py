"""A world of one process over NCCL on a GPU: connected models train to the bits of unconnected ones, nobody waits."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from trimtab import DistributedType, Engine
from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.fixture(scope="module", autouse=True)
def nccl(tmp_path_factory):
    """torch's default group: one process, with NCCL on the device and gloo on the host."""
    folder: Path = tmp_path_factory.mktemp("store")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    yield
    from trimtab.distributed.rendezvous import _leave

    _leave()
    assert not dist.is_initialized()


def rows(count=26):
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, 40, (count, 8), generator=generator)
    return [{"ids": row, "labels": row.flip(0)} for row in ids]


def build():
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Embedding(40, 32),
        torch.nn.Linear(32, 64),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(64, 40),
    )


def train(precision, connected, watch=False):
    engine = Engine(precision, gradient_accumulation_steps=2, world=None if connected else World())
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(rows(), batch_size=4))
    assert isinstance(model, DataParallel) is connected
    torch.manual_seed(9)
    num_warnings = []
    for epoch in range(2):
        for batch in loader:
            with engine.accumulate(model), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if watch and epoch:
                    torch.cuda.set_sync_debug_mode("warn")
                logits = model(batch["ids"])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                engine.backward(loss, weight=(batch["labels"] >= 0).sum())
                engine.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                torch.cuda.set_sync_debug_mode("default")
            num_warnings.append(sum("synchroniz" in str(warning.message) for warning in caught))
    return torch.cat([p.detach().flatten() for p in model.parameters()]), num_warnings, engine


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_connected_and_unconnected_give_the_same_bits(precision):
    connected, _, engine = train(precision, True)
    alone, _, _ = train(precision, False)
    assert engine.distributed_type is DistributedType.MULTI_GPU
    assert torch.equal(connected, alone)


def test_the_host_does_not_wait():
    _, num_warnings, _ = train("bf16", True, watch=True)
    assert sum(num_warnings) == 0


def test_verbs_on_the_device(tmp_path):
    engine = Engine("bf16")
    assert engine.gather(torch.tensor([1.5], device="cuda", dtype=torch.bfloat16)).tolist() == [1.5]
    assert engine.gather(torch.tensor([True])).tolist() == [True], "host tensors go through gloo"
    assert engine.reduce(torch.tensor(2.0, device="cuda"), "mean").item() == 2.0
    assert engine.gather_for_metrics(["a"]) == ["a"]
    engine.wait_for_everyone()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = engine.prepare(model, optimizer)
    engine.backward(model(torch.arange(8, device="cuda")[None]).float().square().mean())
    optimizer.step()
    engine.save_state(tmp_path / "state")
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    engine.load_state(tmp_path / "state")
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
