"""Labelled rows to evaluate models on: tokenized for a model once, with the metrics of its task."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.data.bad_rows import SKIP_CURE
from trimtab.data.metrics import METRIC_NAMES, Metrics
from trimtab.data.rows import Rows
from trimtab.data.sources import load_rows
from trimtab.data.tasks.base import Batch, Task
from trimtab.data.tasks.build import build_task, build_task_of_classifier
from trimtab.data.tokens import TokenDataset, cached
from trimtab.engine.placement import to_device
from trimtab.errors import DataError, ModelError
from trimtab.inference.comparison import ModelComparison
from trimtab.inference.load import LoadedModel
from trimtab.model.losses import build_loss
from trimtab.training.work_progress import working

_MAX_LENGTH = 512  # maximum length for models without a limit
_MAX_LOGITS = 2**25  # bytes of a batch's logits: 128 MiB in fp32
# Recipe keys of the columns of a task: first that of the input, then that of the expected output.
_LABELLED = ("text", "label")
_ROLES = {
    "classify": _LABELLED,
    "regress": _LABELLED,
    "seq2seq": ("text", "target"),
    "chat": ("prompt", "answer", "messages"),
}


@dataclass(frozen=True)
class HeldOut:
    """Labelled rows with their tokens.

    Args:
        task: The task, bound to the tokenizer of the models.
        rows: The rows.
        tokens: Their tokens.
    """

    task: Task
    rows: Rows
    tokens: TokenDataset

    def __len__(self) -> int:
        return len(self.tokens)

    def batches(self, batch_size: int = 32, outputs_per_token: int = 0) -> Iterator[tuple[list[int], Batch]]:
        """Yield padded batches of rows of similar length, longest first, with the numbers of their rows.

        Args:
            batch_size: Maximum number of rows.
            outputs_per_token: Size of the vocabulary, for language models: batches are smaller if their logits would
                take more than 128 MiB.
        """
        lengths = self.tokens.lengths
        if self.task.model_kind == "seq2seq-lm":  # its logits are as long as the text to generate
            lengths = [max(length, len(self.tokens[row]["labels"])) for row, length in enumerate(lengths)]
        order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
        while order:
            limit = _MAX_LOGITS // max(1, lengths[order[0]] * outputs_per_token)
            size = min(batch_size, max(1, limit))
            indices, order = order[:size], order[size:]
            yield indices, self.task.collate([self.tokens[row] for row in indices])

    def compare_with(self, reference: LoadedModel, num_rows: int = 256) -> ModelComparison:
        """Return a comparison with the outputs of `reference` on up to `num_rows` of the rows."""
        order = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(0))[:num_rows].tolist()
        examples = [self.tokens[row] for row in sorted(order)]
        comparison = ModelComparison(self.task, examples, num_outputs(reference, self.task), reference.device)
        comparison.record_reference(reference.model)
        return comparison


def read_held_out(
    loaded: LoadedModel,
    data: Any,
    *,
    text: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    num_rows: int | None = None,
) -> HeldOut:
    """Read and tokenize the rows that a model is evaluated on.

    Args:
        loaded: The model; its task, tokenizer and labels are those of the rows.
        data: File, folder, glob or Hub name, or rows: a table, or a list of dicts.
        text: Column of the text or prompt, or two for pairs. By default the column of the training rows if the data has
            it, else guessed.
        label: Column of the label, of the text to generate, or of the answer; chosen in the same way.
        num_rows: Use at most this number of rows, chosen at random.

    Raises:
        DataError: If a column cannot be found, or a row has a label that the model does not have.
    """
    try:
        task, rows = _read(loaded, data, text, label)
    except DataError as error:  # a recipe can skip bad rows, an evaluation cannot
        raise DataError(error.problem, error.cure.replace(f", {SKIP_CURE}", "")) from error
    return tokenized(loaded, task, rows, num_rows)


def _read(
    loaded: LoadedModel, data: Any, text: str | Sequence[str] | None, label: str | Sequence[str] | None
) -> tuple[Task, Rows]:
    rows = load_rows(data)
    columns = _columns(loaded, rows, text, label)
    if loaded.task_name == "classify":
        names, several = loaded.labels, loaded.model.config.problem_type == "multi_label_classification"
        rows = _spell_out_labels(rows, names)
        task = build_task_of_classifier(rows, names, several=several, **columns)
    else:
        seed = _section(loaded.facts, "recipe").get("seed", 0)
        task = build_task(loaded.task_name, rows, seed=seed, **columns)
    return task, task.usable(rows)


def _columns(
    loaded: LoadedModel, rows: Rows, text: str | Sequence[str] | None, label: str | Sequence[str] | None
) -> dict[str, Any]:
    """Return the columns by role: those named, else those used in training, if they exist."""
    settings, guessed = _section(_section(loaded.facts, "recipe"), "data"), _section(loaded.facts, "columns")
    roles = _ROLES.get(loaded.task_name, ("text",))
    trained = {role: settings.get(role) or guessed.get(role) for role in roles}
    if not isinstance(trained.get("prompt", ""), str | None):
        trained = {}  # several columns form a prompt: they are found again by their names
    columns = {role: value for role, value in trained.items() if value is not None and _has_columns(rows, value)}
    given: dict[str, Any] = dict(zip(roles, (text, label), strict=False))
    given = {role: value for role, value in given.items() if value is not None}
    if loaded.task_name == "chat" and given:
        columns.pop("messages", None)
        if label is None:  # a separate column holds whole conversations
            given = {"messages": given["prompt"]}
            columns = {}
    return columns | given


def _section(facts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of trimtab.json; empty if it is missing or null, as for a model that was trained elsewhere."""
    found = facts.get(name)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ModelError(
            f"trimtab.json of the model is damaged: {name} is {str(found)[:40]!r}, not a mapping",
            "restore the file, or delete it: then task and columns are guessed",
        )
    return found


