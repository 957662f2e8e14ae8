"""Activation offload: tensors that blocks save for backward are kept in pinned host memory and copied back in time.

With gradient checkpointing, these are the inputs of the recomputed blocks; for other blocks, everything that autograd
saves. Copies overlap with computation, on one stream per direction. Results are bit-identical to those of the plain
step: nothing is computed differently.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.blocks import blocks_of
from trimtab.model.host_pages import PAGE_BYTES, HostLink, Pairs
from trimtab.model.offloaded_blocks import offload_blocks
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import read_value
from trimtab.techniques.base import (
    FROM_HOST,
    IN_AFTER_OUT,
    TO_HOST,
    WAIT_FROM_HOST,
    WAIT_TO_HOST,
    WEIGHTS_FROM_HOST,
    WEIGHTS_TO_HOST,
    Accelerator,
    Case,
    HostUse,
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

_KEY = "memory.offload_activations"


class ActivationOffload(Technique):
    """Keep the tensors that blocks save for backward in host memory."""

    key = "offload_activations"
    setting = _KEY
    phase = Phase.RECOMPUTATION
    is_slower_with_each_value = True
    last_resorts = None
    reaches_far = True

    def values(self, case: Case) -> tuple[str, ...]:
        """Possible for models with repeated blocks; `auto` considers it on an NVIDIA GPU."""
        asked = self.asked(case.recipe)
        if asked != "auto":
            if asked != self.off and case.model is not None and not blocks_of(case.model):
                raise RecipeError(f"{_KEY}: {type(case.model).__name__} has no repeated blocks", f"{_KEY}: none")
            return (as_text(asked),)
        is_possible = case.recipe is not None and case.accelerator.is_cuda and bool(blocks_of(case.model))
        return ("none", "all") if is_possible else ("none",)

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse CUDA graphs, which have fixed addresses, and `ops`, which keeps results unseen by autograd's hooks."""
        if spec[self.key] == self.off:
            return None
        if captures_steps(spec[Compilation.key]):
            return f"{_KEY} does not work with {Compilation.setting}: {spec[Compilation.key]}, whose memory is fixed"
        recomputed = spec[GradientCheckpointing.key]
        if keeps_products(recomputed):
            return f"{_KEY} does not work with {GradientCheckpointing.setting}: {recomputed}, whose results stay"
        return None

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Add hooks to the chosen blocks."""
        blocks = [block for _, block in blocks_of(model)]
        chosen = chosen_blocks(in_trace(read_value(value), site), len(blocks), _KEY)
        if site.device.type == "cpu":
            say(f"{_KEY} saves nothing on a CPU: activations are copied within host memory")
        offload_blocks(model, [blocks[number] for number in chosen], pins=site.device.type == "cuda")

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Count the copies as time on the host-device link, and tensors on the host as no device memory."""
        sent = {TO_HOST: 0, FROM_HOST: 0}

        def copy(direction: str, num_bytes: int) -> int:
            recorder.transfer(direction, num_bytes)
            sent[direction] += num_bytes
            return sent[direction]

        def copy_all(direction: str, on_host: list[torch.Tensor], name: str) -> int:
            num_bytes = sum(tensor.nbytes for tensor in on_host)
            recorder.transfer(name, num_bytes, on_host)
            sent[direction] += num_bytes
            return sent[direction]

        def send(link: HostLink, source: torch.Tensor, room: Any) -> tuple[list[int], int]:
            return [source.numel()], copy(TO_HOST, source.numel())

        def fetch(link: HostLink, spans: list[int], device: torch.device) -> tuple[torch.Tensor, int]:
            num_ops = len(recorder.ops)
            made = torch.empty(sum(spans), dtype=torch.uint8, device=device)
            del recorder.ops[num_ops:]  # allocating takes no time on the device
            return made, copy(FROM_HOST, sum(spans))

        def copy_in(link: HostLink, pairs: Pairs, device: torch.device, after: Any = None) -> int:
            if after is not None:
                # tensors sent since then may still be in transit
                recorder.transfer(IN_AFTER_OUT, sent[TO_HOST] - after)
            return copy_all(FROM_HOST, [source for _, source in pairs], WEIGHTS_FROM_HOST)

        def copy_out(link: HostLink, pairs: Pairs, device: torch.device) -> int:
            return copy_all(TO_HOST, [target for target, _ in pairs], WEIGHTS_TO_HOST)

        def wait(link: HostLink, event: int, direction: str, name: str) -> None:
            recorder.transfer(name, sent[direction] - event)  # bytes that may still be in transit

        yield HostLink, "send", send
        yield HostLink, "fetch", fetch
        yield HostLink, "copy_in", copy_in
        yield HostLink, "copy_out", copy_out
        yield HostLink, "wait_sent", lambda link, event: wait(link, event, TO_HOST, WAIT_TO_HOST)
        yield HostLink, "wait_fetched", lambda link, event: wait(link, event, FROM_HOST, WAIT_FROM_HOST)

    def block_mark(self, value: str, num_blocks: int, recipe: Recipe | None) -> Callable[[int], Any] | None:
        """Distinguish offloaded blocks from others."""
        if value == self.off or not num_blocks:
            return None
        return set(chosen_blocks(read_value(value), num_blocks, _KEY)).__contains__

    def host_use(self, value: str, model: Any, weight_bytes: int) -> HostUse:
        """Return the unused part of the last page of each block; the activations themselves are in the trace."""
        if value == self.off:
            return HostUse()
        num_blocks = len(blocks_of(model))
        return HostUse(kept_bytes=PAGE_BYTES * len(chosen_blocks(read_value(value), num_blocks, _KEY)))

    def describe(self, value: str) -> str:
        """Return a text such as "activations of every 2nd block on host"."""
        words = describe_blocks(value)
        return "activations on host" if value == "all" else f"activations of {words} on host"
