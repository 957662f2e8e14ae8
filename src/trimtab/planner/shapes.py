"""The shapes of the batches for which a step is predicted: from the rows of a run, or from a length alone."""

import math
import sys
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from trimtab.build.batches import train_batches
from trimtab.build.parts import Tokens
from trimtab.data.batching import Batching, LengthGroupedBatches
from trimtab.data.tokens import TokenDataset
from trimtab.errors import RecipeError
from trimtab.recipe.schema import Recipe

_NUM_WINDOWS_SEEN = 200  # batches of an epoch, for mean lengths and numbers of shapes


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch.

    Attributes:
        rows: The number of rows.
        length: Tokens of each row, including padding.
        is_padded: Whether some tokens are padding: attention then gets a mask.
        target_length: Tokens to generate, for models with an encoder and a decoder.
        num_labels: Labels of each row, if it has several.
        is_packed: Whether the rows are one sequence without padding.
        max_tokens: The maximum number of tokens in a packed batch; None means `rows` times `length`.
        max_rows: The maximum number of rows in a packed batch, which may be shorter than `length`; None means `rows`.
        marks_equal_rows: Whether all rows of a packed batch have `length` tokens, and the batch is marked accordingly.
    """

    rows: int
    length: int
    is_padded: bool = False
    target_length: int | None = None
    num_labels: int = 1
    is_packed: bool = False
    max_tokens: int | None = None
    max_rows: int | None = None
    marks_equal_rows: bool = False

    @property
    def packed_tokens(self) -> int:
        """Tokens of a packed batch."""
        return min(self.rows * self.length, self.max_tokens or sys.maxsize)


class StepTask(Protocol):
    """The attributes of `trimtab.data.tasks.base.Task` that a trace depends on."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def model_kind(self) -> str: ...  # noqa: D102

    @property
    def loss_kind(self) -> str: ...  # noqa: D102

    @property
    def shifts_labels(self) -> bool: ...  # noqa: D102

    def head(self) -> dict[str, Any]:
        """Settings for the model's config."""
        ...


@dataclass(frozen=True)
class NamedTask:
    """A task of which only the name is known, because no data is read."""

    name: str
    model_kind: str
    loss_kind: str
    shifts_labels: bool = False
    num_labels: int | None = None

    def head(self) -> dict[str, Any]:
        """Return the number of labels, if there are any."""
        return {} if self.num_labels is None else {"num_labels": self.num_labels}


_NAMED = {
    "classify": NamedTask("classify", "sequence-classification", "cross-entropy", num_labels=2),
    "regress": NamedTask("regress", "sequence-classification", "mse", num_labels=1),
    "causal-lm": NamedTask("causal-lm", "causal-lm", "token-cross-entropy", shifts_labels=True),
    "chat": NamedTask("chat", "causal-lm", "token-cross-entropy", shifts_labels=True),
    "seq2seq": NamedTask("seq2seq", "seq2seq-lm", "token-cross-entropy"),
    "masked-lm": NamedTask("masked-lm", "masked-lm", "token-cross-entropy"),
}


def named_task(recipe: Recipe) -> NamedTask:
    """The task that a recipe names.

    Raises:
        RecipeError: The recipe names no task, and without data none can be guessed.
    """
    if recipe.task is None:
        raise RecipeError(
            "task is not set, and with --length no data is read to detect it",
            f"--task {next(iter(_NAMED))} (or {', '.join([*_NAMED][1:])}); or leave out --length",
        )
    return _NAMED[recipe.task]


