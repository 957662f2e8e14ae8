"""Run trial steps of a run on its device, with the builders of training, and measure their memory.

Every trial trains a copy of the model that shares only the weights, with its own optimizer and loader: the run's
weights, random numbers and position in the data do not change.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.build.model import place_model
from trimtab.build.parts import Data, Loaded, ResolvedRun, Tokens
from trimtab.build.plan import build_plan
from trimtab.build.training import build_evaluator, build_parts
from trimtab.checkpoint.codec import encode
from trimtab.checkpoint.snapshot import Snapshots
from trimtab.distributed.world import World
from trimtab.engine.engine import Engine
from trimtab.errors import DoesNotFit, summarize_error
from trimtab.hardware.memory import (
    cap_memory,
    expected_non_allocator_memory,
    is_out_of_memory,
    non_allocator_memory,
    peak_memory,
    release_cached_memory,
    reset_peak_memory,
)
from trimtab.hardware.resident_peak import can_measure_resident_peak, reset_resident_peak, resident_peak
from trimtab.log import muted
from trimtab.model.freeze import Freezing
from trimtab.optim.preallocation import preallocate_state
from trimtab.planner.probe import Measured
from trimtab.planner.shapes import LengthsOfData
from trimtab.randomness import random_state, restore_random_state
from trimtab.recipe.schema import Recipe
from trimtab.techniques.apply import batching_of, loads_kernels
from trimtab.techniques.base import StepSpec
from trimtab.training.rehearsal import Peak, Rehearsal
from trimtab.training.rollback import OutOfMemory, Rollback


class TrialError(Exception):
    """A trial step failed for a reason other than out of memory, in this process or in another one."""


@dataclass(frozen=True)
class TrialSteps:
    """The parts of a run that trial steps are built from.

    Attributes:
        recipe: The recipe.
        data: Its data and task.
        tokens: Its tokenized rows.
        loaded: Its model, before techniques have changed it; weights may be on the host.
        freezing: The frozen parameters.
        engine: The engine of the run, for its device, precision and processes.
        loss: A loss function passed by the user.
        teacher: The teacher of the run.
    """

    recipe: Recipe
    data: Data
    tokens: Tokens
    loaded: Loaded
    freezing: Freezing
    engine: Engine
    loss: Callable[..., Any] | None = None
    teacher: Any = None

    @property
    def obstacle(self) -> str | None:
        """The reason why steps cannot be measured on this device; None if they can."""
        device = self.engine.device
        if device.type == "cuda" or (device.type == "cpu" and can_measure_resident_peak()):
            return None
        return f"the memory of single steps cannot be measured on {device.type} here"

    def train(self, spec: StepSpec, budget_bytes: int | None, room: int) -> Measured:
        """Run forward and backward of the largest micro-batch.

        Args:
            spec: The specification of the step.
            budget_bytes: The memory limit of the process during the trial, if it can be enforced; None for no limit.
            room: Bytes within which a trial fits.

        Raises:
            TrialError: The step failed for a reason other than out of memory.
        """

        def work(run: ResolvedRun, rehearsal: Rehearsal) -> Peak | OutOfMemory:
            return rehearsal.train()

        shape = LengthsOfData(self.recipe, self.tokens, self.data.task, self.engine.num_processes).shape(
            spec.micro_batch, batching_of(spec)
        )
        return self._measure(spec, work, shape.packed_tokens, budget_bytes, room)

    def evaluate(self, spec: StepSpec, budget_bytes: int | None, room: int) -> tuple[int, Measured] | None:
        """The largest evaluation batch that fits, and its memory.

        None without held-out rows, or with several processes: a trial does not divide a batch among them.
        """
        if self.tokens.eval is None or self.engine.use_distributed or self.recipe.limits.overfit_batches:
            return None
        known = self.recipe.evaluate.batch_size or max(spec.micro_batch, 8)
        num_rows = min(known, len(self.tokens.eval))
        while True:
            found = self._measure(spec, _evaluation_of(num_rows), num_rows, budget_bytes, room)
            if found.fits or num_rows == 1:
                return num_rows, found
            num_rows = math.ceil(num_rows / 2)

    # ------------------------------------------------------------------ one trial

    def _measure(
        self,
        spec: StepSpec,
        work: Callable[[ResolvedRun, Rehearsal], Peak | OutOfMemory],
        num_tokens: int,
        budget_bytes: int | None,
        room: int,
    ) -> Measured:
        device = self.engine.device
        outside = max(expected_non_allocator_memory(loads_kernels(spec)), non_allocator_memory(device))
        if device.type == "cpu":
            outside = 0
        state = random_state()
        with self.engine.busy("measuring trial steps"), muted():
            _count_peak(device)
            cap_memory(device, budget_bytes, outside)
            failure = self._attempt(spec, work)
            peak = resident_peak() if device.type == "cpu" else peak_memory(device)
        restore_random_state(state)
        _count_peak(device)  # memory and peak of a trial are not the run's
        peak, has_failed = self._of_all_processes(peak, failure)
        if has_failed:
            return Measured(spec, num_tokens, fits=False)
        return Measured(spec, num_tokens, peak + outside <= room, peak, peak + outside)

    def _attempt(
        self, spec: StepSpec, work: Callable[[ResolvedRun, Rehearsal], Peak | OutOfMemory]
    ) -> OutOfMemory | str | None:
        """Why a trial step failed: out of memory on the device or the host, or an error; None if it succeeded."""
        try:
            found = self._run(spec, work)
        except DoesNotFit:  # the tensors that a technique keeps on the host
            return OutOfMemory()
        except Exception as error:
            return OutOfMemory() if is_out_of_memory(error) else summarize_error(error)
        return found if isinstance(found, OutOfMemory) else None

    def _run(self, spec: StepSpec, work: Callable[[ResolvedRun, Rehearsal], Peak | OutOfMemory]) -> Peak | OutOfMemory:
        # A trial involves one process only: if it runs out of memory, no other process is left waiting.
        engine = Engine(self.engine.mixed_precision, device=self.engine.device, world=World())
        model, freezing = copied_without_weights(self.loaded.model, self.freezing)
        loaded = Loaded(model, self.loaded.tokenizer)
        place_model(self.recipe, self.data, loaded, spec, freezing, engine)
        plan = build_plan(self.recipe, self.data, self.tokens, loaded, self.engine, spec)
        run = ResolvedRun(
            self.recipe,
            self.recipe,
            engine,
            self.data,
            self.tokens,
            loaded,
            freezing,
            plan,
            self.loss,
            teacher=self.teacher,
        )
        parts = build_parts(run)
        parts.model.train()
        parameters = [parameter for group in parts.optimizer.param_groups for parameter in group["params"]]
        preallocate_state(parts.optimizer.optimizer, parameters)
        rollback = Rollback(engine, parts.model)
        rehearsal = Rehearsal(parts, rollback, freezing.released_later(), self.recipe.train.max_grad_norm)
        snapshot = self._snapshot(parameters, parts.optimizer.optimizer)
        try:
            return work(run, rehearsal)
        finally:
            snapshot.drop()
            engine.free_memory()

    def _snapshot(self, parameters: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> Snapshots:
        """The copy of weights and state that a run on a CPU also keeps, from its first checkpoint on."""
        snapshot = Snapshots()
        if self.engine.device.type == "cpu" and self.recipe.checkpoint.every is not None:
            trained = [parameter for parameter in parameters if parameter.requires_grad]
            snapshot.take({"state": encode([trained, optimizer.state_dict()["state"]])})
        return snapshot

    def _of_all_processes(self, peak: int, failure: OutOfMemory | str | None) -> tuple[int, bool]:
        """The largest peak of any process, and whether memory ran out in any: all of them make the same choice."""
        has_error, has_failed = isinstance(failure, str), failure is not None
        if self.engine.use_distributed:
            found = torch.tensor([peak, int(has_failed), int(has_error)], dtype=torch.int64)
            peak, has_failed, has_error = self.engine.reduce(found, "max").tolist()
        if has_error:
            raise TrialError(failure if isinstance(failure, str) else "an error in another process")
        return peak, bool(has_failed)


def _evaluation_of(num_rows: int) -> Callable[[ResolvedRun, Rehearsal], Peak | OutOfMemory]:
    def work(run: ResolvedRun, rehearsal: Rehearsal) -> Peak | OutOfMemory:
        evaluator = build_evaluator(run, {})
        assert evaluator is not None  # there are held-out rows
        evaluator.num_rows = num_rows
        return rehearsal.evaluate(evaluator)

    return work


def _count_peak(device: torch.device) -> None:
    """Start to measure the peak, with as little as possible in the allocator's cache."""
    release_cached_memory(device)
    if device.type == "cpu":
        reset_resident_peak()
    else:
        reset_peak_memory(device)


def copied_without_weights(model: torch.nn.Module, freezing: Freezing) -> tuple[torch.nn.Module, Freezing]:
    """Copy the modules of a model and its frozen state; parameters of the copy share the model's memory.

    Replacing a parameter's tensor in the copy, for example by moving it to a device, does not change the model.
    """
    copies: dict[int, Any] = {}
    for parameter in model.parameters():
        # Quantized weights are a separate class, frozen and already on their device.
        is_plain = type(parameter) is torch.nn.Parameter
        shared = torch.nn.Parameter(parameter.detach(), parameter.requires_grad) if is_plain else parameter
        copies[id(parameter)] = shared
    return copy.deepcopy((model, freezing), copies)
