"""Choose the specification of a step: resolve `auto`, with or without a search."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Protocol

import torch

from trimtab.build.batches import micro_batch_asked
from trimtab.build.parts import Data, Loaded, Tokens
from trimtab.build.teacher import Teacher
from trimtab.data.batching import Batching
from trimtab.engine.engine import Engine
from trimtab.engine.placement import to_device
from trimtab.errors import DoesNotFit, TraceError, summarize_error
from trimtab.garbage_collection import gc_disabled
from trimtab.hardware.memory import resolve_budget
from trimtab.log import say
from trimtab.model.chunked_loss import check_chunked_loss
from trimtab.planner.explain import Change, cannot_fit, reason, rung
from trimtab.planner.measured_plan import measure_plan
from trimtab.planner.memory import Prediction
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.search import Ladder, Row, Space, halved_sizes
from trimtab.planner.shapes import LengthsOfData
from trimtab.planner.target import SPARE, Target, target_here
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.planner.trial_step import TrialError, TrialSteps
from trimtab.recipe.schema import Recipe
from trimtab.runs.outlook import AnyOutlook, Outlook
from trimtab.runs.plan import Plan
from trimtab.techniques.apply import (
    check_settings,
    memory_advice,
    needs_prediction,
    require_possible,
    values_with_stored,
    values_without_plan,
)
from trimtab.techniques.base import Accelerator, Case, StepSpec
from trimtab.units import format_bytes, parse_bytes


class StepPlanner(Protocol):
    """Predict and search the specifications of a step."""

    target: Target

    @property
    def space(self) -> Space: ...  # noqa: D102

    def choose(self, *, thorough: bool = False) -> Ladder:
        """Search for the fastest specification that fits; the ladder contains all predictions."""

    def prediction(self, spec: StepSpec) -> Prediction:
        """The memory of a step."""

    def needed_bytes(self, row: Row) -> int:
        """The smallest allocator limit under which a row runs."""

    def changes(self, row: Row) -> Iterator[Change]:
        """Changes to the settings that may make the step fit."""


def choose_row(
    planner: StepPlanner, ladder: Ladder | None = None, *, always_explains: bool = False, prefix: str = ""
) -> Row:
    """The row that a run uses: the fastest that fits, or the smallest if it may still run.

    Args:
        planner: The planner.
        ladder: The result of its search; None searches now.
        always_explains: Whether to log what would fit also on a CPU, which takes more predictions.
        prefix: The start of that log message.

    Raises:
        DoesNotFit: Nothing fits into the memory of a GPU.
    """
    ladder = ladder or planner.choose()
    if ladder.chosen is not None:
        return ladder.chosen
    row, target = ladder.smallest, planner.target
    if not target.fits(planner.prediction(row.spec), 0.0):
        if not target.is_cpu:
            raise DoesNotFit(explain_failure(planner, row))
        problem = f"no plan fits into {format_bytes(target.budget_bytes)}"
        if always_explains:
            problem = explain_failure(planner, row)
        say(f"{prefix}{problem}\npredictions for a CPU are estimates, so the smallest plan is used")
    elif not target.is_cpu:
        needed = format_bytes(planner.needed_bytes(row) + row.estimate.outside_bytes)
        words = f"{prefix}the smallest plan needs {needed} of {format_bytes(target.budget_bytes)}"
        say(f"{words}: less than {SPARE:.0%} stays free, so memory may run out")
    return row


def explain_failure(planner: StepPlanner, row: Row) -> str:
    """Error text for a run that does not fit: how far the smallest row exceeds the budget, and what would fit."""
    target = planner.target
    smallest = rung(row, planner.needed_bytes(row), None)
    reference = planner.space.reference()
    changes = list(planner.changes(row))
    return cannot_fit(smallest, target.name, target.budget_bytes, changes, reference, target.host_budget())


def why_chosen(planner: StepPlanner, ladder: Ladder, row: Row) -> str:
    """One sentence about the row that a run uses, for its plan.json."""
    budget = planner.target.budget_bytes
    if ladder.chosen is None:
        return f"No plan fits into {format_bytes(budget)} by the prediction, so the smallest one is used."
    faster = [
        other for other in ladder.rows if not other.estimate.fits and other.estimate.tokens_s > row.estimate.tokens_s
    ]
    near = [min(faster, key=lambda other: other.least_bytes)] if faster else []
    rungs = [rung(other, planner.needed_bytes(other), None) for other in (row, *near)]
    return reason([replace(rungs[0], is_chosen=True), *rungs[1:]], budget, planner.space.reference())


# ---------------------------------------------------------------------- before a run


@dataclass(frozen=True)
class Decision:
    """The specification of a run's steps, and its prediction."""

    spec: StepSpec
    outlook: AnyOutlook | None = None


