"""Trace a step of a user's own loop on a `meta` copy of the model, for `trimtab.planner.own_loop`."""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from trimtab.model.blocks import stacks_of
from trimtab.model.forward import logits_of
from trimtab.model.own_checkpointing import checkpoints_itself
from trimtab.planner.largest_batch import LargestBatch, NoBatch
from trimtab.planner.target import Target
from trimtab.planner.trace.plain_step import Loop, trace_loop
from trimtab.planner.trace.recipe_step import engine_to_trace
from trimtab.planner.trace.recorder import Recorder, Trace
from trimtab.planner.trace.shortened_model import Shortened
from trimtab.techniques.apply import block_marker, change_model, change_optimizer
from trimtab.techniques.base import Site, StepSpec

# the names of similarities in CLIP and related models: logits_per_image, logits_per_text
_COMPARES_ROWS = "logits_per_"


class OwnStep:
    """Trace steps of a typical loop: `outputs = model(**batch)`, backward, step, zero_grad.

    The outputs are kept until the next forward has returned, like a variable in a loop.

    Args:
        model: A transformers model; it is not changed.
        optimizer: Its optimizer; it is not changed.
        num_micro: Micro-batches per optimizer step.
        target: The device to predict for.
        is_captured: Whether `Engine.forward_backward` replays micro-batches from CUDA graphs; see `predict_captured`.

    Raises:
        NoBatch: The model cannot be traced.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        num_micro: int,
        target: Target,
        *,
        is_captured: bool = False,
    ) -> None:
        if "_orig_mod" in model._modules:
            raise NoBatch("compiled models are not supported")
        if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
            raise NoBatch(f"{type(model).__name__} is not a transformers model")
        # two represent any larger number: gradients exist from the second one on, as in every captured micro-batch
        self._num_micro = 2 if is_captured else min(2, num_micro)
        self.is_captured = is_captured
        self._optimizer, self._target = optimizer, target
        self.recomputes_already = checkpoints_itself(model)
        self.has_loss = False  # seen in the first trace, like the next one
        self.compared_rows: str | None = None  # an output that compares all rows of a batch with each other
        self._skeleton, self._originals = _without_weights(model)
        self._blocks = [block for _, blocks in stacks_of(self._skeleton) for block in blocks]
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    @property
    def num_blocks(self) -> int:
        """Number of blocks that could be recomputed."""
        return len(self._blocks)

    def trace(self, spec: StepSpec, batch: LargestBatch) -> Trace:
        """Trace the second of two steps, with everything that was allocated before it.

        Args:
            spec: The specification of the step.
            batch: The model's inputs.
        """
        inputs = _named(self._skeleton, batch.inputs)
        touched = block_marker(spec, self.num_blocks, None)

        def build(short: Shortened, recorder: Recorder) -> Loop:
            model = short.model.train()
            site = Site(torch.device("meta"), self._target.gpu.accelerator, kept_blocks=short.kept)
            change_model(model, spec, site)
            return self._loop(model, self._counterpart(short, spec), inputs, recorder, spec.precision)

        def mark(number: int) -> Any:
            groups = [self._group_of.get(id(self._originals[id(p)])) for p in self._blocks[number].parameters()]
            return touched(number), tuple(groups)

        # Without a known method that creates state, state cannot be assigned to blocks.
        state_methods = ("_init_group", "_fresh_state")
        is_opaque = not any(hasattr(self._optimizer, name) for name in state_methods)
        return trace_loop(
            self._skeleton,
            build,
            inputs,
            gpu=self._target.gpu,
            is_padded=batch.is_padded or self.is_captured,  # a graph is replayed with every mask
            mark=mark,
            whole=is_opaque,
        )

    def _loop(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        inputs: dict[str, Any],
        recorder: Recorder,
        precision: str,
    ) -> Loop:
        engine = engine_to_trace(precision.replace("fp32", "no"), self._num_micro)
        prepared_model, prepared = engine.prepare(model, optimizer)
        held: list[Any] = [None]

        def step() -> None:
            for number in range(self._num_micro):
                with engine.accumulate(prepared_model):
                    held[0] = prepared_model(**inputs)
                    loss = self._loss_of(held[0])
                    if self.is_captured:  # the loop gets only the loss
                        held[0] = None
                    with recorder.during("backward"):
                        engine.backward(loss)
                    if number == self._num_micro - 1:
                        recorder.adopt_gradients(model.parameters())
                        with recorder.during("optimizer"):
                            prepared.step()
                        prepared.zero_grad()

        return Loop(model, optimizer, step)

    def _loss_of(self, output: Any) -> torch.Tensor:
        fields = dict(output.items()) if isinstance(output, Mapping) else {}
        self.compared_rows = next((name for name in fields if str(name).startswith(_COMPARES_ROWS)), None)
        loss = getattr(output, "loss", None)
        self.has_loss = isinstance(loss, torch.Tensor)
        if isinstance(loss, torch.Tensor):
            return loss
        logits = logits_of(output)
        if logits is not None:
            return logits.mean()
        # hidden states, embeddings or similarities, from which the loop computes its loss; which ones is unknown
        results = [value for value in fields.values() if isinstance(value, torch.Tensor) and value.requires_grad]
        if not results:
            raise NoBatch(f"the model returns nothing that can be differentiated, but {type(output).__name__}")
        return torch.stack([result.float().mean() for result in results]).sum()

    # ------------------------------------------------------------------ the optimizer

    def _counterpart(self, short: Shortened, spec: StepSpec) -> torch.optim.Optimizer:
        """A copy of the loop's optimizer for the parameters of a shortened model."""
        origins = self._origins(short)
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in self._optimizer.param_groups]
        for parameter in short.model.parameters():
            number = self._group_of.get(id(origins[id(parameter)]))
            if number is not None:
                groups[number]["params"].append(parameter)
        groups = [group for group in groups if group["params"]]
        for group in groups:
            group.pop("param_names", None)
            if self._target.is_cpu and group.get("foreach", True) is None and not group.get("fused"):
                group["foreach"] = False  # torch's rule for a CPU
        changed = change_optimizer(self._optimizer, spec, groups)
        return _copied(self._optimizer, groups, origins) if changed is self._optimizer else changed

    def _origins(self, short: Shortened) -> dict[int, torch.Tensor]:
        """The user's parameter for each parameter of a shortened model, by id."""
        found: dict[int, torch.Tensor] = {}
        copies = [block for _, blocks in stacks_of(short.model) for block in blocks]
        for index, number in enumerate(short.kept):
            for mine, theirs in zip(copies[index].parameters(), self._blocks[number].parameters(), strict=True):
                found[id(mine)] = self._originals[id(theirs)]
        names = dict(self._skeleton.named_parameters())
        for name, parameter in short.model.named_parameters():
            if id(parameter) not in found:
                found[id(parameter)] = self._originals[id(names[name])]
        return found


