"""Properties of a step on CUDA that `meta` tensors do not show: choice of kernels, workspaces, fused optimizers.

They apply to torch 2.11 to 2.13; measurements in tests/planner verify each of them, except for convolutions.
"""

import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trimtab.planner.trace import routing
from trimtab.planner.trace.autocast import autocast_on_stand_in
from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread
from trimtab.techniques.base import Accelerator

MIB = 2**20
aten = torch.ops.aten
_ASKING_FOR_KERNELS = (
    *(f"torch.optim.{name}" for name in ("adam", "adamw", "sgd", "adagrad", "optimizer")),
    "torch.utils._foreach_utils",
)
_HALF = (torch.float16, torch.bfloat16)
_PRODUCTS = {aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.addmv, aten.mv}
_NROWS_PER_THREAD = 10  # for torch's kernel for the gradient of an embedding
_MOST_THREADS, _WARP, _FEWEST_PER_THREAD, _MOST_PER_THREAD = 512, 32, 16, 256  # for its kernel for sums
_NORM_STRETCH = 65536  # numbers, for its kernel for norms of lists
_FEW_INDICES = 3072  # up to this number of indices it does not sort


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU that memory depends on.

    Attributes:
        capability: CUDA's compute capability.
        flash: Whether torch's flash attention kernel runs.
        num_multiprocessors: Number of multiprocessors; determines the workspaces of some kernels.
        threads_per_multiprocessor: Maximum number of threads on each; determines the workspaces of some kernels.
        workspace_config: The CUBLAS_WORKSPACE_CONFIG of a run on it, such as ":4096:8"; None if not set.
        is_deterministic: Whether a run on it uses deterministic kernels only.
    """

    capability: tuple[int, int] = (9, 0)
    flash: bool = True
    num_multiprocessors: int = 132
    threads_per_multiprocessor: int = 2048
    workspace_config: str | None = None
    is_deterministic: bool = False

    @property
    def accelerator(self) -> Accelerator:
        """The GPU as the techniques' rules see it."""
        return Accelerator("cuda", self.capability, self.num_multiprocessors, self.flash, is_here=False)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the cuBLAS workspace per thread: CUBLAS_WORKSPACE_CONFIG (`:SIZE_IN_KIB:COUNT`) or the default."""
        buffers = re.findall(r":(\d+):(\d+)", self.workspace_config or "")
        if buffers:
            return sum(int(size) * int(number) for size, number in buffers) * 1024
        return 32 * MIB if self.capability >= (9, 0) else 8320 * 1024


class CudaRules:
    """The rules of CUDA; see `trimtab.planner.trace.recorder.Rules`."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def kept(self, func: Any, args: tuple[Any, ...], in_backward: bool) -> list[tuple[str, int]]:
        """Return cuBLAS's workspaces, one per thread: for the main thread and for autograd's."""
        packet = func._overloadpacket
        thread = "autograd" if in_backward else "main"
        if packet is aten._scaled_mm:
            return [(f"cublaslt {thread}", MIB)]
        if packet not in _PRODUCTS:
            return []
        found = [(f"cublas {thread}", self.gpu.workspace_bytes)]
        if packet is aten.addmm and args[0].dim() == 1:  # with a bias, it is cuBLASLt's workspace
            found.append((f"cublaslt {thread}", MIB))
        return found

    def temporaries(self, func: Any, args: tuple[Any, ...], out: Any) -> list[int]:
        """Bytes of temporary buffers that a kernel allocates before its outputs."""
        rule = _TEMPORARIES.get(func._overloadpacket)
        return [] if rule is None else [size for size in rule(self.gpu, args, out) if size > 0]

    def workspaces(self, func: Any, args: tuple[Any, ...]) -> list[int]:
        """Bytes of temporary buffers that a kernel allocates after its outputs."""
        rule = _WORKSPACES.get(func._overloadpacket)
        return [] if rule is None else rule(self.gpu, args)

    def stand_in(self, func: Any) -> Callable[..., Any] | None:
        """The replacement of an operation that does not run on `meta`, or is slow on it."""
        return _STAND_INS.get(func) or _STAND_INS.get(func._overloadpacket)


# ---------------------------------------------------------------------- inside kernels


