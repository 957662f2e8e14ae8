"""Loaders for the training and evaluation batches of a recipe."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset

from trimtab.build.parts import Tokens
from trimtab.data.batching import Batching, LengthGroupedBatches
from trimtab.data.packing import PackedCollate, RoundedCollate
from trimtab.data.tasks.base import Task
from trimtab.data.tokens import TokenDataset
from trimtab.recipe.schema import Recipe
from trimtab.runs.plan import Plan


def train_batches(
    recipe: Recipe, tokens: Tokens, micro_batch_size: int, batching: Batching, num_processes: int = 1
) -> LengthGroupedBatches:
    """The sampler of training batches.

    Args:
        recipe: The recipe.
        tokens: Its rows.
        micro_batch_size: Rows of a micro-batch over all processes, each as long as the longest; if batches are divided
            by tokens, a micro-batch has that many tokens.
        batching: How rows are batched.
        num_processes: Number of processes that share a batch.
    """
    limit, tokens_per_row, rows = recipe.limits.train, None, recipe.memory.micro_batch
    if batching.is_packed:
        tokens_per_row = _tokens_per_row(recipe, tokens, math.ceil(micro_batch_size / num_processes))
    num_batches = math.ceil(len(tokens.train) / recipe.train.batch_size)
    return LengthGroupedBatches(
        tokens.train.lengths,
        recipe.train.batch_size,
        micro_batch_size,
        seed=recipe.seed,
        group_by_length=recipe.train.group_by_length,
        shuffle=not recipe.limits.overfit_batches,
        limit_batches=recipe.limits.overfit_batches or limited(limit, num_batches),
        tokens_per_row=tokens_per_row,
        max_rows=None if rows == "auto" else int(rows),
        num_processes=num_processes,
        batching=batching,
    )


def _tokens_per_row(recipe: Recipe, tokens: Tokens, micro_batch_size: int) -> float | None:
    """Tokens that count as one row of a process if packed batches are divided by tokens; None if divided by rows.

    They are fewer than twice the longest row, because a micro-batch size of 1 must be the smallest possible.
    """
    memory, longest = recipe.memory, max(tokens.train.lengths)
    if memory.micro_batch_tokens == "auto":
        return longest if memory.micro_batch == "auto" else None
    is_reached = int(memory.micro_batch_tokens) // longest <= micro_batch_size  # not before a limit of rows
    return int(memory.micro_batch_tokens) / micro_batch_size if is_reached else longest


def micro_batch_asked(recipe: Recipe, longest: int) -> int | None:
    """Rows of a micro-batch set in a recipe, each as long as the longest; None if the planner chooses."""
    rows, num_tokens = recipe.memory.micro_batch, recipe.memory.micro_batch_tokens
    limits = [] if rows == "auto" else [int(rows)]
    if num_tokens != "auto":
        limits.append(max(1, int(num_tokens) // longest))
    return min(limits, default=None)


def limited(limit: int | float | None, num_batches: int) -> int | None:
    """A limit in Lightning's notation: a whole number of batches, or a share of them."""
    if limit is None:
        return None
    return max(1, round(limit * num_batches)) if isinstance(limit, float) else limit


def fast_steps(recipe: Recipe) -> int:
    """The steps of a fast_dev_run."""
    wanted = recipe.limits.fast_dev_run
    return 3 if wanted is True else int(wanted)


def make_collate(
    task: Task, collate: Callable[..., Any], batching: Batching, batches: LengthGroupedBatches | None = None
) -> Callable[..., Any]:
    """The function that collates rows into a batch; if `batches` is given, into one of its sizes."""
    marks = batching.marks_equal_rows
    if not batching.has_few_sizes or batches is None:
        packed = PackedCollate(collate, task.shifts_labels, task.pad_id, marks_equal_rows=marks)
        return packed if batching.is_packed else collate

    def find_sizes() -> Sequence[int]:
        return batches.sizes

    if not batching.is_packed:
        return RoundedCollate(collate, task.pad_id, find_sizes)
    longest, num_starts = int(batches.lengths.max()), batches.batch_size + 2
    return PackedCollate(
        collate,
        task.shifts_labels,
        task.pad_id,
        find_sizes,
        max_length=longest,
        num_starts=num_starts,
        marks_equal_rows=marks,
    )


class EpochCollate:
    """Collate a micro-batch in the epoch of its sampler: masking depends only on (seed, epoch, row)."""

    def __init__(self, task: Task, batches: LengthGroupedBatches) -> None:
        self._task = task
        self._batches = batches

    def __call__(self, examples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return rows as one batch."""
        batch: dict[str, torch.Tensor] = self._task.collate(examples, epoch=self._batches.epoch)
        return batch


def make_loader(
    rows: TokenDataset | Subset[Any], batches: LengthGroupedBatches, collate: Callable[..., Any]
) -> DataLoader[Any]:
    """A loader of batches."""
    # No worker processes: collating flat tokens is cheaper than receiving the batch of a worker over a socket.
    return DataLoader(rows, batch_sampler=batches, collate_fn=collate)


def _eval_batch_size(recipe: Recipe, micro_batch: int) -> int:
    return recipe.evaluate.batch_size or max(micro_batch, 8)


def num_scored_rows(recipe: Recipe, num_rows: int, micro_batch: int) -> int:
    """The number of held-out rows that an evaluation scores, which `limits.eval` reduces."""
    batch_size = _eval_batch_size(recipe, micro_batch)
    limit = 3 if recipe.limits.fast_dev_run else limited(recipe.limits.eval, math.ceil(num_rows / batch_size))
    return num_rows if limit is None else min(num_rows, limit * batch_size)


def eval_loader(recipe: Recipe, collate: Callable[..., Any], tokens: TokenDataset, plan: Plan) -> DataLoader[Any]:
    """A loader of evaluation rows, longest first; with `limits.eval`, of rows sampled with the seed.

    Rows are always collated as in epoch 0, so all evaluations of a run mask the same tokens.
    """
    batch_size = _eval_batch_size(recipe, plan.global_micro_batch)
    lengths, rows = tokens.lengths, list(range(len(tokens)))
    num_rows = num_scored_rows(recipe, len(tokens), plan.global_micro_batch)
    if num_rows < len(tokens):
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(recipe.seed))
        rows = sorted(order[:num_rows].tolist())
    batches = LengthGroupedBatches(
        [lengths[row] for row in rows], batch_size, batch_size, seed=recipe.seed, shuffle=False
    )
    return make_loader(Subset(tokens, rows), batches, collate)
