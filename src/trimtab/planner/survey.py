"""The ladder of plans that `trimtab plan` shows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trimtab.build.batches import train_batches
from trimtab.build.data import build_data, build_tokens
from trimtab.build.model import build_skeleton
from trimtab.build.plan import count_steps, make_plan
from trimtab.data.batching import Batching
from trimtab.errors import DoesNotFit, RecipeError
from trimtab.garbage_collection import gc_disabled
from trimtab.planner.decide import explain_failure, outlook_of
from trimtab.planner.explain import Rung, as_dict, reason, rung, shown
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.search import Ladder, Row
from trimtab.planner.shapes import Lengths, LengthsOfData, OneLength, StepTask, named_task
from trimtab.planner.target import Target, known_target, target_here
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.recipe.load import LoadedRecipe, as_loaded
from trimtab.recipe.schema import Recipe
from trimtab.runs.outlook import Outlook
from trimtab.runs.plan import Plan
from trimtab.techniques.apply import batching_of
from trimtab.techniques.base import StepSpec
from trimtab.techniques.optimizer_state import OptimizerState
from trimtab.units import format_bytes


@dataclass(frozen=True)
class Survey:
    """The result of `trimtab plan`.

    Attributes:
        target: The device and the budget.
        precision: The precision of the steps.
        reference: The recipe's own values of techniques.
        rungs: Every predicted plan, fastest first; other methods at the end.
        plan: The chosen plan, as a run would use it; None if nothing fits.
        why: One sentence about why it was chosen.
        problem: If nothing fits: by how much, and what would fit.
        limit: The longest rows that the model accepts, in tokens.
        left_out: Methods that the ladder does not show, and why.
    """

    target: Target
    precision: str
    reference: StepSpec
    rungs: tuple[Rung, ...]
    plan: Plan | None
    why: str
    problem: str | None
    limit: int | None
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def optimizer(self) -> str:
        """The optimizer in the recipe."""
        return self.reference[OptimizerState.key]

    def shown(self) -> list[Rung]:
        """The plans that `trimtab plan` shows."""
        return shown(self.rungs)

    def notes(self) -> list[str]:
        """What the chosen plan needs besides training steps, and which methods the ladder does not show."""
        left_out = [f"Not shown: {method}: {reason}" for method, reason in self.left_out.items()]
        outlook = None if self.plan is None else self.plan.outlook
        if not isinstance(outlook, Outlook):
            return left_out
        if outlook.predicted_host_bytes is None or outlook.predicted_disk_bytes is None:
            return left_out
        host = self.target.host_budget()
        words = [
            f"host memory at most {format_bytes(outlook.predicted_host_bytes)}{host and f' of {host}'}",
            f"disk at most {format_bytes(outlook.predicted_disk_bytes)}",
        ]
        if outlook.predicted_eval_peak_bytes is not None:
            peak = format_bytes(outlook.predicted_eval_peak_bytes)
            words.insert(0, f"evaluation in batches of {outlook.eval_micro_batch} needs {peak}")
        return ["Also predicted: " + "; ".join(words) + ".", *left_out]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "device": self.target.name,
            "budget_bytes": self.target.budget_bytes,
            "host_budget_bytes": self.target.host_bytes,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "why": self.why or self.problem,
            "note": self.target.note,
            "left_out": dict(self.left_out),
            "plan": None if self.plan is None else self.plan.as_dict(),
            "ladder": [as_dict(one) for one in self.rungs],
        }


@one_plan_at_a_time()
@gc_disabled()
def survey(
    recipe: Recipe,
    *,
    memory: str | None = None,
    gpu: str | None = None,
    device: str | None = None,
    host_memory: str | None = None,
    length: int | None = None,
    max_batch: bool = False,
    longest: bool = False,
    thorough: bool = True,
) -> Survey:
    """Predict the plans that a recipe allows. No weights are loaded, and data is read only if `length` is None.

    Args:
        recipe: The recipe.
        memory: The budget, instead of the recipe's.
        gpu: A GPU of the catalog that is not in this machine.
        device: The device in this machine, such as "cuda:1"; by default an accelerator if there is one, else the CPU.
        host_memory: The budget of host memory, such as "32GiB"; by default what is free, and for a GPU that is not in
            this machine twice its memory, at least 64 GiB.
        length: Tokens of every row; then no data is read.
        max_batch: Whether to find the largest batch for each set of techniques.
        longest: Whether to find the longest rows for each set of techniques, with the smallest micro-batch.
        thorough: Whether to predict plans that cannot be chosen, too.
    """
    planner, rows = planner_on(recipe, memory or recipe.memory.budget, gpu, device, length, host_memory)
    target, limit = planner.target, planner.max_positions()
    ladder = planner.choose(thorough=thorough)
    others = [row for _, row in planner.other_methods()] if thorough else []
    if longest and ladder.rows:  # the longest rows need techniques that are otherwise used only if nothing else fits
        known = {row.spec for row in ladder.rows}
        more = [row for row in planner.last_resorts(ladder.smallest.spec) if row.spec not in known]
        ladder = replace(ladder, rows=(*ladder.rows, *more))
    num_steps = recipe.train.max_steps
    if rows is not None:
        num_steps = count_steps(recipe, rows.batches(planner.batch_size, Batching()))[0]
    rungs = tuple(_rungs(planner, ladder, others, num_steps, max_batch, longest))
    reference = planner.space.reference()
    plan = None if ladder.chosen is None else _plan_of(planner, ladder.chosen, rows, num_steps)
    why = "" if plan is None else reason(rungs, target.budget_bytes, reference)
    problem = explain_failure(planner, ladder.smallest) if plan is None else None
    return Survey(target, planner.precision, reference, rungs, plan, why, problem, limit, planner.left_out)


def plan(
    recipe: Recipe | LoadedRecipe,
    *,
    memory: str | None = None,
    gpu: str | None = None,
    device: str | None = None,
    host_memory: str | None = None,
    length: int | None = None,
) -> Plan:
    """Choose how a recipe would train, without training it: the fastest plan that fits, and its prediction.

    No weights are loaded. With `gpu` and `length`, neither a GPU nor data is needed.

    Args:
        recipe: A `Recipe`, or the result of loading a recipe file.
        memory: The budget, such as "8GiB", instead of the recipe's; by default all memory of the device.
        gpu: A GPU of the catalog that is not in this machine, such as "t4".
        device: The device in this machine, such as "cuda:1"; by default an accelerator if there is one, else the CPU.
        host_memory: The budget of host memory, such as "32GiB"; by default what is free, and with `gpu` twice its
            memory, at least 64 GiB.
        length: Tokens of every row. No data is read then, and the recipe has to name its task.

    Returns:
        The plan: how a step is computed, with its predicted memory and time.

    Raises:
        DoesNotFit: No plan fits. The message says what the smallest plan needs, and what would fit.

    Example:
        found = plan(Recipe(model="bert-base-uncased", data={"train": "reviews.csv"}), gpu="t4", memory="8GiB")
        print(found.micro_batch_size, found.predicted_peak_bytes)
    """
    asked = as_loaded(recipe).recipe
    found = survey(asked, memory=memory, gpu=gpu, device=device, host_memory=host_memory, length=length, thorough=False)
    if found.plan is None:
        raise DoesNotFit(found.problem or "")
    return found.plan


class RecipeRows:
    """The data of a recipe as the model will see it; no weights are loaded to read it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.data = build_data(recipe)
        skeleton = build_skeleton(recipe, self.data)
        self.tokenizer = skeleton.tokenizer
        self.tokens = build_tokens(recipe, self.data, skeleton)

    def batches(self, micro_batch: int, batching: Batching) -> Any:
        """The training batches."""
        return train_batches(self._recipe, self.tokens, micro_batch, batching)


