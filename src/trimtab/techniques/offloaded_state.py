"""Optimizer state in pinned host memory: slices of it are copied to the device while weights are updated.

Weights stay on the device, so forward takes no longer. With updates in backward, the copies overlap with backward, and
only the gradients in use exist: the device then needs little more memory than for the weights. Results are
bit-identical to those with state on the device, except for stochastic rounding, which draws other random numbers.
"""

from collections.abc import Iterator
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.host_areas import require_host_memory
from trimtab.optim.build import PAGED
from trimtab.optim.offloaded_state import KEY, OffloadedState, has_state_on_host, offload_state
from trimtab.optim.state_size import bytes_of_groups
from trimtab.techniques.adapter import AdapterTechnique
from trimtab.techniques.base import (
    UPDATE_CALL,
    Accelerator,
    BuildOptimizer,
    Case,
    Patch,
    StepSpec,
    Technique,
    TraceRecorder,
)
from trimtab.techniques.compilation import Compilation
from trimtab.techniques.optimizer_state import OptimizerState
from trimtab.techniques.streamed_weights import StreamedWeights
from trimtab.techniques.weight_update import WeightUpdate

_HOST = "host"


class StateOffload(Technique):
    """Keep the state of the optimizer in host memory."""

    key = "offload_state"
    setting = KEY
    is_slower_with_each_value = True
    last_resorts = None
    reaches_far = True

    def values(self, case: Case) -> tuple[str, ...]:
        """Return the recipe's value; `auto` considers it if all weights of a model are trained on an NVIDIA GPU."""
        asked = str(self.asked(case.recipe))
        if asked != "auto":
            if asked != self.off and case.num_processes > 1:
                raise RecipeError(_ONE_PROCESS, f"{KEY}: {self.off}, or one process")
            return (asked,)
        is_possible = case.recipe is not None and case.accelerator.is_cuda and case.num_processes == 1
        trains_all = case.recipe is not None and case.recipe.adapter == AdapterTechnique.off
        return ("none", _HOST) if is_possible and trains_all else ("none",)

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse optimizers whose state is not elementwise, and techniques that move the state themselves."""
        if spec[self.key] == self.off:
            return None
        optimizer = spec[OptimizerState.key]
        if case.num_processes > 1:
            return _ONE_PROCESS
        if WeightUpdate.has_state_on_host(spec[WeightUpdate.key]):
            return f"{WeightUpdate.setting}: {spec[WeightUpdate.key]} has all state in host memory; {KEY}: none"
        if spec[StreamedWeights.key] != StreamedWeights.off:
            return f"{StreamedWeights.setting} streams optimizer state together with its weights; {KEY}: none"
        if optimizer.startswith(PAGED):
            return f"{KEY} does not work with {optimizer}, whose state the driver moves; train.optimizer: adamw8bit"
        if optimizer == "adafactor":
            return (
                f"{KEY} does not work with adafactor, whose state is small and belongs to rows and columns; {KEY}: none"
            )
        if Compilation().captures(spec[Compilation.key]):
            return f"{KEY} does not work with CUDA graphs; {Compilation.setting}: blocks"
        return None

    def can_keep(self, value: str, case: Case) -> bool:
        """Return False with several processes, which keep their state on the device."""
        return value == self.off or case.num_processes == 1

    def wrap_build(self, build: BuildOptimizer, spec: StepSpec, model: torch.nn.Module) -> BuildOptimizer:
        """Build an optimizer whose state is in host memory."""
        if spec[self.key] == self.off:
            return build

        def build_offloaded(groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
            if device.type == "cpu":
                say(f"{KEY} saves nothing on a CPU: state is copied within host memory")
            optimizer = offload_state(build, groups, device)
            if groups[0]["params"][0].device.type != "meta":
                _check_host_memory(groups, spec)
            return optimizer

        return build_offloaded

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Call the optimizer once per slice."""
        take = OffloadedState._take

        def take_recorded(self: OffloadedState, key: tuple[int, int]) -> Any:
            tensors = self._pieces[key].visitors.values()
            recorder.note(UPDATE_CALL, [tensor[:0] for tensor in tensors])  # for the block that the slice belongs to
            return take(self, key)

        yield OffloadedState, "_take", take_recorded

    def describe(self, value: str) -> str:
        """Return a text such as "optimizer state on host"."""
        return f"optimizer state on {value}"


_ONE_PROCESS = f"{KEY} works with one process, which has the state of all weights in its host memory"


def _check_host_memory(groups: list[dict[str, Any]], spec: StepSpec) -> None:
    large = [{"params": [p for p in group["params"] if has_state_on_host(p)]} for group in groups]
    needed = bytes_of_groups(spec[OptimizerState.key], large, rounds_stochastically=spec.precision == "bf16-pure")
    cure = "use train.optimizer: adamw8bit, adapter: lora, or a machine with more memory"
    require_host_memory(needed, KEY + " needs {} of host memory for the optimizer's state", cure)
