"""Apply all techniques of a specification: one function for each hook of `Technique`."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from trimtab.data.batching import Batching
from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.losses import Loss, build_loss
from trimtab.recipe.schema import Recipe
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.base import (
    Accelerator,
    Axis,
    BuildOptimizer,
    Case,
    HostUse,
    LoadOptions,
    LossRequest,
    OnResume,
    Patch,
    Phase,
    Site,
    StepSpec,
    Technique,
    TraceRecorder,
    Trial,
)

Values = StepSpec | Mapping[str, str]
_SETTING = re.compile(r"[a-z_]+(\.[a-z_0-9]+)*: \S")


# ---------------------------------------------------------------------- values


def method_values(recipe: Recipe) -> dict[str, str]:
    """The values of techniques that change the method: they follow from the recipe alone."""
    case = Case(None, Accelerator("cpu"), "fp32", recipe)
    return {technique.key: technique.values(case)[0] for technique in TECHNIQUES if technique.effect == "method"}


def axes_of(case: Case) -> tuple[Axis, ...]:
    """The values of each technique among which a plan chooses."""
    found = ((technique, technique.values(case)) for technique in TECHNIQUES)
    return tuple(Axis(technique, values, technique.shares(values, case)) for technique, values in found)


def needs_prediction(recipe: Recipe) -> bool:
    """Whether a recipe leaves a setting at `auto` that depends on predictions."""
    return any(technique.needs_prediction and technique.is_open(recipe) for technique in TECHNIQUES)


def check_settings(case: Case) -> None:
    """Check the values that the recipe sets.

    Raises:
        RecipeError: A value is not possible.
    """
    for technique in TECHNIQUES:
        if not technique.is_open(case.recipe):
            technique.values(case)


def values_with_stored(stored: StepSpec, case: Case) -> dict[str, str]:
    """The values of a stored specification, except those that the recipe now sets or that are impossible here."""
    found = {}
    for technique in TECHNIQUES:
        value = dict(stored.values).get(technique.key)
        if value is None or not technique.is_open(case.recipe):
            values = technique.values(case)
            value = value if value in values else values[0]
        found[technique.key] = _kept(technique, value, case, technique.off or value)
    return found


def values_without_plan(case: Case, stored: StepSpec | None = None) -> dict[str, str]:
    """The value of each technique if nothing is predicted.

    Args:
        case: The input of the techniques' rules.
        stored: The specification of the run that is resumed.
    """
    values = {technique.key: technique.without_plan(case) for technique in TECHNIQUES}
    for technique in TECHNIQUES:
        if stored is not None and technique.is_kept_on_resume and technique.is_open(case.recipe):
            fresh = values[technique.key]
            values[technique.key] = _kept(technique, dict(stored.values).get(technique.key, fresh), case, fresh)
    return values


def _kept(technique: Technique, value: str, case: Case, other: str) -> str:
    """A stored value that `auto` chose, or another one if it does not work on this machine."""
    if not technique.is_open(case.recipe) or technique.can_keep(value, case):
        return value
    say(f"the run used {technique.setting}: {value}, which does not work here; it continues with {other}")
    return other


def plain_values() -> dict[str, str]:
    """The values of a step that uses no technique."""
    return {technique.key: technique.off or technique.before or "" for technique in TECHNIQUES}


def plain_spec(micro_batch: int, precision: str, **values: str) -> StepSpec:
    """A step that uses only the techniques given by key."""
    return StepSpec.of(micro_batch, precision, plain_values() | values)


def refusal(spec: StepSpec, case: Case) -> str | None:
    """The first reason why a specification is not possible; None if it is."""
    return next((reason for technique in TECHNIQUES if (reason := technique.refuse(spec, case))), None)


def require_possible(spec: StepSpec, case: Case) -> None:
    """Raise an error if a specification is not possible.

    Raises:
        RecipeError: The specification is impossible. The message has the reason, and the setting at its end, if any, as
            the cure.
    """
    reason = refusal(spec, case)
    if reason is None:
        return
    cure = "change one of these settings, or set it to auto"
    problem, _, setting = reason.rpartition("; ")
    if problem and _SETTING.match(setting):
        raise RecipeError(problem, f"{setting}; or {cure}")
    raise RecipeError(reason, cure)


# ---------------------------------------------------------------------- changes to a run


def load_options(recipe: Recipe, options: LoadOptions, half: torch.dtype) -> LoadOptions:
    """How the weights of a recipe's model are loaded."""
    values = method_values(recipe)
    for technique in TECHNIQUES:
        if technique.key in values:
            options = technique.load(values[technique.key], options, half)
    return options


