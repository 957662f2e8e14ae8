"""Optimizers for pure bf16 weights: computed in fp32, with stochastic rounding of weights and state to bf16.

bf16 has 8 significant bits: with rounding to nearest, an update below 1/256 of a weight is lost, and a second moment
with beta 0.999 never changes. Stochastic rounding rounds up with a probability equal to the remainder, so the expected
value is exact. Its random numbers depend only on a seed and the step count, because all processes that share a model
have to round identically.

Memory traffic of AdamW in bytes per parameter, where 14 is the minimum (read and write weights, gradient and state
once): 24 to convert weights, gradient and two moments to fp32, 28 for the fused step, 22 to round each of the three (4
to generate noise, 12 to add it, 6 to copy the upper halves), 8 to preserve NaN: 126 in total. Temporaries are slices of
64 MiB altogether. With Triton, Adam and AdamW run as one kernel with 14 bytes and no temporaries: `rounding_kernel`.
"""

import functools
import hashlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from trimtab.hardware.extras import has_package
from trimtab.log import log_info_once

# Elements converted to fp32 at a time: weights, gradient and two moments then take 64 MiB.
SLICE = 2**22

_UPPER_HALF = slice(1 if sys.byteorder == "little" else 0, None, 2)  # of a float32 viewed as two int16
_QUIET_NAN = 0x7FC00000


