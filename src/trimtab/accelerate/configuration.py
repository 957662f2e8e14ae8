"""Accelerate's configuration classes, for machines without Accelerate; Accelerate's own classes work as well."""

import enum
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch


@dataclass
class DataLoaderConfiguration:
    """How batches are divided among processes; see docs/accelerate.md."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin:
    """Where accumulation windows end."""

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False


@dataclass
class ProjectConfiguration:
    """The folder that trackers write to."""

    project_dir: str | Path | None = None
    logging_dir: str | Path | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.logging_dir = self.logging_dir or self.project_dir


@dataclass
class GradScalerKwargs:
    """Loss scaling for fp16."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class DistributedDataParallelKwargs:
    """Options of `DistributedDataParallel`."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str = "no"
    comm_wrapper: str = "no"


class DDPCommunicationHookType(enum.StrEnum):
    """How gradients are compressed between processes; only NO is supported."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class LoggerType(enum.StrEnum):
    """The values of `log_with`; others are refused."""

    ALL = "all"
    MLFLOW = "mlflow"
    TENSORBOARD = "tensorboard"


@dataclass
class AutocastKwargs:
    """Options of `accelerator.autocast`."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class InitProcessGroupKwargs:
    """Options of the process group."""

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass
class ProfileKwargs:
    """Options of torch's profiler for `accelerator.profile`."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Any = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self) -> Any:
        """Return the profiler."""
        from torch.profiler import ProfilerActivity, profile, schedule

        names = {activity.name.lower(): activity for activity in ProfilerActivity.__members__.values()}
        return profile(
            activities=None if self.activities is None else [names[name] for name in self.activities],
            schedule=schedule(**self.schedule_option) if self.schedule_option else None,
            on_trace_ready=self.on_trace_ready or self._writer(),
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )

    def _writer(self) -> Any:
        if self.output_trace_dir is None:
            return None
        return torch.profiler.tensorboard_trace_handler(self.output_trace_dir)