class Lengths(Protocol):
    """The lengths of the rows of a run."""

    @property
    def num_rows(self) -> int | None:
        """The number of rows; None if no data was read."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        ...

    def shape(self, rows: int, batching: Batching) -> BatchShape:
        """The largest micro-batch of `rows` rows."""
        ...

    def eval_shape(self, rows: int, batching: Batching) -> BatchShape | None:
        """The largest evaluation batch of `rows` rows; None if no rows are held out."""
        ...

    def mean_share(self, rows: int, batching: Batching) -> float:
        """Mean number of tokens of a micro-batch, including padding, as a share of the largest one."""
        ...

    def num_shapes(self, rows: int, batching: Batching) -> int:
        """The number of distinct shapes of micro-batches of `rows` rows."""
        ...

    def tokens(self, batch_size: int) -> float:
        """Tokens of an optimizer step, without padding."""
        ...


@dataclass(frozen=True)
class OneLength:
    """Rows that all have the same length, so nothing is padded."""

    longest: int
    has_targets: bool = False
    num_rows: int | None = None

    def shape(self, rows: int, batching: Batching) -> BatchShape:  # noqa: D102
        target_length = self.longest if self.has_targets else None
        packing = {"is_packed": batching.is_packed, "marks_equal_rows": batching.marks_equal_rows}
        return BatchShape(rows, self.longest, target_length=target_length, **packing)

    def eval_shape(self, rows: int, batching: Batching) -> BatchShape | None:  # noqa: D102
        return self.shape(rows, batching)

    def mean_share(self, rows: int, batching: Batching) -> float:  # noqa: D102
        return 1.0

    def num_shapes(self, rows: int, batching: Batching) -> int:  # noqa: D102
        return 1

    def tokens(self, batch_size: int) -> float:  # noqa: D102
        return float(batch_size * self.longest)


class LengthsOfData:
    """The lengths of the rows that were read, in the micro-batches of training."""

    def __init__(self, recipe: Recipe, tokens: Tokens, task: StepTask, num_processes: int = 1) -> None:
        self._recipe, self._tokens, self._num_processes = recipe, tokens, num_processes
        self._lengths = torch.tensor(tokens.train.lengths)
        self._shapes: dict[tuple[int, Batching], list[tuple[int, int]]] = {}
        self.num_rows: int | None = len(tokens.train)
        self.longest = int(self._lengths.max())
        self._has_targets = task.model_kind == "seq2seq-lm"
        self._num_labels = int(task.head().get("num_labels") or 1)

    def shape(self, rows: int, batching: Batching) -> BatchShape:
        """The shape with the longest row; padded if any micro-batch may be."""
        if not batching.is_packed:
            return self._largest(self._tokens.train, rows)
        batches = self._batches(rows, batching)
        if batches.max_tokens is None:
            return self._packed(self._tokens.train, rows, batching)
        most_rows = min(batches.max_rows or batches.batch_size, batches.batch_size, len(self._lengths))
        shape = self._packed(self._tokens.train, most_rows, batching)
        shape = replace(shape, rows=math.ceil(batches.max_tokens / self.longest), max_tokens=batches.max_tokens)
        return shape if batches.max_tokens % self.longest == 0 else replace(shape, marks_equal_rows=False)

    def eval_shape(self, rows: int, batching: Batching) -> BatchShape | None:
        """The shape for the held-out rows; with `limits.overfit_batches`, for the training rows."""
        held_out = self._tokens.train if self._recipe.limits.overfit_batches else self._tokens.eval
        if held_out is None or not len(held_out):
            return None
        rows = min(rows, len(held_out))
        return self._packed(held_out, rows, batching) if batching.is_packed else self._largest(held_out, rows)

    def _largest(self, tokens: TokenDataset, rows: int) -> BatchShape:
        longest = max(tokens.lengths)
        is_padded = rows > 1 and any(length != longest for length in tokens.lengths)
        at = tokens.offsets.get("labels") if self._has_targets else None
        target = max(end - start for start, end in zip(at, at[1:], strict=False)) if at else None
        return BatchShape(rows, longest, is_padded, target, self._num_labels)

    def _packed(self, tokens: TokenDataset, rows: int, batching: Batching) -> BatchShape:
        """The longest rows of a dataset as one sequence."""
        longest = sorted(tokens.lengths, reverse=True)[:rows]
        return BatchShape(
            rows,
            longest[0],
            num_labels=self._num_labels,
            is_packed=True,
            max_tokens=sum(longest),
            max_rows=rows,
            marks_equal_rows=batching.marks_equal_rows and min(tokens.lengths) == longest[0],
        )

    def mean_share(self, rows: int, batching: Batching) -> float:
        """Estimate it from the first batches of the first epoch."""
        shapes = self._shapes_seen(rows, batching)
        num_windows = min(_NUM_WINDOWS_SEEN, self._num_windows)
        per_step = math.ceil(min(self._recipe.train.batch_size, len(self._lengths)) / (rows * self._num_processes))
        largest = self.shape(rows, batching).packed_tokens if batching.is_packed else rows * self.longest
        largest_step = per_step * self._num_processes * largest
        return sum(count * length for count, length in shapes) / max(1, num_windows * largest_step)

    def num_shapes(self, rows: int, batching: Batching) -> int:
        """Count the shapes of the first batches of the first epoch."""
        return len(set(self._shapes_seen(rows, batching)))

    def tokens(self, batch_size: int) -> float:
        """Compute it from the mean length of all rows."""
        return float(self._lengths.double().mean()) * min(batch_size, len(self._lengths))

    def _shapes_seen(self, rows: int, batching: Batching) -> list[tuple[int, int]]:
        """Pairs (rows, longest row) of micro-batches over all processes; (1, tokens) for packed ones."""
        if (rows, batching) not in self._shapes:
            windows = self._batches(rows, batching).windows()
            self._num_windows = len(windows)
            micro_batches = (micro for window in windows[:_NUM_WINDOWS_SEEN] for micro in window if micro)
            self._shapes[rows, batching] = [self._shape_of(micro, batching) for micro in micro_batches]
        return self._shapes[rows, batching]

    def _shape_of(self, rows: list[int], batching: Batching) -> tuple[int, int]:
        lengths = self._lengths[rows]
        return (1, int(lengths.sum())) if batching.is_packed else (len(rows), int(lengths.max()))

    def _batches(self, rows: int, batching: Batching) -> LengthGroupedBatches:
        return train_batches(self._recipe, self._tokens, rows * self._num_processes, batching, self._num_processes)

    _num_windows = 0  # in an epoch; does not depend on the micro-batch size