def _without_weights(model: torch.nn.Module) -> tuple[Any, dict[int, torch.Tensor]]:
    """Copy a model to `meta`, with tied weights; also return the original of each parameter, by id of the copy."""
    copies: dict[int, Any] = {}
    originals: dict[int, torch.Tensor] = {}
    for parameter in model.parameters():
        made = torch.nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        copies[id(parameter)], originals[id(made)] = made, parameter
    for buffer in model.buffers():
        copies[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, copies), originals


def _copied(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], origins: dict[int, torch.Tensor]
) -> torch.optim.Optimizer:
    """Copy an optimizer for other parameters without calling its constructor, whose signature is unknown."""
    made: Any = object.__new__(type(optimizer))
    hooks = [name for name in vars(optimizer) if name.endswith("_hooks")]
    # schedulers wrap `step` of the instance; the wrapper would step the user's optimizer
    made.__dict__.update(
        {name: value for name, value in vars(optimizer).items() if name not in ("step", "_opt_called")}
    )
    made.__dict__.update({name: OrderedDict() for name in hooks})
    made.param_groups, made.state = groups, defaultdict(dict)
    for group in groups:
        for parameter in group["params"]:
            before = optimizer.state.get(origins[id(parameter)])
            if before:
                made.state[parameter] = {name: _on_meta(value) for name, value in before.items()}
    return made  # type: ignore[no-any-return]


def _on_meta(value: Any) -> Any:
    """Move a tensor to `meta`; scalars such as step counts keep their values, because optimizers read them."""
    is_large = isinstance(value, torch.Tensor) and value.dim() > 0
    return torch.empty_like(value, device="meta") if is_large else copy.copy(value)


def _named(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """The fields of a batch that the model accepts."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in inputs.items() if name in names} if names else dict(inputs)
