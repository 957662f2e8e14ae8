"""Compiled blocks: torch.compile fuses the operations of a block and launches fewer kernels.

Blocks are compiled before the first step. torch keeps compiled code in a cache folder (TORCHINDUCTOR_CACHE_DIR), which
later runs and resumed runs read. `graphs` captures forward, loss and backward of every size of micro-batch in CUDA
graphs as well, so that the GPU no longer waits for Python; `capture` does so without compiling anything, which saves
seconds before the first step and does not change any operation.

Results are those of the plain step up to rounding; dropout draws the same random numbers. A failure to compile is saved
in checkpoints, so a resumed run rounds the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from trimtab.data.batching import Batching
from trimtab.errors import RecipeError
from trimtab.hardware.extras import has_package
from trimtab.log import say
from trimtab.model.blocks import blocks_of
from trimtab.model.captured_step import (
    MOST_GRAPHS,
    CapturedMicroBatches,
    capture_micro_batches,
    captured_micro_batches_of,
    compute_captured,
)
from trimtab.model.compile_time import capture_seconds, compile_seconds, compiling_may_pay
from trimtab.model.compiled_blocks import compile_blocks, compiled_blocks_of
from trimtab.model.execution_state import ExecutionState
from trimtab.model.expert_weights import fused_experts
from trimtab.techniques.adapter import adapter_settings, has_plain_lora, has_quantized_base
from trimtab.techniques.base import Case, OnResume, Phase, Site, StepSpec, Technique, Trial

_KEY = "train.compile"
_GRAPHS, _CAPTURE = "graphs", "capture"
_ROW_KINDS = ("sequence-classification",)
_MOST_FOR_GRAPHS = 500_000_000  # trainable parameters


class Compilation(Technique):
    """Compile the repeated blocks of a model."""

    key = "compile"
    setting = _KEY
    off = "off"
    phase = Phase.COMPILATION
    before = "off"
    is_decided_first = True
    needs_prediction = True
    is_kept_on_resume = True
    study = ("compile", ("off", "blocks"))

    def values(self, case: Case) -> tuple[str, ...]:
        """Return the recipe's value; with `auto`, the planner decides whether a run is long enough."""
        asked = str(self.asked(case.recipe))
        if asked == "auto":
            return ("off", *_worth_trying(case)) if may_compile(case) else ("off",)
        if compiles_blocks(asked) and case.model is not None and not blocks_of(case.model):
            raise RecipeError(f"{_KEY}: {asked}: {type(case.model).__name__} has no repeated blocks", f"{_KEY}: off")
        return (asked,)

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse graphs that would exchange gradients, and compiled blocks with masks, which are predicted poorly."""
        value = spec[self.key]
        if captures_steps(value) and case.num_processes > 1:
            return f"{_KEY}: {value} works with one process; blocks works with several"
        if value == self.off or not self.is_open(case.recipe):
            return None
        if spec["padding"] != "none":
            return f"{_KEY}: auto compiles batches without padding only"
        # Batches with one label per row would need a graph for every combination of row count and token count.
        if captures_steps(value) and case.model_kind in _ROW_KINDS and _divides_batches(spec, case):
            return f"{_KEY}: auto captures the steps of a classifier only if a batch is one micro-batch"
        return None

    def can_keep(self, value: str, case: Case) -> bool:
        """Return whether this machine can run it: compiling needs an NVIDIA GPU, and graphs need a single process."""
        is_alone = case.num_processes == 1
        return value == self.off or (case.accelerator.is_cuda and (is_alone or not captures_steps(value)))

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Replace the forward of the blocks; a trace runs the graphs that would be compiled."""
        if compiles_blocks(value):
            compile_blocks(model)
        if captures_steps(value) and not site.is_traced:
            capture_micro_batches(model)

    def wrap_step(self, compute_gradients: Callable[..., Any], value: str) -> Callable[..., Any]:
        """Replay captured micro-batches."""
        return partial(compute_gradients, compute=compute_captured) if captures_steps(value) else compute_gradients

    def change_batching(self, batching: Batching, value: str) -> Batching:
        """Reduce the number of sizes: each one needs its own graph, which takes memory and time to capture."""
        return replace(batching, has_few_sizes=True) if captures_steps(value) else batching

    def warm_up(self, model: torch.nn.Module, value: str, find_trials: Callable[[], Sequence[Trial]]) -> None:
        """Compile the blocks, and capture every size; if there are too many sizes, only the most frequent ones."""
        blocks, captured = compiled_blocks_of(model), captured_micro_batches_of(model)
        if captured is None and (blocks is None or blocks.failure is not None):
            return
        largest, *others = find_trials()
        largest.run()
        if captured is not None and not captured.can_capture(next(model.parameters()).device):
            rest = "blocks are compiled, and nothing is captured" if blocks is not None else "nothing is captured"
            say(f"{_KEY}: {value} needs an NVIDIA GPU: {rest}")
            captured = None
        if captured is None:
            for trial in others[-1:]:  # torch may find that small sizes need different code
                trial.run()
            return
        _capture_sizes(captured, [largest, *others])

    def captures(self, value: str) -> bool:
        """Return True for graphs, compiled or not."""
        return captures_steps(value)

    def start_seconds(self, value: str, case: Case) -> float:
        """Return the seconds for compiling, and for capturing every size."""
        if value == self.off:
            return 0.0
        seconds = compile_seconds(case.model) if compiles_blocks(value) else 0.0
        if captures_steps(value) and case.count_shapes is not None:
            seconds += capture_seconds(case.model, min(MOST_GRAPHS, case.count_shapes()))
        return seconds

    def state(self, model: torch.nn.Module, value: str) -> Any:
        """Return which sizes are compiled, and whether compiling or capturing failed."""
        blocks, captured = compiled_blocks_of(model), captured_micro_batches_of(model)
        return None if blocks is None and captured is None else ExecutionState(blocks, captured)

    def loads_kernels(self, value: str) -> bool:
        """Return True for compiled blocks: Inductor's kernels are Triton's."""
        return compiles_blocks(value)

    def describe(self, value: str) -> str:
        """Return a text such as "compiled blocks"."""
        return f"compiled {value}" if compiles_blocks(value) else "captured steps"

    def on_resume(self, old: Any, new: Any) -> OnResume:
        """Forbid a change: compiled blocks round differently."""
        return "from here on"


