"""Capture forward, loss and backward of a micro-batch in CUDA graphs, one per size, and replay them.

A replay launches all kernels of a micro-batch with one call, so the host no longer limits small models. A graph reads
and writes fixed addresses (`captured_micro_batch.py`). Optimizers and clipping see the same gradients as without
graphs, with one exception in `fit`: for a parameter that only some micro-batch sizes use, the gradient is zero instead
of None. Hooks of a model are called during the capture, not in replays.

`fit` captures the micro-batches of one loss (`compute_captured`), `Engine.forward_backward` those of any loss function
and structure of batches.

If a step has a single micro-batch, it writes its gradients, with one kernel for all parameters; otherwise each
micro-batch adds them. In mixed precision, linear layers compute with copies of their weights (`half_weights.py`), also
in micro-batches that are not captured, so that blocks are compiled once.

The first micro-batch of each size runs without a graph, which loads its kernels; the second one is captured. If a
capture fails, for example because a model synchronizes with the host, nothing is captured from then on.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.errors import RecipeError, summarize_error
from trimtab.hardware.memory import is_out_of_memory, release_cached_memory
from trimtab.log import say
from trimtab.model.batch_tree import size_of
from trimtab.model.captured_micro_batch import (
    Batch,
    CapturedMicroBatch,
    Compute,
    CudaRecorder,
    FirstRun,
    Loss,
    Recorder,
    Result,
    bind_gradients,
)
from trimtab.model.forward import bare_model
from trimtab.model.half_weights import HalfWeights

MOST_GRAPHS = 32
_MOST_SIZES = 1024  # number of sizes that are remembered without a graph
_STATE = "_trimtab_captured_micro_batches"


def compute_plainly(engine: Any, model: torch.nn.Module, loss: Loss, batch: Batch) -> Result:
    """Accumulate the gradients of a micro-batch; return what the loss reports, and its weight."""
    step = loss(model, batch)
    engine.backward(step.value, weight=step.weight)
    return step.reported(), step.weight


class CapturedMicroBatches:
    """Compute micro-batches with graphs if possible, and otherwise without.

    Args:
        recorder: Records the graphs.
        runs_own_code: Whether losses are functions of users, which see the parameters of the model, and not the copies
            that it computes with (`HalfWeights.only_in_forward`).
    """

    def __init__(self, recorder: Recorder | None = None, *, runs_own_code: bool = False) -> None:
        self.failure: str | None = None  # the reason why nothing is captured
        self.watchers: list[Callable[[Batch], Any]] = []  # called with every replayed micro-batch
        self._recorder: Recorder = recorder or CudaRecorder()
        self._runs_own_code = runs_own_code
        self._seen: dict[Any, FirstRun] = {}  # by variant and size
        # parameters that get gradients, by variant and size
        self._owners: dict[Any, dict[torch.nn.Parameter, None]] = {}
        # parameters that get gradients, of all variants and sizes
        self._known_owners: dict[torch.nn.Parameter, None] = {}
        self._graphs: dict[Any, CapturedMicroBatch] = {}
        self._buffers: dict[torch.nn.Parameter, torch.Tensor] = {}  # gradients, shared by all sizes
        self._parameters: list[torch.nn.Parameter] = []
        self._half_weights: HalfWeights | None = None
        self._weights: tuple[tuple[bool, int], ...] = ()  # whether each parameter is trainable, and its address

    @property
    def num_graphs(self) -> int:
        """The number of sizes that are captured."""
        return len({key for key, _ in self._graphs})

    @property
    def num_sizes(self) -> int:
        """The number of sizes that occurred."""
        return len(self._seen)

    @property
    def is_full(self) -> bool:
        """Whether no more sizes are captured."""
        return len(self._graphs) >= MOST_GRAPHS

    def can_capture(self, device: torch.device) -> bool:
        """Whether work on a device can be captured."""
        return self._recorder.supports(device)

    def use_parameters(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Set the parameters that may get gradients; without a call they are those of the model."""
        self._parameters = list(parameters)

    def __call__(
        self, engine: Any, model: torch.nn.Module, loss: Loss, batch: Batch, variant: Hashable = None
    ) -> Result:
        """Compute a micro-batch, inside `engine.accumulate` or in a loop without it.

        Args:
            engine: The engine that prepared the model.
            model: The model.
            loss: Computes the loss of a batch.
            batch: The micro-batch.
            variant: Distinguishes micro-batches of equal size that are computed differently, such as by another loss.
        """
        if engine.use_distributed:
            raise RecipeError(
                "CUDA graphs (train.compile) need one process: a graph cannot contain the exchange of gradients",
                "train.compile: blocks",
            )
        if self.failure is not None or not self.can_capture(engine.device):
            return compute_plainly(engine, model, loss, batch)
        half_weights = self._halves(engine, model)
        with_halves = half_weights.only_in_forward(loss) if self._runs_own_code else loss
        key = variant, size_of(batch)
        # existing values in .grad must be kept, also if another loop accumulates by itself
        owners = self._owners.get(key, ())
        writes = engine.gradient_accumulation_steps == 1 and all(p.grad is None for p in owners)
        graph = self._graphs.get((key, writes)) or self._graphs.get((key, False))  # adding is correct in every case
        if graph is None and key in self._seen and not self.is_full:
            graph = self._capture(key, writes, engine, model, with_halves, batch)
        if graph is not None:
            graph.load(batch)
            engine.replay(graph)
            for watch in self.watchers:
                watch(batch)
            return graph.reported, graph.weight
        if self.failure is not None:
            return compute_plainly(engine, model, loss, batch)
        return self._compute_uncaptured(key, engine, model, with_halves, batch)

    def _compute_uncaptured(self, key: Any, engine: Any, model: torch.nn.Module, loss: Loss, batch: Batch) -> Result:
        """Compute a micro-batch without a graph; after the first one of a size, the second can be captured."""
        assert self._half_weights is not None
        if key in self._owners:
            self._keep_gradients(self._owners[key])
            with self._half_weights.in_use():
                return compute_plainly(engine, model, loss, batch)
        known = self._known_owners
        without = [parameter for parameter in known if parameter.grad is None]
        self._keep_gradients(known)
        with self._found_owners() as found, self._half_weights.in_use():
            reported, weight = compute_plainly(engine, model, loss, batch)
        if self._runs_own_code:  # another loss may train other parameters
            for parameter in without:
                if parameter not in found:
                    parameter.grad = None
        else:
            found = known | found
        is_ignored = isinstance(weight, float | int) and not weight  # the loss may be NaN, which a graph would add
        if len(self._seen) < _MOST_SIZES and not is_ignored:
            weight = weight.clone() if isinstance(weight, torch.Tensor) else weight
            self._seen[key] = FirstRun(weight, reported.dtype)
            self._owners[key] = found
            self._known_owners = known | found
        return reported, weight

    @contextmanager
    def _found_owners(self) -> Iterator[dict[torch.nn.Parameter, None]]:
        """Yield a dict that afterwards contains, as keys, the parameters that got a gradient inside the context."""
        assert self._half_weights is not None
        found: dict[torch.nn.Parameter, None] = {}
        without = [parameter for parameter in self._parameters if parameter.grad is None]
        hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda parameter: found.update({parameter: None})
            )
            for parameter in self._parameters
            if parameter.requires_grad
        ]
        self._half_weights.touched.clear()
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
        found.update(self._half_weights.touched)
        found.update(dict.fromkeys(parameter for parameter in without if parameter.grad is not None))

    def compute_once(self, engine: Any, model: torch.nn.Module, loss: Loss, batch: Batch) -> Result:
        """Compute a micro-batch with the weights that captured ones use, and capture nothing."""
        if self.failure is not None or not self.can_capture(engine.device):
            return compute_plainly(engine, model, loss, batch)
        with self._halves(engine, model).in_use():
            return compute_plainly(engine, model, loss, batch)

    def _halves(self, engine: Any, model: torch.nn.Module) -> HalfWeights:
        self._forget_if_changed(model)
        if self._half_weights is None:
            self._half_weights = HalfWeights(model, engine.compute_dtype)
        return self._half_weights

    def _keep_gradients(self, owners: Iterable[torch.nn.Parameter]) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Give parameters gradients that stay allocated for the whole run."""
        missing = [parameter for parameter in owners if parameter not in self._buffers]
        if missing and all(parameter.grad is None for parameter in missing):
            release_cached_memory(missing[0].device)  # avoids gaps between permanent and temporary memory
        for parameter in missing:
            self._buffers[parameter] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        kept = {parameter: self._buffers[parameter] for parameter in owners}
        bind_gradients(kept)
        return kept

    def _capture(
        self, key: Any, writes: bool, engine: Any, model: torch.nn.Module, loss: Loss, batch: Batch
    ) -> CapturedMicroBatch | None:
        assert self._half_weights is not None
        try:
            kept = self._keep_gradients(self._owners[key])
            graph = CapturedMicroBatch(batch, self._seen[key], kept, engine.device, self._half_weights, writes=writes)
            graph.capture(self._recorder, model, loss)
        except Exception as error:  # a capture forbids many operations that a model may use
            if writes:  # there were no gradients before; those that autograd has created since were not computed
                for parameter in self._owners[key]:
                    parameter.grad = None
            if is_out_of_memory(error):
                self.forget()
                raise
            self.failure = summarize_error(error)
        else:
            self._graphs[key, writes] = graph
            return graph
        self.forget()
        release_cached_memory(engine.device)
        say(f"the step could not be captured in a CUDA graph, and the run continues without graphs: {self.failure}")
        return None

    def _forget_if_changed(self, model: torch.nn.Module) -> None:
        """Drop all graphs if the set of trainable parameters or the addresses of weights have changed."""
        if not self._parameters:
            self._parameters = list(model.parameters())
        weights = tuple((parameter.requires_grad, parameter.data_ptr()) for parameter in self._parameters)
        if weights != self._weights:
            self._weights = weights
            self.forget()

    def forget(self) -> None:
        """Drop all graphs and their memory: each size is captured again at its second occurrence."""
        for known in (self._graphs, self._seen, self._owners, self._buffers):
            known.clear()
        self._known_owners = {}
        self._half_weights = None
        self._recorder.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return whether capturing failed."""
        return {"failure": self.failure}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.failure = self.failure or state["failure"]
        if self.failure is not None:
            self.forget()  # graphs are no longer used


def capture_micro_batches(model: torch.nn.Module, recorder: Recorder | None = None) -> CapturedMicroBatches:
    """Let `compute_captured` capture the micro-batches of a model."""
    model.__dict__[_STATE] = captured = CapturedMicroBatches(recorder)
    return captured


def captured_micro_batches_of(model: torch.nn.Module) -> CapturedMicroBatches | None:
    """The graphs of a model; None if its micro-batches are not captured."""
    found: CapturedMicroBatches | None = bare_model(model).__dict__.get(_STATE)
    return found


def compute_captured(engine: Any, model: torch.nn.Module, loss: Loss, batch: Batch) -> Result:
    """Like `compute_plainly`, with graphs if `capture_micro_batches` was called for the model."""
    captured = captured_micro_batches_of(model)
    compute: Compute = compute_plainly if captured is None else captured
    return compute(engine, model, loss, batch)


def compute_uncaptured(engine: Any, model: torch.nn.Module, loss: Loss, batch: Batch) -> Result:
    """Like `compute_captured`, without graphs: compiled blocks get the same inputs as in graphs."""
    captured = captured_micro_batches_of(model)
    compute: Compute = compute_plainly if captured is None else captured.compute_once
    return compute(engine, model, loss, batch)
