"""What all processes do after an optimizer step: they must agree, because each of them has to take part."""

from dataclasses import astuple, dataclass

import torch

from trimtab.engine.engine import Engine


@dataclass(frozen=True)
class NextActions:
    """What follows a step: before `agree_on`, what one process wants; afterwards, what all processes do."""

    evaluate: bool
    save: bool
    time_is_up: bool
    stop: bool
    was_signalled: bool
    bad_step: int | None  # the first step whose loss or gradients are not finite


def agree_on(wanted: NextActions, step: int, engine: Engine) -> NextActions:
    """Combine what each process wants.

    A stop, a signal or a step that is not finite counts for all processes; what depends on time follows the clock of
    the main process.
    """
    if not engine.use_distributed:
        return wanted
    *flags, bad_step = astuple(wanted)
    if not engine.is_main_process:
        flags[:3] = [False] * 3
    wishes = torch.tensor([*flags, bad_step is not None], dtype=torch.int32)
    evaluate, save, time_is_up, stop, was_signalled, is_bad = map(bool, engine.reduce(wishes).tolist())
    # one process may have read the results of more steps than another
    first = int(engine.gather(torch.tensor(step if bad_step is None else bad_step)).min()) if is_bad else None
    return NextActions(evaluate, save, time_is_up, stop, was_signalled, first)