class RoundingNoise:
    """The random numbers of one step of one parameter group: the same in every process, and after a resume.

    torch's default generators are not used: their states differ between processes, so the weights would diverge.

    Args:
        group: The group with its `rounding_seed` and its step count `num_roundings`, which is incremented.
        index: Index of the group in the optimizer.
    """

    def __init__(self, group: dict[str, Any], index: int) -> None:
        group["num_roundings"] += 1
        text = f"{group['rounding_seed']} {index} {group['num_roundings']}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        # always 63 bits: Triton compiles one kernel per integer width of an argument
        self.seed = int.from_bytes(digest, "big") >> 2 | 2**62
        self._generators: dict[torch.device, torch.Generator] = {}

    def round_into(self, target: torch.Tensor, source: torch.Tensor, noise: torch.Tensor) -> None:
        """Round an fp32 tensor stochastically into a bf16 tensor.

        Args:
            target: 1-D bf16 tensor.
            source: fp32 tensor of the same size; overwritten.
            noise: fp32 buffer of the same size for random numbers; overwritten.
        """
        self.add_to(source, noise)
        upper_halves_into(target, source)

    def add_to(self, numbers: torch.Tensor, noise: torch.Tensor, *, keep_nan: bool = True) -> None:
        """Add 16 random bits to each fp32 number, so truncating its lower half to bf16 rounds it stochastically.

        Args:
            numbers: fp32 tensor, changed in place.
            noise: Buffer of the same size; overwritten.
            keep_nan: Preserve the NaN that GPUs produce: its bits are all ones, and adding to them would give zero.
        """
        bits = numbers.view(torch.int32)
        if keep_nan:
            bits.clamp_(max=_QUIET_NAN)
        bits.add_(noise.view(torch.int32).random_(0, 2**16, generator=self._generator_for(noise.device)))

    def _generator_for(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def upper_halves_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Truncate an fp32 tensor into a bf16 tensor."""
    target.view(torch.int16).copy_(source.view(torch.int16)[_UPPER_HALF])


class Lists(NamedTuple):
    """Arguments of torch's functional optimizers: parallel lists of tensors."""

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    moments: list[list[torch.Tensor]]
    steps: list[torch.Tensor]
    fused: bool | None


class StochasticRounding(torch.optim.Optimizer):
    """An optimizer of torch whose bf16 parameters have bf16 state, with stochastic rounding of both.

    Parameters of other dtypes are updated exactly as by torch's optimizer.

    Args:
        params: Parameters or parameter groups.
        weight_decay: For groups that do not set it.
        fused: As for torch's optimizer.
        rounding_seed: Seed of the rounding.
        options: The other options of torch's optimizer: lr, and betas, eps or momentum.
    """

    _moments: tuple[str, ...] = ()  # names of the state tensors
    _counts_steps = True  # whether the update depends on the step number
    _fused_kernel = ""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        weight_decay: float = 0.0,
        fused: bool | None = None,
        rounding_seed: int = 0,
        **options: Any,
    ) -> None:
        defaults = {**options, "weight_decay": weight_decay, "fused": fused}
        super().__init__(params, {**defaults, "rounding_seed": rounding_seed, "num_roundings": 0})

    def _update(self, group: dict[str, Any], lists: Lists) -> None:
        """Call torch's functional optimizer."""
        raise NotImplementedError

    def allocate_state(self, parameters: Iterable[torch.Tensor]) -> None:
        """Allocate the state of parameters that have none yet."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self._fresh_state(parameter)

    def _fresh_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {}
        rounded = parameter.dtype is torch.bfloat16
        if self._counts_steps and rounded:
            state["step"] = 0
        elif self._counts_steps:  # a tensor, as in torch
            step_device = parameter.device if self.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
        layout = torch.contiguous_format if rounded else torch.preserve_format
        for name in self._moments:
            state[name] = torch.zeros_like(parameter, memory_format=layout)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            with_grad = [parameter for parameter in group["params"] if parameter.grad is not None]
            self.allocate_state(with_grad)
            self._step_exact(group, [p for p in with_grad if p.dtype is not torch.bfloat16])
            self._step_rounded(group, [p for p in with_grad if p.dtype is torch.bfloat16], RoundingNoise(group, index))
        return loss

    def _step_exact(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        moments = [[state[name] for state in states] for name in self._moments]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if parameters:
            steps = [state["step"] for state in states] if self._counts_steps else []
            self._update(group, Lists(parameters, gradients, moments, steps, group["fused"]))

    def _step_rounded(self, group: dict[str, Any], parameters: list[torch.Tensor], chance: RoundingNoise) -> None:
        by_step: dict[tuple[torch.device, int], list[list[torch.Tensor]]] = {}
        copies = []
        for parameter in parameters:
            assert parameter.grad is not None
            state, step = self.state[parameter], 1
            if self._counts_steps:
                step = state["step"] = state["step"] + 1
            weights = flat(parameter)
            tensors = [weights, flat(parameter.grad), *(flat(state[name]) for name in self._moments)]
            by_step.setdefault((parameter.device, step), []).append(tensors)
            if not parameter.is_contiguous():
                copies.append((parameter, weights))
        for (_, step), members in by_step.items():
            if not self._step_in_one_pass(group, members, step, chance):
                for bucket in _buckets(members):
                    self._step_bucket(group, bucket, step, chance)
        for parameter, weights in copies:
            parameter.copy_(weights.view_as(parameter))

    def _step_in_one_pass(
        self, group: dict[str, Any], members: list[list[torch.Tensor]], step: int, chance: RoundingNoise
    ) -> bool:
        """Update parameters with a single fused kernel; returns False if there is none."""
        return False

    def _step_bucket(
        self, group: dict[str, Any], bucket: Sequence[Sequence[torch.Tensor]], step: int, chance: RoundingNoise
    ) -> None:
        """Update slices of parameters (weights, gradient, moments) in an fp32 buffer, and round them back to bf16."""
        device, sizes = bucket[0][0].device, [piece[0].numel() for piece in bucket]
        rows = torch.empty((2 + len(self._moments), sum(sizes)), dtype=torch.float32, device=device)
        kinds = list(zip(*bucket, strict=True))
        parts = [row.split(sizes) for row in rows]
        torch._foreach_copy_([part for row in parts for part in row], [t for kind in kinds for t in kind])
        fused = has_fused(self._fused_kernel, device)
        step_device = device if fused else torch.device("cpu")
        count = torch.full((), step - 1, dtype=torch.float32, device=step_device)  # torch's function increments it
        weights, gradient, *moments = rows
        self._update(group, Lists([weights], [gradient], [[row] for row in moments], [count], fused or None))
        for index in (0, *range(2, len(rows))):
            chance.add_to(rows[index], gradient, keep_nan=index == 0)  # reuses the gradient's buffer for the noise
            for target, part in zip(kinds[index], parts[index], strict=True):
                upper_halves_into(target, part)


class RoundedAdam(StochasticRounding):
    """Adam, with weight decay added to the gradients."""

    _moments = ("exp_avg", "exp_avg_sq")
    _fused_kernel = "_fused_adam_"
    _decouples = False

    def _update(self, group: dict[str, Any], lists: Lists) -> None:
        beta1, beta2 = group["betas"]
        adam(
            lists.weights,
            lists.gradients,
            lists.moments[0],
            lists.moments[1],
            [],
            lists.steps,
            fused=lists.fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=self._decouples,
        )

    def _step_in_one_pass(
        self, group: dict[str, Any], members: list[list[torch.Tensor]], step: int, chance: RoundingNoise
    ) -> bool:
        kernel = _kernel_for(members[0][0].device)
        if kernel is None or max(tensors[0].numel() for tensors in members) > kernel.LONGEST:
            return False
        options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        kernel.step_adam(members, step, **options, decouples=self._decouples, seed=chance.seed)
        return True


class RoundedAdamW(RoundedAdam):
    """Adam with decoupled weight decay."""

    _fused_kernel = "_fused_adamw_"
    _decouples = True


class RoundedAdagrad(StochasticRounding):
    """Adagrad, with weight decay added to the gradients."""

    _moments = ("sum",)
    _fused_kernel = "_fused_adagrad_"

    def _update(self, group: dict[str, Any], lists: Lists) -> None:
        adagrad(
            lists.weights,
            lists.gradients,
            lists.moments[0],
            lists.steps,
            fused=lists.fused,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            lr_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )


class RoundedSGD(StochasticRounding):
    """SGD with or without momentum, with weight decay added to the gradients."""

    _counts_steps = False
    _fused_kernel = "_fused_sgd_"

    @property
    def _moments(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("momentum_buffer",) if self.defaults["momentum"] else ()

    def _update(self, group: dict[str, Any], lists: Lists) -> None:
        sgd(
            lists.weights,
            lists.gradients,
            list(lists.moments[0]) if lists.moments else [None] * len(lists.weights),
            fused=lists.fused,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


@functools.cache
def _kernel_for(device: torch.device) -> Any:
    """The module with the Triton kernel if a trial step works on the device; else None."""
    if device.type != "cuda" or not has_package("triton"):
        return None
    try:
        kernel: Any = importlib.import_module("trimtab.optim.rounding_kernel")
        tensors = [torch.ones(2, dtype=torch.bfloat16, device=device) for _ in range(4)]
        kernel.step_adam([tensors], 1, lr=0.0, betas=(0.5, 0.5), eps=1.0, weight_decay=0.0, decouples=True, seed=2**62)
    except Exception as error:  # Triton needs a C compiler and raises arbitrary exceptions if it fails
        log_info_once(f"bf16 weights are updated in slices, because the faster Triton kernel does not run: {error}")
        return None
    return kernel


def has_fused(kernel: str, device: torch.device) -> bool:
    """Whether torch has a fused kernel, such as "_fused_adam_", for a device type."""
    key = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}.get(device.type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{kernel}", key)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten a tensor: a view if it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def _buckets(parameters: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
    """Split and group parameters (weights, gradient and moments of each) into buckets of at most `SLICE` elements."""
    bucket: list[list[torch.Tensor]] = []
    room = SLICE
    for tensors in parameters:
        begin, num_elements = 0, tensors[0].numel()
        while begin < num_elements:
            end = min(num_elements, begin + room)
            bucket.append([tensor[begin:end] for tensor in tensors])
            room -= end - begin
            begin = end
            if not room:
                yield bucket
                bucket, room = [], SLICE
    if bucket:
        yield bucket
