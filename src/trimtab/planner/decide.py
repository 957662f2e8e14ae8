"""What `auto` becomes: the plan of a run before it begins, and the ladder of plans that `trimtab plan` shows."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.build.batches import train_batches
from trimtab.build.data import build_data, build_tokens
from trimtab.build.levers import describe_adapter
from trimtab.build.model import build_skeleton
from trimtab.build.parts import Data, Loaded, Tokens
from trimtab.build.plan import count_steps, count_warmup, deciding_metric
from trimtab.data.batching import padding_share
from trimtab.engine.engine import Engine
from trimtab.engine.placement import to_device
from trimtab.errors import DoesNotFit, RecipeError, TraceError, in_one_line
from trimtab.log import say
from trimtab.model.chunked_loss import check_head
from trimtab.planner.explain import Change, Rung, as_dict, cannot_fit, reason, rung, shown
from trimtab.planner.recipe_planner import Lengths, LengthsOfData, OneLength, Planner, StepTask, named_task
from trimtab.planner.search import Candidate, Ladder, Row
from trimtab.planner.target import Target, known_target, target_here
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import read_value
from trimtab.runs.plan import Outlook, Plan
from trimtab.training.garbage_collection import no_collections
from trimtab.units import format_bytes, parse_bytes

# ---------------------------------------------------------------------- before a run


@dataclass(frozen=True)
class Settled:
    """A recipe in which nothing is left open that a plan decides, and what was predicted of it."""

    recipe: Recipe
    outlook: Outlook | None = None


def settle(
    recipe: Recipe,
    data: Data,
    tokens: Tokens,
    loaded: Loaded,
    engine: Engine,
    *,
    has_own_loss: bool = False,
    stored: Plan | None = None,
) -> Settled:
    """Decide the levers that a recipe leaves open.

    On a GPU, and wherever a budget is given, by a search; a run that goes on keeps what it had. On a CPU without a
    budget nothing is predicted: the batch goes in one piece, and nothing is recomputed.

    Args:
        recipe: The recipe.
        data: Its task.
        tokens: Its rows.
        loaded: Its model.
        engine: Where it trains, and on how many processes.
        has_own_loss: The loss is a function of the user's.
        stored: The plan of the run that goes on.

    Raises:
        DoesNotFit: Nothing fits into the memory of a GPU.
    """
    if not _is_planned(recipe, engine.device):
        return Settled(_with_levers(recipe, None))
    if stored is not None and _is_still_good(stored, recipe):
        return Settled(_with_levers(recipe, _levers_of(stored)), _outlook_of(stored))

    def decide() -> tuple[Candidate, Outlook] | str | None:
        try:
            return _chosen(_planner(recipe, data, tokens, loaded, engine, has_own_loss))
        except DoesNotFit as error:
            return str(error)
        except Exception as error:  # a model that cannot be traced may train all the same
            say(_without_plan(error))
            return None

    found = engine.first_decides(decide)
    if isinstance(found, str):
        raise DoesNotFit(found)
    if found is None:
        return Settled(_with_levers(recipe, None))
    return Settled(_with_levers(recipe, found[0]), found[1])


def _without_plan(error: Exception) -> str:
    what = error.problem if isinstance(error, TraceError) else f"no plan could be made ({in_one_line(error)})"
    return (
        f"{what}: the batch is tried as it is; memory.micro_batch, memory.gradient_checkpointing: all and "
        "memory.loss: chunked make it smaller"
    )


def stored_plan(folder: Path) -> Plan | None:
    """The plan of the run in a folder, if there is one."""
    try:
        return Plan.from_dict(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _is_planned(recipe: Recipe, device: torch.device) -> bool:
    memory = recipe.memory
    if device.type == "cpu":
        return memory.budget is not None
    is_open = "auto" in (memory.micro_batch, memory.gradient_checkpointing, memory.loss)
    return device.type == "cuda" and (is_open or memory.budget is not None)


def _is_still_good(stored: Plan, recipe: Recipe) -> bool:
    """A run that goes on keeps its plan, unless it was given another budget in bytes."""
    budget = recipe.memory.budget
    if stored.budget_bytes is None:
        return False
    return budget is None or budget == "auto" or stored.budget_bytes == parse_bytes(budget)


def _levers_of(stored: Plan) -> Candidate:
    return Candidate(
        stored.micro_batch_size,
        stored.loss,
        stored.optimizer,
        stored.offload,
        stored.gradient_checkpointing,
        stored.kernels,
    )


def _outlook_of(stored: Plan) -> Outlook | None:
    names = Outlook.__dataclass_fields__
    values: dict[str, Any] = {name: getattr(stored, name) for name in names}
    return None if values["predicted_peak_bytes"] is None else Outlook(**values)


def _with_levers(recipe: Recipe, levers: Candidate | None) -> Recipe:
    """A recipe with a plan's choices in the place of every `auto`; without a plan, with what costs nothing."""
    memory, train = recipe.memory, recipe.train
    found = levers or Candidate(rows=0)
    update: dict[str, Any] = {}
    if memory.gradient_checkpointing == "auto":
        update["gradient_checkpointing"] = read_value(found.recomputed)
    if memory.offload == "auto":
        update["offload"] = found.offload
    if levers is not None:
        if memory.micro_batch == "auto":
            update["micro_batch"] = levers.rows
        if memory.loss == "auto":
            update["loss"] = levers.loss
        if memory.kernels == "auto":
            update["kernels"] = levers.kernels
        if train.optimizer == "auto" or "8bit" in memory.allow:
            train = train.model_copy(update={"optimizer": levers.optimizer})
    return recipe.model_copy(update={"memory": memory.model_copy(update=update), "train": train})


