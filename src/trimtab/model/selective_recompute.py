"""Selective recomputation: of what a block computes, matrix products and attention are kept, the rest is made again.

Two dispatch modes, made for each call of a block by `keep_products`. The first runs with the forward and keeps what is
dear; the second runs with the recomputation and hands it out in the same order. What is not there is computed, so a
product that was not kept costs time and never changes a result.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_PRODUCTS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::addbmm",
        "aten::_addmm_activation",
        "aten::_scaled_mm",
        "aten::_grouped_mm",
        "aten::_scaled_grouped_mm",
        "aten::convolution",
        # An activation times a weight of 4 bits. Its sister `dequantize_4bit` makes weights and is no product: kept, it
        # would undo the quantization.
        "bitsandbytes::gemm_4bit",
    }
)
# Where the two factors stand among the operands.
_FACTORS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2)}
_WIDE = 8
_ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
    }
)
# Their gradients need none of their operands, so nothing before them has to be made again for them alone.
_SAVES_NOTHING = frozenset(
    {"aten::add", "aten::add_", "aten::sub", "aten::_to_copy", "aten::clone", "aten::_unsafe_view"}
)
_OF_WEIGHTS = "_trimtab_of_weights"

_PRODUCT, _KERNEL, _VIEW, _IN_PLACE, _OTHER = range(5)
_kinds: dict[Any, tuple[int, bool]] = {}


def keep_products() -> tuple["Keeping", TorchDispatchMode]:
    """The modes for one forward and for its recomputation, as `torch.utils.checkpoint` takes them."""
    kept = _Kept()
    return Keeping(kept), _HandingOut(kept)


class _Product:
    """The result of one product, and whether it may stand for it."""

    def __init__(self, func: Any, result: Any) -> None:
        self.func = func
        self.result = _map_tensors(_alias, result)
        self.generator_offset: int | None = None  # where the device's generator stood afterwards, if it moved
        self._versions: list[int] = []

    def seal(self) -> None:
        """From now on nothing may write into it."""
        self._versions = [tensor._version for tensor in _tensors_of(self.result)]

    def is_as_it_was(self) -> bool:
        """Whether nothing has written into it since it was sealed."""
        return self._versions == [tensor._version for tensor in _tensors_of(self.result)]


class _Kept:
    """What is kept of one call of a block.

    Products and in-place operations are numbered as they come, whether or not they are kept: the recomputation, which
    does the same operations, counts in the same way and needs to judge nothing again.
    """

    def __init__(self) -> None:
        self.products: dict[int, _Product] = {}
        self.taken_up: dict[int, tuple[Any, _Product]] = {}  # in-place operations and what they have changed


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the guard against it costs more than all that is done here


class Keeping(_Mode):  # type: ignore[no-untyped-call]
    """Goes with the forward of a block."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._products: dict[int, _Product] = {}  # by storage
        self._unread: set[int] = set()  # storages of products that nothing has read so far
        self._num_products = 0
        self._num_in_place = 0
        self._last_is_needed = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, saves_nothing = _kind_of(func)
        is_of_weights = _are_of_weights(args)
        if kind == _IN_PLACE:
            return self._write(func, args, kwargs, saves_nothing, is_of_weights)
        if kind != _VIEW:
            self._note_reading(args)
        is_product = kind in (_PRODUCT, _KERNEL)
        is_kept = is_product and not is_of_weights and not _is_cheap(func, args)
        generator = _generator_of(args) if is_kept and kind == _KERNEL else None
        before = generator.get_offset() if generator is not None else None
        result = func(*args, **kwargs)
        if is_of_weights:
            _map_tensors(_mark, result)
        elif is_kept:
            product = self._keep(func, result)
            after = generator.get_offset() if generator is not None else None
            if after != before:
                product.generator_offset = after
        elif not saves_nothing:
            self._note_saving(args)
        self._num_products += is_product
        return result

    def __exit__(self, *exception: Any) -> None:
        # The recomputation stops at the last tensor that backward needs. A product after which only sums come (the one
        # that ends a block, before the residual is added) is never asked for.
        if not self._last_is_needed and self._kept.products:
            del self._kept.products[max(self._kept.products)]
        for product in self._kept.products.values():
            product.seal()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def give_out(self, output: Any) -> None:
        """Forget what the block hands to others, who may write into it unseen."""
        handed = {_storage_of(tensor) for tensor in _tensors_of([output])}
        self._forget(handed)
        self._products.clear()

    def _forget(self, storages: set[int]) -> None:
        gone = {self._products[storage] for storage in storages if storage in self._products}
        self._kept.products = {n: product for n, product in self._kept.products.items() if product not in gone}

    def _keep(self, func: Any, result: Any) -> _Product:
        product = self._kept.products[self._num_products] = _Product(func, result)
        storages = {_storage_of(tensor) for tensor in _tensors_of(result)}
        self._products |= dict.fromkeys(storages, product)
        self._unread |= storages
        # of the results of an attention kernel, backward needs more than the one that goes on
        self._last_is_needed = not isinstance(result, torch.Tensor)
        return product

    def _write(self, func: Any, args: Any, kwargs: Any, saves_nothing: bool, is_of_weights: bool) -> Any:
        """Run an in-place operation. A product that it changes, and that nothing has read, is kept as it is then.

        LoRA adds its own product to that of the base in this way. Where something has read the product before, it has
        to be made again for that reader.
        """
        target = args[0] if args else None
        is_single = isinstance(target, torch.Tensor)
        self._note_reading(args[1:])
        self._note_reading(kwargs.values())
        written = {_storage_of(tensor) for tensor in _tensors_of(args[:1])} & self._products.keys()
        if is_single and written and written <= self._unread:
            self._kept.taken_up[self._num_in_place] = func, self._products[written.pop()]
        elif written:
            self._forget(written)
        if is_single and not is_of_weights and hasattr(target, _OF_WEIGHTS):
            delattr(target, _OF_WEIGHTS)
        self._num_in_place += 1
        if not saves_nothing:
            self._note_saving(args)
        return func(*args, **kwargs)

    def _note_saving(self, args: Any) -> None:
        if not self._last_is_needed:
            # inside a function with a backward of its own, tensors do not say whether they are saved
            is_seen = torch.is_grad_enabled()
            self._last_is_needed = not is_seen or any(tensor.requires_grad for tensor in _tensors_of(args))

    def _note_reading(self, values: Any) -> None:
        if self._unread:
            self._unread -= {_storage_of(tensor) for tensor in _tensors_of(values)}


