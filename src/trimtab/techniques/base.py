"""The protocol of techniques, and the specification of a step: which technique is used with which value.

A technique is one way to make a training step need less memory or less time, such as gradient checkpointing or LoRA.
Everything about it is in one file of this package: its values, the rule for `auto`, conflicts, what it does to the
model, the loss or the optimizer, how a trace on `meta` sees it, and its descriptions. `trimtab.techniques.TECHNIQUES`
lists them. The search, the tracer, the ladder, plan.json, the resume rules and the tracking tags iterate over that
list.

Values are text as written in a recipe ("none", "all", "{every: 2}"), so that they can be compared, hashed and stored.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import torch

from trimtab.data.batching import Batching
from trimtab.model.losses import Loss
from trimtab.model.quantization import Quantization
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import as_yaml

Effect = Literal["exact", "rounding", "method"]
# Names of traced operations that use the link between host and device: copies, and waits for them.
TO_HOST, FROM_HOST = "host_link.out", "host_link.in"
WEIGHTS_TO_HOST, WEIGHTS_FROM_HOST = "host_link.weights_out", "host_link.weights_in"  # independent of the batch size
WAIT_TO_HOST, WAIT_FROM_HOST = "host_link.wait_out", "host_link.wait_in"
# the next copy from the host starts when at most this many bytes of copies to the host are left
IN_AFTER_OUT = "host_link.in_after_out"
OnResume = Literal["free", "from here on", "refused"]


class Phase(IntEnum):
    """The order in which techniques change a model."""

    ADAPTERS = 0  # right after loading, before parameters are frozen
    PLACEMENT = 1  # before the model moves to its device
    KERNELS = 2
    COMPILATION = 3
    RECOMPUTATION = 4  # after compilation: backward calls the compiled block again
    SHARDING = 5


# ---------------------------------------------------------------------- the specification of a step


@dataclass(frozen=True)
class StepSpec:
    """How an optimizer step is computed. It can be hashed, and written to JSON.

    Attributes:
        micro_batch: Rows that one process computes in one forward.
        precision: As `train.precision`, but never "auto".
        values: Pairs of a technique's key and its value, sorted by key.
    """

    micro_batch: int
    precision: str
    values: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, micro_batch: int, precision: str, values: Mapping[str, str]) -> "StepSpec":
        """Build a specification from a mapping of values."""
        return cls(micro_batch, precision, tuple(sorted(values.items())))

    def __getitem__(self, key: str) -> str:
        return self._by_key[key]

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    @cached_property
    def _by_key(self) -> dict[str, str]:
        return dict(self.values)

    def having(self, values: Mapping[str, str]) -> "StepSpec":
        """Return a copy with other values for some techniques."""
        return StepSpec.of(self.micro_batch, self.precision, {**self._by_key, **values})

    def with_micro_batch(self, micro_batch: int) -> "StepSpec":
        """Return a copy with another micro-batch size."""
        return replace(self, micro_batch=micro_batch)


# ---------------------------------------------------------------------- inputs of rules


@dataclass(frozen=True)
class Accelerator:
    """The properties of a device that rules depend on.

    Attributes:
        type: "cuda" or "cpu", as `torch.device.type`.
        capability: Compute capability of an NVIDIA GPU.
        num_multiprocessors: Number of multiprocessors; determines the workspaces of some kernels.
        has_flash: Whether torch's flash attention kernel runs on it in half precision.
        is_here: Whether it is in this machine; techniques then need their packages installed.
    """

    type: str
    capability: tuple[int, int] | None = None
    num_multiprocessors: int = 132
    has_flash: bool = True
    is_here: bool = True

    @property
    def is_cuda(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self.type == "cuda"

    @classmethod
    def of(cls, device: torch.device) -> "Accelerator":
        """Describe a device of this machine."""
        if device.type != "cuda":
            return cls(device.type)
        properties = torch.cuda.get_device_properties(device)
        return cls("cuda", (properties.major, properties.minor), properties.multi_processor_count)


@dataclass(frozen=True)
class Case:
    """The input of the techniques' rules.

    Attributes:
        model: The model, with or without weights.
        accelerator: The device.
        precision: As in `StepSpec`.
        recipe: The recipe; None for a user's own loop, where every setting counts as "auto".
        allow: Techniques that may change results slightly, as in `memory.allow`.
        loss_kind: As in `trimtab.data.tasks.base.Task`; "" if the loss is unknown.
        has_own_loss: Whether the user passed a loss function.
        model_kind: As in `trimtab.data.tasks.base.Task`; "" if unknown.
        num_rows: The largest possible micro-batch size.
        num_targets: Positions with a target in the longest row.
        num_processes: Processes that share a batch.
        num_steps: Optimizer steps of the run; None if unknown.
        count_shapes: Counts the distinct shapes of the micro-batches of an epoch; None if they are unknown.
        find_head_problem: Tests on real weights whether the loss can be computed without all logits: returns None if it
            can, else the reason. None without weights.
        optimizer: The optimizer of a user's own loop.
    """

    model: Any
    accelerator: Accelerator
    precision: str
    recipe: Recipe | None = None
    allow: frozenset[str] = frozenset()
    loss_kind: str = ""
    has_own_loss: bool = False
    model_kind: str = ""
    num_rows: int = 1
    num_targets: int = 1
    num_processes: int = 1
    num_steps: int | None = None
    count_shapes: Callable[[], int] | None = None
    find_head_problem: Callable[[str], str | None] | None = None
    optimizer: torch.optim.Optimizer | None = None

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The dtype of matrix products; None is fp32."""
        return compute_dtype(self.precision)