def loads_on_host(recipe: Recipe, *, is_too_large: bool = False) -> bool:
    """Whether weights are loaded in host memory; `is_too_large` means that loading on the device ran out of memory."""
    return any(technique.loads_on_host(recipe, is_too_large=is_too_large) for technique in TECHNIQUES)


def change_model(model: torch.nn.Module, values: Values, site: Site, phases: Iterable[Phase] = Phase) -> None:
    """Change a model in place, phase by phase."""
    for phase in phases:
        for technique in TECHNIQUES:
            if technique.phase is phase:
                value = values[technique.key]
                if value != technique.off or technique.changes_model_when_off:
                    technique.change_model(model, value, site)


def make_loss(spec: StepSpec, request: LossRequest) -> Loss:
    """The loss of a task, computed as the specification says."""
    loss = build_loss(
        request.kind,
        shifts_labels=request.shifts_labels,
        label_smoothing=request.label_smoothing,
        class_weights=request.class_weights,
    )
    for technique in TECHNIQUES:
        loss = technique.change_loss(loss, spec[technique.key], request)
    return loss


def batching_of(values: Values) -> Batching:
    """How rows become batches."""
    batching = Batching()
    for technique in TECHNIQUES:
        batching = technique.change_batching(batching, values[technique.key])
    return batching


def wrap_step(spec: StepSpec, compute_gradients: Callable[..., Any]) -> Callable[..., Any]:
    """The function that computes the gradients of a window."""
    for technique in TECHNIQUES:
        compute_gradients = technique.wrap_step(compute_gradients, spec[technique.key])
    return compute_gradients


def warm_up(model: torch.nn.Module, spec: StepSpec, find_trials: Callable[[], Sequence[Trial]]) -> None:
    """Let each technique prepare for every micro-batch size before the first step."""
    for technique in TECHNIQUES:
        if spec[technique.key] != technique.off:
            technique.warm_up(model, spec[technique.key], find_trials)


def states_of(model: torch.nn.Module, spec: StepSpec) -> dict[str, Any]:
    """The state of techniques that checkpoints save, by key."""
    states = {technique.key: technique.state(model, spec[technique.key]) for technique in TECHNIQUES}
    return {key: state for key, state in states.items() if state is not None}


