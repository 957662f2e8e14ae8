"""The loss of tokens in place of their logits: during a call the head of a model computes it from the hidden states.

The head's forward is replaced for the length of one call, so that autocast, wrappers for several processes and hooks
see an ordinary forward with a small output. What a model does to its logits after the head (bounds, scales, biases) is
noted once, on a short row, and done to each chunk; a model that does more than arithmetic with them is refused.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.errors import LossError, RecipeError
from trimtab.hardware.extras import require_extra
from trimtab.model.forward import IGNORED, NUM_LABELLED, Batch, bare_model, logits_of, run_model
from trimtab.model.linear_cross_entropy import Job, Kernel, chunked_cross_entropy, liger_cross_entropy
from trimtab.model.router_loss import router_loss

_PLAINLY = "memory.loss: plain"
_SHORT = 32  # positions of the row on which a model is tried


class HeadLoss:
    """Runs a model for its summed loss alone.

    Args:
        how: "chunked" or "liger".
        label_smoothing: The share of probability spread over the vocabulary.
        counts_hits: Whether to count the tokens that are the most likely ones.

    Raises:
        RecipeError: If liger-kernel is not installed, or there is no GPU for it.
    """

    def __init__(self, how: str, label_smoothing: float = 0.0, *, counts_hits: bool = False) -> None:
        if how == "liger":
            require_liger()
        self._how = how
        self._job = Job(label_smoothing, counts_hits=counts_hits)

    def __call__(
        self, model: torch.nn.Module, batch: Batch, labels_BL: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The loss of `batch` summed over the labels, the number of hits where they are counted, and the router loss.

        Args:
            model: The model, or its wrapper for several processes.
            batch: What the model reads; its own "labels" only make the inputs of a decoder.
            labels_BL: The token that each position should foretell, or -100.

        Raises:
            LossError: If the model does not make its logits in a way that this loss can take part in.
        """
        bare = bare_model(model)
        head = _head_of(bare)
        steps = _steps_after_head(bare, head, batch)
        at_most: Any = batch.get(NUM_LABELLED)
        job = replace(self._job, after=steps.on(bare), softcap=steps.softcap(), at_most=at_most)
        kernel: Kernel = chunked_cross_entropy
        if self._how == "liger":
            kernel = liger_cross_entropy
            if steps.notes and job.softcap is None:
                raise LossError(
                    f"{type(bare).__name__} does {steps} after its head, which liger's loss does not know",
                    "memory.loss: chunked",
                )

        def compute(hidden: Tensor) -> Tensor:
            labels = _labels_for(hidden, head, labels_BL)
            return kernel(hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, labels, job)

        notes = _Notes(bare, (*labels_BL.shape, len(head.weight)))
        with _in_place_of(head, compute, notes):
            outputs = run_model(model, batch)
        if notes.steps() != steps:
            raise LossError(
                f"{type(bare).__name__} does {notes.steps()} after its head, where it did {steps} before", _PLAINLY
            )
        sums = _opened(outputs, bare)
        return sums[0], sums[1].detach().long() if self._job.counts_hits else None, router_loss(model, outputs)


def check_head(model: torch.nn.Module, batch: Batch, how: str = "chunked") -> str | None:
    """Whether the loss of a model can be computed in place of its logits: tried on a short row against the plain way.

    Args:
        model: A model, or its wrapper for several processes; its mode and its gradients stay as they are.
        batch: A batch of the task, on the device of the model.
        how: "chunked" or "liger".

    Returns:
        None if it can, else the reason why not.
    """
    bare = bare_model(model)
    try:
        head = _head_of(bare)
        row = _short_row(batch)
        if row["labels"].dim() != 2:
            return f"labels of shape {list(row['labels'].shape)} are not one for each position"
        labels = torch.arange(row["labels"].numel(), device=head.weight.device) % len(head.weight)
        labels = labels.view_as(row["labels"])
        labels[:, 1:2] = IGNORED
        with _evaluating(bare), torch.no_grad():
            total, _, _ = HeadLoss(how)(bare, row, labels)
            logits, dtype = _plain_logits(bare, head, row)
    except (LossError, RecipeError) as error:
        return error.problem
    if logits is None or logits.shape[:2] != labels.shape:
        return f"{type(bare).__name__} gives no logits for each position"
    wanted = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    if not torch.allclose(total, wanted, rtol=1e-5 if dtype is torch.float32 else 2e-3):
        means = [float(value) / labels.numel() for value in (total, wanted)]
        return "computed in place of the logits the loss is {:.6f}, from the logits {:.6f}".format(*means)
    return None


