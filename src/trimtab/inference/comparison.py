"""Compare the outputs of two models on real rows: KL divergence and agreement, computed in fp32.

The models are never in memory together: the outputs of the first (the reference) are kept on the host.
Shapes: B rows, L positions, N compared outputs, V tokens, classes or numbers of an output.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trimtab.data.tasks.base import Task
from trimtab.engine.placement import to_device
from trimtab.model.adapters import has_peft_adapter
from trimtab.model.forward import IGNORED, logits_of, run_model
from trimtab.training.work_progress import tracked

_KEPT_BYTES = 512 * 2**20  # all outputs of the reference model, on the host
_BATCH_BYTES = 128 * 2**20  # logits of one batch
_SLICE_BYTES = 32 * 2**20  # outputs compared in one operation, in fp64
_AGREEMENT_FRACTION = 0.1  # numbers agree if they differ by less than this fraction of their standard deviation
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class OutputDivergence:
    """Divergence of a second model's outputs from those of the reference model.

    Args:
        kl_mean: Mean KL divergence from the reference, in nats; for numbers, that of two normal distributions with the
            standard deviation of the reference outputs.
        kl_max: Largest KL divergence of one output.
        agreement: Fraction of outputs with the same most probable token, class or set of labels; for numbers, of those
            that differ by less than a tenth of their standard deviation.
        num_answers: Number of tokens or rows compared.
        num_rows: Number of rows that they are from.
    """

    kl_mean: float
    kl_max: float
    agreement: float
    num_answers: int
    num_rows: int


class ModelComparison:
    """A comparison of two models on encoded rows.

    Args:
        task: The task of the models, bound to their tokenizer.
        examples: The encoded rows.
        num_outputs: Size of an output: of the vocabulary, or the number of labels.
        device: Device to compute on.
    """

    def __init__(
        self, task: Task, examples: Sequence[dict[str, torch.Tensor]], num_outputs: int, device: torch.device
    ) -> None:
        self._task, self._device = task, device
        self._num_rows = len(examples)
        self._max_per_row = max(1, _KEPT_BYTES // (4 * num_outputs * max(1, len(examples))))
        is_token_task = task.loss_kind == "token-cross-entropy"
        lengths = [len(example["input_ids"]) * (num_outputs if is_token_task else 1) for example in examples]
        self._batches = [
            task.collate([examples[row] for row in rows]) for rows in _group_rows(lengths, _BATCH_BYTES // 4)
        ]
        self._reference: list[torch.Tensor] = []

    def record_reference(self, model: torch.nn.Module) -> int:
        """Record the outputs of the reference model.

        Returns:
            The number of outputs.
        """
        self._reference = [outputs.cpu() for outputs in self._outputs(model)]
        return sum(map(len, self._reference))

    def compare(self, model: torch.nn.Module) -> OutputDivergence:
        """Compare the outputs of a second model with the reference."""
        spread = _standard_deviation(self._reference) if self._task.loss_kind == "mse" else None
        kl, agrees = [], []
        for first, second in zip(self._reference, self._outputs(model), strict=True):
            per_slice = max(1, _SLICE_BYTES // (8 * max(1, first[:1].numel())))
            for one, other in zip(*(torch.split(each, per_slice) for each in (first, second.cpu())), strict=True):
                divergence, agreement = _differences(self._task.loss_kind, one.double(), other.double(), spread)
                kl.append(divergence)
                agrees.append(agreement)
        kl_N, agrees_N = torch.cat(kl), torch.cat(agrees)
        return OutputDivergence(
            kl_N.mean().item(), kl_N.max().item(), agrees_N.float().mean().item(), len(kl_N), self._num_rows
        )

    @torch.no_grad()
    def _outputs(self, model: torch.nn.Module) -> Iterator[torch.Tensor]:
        model.eval()
        with _moved(model, self._device), computed_in_fp32(model, self._device):
            for batch in tracked(self._batches, "compare outputs"):
                moved = to_device(batch, self._device)
                logits = logits_of(run_model(model, moved))
                assert logits is not None  # the model of a task has a head
                yield (logits[self._compared(moved)] if logits.dim() == 3 else logits).float()

    def _compared(self, batch: Batch) -> torch.Tensor:
        """Return a mask of the positions to compare: those with a label; in long rows, evenly spaced."""
        labels_BL = batch["labels"]
        if self._task.shifts_labels:
            labels_BL = functional.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)
        compared_BL = labels_BL != IGNORED
        index_BL = compared_BL.cumsum(1) - 1  # index among the labelled positions of the row
        count_B1 = compared_BL.sum(1, keepdim=True)
        step_B1 = (count_B1 + self._max_per_row - 1) // self._max_per_row
        return compared_BL & (index_BL % step_B1.clamp(min=1) == 0)


def _group_rows(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Group consecutive rows to batches of at most `limit` values, padded to the longest row."""
    batches: list[list[int]] = []
    longest = 0
    for row, size in enumerate(sizes):
        longest = max(longest, size)
        if not batches or longest * (len(batches[-1]) + 1) > limit:
            batches.append([])
            longest = size
        batches[-1].append(row)
    return batches


