"""`GroupWorld`: collectives over torch.distributed's default process group; a lost rank is named in the error."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.distributed.ddp import DataParallel, DataParallelOptions
from trimtab.distributed.health.monitor import Monitor
from trimtab.distributed.rank_split import split_for_rank
from trimtab.distributed.world import DistributedType, Number, World, check_reduction, concatenated, map_tensors
from trimtab.errors import RecipeError

T = TypeVar("T")
_MAX_DIMS = 8
# Words in errors of gloo, NCCL and sockets that may mean that a rank is lost.
_LOST = ("peer", "connection", "gloo", "nccl", "timed out", "socket", "broken pipe", "process group")


class GroupWorld(World):
    """The ranks of torch's default process group.

    Args:
        device: Device of this rank.
        local_process_index: Local rank.
        monitor: Watches the other ranks.
        options: Passed to DistributedDataParallel.
    """

    def __init__(
        self,
        device: torch.device,
        local_process_index: int,
        monitor: Monitor,
        options: DataParallelOptions,
    ) -> None:
        super().__init__(monitor)
        self.num_processes = dist.get_world_size()
        self.process_index = dist.get_rank()
        self.local_process_index = local_process_index
        self.distributed_type = DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU
        self._options = options
        # Small host-side values (sizes, flags) go through gloo if the group has it: no host-device sync.
        self._host = torch.device("cpu") if "gloo" in _backend() else device

    def gather(self, value: T) -> T:
        """Concatenate each tensor of `value` over the ranks."""
        gathered: T = concatenated(self.gather_per_rank(value))
        return gathered

    def gather_per_rank(self, value: T) -> list[T]:
        """Return `value` of every rank, in rank order."""
        received: list[list[torch.Tensor]] = []  # for each tensor in `value`, the tensors of all ranks
        with self.exchanging("gather"):
            map_tensors(lambda tensor: received.append(self._gather_tensor(tensor)), value)

        def value_of(rank: int) -> T:
            tensors = iter(received)
            replaced: T = map_tensors(lambda _: next(tensors)[rank], value)
            return replaced

        return [value_of(rank) for rank in range(self.num_processes)]

    def _gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather as bytes, because not every backend supports every dtype, padded to the longest tensor."""
        row = tensor.detach()[None] if tensor.dim() == 0 else tensor.detach().contiguous()
        shapes = [list(row.shape)] * self.num_processes if tensor.dim() == 0 else self._shapes(row)
        sizes = [row.element_size() * torch.Size(shape).numel() for shape in shapes]
        mine = row.reshape(-1).view(torch.uint8) if row.numel() else row.new_empty(0, dtype=torch.uint8)
        padded = mine.new_zeros(max(sizes))
        padded[: mine.numel()] = mine
        received = [torch.empty_like(padded) for _ in shapes]
        dist.all_gather(received, padded)
        return [
            part[:size].view(row.dtype).view(shape) for part, size, shape in zip(received, sizes, shapes, strict=True)
        ]

    def _shapes(self, tensor: torch.Tensor) -> list[list[int]]:
        if tensor.dim() > _MAX_DIMS:
            raise RecipeError(f"a tensor with {tensor.dim()} dimensions cannot be gathered", "flatten it first")
        mine = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())], device=self._host)
        received = [torch.empty_like(mine) for _ in range(self.num_processes)]
        dist.all_gather(received, mine)
        return [shape[1 : 1 + shape[0]] for shape in (one.tolist() for one in received)]

    def gather_object(self, value: Any) -> list[Any]:
        """Return one element per rank; lists are joined into one list."""
        gathered = self.all_gather_object(value)
        return [item for part in gathered for item in part] if isinstance(value, list) else gathered

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order."""
        gathered: list[Any] = [None] * self.num_processes
        with self.exchanging("gather_object"):
            dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: T) -> T:
        """Broadcast the picklable `value` of rank 0."""
        holder = [value]
        with self.exchanging("broadcast"):
            dist.broadcast_object_list(holder, src=0)
        return holder[0]

    def reduce(self, value: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduce each tensor of `value` over the ranks."""
        check_reduction(reduction)

        def reduced(tensor: torch.Tensor) -> torch.Tensor:
            exact = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
            total = tensor.detach().to(torch.int32 if exact is torch.bool else exact, copy=True).contiguous()
            if reduction != "none":
                dist.all_reduce(total, op=dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
            if reduction == "mean":
                total = total / self.num_processes
            return (total if scale == 1.0 else total * scale).to(
                tensor.dtype if reduction in ("sum", "max") else total.dtype
            )

        with self.exchanging("reduce"):
            result: T = map_tensors(reduced, value)
        return result

    def total(self, value: Number, device: torch.device) -> Number:
        """Sum a number over the ranks, without a host-device sync on an accelerator."""
        if isinstance(value, torch.Tensor):
            summed = value.clone()
        else:
            dtype = torch.float64 if device.type == "cpu" else torch.float32
            summed = torch.full((), value, dtype=dtype, device=device)
        with self.exchanging("backward: weights"):
            dist.all_reduce(summed)
        return summed if summed.device.type != "cpu" or isinstance(value, torch.Tensor) else float(summed)

    def pad_across_processes(self, value: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pad each tensor of `value` to the largest size that any rank has."""

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            if dim >= tensor.dim() or dim < -tensor.dim():
                return tensor
            sizes = [shape[dim] for shape in self._shapes(tensor)]
            missing = max(sizes) - tensor.shape[dim]
            if not missing:
                return tensor
            shape = list(tensor.shape)
            shape[dim] = missing
            filler = tensor.new_full(shape, pad_index)
            return torch.cat([filler, tensor] if pad_first else [tensor, filler], dim=dim)

        with self.exchanging("pad_across_processes"):
            result: T = map_tensors(padded, value)
        return result

    def wait_for_everyone(self) -> None:
        """Block until every rank has called this."""
        with self.exchanging("wait_for_everyone"):
            dist.all_reduce(torch.zeros((), device=self._host))

    @contextmanager
    def main_process_first(self, local: bool = False) -> Iterator[None]:
        """Run the block on rank 0 (with `local`, on local rank 0 of each host) before the other ranks run it."""
        is_first = (self.local_process_index if local else self.process_index) == 0
        if not is_first:
            self.wait_for_everyone()
        try:
            if is_first:
                with self.monitor.long("main_process_first"):
                    yield
            else:
                yield
        finally:
            if is_first:
                self.wait_for_everyone()

    def split(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Return this rank's part of a list, tuple, dict of lists, tensor or dataset."""
        try:
            return split_for_rank(inputs, self.process_index, self.num_processes, apply_padding)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"split_between_processes: {error}", "pass a list, tuple, tensor or dataset") from error

    def anyone(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        largest = torch.tensor(int(flag), dtype=torch.int32, device=self._host)
        with self.exchanging("agree"):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return bool(largest)

    @contextmanager
    def exchanging(self, operation: str) -> Iterator[None]:
        """A context for a collective; the error for a lost rank is a `PeerError` that names it."""
        try:
            with self.monitor.waiting(operation):
                yield
        except RuntimeError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, error: RuntimeError) -> Exception:
        """Return a `PeerError` that names the lost rank, or `error` itself if it has another cause."""
        if any(word in str(error).lower() for word in _LOST):
            return self.monitor.explain(error)
        return error

    def connect(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model in DistributedDataParallel, unless it has no trainable parameters."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        with self.exchanging("prepare"):
            return DataParallel(model, self._options, self._explained)


def _backend() -> str:
    with contextlib.suppress(RuntimeError, ValueError):
        return str(dist.get_backend_config())
    return str(dist.get_backend())
