"""Masked language modelling: what is hidden depends on seed, epoch and row alone, in the shares that are promised."""

from types import SimpleNamespace

import pytest
import torch
from task_tokenizers import make_rows
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from trimtab.data.tasks.build import build_task
from trimtab.data.tasks.masked_lm import uniform
from trimtab.errors import ModelError

ROWS = make_rows(
    text=["one two three four five six seven eight nine ten " * 4, "a good film", "a bad film and a dull plot"] * 40
)


@pytest.fixture(scope="module")
def encoded(bert):
    task = build_task("masked-lm", ROWS)
    return task, task.encode(ROWS, bert, 16)


def test_long_texts_become_several_examples(bert, encoded):
    _, dataset = encoded
    texts = [bert.decode(dataset[i]["input_ids"][1:-1]) for i in range(3)]
    assert " ".join(texts) == ROWS.columns["text"][0].strip()
    assert max(dataset.lengths) == 16
    for i in range(len(dataset)):
        ids = dataset[i]["input_ids"].tolist()
        assert (ids[0], ids[-1]) == (bert.cls_token_id, bert.sep_token_id)
    assert dataset.num_truncated == 0


def test_a_slow_tokenizer_gives_the_same_examples(bert, encoded, tmp_path):
    """It keeps only the beginning of a text that it is told to cut."""
    words = sorted(bert.get_vocab(), key=bert.get_vocab().get)
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    slow = BertTokenizerLegacy(tmp_path / "vocab.txt", do_lower_case=False)
    assert not slow.is_fast
    rows = make_rows(text=[*ROWS.columns["text"][:5], "one " * 14, "one " * 15, "one " * 28, " . "])
    task = build_task("masked-lm", rows)
    found, expected = task.encode(rows, slow, 16), task.encode(rows, bert, 16)
    assert [found[i]["input_ids"].tolist() for i in range(len(found))] == [
        expected[i]["input_ids"].tolist() for i in range(len(expected))
    ]
    assert max(found.lengths) == 16
    assert found.num_truncated == 0


def test_a_decoder_reads_the_original_tokens_shifted(bert, encoded):
    """As in the pretraining of BART; MBart's starts with the last token of the row."""
    task, dataset = build_task("masked-lm", ROWS), encoded[1]
    examples = [dataset[i] for i in (0, 3)]
    ids = [example["input_ids"].tolist() for example in examples]
    for config, starts in (
        (SimpleNamespace(is_encoder_decoder=True, decoder_start_token_id=7), [7, 7]),
        (SimpleNamespace(is_encoder_decoder=True, model_type="mbart"), [row[-1] for row in ids]),
    ):
        task.bind(bert, config)
        task.bind(bert)  # as `encode` does: what the config said stays
        batch = task.collate(examples)
        for row, start, found in zip(ids, starts, batch["decoder_input_ids"].tolist(), strict=True):
            assert found[: len(row)] == [start, *row[:-1]]
    task.bind(bert, SimpleNamespace(is_encoder_decoder=False))
    assert "decoder_input_ids" not in task.collate(examples)


def test_a_row_is_masked_alike_in_every_batch(encoded):
    task, dataset = encoded
    everything = task.collate([dataset[i] for i in range(10)], epoch=3)
    for row in range(10):
        alone = task.collate([dataset[row]], epoch=3)
        length = dataset.lengths[row]
        for field in ("input_ids", "labels"):
            assert torch.equal(everything[field][row, :length], alone[field][0]), (row, field)
    assert (everything["labels"][everything["attention_mask"] == 0] == -100).all()


def test_masks_follow_seed_and_epoch_and_nothing_else(bert, encoded):
    task, dataset = encoded
    examples = [dataset[i] for i in range(20)]
    first = task.collate(examples, epoch=1)["labels"]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(task.collate(examples, epoch=1)["labels"], first)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(task.collate(examples, epoch=2)["labels"], first)
    other = build_task("masked-lm", ROWS, seed=1)
    other.bind(bert)
    assert not torch.equal(other.collate(examples, epoch=1)["labels"], first)
    assert other.settings == task.settings  # tokens are the same, so they may come from one cache


def test_shares(bert, encoded):
    """Over 40 epochs: 15% are chosen; of these 80% hidden, 10% replaced, 10% left, each within four deviations."""
    task, dataset = encoded
    examples = [dataset[i] for i in range(len(dataset))]
    plain = torch.cat([example["input_ids"].long() for example in examples])
    special = torch.isin(plain, torch.tensor(bert.all_special_ids))
    counts = torch.zeros(4)
    for epoch in range(40):
        batch = task.collate(examples, epoch=epoch)
        real = batch["attention_mask"] == 1
        ids, labels = batch["input_ids"][real], batch["labels"][real]
        chosen = labels != -100
        assert not (chosen & special).any()
        assert torch.equal(labels[chosen], plain[chosen])
        assert torch.equal(ids[~chosen], plain[~chosen])
        hidden = ids[chosen] == bert.mask_token_id
        replaced = ~hidden & (ids[chosen] != labels[chosen])
        assert not torch.isin(ids[chosen][replaced], torch.tensor(bert.all_special_ids)).any()
        counts += torch.tensor([int(chosen.sum()), int(hidden.sum()), int(replaced.sum()), int((~special).sum())])
    num_chosen, num_hidden, num_replaced, num_tokens = counts.tolist()
    # A replacement may be the token itself, which then looks as if it was left.
    num_words = len(bert) - len(bert.all_special_ids)
    for count, total, share in (
        (num_chosen, num_tokens, 0.15),
        (num_hidden, num_chosen, 0.8),
        (num_replaced, num_chosen, 0.1 * (1 - 1 / num_words)),
    ):
        assert abs(count / total - share) < 4 * (share * (1 - share) / total) ** 0.5


def test_random_numbers_are_even_and_unrelated():
    rows, positions = torch.arange(200), torch.arange(256)
    draws = torch.stack([uniform(7, epoch, rows, positions, draw).flatten() for epoch in range(2) for draw in range(2)])
    num_values = draws.shape[1]
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = (draws * 16).long().flatten().bincount(minlength=16)
    expected = draws.numel() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # chi-squared, 15 degrees of freedom, 1 in 1,000
    correlations = torch.corrcoef(draws) - torch.eye(4)
    assert correlations.abs().max() < 4 / num_values**0.5
    neighbours = torch.corrcoef(torch.stack([draws[0, :-1], draws[0, 1:]]))[0, 1]
    assert abs(neighbours) < 4 / num_values**0.5


def test_a_tokenizer_without_a_mask(gpt):
    with pytest.raises(ModelError, match="no mask token"):
        build_task("masked-lm", ROWS).encode(ROWS, gpt, 16)
