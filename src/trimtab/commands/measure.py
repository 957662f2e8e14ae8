"""Measure one run of a comparison: the subprocess that `trimtab.commands.compare` starts.

It calls `trimtab.run.fit` with a measuring callback; the run itself is discarded.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trimtab.data.packing import count_filled_rows, count_tokens, is_packed
from trimtab.errors import TrimtabError, UserError
from trimtab.hardware.environment import describe_environment
from trimtab.hardware.memory import describe_failed_allocation, is_out_of_memory, peak_memory
from trimtab.model.captured_step import captured_micro_batches_of
from trimtab.report.anatomy import MemoryWatch
from trimtab.report.compare import Measurement

_LARGER = 1.02  # a batch must be larger than the last recorded one by this factor to be recorded


class Enough(Exception):  # noqa: N818 (not an error)
    """End a run once everything is measured, before its model is written."""


class StepClock:
    """Time the steps. On CUDA and XPU this uses events, so that the only host-device sync is at the end.

    Args:
        device: Where the steps run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device) if device.type in ("cuda", "xpu") else None
        self._ticks: list[Any] = []

    def tick(self) -> None:
        """Record the end of a step."""
        if self._module is not None:
            event = self._module.Event(enable_timing=True)
            event.record()
            self._ticks.append(event)
        else:
            if self._device.type != "cpu":
                torch.accelerator.synchronize()
            self._ticks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the time from each tick to the next."""
        if self._module is not None:
            self._module.synchronize(self._device)
            return [one.elapsed_time(next_) / 1e3 for one, next_ in zip(self._ticks, self._ticks[1:], strict=False)]
        return [next_ - one for one, next_ in zip(self._ticks, self._ticks[1:], strict=False)]


class Observer:
    """A callback that measures a run: time and tokens of each step, peak memory, and its composition.

    A batch that is the largest so far runs under a `MemoryWatch`. Such a step, and the next one, which finds the device
    idle, are not timed.

    Args:
        folder: The folder of the run.
        num_steps: Optimizer steps of the run.
        num_warmup: Steps at the start that are not timed.
        records_memory: Whether to record the composition of memory.
        evaluates: Whether an evaluation follows the last step.
    """

    def __init__(self, folder: Path, num_steps: int, num_warmup: int, *, records_memory: bool, evaluates: bool) -> None:
        self._folder = folder
        self._num_steps, self._num_warmup, self._evaluates = num_steps, num_warmup, evaluates
        self._records_memory = records_memory
        self._watch: MemoryWatch | None = None
        self._largest = 0.0
        self._clock: StepClock | None = None
        self._step = 0  # the last one that has ended
        self._rows: dict[int, list[torch.Tensor | int]] = {}
        self._tokens: dict[int, list[torch.Tensor | int]] = {}
        self._not_timed: set[int] = set()
        self._parent = os.getppid()
        self.numbers: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}

    def on_step(self, state: Any) -> None:
        """Record the time; after the last step, read all measurements."""
        if os.getppid() != self._parent:
            sys.exit("the process of the comparison has ended")
        self._step = state.step
        if self._clock is None:
            self._begin(state)
        if self._watch is not None and self._watch.is_recording:
            self.numbers["anatomy"] = self._watch.stop()
            self._not_timed |= {self._step, self._step + 1}
        assert self._clock is not None
        self._clock.tick()
        if self._step == self._num_steps:
            self._read()
            if not self._evaluates:
                raise Enough

    def on_eval(self, state: Any, metrics: dict[str, float]) -> None:
        """Store the metrics of the evaluation after the last step, and end the run."""
        if state.step >= self._num_steps:
            self.metrics = dict(metrics)
            raise Enough

    def _begin(self, state: Any) -> None:
        """Set up after the first step, in which the optimizer allocates its state."""
        # from the plan: parameters may stay on the host
        self._device = torch.device(json.loads((self._folder / "plan.json").read_text())["device"])
        self._clock = StepClock(self._device)
        if self._records_memory:
            self._watch = MemoryWatch(state.model, state.optimizer, self._device)
        state.model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        captured = captured_micro_batches_of(state.model)
        if captured is not None:  # a replay calls no hooks, and makes no allocations that a watch could record
            captured.watchers.append(self._count)

    def _before_forward(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not model.training or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        size = self._count(kwargs)
        if self._watch is not None and not self._watch.is_recording and size > _LARGER * self._largest:
            self._largest = size
            self._watch.start()

    def _count(self, batch: dict[str, Any]) -> int:
        """Count the rows and tokens of a micro-batch; return the number of elements of its inputs."""
        step, inputs = self._step + 1, {name: v for name, v in batch.items() if isinstance(v, torch.Tensor)}
        tokens, mask = next(iter(inputs.values())), inputs.get("attention_mask")
        num_rows: torch.Tensor | int = tokens.shape[0]
        num_tokens: torch.Tensor | int = tokens.numel() if mask is None or mask.dim() != 2 else mask.sum()
        if is_packed(inputs):
            num_rows, num_tokens = count_filled_rows(inputs), count_tokens(inputs)
        self._rows.setdefault(step, []).append(num_rows)
        self._tokens.setdefault(step, []).append(num_tokens)
        return sum(tensor.numel() for tensor in inputs.values())

    def _read(self) -> None:
        assert self._clock is not None
        seconds = dict(zip(range(2, self._num_steps + 1), self._clock.seconds(), strict=True))
        timed = [step for step in seconds if step > self._num_warmup and step not in self._not_timed]
        if not timed:  # a very short run: disturbed times are better than none
            timed = [step for step in seconds if step > self._num_warmup]
        self.numbers |= {
            "step_s": [seconds[step] for step in timed],
            "num_rows": sum(int(rows) for step in timed for rows in self._rows[step]),
            "num_tokens": sum(int(tokens) for step in timed for tokens in self._tokens[step]),
            **_peaks(self._device),
        }


def _peaks(device: torch.device) -> dict[str, Any]:
    peaks: dict[str, Any] = {"host_peak_bytes": peak_memory(torch.device("cpu"))}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        peaks |= {
            "allocated_peak_bytes": torch.cuda.max_memory_allocated(device),
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(device),
            "outside_bytes": max(0, total - free - torch.cuda.memory_reserved(device)),
        }
    elif device.type != "cpu":
        peaks["allocated_peak_bytes"] = peak_memory(device)
    return peaks


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run and measure a recipe.

    Args:
        spec: "recipe", "run" (its folder), "device", "num_steps", "num_warmup", "repeat", "records_memory".

    Returns:
        "measurement" and "surroundings"; or "failure", a short reason, and perhaps "cure".
    """
    from trimtab.recipe.schema import Recipe
    from trimtab.run import fit

    began, folder = time.monotonic(), Path(spec["run"])
    try:
        recipe = Recipe(**spec["recipe"], out=str(folder))
        evaluates = bool(recipe.data.eval or recipe.data.eval_share or recipe.limits.overfit_batches)
        options = {"records_memory": spec["records_memory"], "evaluates": evaluates}
        observer = Observer(folder, spec["num_steps"], spec["num_warmup"], **options)
        fit(recipe, callbacks=[observer], progress="quiet", device=spec["device"])
    except Enough:
        pass
    except UserError as error:
        return {"failure": _first_line(error.problem), "cure": error.cure}
    except TrimtabError as error:
        return {"failure": _first_line(str(error))}
    except Exception as error:
        if is_out_of_memory(error):
            wanted = describe_failed_allocation(error)
            return {"failure": f"out of memory (tried to allocate {wanted})" if wanted else "out of memory"}
        raise
    plan = json.loads((folder / "plan.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measurement = Measurement(
        repeat=spec["repeat"],
        num_steps=spec["num_steps"],
        losses=tuple((line["step"], line["loss"]) for line in lines if "loss" in line and "step" in line),
        metrics=observer.metrics,
        metric=plan["metric"],
        plan=plan,
        wall_s=time.monotonic() - began,
        **observer.numbers,
    )
    surroundings = describe_environment(plan["device"], torch.get_num_threads())
    return {"measurement": asdict(measurement), "surroundings": surroundings}


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "no reason given"
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def main(spec_file: str) -> None:
    """Read a spec from a file, measure it, and write the result to the file that the spec names."""
    spec = json.loads(Path(spec_file).read_text())
    result = measure(spec)
    partial = Path(spec["result"]).with_suffix(".writing")  # the parent must never see a partial file
    partial.write_text(json.dumps(result))
    partial.replace(spec["result"])


if __name__ == "__main__":
    main(sys.argv[1])
