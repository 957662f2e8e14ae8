"""Streamed weights: blocks are kept in pinned host memory and copied to the device one block ahead of the computation.

The device holds the weights of two blocks at a time, whatever the depth of the model. In forward and in backward, the
weights of the next block are copied while the current one computes. A frozen base with an adapter is only read.
Trainable weights are updated in backward, with optimizer state that is copied to the device with them, or on the host.
Results are bit-identical to those of the plain step.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.memory import release_cached_memory
from trimtab.log import say
from trimtab.model import device_visits
from trimtab.model.blocks import blocks_of
from trimtab.model.host_areas import require_host_memory
from trimtab.model.streamed_blocks import KEY, stream_blocks, streamable, streamed_blocks_of
from trimtab.optim.streamed_state import stream_state
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import read_value
from trimtab.techniques.adapter import AdapterTechnique
from trimtab.techniques.base import (
    Accelerator,
    BuildOptimizer,
    Case,
    Patch,
    Phase,
    Site,
    StepSpec,
    Technique,
    TraceRecorder,
    as_text,
)
from trimtab.techniques.compilation import Compilation, captures_steps
from trimtab.techniques.recomputation import (
    GradientCheckpointing,
    chosen_blocks,
    describe_blocks,
    in_trace,
    keeps_products,
)
from trimtab.techniques.weight_update import WeightUpdate

_FEWEST_BLOCKS = 3  # two blocks are on the device at a time


class StreamedWeights(Technique):
    """Keep the weights of blocks in host memory."""

    key = "stream_weights"
    setting = KEY
    phase = Phase.PLACEMENT
    is_slower_with_each_value = True
    last_resorts = None
    shrinks_weights = True
    reaches_far = True

    def values(self, case: Case) -> tuple[str, ...]:
        """Offer it for models with repeated blocks in one process; `auto` considers it on an NVIDIA GPU."""
        asked = self.asked(case.recipe)
        num_blocks = len(blocks_of(case.model)) if case.model is not None else _FEWEST_BLOCKS
        if asked != "auto":
            if asked != self.off and num_blocks < _FEWEST_BLOCKS:
                raise RecipeError(
                    f"{KEY}: {type(case.model).__name__} has {num_blocks} repeated blocks; two of them are on the "
                    "device at a time",
                    f"{KEY}: none",
                )
            return (as_text(asked),)
        is_possible = case.recipe is not None and case.accelerator.is_cuda and case.num_processes == 1
        return ("none", "all") if is_possible and num_blocks >= _FEWEST_BLOCKS else ("none",)

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse techniques that update the weights elsewhere, that hold addresses of weights, or that watch copies."""
        if spec[self.key] == self.off:
            return None
        if case.num_processes > 1:
            return f"{KEY} works with one process, which has the weights of all blocks in its host memory"
        if captures_steps(spec[Compilation.key]):
            value = spec[Compilation.key]
            return f"{KEY} does not work with {Compilation.setting}: {value}, which captures no copies of weights"
        if keeps_products(spec[GradientCheckpointing.key]):
            value = spec[GradientCheckpointing.key]
            return f"{KEY} does not work with {GradientCheckpointing.setting}: {value}, which observes every operation"
        if spec[AdapterTechnique.key] == AdapterTechnique.off and spec[WeightUpdate.key] == WeightUpdate.off:
            return (
                f"{KEY} needs trainable weights to be updated in backward or on the host, and {WeightUpdate.setting} "
                f"is {WeightUpdate.off}; {WeightUpdate.setting}: host, or an adapter"
            )
        if WeightUpdate.is_streamed(spec[WeightUpdate.key]):
            return f"{KEY} does not work with {WeightUpdate.setting}: {spec[WeightUpdate.key]}, whose weights stay"
        shared = _shared_weight(case.model, spec[self.key]) if case.model is not None else None
        return f"{KEY}: {shared} is used by several blocks, or outside of its block" if shared else None

    def can_keep(self, value: str, case: Case) -> bool:
        """Return False with several processes, which keep their weights on the device."""
        return value == self.off or case.num_processes == 1

    def loads_on_host(self, recipe: Recipe, *, is_too_large: bool) -> bool:
        """Return True for streamed weights, which need not fit on the device; `auto` streams those that do not."""
        return is_too_large if self.is_open(recipe) else self.asked(recipe) != self.off

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Move weights to host memory, before the other weights move to the device."""
        blocks = [block for _, block in blocks_of(model)]
        chosen = [blocks[number] for number in chosen_blocks(in_trace(read_value(value), site), len(blocks), KEY)]
        trains = site.recipe is None or site.recipe.adapter == AdapterTechnique.off
        kept = () if trains else site.unfrozen_later
        units = [streamable(block, trains=trains, but=kept) for block in chosen]
        if site.device.type == "cpu":
            say(f"{KEY} saves nothing on a CPU: weights are copied within host memory")
        elif not site.is_traced:
            _check_host_memory(units)
        stream_blocks(model, chosen, units, site.device)
        if site.device.type == "cuda":
            release_cached_memory(site.device)  # the weights that were loaded on the device

    def wrap_build(self, build: BuildOptimizer, spec: StepSpec, model: torch.nn.Module) -> BuildOptimizer:
        """Copy the state of weights that are updated in backward to the device together with the weights."""
        streamed = streamed_blocks_of(model)
        if streamed is None or not WeightUpdate.is_in_backward(spec[WeightUpdate.key]):
            return build
        blocks = streamed

        def build_streamed(groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
            optimizer = build(groups, device)
            stream_state(model, blocks, optimizer)
            return optimizer

        return build_streamed

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Count the buffers as device memory, and the copies of `trimtab.model.host_pages.HostLink` as transfers."""

        def empty_buffer(num_bytes: int, device: torch.device, part: str) -> torch.Tensor:
            num_ops = len(recorder.ops)
            with recorder.born_as(part):
                made = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            del recorder.ops[num_ops:]  # allocating takes no time on the device
            recorder.adopt([made], part)  # if nothing is recorded yet
            return made

        yield device_visits, "empty_buffer", empty_buffer

    def block_mark(self, value: str, num_blocks: int, recipe: Recipe | None) -> Callable[[int], Any] | None:
        """Distinguish streamed blocks from others, and the first two and last three from those in between."""
        if value == self.off or not num_blocks:
            return None
        chosen = chosen_blocks(read_value(value), num_blocks, KEY)
        marks = {number: (min(at, 2), min(len(chosen) - 1 - at, 3)) for at, number in enumerate(chosen)}
        return marks.get

    def describe(self, value: str) -> str:
        """Return a text such as "weights of every 2nd block streamed"."""
        return "streamed weights" if value == "all" else f"streamed weights of {describe_blocks(value)}"