class _HandingOut(_Mode):  # type: ignore[no-untyped-call]
    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __enter__(self) -> Any:
        self._num_products = 0
        self._num_in_place = 0
        self._handed_out: set[_Product | None] = set()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _ = _kind_of(func)
        if kind == _IN_PLACE:
            writer, product = self._kept.taken_up.get(self._num_in_place, (func, None))
            self._num_in_place += 1
            if product in self._handed_out:
                _check_same(func, writer)
                return args[0]  # what was handed out has it already
        elif kind in (_PRODUCT, _KERNEL):
            # each is given away once, so that its memory is free as soon as backward has used it
            product = self._kept.products.pop(self._num_products, None)
            self._num_products += 1
            if product is not None and product.is_as_it_was():
                _check_same(func, product.func)
                return self._hand_out(product, args)
        return func(*args, **(kwargs or {}))

    def _hand_out(self, product: _Product, args: Any) -> Any:
        if product.generator_offset is not None:
            _generator_of(args).set_offset(product.generator_offset)
        self._handed_out.add(product)
        result, product.result = product.result, None
        return result


def _check_same(now: Any, before: Any) -> None:
    if now is not before:
        raise RuntimeError(f"a block that was recomputed took another way than before: {now} in place of {before}")


def _kind_of(func: Any) -> tuple[int, bool]:
    """What an operation is, and whether its gradient needs nothing of what went into it."""
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
    if func.is_view or schema.name == "aten::_unsafe_view":  # which shares memory, and does not say so
        return _VIEW, True
    if schema.name in _PRODUCTS:
        return _PRODUCT, False
    return (_KERNEL if schema.name in _ATTENTION else _OTHER), schema.name in _SAVES_NOTHING


def _is_cheap(func: Any, args: Any) -> bool:
    """Whether a product is made again as fast as it could be read: few terms in each sum, and many sums.

    The second product of a low-rank adapter is such a one, and so are the scores of a long unfused attention.
    """
    factors = _FACTORS.get(func._schema.name)
    return factors is not None and args[factors[0]].shape[-1] * _WIDE < args[factors[1]].shape[-1]


def _are_of_weights(args: Any) -> bool:
    """Whether every tensor among `args` is a parameter or was made of parameters and constants alone."""
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
    """The same memory without the graph, which would hold the block that holds this; writes are still counted."""
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
    """The generator from which an attention kernel draws its dropout; on a CPU none has any."""
    device = args[0].device
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else None
