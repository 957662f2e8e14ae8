"""The plan of a run whose step cannot be traced: chosen by trial steps on its device, and its description."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from trimtab.errors import DoesNotFit
from trimtab.hardware.memory import total_memory
from trimtab.log import say
from trimtab.planner.explain import gib, words_of
from trimtab.planner.probe import Measured, Probe, ways_to_measure
from trimtab.planner.target import SPARE
from trimtab.planner.trial_step import TrialError, TrialSteps
from trimtab.runs.outlook import MeasuredOutlook
from trimtab.techniques import TECHNIQUES
from trimtab.techniques.apply import axes_of
from trimtab.techniques.base import Case, StepSpec
from trimtab.units import exact_bytes

_NOT_MEASURED = "a smaller data.max_length, adapter: lora, adapter: qlora"
_MIB = 2**20


def measure_plan(
    trials: TrialSteps, start: StepSpec, case: Case, sizes: Iterable[int], budget_bytes: int
) -> tuple[StepSpec, MeasuredOutlook]:
    """Choose micro-batch size and techniques by trial steps.

    Args:
        trials: Runs the trial steps.
        start: The step without a plan.
        case: The input of the techniques' rules.
        sizes: Micro-batch sizes that may be chosen.
        budget_bytes: The memory that the run may use.

    Raises:
        DoesNotFit: No trial step fits. The message says what the smallest one needs, and what would fit.
        TrialError: A trial step failed for another reason.
    """
    room = int(budget_bytes * (1 - SPARE))
    probe = Probe(lambda spec: trials.train(spec, room, room), room, sizes)
    ways = ways_to_measure(start, axes_of(case), case)
    chosen = probe.choose(ways)
    if chosen is None:
        smallest = probe.trials[-1].spec
        raise DoesNotFit(_explain_failure(trials, smallest, start, case, budget_bytes, len(probe.trials)))
    assert chosen.peak_bytes is not None
    assert chosen.total_bytes is not None
    evaluation = trials.evaluate(chosen.spec, room, room)
    eval_rows, eval_peak, total = None, None, chosen.total_bytes
    if evaluation is not None:
        eval_rows, eval_peak = evaluation[0], evaluation[1].peak_bytes
        total = max(total, evaluation[1].total_bytes or 0)
    if trials.engine.is_main_process:
        say(
            f"measured, not predicted: {words_of(chosen.spec, start)} needs {gib(total)} of {gib(budget_bytes)} "
            f"({trials.engine.device}, {len(probe.trials)} trial steps)"
        )
    steps = [_as_dict(trial, start) for trial in probe.trials]
    peak = max(chosen.peak_bytes, eval_peak or 0)
    return chosen.spec, MeasuredOutlook(budget_bytes, peak, total, eval_rows, eval_peak, steps)


def _as_dict(trial: Measured, start: StepSpec) -> dict[str, Any]:
    changed = {key: value for key, value in trial.spec.values if value != start[key]}
    size = {"micro_batch": trial.spec.micro_batch, "num_tokens": trial.num_tokens}
    return {**size, **changed, "total_bytes": trial.total_bytes, "fits": trial.fits}


# ---------------------------------------------------------------------- nothing fits


def _explain_failure(
    trials: TrialSteps, smallest: StepSpec, start: StepSpec, case: Case, budget_bytes: int, num_trials: int
) -> str:
    """Error text: what the smallest step needs, measured without a limit, and what would fit."""
    device, room = trials.engine.device, int(budget_bytes * (1 - SPARE))
    alone = trials.train(smallest, None, room)
    budget = f"the budget of {gib(budget_bytes)} ({device})"
    way = f"with the smallest plan that was measured ({words_of(smallest, start)}; {num_trials} trial steps)"
    if alone.total_bytes is None:
        found = f"does not fit: memory of {device} ran out even without {budget}, {way}"
    else:
        over = alone.total_bytes - budget_bytes
        excess = f"{gib(over)} over {budget}" if over > 0 else f"which leaves no reserve in {budget}"
        found = f"does not fit: needs {gib(alone.total_bytes)}, measured, {excess}, {way}"
    helping = list(_changes(trials, smallest, case, alone, room))
    lines = ["  would fit with (measured):", *(f"    {words}" for words in helping)] if helping else []
    return "\n".join([found, *lines, f"  may help, not measured: {_NOT_MEASURED}"])


def _changes(trials: TrialSteps, smallest: StepSpec, case: Case, alone: Measured, room: int) -> Iterator[str]:
    for technique in TECHNIQUES:
        for suggestion in technique.suggest(smallest, case) if technique.effect == "rounding" else ():
            try:
                found = trials.train(suggestion.spec, None, room)
            except TrialError:  # it may need a package that is not installed
                continue
            if found.fits and found.total_bytes is not None:
                yield f"{suggestion.words}: {gib(found.total_bytes)}"
    if alone.total_bytes is not None:
        enough = math.ceil(alone.total_bytes / (1 - SPARE) / _MIB) * _MIB
        if enough <= total_memory(trials.engine.device):
            yield f"memory.budget: {exact_bytes(enough)}"