def captures_steps(value: str) -> bool:
    """Whether a value captures steps in CUDA graphs."""
    return value in (_GRAPHS, _CAPTURE)


def compiles_blocks(value: str) -> bool:
    """Whether a value compiles the blocks of a model."""
    return value in ("blocks", _GRAPHS)


def conflict(setting: str, value: str, reason: str) -> str:
    """Return the message for a setting that conflicts with a value; `reason` applies if blocks are compiled."""
    if compiles_blocks(value):
        return f"{setting} does not work with {_KEY}: {value}, {reason}"
    return f"{setting} has not been tested with {_KEY}: {value}"


def may_compile(case: Case) -> bool:
    """Whether `auto` considers it: on an NVIDIA GPU with Triton, for one process and weights that are not quantized."""
    accelerator, recipe = case.accelerator, case.recipe
    if recipe is None or recipe.train.compile != "auto" or case.model is None or case.num_processes > 1:
        return False
    if recipe.distill is not None:  # graphs would contain the teacher, and blocks return no hidden states
        return False
    if recipe.adapter != "none" and not has_plain_lora(recipe):  # not measured
        return False
    has_triton = not accelerator.is_here or has_package("triton")
    capability = accelerator.capability if accelerator.is_cuda else None
    pays = compiling_may_pay(case.num_steps, capability, has_triton=has_triton)
    # a layer that is dropped at random is chosen on the host, which a graph would do only once
    drops_layers = bool(getattr(getattr(case.model, "config", None), "layerdrop", 0))
    if drops_layers or fused_experts(case.model):  # blocks with experts were not measured
        return False
    return pays and not has_quantized_base(recipe) and bool(blocks_of(case.model))


def _divides_batches(spec: StepSpec, case: Case) -> bool:
    recipe = case.recipe
    assert recipe is not None
    return spec.micro_batch < recipe.train.batch_size or recipe.memory.micro_batch_tokens != "auto"


def _worth_trying(case: Case) -> tuple[str, ...]:
    """Return False for large models: they keep a GPU busy, and graphs would keep all their gradients allocated."""
    assert case.recipe is not None
    has_few = adapter_settings(case.recipe) is not None
    num_trainable = 0 if has_few else sum(parameter.numel() for parameter in case.model.parameters())
    return (_CAPTURE, _GRAPHS) if num_trainable <= _MOST_FOR_GRAPHS else ("blocks",)


def _capture_sizes(captured: CapturedMicroBatches, trials: Sequence[Trial]) -> None:
    frequent = sorted(trials, key=lambda trial: trial.share, reverse=True)[:MOST_GRAPHS]
    chosen = [trial for trial in trials if trial in frequent]  # the largest first: the others fit into its memory
    for trial in chosen:
        if trial is not trials[0]:  # the first one has run
            trial.run()  # loads the kernels
    for trial in chosen:
        trial.run()  # capture only now, because other runs cannot use the memory of graphs
    if captured.failure is None and captured.num_graphs:
        share = sum(trial.share for trial in frequent)
        some = "" if len(frequent) == len(trials) else f" ({share:.0%} of the micro-batches)"
        sizes = f"{captured.num_graphs} size{'s' if captured.num_graphs > 1 else ''}"
        say(f"the step of {sizes}{some} is captured in CUDA graphs")