def _differences(
    kind: str, one_NV: torch.Tensor, other_NV: torch.Tensor, spread: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the KL divergence of each output, and whether the outputs agree."""
    if kind == "mse":
        assert spread is not None
        one, other = (values.reshape(len(values), -1) for values in (one_NV, other_NV))
        in_spreads = (one - other).abs() / spread
        return in_spreads.square().sum(1) / 2, (in_spreads < _AGREEMENT_FRACTION).all(1)
    if kind == "binary-cross-entropy":
        p, q = (torch.stack([functional.logsigmoid(x), functional.logsigmoid(-x)], -1) for x in (one_NV, other_NV))
        return (p.exp() * (p - q)).sum((-1, -2)).clamp(min=0), ((one_NV > 0) == (other_NV > 0)).all(1)
    p, q = one_NV.log_softmax(-1), other_NV.log_softmax(-1)
    # A token of probability 0 adds 0, not 0 * (-inf + inf) = NaN; NaN of a broken model stays.
    parts = torch.where(p == -torch.inf, torch.zeros_like(p), p.exp() * (p - q))
    return parts.sum(-1).clamp(min=0), p.argmax(-1) == q.argmax(-1)


def _standard_deviation(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the standard deviation of each number, at least a thousandth of its mean magnitude."""
    numbers = torch.cat([each.reshape(len(each), -1) for each in outputs]).double()
    return torch.maximum(numbers.std(0, correction=0), numbers.abs().mean(0) / 1000).clamp(min=1e-12)


@contextmanager
def _moved(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Move a model to the device for the duration of the context, if it fits.

    The weights of a larger model stay on the host; `computed_in_fp32` copies those of one module at a time.
    """
    home = next(model.parameters()).device
    if home == device or not _has_room(model, device):
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.to(home)


def _has_room(model: torch.nn.Module, device: torch.device) -> bool:
    if device.type != "cuda":
        return True  # shares memory with the host, or does not report it
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in model.parameters()]
    largest = max((4 * num for num, _ in sizes), default=0)  # fp32 copies during a call
    needed = sum(num * size for num, size in sizes) + 2 * largest + 4 * _BATCH_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return needed < 0.9 * free


@contextmanager
def computed_in_fp32(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Make a model compute in fp32 on `device`, without changing its weights.

    Each module gets fp32 copies of its own weights for the duration of its call, so no second model has to fit in
    memory. Quantized weights are not copied: they have to be on the device, and compute in their own dtype. Layers of
    torchao do not convert their inputs; that is done here.
    """
    homes = {name: buffer.device for name, buffer in model.named_buffers()}
    with ExitStack() as undo:
        for module in _units(model):
            for hook in _fp32_hooks(module, device):
                undo.callback(hook.remove)
        try:
            _move_buffers(model, dict.fromkeys(homes, device))
            yield
        finally:
            _move_buffers(model, homes)


def _fp32_hooks(module: torch.nn.Module, device: torch.device) -> list[Any]:
    """Register hooks that replace the weights with fp32 copies before a call, and restore them afterwards."""
    originals: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
    has_adapter = has_peft_adapter(module)

    def replace(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        own = _dtype_of_torchao(module)
        if own is not None:
            return tuple(_as(own, value) for value in args), {name: _as(own, value) for name, value in kwargs.items()}
        for parameter in module.parameters(recurse=has_adapter):
            if parameter.is_floating_point() and (parameter.dtype, parameter.device) != (torch.float32, device):
                originals.append((parameter, parameter.data))
                parameter.data = parameter.data.to(device, torch.float32)
        fp32 = torch.float32
        return tuple(_as(fp32, value) for value in args), {name: _as(fp32, value) for name, value in kwargs.items()}

    def restore(module: torch.nn.Module, args: Any, output: Any) -> Any:
        while originals:
            parameter, data = originals.pop()
            parameter.data = data
        return output if _dtype_of_torchao(module) is None else _as(torch.float32, output)

    return [
        module.register_forward_pre_hook(replace, with_kwargs=True),
        module.register_forward_hook(restore, always_call=True),  # also after an error
    ]


def _units(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that hold weights directly; a module with an adapter is one unit with its submodules."""
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        if has_peft_adapter(module):
            inside |= {id(inner) for inner in module.modules()}
            yield module
        elif any(True for _ in module.parameters(recurse=False)):
            yield module


def _dtype_of_torchao(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype that a module with a tensor of torchao as its weight computes in; None for other modules."""
    weight = module._parameters.get("weight")
    return weight.dtype if weight is not None and hasattr(weight, "__tensor_flatten__") else None


def _as(dtype: torch.dtype, value: Any) -> Any:
    """Convert floating-point inputs: some models cast hidden states to the dtype of the next weights."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _move_buffers(model: torch.nn.Module, devices: Mapping[str, torch.device]) -> None:
    for name, buffer in model.named_buffers():
        if buffer.device != devices[name]:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner)._buffers[last] = buffer.to(devices[name])
