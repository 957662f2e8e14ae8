"""What every task offers: columns to tokens, tokens to batches, the head a model needs, and metrics.

A task is built once from the training rows (`build.build_task`), bound to a tokenizer, and then encodes rows and
collates batches. The rest of the program knows tasks by this protocol alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from trimtab.data.bad_rows import BadRows
from trimtab.data.metrics import Metrics
from trimtab.data.rows import Rows
from trimtab.data.tokens import TokenDataset

Columns = dict[str, str | list[str]]
Batch = dict[str, Tensor]
# What is wrong with a row and what mends it, or None where nothing is wrong.
Problem = tuple[str, str] | None


class Task(Protocol):
    """One kind of training, as a small object.

    Attributes:
        name: The word for it in a recipe.
        model_kind: "sequence-classification", "causal-lm", "seq2seq-lm" or "masked-lm".
        loss_kind: "cross-entropy", "binary-cross-entropy", "mse" or "token-cross-entropy".
        shifts_labels: Whether position t of the model answers for the label at t + 1.
        columns: The columns used, by their role.
        default_metric: The metric by which the best model is chosen unless the user names one.
        said: Lines for the user about what was guessed.
    """

    name: str
    model_kind: str
    loss_kind: str
    shifts_labels: bool
    columns: Columns
    default_metric: str
    said: list[str]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything of the task that decides what `encode` gives; part of the key under which tokens are cached."""
        ...

    def head(self) -> dict[str, Any]:
        """What the model's config needs to know: number and names of labels, kind of problem."""
        ...

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Take from the tokenizer, and from the model's config once there is one, what `collate` needs.

        `encode` does it too; where its result comes from a cache, this has to be called before `collate`.
        """
        ...

    def usable(self, rows: Rows) -> Rows:
        """The rows without those that cannot be used.

        Raises:
            DataError: At the first such row, where bad rows are not to be skipped.
        """
        ...

    def encode(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Rows to tokens, none longer than `max_length`."""
        ...

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Examples to one padded batch."""
        ...

    def metrics(self, names: Sequence[str] | None = None) -> Metrics:
        """Fresh sums for the metrics named, or for the usual ones."""
        ...

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """An example decoded, special tokens included."""
        ...


def without_bad_rows(rows: Rows, problem_of: Callable[[int], Problem], on_bad_rows: str) -> Rows:
    """The rows for which `problem_of` finds nothing; the others stop the run, or are counted and said.

    Raises:
        DataError: At the first bad row where they stop the run, or if no row is left.
    """
    bad = BadRows(on_bad_rows)
    kept: list[int] = []
    for index in range(len(rows)):
        problem = problem_of(index)
        if problem is None:
            kept.append(index)
        else:
            bad.add(rows.place(index), *problem)
    bad.report(rows.origin)
    return rows if len(kept) == len(rows) else rows.select(kept)
