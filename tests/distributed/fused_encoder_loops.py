"""Loops of an encoder with plain and with fused operations, to be compared."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from trimtab import Engine
from trimtab.model.fused_encoder import use_fused_encoder

SETTINGS = {"plain": {}, "fused": {"is_fused": True}, "dropout": {"is_fused": True, "dropout": 0.3}}


def a_model(dropout=0.0):
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=50, **sizes, **rates))


def rows():
    ids = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, torch.arange(8) % 2, strict=True)]


def train(is_fused=False, dropout=0.0):
    engine = Engine(cpu=True, gradient_accumulation_steps=2)
    model = a_model(dropout).train()
    if is_fused:
        assert use_fused_encoder(model) == 8
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, loader = engine.prepare(model, optimizer, DataLoader(rows(), batch_size=2))
    for batch in loader:
        with engine.accumulate(model):
            engine.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in engine.unwrap_model(model).parameters()])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {name: train(**settings) for name, settings in SETTINGS.items()}
    engine = Engine(cpu=True)
    torch.save(found, folder / f"{engine.num_processes}-{engine.process_index}.pt")
