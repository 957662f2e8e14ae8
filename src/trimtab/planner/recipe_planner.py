"""From a recipe to the plans that are possible: candidates, what each takes, and which one is chosen."""

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from trimtab.build.batches import train_batches
from trimtab.build.levers import SMALL_LOGITS_BYTES, choose_optimizer, loads_kernels, spelled
from trimtab.build.model import adapter_settings, add_adapter_of
from trimtab.build.parts import Tokens
from trimtab.data.tokens import TokenDataset
from trimtab.errors import LossError, RecipeError, TraceError, UserError, in_one_line
from trimtab.hardware.extras import has_package
from trimtab.log import unheard
from trimtab.model.freeze import Freezing
from trimtab.model.linear_cross_entropy import logits_bytes
from trimtab.model.load import max_positions
from trimtab.optim.build import QUANTIZED
from trimtab.planner.host import HostPrediction, predict_host
from trimtab.planner.memory import Prediction, beside_library_of, predict
from trimtab.planner.search import Candidate, Estimate, Ladder, Row, Space, largest, search
from trimtab.planner.target import Target
from trimtab.planner.time import step_seconds
from trimtab.planner.trace.recipe_step import BatchShape, Choice, StepTracer
from trimtab.planner.trace.recorder import Op, Trace
from trimtab.planner.trace.shortened_model import stacks_of
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import read_value
from trimtab.techniques.kernels import choose_kernels
from trimtab.units import parse_every

SPARE = 0.02  # of a budget, that a plan leaves
_FEWEST_BLOCKS = 4  # from which on every second one is a choice of its own
_NUM_BATCHES_SEEN = 200  # of an epoch, for the mean length
_LENGTH_STEP = 64  # in which the longest context is sought
_MOST_LENGTH, _MOST_ROWS = 2**20, 2**16


class StepTask(Protocol):
    """What tracing a step has to know of a task."""

    @property
    def name(self) -> str:
        """The word for it in a recipe."""
        ...

    @property
    def model_kind(self) -> str:
        """As `trimtab.data.tasks.base.Task` has it; so are the others."""
        ...

    @property
    def loss_kind(self) -> str: ...  # noqa: D102

    @property
    def shifts_labels(self) -> bool: ...  # noqa: D102

    def head(self) -> dict[str, Any]:
        """What the model's config needs to know."""
        ...


@dataclass(frozen=True)
class NamedTask:
    """A task of which only the name is known: no data is read."""

    name: str
    model_kind: str
    loss_kind: str
    shifts_labels: bool = False
    num_labels: int | None = None

    def head(self) -> dict[str, Any]:
        """The number of labels, where there are any."""
        return {} if self.num_labels is None else {"num_labels": self.num_labels}


_NAMED = {
    "classify": NamedTask("classify", "sequence-classification", "cross-entropy", num_labels=2),
    "regress": NamedTask("regress", "sequence-classification", "mse", num_labels=1),
    "causal-lm": NamedTask("causal-lm", "causal-lm", "token-cross-entropy", shifts_labels=True),
    "chat": NamedTask("chat", "causal-lm", "token-cross-entropy", shifts_labels=True),
    "seq2seq": NamedTask("seq2seq", "seq2seq-lm", "token-cross-entropy"),
    "masked-lm": NamedTask("masked-lm", "masked-lm", "token-cross-entropy"),
}


def named_task(recipe: Recipe) -> NamedTask:
    """The task that a recipe names.

    Raises:
        RecipeError: It names none, and without data none can be guessed.
    """
    if recipe.task is None:
        raise RecipeError("without data the task cannot be guessed", f"task: one of {', '.join(_NAMED)}")
    return _NAMED[recipe.task]


# ---------------------------------------------------------------------- shapes of batches


class Lengths(Protocol):
    """How long the rows of a run are."""

    @property
    def num_rows(self) -> int | None:
        """How many there are; None where no data was read."""
        ...

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        ...

    def shape(self, rows: int) -> BatchShape:
        """The largest micro-batch of so many rows."""
        ...

    def eval_shape(self, rows: int) -> BatchShape | None:
        """The largest batch of an evaluation of so many rows; None where nothing is held out."""
        ...

    def share(self, rows: int) -> float:
        """The tokens, padding included, that a mean micro-batch has of the largest one's."""
        ...

    def tokens(self, batch_size: int) -> float:
        """Tokens of an optimizer step, without padding."""
        ...