def _planner(recipe: Recipe, data: Data, tokens: Tokens, loaded: Loaded, engine: Engine, has_own_loss: bool) -> Planner:
    target = target_here(engine.device, recipe.memory.budget)
    if target.is_cpu:  # what is loaded now will be counted as weights
        weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
        target = replace(target, outside_bytes=max(0, (target.outside_bytes or 0) - weights))
    task = data.task
    has_chunks = task.loss_kind == "token-cross-entropy" and not has_own_loss
    if has_chunks and recipe.memory.loss == "auto":
        batch = to_device(task.collate([tokens.train[0]]), engine.device)
        with engine.autocast():
            has_chunks = check_head(loaded.model, batch) is None
    lengths = LengthsOfData(recipe, tokens, task, engine.num_processes)
    return Planner(
        recipe,
        task,
        target,
        lengths,
        num_processes=engine.num_processes,
        has_chunks=has_chunks,
        is_here=True,
        tokenizer=loaded.tokenizer,
    )


@one_plan_at_a_time()
@no_collections()
def _chosen(planner: Planner) -> tuple[Candidate, Outlook]:
    """What a run takes: the fastest that fits, or the smallest where that may still go."""
    target, ladder = planner.target, planner.choose()
    row = ladder.chosen or ladder.smallest
    if ladder.chosen is None and not target.fits(planner.prediction(row.candidate), 0.0):
        if not target.is_cpu:
            raise DoesNotFit(explain_failure(planner, ladder))
        say(f"no plan fits into {format_bytes(target.budget_bytes)}: the smallest is taken")
    return row.candidate, _outlook(planner, row)


def _outlook(planner: Planner, row: Row) -> Outlook:
    """What a run takes: a step, or an evaluation where that needs more."""
    estimate, needed = row.estimate, planner.needed_bytes(row)
    peak, parts, rows, eval_peak = estimate.allocated_bytes, estimate.parts, None, None
    evaluation = planner.evaluation(row.candidate)
    if evaluation is not None:
        rows, found = evaluation
        eval_peak, needed = found.allocated, max(needed, planner.limit_of(found))
        if eval_peak > peak:
            peak, parts = eval_peak, found.parts
    total = needed + estimate.outside_bytes
    host = None if planner.target.is_cpu else planner.host(row.candidate)
    memory, disk = (None, None) if host is None else (host.memory, host.disk)
    budget = planner.target.budget_bytes
    return Outlook(budget, peak, total, estimate.step_s, dict(parts), rows, eval_peak, memory, disk)


# ---------------------------------------------------------------------- what does not fit


