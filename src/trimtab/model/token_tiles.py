"""Compute token-wise modules (MLPs) in tiles of tokens, so that their widest tensors exist for one tile at a time.

Forward computes tile after tile and saves only the input. Backward computes each tile again, with its gradients, and
sums the gradients of weights over tiles: in fp32, and in the dtype of the weight only at the end. So a half-precision
gradient is rounded once per tile, whereas the product over all tokens is rounded once. Outputs and input gradients
equal those of the untiled module, except that libraries may divide products of other sizes differently.

A module that draws random numbers draws them tile by tile, and the same ones again in backward.

Some blocks have no module around the two layers of their MLP (OPT, BART). For these, the first layer and the activation
return their input, and the second layer computes all three: `_replace_layers`.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trimtab.errors import ModelError
from trimtab.model.blocks import blocks_of
from trimtab.model.random_draws import Draws, ReplayedDraws, WatchedDraws

_WHOLE_FORWARD = "_trimtab_whole_"
_NAMES = frozenset({"mlp", "ffn", "ff", "feed_forward", "feedforward"})
_CLASSES = re.compile(r"(MLP|Mlp|FeedForward|FFN|DenseActDense|DenseGatedActDense)$")
_CHUNKED = "feed_forward_chunk"  # a method of BERT's layers and similar ones: intermediate, then output
# Blocks that call fc1, activation_fn and fc2 in sequence; BART has dropout between the last two.
_OPEN_BLOCKS = re.compile(r"^(OPTDecoder|(Bart|Marian)(En|De)coder)Layer$")
_LAYERS = ("fc1", "activation_fn", "fc2")
_OPEN = " ".join(_LAYERS)
# Modules that compute each token separately. Containers have no parameters of their own.
_TOKEN_WISE = re.compile(
    r"(Linear|Linear4bit|DoraLinearLayer|Conv1D|Dropout|Identity|Norm|Activation|GELU|SiLU|ReLU|Tanh|GLU|ParameterDict)$"
)

Run = Callable[[torch.Tensor], torch.Tensor]


def tiled_modules(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The token-wise modules in the blocks of a model, each with the name of the method that computes it.

    If the layers have no module around them: the block, with the names of the layers.
    """
    found: list[tuple[nn.Module, str]] = []
    for _, block in blocks_of(model):
        found += _in_block(block)
    return list(dict.fromkeys(found))


