"""How near two models are on real rows: KL divergence and agreement of their answers, computed in fp32.

The models are never in memory together: what the first one answers is kept, then the second is asked the same.
Shapes: B rows, L positions, N answers, V tokens, classes or numbers of an answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from trimtab.data.tasks.base import Task
from trimtab.engine.placement import to_device
from trimtab.model.forward import IGNORED, logits_of, run_model

_KEPT_BYTES = 512 * 2**20  # of all answers of the first model, on the host
_BATCH_BYTES = 128 * 2**20  # of the logits of one batch
_SLICE_BYTES = 32 * 2**20  # of the answers that are compared at once, in fp64
_NEAR_SHARE = 0.1  # numbers agree that differ by less than this share of their spread
Batch = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Closeness:
    """How near a second model's answers are to those of the first.

    Args:
        kl_mean: KL divergence of the second from the first, in nats, over all answers; for numbers that of two normal
            distributions as wide as the spread of the first model's answers.
        kl_max: That of the answer in which they differ most.
        agreement: The share of answers whose most probable token, class or set of labels is the same; of numbers,
            those that differ by less than a tenth of their spread.
        num_answers: How many tokens or rows were compared.
        num_rows: Out of how many rows.
    """

    kl_mean: float
    kl_max: float
    agreement: float
    num_answers: int
    num_rows: int


class Questions:
    """Rows with labels that models are asked about, and the first model's answers.

    Args:
        task: The task of the models, bound to their tokenizer.
        examples: The rows, as the task encoded them.
        num_outputs: How many numbers an answer has: the size of the vocabulary or the number of labels.
        device: Where to compute.
    """

    def __init__(
        self, task: Task, examples: Sequence[dict[str, torch.Tensor]], num_outputs: int, device: torch.device
    ) -> None:
        self._task, self._device = task, device
        self._num_rows = len(examples)
        self._most_a_row = max(1, _KEPT_BYTES // (4 * num_outputs * max(1, len(examples))))
        is_token_task = task.loss_kind == "token-cross-entropy"
        lengths = [len(example["input_ids"]) * (num_outputs if is_token_task else 1) for example in examples]
        self._batches = [
            task.collate([examples[row] for row in rows]) for rows in _in_batches(lengths, _BATCH_BYTES // 4)
        ]
        self._first: list[torch.Tensor] = []

    def ask_first(self, model: torch.nn.Module) -> int:
        """Keep what `model` answers.

        Returns:
            How many answers there are.
        """
        self._first = [answers.cpu() for answers in self._answers(model)]
        return sum(map(len, self._first))

    def compare(self, model: torch.nn.Module) -> Closeness:
        """Ask a second model, and compare."""
        spread = _spread(self._first) if self._task.loss_kind == "mse" else None
        kl, agrees = [], []
        for first, second in zip(self._first, self._answers(model), strict=True):
            num_at_once = max(1, _SLICE_BYTES // (8 * max(1, first[:1].numel())))
            for one, other in zip(*(torch.split(each, num_at_once) for each in (first, second.cpu())), strict=True):
                of_slice = _differences(self._task.loss_kind, one.double(), other.double(), spread)
                kl.append(of_slice[0])
                agrees.append(of_slice[1])
        kl_N, agrees_N = torch.cat(kl), torch.cat(agrees)
        return Closeness(
            kl_N.mean().item(), kl_N.max().item(), agrees_N.float().mean().item(), len(kl_N), self._num_rows
        )

    @torch.no_grad()
    def _answers(self, model: torch.nn.Module) -> Iterator[torch.Tensor]:
        model.eval()
        with _near(model, self._device), computed_in_fp32(model, self._device):
            for batch in self._batches:
                moved = to_device(batch, self._device)
                logits = logits_of(run_model(model, moved))
                assert logits is not None  # a task's model has a head
                yield (logits[self._asked(moved)] if logits.dim() == 3 else logits).float()

    def _asked(self, batch: Batch) -> torch.Tensor:
        """Which positions are compared: those with a label, in a long row some of them at even distances."""
        labels_BL = batch["labels"]
        if self._task.shifts_labels:
            labels_BL = functional.pad(labels_BL[:, 1:], (0, 1), value=IGNORED)
        asked_BL = labels_BL != IGNORED
        place_BL = asked_BL.cumsum(1) - 1  # of a labelled position among those of its row
        count_B1 = asked_BL.sum(1, keepdim=True)
        step_B1 = (count_B1 + self._most_a_row - 1) // self._most_a_row
        return asked_BL & (place_BL % step_B1.clamp(min=1) == 0)


def _in_batches(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Rows one after the other, as many at a time as stay within `most` when all are padded to the longest."""
    batches: list[list[int]] = []
    longest = 0
    for row, size in enumerate(sizes):
        longest = max(longest, size)
        if not batches or longest * (len(batches[-1]) + 1) > most:
            batches.append([])
            longest = size
        batches[-1].append(row)
    return batches


