"""The context manager that `Engine.accumulate` returns."""

from trimtab.distributed.ddp import DataParallel
from trimtab.engine.accumulation import Accumulation
from trimtab.engine.prepared_loader import ActiveLoaders


class MicroBatch:
    """A context for one micro-batch. A class, because a generator costs more than the rest of the engine's step."""

    __slots__ = ("_accumulation", "_connected", "_exchanged", "_loaders")

    def __init__(self, accumulation: Accumulation, loaders: ActiveLoaders, connected: list[DataParallel]) -> None:
        self._accumulation = accumulation
        self._loaders = loaders
        self._connected = connected
        self._exchanged: list[DataParallel] = []

    def __enter__(self) -> None:
        loader = self._loaders.innermost
        if loader is None:
            self._accumulation.open_micro_batch(None, False)
        else:
            self._accumulation.open_micro_batch(loader.num_remaining, loader.end_of_epoch, loader.row_share)
        self._accumulation.inside = True
        # models inside an outer no_sync are left alone: they exchange no gradients, even where a window ends
        self._exchanged = [model for model in self._connected if model.require_backward_grad_sync]
        for model in self._exchanged:
            model.require_backward_grad_sync = self._accumulation.exchanges

    def __exit__(self, *exception: object) -> None:
        self._accumulation.inside = False
        for model in self._exchanged:
            model.require_backward_grad_sync = True