def explain_failure(planner: Planner, ladder: Ladder) -> str:
    """By how much nothing fits, and what would."""
    row, target = ladder.smallest, planner.target
    smallest = rung(row, planner.needed_bytes(row), None)
    own = planner.space.optimizers[0]
    return cannot_fit(smallest, target.name, target.budget_bytes, list(_changes(planner, row)), own)


def _changes(planner: Planner, row: Row) -> Iterator[Change]:
    """What could be written instead, the least change first."""
    length = planner.longest(row.candidate, most=planner.lengths.longest - 1)
    if length is not None:
        shape = replace(planner.lengths.shape(row.candidate.rows), length=length)
        shorter = planner.prediction(row.candidate, replace(shape, target_length=shape.target_length and length))
        yield Change(f"data.max_length: {length}", shorter.allocated + shorter.outside, True)
    smaller = planner.with_8bit(row)
    if smaller is not None:
        yield _change("memory.allow: [8bit]", planner, smaller)
    for other in planner.adapter_rows():
        yield _change(f"adapter: {other.candidate.adapter}", planner, other)


def _change(words: str, planner: Planner, row: Row) -> Change:
    return Change(words, planner.needed_bytes(row) + row.estimate.outside_bytes, row.estimate.fits)


# ---------------------------------------------------------------------- the ladder of `trimtab plan`


@dataclass(frozen=True)
class Survey:
    """What `trimtab plan` found.

    Attributes:
        target: The device and the budget.
        precision: In which it computes.
        optimizer: The recipe's.
        rungs: Every plan that was looked at, the fastest first; LoRA and QLoRA at the end.
        plan: The one that was chosen, as a run would have it.
        why: One sentence about it.
        problem: Where nothing fits: by how much, and what would.
        left_out: Adapters that the ladder does not show, and why.
        limit: What the model itself takes, in tokens.
    """

    target: Target
    precision: str
    optimizer: str
    rungs: tuple[Rung, ...]
    plan: Plan | None
    why: str
    problem: str | None
    limit: int | None
    left_out: Mapping[str, str] = field(default_factory=dict)

    def shown(self) -> list[Rung]:
        """The rungs that are worth a line."""
        return shown(self.rungs)

    def besides(self) -> list[str]:
        """What the chosen plan takes when it does not train, and what the ladder does not show."""
        plan = self.plan
        left_out = [f"Not shown: adapter: {adapter}: {reason}" for adapter, reason in self.left_out.items()]
        if plan is None or plan.predicted_host_bytes is None or plan.predicted_disk_bytes is None:
            return left_out
        words = [
            f"host memory at most {format_bytes(plan.predicted_host_bytes)}",
            f"disk at most {format_bytes(plan.predicted_disk_bytes)}",
        ]
        if plan.predicted_eval_peak_bytes is not None:
            peak = format_bytes(plan.predicted_eval_peak_bytes)
            words.insert(0, f"evaluations of {plan.eval_micro_batch} rows at once need {peak}")
        return ["Besides: " + "; ".join(words) + ".", *left_out]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "device": self.target.name,
            "budget_bytes": self.target.budget_bytes,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "why": self.why or self.problem,
            "note": self.target.note,
            "left_out": dict(self.left_out),
            "plan": None if self.plan is None else self.plan.as_dict(),
            "ladder": [as_dict(one) for one in self.rungs],
        }


