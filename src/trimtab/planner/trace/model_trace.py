"""Trace code that runs a model on `meta` as a GPU would run it; repeated blocks are traced once.

`recipe_step.py`, `own_step.py` and `plain_step.py` in this package define the code to trace.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from trimtab.model import precision
from trimtab.model.blocks import stacks_of
from trimtab.model.hub import quiet_transformers
from trimtab.planner.trace.blocks import NotPeriodic, extend, watch_blocks
from trimtab.planner.trace.compiled import compiled_block_patches
from trimtab.planner.trace.cuda import CudaRules, Gpu, as_on_cuda
from trimtab.planner.trace.data_dependent import reading_patches
from trimtab.planner.trace.recorder import Owner, Recorder, Trace
from trimtab.planner.trace.shortened_model import Shortened, shorten
from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread
from trimtab.techniques.adapter import quantization_tensors
from trimtab.techniques.apply import trace_patches
from trimtab.techniques.base import Patch

Work = Callable[[], None]
# a forward that needs the number of its blocks, for example one with weights that have a slice for each block
_FAILURES_OF_A_SHORTENED_MODEL = (RuntimeError, ValueError, IndexError, KeyError, AttributeError, TypeError)
_PATCHES: list[Patch] = [(precision, "say", lambda *_: None), (precision, "_use_tf32", lambda _: None)]


def trace_model(
    skeleton: Any,
    prepare: Callable[[Shortened, Recorder], Work],
    *,
    gpu: Gpu,
    is_padded: bool = False,
    mark: Callable[[int], Any] = lambda _: None,
    whole: bool = False,
    reaches_far: bool = True,
) -> Trace:
    """Trace the work that `prepare` returns.

    Args:
        skeleton: The model, on meta; it is not changed.
        prepare: Called with a copy of the model that may have fewer blocks, and the recorder; returns the work, which
            runs while operations are recorded.
        gpu: The GPU to simulate.
        is_padded: Whether batches have padding: attention then gets a mask.
        mark: Returns a value for the number of a block, counted over all stacks; blocks with different values are not
            interchangeable.
        whole: Whether to trace every block, including repeated ones.
        reaches_far: Whether the computation of a block may depend on blocks that are not its neighbours.
    """

    def traced(short: Shortened) -> Trace:
        recorder = Recorder(CudaRules(gpu), lambda tensor: _read_value(tensor, is_padded))
        patches = [*_PATCHES, *trace_patches(recorder, gpu.accelerator), *compiled_block_patches(recorder, gpu)]
        patches += reading_patches(recorder.values)
        with as_on_cuda(gpu), stand_ins_on_this_thread(patches), quiet_transformers():
            work = prepare(short, recorder)
            with recorder:
                work()
                recorder.mark("end")
                recorder.enter("", None)
        return recorder.trace()

    if not whole:
        short = shorten(skeleton, mark, reaches_far=reaches_far)
        try:
            return extend(traced(short), short.repeats)
        except (NotPeriodic, *_FAILURES_OF_A_SHORTENED_MODEL):
            if not short.repeats:
                raise
    return traced(shorten(skeleton, allowed=False))


def _read_value(tensor: torch.Tensor, is_padded: bool) -> Any:
    """The value that code reads from a tensor without data."""
    if tensor.dtype is torch.bool:
        return not is_padded  # "is all of the mask set?"
    return 0.0 if tensor.is_floating_point() else 0


class BlockVisits:
    """Tell a recorder which block of a model new tensors belong to.

    Args:
        recorder: The recorder.
        model: The model; its blocks are watched from now on.
    """

    def __init__(self, recorder: Recorder, model: torch.nn.Module) -> None:
        self._recorder = recorder
        self._here: Owner | None = None
        stacks = [blocks for _, blocks in stacks_of(model)]
        watch_blocks(stacks, recorder)
        recorder.modules.watch(model)
        self._owners = {
            id(tensor): Owner(stack, number)
            for stack, blocks in enumerate(stacks)
            for number, block in enumerate(blocks)
            for tensor in (*block.parameters(), *block.buffers(), *quantization_tensors(block))
        }

    def adopt_weights(self, model: torch.nn.Module) -> None:
        """Record all parameters and buffers of the model that are in device memory."""
        for tensor in (*model.parameters(), *model.buffers(), *quantization_tensors(model)):
            is_away = getattr(tensor, "is_in_host_memory", False)
            with self._recorder.on_host() if is_away else nullcontext():
                self.adopt(tensor, [tensor], "weights")
        self.leave()

    def adopt(self, owner: torch.Tensor, tensors: Iterable[Any], part: str) -> None:
        """Record existing tensors as part of the block that `owner` belongs to."""
        self.visit(owner, part)
        self._recorder.adopt((tensor for tensor in tensors if isinstance(tensor, torch.Tensor)), part)

    def watch_state_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Assign new optimizer state to the block of its parameter; torch's optimizers create it in `_init_group`."""
        for parameter in list(optimizer.state):  # Adagrad creates its state in its constructor
            self.adopt(parameter, optimizer.state[parameter].values(), "state")
        self.leave()
        optimizer.state = _State(lambda parameter: self.visit(parameter, "state"), optimizer.state)
        name = "_fresh_state" if hasattr(optimizer, "_fresh_state") else "_init_group"
        make: Callable[..., Any] | None = getattr(optimizer, name, None)
        if make is None:
            return

        def make_watched(*args: Any, **kwargs: Any) -> Any:
            with self._recorder.born_as("state"):
                made = make(*args, **kwargs)  # state of one parameter, or of a group
            self.leave()
            return made

        setattr(optimizer, name, make_watched)

    def visit(self, tensor: torch.Tensor, kind: str) -> None:
        """Assign new tensors to the block of this parameter or buffer."""
        self._recorder.modules.parameter = self._recorder.modules.of_parameter(tensor)
        owner = self._owners.get(id(tensor))
        if owner != self._here:
            self._here = owner
            self._recorder.enter(kind if owner is not None else "", owner)

    def leave(self) -> None:
        """Assign new tensors to no block."""
        self._recorder.modules.parameter = ""
        if self._here is not None:
            self._here = None
            self._recorder.enter("", None)


class _State(defaultdict[torch.Tensor, Any]):
    """The state of an optimizer; calls a function when the state of a parameter is created."""

    def __init__(self, visit: Callable[[torch.Tensor], None], before: Mapping[torch.Tensor, Any]) -> None:
        super().__init__(dict, before)
        self._visit = visit

    def __missing__(self, parameter: torch.Tensor) -> Any:
        self._visit(parameter)
        return super().__missing__(parameter)