def _shared_weight(model: torch.nn.Module, value: str) -> str | None:
    """The name of a weight of a streamed block that is also used elsewhere."""
    blocks = [block for _, block in blocks_of(model)]
    chosen = [blocks[number] for number in chosen_blocks(read_value(value), len(blocks), KEY)]
    uses = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    inside = Counter(id(p) for block in chosen for module in block.modules() for p in module._parameters.values())
    own = [{id(p) for p in block.parameters()} for block in chosen]
    several = {key for key, count in Counter(key for keys in own for key in keys).items() if count > 1}
    names = {id(p): name for name, p in model.named_parameters()}
    found = (key for keys in own for key in keys if key in several or uses[key] > inside[key])
    return next((names[key] for key in found), None)


def _check_host_memory(units: list[list[torch.Tensor]]) -> None:
    """Check host memory: weights on the device need a full copy there, weights on the host one block at a time."""
    sizes = [sum(tensor.nbytes for tensor in unit) for unit in units]
    on_device = sum(tensor.nbytes for unit in units for tensor in unit if tensor.device.type != "cpu")
    require_host_memory(
        on_device + max(sizes, default=0),
        KEY + " needs {} of host memory for the weights of blocks",
        f"{KEY}: {{every: 2}}, a quantized base (adapter: qlora), or a machine with more memory",
    )
