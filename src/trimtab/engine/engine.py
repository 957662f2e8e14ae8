"""Door 1: the engine for a loop of your own. It has Accelerate's verbs and hands each to the part that knows it."""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from trimtab.checkpoint.codec import Encoded
from trimtab.checkpoint.collective import capture_together, load_together, save_together
from trimtab.checkpoint.frozen_base import FrozenBase
from trimtab.checkpoint.state import (
    ModelPart,
    OptimizerPart,
    Part,
    RandomPart,
    StatefulPart,
)
from trimtab.checkpoint.store import StoredCheckpoint
from trimtab.distributed.consistency import require_same
from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.environment import find_place
from trimtab.distributed.process_state import run_if
from trimtab.distributed.rendezvous import find_world
from trimtab.distributed.world import DistributedType, World
from trimtab.engine.accelerate_settings import (
    accumulation_rules,
    loader_rules,
    make_scaler,
    project_folder,
    read_handlers,
)
from trimtab.engine.accelerate_verbs import AccelerateVerbs
from trimtab.engine.accumulation import Accumulation
from trimtab.engine.gradients import Gradients
from trimtab.engine.loss_scaler import NoScaler, Scaler
from trimtab.engine.memory_budget import MemoryPlanner, planner_for
from trimtab.engine.placement import placement_for
from trimtab.engine.prepare_loader import prepare_loader
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.prepared_optimizer import PreparedOptimizer, PreparedScheduler, optimizers_of
from trimtab.errors import LossError, PrepareError, RecipeError, UserError
from trimtab.hardware.inventory import find_device, native_precision
from trimtab.log import say_once
from trimtab.model.precision import Precision
from trimtab.optim.build import rounds_stochastically
from trimtab.randomness import diverge, set_seed
from trimtab.tracking.trackers import build_trackers, set_up

T = TypeVar("T")


