"""Optimizers for weights that are bf16 alone: computed in fp32, and weights and state rounded up or down by chance.

A bf16 number has 8 bits: an update below 1/256 of a weight is lost when it is rounded to the nearest, and a second
moment with beta 0.999 never moves at all. Rounded up with the probability of what is left over, the mean is right. The
random numbers follow from a seed and the count of steps: processes that share a model have to round alike.

Passes over memory for AdamW, in bytes a parameter (to read and write weights, gradient and state once is 14): 24 to
make fp32 of weights, gradient and two moments, 28 for the fused step, 22 to round each of the three (4 of noise, 12 to
add it, 6 to keep the upper halves), 8 so that NaN stays NaN: 126. The temporaries are slices of 64 MiB together. Where
Triton is there Adam and AdamW are one kernel, of 14 bytes and no temporaries: `rounding_kernel`.
"""

import functools
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from trimtab.hardware.extras import has_package
from trimtab.log import say_once

# Elements that are in fp32 at a time. Four rows of them (weights, gradient, two moments) are 64 MiB.
SLICE = 2**22

_UPPER_HALF = slice(1 if sys.byteorder == "little" else 0, None, 2)  # of a float32 seen as two int16
_QUIET_NAN = 0x7FC00000


class Chance:
    """The random numbers of one step of one parameter group: the same in every process, and after a resume.

    The default generators do not serve: in each process they draw other numbers, and its weights would go other ways.

    Args:
        group: The group, with its `rounding_seed` and the count of its steps, `num_roundings`, which goes up.
        index: Which group of the optimizer it is.
    """

    def __init__(self, group: dict[str, Any], index: int) -> None:
        group["num_roundings"] += 1
        text = f"{group['rounding_seed']} {index} {group['num_roundings']}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        self.seed = int.from_bytes(digest, "big") >> 2 | 2**62  # always of 63 bits, so that kernels have one form
        self._generators: dict[torch.device, torch.Generator] = {}

    def round_into(self, target: torch.Tensor, source: torch.Tensor, noise: torch.Tensor) -> None:
        """Write fp32 numbers into bf16 ones, each up or down by chance so that the mean is the number itself.

        Args:
            target: The bf16 numbers, in one dimension.
            source: The fp32 numbers, used up.
            noise: Memory of the same size for random numbers, used up.
        """
        self.add_to(source, noise)
        upper_halves_into(target, source)

    def add_to(self, numbers: torch.Tensor, noise: torch.Tensor, *, keep_nan: bool = True) -> None:
        """Carry into the upper half of each fp32 number with the probability of what its lower half holds.

        Args:
            numbers: The fp32 numbers.
            noise: Memory of the same size, used up.
            keep_nan: Take care of the NaN of GPUs, whose bits are all ones and would turn to zero.
        """
        bits = numbers.view(torch.int32)
        if keep_nan:
            bits.clamp_(max=_QUIET_NAN)
        bits.add_(noise.view(torch.int32).random_(0, 2**16, generator=self._generator_on(noise.device)))

    def _generator_on(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self._generators[device]


def upper_halves_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Write fp32 numbers into bf16 ones, cut off."""
    target.view(torch.int16).copy_(source.view(torch.int16)[_UPPER_HALF])


class Lists(NamedTuple):
    """What torch's own functions step: tensors that belong together by their place in each list."""

    weights: list[torch.Tensor]
    gradients: list[torch.Tensor]
    moments: list[list[torch.Tensor]]
    steps: list[torch.Tensor]
    fused: bool | None


class StochasticRounding(torch.optim.Optimizer):
    """An optimizer of torch whose bf16 parameters have bf16 state, both rounded by chance. Others are stepped as ever.

    Args:
        params: Parameters, or groups of them.
        defaults: The options of torch's optimizer, with `fused`.
        rounding_seed: What the random numbers follow from, with the count of steps.
    """

    _moments: tuple[str, ...] = ()
    _counts = True  # its formula needs the number of the step
    _fused_kernel = ""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], rounding_seed: int) -> None:
        super().__init__(params, {**defaults, "rounding_seed": rounding_seed, "num_roundings": 0})

    def _advance(self, group: dict[str, Any], lists: Lists) -> None:
        """One step of torch's own function on these lists."""
        raise NotImplementedError

    def allocate_state(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the state of parameters that have none yet."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = self._fresh_state(parameter)

    def _fresh_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = {}
        rounded = parameter.dtype is torch.bfloat16
        if self._counts and rounded:
            state["step"] = 0
        elif self._counts:  # as torch does it
            home = parameter.device if self.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=home)
        layout = torch.contiguous_format if rounded else torch.preserve_format
        for name in self._moments:
            state[name] = torch.zeros_like(parameter, memory_format=layout)
        return state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for index, group in enumerate(self.param_groups):
            training = [parameter for parameter in group["params"] if parameter.grad is not None]
            self.allocate_state(training)
            self._step_exact(group, [p for p in training if p.dtype is not torch.bfloat16])
            self._step_rounded(group, [p for p in training if p.dtype is torch.bfloat16], Chance(group, index))
        return loss

    def _step_exact(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        moments = [[state[name] for state in states] for name in self._moments]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if parameters:
            steps = [state["step"] for state in states] if self._counts else []
            self._advance(group, Lists(parameters, gradients, moments, steps, group["fused"]))

    def _step_rounded(self, group: dict[str, Any], parameters: list[torch.Tensor], chance: Chance) -> None:
        by_step: dict[tuple[torch.device, int], list[list[torch.Tensor]]] = {}
        copies = []
        for parameter in parameters:
            assert parameter.grad is not None
            state, step = self.state[parameter], 1
            if self._counts:
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
        self, group: dict[str, Any], members: list[list[torch.Tensor]], step: int, chance: Chance
    ) -> bool:
        """Step with one kernel for everything, where there is one; False where there is none."""
        return False

    def _step_bucket(
        self, group: dict[str, Any], bucket: Sequence[Sequence[torch.Tensor]], step: int, chance: Chance
    ) -> None:
        """Pieces of parameters, each with its weights, gradient and moments, in fp32 side by side and back."""
        device, sizes = bucket[0][0].device, [piece[0].numel() for piece in bucket]
        rows = torch.empty((2 + len(self._moments), sum(sizes)), dtype=torch.float32, device=device)
        kinds = list(zip(*bucket, strict=True))
        parts = [row.split(sizes) for row in rows]
        torch._foreach_copy_([part for row in parts for part in row], [t for kind in kinds for t in kind])
        fused = has_fused(self._fused_kernel, device)
        home = device if fused else torch.device("cpu")
        count = torch.full((), step - 1, dtype=torch.float32, device=home)  # torch's function counts on
        weights, gradient, *moments = rows
        self._advance(group, Lists([weights], [gradient], [[row] for row in moments], [count], fused or None))
        for index in (0, *range(2, len(rows))):
            chance.add_to(rows[index], gradient, keep_nan=index == 0)  # the gradient is used up: room for the noise
            for target, part in zip(kinds[index], parts[index], strict=True):
                upper_halves_into(target, part)


