"""Tiles along the sequence: MLPs are computed for a few thousand tokens at a time.

The intermediate tensors of an MLP are several times as wide as its input. In tiles they exist for one tile at a time,
in forward and, recomputed, in backward. So the memory inside a block no longer grows with its widest layer, which makes
long rows possible. Results equal those of the untiled step up to the rounding of sums of weight gradients; dropout
inside an MLP draws other masks.
"""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from trimtab.errors import RecipeError
from trimtab.model import token_tiles
from trimtab.model.token_tiles import tile_modules, tiled_modules
from trimtab.techniques.base import Accelerator, Case, Patch, Phase, Site, StepSpec, Technique, TraceRecorder
from trimtab.techniques.compilation import Compilation, conflict
from trimtab.techniques.recomputation import GradientCheckpointing, keeps_products

_KEY = "memory.tile_tokens"
# Large enough to keep a GPU busy, and to dequantize 4-bit weights rarely; the smaller one is for cards of 8 GB.
_TILES = ("4096", "1024")


_MOST_COPIES = 16  # the number of operations of a tile in a trace


def _repeated(ops: list[Any], count: int) -> list[Any]:
    """The operations of `count` tiles; for many tiles, a few operations that represent the same amount of work."""
    if count <= _MOST_COPIES:
        return ops * count
    share = count / _MOST_COPIES
    return [op._replace(flops=int(op.flops * share), moved=int(op.moved * share)) for op in ops] * _MOST_COPIES


class SequenceTiles(Technique):
    """Compute MLPs in tiles of tokens."""

    key = "tile_tokens"
    off: ClassVar[str] = "none"
    setting = _KEY
    phase = Phase.KERNELS
    is_slower_with_each_value = True
    last_resorts = None

    def values(self, case: Case) -> tuple[str, ...]:
        """Offer it for models whose blocks have a module that computes each token separately."""
        asked = str(self.asked(case.recipe))
        if asked == self.off or case.model is None or (asked == "auto" and case.recipe is None):
            return (self.off if asked == "auto" else asked,)
        is_possible = bool(tiled_modules(case.model))
        if asked == "auto":
            return (self.off, *_TILES) if is_possible else (self.off,)
        if not is_possible:
            raise RecipeError(
                f"{_KEY}: the blocks of {type(case.model).__name__} have no separate MLP that processes each token "
                "independently (they have experts, no module around the layers, or dropout between them)",
                f"{_KEY}: none",
            )
        return (asked,)

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse compiled blocks, which have no tiles, and `ops`, which would keep the products that tiles avoid."""
        if spec[self.key] == self.off:
            return None
        compiled, recomputed = spec[Compilation.key], spec[GradientCheckpointing.key]
        if compiled != Compilation.off:
            return conflict(_KEY, compiled, "which has one graph for all tokens")
        if keeps_products(recomputed):
            return f"{_KEY} does not work with {GradientCheckpointing.setting}: {recomputed}, which keeps all products"
        return None

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Replace the forward of the modules."""
        tile_modules(model, int(value))

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Trace three of the equal tiles, and count the operations of the second for all others."""
        all_tiles = token_tiles._tiles

        def few_tiles(num_tokens: int, tile_tokens: int) -> Iterator[slice]:
            tiles = list(all_tiles(num_tokens, tile_tokens))
            for number, tile in enumerate(tiles[:2]):
                first_op = len(recorder.ops)
                yield tile
                if number == 1 and len(tiles) > 3:
                    recorder.ops += _repeated(recorder.ops[first_op:], len(tiles) - 3)
            yield from tiles[2:3] if len(tiles) == 3 else tiles[-1:] if len(tiles) > 3 else ()

        yield token_tiles, "_tiles", few_tiles

    def describe(self, value: str) -> str:
        """Return a text such as "tiles of 4,096 tokens"."""
        return f"tiles of {int(value):,} tokens"
