"""Training scripts as people write them for Accelerate, run with Accelerate and with `trimtab.accelerate`.

Each has the shape of a kind of script that is in wide use: a classifier on padded batches, a causal language model on
blocks with a resume in the middle, a masked language model, and one that counts its steps by the prepared loader. What
they end with is written down: weights, learning rates, metrics.
"""

import importlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    get_scheduler,
)

NUM_WORDS = 40


def main(folder: Path) -> None:
    """Every loop with one library; its name is that of the folder."""
    library = importlib.import_module(folder.name)
    logging = importlib.import_module(f"{folder.name}.logging")
    utils = importlib.import_module(f"{folder.name}.utils")
    rank = int(os.environ.get("RANK", 0))
    for loop in LOOPS:
        utils.set_seed(7)
        options: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": WINDOWS.get(loop.__name__, 1)}
        if loop is models_language:  # with it, and with set_epoch, Accelerate resumes the order of the data
            options["dataloader_config"] = utils.DataLoaderConfiguration(use_seedable_sampler=True)
        accelerator = library.Accelerator(**options)
        outcome = loop(library, accelerator, folder)
        if loop is not reads_streams:  # which draws here what no batch depends on
            outcome["random number"] = torch.rand(1)
        logging.get_logger("loops").info(accelerator.state, main_process_only=False)
        torch.save(outcome, folder / f"{loop.__name__}-{rank}.pt")
        accelerator.free_memory()


WINDOWS = {"classifies_in_windows": 3, "models_language": 2}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def sentences(num_rows: int) -> list[dict[str, Any]]:
    """Rows of words of unequal length, with a label that can be learned."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for row in range(num_rows):
        words = torch.randint(4, NUM_WORDS, (4 + row % 5,), generator=generator)
        rows.append({"input_ids": words, "labels": int(words[0] > NUM_WORDS // 2)})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["labels"] for r in rows])}


def masked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The first word and three in ten of the others are hidden, drawn anew each time."""
    batch = padded(rows)
    is_hidden = (torch.rand(batch["input_ids"].shape) < 0.3) & (batch["input_ids"] > 0)
    is_hidden[:, 0] = True
    labels = batch["input_ids"].masked_fill(~is_hidden, -100)
    return {**batch, "input_ids": batch["input_ids"].masked_fill(is_hidden, 3), "labels": labels}


def optimizer_of(model: torch.nn.Module) -> torch.optim.AdamW:
    """Two groups: biases and norms do not decay."""
    plain = [p for name, p in model.named_parameters() if name.endswith("bias") or "norm" in name.lower()]
    known = {id(p) for p in plain}
    decayed = [p for p in model.parameters() if id(p) not in known]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3)


def weights_of(accelerator: Any, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in state.items()}