def _embedding_backward(gpu: Gpu, args: tuple[Any, ...], out: Any) -> list[int]:
    """Temporaries of sorting the indices; rows with the same index are summed in fp32 in two passes."""
    grad, indices, num_weights = args[:3]
    count, width = indices.numel(), grad.shape[-1]
    if count <= _FEW_INDICES:
        return []
    segments = min(count, int(num_weights))
    partial = count // _NROWS_PER_THREAD + segments
    index_bytes = count * 8
    return [2 * index_bytes, 2 * index_bytes, partial * 8, segments * 8, partial * (-(-width // 32) * 32) * 4]


def _sum(gpu: Gpu, args: tuple[Any, ...], out: Any) -> list[int]:
    """Partial sums that thread blocks store when many numbers are reduced to few sums.

    This follows the launch configuration of torch's reduction kernel: a thread computes four adjacent sums if the
    numbers of one sum are not contiguous, as in the gradient of a bias.
    """
    values = args[0]
    num_outputs = max(1, out.numel())
    per_output = values.numel() // num_outputs
    dims = args[1] if len(args) > 1 and args[1] else range(values.dim())
    if not values.is_contiguous() or per_output < _MOST_PER_THREAD:
        return []
    along_rows = all(dim % values.dim() < values.dim() - 1 for dim in dims) and num_outputs > 1
    vector = 4 if along_rows and num_outputs % 4 == 0 else 1
    most_threads = _MOST_THREADS // vector
    across, along = (num_outputs // vector, per_output) if along_rows else (per_output, num_outputs)
    across, along = (min(_power_below(size), most_threads) for size in (across, along))
    width = min(across, _WARP)
    height = min(along, most_threads // width)
    width = min(across, most_threads // height)
    per_thread = per_output if along_rows else -(-per_output // width)
    if per_thread < height * _FEWEST_PER_THREAD and per_thread < _MOST_PER_THREAD:
        return []
    per_thread = -(-per_thread // height)
    grid = -(-(num_outputs // vector) // (width if along_rows else 1))
    wanted = gpu.num_multiprocessors * (gpu.threads_per_multiprocessor // (width * height))
    if per_thread < _MOST_PER_THREAD or grid > wanted:
        return []
    blocks = max(min(-(-wanted // grid), -(-per_thread // _FEWEST_PER_THREAD)), -(-per_thread // _MOST_PER_THREAD))
    if blocks <= 1:
        return []
    return [4 * num_outputs * blocks * (width * vector if along_rows else 1), 4 * grid]


def _foreach_norm(gpu: Gpu, args: tuple[Any, ...], out: Any) -> list[int]:
    """Partial norms, one for each chunk of each tensor; all tensors get as many chunks as the longest one."""
    longest = max(tensor.numel() for tensor in args[0])
    return [4 * len(args[0]) * -(-longest // _NORM_STRETCH)]


def _power_below(number: int) -> int:
    return 1 << max(0, int(number).bit_length() - 1)


def _safe_softmax(gpu: Gpu, args: tuple[Any, ...], out: Any) -> list[int]:
    """A mask of the entries that are minus infinity; rows with only such entries become zero."""
    return [args[0].numel()]


def _softmax_backward(gpu: Gpu, args: tuple[Any, ...], out: Any) -> list[int]:
    """The product of the gradient and the result."""
    grad, result = args[:2]
    return [grad.numel() * torch.promote_types(grad.dtype, result.dtype).itemsize]


def _flash_backward(
    gpu: Gpu, query: torch.Tensor, num_rows: int, num_heads: int, num_rounded: int, *, is_grouped: bool
) -> list[int]:
    """Temporaries of flash attention: the fp32 sum of the gradient of queries, and one number per row of scores.

    With grouped heads the gradients of keys and values are computed for every head of the queries, and then summed. A
    deterministic kernel has as many sums as can be computed at the same time; this is taken from its source, not
    measured.

    Args:
        gpu: The GPU.
        query: The queries.
        num_rows: Rows of the batch.
        num_heads: Heads of the queries.
        num_rounded: Tokens of all rows, rounded up as the kernel does.
        is_grouped: Whether keys and values have fewer heads than queries.
    """
    width = query.shape[-1]
    step = 32 if width <= 128 else 64
    num_scores = num_heads * num_rounded
    num_sums = -(-gpu.num_multiprocessors // (num_rows * num_heads)) if gpu.is_deterministic else 1
    found = [4 * num_scores, 4 * num_sums * num_scores * (-(-width // step) * step)]
    return found + [query.numel() * query.element_size()] * 2 if is_grouped else found


def _packed_attention_backward(gpu: Gpu, args: tuple[Any, ...]) -> list[int]:
    """Temporaries of flash attention over packed rows, which rounds each row up to 128 tokens."""
    query, key, boundaries = args[1], args[2], args[6]
    num_tokens, num_heads, _ = query.shape
    num_rows = boundaries.numel() - 1
    num_rounded = num_tokens + 128 * num_rows
    return _flash_backward(gpu, query, num_rows, num_heads, num_rounded, is_grouped=key.shape[1] != num_heads)


def _attention_backward(gpu: Gpu, args: tuple[Any, ...]) -> list[int]:
    """Temporaries of flash attention, which rounds rows up to 128 tokens, or of cuDNN, which does not round.

    cuDNN is traced as flash attention. It has one workspace for everything, which is assumed for both: in measurements
    of both kernels with rows of 500 to 120,000 tokens on an H200, the bytes were the same except for the rounding.
    """
    query, key = args[1], args[2]
    num_rows, num_heads, num_tokens, _ = query.shape
    num_rounded = num_rows * -(-num_tokens // 128) * 128
    return [sum(_flash_backward(gpu, query, num_rows, num_heads, num_rounded, is_grouped=key.shape[1] != num_heads))]


def _efficient_attention_backward(gpu: Gpu, args: tuple[Any, ...]) -> list[int]:
    """Temporaries of the memory-efficient kernel, which sums the gradient of half-precision queries in fp32."""
    query = args[1]
    num_scores = query.numel() // query.shape[-1]
    return [4 * num_scores, 4 * query.numel()] if query.dtype in _HALF else [4 * num_scores]


def _convolution(gpu: Gpu, args: tuple[Any, ...], out: Any) -> list[int]:
    """An allowance for cuDNN's workspace, which depends on the algorithm that cuDNN chooses and was not measured.

    Its fast kernels need channels-last memory, and copy inputs, weights and results into that format. Groups, such as
    those of a state-space model, have separate kernels.
    """
    num_groups = next(value for value in reversed(args) if type(value) is int)
    if num_groups != 1:
        return []
    tensors = [value for value in (*args[:3], out) if isinstance(value, torch.Tensor) and value.dim() > 1]
    return [sum(tensor.numel() * tensor.element_size() for tensor in tensors)]


_TEMPORARIES: dict[Any, Callable[[Gpu, tuple[Any, ...], Any], list[int]]] = {
    aten.embedding_dense_backward: _embedding_backward,
    aten._safe_softmax: _safe_softmax,
    aten._softmax_backward_data: _softmax_backward,
    aten._foreach_norm: _foreach_norm,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution,
    aten.sum: _sum,
    aten.mean: _sum,
    aten.sort: lambda gpu, args, out: routing.sort_temporaries(args),
}

_WORKSPACES: dict[Any, Callable[[Gpu, tuple[Any, ...]], list[int]]] = {
    aten._flash_attention_backward: _packed_attention_backward,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_attention_backward,
}


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


# torch computes the shapes of these in Python, which takes milliseconds; these replacements take microseconds.


def _layer_norm(x: torch.Tensor, shape: list[int], weight: Any, bias: Any, eps: float) -> tuple[torch.Tensor, ...]:
    of_rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    return made, *(torch.empty(of_rows, dtype=torch.float32, device="meta") for _ in range(2))


def _layer_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, shape: Any, mean: Any, rstd: Any, weight: Any, bias: Any, wanted: list[bool]
) -> tuple[torch.Tensor | None, ...]:
    like = (x, weight, bias)
    return tuple(torch.empty_like(t) if is_wanted else None for t, is_wanted in zip(like, wanted, strict=True))


def _like_second(grad: torch.Tensor, x: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


def _addmm(bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
    return left.new_empty((left.shape[0], right.shape[1]))


def _addmm_into(*tensors: Any, out: torch.Tensor, **options: Any) -> torch.Tensor:
    return out  # the meta kernel of torch 2.11 misreads the output dtype as a number


_STAND_INS: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.gelu_backward.default: _like_second,
    aten.native_dropout.default: _native_dropout,
    aten.addmm.default: _addmm,
    aten.addmm.dtype_out: _addmm_into,
    aten._fused_adamw_: _nothing,
    aten._fused_adam_: _nothing,
    aten._fused_sgd_: _nothing,
    aten._fused_adagrad_: _nothing,
    **routing.STAND_INS,
}


# ---------------------------------------------------------------------- attention


def attention_for(gpu: Gpu) -> Callable[..., torch.Tensor]:
    """`scaled_dot_product_attention` with the kernel that torch would choose on a GPU."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if torch.is_autocast_enabled("meta"):
            dtype = torch.get_autocast_dtype("meta")
            query, key, value = (x.to(dtype) for x in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(dtype)
        trains = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        switches: Any = torch.backends.cuda  # a technique may have disabled kernels
        uses_flash = gpu.flash and switches.flash_sdp_enabled()
        has_one_width = query.shape[-1] == value.shape[-1]
        if uses_flash and query.dtype in _HALF and attn_mask is None and has_one_width and query.shape[-1] <= 256:
            return _flash(query, key, value, dropout_p, is_causal, scale)
        grouped = enable_gqa and query.shape[-3] != key.shape[-3]
        # T5's position biases are trainable, and are not contiguous unless the model copies them
        plain_mask = attn_mask is None or (not attn_mask.requires_grad and attn_mask.stride(-1) == 1)
        uses_efficient = switches.mem_efficient_sdp_enabled()
        alignment = 8 if query.dtype in _HALF else 4  # the head sizes, which may differ
        is_aligned = query.shape[-1] % alignment == 0 and value.shape[-1] % alignment == 0
        if uses_efficient and not grouped and plain_mask and is_aligned:
            return _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, trains)
        return _math(query, key, value, attn_mask, dropout_p, is_causal, scale)

    return attention


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    width = query.shape[-1]
    padded = -(-width // 8) * 8
    if padded != width:
        query, key, value = (functional.pad(x, (0, padded - width)) for x in (query, key, value))
    result: torch.Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return result[..., :width]


_MASK_ALIGNMENT = 8  # alignment of the rows of a mask, in elements: other masks are copied


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    trains: bool,
) -> torch.Tensor:
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), 0.0)
        if any(stride % _MASK_ALIGNMENT for stride in mask.stride()[:-1]):
            length = mask.shape[-1]
            mask = functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    result: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, trains, dropout_p, is_causal, scale=scale
    )[0]
    return result


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Attention from matrix products, as torch's math backend composes it on a GPU.

    On `meta` torch composes it differently: the mask is not added in place, and dropout masks take more than a byte per
    element. Operations of aten are called directly, because autocast must not change them.
    """
    dtype, width = query.dtype, query.shape[-1]
    if dtype in _HALF:
        query, key, value = (x.float() for x in (query, key, value))
    held: tuple[torch.Tensor, ...] = (query, key, value)  # to the end
    root = math.sqrt(scale or 1 / math.sqrt(width))
    query = aten.mul.Tensor(query, root)
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), 0.0)
    num_groups = query.shape[-3] // key.shape[-3]
    if num_groups > 1:
        key, value = (aten.repeat_interleave.self_int(x, num_groups, -3) for x in (key, value))
    scores = aten.matmul(query, aten.mul.Tensor(key.transpose(-2, -1), root))
    if mask is not None:
        scores = aten.add_.Tensor(scores, mask)
    scores = aten._safe_softmax(scores, -1)
    if dropout_p:
        scores = aten.native_dropout(scores, dropout_p, True)[0]
    held += (scores.to(dtype),)  # torch returns it as well
    result: torch.Tensor = aten.matmul(scores, value).to(dtype)
    del held
    return result


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """CUDA's dropout stores a mask of one byte per element."""
    if not training or not p:
        return x
    return torch.native_dropout(x, p, True)[0]


# ---------------------------------------------------------------------- all patches


@contextlib.contextmanager
def as_on_cuda(gpu: Gpu) -> Iterator[None]:
    """Make operations of this thread on `meta` allocate the same memory as on a GPU."""
    with autocast_on_stand_in(), stand_ins_on_this_thread(_stand_ins_for(gpu)):
        yield


def _stand_ins_for(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    yield functional, "scaled_dot_product_attention", attention_for(gpu)
    yield functional, "dropout", _dropout
    # torch.utils.checkpoint restores the host generator, which is useless on meta and would disturb other threads
    yield torch, "set_rng_state", _nothing
    fused = torch.utils._foreach_utils._get_fused_kernels_supported_devices
    foreach = torch.utils._foreach_utils._get_foreach_kernels_supported_devices
    for module in (sys.modules[name] for name in _ASKING_FOR_KERNELS):
        for name, real in (
            ("_get_fused_kernels_supported_devices", fused),
            ("_get_foreach_kernels_supported_devices", foreach),
        ):
            if hasattr(module, name):
                yield module, name, lambda real=real: [*real(), "meta"]