@dataclass(frozen=True)
class _Step:
    """One thing that a model does to its logits; `_HERE` stands for them, a `_Buffer` for one of the model's."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Buffer:
    name: str


_HERE = "the logits"


@dataclass(frozen=True)
class _Steps:
    """All that a model does to its logits."""

    notes: tuple[_Step, ...] = ()

    def __str__(self) -> str:
        return ", ".join(step.name for step in self.notes) or "nothing"

    def on(self, model: torch.nn.Module) -> Callable[[Tensor], Tensor] | None:
        """The same as a function, with the buffers that the model has now."""
        return partial(self._replay, dict(model.named_buffers())) if self.notes else None

    def _replay(self, buffers: Mapping[str, Tensor], logits: Tensor) -> Tensor:
        for step in self.notes:
            args = [_given(arg, logits, buffers) for arg in step.args]
            logits = step.function(*args, **{name: _given(arg, logits, buffers) for name, arg in step.kwargs})
        return logits

    def softcap(self) -> float | None:
        """The bound c, if the steps are c * tanh(logits / c)."""
        if [step.name for step in self.notes] != ["div", "tanh", "mul"]:
            return None
        below, _, times = (step.args for step in self.notes)
        bound = below[1]
        is_one = below == (_HERE, bound) and times in ((_HERE, bound), (bound, _HERE))
        return float(bound) if is_one and isinstance(bound, int | float) else None


def _given(arg: Any, logits: Tensor, buffers: Mapping[str, Tensor]) -> Any:
    if isinstance(arg, _Buffer):
        return buffers[arg.name]
    return logits if isinstance(arg, str) and arg == _HERE else arg


class _Notes:
    """What happens to the output of a head during one call."""

    _ARITHMETIC = frozenset(("mul", "div", "true_divide", "add", "sub", "neg", "tanh", "clamp"))
    _FORMATS = frozenset(("float", "to", "contiguous"))

    def __init__(self, model: torch.nn.Module, shape: tuple[int, ...]) -> None:
        self.shape = torch.Size(shape)  # that the logits would have had
        self._model = model
        self._steps: list[_Step] = []

    def takes(self, name: str) -> bool:
        """Whether something can be noted, to be done later."""
        return name.removesuffix("_") in self._ARITHMETIC or name in self._FORMATS

    def add(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note one thing."""
        if name.endswith("_"):  # in place of what is not there; a chunk keeps what its gradient needs
            name = name.removesuffix("_")
            function = getattr(torch.Tensor, name)
        words = tuple((key, self._word(name, value)) for key, value in kwargs.items())
        self._steps.append(_Step(name, function, tuple(self._word(name, value) for value in args), words))

    def steps(self) -> _Steps:
        """All of them but changes of format at the end, which the loss makes by itself."""
        steps = list(self._steps)
        while steps and steps[-1].name in ("float", "contiguous"):
            steps.pop()
        return _Steps(tuple(steps))

    def _word(self, name: str, value: Any) -> Any:
        if isinstance(value, _Sealed):
            return _HERE
        if not isinstance(value, Tensor):
            return value
        for known, buffer in self._model.named_buffers():
            if buffer is value:
                return _Buffer(known)
        raise LossError(
            f"{type(self._model).__name__} does {name!r} to its logits with a tensor that is none of its buffers",
            _PLAINLY,
        )


class _Sealed(torch.Tensor):
    """Sums on their way out of a model, in the place of logits: arithmetic is noted and leaves them alone."""

    _notes: _Notes

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sealed = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, _Sealed))
        notes = sealed._notes
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        if name in ("shape", "size"):
            return notes.shape if len(args) < 2 else notes.shape[args[1]]
        if name in ("dim", "ndim"):
            return len(notes.shape)
        if name == "_base":  # a view that nobody can change in place is as good as none
            return None
        if notes.takes(name):
            notes.add(name, func, args, kwargs)
            return sealed
        if name not in _HARMLESS:
            raise LossError(f"{type(notes._model).__name__} does {name!r} with its logits", _PLAINLY)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return _seal(result, notes) if isinstance(result, Tensor) else result


# What wrappers and hooks do with the output of a model without looking into it.
_HARMLESS = frozenset(
    (
        *(
            "dtype",
            "device",
            "layout",
            "requires_grad",
            "grad_fn",
            "is_leaf",
            "grad",
            "is_cuda",
            "is_sparse",
            "_version",
        ),
        *("is_floating_point", "is_complex", "element_size", "data_ptr", "untyped_storage", "stride", "__hash__"),
        *("register_hook", "retain_grad", "view_as", "clone", "detach", "alias", "__repr__", "__format__"),
    )
)


def _seal(tensor: Tensor, notes: _Notes) -> _Sealed:
    sealed = tensor.as_subclass(_Sealed)
    sealed._notes = notes
    return sealed


