"""`Engine`: the facade for your own training loops, with the methods of Accelerate's `Accelerator`.

Each verb delegates to one part: `PreparedParts` (prepare), `Accumulation`, `Gradients` and `ForwardBackward` (the
step), `SavedState` (checkpoints), `World` and `Collectives` (processes), `TrackerGroup` (tracking).
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch.utils.data import DataLoader

from trimtab.checkpoint.codec import Encoded
from trimtab.checkpoint.store import StoredCheckpoint
from trimtab.distributed.consistency import require_same
from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.environment import read_rank_info
from trimtab.distributed.process_state import ProcessInterface, ProcessState
from trimtab.distributed.rendezvous import init_world
from trimtab.distributed.world import DistributedType, World
from trimtab.engine.accelerate_settings import accumulation_rules, loader_rules, project_folders, read_handlers
from trimtab.engine.accelerate_verbs import UNSUPPORTED, AccelerateInterface, GradientState, save_object
from trimtab.engine.accumulation import Accumulation, MicroBatch
from trimtab.engine.collectives import Collectives
from trimtab.engine.forward_backward import ForwardBackward, LossFunction
from trimtab.engine.gradients import Gradients, checked_loss
from trimtab.engine.loss_scaler import LossScaler, NoScaler, Scaler
from trimtab.engine.memory_budget import MemoryPlanner, planner_for
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.prepared_optimizer import PreparedOptimizer, PreparedScheduler
from trimtab.engine.prepared_parts import PreparedParts, check_parts, compile_models, require_prepared, unwrap
from trimtab.engine.saved_state import SavedState
from trimtab.engine.tracker_group import TrackerGroup
from trimtab.errors import PrepareError, RecipeError
from trimtab.hardware.inventory import describe_slow_precision, find_device, native_precision
from trimtab.hardware.memory import release_cached_memory
from trimtab.log import log_info_once
from trimtab.model.captured_micro_batch import CapturedMicroBatch
from trimtab.model.precision import Precision
from trimtab.randomness import random_state, restore_random_state, set_seed
from trimtab.tracking.trackers import Tracker, build_trackers

T = TypeVar("T")


class _InitSignature:
    """The signature of a class whose `__new__` takes any arguments: that of its `__init__`, for `help` and editors."""

    def __get__(self, engine: Any, kind: Any) -> inspect.Signature:
        signature = inspect.signature(kind.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class Engine(AccelerateInterface, ProcessInterface):
    """Run your own training loop with device placement, mixed precision, exact accumulation and checkpoints.

    Engines share no global state: several engines with different settings can exist in one process.

    Args:
        mixed_precision: "no", "fp16" or "bf16" (mixed precision with fp32 weights); "bf16-pure", which needs an
            optimizer with stochastic rounding; "tf32", which is a process-wide setting; or "auto", the fastest dtype
            that the device supports natively.
        gradient_accumulation_steps: Micro-batches per optimizer step inside `accumulate`.
        device: The device to compute on; None uses an accelerator if there is one, else the CPU.
        seed: Seed for all random number generators; None leaves them unchanged.
        cpu: Whether to compute on the CPU, like device="cpu".
        device_placement: Whether `prepare` moves models and batches to the device.
        step_scheduler_with_optimizer: Whether a prepared scheduler steps only after an optimizer step.
        log_with: "mlflow", "tensorboard", "journal", an object with the methods start, log and finish, or a list of
            these; None disables tracking.
        project_dir: The folder that trackers write to.
        split_batches: Whether the batch size of a loader counts the rows of all processes; True by default. With False,
            as in Accelerate, every process takes whole batches and schedulers step once per process.
        find_unused_parameters: Whether to allow parameters that do not contribute to the loss when several processes
            train.
        dataloader_config: Accelerate's DataLoaderConfiguration, with Accelerate's meaning: unless it has
            split_batches=True, every process takes whole batches.
        gradient_accumulation_plugin: Accelerate's GradientAccumulationPlugin, instead of gradient_accumulation_steps.
        project_config: Accelerate's ProjectConfiguration; trackers write to its logging_dir.
        kwargs_handlers: Accelerate's GradScalerKwargs, ProfileKwargs, DistributedDataParallelKwargs and
            InitProcessGroupKwargs (its timeout).
        memory_budget: The device memory that the process may use, such as "8GiB"; "auto" uses the free memory. When
            `prepare` gets a model, an optimizer and a loader, it predicts the memory of a step, enables gradient
            checkpointing if needed, and logs what it chose.
        memory_allow: Techniques that the budget may use although they change results slightly: "8bit" for 8-bit
            optimizer state.
        compile_blocks: Whether to compile the repeated blocks of prepared models with torch.compile: at the first
            occurrence of each input shape, up to 16 shapes. Only training is compiled. Names in state dicts do not
            change. If compiling fails, a message is logged and the blocks run without it.
        cuda_graphs: Whether `forward_backward` captures micro-batches in CUDA graphs and replays them: one graph for
            each batch size that occurs twice, up to 32. For one process only. On other devices, or if a capture fails,
            a message is logged and the step runs without graphs.
        world: The processes that train together; None finds them in the launcher's environment variables.
        memory_planner: Adapts parts to the memory in `prepare`; None uses the planner for `memory_budget`.

    Example:
        engine = Engine(mixed_precision="bf16", gradient_accumulation_steps=4)
        model, optimizer, loader = engine.prepare(model, optimizer, loader)
        for batch in loader:
            with engine.accumulate(model):
                engine.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    """

    # True in `trimtab.accelerate.Accelerator`: batches, windows and random numbers exactly as in Accelerate.
    _as_accelerate = False

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _scaler: Scaler

    __signature__ = _InitSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Store the arguments, which are all that is pickled of an engine."""
        engine = super().__new__(cls)
        engine._arguments = args, kwargs
        return engine

    def __init__(
        self,
        mixed_precision: str | None = "no",
        gradient_accumulation_steps: int = 1,
        device: str | torch.device | None = None,
        seed: int | None = None,
        *,
        cpu: bool = False,
        device_placement: bool = True,
        step_scheduler_with_optimizer: bool = True,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        split_batches: bool | None = None,
        find_unused_parameters: bool = False,
        dataloader_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        project_config: Any = None,
        kwargs_handlers: Sequence[Any] | None = None,
        memory_budget: str | int | None = None,
        memory_allow: Sequence[str] = (),
        compile_blocks: bool = False,
        cuda_graphs: bool = False,
        world: World | None = None,
        memory_planner: MemoryPlanner | None = None,
    ) -> None:
        handlers = read_handlers(kwargs_handlers, find_unused_parameters)
        place = read_rank_info()
        device = find_device("cpu" if cpu else device, place.local_device)
        rules = loader_rules(dataloader_config, split_batches, self._as_accelerate)
        num_steps, window_rules = accumulation_rules(
            gradient_accumulation_steps, gradient_accumulation_plugin, self._as_accelerate
        )
        self.device = device
        self.project_dir, self.logging_dir = project_folders(project_dir, project_config, self._as_accelerate)
        self._dataloader_config, self._profile_handler = dataloader_config, handlers.profile
        trackers = build_trackers(log_with, self.logging_dir)
        world = world or init_world(place, device, handlers.data_parallel, handlers.timeout_s)
        if mixed_precision == "auto":
            mixed_precision = native_precision(device).replace("fp32", "no")
        self._world = world
        self._trackers = TrackerGroup(trackers, self.is_main_process)
        self._precision = precision = Precision(mixed_precision, device, keeps_bf16=self._as_accelerate)
        self._compiles_blocks = compile_blocks
        self._scaler = NoScaler()
        if precision.needs_loss_scaling:
            self._scaler = LossScaler(**handlers.scaler, num_processes=world.num_processes)
        self._accumulation = accumulation = Accumulation(num_steps, world, window_rules)
        self._gradients = gradients = Gradients(accumulation, self._scaler, world)
        self._active_loaders = loaders = ActiveLoaders()
        self._collectives = Collectives(world, loaders, device)
        self._memory_planner = planner_for(memory_budget, memory_allow, device, memory_planner)
        follows = step_scheduler_with_optimizer
        self._prepared = PreparedParts(
            world, device, device_placement, precision, accumulation, gradients, loaders, rules, follows
        )
        self._models = self._prepared.models  # the same list object: `backward` reads it in every micro-batch
        self._forward_backward = ForwardBackward(self._prepared, captures=cuda_graphs, compiles=compile_blocks)
        self._saved_state = SavedState(world, self._prepared, self._scaler, self._forward_backward)
        self.state = ProcessState(world, device, precision.name)
        if self.is_local_main_process and (note := describe_slow_precision(precision.name, device)):
            log_info_once(note)
        self.gradient_state = GradientState(accumulation, loaders)
        if seed is not None:
            set_seed(seed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle an engine by its arguments, without its prepared parts and process group."""
        return _rebuild, (type(self), *self._arguments)

    if not TYPE_CHECKING:  # otherwise mypy would accept every misspelt attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an error that names the replacement for an unsupported Accelerate name."""
            if name in UNSUPPORTED:
                raise AttributeError(f"{name} is not supported\n  cure: {UNSUPPORTED[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ------------------------------------------------------------------ prepare

    def prepare(self, *parts: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers for the loop.

        Models are moved to the device and compute in the engine's precision. Loaders deliver this process's batches on
        the device. Optimizers and schedulers step only at the end of an accumulation window.

        Args:
            parts: Models, optimizers, loaders and schedulers, in any order.
            device_placement: For each part, whether to move it to the device; None uses the engine's setting.

        Returns:
            The prepared parts in the order given; a single part is returned alone.

        Raises:
            PrepareError: A part cannot be prepared. No part was changed.
        """
        moves = device_placement or [self._prepared.moves] * len(parts)
        check_parts(parts, moves, allows_none=self._as_accelerate)
        self._forward_backward.check(parts)
        # before the budget is applied: gradient checkpointing calls the compiled blocks again
        if self._compiles_blocks:
            compile_models(parts)
        parts = self._memory_planner.fit_to_budget(self, parts, self._prepared.loader_rules.splits)
        prepared = self._prepared.prepare(parts, moves)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Prepare one model."""
        prepared: torch.nn.Module = self.prepare(model)
        return prepared

    def prepare_data_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        """Prepare one loader."""
        return self._prepared.prepare_loader(loader, self._prepared.moves)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Prepare one optimizer."""
        return self._prepared.prepare_optimizer(optimizer)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one scheduler."""
        return self._prepared.prepare_scheduler(scheduler)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> PreparedLoader:
        """Make the next iteration of a loader start after `num_batches` batches, without loading map-style rows.

        `load_state` restores the position of a loader, so a resumed loop needs this only if it counts batches itself.
        """
        loader: PreparedLoader = self.prepare(dataloader)
        loader.start_at(num_batches)
        return loader

    def unwrap_model(self, model: torch.nn.Module, keep_fp32_wrapper: bool = True) -> torch.nn.Module:
        """Return the model without the wrappers of torch.compile and data parallelism.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: Whether to keep autocast; False restores the model's own forward.
        """
        inner = unwrap(model)
        if not keep_fp32_wrapper:
            self._precision.detach(model)
            self._precision.detach(inner)
        return inner

    def free_memory(self, *objects: Any) -> list[None]:
        """Drop all prepared parts and empty the device's cache.

        Returns:
            None for each object given, to assign to its variable: `model, optimizer = engine.free_memory(model,
            optimizer)`.
        """
        self._gradients.forget()
        self._accumulation.reset()
        self._prepared.clear()
        self._forward_backward.clear()
        self._saved_state.clear()
        release_cached_memory(self.device)
        return [None] * len(objects)

    clear = free_memory

    # ------------------------------------------------------------------ the step

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Accumulate the gradients of a mean loss; at the end of a window, `.grad` contains those of the whole batch.

        Args:
            loss: A scalar: the mean over the rows or tokens of this micro-batch.
            weight: The number of rows or tokens in that mean. None gives all micro-batches equal weight, which is exact
                if they have equal size. For causal language models it is `(labels[:, 1:] != -100).sum()`. A loss with
                weight 0 is ignored. If the weight is on an accelerator, a loss computed as sum / count must clamp the
                count to at least 1: the derivative of 0 / 0 is NaN, and the host does not know the weight.
            kwargs: Passed to `torch.Tensor.backward`.
        """
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad or not self._models:
            if not self._models and not self._prepared.optimizers:
                raise PrepareError(
                    "backward was called before prepare", "model, optimizer, … = engine.prepare(model, …)"
                )
            loss = checked_loss(loss)
        loader = self._active_loaders.innermost
        if loader is not None and loader.resumed_at is not None:
            loader.report_skipped()
        self._gradients.backward(loss, weight, 1.0 if loader is None else loader.row_share, **kwargs)

    def replay(self, captured: CapturedMicroBatch) -> None:
        """Accumulate the gradients of a captured micro-batch, as `backward` does."""
        self._gradients.replay(captured)

    def forward_backward(self, model: torch.nn.Module, batch: Any, loss: LossFunction | None = None) -> torch.Tensor:
        """Run forward, loss and backward of a micro-batch; `Engine(cuda_graphs=True)` replays it as a CUDA graph.

        The gradients are those of `backward`, inside and outside `accumulate`. A graph repeats the kernels that were
        launched when it was captured: Python code of the model and of the loss function runs during the capture, not in
        replays. So everything that differs between batches has to be in the tensors of the batch, and other tensors
        that the loss function reads may only be changed in place. Replays write `.grad` into the same tensors every
        time: clone gradients that you keep.

        Args:
            model: A prepared model.
            batch: Tensors and plain values in any nesting of dicts, lists and tuples.
            loss: A function of model and batch that returns the mean loss, or the mean loss and its weight, as in
                `backward(loss, weight)`. None computes `model(**batch).loss`.

        Returns:
            The mean loss of the micro-batch, detached.
        """
        require_prepared(model, self._models, "forward_backward")
        return self._forward_backward(self, model, batch, loss)

    def accumulate(self, *models: torch.nn.Module) -> MicroBatch:
        """Return a context for one micro-batch: optimizer, scheduler and zero_grad act only at the end of a window.

        A window ends after `gradient_accumulation_steps` micro-batches, and with the last batch of a prepared loader.

        Args:
            models: The models of the micro-batch; with several processes, they exchange gradients only at the end of a
                window.
        """
        for model in models:
            require_prepared(model, self._models, "accumulate")
        return MicroBatch(self._accumulation, self._active_loaders, self._gradients.connected)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients of a window by their norm; inside a window, do nothing.

        Args:
            parameters: The parameters whose gradients are clipped.
            max_norm: The largest norm allowed.
            norm_type: The type of the norm, as in `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The norm before clipping; inside a window, that of the previous window (zero before the first).
        """
        if not self._accumulation.sync:
            last = self._gradients.last_norm
            return torch.zeros((), device=self.device) if last is None else last
        if not max_norm > 0:  # a negative max_norm would reverse every gradient
            raise RecipeError(f"clip_grad_norm_: found max_norm={max_norm}", "use a number above 0, such as 1.0")
        self._gradients.last_norm = norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip the gradients of a window by value; inside a window, do nothing."""
        if self._accumulation.sync:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: `.grad` contains unscaled gradients after every backward that may end a window."""

    def undo_point(self) -> Callable[[], None]:
        """Return a function that undoes the changes of a window to the gradients since this call.

        Call it between two windows. Weights, optimizers, loaders and random numbers are not restored.
        """
        return self._gradients.window_undo_point()

    def all_or_none_window(self) -> AbstractContextManager[None]:
        """Return a context for one window that either all processes complete or none; costs two host-side barriers."""
        return self._gradients.agreement.required()

    def abort_window(self) -> bool:
        """Abort a window inside `all_or_none_window`, after an error here, or after `WindowAborted` on another process.

        Returns:
            Whether all processes abort it; False if its gradients had already been exchanged.
        """
        return self._gradients.agreement.abort()

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """Return an autocast context in the engine's precision, for computation outside the model's forward."""
        return self._precision.autocast(enabled)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context without gradient exchange between processes; the next backward outside exchanges the sum."""
        return model.no_sync() if isinstance(model, DataParallel) else nullcontext()

    def profile(self, profile_handler: Any = None) -> Any:
        """Return torch's profiler as a context, built by a ProfileKwargs handler if one was given."""
        handler = profile_handler or self._profile_handler
        return torch.profiler.profile() if handler is None else handler.build()

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window."""
        return self._accumulation.sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped because an fp16 gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._prepared.optimizers)

    @property
    def num_skipped_steps(self) -> int:
        """Number of skipped steps of all optimizers since the start."""
        return self._gradients.num_skipped

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self._accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self._accumulation.num_steps = value

    @property
    def mixed_precision(self) -> str:
        """The engine's precision: "no", "fp16", "bf16", "bf16-pure" or "tf32"."""
        return self._precision.name

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """The half-precision dtype that models compute in; None for fp32."""
        return self._precision.compute_dtype

    @property
    def captures_micro_batches(self) -> bool:
        """Whether `forward_backward` captures CUDA graphs on the engine's device."""
        return self._forward_backward.captures

    @property
    def scaler(self) -> Scaler:
        """The loss scaler for fp16; does nothing in other precisions."""
        return self._scaler

    # ------------------------------------------------------------------ state

    def save_state(self, output_dir: str | Path) -> str:
        """Write models, optimizers, schedulers, loaders, random states and registered objects to a folder.

        Call it on every process; the main process writes.

        Returns:
            The folder.
        """
        return self._saved_state.save(output_dir)

    def capture_state(self) -> dict[str, Encoded] | None:
        """Return what `save_state` would write, without writing it. Its tensors share memory with the model.

        Call it on every process; the main process gets the state, the others None.
        """
        return self._saved_state.capture()

    def load_state(self, input_dir: str | Path | StoredCheckpoint) -> None:
        """Load what `save_state` wrote into the same prepared parts; if it does not match them, nothing changes.

        A loader that was saved in the middle of an epoch continues there at its next iteration. Call it on every
        process.

        Raises:
            CheckpointError: The folder is not a checkpoint, or does not match the prepared parts.
        """
        self._saved_state.load(input_dir)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Include objects with `state_dict` and `load_state_dict` in what `save_state` writes."""
        self._saved_state.register(objects)

    def include_frozen_parameters(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Include frozen parameters in what `save_state` writes, because they become trainable during the run."""
        self._saved_state.include_later(parameters)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the state dict of a prepared model."""
        return self.unwrap_model(model).state_dict() if unwrap else model.state_dict()

    def save_model(self, model: torch.nn.Module, save_directory: str | Path) -> None:
        """Write a model's weights to `model.safetensors` in a folder; tied weights are stored once. Rank 0 writes."""
        from safetensors.torch import save_model

        if self.is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            save_model(self.unwrap_model(model), str(Path(save_directory) / "model.safetensors"))

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Write an object with `torch.save`, or a dict of tensors as safetensors, on the main process only."""
        if self.is_main_process:
            save_object(obj, f, safe_serialization)

    # ------------------------------------------------------------------ processes; more in ProcessInterface

    @property
    def num_processes(self) -> int:
        """The number of processes that train together."""
        return self._world.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self._world.process_index

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its host."""
        return self._world.local_process_index

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes are connected."""
        return self._world.distributed_type

    @property
    def has_no_rows(self) -> bool:
        """Whether the current batch of this process contains only padding, because it has fewer rows than processes."""
        return self._collectives.has_no_rows

    def busy(self, what: str) -> AbstractContextManager[Any]:
        """Return a context for a long task of one process, during which waiting processes do not report it as hung."""
        return self._world.monitor.long(what)

    def require_same(self, what: str, facts: dict[str, Any]) -> None:
        """Compare values across processes; if they differ, raise an error on all that names the rank and the value."""
        require_same(self._world, what, facts)

    def decide_on_main_process(self, decide: Callable[[], T]) -> T:
        """Run `decide` on the main process and return its result on all; a `UserError` is raised on all of them."""
        return self._collectives.decide_on_main_process(decide)

    def gather(self, tensor: T) -> T:
        """Concatenate the tensors of all processes along the first dimension; containers keep their structure."""
        return self._world.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values without the rows that pad the last batch of an epoch; objects are returned as a list."""
        return self._collectives.gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduce tensors over the processes.

        Args:
            tensor: A tensor, or nested containers of tensors.
            reduction: "sum", "mean", "max" or "none".
            scale: A factor for the result.
        """
        return self._world.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pad tensors to the largest size on any process.

        Args:
            tensor: A tensor, or nested containers of tensors.
            dim: The dimension to pad.
            pad_index: The value to pad with.
            pad_first: Whether to pad at the start instead of the end.
        """
        return self._world.pad_across_processes(tensor, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Set a flag that every process sees at its next `check_trigger`."""
        self._collectives.trigger = True

    def check_trigger(self) -> bool:
        """Return whether any process called `set_trigger` since the last check, and clear the flag."""
        return self._collectives.check_trigger()

    # ------------------------------------------------------------------ trackers

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers named in `log_with`."""
        return self._trackers.trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Start a run in every tracker named in `log_with`.

        Args:
            project_name: The project that groups the runs; in MLflow, the experiment.
            config: The settings of the run, logged once.
            init_kwargs: Settings by tracker name: {"mlflow": {"run_name": …, "uri": …, "parent": …, "resume": …}}, see
                `trimtab.tracking.mlflow.tracker.MlflowTracker.set_up`.
        """
        self._trackers.start(project_name, config, init_kwargs)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Pass values, by name, to every tracker; `log_kwargs` is not supported."""
        self._trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str) -> Any:
        """Return the tracker with that name."""
        return self._trackers.get(name)

    def end_training(self) -> None:
        """Close every tracker."""
        self._trackers.finish()


def _rebuild(kind: type[Engine], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Engine:
    before = random_state()
    engine = kind(*args, **kwargs)
    restore_random_state(before)  # a `seed` among the arguments applies only to the first engine
    return engine
