"""The metrics of an optimizer step, for the user and for the journal."""

import math

from trimtab.engine.engine import Engine
from trimtab.hardware.memory import MemoryCap, memory_in_use
from trimtab.log import say
from trimtab.training.meter import Meter
from trimtab.training.progress_text import StepLine
from trimtab.training.run_state import RunState
from trimtab.training.trainer_parts import RunOutputs


class StepReporter:
    """Report the metrics since the last report. Reading them is a host-device sync."""

    def __init__(self, engine: Engine, meter: Meter, cap: MemoryCap, outputs: RunOutputs) -> None:
        self._engine, self._meter, self._cap, self._outputs = engine, meter, cap, outputs

    def report(self, state: RunState) -> None:
        """Show and record the metrics after a step."""
        loss, grad_norm, tokens_per_s = self._meter.read()
        if not math.isfinite(loss):
            say(f"step {state.step}: the loss is {loss}")
        in_use = memory_in_use(self._engine.device)
        line = StepLine(
            step=state.step,
            epoch=state.epoch,
            loss=loss,
            lr=state.optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            tokens_per_s=tokens_per_s,
            memory_bytes=in_use,
            memory_share=self._cap.share(in_use),
            num_skipped=self._engine.num_skipped_steps,
            seconds_left=self._meter.seconds() / state.step * (state.num_steps - state.step),
        )
        self._outputs.progress.step(line)
        values = {"loss": loss, "lr": line.lr, "epoch": round(line.epoch, 4), "tokens_per_s": round(tokens_per_s)}
        if grad_norm is not None:
            values["grad_norm"] = grad_norm
        values["memory_bytes"] = in_use
        self._outputs.writer.record(values, state.step)
