"""Selective recomputation: save matrix products and attention of a block, recompute everything else in backward.

`saving_contexts` makes two dispatch modes for each call of a block. The first is active in the forward and saves the
results of expensive operations; the second is active in the recomputation and returns them in the same order. A result
that was not saved is computed again, which costs time but never changes a result.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset(
    (
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::_addmm_activation"),
        *("aten::_scaled_mm", "aten::_grouped_mm", "aten::_scaled_grouped_mm", "aten::convolution"),
        # An activation times a 4-bit weight. `dequantize_4bit` is not in this list: saving its result would hold the
        # weight unquantized.
        "bitsandbytes::gemm_4bit",
    )
)
# Indices of the two factors among the operands.
_FACTORS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
_CHEAP_RATIO = 8  # ratio of output width to inner width above which a product is recomputed; see `_is_cheap`
_ATTENTION = frozenset(
    (
        *(f"aten::_scaled_dot_product_{name}" for name in ("flash_attention", "flash_attention_for_cpu")),
        *(f"aten::_scaled_dot_product_{name}_attention" for name in ("efficient", "cudnn")),
        *(f"aten::_{name}_attention_forward" for name in ("flash", "efficient", "cudnn")),
        "trimtab::short_attention_forward",
        *("torch_attn::_varlen_attn", "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"),
    )
)
# Operations whose backward needs no operands, so nothing before them is recomputed because of them.
_SAVES_NOTHING = frozenset(
    {"aten::add", "aten::add_", "aten::sub", "aten::_to_copy", "aten::clone", "aten::_unsafe_view"}
)
_OF_WEIGHTS = "_trimtab_of_weights"
# Memory for the result of a kernel that is not dispatched, such as a Triton kernel. It has no operands, but what the
# kernel writes there may depend on activations.
_MEMORY_NAMES = frozenset({"aten::empty", "aten::empty_strided"})

_PRODUCT, _KERNEL, _VIEW, _IN_PLACE, _MEMORY, _OTHER = range(6)
_kinds: dict[Any, tuple[int, bool]] = {}


def saving_contexts() -> tuple["SavingMode", TorchDispatchMode]:
    """Make the modes for one forward and its recomputation, as the `context_fn` of `torch.utils.checkpoint`."""
    saved = _Saved()
    return SavingMode(saved), _Returning(saved)


class _Product:
    """The saved result of one product."""

    def __init__(self, func: Any, result: Any) -> None:
        self.func = func
        self.result = _map_tensors(_alias, result)
        # state of the device's generator afterwards, if the kernel drew numbers
        self.generator_offset: int | None = None
        self._versions: list[int] = []

    def seal(self) -> None:
        """Record the tensor versions at the end of the forward."""
        self._versions = [tensor._version for tensor in _tensors_of(self.result)]

    def is_unchanged(self) -> bool:
        """Whether nothing was written to the result since it was sealed."""
        return self._versions == [tensor._version for tensor in _tensors_of(self.result)]


class _Saved:
    """The results saved in one call of a block.

    Products and in-place operations are numbered in order, whether saved or not. The recomputation executes the same
    operations, so it only has to count.
    """

    def __init__(self) -> None:
        self.products: dict[int, _Product] = {}
        self.absorbed: dict[int, tuple[Any, _Product]] = {}  # in-place operations whose result is in a saved product


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's guard against Dynamo costs more time than these modes


class SavingMode(_Mode):  # type: ignore[no-untyped-call]
    """Dispatch mode for the forward of a block."""

    def __init__(self, saved: _Saved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved = saved
        self._products: dict[int, _Product] = {}  # by storage
        self._unread: set[int] = set()  # storages of products that no operation has read yet
        self._num_products = 0
        self._num_in_place = 0
        self._last_is_needed = True  # whether backward needs something computed after the last product

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, saves_nothing = _kind_of(func)
        is_of_weights = kind != _MEMORY and _are_of_weights(args)
        if kind == _IN_PLACE:
            return self._write(func, args, kwargs, saves_nothing, is_of_weights)
        if kind != _VIEW:
            self._note_read(args)
        is_product = kind in (_PRODUCT, _KERNEL)
        is_saved = is_product and not is_of_weights and not _is_cheap(func, args)
        generator = _generator_of(args) if is_saved and kind == _KERNEL else None
        before = generator.get_offset() if generator is not None else None
        result = func(*args, **kwargs)
        if is_of_weights:
            _map_tensors(_mark, result)
        elif is_saved:
            product = self._save(func, result)
            after = generator.get_offset() if generator is not None else None
            if after != before:
                product.generator_offset = after
        elif not saves_nothing:
            self._note_saved_for_backward(args)
        self._num_products += is_product
        return result

    def __exit__(self, *exception: Any) -> None:
        # The recomputation stops at the last tensor that backward needs. A product that is only followed by sums (at
        # the end of a block, before the residual is added) is never requested.
        if not self._last_is_needed and self._saved.products:
            del self._saved.products[max(self._saved.products)]
        for product in self._saved.products.values():
            product.seal()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _save(self, func: Any, result: Any) -> _Product:
        product = self._saved.products[self._num_products] = _Product(func, result)
        storages = {_storage_of(tensor) for tensor in _tensors_of(result)}
        self._products |= dict.fromkeys(storages, product)
        self._unread |= storages
        # backward of an attention kernel needs its other results (logsumexp) as well
        self._last_is_needed = not isinstance(result, torch.Tensor)
        return product

    def _write(self, func: Any, args: Any, kwargs: Any, saves_nothing: bool, is_of_weights: bool) -> Any:
        """Run an in-place operation. A product that it changes before anything read it is saved with the change.

        LoRA adds its product to that of the base in this way. If an operation has read the product before, the product
        is recomputed for that operation.
        """
        target = args[0] if args else None
        is_single = isinstance(target, torch.Tensor)
        self._note_read(args[1:])
        self._note_read(kwargs.values())
        written = {_storage_of(tensor) for tensor in _tensors_of(args[:1])} & self._products.keys()
        if is_single and written and written <= self._unread:
            self._saved.absorbed[self._num_in_place] = func, self._products[written.pop()]
        elif written:
            stale = {self._products[storage] for storage in written}
            self._saved.products = {n: product for n, product in self._saved.products.items() if product not in stale}
        if is_single and not is_of_weights and hasattr(target, _OF_WEIGHTS):
            delattr(target, _OF_WEIGHTS)
        self._num_in_place += 1
        if not saves_nothing:
            self._note_saved_for_backward(args)
        return func(*args, **kwargs)

    def _note_saved_for_backward(self, args: Any) -> None:
        if not self._last_is_needed:
            # inside the forward of an autograd.Function, requires_grad does not tell whether a tensor is saved
            is_visible = torch.is_grad_enabled()
            self._last_is_needed = not is_visible or any(tensor.requires_grad for tensor in _tensors_of(args))

    def _note_read(self, values: Any) -> None:
        if self._unread:
            self._unread -= {_storage_of(tensor) for tensor in _tensors_of(values)}


class _Returning(_Mode):  # type: ignore[no-untyped-call]
    """Dispatch mode for the recomputation of a block: returns saved results."""

    def __init__(self, saved: _Saved) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._saved = saved

    def __enter__(self) -> Any:
        self._num_products = 0
        self._num_in_place = 0
        self._returned: set[_Product | None] = set()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _ = _kind_of(func)
        if kind == _IN_PLACE:
            writer, product = self._saved.absorbed.get(self._num_in_place, (func, None))
            self._num_in_place += 1
            if product in self._returned:
                _check_same(func, writer)
                return args[0]  # the returned product already includes this change
        elif kind in (_PRODUCT, _KERNEL):
            # each is returned once, so its memory is freed as soon as backward has used it
            product = self._saved.products.pop(self._num_products, None)
            self._num_products += 1
            if product is not None and product.is_unchanged():
                _check_same(func, product.func)
                return self._take(product, args)
        return func(*args, **(kwargs or {}))

    def _take(self, product: _Product, args: Any) -> Any:
        if product.generator_offset is not None:
            _generator_of(args).set_offset(product.generator_offset)
        self._returned.add(product)
        result, product.result = product.result, None
        return result


def _check_same(now: Any, before: Any) -> None:
    if now is not before:
        raise RuntimeError(f"the recomputation of a block differs from its forward: {now} instead of {before}")


def _kind_of(func: Any) -> tuple[int, bool]:
    """The kind of an operation, and whether its backward needs none of its operands."""
    known = _kinds.get(func)
    if known is None:
        known = _kinds[func] = _find_kind(func)
    return known


def _find_kind(func: Any) -> tuple[int, bool]:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher-order operator
        return _OTHER, False
    if schema.is_mutable:
        return _IN_PLACE, schema.name in _SAVES_NOTHING
    if func.is_view or schema.name == "aten::_unsafe_view":  # shares memory although its schema has no alias
        return _VIEW, True
    if schema.name in _PRODUCTS:
        return _PRODUCT, False
    if schema.name in _MEMORY_NAMES:
        return _MEMORY, True
    return (_KERNEL if schema.name in _ATTENTION else _OTHER), schema.name in _SAVES_NOTHING


def _is_cheap(func: Any, args: Any) -> bool:
    """Whether recomputing a product is about as fast as reading it: its inner dimension is much smaller than its width.

    Examples are the second product of a low-rank adapter and the scores of unfused attention over a long sequence.
    """
    factors = _FACTORS.get(func._schema.name)
    return factors is not None and args[factors[0]].shape[-1] * _CHEAP_RATIO < args[factors[1]].shape[-1]


def _are_of_weights(args: Any) -> bool:
    """Whether every tensor in `args` is a parameter or was computed only from parameters and constants."""
    for value in args:
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter) and not hasattr(value, _OF_WEIGHTS):
                return False
        elif isinstance(value, list | tuple) and not _are_of_weights(value):
            return False
    return True


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    setattr(tensor, _OF_WEIGHTS, True)
    return tensor


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Detach a tensor (its graph would form a reference cycle with the block) with a shared version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _map_tensors(function: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


def _tensors_of(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors_of(value)
        elif isinstance(value, Mapping):
            found += _tensors_of(value.values())
    return found


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _generator_of(args: Any) -> Any:
    """The generator that an attention kernel draws dropout from; None on the CPU, where kernels have no dropout."""
    device = args[0].device
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else None