@one_plan_at_a_time()
@no_collections()
def survey(
    recipe: Recipe,
    *,
    memory: str | None = None,
    gpu: str | None = None,
    device: str | None = None,
    length: int | None = None,
    max_batch: bool = False,
    longest: bool = False,
    thorough: bool = True,
) -> Survey:
    """Look at the plans that a recipe allows; nothing is loaded but the data, and that only without `length`.

    Args:
        recipe: The recipe.
        memory: The budget, in the place of the recipe's.
        gpu: A known device that is not here.
        device: The device here, such as "cuda:1"; found if left out.
        length: Tokens of every row; no data is read then.
        max_batch: Find the largest batch for each set of levers.
        longest: Find the longest rows for each set of levers, with as few of them at once as possible.
        thorough: Also look at what cannot be chosen.
    """
    budget = memory or recipe.memory.budget
    target = known_target(gpu, budget) if gpu is not None else target_here(device, budget)
    rows = None if length is not None else _Rows(recipe)
    task: StepTask = named_task(recipe) if rows is None else rows.data.task
    lengths: Lengths
    if rows is not None:
        lengths = LengthsOfData(recipe, rows.tokens, task)
    else:
        lengths = OneLength(int(length or 0), has_targets=task.model_kind == "seq2seq-lm")
    planner = Planner(recipe, task, target, lengths, tokenizer=None if rows is None else rows.tokenizer)
    limit = planner.max_positions()
    if length is not None and limit is not None and length > limit:
        raise RecipeError(f"--length {length} is more than the model's {limit} positions", f"--length {limit}")
    ladder = planner.choose(thorough=thorough)
    others = list(planner.adapter_rows()) if thorough else []
    num_steps = recipe.train.max_steps if rows is None else count_steps(recipe, rows.batches(planner.batch_size))[0]
    rungs = tuple(_rungs(planner, ladder, others, num_steps, max_batch, longest))
    optimizer = planner.space.optimizers[0]
    plan = None if ladder.chosen is None else _plan_of(planner, ladder.chosen, rows, num_steps)
    why = "" if plan is None else reason(rungs, target.budget_bytes, optimizer)
    problem = explain_failure(planner, ladder) if plan is None else None
    return Survey(target, planner.precision, optimizer, rungs, plan, why, problem, limit, planner.left_out)


class _Rows:
    """The data of a recipe as the model will see it, read without weights."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.data = build_data(recipe)
        skeleton = build_skeleton(recipe, self.data)
        self.tokenizer = skeleton.tokenizer
        self.tokens = build_tokens(recipe, self.data, skeleton)

    def batches(self, micro_batch: int) -> Any:
        """Which rows come together."""
        return train_batches(self._recipe, self.tokens, micro_batch)


def _rungs(
    planner: Planner, ladder: Ladder, others: list[Row], num_steps: int | None, max_batch: bool, longest: bool
) -> Iterator[Rung]:
    most: dict[Candidate, int | None] = {}
    lengths: dict[Candidate, int | None] = {}
    for row in (*ladder.rows, *others):
        levers = replace(row.candidate, rows=planner.space.rows[-1])  # contexts are longest with fewest rows
        if max_batch and levers not in most:
            most[levers] = planner.most_rows(row.candidate)
        if longest and levers not in lengths:
            lengths[levers] = planner.longest(levers)
        yield replace(
            rung(row, planner.needed_bytes(row), num_steps),
            is_chosen=row is ladder.chosen,
            is_alternative=row in others,
            most_rows=most.get(levers),
            longest=lengths.get(levers),
        )


def _plan_of(planner: Planner, row: Row, rows: _Rows | None, num_steps: int | None) -> Plan:
    recipe, candidate = planner.recipe, row.candidate
    num_parameters, num_trainable = planner.num_parameters()
    batches = None if rows is None else rows.batches(candidate.rows)
    steps = num_steps or 0
    return Plan(
        device=planner.target.name,
        precision=planner.precision,
        batch_size=recipe.train.batch_size,
        micro_batch_size=candidate.rows,
        num_processes=1,
        num_steps=steps,
        steps_per_epoch=0 if batches is None else count_steps(recipe, batches)[1],
        warmup_steps=count_warmup(recipe, steps),
        num_train_rows=0 if rows is None else len(rows.tokens.train),
        num_eval_rows=0 if rows is None or rows.tokens.eval is None else len(rows.tokens.eval),
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        max_length=planner.lengths.longest if rows is None else rows.tokens.max_length,
        padding_share=0.0
        if batches is None or rows is None
        else padding_share(rows.tokens.train.lengths, list(batches)),
        metric=deciding_metric(recipe) or ("" if rows is None else rows.data.task.default_metric),
        optimizer=candidate.optimizer,
        adapter=describe_adapter(recipe),
        gradient_checkpointing=candidate.recomputed,
        loss=candidate.loss,
        kernels=candidate.kernels,
        offload=candidate.offload,
        **vars(_outlook(planner, row)),
    )