def _has_columns(rows: Rows, value: str | Sequence[str]) -> bool:
    return all(name in rows.columns for name in ([value] if isinstance(value, str) else value))


def _spell_out_labels(rows: Rows, names: Sequence[str]) -> Rows:
    """Replace class indices with their names if the model has these names, possibly in another order."""
    columns, label_names = dict(rows.columns), dict(rows.label_names)
    for column, own in rows.label_names.items():
        if set(own) <= set(names):
            columns[column] = [_name_of(value, own) for value in rows.columns[column]]
            del label_names[column]
    return Rows(columns, rows.origin, label_names, rows.locations)


def _name_of(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list | tuple):
        return [_name_of(single, names) for single in value]
    is_index = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(names)
    return names[value] if is_index else value


def tokenized(loaded: LoadedModel, task: Task, rows: Rows, num_rows: int | None = None) -> HeldOut:
    """Tokenize rows for a model."""
    if num_rows is not None and num_rows < len(rows):
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:num_rows].tolist()
        rows = rows.select(sorted(order))
    length = loaded.max_length or _MAX_LENGTH
    task.bind(loaded.tokenizer, loaded.model.config)
    key = [task.name, task.settings, rows, loaded.tokenizer, length]
    return HeldOut(task, rows, cached(key, lambda: task.encode(rows, loaded.tokenizer, length)))


@torch.inference_mode()
def quality_of(loaded: LoadedModel, held_out: HeldOut, batch_size: int = 32) -> dict[str, float]:
    """Return all metrics of the task on the rows."""
    task, model = held_out.task, loaded.model
    loss = build_loss(task.loss_kind, shifts_labels=task.shifts_labels)
    num_labels = getattr(model.config, "num_labels", 0)
    names = METRIC_NAMES[task.loss_kind]
    metrics = Metrics(task.loss_kind, names, num_labels=num_labels, shifts_labels=task.shifts_labels)
    model.eval()
    outputs_per_token = num_outputs(loaded, task) if task.loss_kind == "token-cross-entropy" else 0
    with working("evaluating rows, the longest first", len(held_out)) as work:
        for indices, batch in held_out.batches(batch_size, outputs_per_token):
            moved = to_device(batch, loaded.device)
            step = loss(model, moved)
            metrics.update(step.logits, moved, step.item_loss_sum(), step.weight, step.hits)
            work.advance(len(indices))
    return metrics.compute()


def num_outputs(loaded: LoadedModel, task: Task) -> int:
    """Return the size of the model's output: the vocabulary size, or the number of labels."""
    head = loaded.model.get_output_embeddings() if task.loss_kind == "token-cross-entropy" else None
    return loaded.model.config.num_labels if head is None else head.weight.shape[0]  # type: ignore[no-any-return]
