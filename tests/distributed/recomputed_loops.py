"""Loops with and without gradient checkpointing, to be compared."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

from trimtab import Engine
from trimtab.model.blocks import blocks_of
from trimtab.techniques.recomputation import checkpoint_layers

KINDS = ["none", "all", "ops", {"every": 2}, {"layers": [-1]}]
NUM_ROWS = 8


def a_model(dropout: float) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=dropout,
        )
    )


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 50, (NUM_ROWS, 6), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(which, *, dropout=0.0, num_frozen=0, precision="no"):
    engine = Engine(mixed_precision=precision, cpu=True, gradient_accumulation_steps=2)
    model = a_model(dropout).train()
    if num_frozen:
        model.model.embed_tokens.requires_grad_(False)
        for _, block in blocks_of(model)[:num_frozen]:
            block.requires_grad_(False)
    checkpoint_layers(model, which)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(rows(), batch_size=2))
    torch.manual_seed(11 + engine.process_index)
    losses = []
    for batch in loader:
        with engine.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    weights = torch.cat([p.detach().flatten() for p in engine.unwrap_model(model).parameters()])
    return {"weights": weights, "losses": losses}


SETTINGS = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "frozen": {"num_frozen": 2, "dropout": 0.3},
    "bf16": {"precision": "bf16", "dropout": 0.3},
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {name: {str(which): train(which, **settings) for which in KINDS} for name, settings in SETTINGS.items()}
    engine = Engine(cpu=True)
    torch.save(found, folder / f"{engine.num_processes}-{engine.process_index}.pt")