@dataclass(frozen=True)
class OneLength:
    """Every row has the same length."""

    longest: int
    has_targets: bool = False
    num_labels: int = 1
    num_rows: int | None = None

    def shape(self, rows: int) -> BatchShape:
        """All of one length: nothing is padded."""
        return BatchShape(rows, self.longest, target_length=self.longest if self.has_targets else None)

    def eval_shape(self, rows: int) -> BatchShape | None:
        """Held-out rows are as long as the others."""
        return self.shape(rows)

    def share(self, rows: int) -> float:
        """All are alike."""
        return 1.0

    def tokens(self, batch_size: int) -> float:
        """Rows times length."""
        return float(batch_size * self.longest)


class LengthsOfData:
    """The lengths of the rows that were read, in the batches in which they come."""

    def __init__(self, recipe: Recipe, tokens: Tokens, task: StepTask, num_processes: int = 1) -> None:
        self._recipe, self._tokens, self._num_processes = recipe, tokens, num_processes
        self._lengths = torch.tensor(tokens.train.lengths)
        self._shares: dict[int, float] = {}
        self.num_rows: int | None = len(tokens.train)
        self.longest = int(self._lengths.max())
        self._has_targets = task.model_kind == "seq2seq-lm"
        self._num_labels = int(task.head().get("num_labels") or 1)

    def shape(self, rows: int) -> BatchShape:
        """As long as the longest row; padded wherever some micro-batch may be."""
        return self._largest(self._tokens.train, rows)

    def eval_shape(self, rows: int) -> BatchShape | None:
        """The same of held-out rows; of those that are trained on, where a few batches are to be learnt by heart."""
        held_out = self._tokens.train if self._recipe.limits.overfit_batches else self._tokens.eval
        return None if held_out is None or not len(held_out) else self._largest(held_out, min(rows, len(held_out)))

    def _largest(self, tokens: TokenDataset, rows: int) -> BatchShape:
        longest = max(tokens.lengths)
        is_padded = rows > 1 and any(length != longest for length in tokens.lengths)
        at = tokens.offsets.get("labels") if self._has_targets else None
        target = max(end - start for start, end in zip(at, at[1:], strict=False)) if at else None
        return BatchShape(rows, longest, is_padded, target, self._num_labels)

    def share(self, rows: int) -> float:
        """From the first batches of the first epoch."""
        if rows not in self._shares:
            batches = train_batches(self._recipe, self._tokens, rows * self._num_processes)
            windows = batches.windows()[:_NUM_BATCHES_SEEN]
            positions = sum(
                len(micro) * int(self._lengths[micro].max()) for window in windows for micro in window if micro
            )
            per_step = math.ceil(min(self._recipe.train.batch_size, len(self._lengths)) / (rows * self._num_processes))
            largest_step = per_step * rows * self._num_processes * self.longest
            self._shares[rows] = positions / max(1, len(windows) * largest_step)
        return self._shares[rows]

    def tokens(self, batch_size: int) -> float:
        """The mean of all rows."""
        return float(self._lengths.double().mean()) * min(batch_size, len(self._lengths))


# ---------------------------------------------------------------------- the planner of a recipe


