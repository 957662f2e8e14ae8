"""Predict labels or numbers for texts, or for pairs of texts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab.data.tasks.tokenization import tokenize
from trimtab.errors import DataError, ModelError
from trimtab.inference.batches import Example, padded_batches
from trimtab.inference.load import LoadedModel
from trimtab.log import say

Text = str | Sequence[str]


@dataclass(frozen=True)
class Prediction:
    """The prediction of a classifier for one text.

    Args:
        label: The label; for a multi-label model, all labels with a score of at least 0.5.
        score: The probability of the label; for a multi-label model, the highest one of any label.
        scores: The probability of every label.
    """

    label: str | tuple[str, ...]
    score: float
    scores: dict[str, float]


def classify_texts(
    loaded: LoadedModel, texts: Sequence[Text], batch_size: int = 32, *, max_length: int | None = None
) -> list[Prediction]:
    """Classify texts, in batches of similar length.

    Args:
        loaded: A classifier.
        texts: Texts, or pairs of texts.
        batch_size: Texts per forward pass.
        max_length: Truncate texts to this number of tokens; by default as in training.

    Returns:
        One prediction per text, in the order of the texts.
    """
    if loaded.task_name != "classify":
        raise ModelError(f"this model is not a classifier: its task is {loaded.task_name}", "load a classifier")
    logits = _logits(loaded, texts, batch_size, max_length)
    config = loaded.model.config
    names = [str(config.id2label[index]) for index in range(config.num_labels)]
    several = config.problem_type == "multi_label_classification"
    scores_by_row = (logits.sigmoid() if several else logits.softmax(-1)).tolist()
    return [_prediction(names, scores, several) for scores in scores_by_row]


def regress_texts(
    loaded: LoadedModel, texts: Sequence[Text], batch_size: int = 32, *, max_length: int | None = None
) -> list[float] | list[list[float]]:
    """Predict the number or numbers of each text; the arguments are those of `classify_texts`."""
    if loaded.task_name != "regress":
        raise ModelError(
            f"this model is not a regression model: its task is {loaded.task_name}", "load a regression model"
        )
    values: list[float] | list[list[float]] = _logits(loaded, texts, batch_size, max_length).squeeze(-1).tolist()
    return values


def _prediction(names: list[str], scores: list[float], several: bool) -> Prediction:
    ranked = sorted(zip(names, scores, strict=True), key=lambda pair: -pair[1])
    label = tuple(name for name, score in ranked if score >= 0.5) if several else ranked[0][0]
    return Prediction(label, ranked[0][1], dict(zip(names, scores, strict=True)))


def _logits(loaded: LoadedModel, texts: Sequence[Text], batch_size: int, max_length: int | None) -> torch.Tensor:
    """Return the logits of every text in fp32 on the host."""
    if texts is None or isinstance(texts, str):
        found = "None" if texts is None else "a string"
        raise DataError(f"{found} was passed, expected a list of texts", "pass [text]")
    model = loaded.model
    logits = torch.zeros(len(texts), model.config.num_labels)
    examples = _tokenize(loaded, texts, max_length)
    model.eval()
    with torch.inference_mode(), loaded.errors_explained():
        for indices, batch in padded_batches(examples, batch_size, loaded.tokenizer, loaded.device):
            logits[indices] = model(**batch).logits.float().cpu()
    return logits


def _tokenize(loaded: LoadedModel, texts: Sequence[Text], max_length: int | None) -> list[Example]:
    """Tokenize as in training: with token types for pairs if the model has embeddings for them."""
    limit = max_length or loaded.max_length
    parts = [tuple(text) if isinstance(text, list | tuple) else (text,) for text in texts]
    for index, (text, found) in enumerate(zip(texts, parts, strict=True), 1):
        if len(found) not in (1, 2) or not all(isinstance(part, str) for part in found):
            raise DataError(f"text {index} is {text!r}", "pass texts, or pairs of texts")
        if len(found) != len(parts[0]):
            raise DataError(f"text {index} is {text!r}, unlike the first", "pass texts or pairs, not both")
    firsts, *seconds = zip(*parts, strict=True) if parts else ((),)
    tokenized = tokenize(loaded.tokenizer, firsts, seconds[0] if seconds else None, max_length=limit)
    empty = next((index for index, tokens in enumerate(tokenized.input_ids, 1) if not tokens), None)
    if empty is not None:
        raise DataError(f"text {empty} is empty", "remove empty texts")
    if tokenized.num_truncated:
        say(f"{tokenized.num_truncated:,} of {len(texts):,} texts are longer than {limit} tokens and were truncated")
    fields: dict[str, Sequence[Sequence[int]]] = {"input_ids": tokenized.input_ids}
    if tokenized.token_type_ids is not None and (getattr(loaded.model.config, "type_vocab_size", None) or 0) > 1:
        fields["token_type_ids"] = tokenized.token_type_ids
    return [dict(zip(fields, row, strict=True)) for row in zip(*fields.values(), strict=True)]
