"""Several processes, over torch.distributed: gathering, reducing, waiting, and a message where one of them is gone."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.distributed.ddp import DataParallel, DataParallelOptions
from trimtab.distributed.health.monitor import Monitor, NoMonitor
from trimtab.distributed.row_shares import share_of
from trimtab.distributed.world import DistributedType, Number, check_reduction, concatenated, map_tensors
from trimtab.errors import RecipeError

T = TypeVar("T")
_MAX_DIMS = 8
_LOST = ("peer", "connection", "gloo", "nccl", "timed out", "socket", "broken pipe", "process group")


class GroupWorld:
    """The processes of torch's default process group.

    Args:
        device: Where this process computes.
        local_process_index: This process among those of its host.
        monitor: Knows what the other processes do.
        options: How models are connected.
    """

    def __init__(
        self,
        device: torch.device,
        local_process_index: int,
        monitor: Monitor | NoMonitor,
        options: DataParallelOptions,
    ) -> None:
        self.num_processes = dist.get_world_size()
        self.process_index = dist.get_rank()
        self.local_process_index = local_process_index
        self.distributed_type = DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU
        self.monitor: Monitor | NoMonitor = monitor
        self._options = options
        # sizes and objects go from host to host where the group can; a group of NCCL alone cannot
        self._host = torch.device("cpu") if "gloo" in _backend() else device

    # ------------------------------------------------------------------ gathering

    def gather(self, value: T) -> T:
        """Each tensor of `value` from every process, concatenated along the first dimension; scalars give a row."""
        gathered: T = concatenated(self.gather_each(value))
        return gathered

    def gather_each(self, value: T) -> list[T]:
        """`value` of every process, in the order of ranks; tensors may differ in length."""
        received: list[list[torch.Tensor]] = []
        with self.exchanging("gather"):
            map_tensors(lambda tensor: received.append(self._gather_tensor(tensor)), value)
        return [self._of_rank(rank, value, received) for rank in range(self.num_processes)]

    def _of_rank(self, rank: int, value: T, received: list[list[torch.Tensor]]) -> T:
        """`value` with each tensor, in the same order, replaced by that of another process."""
        theirs = iter(received)
        replaced: T = map_tensors(lambda tensor: next(theirs)[rank], value)
        return replaced

    def _gather_tensor(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """As bytes, because not every backend knows every dtype; padded to the longest where lengths differ."""
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
            raise RecipeError(f"a tensor of {tensor.dim()} dimensions cannot be gathered", "flatten it first")
        mine = torch.tensor([tensor.dim(), *tensor.shape, *[0] * (_MAX_DIMS - tensor.dim())], device=self._host)
        received = [torch.empty_like(mine) for _ in range(self.num_processes)]
        dist.all_gather(received, mine)
        return [shape[1 : 1 + shape[0]] for shape in (one.tolist() for one in received)]

    def gather_object(self, value: Any) -> list[Any]:
        """The lists of all processes as one list; anything else as one element for each process."""
        gathered = self.objects_of_all(value)
        return [item for part in gathered for item in part] if isinstance(value, list) else gathered

    def objects_of_all(self, value: Any) -> list[Any]:
        """`value` of every process, whatever it is, in the order of ranks."""
        gathered: list[Any] = [None] * self.num_processes
        with self.exchanging("gather_object"):
            dist.all_gather_object(gathered, value)
        return gathered

    def object_of_first(self, value: T) -> T:
        """What the first process gave."""
        holder = [value]
        with self.exchanging("broadcast"):
            dist.broadcast_object_list(holder, src=0)
        return holder[0]

    # ------------------------------------------------------------------ reducing

    def reduce(self, value: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Each tensor of `value` summed ("sum"), averaged ("mean") or maximized ("max") over the processes."""
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
        """The sum of a number over the processes; on an accelerator it stays there, and no host waits."""
        if isinstance(value, torch.Tensor):
            summed = value.clone()
        else:
            dtype = torch.float64 if device.type == "cpu" else torch.float32
            summed = torch.full((), value, dtype=dtype, device=device)
        with self.exchanging("backward: weights"):
            dist.all_reduce(summed)
        return summed if summed.device.type != "cpu" or isinstance(value, torch.Tensor) else float(summed)

    def pad_across_processes(self, value: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Each tensor of `value` padded to the largest size that any process holds."""

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

    # ------------------------------------------------------------------ order

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        with self.exchanging("wait_for_everyone"):
            dist.all_reduce(torch.zeros((), device=self._host))

    @contextmanager
    def main_process_first(self, local: bool = False) -> Iterator[None]:
        """A context in which the main process (with `local`, the first of each host) goes before the others."""
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
        """This process's share of a list, tuple, dict of lists, tensor or dataset."""
        try:
            return share_of(inputs, self.process_index, self.num_processes, apply_padding)
        except (TypeError, ValueError) as error:
            raise RecipeError(f"split_between_processes: {error}", "pass a list, tuple, tensor or dataset") from error

    def anyone(self, flag: bool) -> bool:
        """Whether any process says so. The hosts wait for each other, their devices for nobody."""
        said = torch.tensor(int(flag), dtype=torch.int32, device=self._host)
        with self.exchanging("agree"):
            dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said)

    @contextmanager
    def exchanging(self, verb: str) -> Iterator[None]:
        """A context in which this process needs the others; one that is gone becomes a `PeerError` that names it."""
        try:
            with self.monitor.waiting(verb):
                yield
        except RuntimeError as error:
            explained = self._explained(error)
            if explained is error:
                raise
            raise explained from error

    def _explained(self, error: RuntimeError) -> Exception:
        """The same error, or, where it says that a process is gone, one that names it."""
        if any(word in str(error).lower() for word in _LOST):
            return self.monitor.explain(error)
        return error

    def connect(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as DistributedDataParallel; one of which nothing trains stays as it is."""
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        with self.exchanging("prepare"):
            return DataParallel(model, self._options, self._explained)


def _backend() -> str:
    with contextlib.suppress(RuntimeError, ValueError):
        return str(dist.get_backend_config())
    return str(dist.get_backend())