def _in_block(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    parts = [getattr(module, name, None) for name in ("intermediate", "output")]
    if hasattr(module, _CHUNKED) and all(isinstance(part, nn.Module) and _is_token_wise(part) for part in parts):
        yield module, _CHUNKED
        return
    if _OPEN_BLOCKS.search(type(module).__name__) and not getattr(module, "activation_dropout", 0.0):
        if all(_is_token_wise(getattr(module, name)) for name in _LAYERS):
            yield module, _OPEN
        return
    for name, child in module.named_children():
        is_named = name.lower() in _NAMES or _CLASSES.search(type(child).__name__) is not None
        if is_named and any(child.children()) and _is_token_wise(child) and _takes_one_tensor(child):
            yield child, "forward"
        else:
            yield from _in_block(child)


def _is_token_wise(module: nn.Module) -> bool:
    """Whether all parts of a module compute each token separately; experts chosen by a router do not."""
    names = [parent.__name__ for parent in type(module).__mro__]
    if any(_TOKEN_WISE.search(name) for name in names) and not hasattr(module, "base_layer"):
        return True
    is_adapter = hasattr(module, "base_layer")
    own = [] if is_adapter else list(module.parameters(recurse=False))
    is_empty = not any(module.children()) and not own  # an activation, or an empty container
    is_activation = "activation" in type(module).__module__ or isinstance(module, nn.ModuleDict)
    if is_empty:
        return is_activation
    return not own and all(_is_token_wise(child) for child in module.children())


def _takes_one_tensor(module: nn.Module) -> bool:
    """Whether a module is called with only its input; the MLP of MPT adds the residual itself."""
    needed = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    return len(needed) == 1


def tile_modules(model: nn.Module, tile_tokens: int | None) -> int:
    """Compute the token-wise modules of a model in tiles; this replaces an earlier choice.

    Args:
        model: The model; its parameters and their names do not change.
        tile_tokens: Tokens of a tile; None disables tiles.

    Returns:
        The number of modules that are computed in tiles.
    """
    for module in model.modules():
        for name in ("forward", _CHUNKED):
            own = module.__dict__.pop(_WHOLE_FORWARD + name, None)
            if own is not None:
                del module.__dict__[name]
                if own != getattr(module, name):
                    setattr(module, name, own)
    if tile_tokens is None:
        return 0
    found = tiled_modules(model)
    for module, name in found:
        if name == _OPEN:
            _replace_layers(module, tile_tokens)
        else:
            _replace(module, name, tile_tokens)
    return len(found)


def _replace(module: nn.Module, name: str, tile_tokens: int) -> None:
    def tiled(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__[_WHOLE_FORWARD + name]
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
            return own(*args, **kwargs)
        parts: list[Any] = [self] if name == "forward" else [self.intermediate, self.output]
        weights = [weight for part in parts for weight in part.parameters()]
        return compute_in_tiles(own, args[0], weights, tile_tokens)

    _set_method(module, name, tiled, module)


def _replace_layers(block: nn.Module, tile_tokens: int) -> None:
    """Make the second layer of an MLP compute the whole MLP in tiles, and the layers before it nothing."""

    def tiled(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        layers = [getattr(self, name) for name in _LAYERS]

        def run(tile: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                tile = layer.__dict__[_WHOLE_FORWARD + "forward"](tile)
            return tile

        weights = [weight for layer in layers for weight in layer.parameters()]
        return compute_in_tiles(run, x, weights, tile_tokens)

    def unchanged(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x

    for name in _LAYERS:
        layer = getattr(block, name)
        is_last = name == _LAYERS[-1]
        _set_method(layer, "forward", tiled if is_last else unchanged, block if is_last else layer)


def _set_method(module: nn.Module, name: str, function: Any, owner: nn.Module) -> None:
    """Replace a method of a module; the original is kept.

    Bound methods follow their owner through copy.deepcopy; a closure over a module would not.
    """
    own = getattr(module, name)
    function.__wrapped__ = getattr(own, "__func__", own)  # for inspect.signature
    module.__dict__[_WHOLE_FORWARD + name] = own
    module.__dict__[name] = MethodType(function, owner)


def compute_in_tiles(run: Run, x: torch.Tensor, weights: Sequence[torch.Tensor], tile_tokens: int) -> torch.Tensor:
    """Return the result of a token-wise function, computed in tiles.

    Args:
        run: The function; it takes (1, tokens, width) and returns (1, tokens, any width).
        x: Its input, (..., width).
        weights: The parameters that it uses.
        tile_tokens: Tokens of a tile; inputs with at most this many are computed as a whole.
    """
    num_tokens = x.numel() // max(1, x.shape[-1])
    if num_tokens <= tile_tokens:
        return run(x)
    weights = [weight for weight in weights if weight.requires_grad]
    if not torch.is_grad_enabled() or not (x.requires_grad or weights):
        return _whole(run, x, tile_tokens, None)
    # Saved before anything is computed: if the block itself is recomputed, and nothing after these tiles is saved,
    # recomputation ends here instead of computing them a second time.
    anchor = torch.empty(0, device=x.device, requires_grad=True)
    saved: torch.Tensor = _SavedInput.apply(anchor, x)  # type: ignore[no-untyped-call]
    result: torch.Tensor = _Tiled.apply(run, saved, tile_tokens, x, *weights)  # type: ignore[no-untyped-call]
    return result


class _SavedInput(torch.autograd.Function):
    """Save a tensor like autograd, including hooks; the result is a handle without a gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty(0, device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, saved: torch.Tensor, tile_tokens: int, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.draws = []
        ctx.run, ctx.tile_tokens, ctx.weights = run, tile_tokens, weights
        ctx.node = saved.grad_fn
        device = x.device.type
        ctx.autocast = (torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
        result = _whole(run, x, tile_tokens, ctx.draws)
        if ctx.autocast[1]:
            # copies of weights that autocast made here have no graph, and must not be used outside
            torch.clear_autocast_cache()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.node is None:
            raise RuntimeError("memory.tile_tokens supports one backward only: retain_graph does not work with it")
        (x,) = ctx.node.saved_tensors
        ctx.node = None
        _, _, _, needs_x, *needs_weights = ctx.needs_input_grad
        weights = [weight for weight, is_needed in zip(ctx.weights, needs_weights, strict=True) if is_needed]
        sums: list[torch.Tensor | None] = [None] * len(weights)
        rows, grad_rows = x.reshape(1, -1, x.shape[-1]), grad.reshape(1, -1, grad.shape[-1])
        grad_x = torch.empty_like(rows) if needs_x else None
        dtype, is_enabled = ctx.autocast
        with torch.autocast(x.device.type, dtype=dtype, enabled=is_enabled):
            for tile, draws in zip(_tiles(rows.shape[1], ctx.tile_tokens), ctx.draws, strict=True):
                found = _gradients_of(ctx.run, rows[:, tile], grad_rows[:, tile], weights, draws, needs_x)
                if grad_x is not None:
                    grad_x[:, tile] = found.pop(0)
                _add(sums, found, grad)
                del found  # freed before the next tile
        totals = iter(
            None if total is None else total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)
        )
        gradients = [next(totals) if is_needed else None for is_needed in needs_weights]
        return None, None, None, None if grad_x is None else grad_x.view(x.shape), *gradients


def _gradients_of(
    run: Run, x: torch.Tensor, grad: torch.Tensor, weights: list[torch.Tensor], draws: Draws, needs_x: bool
) -> list[Any]:
    """The gradients of one tile: of its input, if it is needed, and of the weights (None for those it does not use)."""
    part = x.detach().requires_grad_(needs_x)
    with torch.enable_grad(), ReplayedDraws(draws):
        # a view, because autocast would cache a copy of a leaf, like a weight, until the end of all tiles
        made = run(part.view_as(part))
    inputs = [*([part] if needs_x else []), *weights]
    return list(torch.autograd.grad(made, inputs, grad, allow_unused=True))


def _whole(run: Run, x: torch.Tensor, tile_tokens: int, draws: list[Draws] | None) -> torch.Tensor:
    """Compute all tiles one after another into one tensor; `draws` gets the random numbers of each tile."""
    rows = x.reshape(1, -1, x.shape[-1])
    result: torch.Tensor | None = None
    for tile in _tiles(rows.shape[1], tile_tokens):
        drawn = Draws([x.device])
        with WatchedDraws(drawn):
            made = run(rows[:, tile])
        if draws is not None:
            draws.append(drawn)
        if not isinstance(made, torch.Tensor) or made.shape[:-1] != rows[:, tile].shape[:-1]:
            raise ModelError(
                f"{getattr(run, '__qualname__', run)} does not return one vector per token", "memory.tile_tokens: none"
            )
        if result is None:
            result = made.new_empty((*x.shape[:-1], made.shape[-1]))  # not a view, which must not be changed in place
        result.view(rows.shape[:-1] + made.shape[-1:])[:, tile] = made
        del made
    assert result is not None
    return result


def _tiles(num_tokens: int, tile_tokens: int) -> Iterator[slice]:
    for first in range(0, num_tokens, tile_tokens):
        yield slice(first, min(first + tile_tokens, num_tokens))


def _add(sums: list[torch.Tensor | None], found: list[torch.Tensor | None], grad: torch.Tensor) -> None:
    """Add the gradients of one tile to the sums; half-precision gradients are summed in fp32."""
    for index, one in enumerate(found):
        if one is None:
            continue
        total = sums[index]
        if total is not None:
            total.add_(one)
        elif one.dtype in (torch.float16, torch.bfloat16):
            sums[index] = one.float()
        else:  # the gradient of a bias may be a view of the incoming gradient
            is_shared = one.untyped_storage()._cdata == grad.untyped_storage()._cdata
            sums[index] = one.clone() if is_shared else one