def _opened(outputs: Any, model: torch.nn.Module) -> Tensor:
    """The sums that a head gave, out of what the model made of them."""
    found = logits_of(outputs)
    if not isinstance(found, _Sealed):
        raise LossError(f"the logits of {type(model).__name__} are not those of its output layer", _PLAINLY)
    with torch._C.DisableTorchFunctionSubclass():
        return found.as_subclass(torch.Tensor)


@contextmanager
def _in_place_of(head: torch.nn.Linear, compute: Callable[[Tensor], Tensor], notes: _Notes) -> Iterator[None]:
    """Let `head` give the sums of `compute` in this thread, until the end of the call."""
    owner, own, num_calls = threading.get_ident(), head.forward, 0

    def forward(hidden: Tensor) -> Tensor:
        nonlocal num_calls
        if threading.get_ident() != owner:
            return own(hidden)
        num_calls += 1
        if num_calls > 1:
            raise LossError(f"{type(notes._model).__name__} uses its output layer more than once in a call", _PLAINLY)
        return _seal(compute(hidden), notes)

    head.__dict__["forward"] = forward  # the class keeps its own
    try:
        yield
    finally:
        del head.__dict__["forward"]


def _head_of(model: Any) -> torch.nn.Linear:
    """The output layer of a model.

    Raises:
        LossError: If there is none that is an ordinary linear map.
    """
    getter = getattr(model, "get_output_embeddings", None)
    head: Any = getter() if getter is not None else None
    name = type(model).__name__
    if head is None:
        raise LossError(f"{name} has no output layer that it would name", _PLAINLY)
    is_plain = type(head).forward is torch.nn.Linear.forward and "forward" not in head.__dict__
    if not is_plain or not isinstance(head, torch.nn.Linear):
        raise LossError(
            f"the output layer of {name} is a {type(head).__module__}.{type(head).__name__} with a forward of its own",
            _PLAINLY,
        )
    return head


def _labels_for(hidden: Tensor, head: torch.nn.Linear, labels_BL: Tensor) -> Tensor:
    """The labels beside hidden states; looked at inside the model's forward, where a sharded weight is whole."""
    if type(head.weight) not in (Tensor, torch.nn.Parameter) or not head.weight.is_floating_point():
        kind = f"{type(head.weight).__name__} of {head.weight.dtype}"
        raise LossError(f"the weight of the output layer is a {kind}", _PLAINLY)
    if hidden.shape[:-1] != labels_BL.shape:
        raise LossError(
            f"hidden states of shape {list(hidden.shape)} do not fit labels of shape {list(labels_BL.shape)}",
            "their shapes have to be (rows, positions, width) and (rows, positions): check the task and the inputs",
        )
    return labels_BL.reshape(-1).to(hidden.device)


_KNOWN: WeakKeyDictionary[torch.nn.Module, _Steps] = WeakKeyDictionary()


def _steps_after_head(model: torch.nn.Module, head: torch.nn.Linear, batch: Batch) -> _Steps:
    """What a model does to its logits: seen once, on a short row and without computing any."""
    if model not in _KNOWN:
        row = _short_row(batch)
        notes = _Notes(model, (*row["labels"].shape, len(head.weight)))
        nothing = torch.zeros(2, device=head.weight.device)
        with _evaluating(model), torch.no_grad(), _in_place_of(head, lambda hidden: nothing, notes):
            outputs = run_model(model, row)
        _opened(outputs, model)
        _KNOWN[model] = notes.steps()
    return _KNOWN[model]


def _short_row(batch: Batch) -> dict[str, Tensor]:
    """The fullest row of a batch, its beginning if every input is a matrix of tokens; one token of it labelled 0."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    labels = tensors["labels"]
    if labels.dim() != 2 or any(value.dim() != 2 or len(value) != len(labels) for value in tensors.values()):
        return tensors
    row = 0
    if "attention_mask" in tensors and not labels.is_meta:
        row = int(tensors["attention_mask"].sum(dim=1).argmax())
    short = {name: value[row : row + 1, :_SHORT] for name, value in tensors.items()}
    # what a decoder reads is made of the labels
    return short | {"labels": short["labels"].where(short["labels"] != IGNORED, 0)}


def _plain_logits(model: Any, head: torch.nn.Linear, row: Batch) -> tuple[Tensor | None, torch.dtype | None]:
    """The logits of a row, and the format in which the head gave them."""
    seen: list[torch.dtype] = []
    handle = head.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    try:
        return logits_of(run_model(model, row)), seen[0] if seen else None
    finally:
        handle.remove()


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Every module in the mode for use, and back to its own: no random number is drawn meanwhile."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def require_liger() -> None:
    """Refuse to go on where liger-kernel, or a GPU for it, is missing."""
    require_extra("liger_kernel", "memory.loss: liger")
    if not torch.cuda.is_available():
        raise RecipeError("a loss by liger needs an NVIDIA GPU, and there is none", "memory.loss: chunked, or auto")
