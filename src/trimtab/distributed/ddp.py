"""torch's DistributedDataParallel, for a training loop that is the same on one process and on several.

Additions: the wrapper has the attributes of the model, parameters may be frozen or unfrozen later, and a rank without a
loss (a micro-batch without labels, a failed backward) contributes zero gradients without a backward of the model.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from trimtab.distributed.gloo_threads import wait_for_idle_gloo
from trimtab.errors import LossError, PrepareError

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# renamed in newer versions of torch
_BUFFERS_IN_FORWARD = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


@dataclass(frozen=True)
class DataParallelOptions:
    """Options of DistributedDataParallel; torch's defaults, except that gradients are views of the buckets."""

    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False


class DataParallel(DistributedDataParallel):
    """A model whose gradients are averaged over the ranks during backward.

    Args:
        module: The model, on its device.
        options: Passed to DistributedDataParallel.
        explain: Maps an error of a collective to the error to raise: a `PeerError` if a rank is lost, else the same
            error.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        options: DataParallelOptions,
        explain: Callable[[RuntimeError], Exception] = lambda error: error,
    ) -> None:
        self._options = options
        self._explain = explain
        self._wrap(module, init_sync=True)

    def _wrap(self, module: torch.nn.Module, init_sync: bool) -> None:
        # Batch norm statistics are broadcast from rank 0; other buffers are constants.
        has_statistics = any(isinstance(part, _BatchNorm) for part in module.modules())
        options = self._options
        if has_routed_modules(module) and not options.static_graph:
            options = replace(options, find_unused_parameters=True)
        self._finds_unused = options.find_unused_parameters
        settings: dict[str, Any] = {_BUFFERS_IN_FORWARD: has_statistics, **asdict(options)}
        super().__init__(module, init_sync=init_sync, **settings)
        self._trainable = _is_trainable(module)
        rebuilds_buckets = not (options.find_unused_parameters or options.static_graph)
        if rebuilds_buckets:
            self._rebuild_buckets()
        self.can_abandon_backward = rebuilds_buckets and not has_statistics
        self._awaits_backward = False
        self._num_forwards = 0  # since the last all-reduce of gradients
        self.has_unsynced_gradients = False  # a forward since then ran under no_sync
        self._was_shared = False  # that all-reduce was for several forwards
        self._is_checked = False

    def _rebuild_buckets(self) -> None:
        """Make torch build its final buckets now instead of after the first step.

        With three or more ranks the order of a sum depends on the bucket: the first step of a resumed run would round
        differently from the same step of an uninterrupted run. It also saves a collective in the second forward.
        """
        synced = list(self._synced_parameters().values())
        gradients = [parameter.grad for parameter in synced]
        self.zero_grad(set_to_none=True)
        self.reducer.prepare_for_backward([])
        _Zero.apply(*reversed(synced)).backward()  # type: ignore[no-untyped-call]
        self.zero_grad(set_to_none=True)
        self.reducer._rebuild_buckets()
        for parameter, gradient in zip(synced, gradients, strict=True):
            parameter.grad = gradient

    def __del__(self) -> None:
        wait_for_idle_gloo()  # the reducer, which is released next, may be the last to hold the process group

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def rewrap_if_trainable_changed(self) -> None:
        """Wrap the model again if `requires_grad` of a parameter has changed; this must happen on all ranks."""
        if self._trainable != _is_trainable(self.module):
            is_synced = self.require_backward_grad_sync
            self._wrap(self.module, init_sync=False)
            self.require_backward_grad_sync = is_synced

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the model."""
        if torch.is_grad_enabled():
            self.rewrap_if_trainable_changed()
            self._awaits_backward = self.require_backward_grad_sync
            self._num_forwards += 1
            self.has_unsynced_gradients |= not self.require_backward_grad_sync
        try:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # some forwards contain collectives, for batch norms for example
            explained = self._explain(error)
            if explained is error:  # `raise error from error` would keep all activations in a reference cycle
                raise
            raise explained from error

    def _synced_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients are averaged over the ranks."""
        ignored = self.parameters_to_ignore
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad and n not in ignored}

    def contribute_zero_gradients(self, loss: torch.Tensor) -> None:
        """Contribute zero gradients, if the other ranks are waiting for this rank's.

        Args:
            loss: The loss of this rank; it may be NaN.
        """
        if not self._awaits_backward:
            return
        synced = list(self._synced_parameters().values())
        if self._finds_unused:  # torch has marked unused parameters ready in the forward
            used = _leaves_of(loss)
            synced = [parameter for parameter in synced if id(parameter) in used]
        if synced:
            _Zero.apply(*synced).backward()  # type: ignore[no-untyped-call]
        self._awaits_backward = False

    @contextmanager
    def sync_in_backward(self) -> Iterator[None]:
        """A context for a backward that averages gradients although its forward ran under `no_sync`."""
        before = self.require_backward_grad_sync, self.require_forward_param_sync
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.reducer.prepare_for_backward([])
        self._awaits_backward = True
        try:
            yield
        finally:
            self.require_backward_grad_sync, self.require_forward_param_sync = before

    def mark_backward_start(self) -> None:
        """Record which gradients are ready before a backward, for `fill_missing_gradients`."""
        self._ready_before = self.reducer.get_backward_stats()

    def fill_missing_gradients(self) -> None:
        """After a failed backward, contribute zeros for the gradients it did not reach; other ranks wait for them."""
        if self._awaits_backward:
            ready_times = zip(self._ready_before, self.reducer.get_backward_stats(), strict=True)
            is_ready = [before != now for before, now in ready_times]
            missing = [p for p, ready in zip(self._synced_parameters().values(), is_ready, strict=True) if not ready]
            if missing:
                _Zero.apply(*missing).backward()  # type: ignore[no-untyped-call]

    def reset_reducer(self) -> None:
        """Reset the reducer after every rank has abandoned its accumulation window."""
        self.zero_grad(set_to_none=True)  # gradients are views that would keep the old buckets allocated
        self.reducer._reset_state()
        self._rebuild_buckets()
        self._awaits_backward = False
        self._num_forwards = 0
        self.has_unsynced_gradients = False

    def check_after_backward(self, loss: torch.Tensor, models: Sequence["DataParallel"]) -> None:
        """Check after a backward that every synced parameter got a gradient, if the loss depends on this model.

        Otherwise torch would raise at the next forward, without the name of the parameter.

        Args:
            loss: The loss of this backward.
            models: All models whose gradients are averaged.
        """
        if not self._awaits_backward:
            if self._was_shared and not self._num_forwards and self._has_part_in(loss, models):
                raise LossError(
                    "backward was called again after several forwards, but processes average gradients only once",
                    "add the losses and call backward once, or call each backward right after its forward",
                )
            return
        synced = {} if self._is_checked else self._synced_parameters()
        unused = [name for name, parameter in synced.items() if parameter.grad is None]
        if unused and len(unused) == len(synced):
            return  # the loss belongs to another model
        self._awaits_backward, self._is_checked = False, True
        self._was_shared, self._num_forwards = self._num_forwards > 1, 0
        self.has_unsynced_gradients = False
        if self._finds_unused or self._options.static_graph:
            return
        if any(p.grad is not None for name, p in self.module.named_parameters() if name in self.parameters_to_ignore):
            raise PrepareError(
                "a parameter that was unused in the loss of the first row has a gradient now, which is not averaged",
                "use your own loop with Engine(find_unused_parameters=True)",
            )
        if unused:
            shown = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
            raise PrepareError(
                f"{len(unused)} parameters are unused in the loss ({shown}), and several processes would wait for them",
                "set Engine(find_unused_parameters=True), or requires_grad_(False) on them before prepare",
            )

    def _has_part_in(self, loss: torch.Tensor, models: Sequence["DataParallel"]) -> bool:
        """Whether a loss depends on this model: on a parameter that no other model shares."""
        own = {id(parameter) for parameter in self._synced_parameters().values()}
        for other in models:
            if other is not self:
                own -= {id(parameter) for parameter in other.module.parameters()}
        return not own.isdisjoint(_leaves_of(loss))


def ignore_parameters(model: torch.nn.Module, names: list[str]) -> None:
    """Exclude these parameters, which never get a gradient, from the averaging of gradients."""
    if names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


def has_routed_modules(model: torch.nn.Module) -> bool:
    """Whether a model has trainable experts that are separate modules: those without tokens get no gradient.

    Experts in one fused parameter always get a gradient, with zeros for experts without tokens.
    """
    lists = torch.nn.ModuleList | torch.nn.ModuleDict
    return any(
        isinstance(module, lists)
        and (name.rpartition(".")[2] == "experts" or hasattr(module, "num_experts"))
        and any(parameter.requires_grad for parameter in module.parameters())
        for name, module in model.named_modules()
    )


class _Zero(torch.autograd.Function):
    """A zero that depends on parameters, and gives zero gradients even for values that are NaN."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.saved_tensors)


def _is_trainable(module: torch.nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in module.parameters()]


def _leaves_of(loss: torch.Tensor) -> set[int]:
    """Ids of the parameters that a loss depends on."""
    leaves: set[int] = set()
    seen: set[Any] = {None}
    nodes: list[Any] = [loss.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        nodes.extend(function for function, _ in node.next_functions)
    return leaves
