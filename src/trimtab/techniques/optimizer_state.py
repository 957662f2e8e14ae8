"""The optimizer, with state in fp32, in 8 bits, or in 8 bits in memory that the driver pages to the host."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from trimtab.hardware.extras import has_package
from trimtab.optim import build, quantized, stochastic_rounding
from trimtab.optim.build import PAGED, QUANTIZED
from trimtab.optim.eight_bit import eight_bit_obstacle, to_eight_bit
from trimtab.optim.state_size import state_bytes
from trimtab.recipe.schema import Recipe
from trimtab.techniques.adapter import has_4bit_base
from trimtab.techniques.base import (
    Accelerator,
    Case,
    HostUse,
    OnResume,
    Patch,
    StepSpec,
    Suggestion,
    Technique,
    TraceRecorder,
)

_8BIT = "8bit"


class OptimizerState(Technique):
    """Choose the optimizer, with state in fp32 or in 8 bits."""

    key = "optimizer"
    setting = "train.optimizer"
    effect = "rounding"
    off = None
    before = "adamw"
    study = (
        "optimizers",
        ("adamw", "adam", "adagrad", "sgd", "adafactor", "adamw8bit", "adam8bit", "adagrad8bit", "paged-adamw8bit"),
    )
    is_slower_with_each_value = True

    def values(self, case: Case) -> tuple[str, ...]:
        """Return the recipe's optimizer, and its 8-bit version if `memory.allow` has "8bit"."""
        if case.recipe is None:
            return self._values_in_own_loop(case)
        name = default_optimizer(case.recipe, case.accelerator)
        small = name + _8BIT
        can_be_had = has_package("bitsandbytes") or not case.accelerator.is_here
        is_allowed = _8BIT in case.allow and small in QUANTIZED and can_be_had
        return (name, small) if is_allowed else (name,)

    def _values_in_own_loop(self, case: Case) -> tuple[str, ...]:
        if case.optimizer is None:
            return ("",)
        name = type(case.optimizer).__name__
        is_allowed = _8BIT in case.allow and eight_bit_obstacle(case.optimizer) is None
        return (name, name + _8BIT) if is_allowed else (name,)

    def suggest(self, spec: StepSpec, case: Case) -> Iterator[Suggestion]:
        """Suggest 8-bit state if the optimizer has an 8-bit version that is not allowed yet."""
        small = spec[self.key] + _8BIT
        if case.recipe is None:
            if not self.is_8bit(spec[self.key]) and case.optimizer and eight_bit_obstacle(case.optimizer) is None:
                yield Suggestion('memory_allow=["8bit"]', spec.having({self.key: small}))
        elif small in QUANTIZED:
            yield Suggestion("memory.allow: [8bit]", spec.having({self.key: small}))

    @staticmethod
    def is_8bit(value: str) -> bool:
        """Whether the state is in 8 bits."""
        return _8BIT in value

    def change_optimizer(
        self, optimizer: torch.optim.Optimizer, value: str, groups: list[dict[str, Any]]
    ) -> torch.optim.Optimizer:
        """Return the 8-bit version of a user's optimizer."""
        is_changed = value != type(optimizer).__name__  # it may already have 8-bit state
        return to_eight_bit(optimizer, groups) if is_changed and self.is_8bit(value) else optimizer

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Replace kernels of bitsandbytes and Triton, which need data, by functions that allocate the same state."""

        def paged_or_not(self: Any, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
            if self.is_paged and parameter.numel() >= quantized.MIN_PAGED:
                with recorder.on_host():
                    return torch.zeros(parameter.shape, dtype=dtype, device="meta")
            return torch.zeros(parameter.shape, dtype=dtype, device="meta")

        def maps(self: Any, functions: Any, device: torch.device) -> list[torch.Tensor]:
            if device not in self._maps:
                self._maps[device] = [torch.empty(256, device="meta") for _ in range(2)]
            return list(self._maps[device])

        def call(self: Any, functions: Any, group: Any, weights: Any, gradient: Any, state: Any) -> None:
            if state["state1"].dtype is not torch.float32:
                self._maps_on(functions, weights.device)
            tensors = [weights, gradient, *(value for value in state.values() if hasattr(value, "shape"))]
            recorder.note("bitsandbytes.optimizer", tensors)

        def step_adam(members: list[list[torch.Tensor]], *args: Any, **options: Any) -> None:
            for tensors in members:
                recorder.note("trimtab.rounded_adam", tensors)

        def step_adam8bit(tensors: list[torch.Tensor], *args: Any, **options: Any) -> None:
            weights, _, *state = tensors
            recorder.note("trimtab.adam8bit", [*tensors, weights, *state])  # read and written

        kernel = SimpleNamespace(LONGEST=2**62, step_adam=step_adam)
        kernel8bit = SimpleNamespace(step_adam=step_adam8bit) if accelerator.is_cuda else None
        yield quantized, "require_extra", lambda *_: None
        yield build, "require_extra", lambda *_: None
        yield quantized, "bitsandbytes_functions", lambda: None
        yield quantized.Quantized, "_buffer", paged_or_not
        yield quantized.Quantized, "_maps_on", maps
        yield quantized.Quantized, "_call", call
        yield quantized, "_kernel_for", lambda _: kernel8bit
        yield stochastic_rounding, "_kernel_for", lambda _: kernel
        yield stochastic_rounding, "has_fused", lambda *_: True
        yield stochastic_rounding.RoundingNoise, "_generator_for", lambda *_: None

    def loads_kernels(self, value: str) -> bool:
        """Return True for 8-bit state: bitsandbytes' kernels update it."""
        return self.is_8bit(value)

    def host_use(self, value: str, model: Any, weight_bytes: int) -> HostUse:
        """Account for paged state, which may be moved to the host."""
        dtype, num_weights = torch.bfloat16 if weight_bytes == 2 else torch.float32, 2**20
        rounds = dtype is torch.bfloat16  # bf16 weights are trained only with stochastic rounding
        size = state_bytes(value, (num_weights,), dtype, rounds_stochastically=rounds, device="cpu").num_bytes
        return HostUse(pages_state=value.startswith(PAGED), state_ratio=size / num_weights / weight_bytes)

    def plain_loop(self, value: str) -> dict[str, Any] | None:
        """Return torch's own optimizers."""
        return {"optimizer": value} if value in ("adamw", "adam", "sgd", "adagrad") else None

    def describe(self, value: str) -> str:
        """Return its name."""
        return value

    def on_resume(self, old: Any, new: Any) -> OnResume:
        """Forbid a change: a run with another optimizer is a new run."""
        return "refused"


def default_optimizer(recipe: Recipe, accelerator: Accelerator) -> str:
    """The optimizer of a recipe; `auto` is adamw, or one with paged state for 4-bit weights on a GPU."""
    if recipe.train.optimizer != "auto":
        return recipe.train.optimizer
    return "paged-adamw8bit" if has_4bit_base(recipe) and accelerator.is_cuda else "adamw"
