"""One process of several that train with the loss in place of logits, through DDP in each of its ways.

Leaves the gradients of one batch, of which each process has its share, in FOLDER/RANK.pt.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tiny_models import config_of
from trimtab.distributed.gloo_threads import wait_for_idle_gloo
from trimtab.model.load import load_model
from trimtab.techniques.chunked_loss import build_task_loss as build_loss

WAYS = {
    "usual": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}
VOCAB = 300


def a_model():
    torch.manual_seed(0)
    return load_model({**config_of("gpt2"), "vocab_size": VOCAB}, "causal-lm", {}, None).eval()


def rows():
    ids = torch.randint(0, VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def gradients(model, batch, how, num_steps=2):
    """Those of the second step, so that ways which learn in the first have learned."""
    loss = build_loss("token-cross-entropy", shifts_labels=True, how=how)
    for _ in range(num_steps):
        model.zero_grad()
        loss(model, batch).value.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    share = {name: value[rank::size] for name, value in rows().items()}
    found = {}
    for way, settings in WAYS.items():
        for how in ("plain", "chunked"):
            found[way, how] = gradients(DistributedDataParallel(a_model(), **settings), share, how)
    torch.save(found, folder / f"{rank}.pt")
    wait_for_idle_gloo()
    dist.destroy_process_group()