class RoundedAdam(StochasticRounding):
    """Adam, whose weight decay is added to the gradients."""

    _moments = ("exp_avg", "exp_avg_sq")
    _fused_kernel = "_fused_adam_"
    _decouples = False

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        fused: bool | None = None,
        rounding_seed: int = 0,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": fused}
        super().__init__(params, options, rounding_seed)

    def _advance(self, group: dict[str, Any], lists: Lists) -> None:
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
        self, group: dict[str, Any], members: list[list[torch.Tensor]], step: int, chance: Chance
    ) -> bool:
        kernel = _kernel_for(members[0][0].device)
        if kernel is None or max(tensors[0].numel() for tensors in members) > kernel.LONGEST:
            return False
        options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        kernel.step_adam(members, step, **options, decouples=self._decouples, seed=chance.seed)
        return True


class RoundedAdamW(RoundedAdam):
    """Adam, whose weight decay acts on the weights."""

    _fused_kernel = "_fused_adamw_"
    _decouples = True


class RoundedAdagrad(StochasticRounding):
    """Adagrad, whose weight decay is added to the gradients."""

    _moments = ("sum",)
    _fused_kernel = "_fused_adagrad_"

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        eps: float,
        weight_decay: float = 0.0,
        fused: bool | None = None,
        rounding_seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "fused": fused}, rounding_seed)

    def _advance(self, group: dict[str, Any], lists: Lists) -> None:
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
    """SGD with or without momentum, whose weight decay is added to the gradients."""

    _counts = False
    _fused_kernel = "_fused_sgd_"

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
        fused: bool | None = None,
        rounding_seed: int = 0,
    ) -> None:
        self._moments = ("momentum_buffer",) if momentum else ()
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "fused": fused}
        super().__init__(params, options, rounding_seed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._moments = ("momentum_buffer",) if self.defaults["momentum"] else ()

    def _advance(self, group: dict[str, Any], lists: Lists) -> None:
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
    """The module with the one-pass kernel, once it has been seen to work on a device; else None."""
    if device.type != "cuda" or not has_package("triton"):
        return None
    try:
        kernel: Any = importlib.import_module("trimtab.optim.rounding_kernel")
        tensors = [torch.ones(2, dtype=torch.bfloat16, device=device) for _ in range(4)]
        kernel.step_adam([tensors], 1, lr=0.0, betas=(0.5, 0.5), eps=1.0, weight_decay=0.0, decouples=True, seed=2**62)
    except Exception as error:  # Triton needs a compiler on the machine, and raises whatever that does
        say_once(f"bf16 weights are stepped in slices, because the faster kernel does not run here: {error}")
        return None
    return kernel


def has_fused(kernel: str, device: torch.device) -> bool:
    """Whether torch has a fused kernel, such as "_fused_adam_", for a kind of device."""
    key = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}.get(device.type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{kernel}", key)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers in one dimension: itself where they lie in order, else a copy."""
    return tensor.detach().contiguous().view(-1)


def _buckets(parameters: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[list[torch.Tensor]]]:
    """Cut and gather tensors of one size each, so that no bucket has more than `SLICE` elements."""
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