def planner_on(
    recipe: Recipe,
    budget: str | None,
    gpu: str | None,
    device: str | None,
    length: int | None,
    host_memory: str | None = None,
) -> tuple[RecipePlanner, RecipeRows | None]:
    """Return a planner for a device, and the rows that it reads; see `survey` for the arguments.

    Raises:
        RecipeError: Rows of this length have more tokens than the model has positions.
    """
    if gpu is not None:
        target = known_target(gpu, budget, host_memory)
    else:
        target = target_here(device, budget, host_memory)
    rows = None if length is not None else RecipeRows(recipe)
    planner = planner_for(recipe, target, rows, length)
    limit = planner.max_positions()
    if length is not None and limit is not None and length > limit:
        raise RecipeError(f"--length {length} is more than the model's {limit} positions", f"--length {limit}")
    return planner, rows


def planner_for(
    recipe: Recipe, target: Target, rows: RecipeRows | None = None, length: int | None = None
) -> RecipePlanner:
    """Return a planner for the rows of a recipe, or for rows of one length."""
    if rows is not None:
        lengths: Lengths = LengthsOfData(recipe, rows.tokens, rows.data.task)
        return RecipePlanner(recipe, rows.data.task, target, lengths, tokenizer=rows.tokenizer)
    task: StepTask = named_task(recipe)
    lengths = OneLength(int(length or 0), has_targets=task.model_kind == "seq2seq-lm")
    return RecipePlanner(recipe, task, target, lengths)


def _rungs(
    planner: RecipePlanner, ladder: Ladder, others: list[Row], num_steps: int | None, max_batch: bool, longest: bool
) -> Iterator[Rung]:
    most: dict[StepSpec, int | None] = {}
    lengths: dict[StepSpec, int | None] = {}
    for row in (*ladder.rows, *others):
        spec = row.spec.with_micro_batch(planner.space.micro_batches[-1])  # the smallest allows the longest rows
        if max_batch and spec not in most:
            most[spec] = planner.most_rows(row.spec)
        if longest and spec not in lengths:
            lengths[spec] = planner.longest(spec)
        yield replace(
            rung(row, planner.needed_bytes(row), num_steps),
            is_chosen=row is ladder.chosen,
            is_alternative=row in others,
            most_rows=most.get(spec),
            longest=lengths.get(spec),
            longest_host_bytes=_host_bytes(planner, spec, lengths.get(spec)),
        )


def _host_bytes(planner: RecipePlanner, spec: StepSpec, length: int | None) -> int | None:
    """Host memory that rows of this length need; None on a CPU."""
    return None if length is None or planner.target.is_cpu else planner.host(spec, length).memory


def _plan_of(planner: RecipePlanner, row: Row, rows: RecipeRows | None, num_steps: int | None) -> Plan:
    num_parameters, num_trainable = planner.num_parameters()
    return make_plan(
        planner.recipe,
        row.spec,
        device=planner.target.name,
        batches=None if rows is None else rows.batches(row.spec.micro_batch, batching_of(row.spec)),
        tokens=None if rows is None else rows.tokens,
        max_length=planner.lengths.longest,
        num_steps=num_steps,
        default_metric="" if rows is None else rows.data.task.default_metric,
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        outlook=outlook_of(planner, row),
    )