class Engine(AccelerateVerbs):
    """Runs a training loop of your own: placement, mixed precision, exact accumulation, state.

    Nothing is global: engines with different settings live side by side in one process.

    Args:
        mixed_precision: "no", "fp16" or "bf16"; the two always mean mixed, with fp32 weights. Also "bf16-pure" (give it
            an optimizer that rounds stochastically), "tf32", which is a setting of the whole process, and "auto": what
            the device does natively.
        gradient_accumulation_steps: Micro-batches for each optimizer step inside `accumulate`.
        device: Where to compute; None finds an accelerator, else takes the CPU.
        seed: Seeds every random number generator, if given.
        cpu: The same as device="cpu".
        device_placement: Whether `prepare` moves models and batches to the device.
        step_scheduler_with_optimizer: Whether a prepared scheduler waits for real optimizer steps.
        log_with: "mlflow", "journal", an object with start, log and finish, or a list of these; None tracks nothing.
        project_dir: Where trackers write.
        split_batches: Whether a loader's batch size is that of all processes together, which it is if left out. False
            is Accelerate's meaning: every process takes whole batches, and schedules step once for each process.
        find_unused_parameters: Let several processes train a model of which parts take no part in the loss.
        dataloader_config: Accelerate's DataLoaderConfiguration, read by its fields. It means what it means there:
            unless it says split_batches=True, every process takes whole batches.
        gradient_accumulation_plugin: Accelerate's, in the place of gradient_accumulation_steps.
        project_config: Accelerate's ProjectConfiguration, for its project_dir.
        kwargs_handlers: Accelerate's GradScalerKwargs, ProfileKwargs, DistributedDataParallelKwargs and the timeout of
            InitProcessGroupKwargs.
        memory_budget: What the process may use of the device, such as "8GiB"; "auto" is what is free. `prepare`, given
            model, optimizer and loader, predicts the step, recomputes blocks in backward where it has to, and says so.
        memory_allow: What may be chosen for its sake although it changes results a little: "8bit", the optimizer's
            state in 8 bits.
        world: The processes that train together; None finds them from the environment variables of the launcher.
        memory_planner: Adapts parts to the memory in `prepare`; None takes the planner of `memory_budget`.
    """

    _as_accelerate = False  # batches, windows and random numbers exactly as Accelerate has them; see trimtab.accelerate

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
        world: World | None = None,
        memory_planner: MemoryPlanner | None = None,
    ) -> None:
        self._loader_rules = loader_rules(dataloader_config, split_batches, self._as_accelerate)
        self._dataloader_config = dataloader_config
        handlers = read_handlers(kwargs_handlers, find_unused_parameters)
        place = find_place()
        self.device = find_device("cpu" if cpu else device, place.local_device)
        self.project_dir = project_folder(project_dir, project_config)
        self.trackers = build_trackers(log_with, self.project_dir)
        self._world = world or find_world(place, self.device, handlers.data_parallel, handlers.timeout_s)
        if mixed_precision == "auto":
            mixed_precision = native_precision(self.device).replace("fp32", "no")
        self._precision = Precision(mixed_precision, self.device)
        self._scaler: Scaler = NoScaler()
        if self._precision.needs_loss_scaling:
            self._scaler = make_scaler(handlers, self._world.num_processes)
        num_steps, window_rules = accumulation_rules(
            gradient_accumulation_steps, gradient_accumulation_plugin, self._as_accelerate
        )
        self._accumulation = Accumulation(num_steps, self._world, window_rules)
        self._gradients = Gradients(self._accumulation, self._scaler, self._world)
        self._place = placement_for(self.device if device_placement else torch.device("cpu"))
        self._moves_models = device_placement
        self._follow_optimizer = step_scheduler_with_optimizer
        self._active_loaders = ActiveLoaders()
        if memory_planner is not None and memory_budget is not None:
            raise RecipeError("memory_budget and memory_planner were both given", "leave one of them out")
        self._memory_planner = memory_planner or planner_for(memory_budget, memory_allow, self.device)
        self._models: list[torch.nn.Module] = []
        self._train_later: list[torch.nn.Parameter] = []
        self._frozen: list[FrozenBase] = []  # of each model, what did not train when it came
        self._optimizers: list[PreparedOptimizer] = []
        self._loaders: list[PreparedLoader] = []
        self._schedulers: list[PreparedScheduler] = []
        self._registered: list[Any] = []
        self._profile_handler = handlers.profile
        self._trigger = False
        self._last_norm: torch.Tensor | None = None
        if seed is not None:
            set_seed(seed)

    # ------------------------------------------------------------------ prepare

    def prepare(self, *parts: Any, device_placement: list[bool] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers ready for the loop.

        Args:
            parts: Any number of them, in any order.
            device_placement: For each part, whether it may be moved; None follows the engine.

        Returns:
            The prepared parts in the order given; a single part comes back alone.
        """
        kinds = [_kind_of(part, position) for position, part in enumerate(parts)]
        moves = device_placement or [self._moves_models] * len(parts)
        if len(moves) != len(parts):
            raise PrepareError(f"device_placement has {len(moves)} values for {len(parts)} parts", "one for each part")
        parts = self._memory_planner.fit_to_budget(self, parts, self._loader_rules.splits)
        prepared: list[Any] = list(parts)
        # schedulers last: they look for the optimizers that they drive
        for position in sorted(range(len(parts)), key=lambda i: kinds[i] == "scheduler"):
            prepare_one = getattr(self, f"_prepare_{kinds[position]}")
            prepared[position] = prepare_one(parts[position], moves[position])
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Prepare one model."""
        prepared: torch.nn.Module = self.prepare(model)
        return prepared

    def prepare_data_loader(self, loader: DataLoader[Any]) -> PreparedLoader:
        """Prepare one loader."""
        return self._prepare_loader(loader, self._moves_models)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> PreparedOptimizer:
        """Prepare one optimizer."""
        return self._prepare_optimizer(optimizer, self._moves_models)

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one scheduler."""
        return self._prepare_scheduler(scheduler, self._moves_models)

    def _prepare_model(self, model: torch.nn.Module, move: bool) -> torch.nn.Module:
        if any(model is known for known in self._models):
            return model
        if move and not _placed_by_its_loader(model):
            model.to(self.device)
        self._precision.attach(model)
        self._frozen.append(FrozenBase(self.unwrap_model(model)))
        model = self._world.connect(model)
        if not self._models and not self._as_accelerate:
            diverge(self._world.process_index)
        self._models.append(model)
        self._gradients.watch(model)
        return model

    def _prepare_optimizer(self, optimizer: torch.optim.Optimizer, move: bool) -> PreparedOptimizer:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if self._precision.is_pure and not rounds_stochastically(optimizer):
            say_once(
                f"bf16-pure: {type(optimizer).__name__} rounds to the nearest, which loses small updates; "
                "trimtab.optim.build.build_optimizer(…, rounds_stochastically=True) does not"
            )
        prepared = PreparedOptimizer(optimizer, self._accumulation, self._gradients)
        self._optimizers.append(prepared)
        self._gradients.watch(optimizer)
        return prepared

    def _prepare_loader(self, loader: DataLoader[Any], move: bool) -> PreparedLoader:
        if isinstance(loader, PreparedLoader):
            return loader
        place = self._place if move else placement_for(torch.device("cpu"))
        prepared = prepare_loader(loader, place, self._active_loaders, self._world, self._loader_rules)
        self._loaders.append(prepared)
        return prepared

    def _prepare_scheduler(self, scheduler: Any, move: bool) -> PreparedScheduler:
        if isinstance(scheduler, PreparedScheduler):
            return scheduler
        driven = optimizers_of(scheduler, self._optimizers)
        num_steps_each = 1 if self._loader_rules.splits else self.num_processes
        prepared = PreparedScheduler(scheduler, driven, self._accumulation, self._follow_optimizer, num_steps_each)
        self._schedulers.append(prepared)
        return prepared

    # ------------------------------------------------------------------ the step

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, **kwargs: Any) -> None:
        """Add the gradients of a mean loss; at the end of a window they are those of the whole batch.

        Args:
            loss: A scalar: the mean over the rows or tokens of this micro-batch.
            weight: How many rows or tokens that mean stands for. None counts every micro-batch alike, which is exact
                for micro-batches of one size. For causal language models this is `(labels[:, 1:] != -100).sum()`.
                Weight 0 contributes nothing. On an accelerator, where that is not known to the host, a loss written
                as sum / count has to clamp its count to 1: the derivative of 0 / 0 is NaN.
            kwargs: Passed to `torch.Tensor.backward`.
        """
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0 or not loss.requires_grad or not self._models:
            loss = self._checked_loss(loss)
        loader = self._active_loaders.innermost
        self._gradients.backward(loss, weight, 1.0 if loader is None else loader.row_share, **kwargs)

    def _checked_loss(self, loss: Any) -> torch.Tensor:
        if not self._models and not self._optimizers:
            raise PrepareError("backward was called before prepare", "model, optimizer, … = engine.prepare(model, …)")
        if loss is None:
            raise LossError("the loss is None: the model was given no labels", 'put "labels" into the batch')
        if not isinstance(loss, torch.Tensor):
            raise LossError(f"the loss is a {type(loss).__name__}, not a tensor", "pass the model's loss as it is")
        if loss.numel() != 1:
            raise LossError(f"the loss has shape {tuple(loss.shape)}, but one number is needed", "loss.mean()")
        if not loss.requires_grad:
            raise LossError(
                "the loss depends on nothing that trains",
                "check requires_grad of the parameters, and that the forward is not under torch.no_grad()",
            )
        return loss.reshape(())

    def accumulate(self, *models: torch.nn.Module) -> "_MicroBatch":
        """A context for one micro-batch: optimizer, scheduler and zero_grad act only where a window ends.

        A window ends after `gradient_accumulation_steps` micro-batches, and with the last batch of a prepared loader.
        """
        for model in models:
            if not any(self.unwrap_model(model) is self.unwrap_model(known) for known in self._models):
                raise PrepareError(
                    f"accumulate was given a {type(model).__name__} that was not prepared",
                    "engine.prepare(model) first",
                )
        return _MicroBatch(self._accumulation, self._active_loaders, self._gradients.connected)

    def undo_point(self) -> Callable[[], None]:
        """A function that takes back what a window has done to the gradients since now; for one that cannot end.

        To be called between two windows, where no gradient waits for a step. Weights, optimizers, loaders and random
        numbers are not its business.
        """
        accumulation, gradients = self._accumulation.state_dict(), self._gradients.state_dict()
        num_steps, norm = self._accumulation.num_steps, self._last_norm

        def undo() -> None:
            for model in self._models:
                model.zero_grad(set_to_none=True)
            self._accumulation.load_state_dict(accumulation)
            self._gradients.load_state_dict(gradients)
            self._accumulation.num_steps, self._last_norm = num_steps, norm

        return undo

    def agreeing(self) -> AbstractContextManager[None]:
        """A context for one window that all processes end, or none: each one's host waits for the others twice."""
        return self._gradients.agreement.sought()

    def give_up_window(self) -> bool:
        """A window inside `agreeing` has failed here or, with `OthersGaveUp`, elsewhere: no process goes further.

        Returns:
            Whether that is so; not where the gradients of the window had been exchanged already.
        """
        return self._gradients.agreement.give_up()

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """A context in which operations run in the engine's precision, for computation outside the model's forward."""
        return self._precision.autocast(enabled)

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """A context in which gradients are not exchanged between processes; the next backward outside does it."""
        return model.no_sync() if isinstance(model, DataParallel) else nullcontext()

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the true gradients of a window by their norm.

        Inside a window nothing is clipped, and the norm of the window before is returned (zero before the first).
        """
        if not self._accumulation.sync:
            return self._last_norm if self._last_norm is not None else torch.zeros((), device=self.device)
        self._last_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        return self._last_norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
        """Clip the true gradients of a window by value; inside a window nothing is clipped."""
        if self._accumulation.sync:
            torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Gradients are true after every backward that may end a window: there is nothing to do."""

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window."""
        return self._accumulation.sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped, because an fp16 gradient overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def num_skipped_steps(self) -> int:
        """Steps that were skipped since the beginning, over all optimizers."""
        return self._gradients.num_skipped

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches for each optimizer step."""
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
        """The half-precision format that models compute in; None where they compute in fp32."""
        return self._precision.compute_dtype

    @property
    def scaler(self) -> Scaler:
        """Loss scaling of fp16; does nothing in other precisions."""
        return self._scaler

    # ------------------------------------------------------------------ models and state

    def unwrap_model(self, model: torch.nn.Module, keep_fp32_wrapper: bool = True) -> torch.nn.Module:
        """The model as it was given, without compilation and without its connection to other processes.

        Args:
            model: A prepared model.
            keep_fp32_wrapper: False gives the model its own forward back, without autocast.
        """
        inner: Any = model
        while isinstance(inner, DataParallel) or "_orig_mod" in inner._modules:
            inner = inner.module if isinstance(inner, DataParallel) else inner._orig_mod
        if not keep_fp32_wrapper:
            self._precision.detach(model)
            self._precision.detach(inner)
        unwrapped: torch.nn.Module = inner
        return unwrapped

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of a prepared model."""
        return self.unwrap_model(model).state_dict() if unwrap else model.state_dict()

    def save_state(self, output_dir: str | Path) -> str:
        """Write models, optimizers, schedulers, loaders, generators and registered objects to a folder.

        Every process calls it; the first one writes.

        Returns:
            The folder.
        """
        return save_together(self._world, output_dir, self._parts(), self._gradients.are_same_everywhere)

    def capture_state(self) -> dict[str, Encoded] | None:
        """What `save_state` would write, for a writer of one's own: its tensors are the living ones.

        Every process calls it; the first one gets the state, the others None.
        """
        return capture_together(self._world, self._parts(), self._gradients.are_same_everywhere)

    def load_state(self, input_dir: str | Path | StoredCheckpoint) -> None:
        """Restore what `save_state` wrote, into the same prepared objects; if it does not fit, nothing is changed.

        A loader that was in the middle of an epoch goes on from there at its next iteration. Every process calls it.
        """
        load_together(self._world, input_dir, self._parts())

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let objects with `state_dict` and `load_state_dict` be part of the state."""
        unfit = [o for o in objects if not (hasattr(o, "state_dict") and hasattr(o, "load_state_dict"))]
        if unfit:
            kinds = ", ".join(type(o).__name__ for o in unfit)
            raise PrepareError(f"{kinds} cannot be saved", "register objects that have state_dict and load_state_dict")
        self._registered.extend(objects)

    def will_train(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Let parameters that are frozen now, and begin to train later, be part of the state from the beginning."""
        self._train_later.extend(parameters)

    def _parts(self) -> list[Part]:
        """Parts that can refuse while they load come first; see `apply_parts`."""
        parts: list[Part] = [
            StatefulPart("accumulation", self._accumulation),
            StatefulPart("scaler", self._scaler),
            StatefulPart("gradients", self._gradients),
        ]
        for name, owners in (
            ("scheduler", self._schedulers),
            ("loader", self._loaders),
            ("object", self._registered),
        ):
            parts += [StatefulPart(_numbered(name, index), owner) for index, owner in enumerate(owners)]
        models = [self.unwrap_model(model) for model in self._models]
        parts += [
            OptimizerPart(_numbered("optimizer", index), optimizer.optimizer, models)
            for index, optimizer in enumerate(self._optimizers)
        ]
        parts += [
            ModelPart(_numbered("model", index), model, also=self._train_later, base=base)
            for index, (model, base) in enumerate(zip(models, self._frozen, strict=True))
        ]
        return [*parts, RandomPart(self._world.process_index)]

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> PreparedLoader:
        """A loader whose next iteration begins after `num_batches` batches; map-style data is not loaded for them.

        `load_state` restores the place by itself, so a resumed loop needs this only if it counts batches on its own.
        """
        loader: PreparedLoader = self.prepare(dataloader)
        loader.start_at(num_batches)
        return loader

    def save_model(self, model: torch.nn.Module, save_directory: str | Path) -> None:
        """Write a model's weights to `model.safetensors` in a folder; tied weights once. The first process writes."""
        from safetensors.torch import save_model

        if not self.is_main_process:
            return

        Path(save_directory).mkdir(parents=True, exist_ok=True)
        save_model(self.unwrap_model(model), str(Path(save_directory) / "model.safetensors"))

    def profile(self, profile_handler: Any = None) -> Any:
        """Torch's profiler as a context, built by a ProfileKwargs handler where one was given."""
        handler = profile_handler or self._profile_handler
        return torch.profiler.profile() if handler is None else handler.build()

    def free_memory(self, *objects: Any) -> list[None]:
        """Let go of everything prepared and return freed memory to the device; gives None for each object given."""
        self._gradients.forget()
        self._accumulation.reset()
        models: list[list[Any]] = [self._models, self._frozen, self._train_later]
        for held in (*models, self._optimizers, self._loaders, self._schedulers, self._registered):
            held.clear()
        gc.collect()
        if self.device.type != "cpu" and hasattr(torch.get_device_module(self.device), "empty_cache"):
            torch.get_device_module(self.device).empty_cache()
        return [None] * len(objects)

    clear = free_memory

    # ------------------------------------------------------------------ processes

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return self._world.num_processes

    @property
    def process_index(self) -> int:
        """This process among all."""
        return self._world.process_index

    @property
    def local_process_index(self) -> int:
        """This process among those of its host."""
        return self._world.local_process_index

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes are connected."""
        return self._world.distributed_type

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._world.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self._world.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self._world.local_process_index == 0

    @property
    def has_no_rows(self) -> bool:
        """Whether the current batch of this process is a row of another's: the batch has too few for all of them."""
        loader = self._active_loaders.innermost
        return loader is not None and loader.has_no_rows

    def busy(self, what: str) -> AbstractContextManager[Any]:
        """A context for what takes one process long while the others wait for it: they do not take it for hung."""
        return self._world.monitor.long(what)

    def require_same(self, what: str, facts: dict[str, Any]) -> None:
        """Compare facts over the processes; a difference is an error on all that names the rank and the fact."""
        require_same(self._world, what, facts)

    def first_decides(self, decide: Callable[[], T]) -> T:
        """What `decide` gives on the main process, on every process; so is a mistake of the user's that it finds."""
        outcome: tuple[Any, UserError | None] = (None, None)
        if self.is_main_process:
            try:
                outcome = decide(), None
            except UserError as error:
                if not self.use_distributed:
                    raise
                outcome = None, error
        decided, problem = self._world.object_of_first(outcome)
        if problem is not None:
            raise problem
        result: T = decided
        return result

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self._world.process_index == self._world.num_processes - 1

    def gather(self, tensor: T) -> T:
        """Tensors of every process, concatenated."""
        return self._world.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Like `gather`, without rows that only fill up an epoch's last batch. Objects come as a list."""
        if use_gather_object or not _is_all_tensors(input_data):
            return self._gather_objects(input_data)
        loader = self._active_loaders.innermost
        if loader is None:
            return self._world.gather(input_data)
        return loader.real_rows(self._world.gather_each(input_data))

    def _gather_objects(self, value: Any) -> list[Any]:
        """Lists joined, other objects one for each process; without those of a process that has only a stand-in."""
        loader = self._active_loaders.innermost
        value = value if loader is None else loader.own_objects(value)
        everyone = self._world.objects_of_all((value, self.has_no_rows))
        counted = [theirs for theirs, is_stand_in in everyone if not is_stand_in]
        return [item for part in counted for item in part] if isinstance(value, list) else counted

    def reduce(self, tensor: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Tensors summed ("sum"), averaged ("mean") or maximized ("max") over the processes."""
        return self._world.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Tensors padded to the largest size on any process."""
        return self._world.pad_across_processes(tensor, dim, pad_index, pad_first)

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        self._world.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """A context in which the main process goes first."""
        return self._world.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """A context in which the first process of each host goes first."""
        return self._world.main_process_first(local=True)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """A context that gives this process its share of a list, tuple, dict, tensor or dataset."""
        return nullcontext(self._world.split(inputs, apply_padding))

    def on_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """A decorator: the function runs on the main process only, elsewhere it returns None."""
        return run_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """A decorator: the function runs on the first process of each host only."""
        return run_if(lambda: self.is_local_main_process, function)

    def set_trigger(self) -> None:
        """Raise a flag that every process sees at its next `check_trigger`."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process called `set_trigger` since the last check; lowers the flag."""
        flag = self._world.reduce(torch.tensor(int(self._trigger), device=self.device))
        raised, self._trigger = bool(flag.item()), False
        return raised

    # ------------------------------------------------------------------ words

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the first process of each host only."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Begin a run in every tracker that `log_with` named.

        Args:
            project_name: Runs of one project stand together; it is MLflow's experiment.
            config: What the run was set to, once.
            init_kwargs: Settings by a tracker's name: {"mlflow": {"run_name": …, "uri": …, "parent": …, "resume": …}},
                see `trimtab.tracking.mlflow.tracker.MlflowTracker.set_up`.
        """
        set_up(self.trackers, init_kwargs)
        for tracker in self.trackers if self.is_main_process else []:
            tracker.start(project_name, config)

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Hand values to every tracker."""
        if log_kwargs:
            names = ", ".join(sorted(log_kwargs))
            raise RecipeError(f"log_kwargs has settings for {names}, which no tracker here takes", "leave it out")
        for tracker in self.trackers if self.is_main_process else []:
            tracker.log(values, step)

    def get_tracker(self, name: str) -> Any:
        """The tracker of that name."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker
        raise RecipeError(f"there is no tracker {name!r}", f"log_with has {[t.name for t in self.trackers]}")

    def end_training(self) -> None:
        """Close every tracker."""
        for tracker in self.trackers if self.is_main_process else []:
            tracker.finish()


class _MicroBatch:
    """The context that `accumulate` gives. A class, because a generator costs more than the rest of the engine."""

    __slots__ = ("_accumulation", "_connected", "_exchanged", "_loaders")

    def __init__(self, accumulation: Accumulation, loaders: ActiveLoaders, connected: list[DataParallel]) -> None:
        self._accumulation = accumulation
        self._loaders = loaders
        self._connected = connected
        self._exchanged: list[DataParallel] = []

    def __enter__(self) -> None:
        loader = self._loaders.innermost
        if loader is None:
            self._accumulation.open_micro_batch(None, False)
        else:
            self._accumulation.open_micro_batch(loader.num_remaining, loader.end_of_epoch, loader.row_share)
        self._accumulation.inside = True
        # inside an outer no_sync nothing is exchanged where a window ends either
        self._exchanged = [model for model in self._connected if model.require_backward_grad_sync]
        for model in self._exchanged:
            model.require_backward_grad_sync = self._accumulation.exchanges

    def __exit__(self, *exception: object) -> None:
        self._accumulation.inside = False
        for model in self._exchanged:
            model.require_backward_grad_sync = True


def _kind_of(part: Any, position: int) -> str:
    if isinstance(part, torch.nn.Module):
        return "model"
    if isinstance(part, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(part, DataLoader | PreparedLoader):
        return "loader"
    if isinstance(part, PreparedScheduler) or all(
        hasattr(part, name) for name in ("step", "state_dict", "load_state_dict")
    ):
        return "scheduler"
    raise PrepareError(
        f"argument {position + 1} of prepare is a {type(part).__module__}.{type(part).__qualname__}: "
        "no model, optimizer, DataLoader or scheduler",
        "leave it out; batches of a DataLoader are moved to engine.device, other tensors with .to(engine.device)",
    )


def _placed_by_its_loader(model: torch.nn.Module) -> bool:
    """Quantized or spread models are where they must be; `.to` would fail or undo it."""
    return bool(getattr(model, "hf_device_map", None)) or bool(getattr(model, "is_quantized", False))


def _numbered(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_{index}"


def _is_all_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return all(_is_all_tensors(item) for item in value.values())
    return isinstance(value, list | tuple) and all(_is_all_tensors(item) for item in value)
