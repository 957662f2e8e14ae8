"""The step of a loop of the user's own, on a copy of the model without weights: for `trimtab.planner.own_loop`."""

import copy
import inspect
from collections import OrderedDict, defaultdict
from typing import Any

import torch

from trimtab.model.forward import logits_of
from trimtab.optim.eight_bit import eight_bit_form
from trimtab.planner.largest_batch import LargestBatch, NoBatch
from trimtab.planner.target import Target
from trimtab.planner.trace.plain_step import Loop, trace_loop
from trimtab.planner.trace.recipe_step import engine_to_trace
from trimtab.planner.trace.recorder import Recorder, Trace
from trimtab.planner.trace.shortened_model import Shortened, stacks_of
from trimtab.techniques.gradient_checkpointing import checkpoint_layers, chosen_blocks


class OwnStep:
    """Traces steps of a loop that does what most do: `outputs = model(**batch)`, backward, step, zero_grad.

    What the model gave is held until the next forward has given something else, as a name in a loop holds it.

    Args:
        model: A model of transformers; it is not touched.
        optimizer: Its optimizer; it is not touched either.
        precision: The engine's.
        num_micro: Micro-batches of an optimizer step.
        target: The device that is stood in for.

    Raises:
        NoBatch: The model is none that can be traced.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, precision: str, num_micro: int, target: Target
    ) -> None:
        if "_orig_mod" in model._modules:
            raise NoBatch("a compiled model plans memory by itself")
        if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
            raise NoBatch(f"{type(model).__name__} is no model of transformers")
        self.precision, self._num_micro = precision, min(2, num_micro)  # two stand for more: gradients are there then
        self._optimizer, self._target = optimizer, target
        self.recomputes_already = bool(getattr(model, "is_gradient_checkpointing", False))
        self.has_loss = False  # seen in the first trace
        self._skeleton, self._originals = _without_weights(model)
        self._blocks = [block for _, blocks in stacks_of(self._skeleton) for block in blocks]
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    @property
    def num_blocks(self) -> int:
        """How many blocks could be recomputed."""
        return len(self._blocks)

    def trace(
        self, batch: LargestBatch, recomputed: Any, *, is_8bit: bool = False, precision: str | None = None
    ) -> Trace:
        """The second of two steps, with everything that was there before it.

        Args:
            batch: What the model is given.
            recomputed: Which blocks, as `checkpoint_layers` takes it; "none" leaves the model as it is.
            is_8bit: Whether the optimizer's state is in 8 bits.
            precision: In the place of the engine's.
        """
        inputs = _named(self._skeleton, batch.inputs)
        chosen = set() if recomputed == "none" else set(chosen_blocks(recomputed, self.num_blocks))

        def build(short: Shortened, recorder: Recorder) -> Loop:
            model = short.model.train()
            if chosen:
                kept = [index for index, number in enumerate(short.kept) if number in chosen]
                checkpoint_layers(model, {"layers": kept})
            return self._loop(model, self._counterpart(short, is_8bit), inputs, recorder, precision or self.precision)

        def mark(number: int) -> Any:
            groups = [self._group_of.get(id(self._originals[id(p)])) for p in self._blocks[number].parameters()]
            return number in chosen, tuple(groups)

        # where an optimizer makes its state out of sight, nobody knows to which block it belongs
        is_opaque = not is_8bit and not any(hasattr(self._optimizer, name) for name in ("_init_group", "_fresh_state"))
        return trace_loop(
            self._skeleton,
            build,
            inputs,
            gpu=self._target.gpu,
            is_padded=batch.is_padded,
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
        engine = engine_to_trace(precision, self._num_micro)
        prepared_model, prepared = engine.prepare(model, optimizer)
        held: list[Any] = [None]

        def step() -> None:
            for number in range(self._num_micro):
                with engine.accumulate(prepared_model):
                    held[0] = prepared_model(**inputs)
                    loss = self._loss_of(held[0])
                    with recorder.during("backward"):
                        engine.backward(loss)
                    if number == self._num_micro - 1:
                        recorder.adopt_gradients(model.parameters())
                        with recorder.during("optimizer"):
                            prepared.step()
                        prepared.zero_grad()

        return Loop(model, optimizer, step)

    def _loss_of(self, output: Any) -> torch.Tensor:
        loss = getattr(output, "loss", None)
        self.has_loss = isinstance(loss, torch.Tensor)
        if isinstance(loss, torch.Tensor):
            return loss
        logits = logits_of(output)
        if logits is None:
            raise NoBatch(f"the model gives neither a loss nor logits for {type(output).__name__}")
        return logits.mean()

    # ------------------------------------------------------------------ the optimizer

    def _counterpart(self, short: Shortened, is_8bit: bool) -> torch.optim.Optimizer:
        """The user's optimizer for the parameters of a copy of the model."""
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
        if is_8bit:
            return eight_bit_form(self._optimizer, groups)
        return _copied(self._optimizer, groups, origins)

    def _origins(self, short: Shortened) -> dict[int, torch.Tensor]:
        """For each parameter of a copy, by its id, the user's own."""
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
    """A copy on meta, with ties as they are, and for each of its parameters, by its id, the one that it stands for."""
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
    """An optimizer of the same class and settings for other parameters; its class need not have a known constructor."""
    made: Any = object.__new__(type(optimizer))
    hooks = [name for name in vars(optimizer) if name.endswith("_hooks")]
    # schedules put a step of their own into the instance, which would step the user's
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
    """A count of steps stays what it is: its value is read."""
    is_large = isinstance(value, torch.Tensor) and value.dim() > 0
    return torch.empty_like(value, device="meta") if is_large else copy.copy(value)


def _named(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the model takes of a batch; a loop does not hand it the rest."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return {name: value for name, value in inputs.items() if name in names} if names else dict(inputs)
