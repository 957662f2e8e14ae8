"""The engine against the loop that one would write by hand: after training, every weight has the same bits."""

import contextlib
import itertools

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

from trimtab import Engine

LEARNING_RATE = 2e-3
MAX_NORM = 0.5
DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def build_bert():
    """A classifier of two layers, with BERT's own dropout of 0.1 everywhere."""
    torch.manual_seed(11)
    config = BertConfig(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        num_labels=3,
    )
    return BertForSequenceClassification(config).train()


def padded(rows):
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    for row, (ids, _) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids > 0).long(),
        "labels": torch.tensor([label for _, label in rows]),
    }


def build_parts(num_batches, num_steps):
    """A model, a shuffling loader of `num_batches` batches (the last one shorter), AdamW and a linear schedule."""
    lengths, ids = itertools.cycle((3, 7, 5, 9)), itertools.cycle(range(1, 60))
    rows = [([next(ids) for _ in range(next(lengths))], index % 3) for index in range(4 * num_batches - 1)]
    model = build_bert()
    loader = DataLoader(rows, batch_size=4, shuffle=True, collate_fn=padded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=num_steps // 10, num_training_steps=num_steps
    )
    return model, loader, optimizer, schedule


class Record:
    """What a loop leaves behind: losses, gradient norms and learning rates as they came, and the state at the end."""

    def __init__(self):
        self.losses, self.norms, self.rates = [], [], []
        self.num_skipped = 0

    def finish(self, model, optimizer):
        self.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        self.moments = [state["exp_avg_sq"].clone() for state in optimizer.state_dict()["state"].values()]
        self.random = torch.get_rng_state()
        return self


def by_hand(num_epochs, num_batches, window=1, precision="no", loss_factor=1.0):
    """Plain PyTorch. A window's losses are divided by its length: `window`, or what is left at the epoch's end."""
    num_windows = -(-num_batches // window)
    model, loader, optimizer, schedule = build_parts(num_batches, num_epochs * num_windows)
    dtype, record = DTYPES[precision], Record()
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    torch.manual_seed(5)
    for _ in range(num_epochs):
        for index, batch in enumerate(loader):
            first_of_window = index - index % window
            length = min(window, num_batches - first_of_window)
            with contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
                loss = model(**batch).loss
            loss = loss.float() * loss_factor
            record.losses.append(loss.item())
            scaler.scale(loss / length if length > 1 else loss).backward()
            if index != first_of_window + length - 1:
                continue
            scaler.unscale_(optimizer)
            record.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < scale:
                record.num_skipped += 1
            else:
                schedule.step()
            record.rates.append(schedule.get_last_lr()[0])
            optimizer.zero_grad()
    return record.finish(model, optimizer)


def by_engine(num_epochs, num_batches, window=1, precision="no", loss_factor=1.0):
    """The same with the engine, in the form that its users write."""
    model, loader, optimizer, schedule = build_parts(num_batches, num_epochs * -(-num_batches // window))
    record = Record()
    engine = Engine(mixed_precision=precision, gradient_accumulation_steps=window, cpu=True)
    model, optimizer, loader, schedule = engine.prepare(model, optimizer, loader, schedule)
    torch.manual_seed(5)
    for _ in range(num_epochs):
        for batch in loader:
            with engine.accumulate(model):
                loss = model(**batch).loss * loss_factor
                record.losses.append(loss.item())
                engine.backward(loss)
                norm = engine.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                if engine.sync_gradients:
                    record.norms.append(norm.item())
                    record.rates.append(schedule.get_last_lr()[0])
    record.num_skipped = engine.num_skipped_steps
    return record.finish(model, optimizer)


def assert_same_bits(engine, hand):
    torch.testing.assert_close(engine.losses, hand.losses, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(engine.norms, hand.norms, rtol=0, atol=0, equal_nan=True)  # NaN where fp16 overflowed
    assert engine.rates == hand.rates
    assert engine.num_skipped == hand.num_skipped
    assert engine.weights.keys() == hand.weights.keys()
    different = [name for name, value in hand.weights.items() if not torch.equal(value, engine.weights[name])]
    assert different == []
    assert len(engine.moments) == len(hand.moments) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(engine.moments, hand.moments, strict=True))
    assert torch.equal(engine.random, hand.random)  # not one random number more or fewer was drawn


def num_weights_moved(record):
    start = build_bert().state_dict()
    return sum(not torch.equal(start[name], value) for name, value in record.weights.items())


def test_the_model_drops_and_the_loader_shuffles():
    """What the comparisons below rest on: without these they would compare too little."""
    model, loader, _, _ = build_parts(num_batches=3, num_steps=1)
    batch = padded(loader.dataset[:4])
    assert not torch.equal(model(**batch).logits, model(**batch).logits)
    assert [b["labels"].tolist() for b in loader] != [b["labels"].tolist() for b in loader]


def test_fifty_steps_in_fp32():
    hand, engine = by_hand(num_epochs=5, num_batches=10), by_engine(num_epochs=5, num_batches=10)
    assert_same_bits(engine, hand)
    assert len(engine.norms) == 50
    assert max(engine.norms) > MAX_NORM  # clipping did something
    assert (max(engine.rates), engine.rates[-1]) == (LEARNING_RATE, 0.0)
    assert num_weights_moved(engine) == len(engine.weights)


@pytest.mark.parametrize(("num_batches", "num_windows"), [(11, 3), (9, 3), (8, 2), (3, 1)])
def test_windows_of_four_micro_batches_and_a_shorter_last_one(num_batches, num_windows):
    hand = by_hand(num_epochs=3, num_batches=num_batches, window=4)
    engine = by_engine(num_epochs=3, num_batches=num_batches, window=4)
    assert_same_bits(engine, hand)
    assert len(engine.norms) == 3 * num_windows
    assert num_weights_moved(engine) > 0


def test_dividing_the_last_window_by_the_full_length_is_something_else():
    """The comparison above can fail: a window of 3 divided by 4 has a norm that is a quarter smaller."""
    hand = by_hand(num_epochs=1, num_batches=3, window=4)
    wrong = by_hand(num_epochs=1, num_batches=3, window=4, loss_factor=0.75)
    assert wrong.norms[0] == pytest.approx(0.75 * hand.norms[0])
    with pytest.raises(AssertionError):
        assert_same_bits(wrong, hand)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("window", [1, 2])
def test_five_steps_in_half_precision(window, precision):
    settings = {"num_epochs": 1, "num_batches": 5 * window, "window": window}
    hand, engine = by_hand(**settings, precision=precision), by_engine(**settings, precision=precision)
    assert_same_bits(engine, hand)
    assert len(engine.norms) == 5
    assert engine.losses != by_hand(**settings).losses  # the forward did not run in fp32


def test_fp16_skips_the_steps_that_overflow_and_no_other():
    settings = {"num_epochs": 1, "num_batches": 8, "precision": "fp16", "loss_factor": 2.0**4}
    hand, engine = by_hand(**settings), by_engine(**settings)
    assert_same_bits(engine, hand)
    assert 0 < engine.num_skipped < 8
    assert num_weights_moved(engine) > 0
