"""The data that a run writes for its report: the data card, the outcome of held-out rows, and finally the page itself.

It must not fail a run or take long: held-out rows come from the evaluations that the run does anyway.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

import torch

from trimtab.build.parts import ResolvedRun
from trimtab.data.report import describe_sets, label_text
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Task
from trimtab.data.tokens import TokenDataset
from trimtab.log import say
from trimtab.report.page.document import PAGE
from trimtab.report.page.held_out_section import MAX_MATRIX
from trimtab.report.page.run_files import FACTS, read_json, read_run
from trimtab.report.page.run_page import run_page
from trimtab.runs.run_folder import Folder, ReadOnlyRunFolder
from trimtab.training.evaluate import Evaluator
from trimtab.training.run_state import RunState

_NUM_BINS = 24
_NUM_WORST = 10
_MAX_TEXT = 1000  # characters of a row
_NUM_CONFUSIONS = 20  # number of confusions that are listed if a matrix would be too large


def _never_fails(write: Callable[..., None]) -> Callable[..., None]:
    """Turn any error into a warning, because a report is less important than the run."""

    @wraps(write)
    def guarded(*args: Any) -> None:
        try:
            write(*args)
        except Exception as error:
            say(f"the report is not complete: {type(error).__name__}: {error}")

    return guarded


@_never_fails
def write_report(folder: Folder) -> None:
    """Write report.html."""
    if not isinstance(folder, ReadOnlyRunFolder):
        folder.write_text(PAGE, run_page(read_run(folder.path)))


@_never_fails
def write_data_card(run: ResolvedRun, folder: Folder) -> None:
    """Write sizes, lengths and labels of the rows to report.json."""
    if isinstance(folder, ReadOnlyRunFolder):
        return
    data, tokens = run.data, run.tokens
    card = describe_sets(data.task, data.train, data.eval, tokens.train, tokens.eval, _NUM_BINS)
    update_facts(folder, data=asdict(card) | {"max_length": tokens.max_length, "notices": data.notices})


def update_facts(folder: Folder, **facts: Any) -> None:
    """Add facts to report.json, or replace them."""
    folder.write_text(FACTS, json.dumps(read_json(folder.path / FACTS) | facts))


def held_out_rows(run: ResolvedRun, folder: Folder, evaluator: Evaluator | None) -> list[object]:
    """Return the callback that writes the outcome of the held-out rows whenever the best model is written."""
    is_overfitted = bool(run.recipe.limits.overfit_batches)
    rows, tokens = (run.data.train, run.tokens.train) if is_overfitted else (run.data.eval, run.tokens.eval)
    if evaluator is None or rows is None or tokens is None or isinstance(folder, ReadOnlyRunFolder):
        return []
    return [HeldOutRows(folder, evaluator, run.data.task, rows, tokens)]


class HeldOutRows:
    """A callback that writes confusions and the worst rows of the best model to report.json.

    Args:
        folder: The folder of the run.
        evaluator: Holds the outcome of each row.
        task: The task of the rows.
        rows: The rows.
        tokens: The same rows as tokens, with their labels.
    """

    def __init__(self, folder: Folder, evaluator: Evaluator, task: Task, rows: Rows, tokens: TokenDataset) -> None:
        self._folder, self._evaluator, self._task, self._rows, self._tokens = folder, evaluator, task, rows, tokens

    def on_step(self, state: RunState) -> None:
        """Discard the outcomes of an earlier model."""
        self._evaluator.outcomes = None

    @_never_fails
    def on_save(self, state: RunState, folder: str) -> None:
        """Write the outcome of the rows, if the saved model was just evaluated."""
        outcomes = self._evaluator.outcomes
        if outcomes is None:
            return
        numbers = outcomes[:, 0].long()
        dataset = self._evaluator.loader.dataset
        if isinstance(dataset, torch.utils.data.Subset):
            numbers = torch.tensor(list(dataset.indices))[numbers]
        losses, predicted = outcomes[:, 1], outcomes[:, 2:]
        found = {"step": state.step, "num_rows": len(outcomes), "worst": self._worst(numbers, losses, predicted)}
        if self._task.loss_kind == "cross-entropy":
            found |= self._confusions(numbers, predicted[:, 0].long())
        update_facts(self._folder, held_out=found)

    def _confusions(self, numbers: torch.Tensor, predicted: torch.Tensor) -> dict[str, Any]:
        names = [str(name) for name in self._task.head()["id2label"].values()]
        true = self._tokens.fields["labels"][numbers].long()
        pairs = true * len(names) + predicted
        if len(names) <= MAX_MATRIX:
            counts = torch.bincount(pairs, minlength=len(names) ** 2).reshape(len(names), -1)
            return {"labels": names, "confusion": counts.tolist()}
        # a matrix of many labels would take gigabytes
        found, counts = pairs[true != predicted].unique(return_counts=True)  # type: ignore[no-untyped-call]
        most = counts.argsort(descending=True, stable=True)[:_NUM_CONFUSIONS]
        places = (divmod(place, len(names)) for place in found[most].tolist())
        return {
            "confusions": [[names[a], names[b], n] for (a, b), n in zip(places, counts[most].tolist(), strict=True)]
        }

    def _worst(self, numbers: torch.Tensor, losses: torch.Tensor, predicted: torch.Tensor) -> list[dict[str, Any]]:
        columns = self._task.columns["text"]
        found = []
        for place in losses.topk(min(_NUM_WORST, len(losses))).indices.tolist():
            row = int(numbers[place])
            texts = [
                str(self._rows.columns[name][row]) for name in ([columns] if isinstance(columns, str) else columns)
            ]
            guess = predicted[place, 0] if self._task.loss_kind == "cross-entropy" else predicted[place]
            found.append(
                {
                    "location": self._rows.location(row),
                    "text": "\n".join(texts)[:_MAX_TEXT],
                    "label": label_text(self._task, torch.as_tensor(self._tokens[row]["labels"])),
                    "predicted": label_text(self._task, guess),
                    "loss": losses[place].item() if losses[place].isfinite() else None,  # JSON has no NaN
                }
            )
        return found