def change_optimizer(
    optimizer: torch.optim.Optimizer, spec: StepSpec, groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """The optimizer for a user's own loop; the same object if no technique changes it."""
    for technique in TECHNIQUES:
        optimizer = technique.change_optimizer(optimizer, spec[technique.key], groups)
    return optimizer


def wrap_build(build: BuildOptimizer, spec: StepSpec, model: torch.nn.Module) -> BuildOptimizer:
    """The function that builds the optimizer of a recipe."""
    for technique in TECHNIQUES:
        build = technique.wrap_build(build, spec, model)
    return build


# ---------------------------------------------------------------------- changes to a trace


def trace_patches(recorder: TraceRecorder, accelerator: Accelerator) -> list[Patch]:
    """Functions that a trace replaces, for all techniques."""
    return [patch for technique in TECHNIQUES for patch in technique.patches(recorder, accelerator)]


def block_marker(values: Values, num_blocks: int, recipe: Recipe | None) -> Callable[[int], tuple[Any, ...]]:
    """A function that maps a block's number to a value; blocks with different values are traced separately."""
    marks = [technique.block_mark(values[technique.key], num_blocks, recipe) for technique in TECHNIQUES]
    return lambda number: tuple(mark(number) for mark in marks if mark is not None)


def reaches_far(spec: StepSpec) -> bool:
    """Whether the computation of a block may depend on blocks that are not its neighbours."""
    return any(technique.reaches_far and spec[technique.key] != technique.off for technique in TECHNIQUES)


def names_blocks(recipe: Recipe | None) -> bool:
    """Whether settings name single blocks, so that a trace must contain every block."""
    return any(technique.names_blocks(recipe) for technique in TECHNIQUES)


def tries_loss_first(spec: StepSpec) -> bool:
    """Whether the loss runs the model once before the first step."""
    return any(technique.tries_loss_first(spec[technique.key]) for technique in TECHNIQUES)


def may_fail_in_trace(spec: StepSpec) -> bool:
    """Whether only tracing can show if the model supports a technique in use."""
    return any(technique.may_fail_in_trace and spec[technique.key] != technique.off for technique in TECHNIQUES)


def loads_kernels(values: Values) -> bool:
    """Whether kernels of Triton or bitsandbytes are loaded, which take device memory outside the allocator."""
    return any(technique.loads_kernels(values[technique.key]) for technique in TECHNIQUES)


def captures(values: Values) -> bool:
    """Whether forward and backward of micro-batches are replayed from CUDA graphs."""
    return any(technique.captures(values[technique.key]) for technique in TECHNIQUES)


def start_seconds(values: Values, case: Case) -> float:
    """Seconds that techniques need before the first step of a run."""
    return sum(technique.start_seconds(values[technique.key], case) for technique in TECHNIQUES)


def host_use(spec: StepSpec, model: Any, weight_bytes: int) -> HostUse:
    """The changes of all techniques to the use of host memory and disk."""
    uses = [technique.host_use(spec[technique.key], model, weight_bytes) for technique in TECHNIQUES]
    return HostUse(
        sum(use.kept_bytes for use in uses),
        any(use.pages_state for use in uses),
        max(use.state_ratio for use in uses),
        any(use.updates_on_host for use in uses),
        any(use.streams_weights for use in uses),
        any(use.exports_trainable for use in uses),
    )


# ---------------------------------------------------------------------- texts and files


def describe(spec: StepSpec, reference: Values | None = None) -> list[str]:
    """A short text for every technique in use.

    Args:
        spec: The specification.
        reference: Values of techniques without an `off` value that are not worth mentioning.
    """
    return [words for technique in TECHNIQUES if (words := _words(technique, spec, reference))]


def describe_method(spec: StepSpec) -> list[str]:
    """The texts of techniques that change the method."""
    return [w for technique in TECHNIQUES if technique.effect == "method" and (w := _words(technique, spec, None))]


def _words(technique: Technique, spec: StepSpec, reference: Values | None) -> str:
    value = spec[technique.key]
    plain = technique.off or technique.before
    if technique.off is None and reference is not None and technique.key in reference:
        plain = reference[technique.key]
    return "" if value == plain else technique.describe(value)


def memory_advice() -> list[str]:
    """Settings to suggest if memory ran out and there was no prediction."""
    return [f"{technique.setting}: {technique.advice}" for technique in TECHNIQUES if technique.advice is not None]


def plan_texts(spec: StepSpec, recipe: Recipe | None) -> dict[str, str]:
    """The values for plan.json."""
    return {technique.key: technique.plan_text(spec[technique.key], recipe) for technique in TECHNIQUES}


def values_in_plan(stored: Mapping[str, Any]) -> dict[str, str]:
    """The values in a plan.json; techniques unknown to its version get the value that they had then."""
    found = {}
    for technique in TECHNIQUES:
        text = stored.get(technique.key, technique.before or technique.off)
        if text is not None:
            found[technique.key] = technique.value_in(str(text))
    return found


def resume_rule(setting: str, old: Any, new: Any) -> OnResume | None:
    """Whether a resumed run may change a recipe key; None if the key belongs to no technique."""
    technique = next((t for t in TECHNIQUES if setting == t.setting or setting.startswith(t.setting + ".")), None)
    return None if technique is None else technique.on_resume(old, new)