def _differences(
    kind: str, one_NV: torch.Tensor, other_NV: torch.Tensor, spread: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The KL divergence of each answer, and whether it is the same answer."""
    if kind == "mse":
        assert spread is not None
        one, other = (answers.reshape(len(answers), -1) for answers in (one_NV, other_NV))
        in_spreads = (one - other).abs() / spread
        return in_spreads.square().sum(1) / 2, (in_spreads < _NEAR_SHARE).all(1)
    if kind == "binary-cross-entropy":
        p, q = (torch.stack([functional.logsigmoid(x), functional.logsigmoid(-x)], -1) for x in (one_NV, other_NV))
        return (p.exp() * (p - q)).sum((-1, -2)).clamp(min=0), ((one_NV > 0) == (other_NV > 0)).all(1)
    p, q = one_NV.log_softmax(-1), other_NV.log_softmax(-1)
    # 0 times the difference of two -inf is nothing, not NaN; NaN of a broken model stays
    parts = torch.where(p == -torch.inf, torch.zeros_like(p), p.exp() * (p - q))
    return parts.sum(-1).clamp(min=0), p.argmax(-1) == q.argmax(-1)


def _spread(answers: Sequence[torch.Tensor]) -> torch.Tensor:
    """The standard deviation of each number; of numbers that hardly differ, a thousandth of their size."""
    numbers = torch.cat([each.reshape(len(each), -1) for each in answers]).double()
    return torch.maximum(numbers.std(0, correction=0), numbers.abs().mean(0) / 1000).clamp(min=1e-12)


@contextmanager
def _near(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a model that fits onto the device is there; any other stays at home, from where its modules come."""
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
        return True  # one memory with the host, or none that could be asked
    sizes = [(parameter.numel(), parameter.element_size()) for parameter in model.parameters()]
    largest = max((4 * num for num, _ in sizes), default=0)  # in fp32, for the time of a call
    needed = sum(num * size for num, size in sizes) + 2 * largest + 4 * _BATCH_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return needed < 0.9 * free


@contextmanager
def computed_in_fp32(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a model computes in fp32 on `device` from weights that stay as they are and where they are.

    Each module brings its own weights for the time of its call, so that no second model has to fit into memory.
    Quantized weights are left alone: they have to be on the device, and compute in what they were made for.
    """
    homes = {name: buffer.device for name, buffer in model.named_buffers()}
    with ExitStack() as undo:
        for module in _units(model):
            brought: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
            for hook in (
                module.register_forward_pre_hook(_Bring(brought, device), with_kwargs=True),
                module.register_forward_hook(_TakeBack(brought), always_call=True),
            ):
                undo.callback(hook.remove)
        try:
            _move_buffers(model, dict.fromkeys(homes, device))
            yield
        finally:
            _move_buffers(model, homes)


def _units(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that use weights of their own; one with an adapter is a unit together with all that it holds."""
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        if hasattr(module, "lora_A"):
            inside |= {id(inner) for inner in module.modules()}
            yield module
        elif any(True for _ in module.parameters(recurse=False)):
            yield module


class _Bring:
    """Before a call: the module's weights, and what it is given, in fp32 on the device."""

    def __init__(self, brought: list[tuple[torch.nn.Parameter, torch.Tensor]], device: torch.device) -> None:
        self._brought, self._device = brought, device

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        is_adapted = hasattr(module, "lora_A")
        for parameter in module.parameters(recurse=is_adapted):
            if parameter.is_floating_point() and (parameter.dtype, parameter.device) != (torch.float32, self._device):
                self._brought.append((parameter, parameter.data))
                parameter.data = parameter.data.to(self._device, torch.float32)
        return tuple(map(_as_fp32, args)), {name: _as_fp32(value) for name, value in kwargs.items()}


class _TakeBack:
    """After a call, or an error in it: the weights as they were."""

    def __init__(self, brought: list[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        self._brought = brought

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        while self._brought:
            parameter, data = self._brought.pop()
            parameter.data = data


def _as_fp32(value: Any) -> Any:
    """Some models cast hidden states to the dtype of the weights to come."""
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _move_buffers(model: torch.nn.Module, places: Mapping[str, torch.device]) -> None:
    for name, buffer in model.named_buffers():
        if buffer.device != places[name]:
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner)._buffers[last] = buffer.to(places[name])
