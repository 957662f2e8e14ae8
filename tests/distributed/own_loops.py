"""Loops that one, two and three processes run in the same way: each gives what a test compares."""

import random
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from trimtab import Engine

IGNORED = -100


class Tagger(torch.nn.Module):
    """Small, with an embedding, a norm and a head; one label for each position."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.embedding = torch.nn.Embedding(50, 12)
        self.norm = torch.nn.LayerNorm(12)
        self.middle = torch.nn.Linear(12, 12)
        self.head = torch.nn.Linear(12, 4)
        self.dropout = torch.nn.Dropout(dropout)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, ids):
        hidden = self.norm(self.embedding(ids))
        return self.head(self.dropout(torch.tanh(self.middle(hidden))))


def rows(count=13, length=6, ignore=()):
    generator = torch.Generator().manual_seed(3)
    made = []
    for index in range(count):
        ids = torch.randint(0, 50, (length,), generator=generator)
        labels = ids % 4
        num_labelled = 1 + int(torch.randint(0, length, (), generator=generator))
        labels[num_labelled:] = IGNORED
        if index in ignore:
            labels[:] = IGNORED
        made.append({"ids": ids, "labels": labels, "row": torch.tensor(index)})
    return made


def loss_of(model, batch):
    """A mean over labelled tokens, NaN where there are none, and their number."""
    logits = model(batch["ids"])
    weight = (batch["labels"] != IGNORED).sum()
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED), weight


def mean_over_rows(model, batch):
    """The same weight for each row."""
    logits = model(batch["ids"])
    return functional.cross_entropy(logits[:, 0], batch["ids"][:, 0] % 4)


def train(
    engine,
    data,
    *,
    batch_size=4,
    epochs=2,
    weighted=True,
    clip=None,
    lr=0.5,
    shuffle=False,
    model=None,
    spoil=None,
    on_epoch=None,
    **loader_options,
):
    """Weights, the loss of every window, learning rates and the rows that were seen, over all processes."""
    model = model or Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    if not isinstance(data, IterableDataset):
        loader_options["shuffle"] = shuffle
    loader = DataLoader(data, batch_size=batch_size, **loader_options)
    model, optimizer, loader, scheduler = engine.prepare(model, optimizer, loader, scheduler)
    losses, norms, seen, num_windows = [], [], [], 0
    for epoch in range(epochs):
        if on_epoch is not None:
            on_epoch(engine.unwrap_model(model), epoch)
        seen.append([])
        window = torch.zeros(2, dtype=torch.float64)
        for batch in loader:
            with engine.accumulate(model):
                if weighted:
                    loss, weight = loss_of(model, batch)
                else:
                    loss, weight = mean_over_rows(model, batch), None
                if spoil is not None and spoil(num_windows, engine):
                    loss = loss * float("inf")
                engine.backward(loss, weight=weight)
                if clip is not None and engine.sync_gradients:
                    norms.append(float(engine.clip_grad_norm_(model.parameters(), clip)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not engine.has_no_rows:
                count = float(weight) if weighted else len(batch["ids"])
                if count:
                    window += torch.tensor([float(loss.detach()) * count, count], dtype=window.dtype)
            if engine.sync_gradients:
                total = engine.reduce(window)
                losses.append(float(total[0] / total[1]) if total[1] else 0.0)
                window.zero_()
                num_windows += 1
            seen[-1] += engine.gather_for_metrics(batch["row"]).tolist()
    return {
        "weights": torch.cat([p.detach().flatten() for p in engine.unwrap_model(model).parameters()]),
        "losses": losses,
        "norms": norms,
        "seen": seen,
        "lr": scheduler.get_last_lr()[0],
        "num_skipped": engine.num_skipped_steps,
        "length": len(loader) if not isinstance(data, IterableDataset) else None,
    }


class Shuffled(IterableDataset):
    """Draws its order from Python's own generator while it is read, as hand-written shuffle buffers do."""

    def __init__(self, items) -> None:
        self.items = items

    def __iter__(self):
        buffer = []
        for item in self.items:
            buffer.append(item)
            if len(buffer) == 5:
                yield buffer.pop(random.randrange(5))
        random.shuffle(buffer)
        yield from buffer


def unfreeze_later(model, epoch):
    model.middle.requires_grad_(epoch > 0)


def frozen_at_first():
    model = Tagger()
    model.middle.requires_grad_(False)
    return model


LOOPS = {
    "plain": lambda: train(Engine(cpu=True), rows(), weighted=False),
    "weights": lambda: train(Engine(cpu=True), rows()),
    "shuffled": lambda: train(Engine(cpu=True, seed=5), rows(), shuffle=True, epochs=3),
    "workers": lambda: train(Engine(cpu=True, seed=5), rows(), shuffle=True, num_workers=2),
    "windows": lambda: train(Engine(cpu=True, gradient_accumulation_steps=3), rows(), clip=0.5),
    "windows without weights": lambda: train(
        Engine(cpu=True, gradient_accumulation_steps=2), rows(16), weighted=False, clip=1.0
    ),
    "no labels": lambda: train(
        Engine(cpu=True, gradient_accumulation_steps=2), rows(13, ignore=(0, 1, 2, 3, 6, 7, 12)), batch_size=4
    ),
    "one row left": lambda: train(Engine(cpu=True), rows(9), weighted=False),
    "one row left, weights": lambda: train(Engine(cpu=True, gradient_accumulation_steps=2), rows(9), clip=0.3),
    "iterable": lambda: train(Engine(cpu=True, seed=5), Shuffled(rows()), epochs=3),
    "unfrozen later": lambda: train(
        Engine(cpu=True), rows(12), model=frozen_at_first(), epochs=3, on_epoch=unfreeze_later
    ),
    # rounding is too small here to hide a wrong weight, however long the run is
    "fp64, 120 steps": lambda: train(
        Engine(cpu=True, seed=5), rows(), model=Tagger().double(), shuffle=True, epochs=30
    ),
    "overflow": lambda: train(
        Engine(mixed_precision="fp16", cpu=True),
        rows(12),
        lr=0.05,
        spoil=lambda window, engine: window in (1, 4) and engine.is_last_process,
    ),
}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    results = {}
    for name, loop in LOOPS.items():
        random.seed(1)
        torch.manual_seed(1)
        results[name] = loop()
    engine = Engine(cpu=True)
    torch.save(results, folder / f"{engine.num_processes}-{engine.process_index}.pt")
