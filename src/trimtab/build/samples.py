"""Sample generations at the end of a run, for its report. Without them the report is shorter; a run never fails."""

from trimtab.build.parts import Data, EndedRun
from trimtab.build.report_facts import update_facts
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import GENERATING_TASKS
from trimtab.errors import UserError, as_argument, summarize_error
from trimtab.hardware.memory import (
    free_host_memory,
    free_memory,
    memory_in_use,
    non_allocator_memory,
    resolve_budget,
)
from trimtab.inference.samples import SampleRequest, generate_samples
from trimtab.log import muted, say
from trimtab.recipe.schema import EvaluateSettings, ModelSettings, Recipe
from trimtab.runs.run_folder import Folder, ReadOnlyRunFolder
from trimtab.training.progress_lines import Progress
from trimtab.training.run_state import FitResult
from trimtab.units import format_bytes

_MIN_SECONDS_LEFT = 300.0  # of train.max_time: the upload of the run must not wait for samples
_SPACE = 1.25  # memory to generate, relative to the weights: caches, logits, and the largest tensor while loading


def rows_for_samples(data: Data) -> tuple[Rows, str]:
    """Return the rows whose inputs are the prompts, and what they are: held-out rows, or else training rows."""
    return (data.train, "Training rows (none were held out)") if data.eval is None else (data.eval, "Held-out rows")


def report_unused_setting(recipe: Recipe, task: str) -> None:
    """Log that `evaluate.samples` has no effect, if it was set for a task whose models do not generate text."""
    default = EvaluateSettings().samples
    if task not in GENERATING_TASKS and recipe.evaluate.samples not in (0, default):
        say(f"evaluate.samples: {recipe.evaluate.samples} has no effect: models of task {task} do not generate text")


def add_samples(run: EndedRun, result: FitResult, folder: Folder, show: Progress) -> bool:
    """Generate samples and write them to report.json, unless there is too little memory or time.

    Args:
        run: The run, to whose model and optimizer nothing refers any more.
        result: How it ended.
        folder: Its folder.
        show: Shows progress.

    Returns:
        Whether samples were written.
    """
    num_samples = run.recipe.evaluate.samples
    if not num_samples or run.data.task.name not in GENERATING_TASKS or isinstance(folder, ReadOnlyRunFolder):
        return False
    if result.interruption or not folder.best.exists():
        return False
    try:
        run.engine.free_memory()
        problem = _find_obstacle(run, result)
        if problem is None:
            show.note("generating samples for the report (Ctrl-C skips them; evaluate.samples: 0 turns them off)")
            with run.engine.busy("generating samples"), muted():
                samples = generate_samples(folder.best, _request(run))
            update_facts(folder, samples=samples)
            return True
    except KeyboardInterrupt:
        problem = "interrupted"
    except UserError as error:  # the command would raise it, too
        say(f"no samples in the report: {error.problem}")
        return False
    except Exception as error:  # the run has ended well: its model is saved, and nothing may change that
        problem = summarize_error(error)
    command = f"trimtab report {as_argument(folder.path)} --samples {num_samples}"
    say(f"no samples in the report: {problem}; make them with: {command}")
    return False


def _request(run: EndedRun) -> SampleRequest:
    rows, origin = rows_for_samples(run.data)
    model = run.recipe.model
    trusted = isinstance(model, ModelSettings) and model.trust_remote_code
    return SampleRequest(rows, origin, run.recipe.evaluate.samples, run.engine.device, trust_remote_code=trusted)


def _find_obstacle(run: EndedRun, result: FitResult) -> str | None:
    """Return why samples cannot be generated now; None if they can."""
    if result.seconds_left is not None and result.seconds_left < _MIN_SECONDS_LEFT:
        return "train.max_time is almost over"
    device, needed, host = run.engine.device, int(run.weights_bytes * _SPACE), free_host_memory()
    found = [(needed if device.type == "cpu" else run.weights_bytes, host, "on the host")]  # weights are loaded there
    if device.type != "cpu" and (known := free_memory(device)):  # 0 if unknown
        found.append((needed, known - memory_in_use(device), f"on {device}"))
    budget = resolve_budget(run.recipe.memory.budget, device)
    if budget is not None:
        in_use = 0 if device.type == "cpu" else non_allocator_memory(device) + memory_in_use(device)
        found.append((needed, budget - in_use, "within memory.budget"))
    for size, free, where in found:
        if size > free:
            return f"the model needs {format_bytes(size)}, and {format_bytes(max(free, 0))} are free {where}"
    return None
