"""What is known about a task's data, as plain values: made by `show`, drawn by `show_drawing`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ShownToken:
    """One token. `target` is what the model has to say here, where that is not the token itself."""

    text: str
    id: int
    is_special: bool
    carries_loss: bool
    target: str | None = None


@dataclass(frozen=True)
class ShownExample:
    """One example as it goes into the model; `target` is the sequence that an encoder-decoder has to write."""

    place: str | None
    tokens: tuple[ShownToken, ...]
    target: tuple[ShownToken, ...]
    text: str
    label: str | None


@dataclass(frozen=True)
class SetFacts:
    """Sizes of one set. `num_loss_tokens` is None where the loss is not on tokens, or drawn anew in every epoch."""

    num_rows: int
    num_examples: int
    num_truncated: int
    num_tokens: int
    num_loss_tokens: int | None
    shortest: int
    median: int
    p95: int
    longest: int


@dataclass(frozen=True)
class LengthBin:
    """How many training examples have `first` to `last` tokens."""

    first: int
    last: int
    num_examples: int


@dataclass(frozen=True)
class LabelCount:
    """How often a label stands in each set."""

    name: str
    num_train: int
    num_eval: int


@dataclass(frozen=True)
class SharedText:
    """A text that stands in both sets."""

    text: str
    train_place: str
    eval_place: str


@dataclass(frozen=True)
class DataReport:
    """Everything that `trimtab data show` tells."""

    task: str
    columns: dict[str, str | list[str]]
    said: tuple[str, ...]
    examples: tuple[ShownExample, ...]
    special_tokens: str
    num_texts_with_special_tokens: int
    first_text_with_special_tokens: str | None
    train: SetFacts
    eval: SetFacts | None
    histogram: tuple[LengthBin, ...]
    labels: tuple[LabelCount, ...]
    num_shared_texts: int
    num_shared_eval_rows: int
    shared_texts: tuple[SharedText, ...]
