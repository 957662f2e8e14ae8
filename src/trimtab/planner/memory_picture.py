"""A picture of the predicted memory of a step: its record, and the page that shows it."""

from collections.abc import Sequence
from typing import Any

from trimtab.planner.explain import words_of
from trimtab.planner.memory import predict
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.timeline import event_times, step_record
from trimtab.planner.torch_snapshot import torch_snapshot
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.report.memory_page import MemoryPage
from trimtab.report.step_record import StepRecord
from trimtab.techniques.apply import captures
from trimtab.techniques.base import StepSpec
from trimtab.units import format_bytes


def predicted_record(planner: RecipePlanner, spec: StepSpec) -> StepRecord:
    """The allocations of a predicted step, named by module, spaced by predicted time."""
    found, target = planner.prediction(spec), planner.target
    if target.is_cpu:
        beyond = {"outside the allocator": found.outside}
    else:  # the slack includes the remainders that fixed segments leave in blocks
        slack = max(0, found.needed - sum(predict(found.trace).parts.values()))
        beyond = {"allocator slack": slack, "outside the allocator": found.outside}
    return step_record(found.trace, target.device, name=target.name, beyond=beyond)


def predicted_snapshot(planner: RecipePlanner, spec: StepSpec) -> dict[str, Any]:
    """The same step as the dictionary that torch's memory viewer reads."""
    found = planner.prediction(spec)
    return torch_snapshot(found, event_times(found.trace, planner.target.device))


def page_of(planner: RecipePlanner, spec: StepSpec, records: Sequence[StepRecord], title: str = "") -> MemoryPage:
    """The page of a step.

    Args:
        planner: The planner of its recipe.
        spec: The specification of the step.
        records: The records to draw.
        title: Heading of the page.
    """
    target, prediction, shape = planner.target, planner.prediction(spec), planner.shape(spec)
    num_micro = -(-planner.batch_size // spec.micro_batch)
    batch = f"{shape.rows} × {shape.length:,} tokens" + (", packed" if shape.is_packed else "")
    batch += f"; {num_micro} micro-batches" if num_micro > 1 else ""
    facts = {
        "model": model_name(planner.recipe),
        "device": f"{target.name}, budget {format_bytes(target.budget_bytes)}",
        "precision": spec.precision,
        "plan": words_of(spec),
        "micro-batch": batch,
    }
    notes = [f"{target.note[:1].upper()}{target.note[1:]}."] if target.note else []
    if num_micro > 2:
        notes.append("Two micro-batches are drawn: every later one needs what the second one needs.")
    if captures(spec):
        notes.append("Micro-batches run as CUDA graphs; the picture shows them while they are captured.")
    if any(record.source == "measured" for record in records):
        notes.append("Times of a measured step include the time of the recording.")
    notes.append(
        "Drag over a picture or press the name of a stage to look closer, and double-click for the whole step. The "
        "limit is the budget less the memory outside the allocator."
    )
    notes.append(
        "Predicted times add up single operations. Activations are what forward saves for backward; temporaries are "
        "workspaces, gradients of activations and the batch."
    )
    return MemoryPage(
        title or f"Memory of one training step: {model_name(planner.recipe)}",
        records,
        facts,
        limit_bytes=max(0, target.budget_bytes - prediction.outside),
        notes=notes,
    )


def model_name(recipe: Recipe) -> str:
    """The model of a recipe as a short name."""
    model = recipe.model
    if not isinstance(model, ModelSettings):
        return str(model)
    return model.name or f"{(model.config or {}).get('model_type', 'model')} (from a config)"
