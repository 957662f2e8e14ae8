"""Where and when weights are updated: on the device, inside backward, streamed through the device, or on the host.

In backward: every gradient is used and freed as soon as it is complete, so the gradients of a model never exist at the
same time. Weights then change before all gradients are known: nothing can be clipped, scaled, skipped or accumulated.

Streamed: gradients are copied to the host as soon as they are computed, and stay there with the optimizer's state. When
all gradients are known, slices of gradients and state are copied to the device, which updates its weights.

On the host: gradients, which are copied from the device as soon as they are computed, optimizer state and fp32 weights
are in host memory. Weights change after all gradients are known, so it costs only time. In mixed precision, linear
layers except the output layer keep their weights on the device in half precision only, the dtype that they compute in:
the numbers are the same.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.model.adapters import adapter_of
from trimtab.model.half_weights import linear_parameters, round_weights
from trimtab.optim import host_update, in_backward
from trimtab.optim.build import PAGED
from trimtab.optim.in_backward import InBackward, update_in_backward
from trimtab.optim.state_size import bytes_of_groups
from trimtab.optim.streamed_update import build_streamed
from trimtab.recipe.consistency import conflicts_in_backward
from trimtab.techniques.base import (
    UPDATE_CALL,
    Accelerator,
    BuildOptimizer,
    Case,
    HostUse,
    Patch,
    Phase,
    Site,
    StepSpec,
    Technique,
    TraceRecorder,
)
from trimtab.techniques.compilation import Compilation
from trimtab.techniques.optimizer_state import OptimizerState

_IN_BACKWARD, _STREAMED, _HOST = "in-backward", "streamed", "host"


class WeightUpdate(Technique):
    """Choose where and when weights are updated."""

    key = "update"
    setting = "memory.update"
    off = "device"
    phase = Phase.PLACEMENT
    is_slower_with_each_value = True
    last_resorts = (_STREAMED, _HOST)
    shrinks_weights = True
    reaches_far = True

    def values(self, case: Case) -> tuple[str, ...]:
        """Return the recipe's value; `auto` may update in backward if no step needs all gradients before an update.

        It streams, or updates on the host, only if all weights of a model are trained on a GPU and nothing else fits.
        """
        asked = str(self.asked(case.recipe))
        if asked != "auto":
            if asked != self.off and case.num_processes > 1:
                raise RecipeError(_one_process(asked), f"{self.setting}: {self.off}, or one process")
            return (asked,)
        if case.recipe is None or case.num_processes > 1:
            return ("device",)
        found = ["device"]
        if not any(conflicts_in_backward(case.recipe)):
            found.append(_IN_BACKWARD)
        if case.accelerator.is_cuda and case.recipe.adapter == "none":
            found += [_STREAMED, _HOST]
        return tuple(found)

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse several processes, CUDA graphs, and in backward fp16 and several micro-batches."""
        value = spec[self.key]
        if value == self.off:
            return None
        if case.num_processes > 1:
            return _one_process(value)
        if Compilation().captures(spec[Compilation.key]):
            return f"{self.setting}: {value} does not work with CUDA graphs; {Compilation.setting}: blocks"
        if value == _STREAMED and not _is_elementwise(spec[OptimizerState.key]):
            return f"{self.setting}: {value} does not work with {spec[OptimizerState.key]}; train.optimizer: adamw8bit"
        if value == _IN_BACKWARD and spec.precision == "fp16":
            return (
                f"{self.setting}: {value} does not work with fp16, which skips a step if any gradient overflows; "
                "train.precision: bf16 or fp32"
            )
        if value == _IN_BACKWARD and spec.micro_batch < case.num_rows:
            return f"{self.setting}: {value} needs the whole batch in one micro-batch"
        return None

    @staticmethod
    def is_in_backward(value: str) -> bool:
        """Whether weights are updated in backward."""
        return value == _IN_BACKWARD

    @staticmethod
    def is_streamed(value: str) -> bool:
        """Whether gradients and state are copied to the device slice by slice."""
        return value == _STREAMED

    @staticmethod
    def has_state_on_host(value: str) -> bool:
        """Whether the optimizer's state is in host memory."""
        return value in (_STREAMED, _HOST)

    def can_keep(self, value: str, case: Case) -> bool:
        """Return False with several processes, which update on the device."""
        return value == self.off or case.num_processes == 1

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Round the weights of linear layers before they move to the device; the host keeps the exact values.

        Adapters are not changed: they are small, and their export writes the values on the device.
        """
        if value == _HOST and site.compute_dtype is not None and adapter_of(model) is None:
            # a chunked loss computes fp32 gradients of the output layer
            bare: Any = model
            head = bare.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            weights = [parameter for module, _, parameter in linear_parameters(model) if module is not head]
            round_weights(weights, site.compute_dtype)

    def wrap_build(self, build: BuildOptimizer, spec: StepSpec, model: torch.nn.Module) -> BuildOptimizer:
        """Add the hooks that update in backward, or build an optimizer for tensors on the host."""

        def build_in_backward(groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
            optimizer = build(groups, device)
            update_in_backward(model, optimizer)
            return optimizer

        def build_for_host(groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
            host_update.check_host_memory(_needed_bytes(groups, spec))
            return host_update.build_on_host(build, groups)

        def build_for_slices(groups: list[dict[str, Any]], device: torch.device) -> torch.optim.Optimizer:
            host_update.check_host_memory(_needed_bytes(groups, spec))
            return build_streamed(build, groups, device, model)

        builds = {_IN_BACKWARD: build_in_backward, _STREAMED: build_for_slices, _HOST: build_for_host}
        return builds.get(spec[self.key], build)

    def state(self, model: torch.nn.Module, value: str) -> Any:
        """Return the norm of the last gradients, which the next ones may be clipped by."""
        updates = in_backward.updates_of(model)
        return updates if isinstance(updates, InBackward) else None

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Tell the recorder which tensors are gradients, when the optimizer runs, and what is on the host."""
        update, take, watch = InBackward._update, host_update.HostGradients._take, host_update.HostGradients.watch
        settle = host_update.HostGradients.settle

        def update_recorded(self: InBackward, parameter: torch.Tensor, group: int, number: int) -> None:
            recorder.adopt_gradients([parameter])
            with recorder.updating():
                recorder.note(UPDATE_CALL, [])
                update(self, parameter, group, number)

        def take_recorded(self: host_update.HostGradients, parameter: torch.Tensor, index: int) -> None:
            # the gradients of further micro-batches are temporary: they are added to the first ones
            if self.holders[index].grad is None:
                recorder.adopt_gradients([parameter])
            take(self, parameter, index)

        def empty_on_host(parameters: Sequence[torch.Tensor], *, pins: bool, key: str = "") -> list[torch.Tensor]:
            return [torch.empty_like(parameter, requires_grad=False) for parameter in parameters]

        def watch_recorded(self: host_update.HostGradients) -> None:
            masters = self.masters if isinstance(self, host_update.HostWeights) else []
            for tensors in filter(None, (masters, self.sums)):
                recorder.adopt_on_host(tensors, self.parameters)
            watch(self)

        def settle_recorded(self: host_update.HostGradients) -> None:
            settle(self)
            recorder.note("trimtab.wait", [total[:0] for total in self.sums[:1]])  # for the copies of all gradients

        yield in_backward.InBackward, "_update", update_recorded
        yield host_update.HostGradients, "_take", take_recorded
        yield host_update.HostGradients, "watch", watch_recorded
        yield host_update.HostGradients, "settle", settle_recorded
        yield host_update, "empty_on_host", empty_on_host
        yield host_update, "copy", recorder.copy_weights
        yield host_update, "check_host_memory", lambda _: None

    def host_use(self, value: str, model: Any, weight_bytes: int) -> HostUse:
        """Account for weights, gradients and state on the host."""
        gradients = sum(p.numel() for p in model.parameters()) * weight_bytes if value == _STREAMED else 0
        return HostUse(kept_bytes=gradients, updates_on_host=value == _HOST)

    def describe(self, value: str) -> str:
        """Return a text such as "updates in backward"."""
        names = {_IN_BACKWARD: "updates in backward", _STREAMED: "streamed updates"}
        return names.get(value, f"updates on the {value}")


def _one_process(value: str) -> str:
    return f"memory.update: {value} works with one process: several average their gradients on the device"


def _needed_bytes(groups: list[dict[str, Any]], spec: StepSpec) -> int:
    """Host memory for gradients and state of the parameters, and for weights if the host updates them."""
    rounds = spec.precision == "bf16-pure"
    dtype = torch.bfloat16 if rounds else torch.float32
    num_elements: int = sum(parameter.numel() for group in groups for parameter in group["params"])
    state = bytes_of_groups(spec[OptimizerState.key], groups, rounds_stochastically=rounds, dtype=dtype)
    num_copies = 2 if spec[WeightUpdate.key] == _HOST else 1
    return num_copies * num_elements * dtype.itemsize + state


def _is_elementwise(optimizer: str) -> bool:
    """Whether the state of an optimizer can be copied to the device in slices."""
    return optimizer != "adafactor" and not optimizer.startswith(PAGED)