def compute_dtype(precision: str) -> torch.dtype | None:
    """The dtype of matrix products in a precision; None is fp32."""
    return {"bf16": torch.bfloat16, "bf16-pure": torch.bfloat16, "fp16": torch.float16}.get(precision)


@dataclass(frozen=True)
class Site:
    """The context in which techniques change a model: before a run, or in a trace on `meta`.

    Attributes:
        device: Where the model will compute; "meta" in a trace.
        accelerator: The device, or the simulated one in a trace.
        compute_dtype: The dtype of matrix products; None is fp32.
        recipe: The recipe, for settings besides the value itself; None for a user's own loop.
        model_kind: As in `trimtab.data.tasks.base.Task`; "" if unknown.
        unfrozen_later: Parameters that are frozen now and become trainable later.
        kept_blocks: Numbers of the blocks in a shortened model of a trace; None if the model is complete.
    """

    device: torch.device
    accelerator: Accelerator
    compute_dtype: torch.dtype | None = None
    recipe: Recipe | None = None
    model_kind: str = ""
    unfrozen_later: Sequence[torch.nn.Parameter] = ()
    kept_blocks: tuple[int, ...] | None = None

    @property
    def is_traced(self) -> bool:
        """Whether tensors have no data."""
        return self.device.type == "meta"


@dataclass(frozen=True)
class LoadOptions:
    """How the weights of a model are loaded.

    Attributes:
        dtype: The dtype of the weights.
        quantization: How the base is quantized, as in `trimtab.model.load.load_model`.
    """

    dtype: torch.dtype
    quantization: Quantization | None = None


@dataclass(frozen=True)
class LossRequest:
    """The arguments of `trimtab.model.losses.build_loss`."""

    kind: str
    shifts_labels: bool = False
    label_smoothing: float = 0.0
    counts_hits: bool = False
    class_weights: tuple[float, ...] | None = None