def classifies(library: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """As scripts for GLUE do it: dropout on, shuffled and padded, metrics gathered, a model saved.

    The schedule gets the updates that the loader has before it is prepared: those of all processes.
    """
    model = BertForSequenceClassification(BertConfig(vocab_size=NUM_WORDS, max_position_embeddings=16, **SIZES))
    train = DataLoader(sentences(22), shuffle=True, collate_fn=padded, batch_size=4)
    test = DataLoader(sentences(11), collate_fn=padded, batch_size=4)
    optimizer = optimizer_of(model)
    num_epochs = 3
    num_updates = math.ceil(len(train) / accelerator.gradient_accumulation_steps) * num_epochs
    schedule = get_scheduler("linear", optimizer, 2 * accelerator.num_processes, num_updates)
    model, optimizer, train, test, schedule = accelerator.prepare(model, optimizer, train, test, schedule)
    # the loader is shorter on several processes: the number of updates is counted again
    num_updates = math.ceil(len(train) / accelerator.gradient_accumulation_steps) * num_epochs
    lrs, done, answers = [], 0, []
    for _ in range(num_epochs):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
            lrs.append(optimizer.param_groups[0]["lr"])
        model.eval()
        answers = []
        for batch in test:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            both = accelerator.gather_for_metrics((predictions, batch["labels"]))
            answers += torch.stack(both, dim=1).tolist()
    assert done == num_updates
    assert len(answers) == 11
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        folder / "model", is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.save(weights_of(accelerator, model), folder / "weights.pt")
    accelerator.wait_for_everyone()
    assert (folder / "model" / "config.json").exists()
    assert torch.load(folder / "weights.pt").keys() == weights_of(accelerator, model).keys()
    return {"weights": weights_of(accelerator, model), "lrs": lrs, "answers": answers}


def classifies_in_windows(library: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """The same with windows of three micro-batches: the epoch's last one is shorter."""
    return classifies(library, accelerator, folder)


def models_language(library: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """As scripts for causal language models do it: blocks of one length, perplexity, a resume in the middle.

    The schedule gets the updates of one process, times the number of processes.
    """
    config = GPT2Config(
        vocab_size=NUM_WORDS, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    words = torch.randint(4, NUM_WORDS, (20, 8), generator=torch.Generator().manual_seed(2))
    blocks = [{"input_ids": block, "labels": block} for block in words]

    def build() -> tuple[Any, ...]:
        library_set_seed(library, 11)
        model = GPT2LMHeadModel(config)
        optimizer = optimizer_of(model)
        train = DataLoader(blocks, shuffle=True, batch_size=2)
        num_updates = 2 * math.ceil(math.ceil(len(train) / accelerator.num_processes) / 2) - 1
        schedule = get_scheduler(
            "linear", optimizer, 2 * accelerator.num_processes, num_updates * accelerator.num_processes
        )
        return accelerator.prepare(model, optimizer, train, schedule)

    def train(model: Any, optimizer: Any, batches: Any, schedule: Any, lrs: list[float]) -> None:
        model.train()
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            lrs.append(optimizer.param_groups[0]["lr"])

    model, optimizer, loader, schedule = build()
    lrs: list[float] = []
    train(model, optimizer, loader, schedule, lrs)
    accelerator.save_state(folder / "after-one-epoch")
    accelerator.wait_for_everyone()
    accelerator.free_memory(model, optimizer, loader, schedule)
    model, optimizer, loader, schedule = build()
    accelerator.load_state(folder / "after-one-epoch")
    loader.set_epoch(1)
    skipped = accelerator.skip_first_batches(loader, 2)
    train(model, optimizer, skipped, schedule, lrs)
    test = accelerator.prepare(DataLoader(blocks, batch_size=3))
    model.eval()
    losses = []
    for batch in test:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(3)))
    losses = torch.cat(losses)
    assert len(losses) == 20
    return {"weights": weights_of(accelerator, model), "lrs": lrs, "perplexity": math.exp(losses.mean())}


def models_masked_words(library: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """As scripts for masked language models do it: the collator draws what is hidden, between the draws of dropout."""
    return masked_words(library, accelerator)


def resumes_masked_words(library: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """The same with other random numbers on each process, and once more from the middle of the first epoch."""
    importlib.import_module(f"{folder.name}.utils").set_seed(5, device_specific=True)
    plain = masked_words(library, accelerator, save_to=folder / "middle")
    if folder.name != "accelerate":  # where other batches follow
        accelerator.free_memory()
        resumed = masked_words(library, accelerator, resume_from=folder / "middle")
        assert resumed["losses"] == plain["losses"][-len(resumed["losses"]) :]
        assert all(torch.equal(resumed["weights"][name], value) for name, value in plain["weights"].items())
    return plain


def masked_words(
    library: ModuleType, accelerator: Any, save_to: Path | None = None, resume_from: Path | None = None
) -> dict[str, Any]:
    model = BertForMaskedLM(BertConfig(vocab_size=NUM_WORDS, max_position_embeddings=16, **SIZES))
    train = DataLoader(sentences(20), shuffle=True, collate_fn=masked, batch_size=3)
    optimizer = optimizer_of(model)
    num_steps = 2 * math.ceil(len(train) / accelerator.num_processes) * accelerator.num_processes
    schedule = get_scheduler("linear", optimizer, 2 * accelerator.num_processes, num_steps)
    model, optimizer, train, schedule = accelerator.prepare(model, optimizer, train, schedule)
    if resume_from is not None:
        accelerator.load_state(resume_from)
    lrs, losses = [], []
    for epoch in range(2):
        for step, batch in enumerate(train):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            lrs.append(optimizer.param_groups[0]["lr"])
            losses += accelerator.gather(loss.detach()).reshape(-1).tolist()
            if save_to is not None and (epoch, step) == (0, 1):
                accelerator.save_state(save_to)
    return {"weights": weights_of(accelerator, model), "lrs": lrs, "losses": losses}


def saves_on_the_main_process(library: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """`if accelerator.is_main_process: accelerator.save_state(…)` with hooks, as diffusers' scripts do it, resumed."""

    def train(resumes: bool) -> dict[str, torch.Tensor]:
        importlib.import_module(f"{folder.name}.utils").set_seed(6)
        model = torch.nn.Linear(3, 1)
        rows = torch.randn(24, 3, generator=torch.Generator().manual_seed(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2, shuffle=True))
        hooks = [
            accelerator.register_save_state_pre_hook(
                lambda models, weights, saved: torch.save(weights.pop(), Path(saved, "hook.pt"))
            ),
            accelerator.register_load_state_pre_hook(
                lambda models, saved: models.pop().load_state_dict(torch.load(Path(saved, "hook.pt")))
            ),
        ]
        if resumes:
            accelerator.load_state(folder / "alone")
        for epoch in range(2):
            for step, batch in enumerate(loader):
                accelerator.backward(model(batch).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
                if (epoch, step) == (0, 2) and not resumes and accelerator.is_main_process:
                    accelerator.save_state(folder / "alone")
        accelerator.wait_for_everyone()
        ended = weights_of(accelerator, model)
        accelerator.free_memory()
        for hook in hooks:
            hook.remove()
        return ended

    ended = train(resumes=False)
    if folder.name != "accelerate":  # which starts the epoch again
        resumed = train(resumes=True)
        assert all(torch.equal(resumed[name], value) for name, value in ended.items())
    return {"weights": ended}


def counts_prepared_batches(library: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """A script that multiplies nothing: with Accelerate its schedule is over early on several processes."""
    model = torch.nn.Linear(3, 1)
    rows = torch.randn(21, 3, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2, shuffle=True))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=len(loader)))
    lrs = []
    for batch in loader:
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        lrs.append(optimizer.param_groups[0]["lr"])
    return {"weights": weights_of(accelerator, model), "lrs": lrs}


def reads_streams(library: ModuleType, accelerator: Any, folder: Path) -> dict[str, Any]:
    """Which rows a process gets of an iterable dataset, and of a map-style one that the first process reads for all."""
    utils = importlib.import_module(f"{library.__name__}.utils")
    seen: dict[str, Any] = {}
    for dispatches in (None, False, True):
        for splits in (False, True):
            config = utils.DataLoaderConfiguration(dispatch_batches=dispatches, split_batches=splits)
            reader = library.Accelerator(cpu=True, dataloader_config=config)
            for num_rows in (8, 9, 11, 3):
                # of three rows nothing is left, which Accelerate cannot read
                for drops in (False, True) if num_rows > 3 else (False,):
                    for data in (Stream(num_rows), list(range(num_rows))):
                        loader = reader.prepare(DataLoader(data, batch_size=2, drop_last=drops))
                        name = f"{type(data).__name__} {num_rows} {dispatches=} {splits=} {drops=}"
                        seen[name] = [batch.tolist() for batch in loader]
    return seen


class Stream(IterableDataset[int]):
    """Numbers, one after the other."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __iter__(self) -> Iterator[int]:
        yield from range(self._num_rows)


def library_set_seed(library: ModuleType, seed: int) -> None:
    importlib.import_module(f"{library.__name__}.utils").set_seed(seed)


LOOPS = [
    classifies,
    classifies_in_windows,
    models_language,
    models_masked_words,
    resumes_masked_words,
    saves_on_the_main_process,
    counts_prepared_batches,
    reads_streams,
]
