"""The outputs of a teacher for all training rows, computed once and stored on disk.

They are in the token cache: one safetensors file whose name is a digest of everything that changes the outputs (rows,
tokenizer, settings, weights of the teacher). Only items with a label are stored.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trimtab.build.parts import Data, Tokens
from trimtab.data.tasks.base import Task
from trimtab.data.tokens import TokenDataset, cached
from trimtab.engine.placement import to_device
from trimtab.errors import RecipeError
from trimtab.hardware.memory import free_memory
from trimtab.log import say
from trimtab.model.distillation import PROBABILITIES, TOKENS, DistillTerms, run_teacher, soft_targets
from trimtab.model.forward import IGNORED, Batch
from trimtab.model.losses import next_tokens
from trimtab.training.work_progress import tracked
from trimtab.units import format_bytes

_BATCH_SIZE = 16
Collate = Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]]


class TeacherOutputs:
    """Outputs of a teacher by row, which are added to batches.

    Args:
        outputs: The outputs of each row, flat.
        width: Number of values per item.
        task: The task of the rows.
    """

    def __init__(self, outputs: TokenDataset, width: int, task: Task) -> None:
        self._outputs, self._width, self._task = outputs, width, task

    def added_to(self, collate: Collate) -> Collate:
        """Return a function that makes batches with `collate` and adds the outputs of the teacher."""

        def collate_with_outputs(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            rows = [self._outputs[int(example["row"])] for example in examples]
            batch = collate(examples)
            for name, width in ((PROBABILITIES, self._width), (TOKENS, self._width - 1)):
                if name in rows[0]:
                    items = torch.cat([row[name] for row in rows]).view(-1, width)
                    batch[name] = self._placed(items, batch)
            return batch

        return collate_with_outputs

    def _placed(self, items: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Put items at the positions of their labels; values elsewhere are not used."""
        if self._task.loss_kind != "token-cross-entropy":
            return items
        is_item = labelled(batch["labels"], self._task.shifts_labels)
        placed = items.new_zeros((*is_item.shape, items.shape[-1]))
        placed[is_item] = items
        return placed


def labelled(labels: torch.Tensor, shifts_labels: bool) -> torch.Tensor:
    """The positions at which logits are compared with a label."""
    return (next_tokens(labels) if shifts_labels else labels) != IGNORED


def build_outputs(
    teacher: torch.nn.Module,
    student: torch.nn.Module,
    device: torch.device,
    data: Data,
    tokens: Tokens,
    terms: DistillTerms,
    key: list[Any],
) -> TeacherOutputs:
    """Read the outputs of a teacher from the cache, or compute them.

    Args:
        teacher: The teacher; it is moved to the device only if outputs have to be computed.
        student: The student; embeddings of both may have different numbers of unused rows.
        device: The device to compute on.
        data: Rows and task.
        tokens: The rows as the models see them.
        terms: Temperature and number of tokens to keep.
        key: Everything that changes the outputs.

    Raises:
        RecipeError: The outputs are too large.
    """
    num_classes = min(_num_classes(model, data) for model in (teacher, student))
    has_top = terms.top_k is not None and terms.top_k < num_classes and data.task.loss_kind != "binary-cross-entropy"
    width = terms.top_k + 1 if has_top and terms.top_k is not None else num_classes
    is_of_tokens = data.task.loss_kind == "token-cross-entropy"
    _check_size(sum(tokens.train.lengths) if is_of_tokens else len(tokens.train), width, terms)

    def compute() -> TokenDataset:
        say(f"computing the teacher's outputs for {len(tokens.train):,} rows")
        return _compute(teacher.to(device), num_classes, data, tokens, terms)

    return TeacherOutputs(cached([*key, num_classes], compute), width, data.task)


def _num_classes(model: Any, data: Data) -> int:
    if data.task.loss_kind != "token-cross-entropy":
        return int(model.config.num_labels)
    return int(model.get_output_embeddings().weight.shape[0])


def _check_size(num_items: int, width: int, terms: DistillTerms) -> None:
    size, limit = num_items * width * (8 if terms.top_k else 4), free_memory(torch.device("cpu")) // 2
    if size > limit:
        raise RecipeError(
            f"distill.cache: disk: the teacher's outputs would take {format_bytes(size)} of memory",
            f"distill.top_k: {16 if terms.top_k is None else max(1, terms.top_k // 4)}, or distill.cache: none",
        )


@torch.no_grad()
def _compute(
    teacher: torch.nn.Module, num_classes: int, data: Data, tokens: Tokens, terms: DistillTerms
) -> TokenDataset:
    device = next(teacher.parameters()).device
    found: list[dict[str, torch.Tensor]] = [{} for _ in range(len(tokens.train))]
    lengths = tokens.train.lengths
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    for start in tracked(range(0, len(order), _BATCH_SIZE), "outputs of the teacher"):
        rows = order[start : start + _BATCH_SIZE]
        batch = to_device(data.task.collate([tokens.train[row] for row in rows]), device)
        logits = run_teacher(teacher, batch, DistillTerms()).logits[..., :num_classes]
        targets = soft_targets(data.task.loss_kind, logits, terms)
        for row, items in zip(rows, _by_row(targets, batch, data), strict=True):
            found[row] = items
    fields = {name: torch.cat([items[name] for items in found]) for name in found[0]}
    offsets = {name: _offsets([items[name] for items in found]) for name in fields}
    return TokenDataset(fields, offsets)


def _by_row(targets: dict[str, torch.Tensor], batch: Batch, data: Data) -> Iterator[dict[str, torch.Tensor]]:
    """The items of each row, flat."""
    for row, labels in enumerate(batch["labels"]):
        items = {name: values[row] for name, values in targets.items()}
        if data.task.loss_kind == "token-cross-entropy":
            is_item = labelled(labels[None], data.task.shifts_labels)[0]
            items = {name: values[is_item] for name, values in items.items()}
        yield {name: values.flatten().cpu() for name, values in items.items()}


def _offsets(rows: list[torch.Tensor]) -> "array[int]":
    at = array("q", [0])
    for values in rows:
        at.append(at[-1] + values.numel())
    return at
