"""Adam, AdamW and Adagrad with 8-bit state, optionally paged, on the kernels of bitsandbytes.

Only the kernels are from bitsandbytes. Its optimizer classes are not used because they do a host-device sync after
every parameter, decouple the weight decay of Adam, do not page the state of Adagrad, and load paged state unpaged.

The kernels compute with fp32 weights and gradients. Other dtypes are converted in slices, which moves 44 bytes per bf16
parameter and more for rounding; with Triton, Adam and AdamW run as one kernel instead: `quantized_kernel`.
"""

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trimtab.hardware.extras import has_package, require_extra
from trimtab.log import log_info_once
from trimtab.optim.stochastic_rounding import SLICE, RoundingNoise, flat

BLOCK = 256  # elements that share a scale
MIN_QUANTIZED = 4096  # parameters with fewer elements have fp32 state
MIN_PAGED = 100_000  # parameters with fewer elements have unpaged state

_MAX_ELEMENTS = 2**30  # elements per kernel call, which indexes with 32 bits; a multiple of BLOCK
_PAGEABLE = ("state1", "state2")


class Quantized(torch.optim.Optimizer):
    """Base class of the 8-bit optimizers.

    The state of a parameter is allocated with its first gradient. Blocks of 256 elements share a scale; parameters with
    fewer than 4096 elements have fp32 state.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        betas: For Adam and AdamW.
        eps: Added to the root of the second moment.
        weight_decay: For groups that do not set it.
        is_paged: Whether to keep the state of larger parameters in CUDA managed memory, which the driver moves to the
            host.
        rounds_stochastically: Whether to round bf16 weights stochastically instead of to nearest.
        rounding_seed: Seed of the stochastic rounding.
    """

    _kernel = ""
    _num_moments = 0
    _decays_gradients = False  # add weight decay to the gradients before the kernel, which would decouple it

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        is_paged: bool = False,
        rounds_stochastically: bool = False,
        rounding_seed: int = 0,
    ) -> None:
        require_extra("bitsandbytes", type(self).__name__)
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "rounding_seed": rounding_seed, "num_roundings": 0})
        self.is_paged = is_paged
        self.rounds_stochastically = rounds_stochastically
        self._maps: dict[torch.device, list[torch.Tensor]] = {}

    def allocate_state(self, parameters: Iterable[torch.Tensor]) -> None:
        """Allocate the state of parameters that have none yet."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self._fresh_state(parameter)

    def _fresh_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {"step": 0}
        quantized = parameter.numel() >= MIN_QUANTIZED
        dtype = torch.uint8 if quantized else torch.float32
        num_blocks = -(-parameter.numel() // BLOCK)
        for number in range(1, self._num_moments + 1):
            state[f"state{number}"] = self._buffer(parameter, dtype)
            if quantized:
                state[f"absmax{number}"] = torch.zeros(num_blocks, dtype=torch.float32, device=parameter.device)
        return state

    def _buffer(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.is_paged and parameter.device.type == "cuda" and parameter.numel() >= MIN_PAGED:
            return _paged_zeros(parameter, dtype)
        return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, without a host-device sync."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        functions = bitsandbytes_functions()
        for index, group in enumerate(self.param_groups):
            chance = RoundingNoise(group, index) if self.rounds_stochastically else None
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:
                    self.allocate_state([parameter])
                    self._update(functions, group, parameter, chance, number)
        return loss

    def _update(
        self, functions: Any, group: dict[str, Any], parameter: torch.Tensor, chance: RoundingNoise | None, number: int
    ) -> None:
        """Update one parameter, the `number`-th of its group."""
        assert parameter.grad is not None
        state = self.state[parameter]
        state["step"] += 1
        if self.is_paged:
            for key in _PAGEABLE:
                if is_paged(state.get(key)):
                    functions.prefetch_tensor(state[key])
        weights, gradient = flat(parameter), flat(parameter.grad)
        decay = group["weight_decay"] if self._decays_gradients else 0.0
        is_exact = weights.dtype is torch.float32 and gradient.dtype is torch.float32
        kernel = None if is_exact else self._kernel_without_copies(state)
        if kernel is not None:
            seed = chance.seed + number if chance is not None else None
            self._update_without_copies(kernel, functions, group, weights, gradient, state, seed)
        else:
            needs_copy = not is_exact or bool(decay)
            self._update_in_slices(functions, group, weights, gradient, state, chance, needs_copy=needs_copy)
        if not parameter.is_contiguous():
            parameter.copy_(weights.view_as(parameter))

    def _kernel_without_copies(self, state: dict[str, Any]) -> Any:
        """The module with a kernel that needs no fp32 weights and gradients; None if there is none for this state."""
        is_possible = self._num_moments == 2 and "absmax2" in state and not is_paged(state["state1"])
        return _kernel_for(state["state1"].device) if is_possible else None

    def _update_without_copies(
        self,
        kernel: Any,
        functions: Any,
        group: dict[str, Any],
        weights: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        seed: int | None,
    ) -> None:
        options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        maps = self._maps_on(functions, weights.device)
        for begin in range(0, weights.numel(), _MAX_ELEMENTS):
            part = _part(weights, gradient, state, begin, _MAX_ELEMENTS)
            tensors = [*part[:2], *(part[2][key] for key in ("state1", "state2", "absmax1", "absmax2"))]
            kernel.step_adam(
                tensors, maps, state["step"], **options, decouples=not self._decays_gradients, seed=seed, begin=begin
            )

    def _update_in_slices(
        self,
        functions: Any,
        group: dict[str, Any],
        weights: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
        chance: RoundingNoise | None,
        *,
        needs_copy: bool,
    ) -> None:
        decay = group["weight_decay"] if self._decays_gradients else 0.0
        on_host = weights.device.type == "cpu"  # its kernel makes fp32 copies of all arguments
        length = SLICE if needs_copy or on_host else _MAX_ELEMENTS
        for begin in range(0, weights.numel(), length):
            own, own_grad, own_state = _part(weights, gradient, state, begin, length)
            exact = own.float()
            if decay:
                exact_grad = own_grad.add(exact, alpha=decay)
            else:
                exact_grad = own_grad.to(torch.float32, copy=own.dtype is torch.bfloat16)
            self._call(functions, group, exact, exact_grad, own_state)
            if own.dtype is torch.bfloat16 and chance is not None:
                chance.round_into(own, exact, exact_grad)  # the copied gradient is reused for the noise
            elif own.dtype is not torch.float32:
                own.copy_(exact)

    def _call(
        self,
        functions: Any,
        group: dict[str, Any],
        weights: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, Any],
    ) -> None:
        beta1, beta2 = group["betas"]
        shared = {
            "eps": group["eps"],
            "step": state["step"],
            "lr": group["lr"],
            "beta1": beta1,
            "state2": state.get("state2"),
            "beta2": beta2,
            "beta3": 0.0,
            "alpha": 0.0,
            "weight_decay": 0.0 if self._decays_gradients else group["weight_decay"],
        }
        if state["state1"].dtype is torch.float32:
            functions.optimizer_update_32bit(self._kernel, gradient, weights, state["state1"], **shared)
            return
        maps = self._maps_on(functions, weights.device)
        functions.optimizer_update_8bit_blockwise(
            self._kernel,
            gradient,
            weights,
            state["state1"],
            **shared,
            qmap1=maps[0],
            qmap2=maps[1] if self._num_moments == 2 else None,
            absmax1=state["absmax1"],
            absmax2=state.get("absmax2"),
        )

    def _maps_on(self, functions: Any, device: torch.device) -> list[torch.Tensor]:
        """The signed and unsigned tables of the values of the 8-bit codes; constants, so not part of the state."""
        if device not in self._maps:
            self._maps[device] = [functions.create_dynamic_map(signed=signed).to(device) for signed in (True, False)]
        return self._maps[device]

    def state_dict(self) -> dict[str, Any]:
        """The state as in torch, after a host-device sync if it is paged."""
        sync_host_state(self)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy state into buffers of the right dtype and paging; torch would cast it to the dtype of the weights."""
        held = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = held
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        sync_host_state(self)
        for number, parameter in zip(numbers, parameters, strict=True):
            saved = state_dict["state"].get(number)
            if not saved:
                self.state.pop(parameter, None)
                continue
            self.allocate_state([parameter])
            _copy_into(self.state[parameter], saved)

    def __getstate__(self) -> dict[str, Any]:
        sync_host_state(self)
        own = {"is_paged": self.is_paged, "rounds_stochastically": self.rounds_stochastically, "_maps": {}}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for parameter, held in self.state.items():
            if any(is_paged(value) for value in held.values()):  # a deepcopy has the attribute but is not paged
                copied = dict(held)
                held.update(self._fresh_state(parameter))
                _copy_into(held, copied)