class Planner:
    """Predicts the steps that a recipe allows on a device, and searches among them.

    Args:
        recipe: What it fixes is kept; what it leaves to `auto` is searched.
        task: What the step computes.
        target: The device and its budget.
        lengths: How long rows are.
        num_processes: Over which a batch is spread.
        has_chunks: Whether the loss can be computed in chunks, as far as the task allows.
        is_here: The run itself follows on this machine: only what is installed is a choice.
        tokenizer: The run's, which the model is fitted to.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: StepTask,
        target: Target,
        lengths: Lengths,
        *,
        num_processes: int = 1,
        has_chunks: bool = True,
        is_here: bool = False,
        tokenizer: Any = None,
    ) -> None:
        self.recipe, self.task, self.target, self.lengths = recipe, task, target, lengths
        self._num_processes, self._has_chunks, self._is_here = num_processes, has_chunks, is_here
        self._tokenizer = tokenizer
        self._tracers: dict[str, StepTracer] = {}
        self._predictions: dict[tuple[Candidate, BatchShape, int], Prediction] = {}
        self.precision = target.precision(recipe.train.precision)
        self.left_out: dict[str, str] = {}  # adapters that the ladder cannot show, and why

    @cached_property
    def batch_size(self) -> int:
        """Rows of a step on this device."""
        known = self.lengths.num_rows
        total = self.recipe.train.batch_size if known is None else min(self.recipe.train.batch_size, known)
        return math.ceil(total / self._num_processes)

    # ------------------------------------------------------------------ what may be chosen

    @cached_property
    def space(self) -> Space:
        """The candidates of the recipe's own method."""
        return self._space(self._own_adapter)

    @property
    def _own_adapter(self) -> str:
        adapter = adapter_settings(self.recipe)
        return "none" if adapter is None else adapter.kind

    def _space(self, adapter: str) -> Space:
        memory, recipe = self.recipe.memory, self._variant(adapter)
        rows = tuple(_halved(self.batch_size)) if memory.micro_batch == "auto" else (int(memory.micro_batch),)
        skeleton = self._tracer(adapter).skeleton()
        optimizer = choose_optimizer(recipe, self.target.torch_device)
        return Space(
            rows,
            self._possible_losses(skeleton, rows[0]),
            self._optimizers(optimizer),
            self._offloads(adapter, skeleton),
            self._recomputations(skeleton),
            self._kernels(skeleton),
            adapter,
        )

    def _possible_losses(self, skeleton: Any, rows: int) -> tuple[str, ...]:
        wanted = self.recipe.memory.loss
        if self.task.loss_kind != "token-cross-entropy" or not self._has_chunks:
            return ("plain",)
        if wanted != "auto":
            return (wanted,)
        head = skeleton.get_output_embeddings()
        length = self.lengths.shape(rows).target_length or self.lengths.longest
        is_small = head is None or logits_bytes(rows, length, len(head.weight)) < SMALL_LOGITS_BYTES
        return ("plain",) if is_small else ("plain", "chunked")

    def _optimizers(self, optimizer: str) -> tuple[str, ...]:
        small = f"{optimizer}8bit"
        is_installed = has_package("bitsandbytes") or not self._is_here
        allowed = "8bit" in self.recipe.memory.allow and small in QUANTIZED and is_installed
        return (optimizer, small) if allowed else (optimizer,)

    def _offloads(self, adapter: str, skeleton: Any) -> tuple[str, ...]:
        wanted = self.recipe.memory.offload
        if wanted != "auto":
            return (wanted,)
        settings = adapter_settings(self._variant(adapter))
        head = skeleton.get_output_embeddings() if hasattr(skeleton, "get_output_embeddings") else None
        is_tied = head is not None and getattr(head, "weight", None) is skeleton.get_input_embeddings().weight
        possible = settings is not None and not settings.trains and not is_tied and not self.target.is_cpu
        return ("none", "embeddings") if possible else ("none",)

    def _recomputations(self, skeleton: Any) -> tuple[str, ...]:
        wanted = self.recipe.memory.gradient_checkpointing
        if wanted != "auto":
            return (spelled(wanted),)
        num_blocks = sum(len(blocks) for _, blocks in stacks_of(skeleton))
        if not num_blocks:
            return ("none",)
        return ("none", spelled({"every": 2}), "all") if num_blocks >= _FEWEST_BLOCKS else ("none", "all")

    def _kernels(self, skeleton: Any) -> str:
        wanted = self.recipe.memory.kernels
        if wanted != "auto" and not self._is_here:
            return wanted  # for a device elsewhere nothing has to be installed
        half = None if self.precision in ("fp32", "tf32") else torch.bfloat16
        return choose_kernels(wanted, skeleton, self.target.torch_device, half)

    def _variant(self, adapter: str) -> Recipe:
        """The recipe with another method: one that the user may choose, and the planner never does."""
        if adapter == self._own_adapter:
            return self.recipe
        train = self.recipe.train.model_copy(update={"freeze": {}, "optimizer": "auto"})
        return self.recipe.model_copy(update={"adapter": adapter, "train": train})

    # ------------------------------------------------------------------ what a candidate takes

    def _tracer(self, adapter: str) -> StepTracer:
        if adapter not in self._tracers:
            task: Any = self.task
            self._tracers[adapter] = StepTracer(self._variant(adapter), task, self.target.gpu, self._tokenizer)
        return self._tracers[adapter]

    def prediction(
        self, candidate: Candidate, shape: BatchShape | None = None, batch_size: int | None = None
    ) -> Prediction:
        """The memory of a candidate's step, and what was traced.

        Two micro-batches stand for more: from the second on, gradients are there already.

        Args:
            candidate: What is asked about.
            shape: Of a micro-batch; the largest of the data if left out.
            batch_size: Rows of the step; the recipe's if left out.
        """
        shape = shape or self.lengths.shape(candidate.rows)
        num_micro = min(2, math.ceil((batch_size or self.batch_size) / candidate.rows))
        key = candidate, shape, num_micro
        if key not in self._predictions:
            with unheard():
                trace = self._tracer(candidate.adapter).trace(self._choice(candidate), shape, num_micro)
            self._predictions[key] = self._predicted(candidate, trace)
        return self._predictions[key]

    def evaluation(self, candidate: Candidate) -> tuple[int, Prediction] | None:
        """The most held-out rows at once that fit beside what a candidate keeps, and what they take.

        Not more than the recipe says, and one where nothing fits; None where nothing is held out.
        """
        known = self.recipe.evaluate.batch_size or max(candidate.rows * self._num_processes, 8)
        rows, found = math.ceil(known / self._num_processes), None
        while found is None or (rows > 1 and not self.target.fits(found, SPARE)):
            rows = rows if found is None else math.ceil(rows / 2)
            shape = self.lengths.eval_shape(rows)
            if shape is None:
                return None
            rows = shape.rows
            with unheard():
                trace = self._tracer(candidate.adapter).trace_evaluation(self._choice(candidate), shape)
            found = self._predicted(candidate, beside_library_of(trace, self.prediction(candidate).trace))
        return rows, found

    def _choice(self, candidate: Candidate) -> Choice:
        is_mixed = candidate.adapter in ("lora", "qlora") and self.precision == "bf16-pure"
        return Choice(
            "bf16" if is_mixed else self.precision,
            candidate.optimizer,
            candidate.loss,
            candidate.kernels,
            read_value(candidate.recomputed),
            candidate.offload,
        )

    def _predicted(self, candidate: Candidate, trace: Trace) -> Prediction:
        has_kernels = loads_kernels(candidate.kernels, candidate.optimizer, candidate.adapter)
        return self.target.as_here(predict(trace, with_kernels=has_kernels))

    def host(self, candidate: Candidate) -> HostPrediction:
        """What a candidate takes of the host's memory and of the disk, at most."""
        skeleton = self._tracer(candidate.adapter).skeleton()
        loaded = sum(weight.nbytes for weight in skeleton.state_dict().values())
        is_half = candidate.adapter != "none" or self.precision == "bf16-pure"
        embeddings = skeleton.get_input_embeddings().weight.nbytes if candidate.offload == "embeddings" else 0
        return predict_host(
            self.prediction(candidate).trace,
            loaded_bytes=loaded // 2 if is_half else loaded,
            is_streamed=candidate.adapter == "qlora",
            is_paged=candidate.optimizer.startswith("paged"),
            embedding_bytes=embeddings // 2 if is_half else embeddings,
            keeps=0 if self.recipe.checkpoint.every is None else self.recipe.checkpoint.keep,
            is_adapter=candidate.adapter != "none",
        )

    def estimate(self, candidate: Candidate) -> Estimate | None:
        """What a candidate takes; None where the model does not allow it."""
        try:
            found = self.prediction(candidate)
        except (LossError, RecipeError, TraceError):
            if candidate.loss == "plain":
                raise
            return None
        seconds = self._step_seconds(found.trace, candidate.rows)
        tokens = self.lengths.tokens(self.recipe.train.batch_size)
        return Estimate(
            self.target.fits(found, SPARE), found.allocated, found.outside, found.parts, seconds, tokens / seconds
        )

    def needed_bytes(self, row: Row) -> int:
        """The smallest limit of the allocator under which a row runs."""
        return self.limit_of(self.prediction(row.candidate))

    def limit_of(self, prediction: Prediction) -> int:
        """The smallest limit under which something predicted runs; on a CPU no allocator of blocks stands between."""
        return prediction.allocated if self.target.is_cpu else prediction.needed

    def _step_seconds(self, trace: Trace, rows: int) -> float:
        num_micro, share = math.ceil(self.batch_size / rows), self.lengths.share(rows)
        device, tf32 = self.target.device, self.precision == "tf32"
        before, again, after = _split(trace.ops)
        before, again = _scaled(before, share), _scaled(again, share)
        if num_micro == 1 or not again:
            return step_seconds([*before, *again, *after], device, tf32=tf32).seconds
        # the first micro-batches fill the queue of the device; then each takes as long as the one before it
        once, twice = (step_seconds([*before, *again * times, *after], device, tf32=tf32).seconds for times in (1, 2))
        return once + (num_micro - 2) * (twice - once)

    # ------------------------------------------------------------------ questions

    def choose(self, *, thorough: bool = False) -> Ladder:
        """The fastest candidate that fits, and what else was looked at."""
        return search(self.space, self.estimate, room=self.target.room(SPARE), thorough=thorough)

    def adapter_rows(self) -> Iterator[Row]:
        """What LoRA and QLoRA would need, the fastest of each that fits; nothing where an adapter trains already."""
        if self._own_adapter != "none" or self.target.is_cpu:
            return
        for adapter in ("lora", "qlora"):
            try:
                space = self._space(adapter)
                # enough to see what the method needs
                ends = tuple(dict.fromkeys((space.recomputed[0], space.recomputed[-1])))
                space = replace(space, losses=space.losses[-1:], offloads=space.offloads[:1], recomputed=ends)
                found = search(space, self.estimate, room=self.target.room(SPARE))
            except Exception as error:  # what a user may choose instead is no reason to say nothing
                self.left_out[adapter] = error.problem if isinstance(error, UserError) else in_one_line(error)
                continue
            if found.rows:
                yield found.chosen or found.smallest

    def most_rows(self, levers: Candidate) -> int | None:
        """The largest batch that fits in one piece with these levers."""

        def measure(rows: int) -> tuple[int, bool]:
            found = self.prediction(replace(levers, rows=rows), self.lengths.shape(rows), batch_size=rows)
            return found.allocated + found.outside, self.target.fits(found, SPARE)

        return largest(measure, self.target.room(SPARE), first=levers.rows, most=_MOST_ROWS)

    def longest(self, levers: Candidate, *, most: int | None = None) -> int | None:
        """The longest rows, in tokens, that fit with these levers; at most as long as the model takes."""
        limit = self.max_positions() or _MOST_LENGTH
        limit = limit if most is None else min(most, limit)
        shape = self.lengths.shape(levers.rows)

        def measure(length: int) -> tuple[int, bool]:
            target = None if shape.target_length is None else length
            found = self.prediction(levers, replace(shape, length=length, target_length=target))
            return found.allocated + found.outside, self.target.fits(found, SPARE)

        return largest(measure, self.target.room(SPARE), first=shape.length, most=limit, step=min(_LENGTH_STEP, limit))

    def max_positions(self) -> int | None:
        """The longest rows that the model itself takes."""
        return max_positions(self._tracer(self._own_adapter).skeleton())

    def with_8bit(self, row: Row) -> Row | None:
        """A row with its optimizer's state in 8 bits, where there is such an optimizer."""
        name = f"{row.candidate.optimizer}8bit"
        if name not in QUANTIZED:
            return None
        candidate = replace(row.candidate, optimizer=name)
        estimate = self.estimate(candidate)
        return None if estimate is None else Row(candidate, estimate)

    def num_parameters(self) -> tuple[int, int]:
        """All of them, and those that train."""
        model = copy.deepcopy(self._tracer(self._own_adapter).skeleton())
        adapter = adapter_settings(self.recipe)
        with unheard(), torch.device("meta"):
            if adapter is not None:
                model.requires_grad_(False)
                add_adapter_of(adapter, model)
            freeze = self.recipe.train.freeze.items()
            Freezing(model, {name: None if word == "always" else parse_every(word) for name, word in freeze}).apply()
        parameters = list(model.parameters())
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _halved(batch_size: int) -> Iterator[int]:
    rows = batch_size
    while rows > 1:
        yield rows
        rows = math.ceil(rows / 2)
    yield 1


def _split(ops: Iterable[Op]) -> tuple[list[Op], list[Op], list[Op]]:
    """The first micro-batch of a step, the second one if there is one, and what follows."""
    everything = list(ops)
    in_backward = [op.stage in ("backward", "recompute") for op in everything]
    last = max((at for at, is_in in enumerate(in_backward) if is_in), default=-1)
    begun = next((at for at, is_in in enumerate(in_backward) if is_in), 0)
    second = next((at for at in range(begun, last) if everything[at].stage == "forward"), last + 1)
    return everything[:second], everything[second : last + 1], everything[last + 1 :]


def _scaled(ops: list[Op], share: float) -> list[Op]:
    """Operations on a micro-batch with fewer tokens: shorter rows, in which attention saves twice."""
    if share == 1.0:
        return ops
    known: dict[int, Op] = {}  # blocks that repeat share their operations
    for op in ops:
        if id(op) not in known:
            flops = op.flops * (share**2 if "attention" in op.name else share)
            known[id(op)] = op._replace(flops=int(flops), moved=int(op.moved * share))
    return [known[id(op)] for op in ops]
