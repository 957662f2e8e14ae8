"""Write a picture of the memory of a step that ran out of memory, into the run folder.

It shows what the allocator held at that time, if that is known (on CUDA), and the prediction of the same step. A run
continues after most failures, so this code must not raise, and it leaves random numbers unchanged.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trimtab.build.parts import ResolvedRun
from trimtab.errors import summarize_error
from trimtab.log import say
from trimtab.planner.memory_picture import model_name, page_of, predicted_record
from trimtab.planner.recipe_planner import RecipePlanner
from trimtab.planner.shapes import LengthsOfData
from trimtab.planner.target import target_here
from trimtab.planner.trace.thread_patches import one_plan_at_a_time
from trimtab.randomness import random_state, restore_random_state
from trimtab.report.failed_step import memory_now
from trimtab.report.memory_page import MemoryPage, render_memory_page
from trimtab.report.step_record import StepRecord

_NAMELESS = (
    "At the moment of the failure, blocks other than weights, gradients and optimizer state are shown as activations: "
    "they are activations, logits and temporaries of the step that failed."
)


class OutOfMemoryPicture:
    """Draw a failed step of a run.

    Args:
        run: The run.
        folder: Its folder.
    """

    def __init__(self, run: ResolvedRun, folder: Path) -> None:
        self._run, self._folder = run, folder
        self._moment: StepRecord | None = None

    def capture(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Record what the allocator holds, while the failed step still holds its tensors."""
        self._moment = None
        with contextlib.suppress(Exception):  # the failure itself is reported in any case
            self._moment = memory_now(model, optimizer, self._run.engine.device)

    def write(self, title: str, micro_batch: int) -> str:
        """Write the page; return its path, or an empty string if there is nothing to draw."""
        engine, moment = self._run.engine, self._moment
        rank = "" if engine.is_main_process else f"-{engine.process_index}"
        path = self._folder / f"out-of-memory{rank}.html"
        state = random_state()
        try:
            page = self._page(title, micro_batch, moment)
            if page is None:
                return ""
            path.write_text(render_memory_page(page), encoding="utf-8")
        except Exception as error:
            say(f"{path} cannot be written: {summarize_error(error)}")
            return ""
        finally:
            self._moment = None
            restore_random_state(state)
        return str(path)

    def _page(self, title: str, micro_batch: int, moment: StepRecord | None) -> MemoryPage | None:
        heading = f"{title[:1].upper()}{title[1:]}: {model_name(self._run.recipe)}"
        moments = [] if moment is None else [moment]
        try:
            page = self._predicted(heading, micro_batch, moments)
        except Exception as error:  # a step that cannot be traced
            say(f"the memory of the failed step could not be predicted ({summarize_error(error)})")
            if moment is None:
                return None
            page = MemoryPage(heading, moments)
        return page if moment is None else replace(page, notes=[_NAMELESS, *page.notes])

    @one_plan_at_a_time()
    def _predicted(self, heading: str, micro_batch: int, moments: list[StepRecord]) -> MemoryPage:
        run = self._run
        planner = RecipePlanner(
            run.recipe,
            run.data.task,
            target_here(run.engine.device, run.recipe.memory.budget),
            LengthsOfData(run.recipe, run.tokens, run.data.task, run.engine.num_processes),
            num_processes=run.engine.num_processes,
            has_own_loss=run.loss is not None,
            is_here=True,
            tokenizer=run.loaded.tokenizer,
        )
        spec = run.plan.spec.with_micro_batch(micro_batch)
        return page_of(planner, spec, [*moments, predicted_record(planner, spec)], heading)