def decide(
    recipe: Recipe,
    data: Data,
    tokens: Tokens,
    loaded: Loaded,
    engine: Engine,
    *,
    has_own_loss: bool = False,
    stored: Plan | None = None,
    teacher: Teacher | None = None,
    trials: TrialSteps | None = None,
) -> Decision:
    """Choose values for everything that a recipe leaves at `auto`.

    On a GPU, or with a budget, the planner searches for them; a resumed run keeps its plan. If a step cannot be traced
    and there is a budget, trial steps are measured on the device. On a CPU without a budget nothing is predicted: the
    batch is one micro-batch, and nothing is recomputed.

    Args:
        recipe: The recipe.
        data: Its data and task.
        tokens: Its tokenized rows.
        loaded: Its model.
        engine: The engine: device and number of processes.
        has_own_loss: Whether the user passed a loss function.
        stored: The plan of the run to resume.
        teacher: The teacher of the run.
        trials: Measures steps; None if only predictions may decide.

    Raises:
        DoesNotFit: Nothing fits into the memory of a GPU, or nothing that was measured fits.
        RecipeError: The recipe contains a setting that is not possible.
    """
    needs_logits = has_own_loss or recipe.distill is not None
    question = _Question(recipe, data, tokens, loaded, engine, needs_logits, teacher)
    check_settings(question.case)
    if not _is_planned(recipe, engine.device):
        return Decision(question.without_plan(stored))
    if stored is not None and _is_still_good(stored, recipe):
        return Decision(question.with_stored(stored.spec), stored.outlook)

    is_measured = recipe.memory.budget is not None and trials is not None and trials.obstacle is None

    def search_plan() -> Decision | str | None:
        try:
            return question.by_search()
        except DoesNotFit as error:
            return str(error)
        except Exception as error:  # a model that cannot be traced may still train
            say(_words_without_plan(error, is_measured, trials))
            return None

    found = engine.decide_on_main_process(search_plan)
    if isinstance(found, str):
        raise DoesNotFit(found)
    if found is None and is_measured and trials is not None:
        try:
            return question.by_measuring(trials)
        except TrialError as error:  # the run may still work, and if not, its own error is clearer
            if engine.is_main_process:
                say(f"no trial step could be measured ({error}): {_words_on_trying()}")
    return Decision(question.without_plan(stored)) if found is None else found


def _is_planned(recipe: Recipe, device: torch.device) -> bool:
    memory = recipe.memory
    if device.type == "cpu":
        return memory.budget is not None
    is_open = micro_batch_asked(recipe, 1) is None or needs_prediction(recipe)
    return device.type == "cuda" and (is_open or memory.budget is not None)


def _is_still_good(stored: Plan, recipe: Recipe) -> bool:
    """Whether a resumed run keeps its plan: it does unless it was given another budget in bytes."""
    budget, outlook = recipe.memory.budget, stored.outlook
    if outlook is None:
        return False
    return budget is None or budget == "auto" or outlook.budget_bytes == parse_bytes(budget)


def _words_without_plan(error: Exception, is_measured: bool, trials: TrialSteps | None) -> str:
    what = error.problem if isinstance(error, TraceError) else f"no plan could be made ({summarize_error(error)})"
    if is_measured:
        return f"{what}: trial steps on the device are measured instead"
    obstacle = None if trials is None else trials.obstacle
    reason = "" if obstacle is None else f" ({obstacle})"
    measure = ["memory.budget: auto to measure what fits"] if obstacle is None else []
    return f"{what}{reason}: {_words_on_trying(measure)}"


def _words_on_trying(more: Sequence[str] = ()) -> str:
    cures = ", ".join([*more, "a smaller memory.micro_batch", *memory_advice()])
    return f"the batch is tried as one micro-batch; if memory runs out, set {cures}"


