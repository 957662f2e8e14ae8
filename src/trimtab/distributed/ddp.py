"""torch's DistributedDataParallel, so that the loop of one process runs on several unchanged.

Added to it: attributes of the model are found on the wrapper, parameters that begin to train later are taken in, and a
process whose micro-batch counts for nothing can answer for its gradients without a backward through the model.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from trimtab.errors import LossError, PrepareError

_PARAMETERS = inspect.signature(DistributedDataParallel.__init__).parameters
# torch has renamed it
_BUFFERS_IN_FORWARD = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


@dataclass(frozen=True)
class DataParallelOptions:
    """What DistributedDataParallel can be told; the defaults are torch's, but for views instead of copies."""

    bucket_cap_mb: float | None = None
    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False


class DataParallel(DistributedDataParallel):
    """A model whose gradients are averaged over the processes while backward still runs.

    Args:
        module: The model, on its device.
        options: Those of DistributedDataParallel.
        explain: Gives for an error the one to raise: another if a process is gone, else the same.
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
        # statistics of batch norms are those of the first process; other buffers are constants, and need no broadcast
        has_statistics = any(isinstance(part, _BatchNorm) for part in module.modules())
        settings: dict[str, Any] = {_BUFFERS_IN_FORWARD: has_statistics, **asdict(self._options)}
        super().__init__(module, init_sync=init_sync, **settings)
        self._training = _what_trains(module)
        orders_buckets_later = not (self._options.find_unused_parameters or self._options.static_graph)
        if orders_buckets_later:
            self._settle_buckets()
        self.can_give_up = orders_buckets_later and not has_statistics
        self._awaits_backward = False
        self._num_forwards = 0  # since the last exchange
        self.has_own_gradients = False  # a forward since then was one whose gradients are not exchanged by themselves
        self._was_shared = False  # that exchange answered for several forwards
        self._is_checked = False

    def _settle_buckets(self) -> None:
        """Let torch order its buckets now, and not after the first step.

        The order of a sum over three and more processes depends on the bucket: a resumed run, whose first step comes
        later, would round that step in another way. Nor has a forward to wait for the other processes then.
        """
        trained = list(self._exchanged().values())
        held = [parameter.grad for parameter in trained]
        self.zero_grad(set_to_none=True)
        self.reducer.prepare_for_backward([])
        _Nothing.apply(*reversed(trained)).backward()  # type: ignore[no-untyped-call]
        self.zero_grad(set_to_none=True)
        self.reducer._rebuild_buckets()
        for parameter, gradient in zip(trained, held, strict=True):
            parameter.grad = gradient

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def follow_what_trains(self) -> None:
        """Exchange other gradients from now on, if something was frozen or began to train. All processes do."""
        if self._training != _what_trains(self.module):
            is_exchanging = self.require_backward_grad_sync
            self._wrap(self.module, init_sync=False)
            self.require_backward_grad_sync = is_exchanging

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        if torch.is_grad_enabled():
            self.follow_what_trains()
            self._awaits_backward = self.require_backward_grad_sync
            self._num_forwards += 1
            self.has_own_gradients |= not self.require_backward_grad_sync
        try:
            return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:  # its first forwards, and those with batch norms, need the other processes
            explained = self._explain(error)
            if explained is error:  # not again `from` itself: that would keep all activations in a circle
                raise
            raise explained from error

    def _exchanged(self) -> dict[str, torch.nn.Parameter]:
        """The parameters whose gradients the processes exchange."""
        ignored = self.parameters_to_ignore
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad and n not in ignored}

    def answer_with_nothing(self, loss: torch.Tensor) -> None:
        """Give the other processes gradients of zero, if they wait for this one's.

        Args:
            loss: What this process would have differentiated; it may be NaN.
        """
        if not self._awaits_backward:
            return
        trained = list(self._exchanged().values())
        if self._options.find_unused_parameters:  # torch has answered for the others when it looked at the graph
            used = _leaves_of(loss)
            trained = [parameter for parameter in trained if id(parameter) in used]
        if trained:
            _Nothing.apply(*trained).backward()  # type: ignore[no-untyped-call]
        self._awaits_backward = False

    @contextmanager
    def exchanging_in_backward(self) -> Iterator[None]:
        """A context for the last backward of several forwards that ran under `no_sync`: it exchanges gradients."""
        before = self.require_backward_grad_sync, self.require_forward_param_sync
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.reducer.prepare_for_backward([])
        self._awaits_backward = True
        try:
            yield
        finally:
            self.require_backward_grad_sync, self.require_forward_param_sync = before

    def begin_exchange(self) -> None:
        """Note what is needed to give up in the middle of the backward that comes now."""
        self._ready_before = self.reducer.get_backward_stats()

    def give_up_exchange(self) -> None:
        """Answer with zeros for what a backward that has failed did not come to: the others wait for it."""
        if self._awaits_backward:
            moments = zip(self._ready_before, self.reducer.get_backward_stats(), strict=True)
            is_ready = [before != now for before, now in moments]
            left = [p for p, ready in zip(self._exchanged().values(), is_ready, strict=True) if not ready]
            if left:
                _Nothing.apply(*left).backward()  # type: ignore[no-untyped-call]

    def start_over(self) -> None:
        """Every process has given up a window: none waits for a backward that does not come any more."""
        self.zero_grad(set_to_none=True)  # else the old buckets would be there beside the new ones
        self.reducer._reset_state()
        self._settle_buckets()
        self._awaits_backward = False
        self._num_forwards = 0
        self.has_own_gradients = False

    def backward_done(self, loss: torch.Tensor, models: Sequence["DataParallel"]) -> None:
        """Gradients have been exchanged, if this model had a part in the loss. See whether all of them were.

        A parameter that takes no part would stop every process at the next forward, with no word about which one.

        Args:
            loss: What was differentiated.
            models: All models whose gradients are exchanged.
        """
        if not self._awaits_backward:
            if self._was_shared and not self._num_forwards and self._has_part_in(loss, models):
                raise LossError(
                    "a second backward came after several forwards: several processes exchange gradients only once",
                    "add the losses and call backward once, or call each backward right after its forward",
                )
            return
        exchanged = {} if self._is_checked else self._exchanged()
        idle = [name for name, parameter in exchanged.items() if parameter.grad is None]
        if idle and len(idle) == len(exchanged):
            return  # the loss was of another model
        self._awaits_backward, self._is_checked = False, True
        self._was_shared, self._num_forwards = self._num_forwards > 1, 0
        self.has_own_gradients = False
        if self._options.find_unused_parameters or self._options.static_graph:
            return
        if any(p.grad is not None for name, p in self.module.named_parameters() if name in self.parameters_to_ignore):
            raise PrepareError(
                "a parameter that took no part in the loss of the first row has a gradient now, which is not exchanged",
                "use a loop of your own with Engine(find_unused_parameters=True)",
            )
        if idle:
            shown = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
            raise PrepareError(
                f"{len(idle)} parameters take no part in the loss ({shown}), so several processes would wait for them",
                "Engine(find_unused_parameters=True), or requires_grad_(False) on them before prepare",
            )

    def _has_part_in(self, loss: torch.Tensor, models: Sequence["DataParallel"]) -> bool:
        """Whether a loss depends on this model: on a parameter that none of the others has as well."""
        own = {id(parameter) for parameter in self._exchanged().values()}
        for other in models:
            if other is not self:
                own -= {id(parameter) for parameter in other.module.parameters()}
        return not own.isdisjoint(_leaves_of(loss))


def leave_out(model: torch.nn.Module, names: list[str]) -> None:
    """Let processes not wait for the gradients of these parameters, which never get any."""
    if names:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


class _Nothing(torch.autograd.Function):
    """A zero that depends on parameters, with a gradient of zero for each, whatever their values are."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return tuple(parameter.new_zeros(()).expand_as(parameter) for parameter in ctx.saved_tensors)


def _what_trains(module: torch.nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in module.parameters()]


def _leaves_of(loss: torch.Tensor) -> set[int]:
    """The parameters that a loss depends on, by id."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        waiting.extend(function for function, _ in node.next_functions)
    return found