class AdamW8bit(Quantized):
    """Adam with 8-bit moments and decoupled weight decay."""

    _kernel = "adam"
    _num_moments = 2


class Adam8bit(AdamW8bit):
    """Adam with 8-bit moments and weight decay added to the gradients, as in `torch.optim.Adam`."""

    _decays_gradients = True


class Adagrad8bit(Quantized):
    """Adagrad with 8-bit sums and weight decay added to the gradients.

    The kernel's own weight decay is not used: on CUDA it affects the sums but not the update.
    """

    _kernel = "adagrad"
    _num_moments = 1
    _decays_gradients = True


def is_paged(value: Any) -> bool:
    """Whether a tensor is in CUDA managed memory allocated by bitsandbytes."""
    return bool(getattr(value, "is_paged", False))


def sync_host_state(optimizer: torch.optim.Optimizer) -> None:
    """Do a host-device sync before the host accesses state in host memory that the device also uses.

    This concerns paged state, which torch treats as ordinary host memory, and `trimtab.optim.offloaded_state`.
    """
    if "state_on_host" in vars(optimizer):
        vars(optimizer)["state_on_host"].settle()
    if getattr(optimizer, "is_paged", False) and torch.cuda.is_available():
        torch.cuda.synchronize()


def allocate_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Allocate the state of parameters that have none yet, for our optimizers and those of bitsandbytes.

    Args:
        optimizer: Any optimizer; others are left unchanged.
        parameters: Parameters of the optimizer.
    """
    own = getattr(optimizer, "allocate_state", None)
    if own is not None:
        own(parameters)
        return
    theirs = getattr(optimizer, "init_state", None) if hasattr(optimizer, "get_state_buffer") else None
    if theirs is None:
        return
    wanted = {id(parameter) for parameter in parameters}
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) in wanted and not optimizer.state[parameter]:
                theirs(group, parameter, group_index, index)


@functools.cache
def bitsandbytes_functions() -> Any:
    """The module `bitsandbytes.functional`, imported on first use: it is optional and takes seconds."""
    return importlib.import_module("bitsandbytes.functional")


@functools.cache
def _kernel_for(device: torch.device) -> Any:
    """The module with the Triton kernel if a trial step works on the device; else None."""
    if device.type != "cuda" or not has_package("triton"):
        return None
    try:
        kernel: Any = importlib.import_module("trimtab.optim.quantized_kernel")
        tensors = [torch.ones(2, dtype=torch.bfloat16, device=device) for _ in range(2)]
        tensors += [torch.zeros(2, dtype=torch.uint8, device=device) for _ in range(2)]
        tensors += [torch.zeros(1, device=device) for _ in range(2)]
        maps = [torch.zeros(256, device=device) for _ in range(2)]
        options: dict[str, Any] = {"lr": 0.0, "betas": (0.5, 0.5), "eps": 1.0, "weight_decay": 0.0}
        kernel.step_adam(tensors, maps, 1, **options, decouples=True, seed=2**62)
    except Exception as error:  # Triton needs a C compiler and raises arbitrary exceptions if it fails
        log_info_once(f"weights are updated in fp32 slices, because the faster Triton kernel does not run: {error}")
        return None
    return kernel


def _paged_zeros(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate zeros in managed memory. bitsandbytes never frees it, which is fine for one optimizer per process."""
    functions = bitsandbytes_functions()
    buffer: torch.Tensor = functions.get_paged(*parameter.shape, dtype=dtype, device=parameter.device)
    functions.fill(buffer, 0)  # on the device, followed by a host-device sync
    return buffer


def _part(
    weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], begin: int, length: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """A slice of a parameter's weights and gradient, and its flat state; it starts at a multiple of `BLOCK`."""
    is_whole = weights.numel() <= length  # slices take more host time than the rest of the update of a small parameter
    here = slice(begin, begin + length)
    blocks = slice(begin // BLOCK, -(-here.stop // BLOCK))
    parts: dict[str, Any] = {}
    for key, value in state.items():
        if key == "step":
            parts[key] = value
            continue
        parts[key] = value if value.dim() == 1 else value.view(-1)
        if not is_whole:
            parts[key] = parts[key][blocks if key.startswith("absmax") else here]
        if is_paged(value):
            parts[key].is_paged = True  # views do not inherit the attribute
    return (weights, gradient, parts) if is_whole else (weights[here], gradient[here], parts)


def _copy_into(state: dict[str, Any], saved: dict[str, Any]) -> None:
    for key, value in saved.items():
        if isinstance(value, torch.Tensor):
            state[key].copy_(value)
        else:
            state[key] = value