@dataclass(frozen=True)
class _Question:
    """A recipe and its parts, for which a specification is chosen."""

    recipe: Recipe
    data: Data
    tokens: Tokens
    loaded: Loaded
    engine: Engine
    has_own_loss: bool
    teacher: Teacher | None = None

    def without_plan(self, stored: Plan | None) -> StepSpec:
        """The whole batch as one micro-batch, and the value of every technique without a plan."""
        case = self.case
        spec = StepSpec.of(
            self._micro_batch(), case.precision, values_without_plan(case, None if stored is None else stored.spec)
        )
        require_possible(spec, case)
        return spec

    def with_stored(self, stored: StepSpec) -> StepSpec:
        """The stored values, except those that the recipe now sets."""
        case = self.case
        is_open = micro_batch_asked(self.recipe, 1) is None
        size = stored.micro_batch if is_open else self._micro_batch()
        return StepSpec.of(size, case.precision, values_with_stored(stored, case))

    @one_plan_at_a_time()
    @gc_disabled()
    def by_search(self) -> Decision:
        """Let the planner choose."""
        planner = self._planner()
        ladder = planner.choose()
        row = choose_row(planner, ladder)
        return Decision(row.spec, replace(outlook_of(planner, row), why=why_chosen(planner, ladder, row)))

    def by_measuring(self, trials: TrialSteps) -> Decision:
        """Let trial steps on the device choose; all processes measure the same steps."""
        budget = resolve_budget(self.recipe.memory.budget, self.engine.device) or 0
        budget = self.engine.decide_on_main_process(lambda: budget)  # free memory differs by process
        asked = micro_batch_asked(self.recipe, max(self.tokens.train.lengths))
        whole = min(self.recipe.train.batch_size, len(self.tokens.train))
        sizes = halved_sizes(math.ceil(whole / self.engine.num_processes)) if asked is None else [self._micro_batch()]
        found = measure_plan(trials, self.without_plan(None), self.case, sizes, budget)
        return Decision(*found)

    @cached_property
    def case(self) -> Case:
        """The input of the techniques' rules."""
        size = self._micro_batch()
        return Case(
            self.loaded.model,
            Accelerator.of(self.engine.device),
            {"no": "fp32"}.get(self.engine.mixed_precision, self.engine.mixed_precision),
            self.recipe,
            frozenset(self.recipe.memory.allow),
            self.data.task.loss_kind,
            self.has_own_loss,
            model_kind=self.data.task.model_kind,
            num_rows=size,
            num_targets=max(self.tokens.train.lengths),
            num_processes=self.engine.num_processes,
            count_shapes=lambda: self._lengths().num_shapes(size, Batching()),
            find_head_problem=self._find_head_problem,
        )

    def _micro_batch(self) -> int:
        """The micro-batch size of the recipe; `auto` is the whole batch."""
        num_processes, batch_size = self.engine.num_processes, self.recipe.train.batch_size
        asked = micro_batch_asked(self.recipe, max(self.tokens.train.lengths))
        whole = batch_size if asked is None else min(asked * num_processes, batch_size)
        return math.ceil(whole / num_processes)

    def _lengths(self) -> LengthsOfData:
        return LengthsOfData(self.recipe, self.tokens, self.data.task, self.engine.num_processes)

    @cached_property
    def _find_head_problem(self) -> Callable[[str], str | None]:
        @cache
        def find(how: str) -> str | None:
            row = self.data.task.collate([self.tokens.train[0]])
            here = next(self.loaded.model.parameters()).device  # weights may be loaded into host memory
            is_placed, dtype = here == self.engine.device, self.engine.compute_dtype
            cast = torch.autocast(here.type, dtype or torch.bfloat16, enabled=dtype is not None)
            with self.engine.autocast() if is_placed else cast:
                return check_chunked_loss(self.loaded.model, to_device(row, here), how)

        return find

    def _planner(self) -> RecipePlanner:
        target = target_here(self.engine.device, self.recipe.memory.budget)
        if target.is_cpu:  # the prediction counts weights that are already loaded
            target = target.without_loaded(self.loaded.model)
            if self.teacher is not None and self.teacher.model is not None:
                target = target.without_loaded(self.teacher.model)
        return RecipePlanner(
            self.recipe,
            self.data.task,
            target,
            self._lengths(),
            num_processes=self.engine.num_processes,
            has_own_loss=self.has_own_loss,
            find_head_problem=self._find_head_problem,
            is_here=True,
            tokenizer=self.loaded.tokenizer,
        )


def outlook_of(planner: RecipePlanner, row: Row) -> Outlook:
    """The prediction for a run: that of a step, or of an evaluation if it needs more memory."""
    estimate, needed = row.estimate, planner.needed_bytes(row)
    peak, parts, rows, eval_peak = estimate.allocated_bytes, estimate.parts, None, None
    evaluation = planner.evaluation(row.spec)
    if evaluation is not None:
        rows, found = evaluation
        eval_peak, needed = found.allocated, max(needed, planner.target.needed_bytes(found))
        if eval_peak > peak:
            peak, parts = eval_peak, found.parts
    total = needed + estimate.outside_bytes
    host = None if planner.target.is_cpu else planner.host(row.spec)
    memory, disk = (None, None) if host is None else (host.memory, host.disk)
    budget = planner.target.budget_bytes
    return Outlook(budget, peak, total, estimate.step_s, dict(parts), rows, eval_peak, memory, disk)