@dataclass(frozen=True)
class HostUse:
    """The changes of a technique to the use of host memory and disk.

    Attributes:
        kept_bytes: Weights that stay in host memory.
        pages_state: Whether optimizer state is in memory that the driver pages to the host.
        state_ratio: Bytes of optimizer state per byte of trainable weights.
        updates_on_host: Whether weights, gradients and optimizer state are in host memory.
        streams_weights: Whether weights move to the device one by one while loading.
        exports_trainable: Whether only trainable parameters are exported.
    """

    kept_bytes: int = 0
    pages_state: bool = False
    state_ratio: float = 0.0
    updates_on_host: bool = False
    streams_weights: bool = False
    exports_trainable: bool = False


UPDATE_CALL = "trimtab.update"  # the operation that represents the Python code that updates a parameter


class TraceRecorder(Protocol):
    """The part of `trimtab.planner.trace.recorder.Recorder` that techniques use."""

    ops: list[Any]

    def note(self, name: str, tensors: list[torch.Tensor]) -> None:
        """Count an operation that reads or writes these tensors."""

    def on_host(self) -> AbstractContextManager[None]:
        """A context in which new tensors take no device memory."""

    def born_as(self, part: str) -> AbstractContextManager[None]:
        """A context in which new tensors belong to this part of the anatomy."""

    def adopt(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Record existing tensors as allocated now."""

    def transfer(self, name: str, num_bytes: int, tensors: Iterable[torch.Tensor] = ()) -> None:
        """Count a copy of tensors between host and device, or a wait until at most `num_bytes` are in transit."""

    def adopt_on_host(self, tensors: list[torch.Tensor], parameters: Iterable[torch.Tensor]) -> None:
        """Record existing tensors of parameters as host memory, which is not counted."""

    def copy_weights(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Count a copy of weights or gradients between host and device, which overlaps with computation."""

    def updating(self) -> AbstractContextManager[None]:
        """A context in which the optimizer runs inside backward."""

    def adopt_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record the tensors in `.grad` of the parameters as gradients."""


@dataclass(frozen=True)
class Trial:
    """A micro-batch of a given size that can run before the first step.

    Attributes:
        shape: The shape of its inputs.
        share: The share of an epoch's micro-batches that have this size.
        run: Computes loss and gradients, and undoes all changes.
    """

    shape: tuple[int, ...]
    share: float
    run: Callable[[], None]


# Builds the optimizer of parameter groups that are on a device.
BuildOptimizer = Callable[[list[dict[str, Any]], torch.device], torch.optim.Optimizer]
Patch = tuple[Any, str, Callable[..., Any]]  # an owner, the name of a function in it, and its replacement


@dataclass(frozen=True)
class Suggestion:
    """A setting that the user could write to make a step fit, and the resulting specification."""

    words: str
    spec: StepSpec


# ---------------------------------------------------------------------- a technique


class Technique:
    """Base class of techniques: every method does nothing, and each technique overrides those that it needs.

    Attributes:
        key: Its name in specifications, plan.json and the ladder.
        setting: Its key in a recipe, with dots.
        effect: "exact" changes only the order of floating-point operations; "rounding" changes results slightly and
            must be allowed by the user; "method" trains something else and is never chosen by a plan.
        off: The value that does nothing; None if some value is always in use.
        phase: When `change_model` is called.
        changes_model_when_off: Whether `change_model` is also called for `off`, because a model may already use the
            technique.
        is_slower_with_each_value: Whether each value of `values` takes at least as much time and at most as much memory
            as the one before it. The search may then skip values after one that fits.
        is_decided_first: Whether its values are compared once, for the largest micro-batch, and only the best one is
            searched further: the fastest value there is the fastest in all plans.
        last_resorts: Values that are searched only if nothing fits without them; None means all except the first.
        shrinks_weights: Whether later values need less device memory for weights.
        reaches_far: Whether the computation of a block may depend on more than the two blocks before and after it,
            because copies start early. Traces then keep more blocks.
        may_fail_in_trace: Whether only tracing a step can show that a model does not support it.
        needs_prediction: Whether `auto` depends on predictions, so that planning is worth its time.
        advice: The value to suggest if memory ran out and nothing was predicted.
        before: The value that versions without the technique effectively used.
        is_kept_on_resume: Whether a resumed run keeps its value even if nothing is predicted, because another value
            rounds differently.
        study: A comparison for `trimtab compare --study`: its name, and the values as written in a recipe; a value with
            a different display name is a pair (name, value).
    """

    key: ClassVar[str]
    setting: ClassVar[str]
    effect: ClassVar[Effect] = "exact"
    off: ClassVar[str | None] = "none"
    phase: ClassVar[Phase] = Phase.KERNELS
    changes_model_when_off: ClassVar[bool] = False
    is_slower_with_each_value: ClassVar[bool] = False
    is_decided_first: ClassVar[bool] = False
    last_resorts: ClassVar[tuple[str, ...] | None] = ()
    shrinks_weights: ClassVar[bool] = False
    reaches_far: ClassVar[bool] = False
    may_fail_in_trace: ClassVar[bool] = False
    needs_prediction: ClassVar[bool] = False
    advice: ClassVar[str | None] = None
    before: ClassVar[str | None] = None
    is_kept_on_resume: ClassVar[bool] = False
    study: ClassVar[tuple[str, tuple[Any, ...]] | None] = None

    # ------------------------------------------------------------------ which values

    def asked(self, recipe: Recipe | None) -> Any:
        """The value in a recipe; "auto" without a recipe."""
        if recipe is None:
            return "auto"
        found: Any = recipe
        for name in self.setting.split("."):
            found = getattr(found, name)
        return found

    def values(self, case: Case) -> tuple[str, ...]:
        """The values that a plan may choose from; only the recipe's value if it sets one.

        Raises:
            RecipeError: The recipe's value is not possible.
        """
        return (self.off or "",)

    def is_open(self, recipe: Recipe | None) -> bool:
        """Whether a recipe leaves the value at `auto`."""
        return bool(self.asked(recipe) == "auto")

    def without_plan(self, case: Case) -> str:
        """The value if nothing is predicted."""
        return self.values(case)[0]

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """The reason why a specification is not possible; None if it is."""
        return None

    def can_keep(self, value: str, case: Case) -> bool:
        """Whether a resumed run can keep a value that `auto` chose, perhaps on another machine."""
        return True

    def suggest(self, spec: StepSpec, case: Case) -> Iterator[Suggestion]:
        """Settings to suggest to the user if nothing fits."""
        return iter(())

    def precision(self, value: str, precision: str) -> str:
        """The precision that a step computes in with this value."""
        return precision

    def in_recipe(self, recipe: Recipe, value: str) -> Recipe:
        """Return the recipe with another value."""
        section, _, name = self.setting.rpartition(".")
        if not section:
            return recipe.model_copy(update={name: value})
        changed = getattr(recipe, section).model_copy(update={name: value})
        return recipe.model_copy(update={section: changed})

    # ------------------------------------------------------------------ what it does

    def load(self, value: str, options: LoadOptions, half: torch.dtype) -> LoadOptions:
        """How weights are loaded; `half` is the dtype of matrix products."""
        return options

    def loads_on_host(self, recipe: Recipe, *, is_too_large: bool) -> bool:
        """Whether weights are loaded in host memory, because the technique reads them there.

        Args:
            recipe: The recipe.
            is_too_large: Whether loading on the device has run out of memory.
        """
        return False

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Change a model in place; called in the order of phases, for `off` only with `changes_model_when_off`."""

    def change_loss(self, loss: Loss, value: str, request: LossRequest) -> Loss:
        """The loss to use instead of `loss`."""
        return loss

    def change_batching(self, batching: Batching, value: str) -> Batching:
        """How rows are batched, for training and for evaluation."""
        return batching

    def wrap_step(self, compute_gradients: Callable[..., Any], value: str) -> Callable[..., Any]:
        """The function to use instead of `trimtab.training.step.window_gradients`."""
        return compute_gradients

    def warm_up(self, model: torch.nn.Module, value: str, find_trials: Callable[[], Sequence[Trial]]) -> None:
        """Prepare for every micro-batch size before the first step.

        Args:
            model: The model, in training mode.
            value: The value in use.
            find_trials: Returns one micro-batch of every size, largest first; needs a pass over the epoch's rows.
        """

    def state(self, model: torch.nn.Module, value: str) -> Any:
        """An object with `state_dict` and `load_state_dict` to save in checkpoints; None if there is no state."""
        return None

    def change_optimizer(
        self, optimizer: torch.optim.Optimizer, value: str, groups: list[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """The optimizer to use instead of the one in a user's own loop, for these parameter groups."""
        return optimizer

    def wrap_build(self, build: BuildOptimizer, spec: StepSpec, model: torch.nn.Module) -> BuildOptimizer:
        """The function to use instead of the one that builds a recipe's optimizer, for a prepared model."""
        return build

    # ------------------------------------------------------------------ how it is traced

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Functions that need data, with replacements that allocate the same memory and cost the same time."""
        return iter(())

    def block_mark(self, value: str, num_blocks: int, recipe: Recipe | None) -> Callable[[int], Any] | None:
        """A function from the number of a block to a value; blocks with different values are traced separately.

        None if the technique treats all blocks the same.
        """
        return None

    def names_blocks(self, recipe: Recipe | None) -> bool:
        """Whether settings name single blocks, so that a trace must contain every block."""
        return False

    def tries_loss_first(self, value: str) -> bool:
        """Whether the loss runs the model once before the first step."""
        return False

    def loads_kernels(self, value: str) -> bool:
        """Whether kernels of Triton or bitsandbytes are loaded, which take device memory outside the allocator."""
        return False

    def captures(self, value: str) -> bool:
        """Whether forward and backward of micro-batches are replayed from CUDA graphs."""
        return False

    def start_seconds(self, value: str, case: Case) -> float:
        """Seconds that a run needs before its first step, for example to compile; the search includes them."""
        return 0.0

    def host_use(self, value: str, model: Any, weight_bytes: int) -> HostUse:
        """Use of host memory and disk; `weight_bytes` is the size of one loaded weight."""
        return HostUse()

    # ------------------------------------------------------------------ descriptions and files of a run

    def plain_loop(self, value: str) -> dict[str, Any] | None:
        """Arguments of `planner.trace.plain_step.trace_plain_model`; None if a plain loop cannot use the value."""
        return {} if value in (self.off, self.before) else None

    def shares(self, values: Sequence[str], case: Case) -> tuple[tuple[str, float], ...]:
        """Each value with its share of a model's blocks; empty if memory is not proportional to that share."""
        return ()

    def describe(self, value: str) -> str:
        """A short description of the value, for the ladder and the log."""
        return f"{self.key} {value}"

    def plan_text(self, value: str, recipe: Recipe | None) -> str:
        """The value in plan.json."""
        return value

    def value_in(self, text: str) -> str:
        """The value that `plan_text` wrote."""
        return text

    def on_resume(self, old: Any, new: Any) -> OnResume:
        """Whether a resumed run may change the value in its recipe."""
        return "free"


def as_text(value: Any) -> str:
    """A recipe value as text."""
    return value if isinstance(value, str) else as_yaml(value)


@dataclass(frozen=True)
class Axis:
    """The values of one technique among which a plan chooses.

    Attributes:
        technique: The technique.
        values: The values.
        shares: As `Technique.shares`.
    """

    technique: Technique = field(repr=False)
    values: tuple[str, ...]
    shares: tuple[tuple[str, float], ...] = ()

    def position(self, value: str) -> float:
        """The position of a value between the first (0) and the last (1)."""
        known = dict(self.shares)
        return known[value] if known else self.values.index(value) / (len(self.values) - 1)

    @property
    def middle(self) -> str:
        """The value nearest to the middle."""
        return min(self.values, key=lambda value: abs(self.position(value) - 0.5))
