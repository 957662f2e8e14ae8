"""`trimtab report --samples`: add sample generations to the report of a run that has ended."""

import json
from pathlib import Path

from trimtab.build.samples import rows_for_samples
from trimtab.checkpoint.export import read_facts
from trimtab.commands.held_out import data_of_run
from trimtab.commands.report import write_text
from trimtab.data.tasks.base import GENERATING_TASKS
from trimtab.errors import RecipeError
from trimtab.hardware.inventory import find_device
from trimtab.inference.samples import SampleRequest, generate_samples
from trimtab.report.page.run_files import FACTS, read_json, read_run


def write_samples(run: Path, num_samples: int, *, device: str | None = None) -> None:
    """Generate from rows of a run with the model that it started from and with its best model.

    Args:
        run: The folder of a run that has ended.
        num_samples: Number of rows.
        device: The device to generate on; None chooses one.

    Raises:
        RecipeError: The run has no model yet, is still training, or its task does not generate text.
    """
    files = read_run(run)
    task = files.card.get("task")
    if files.state == "running" or task not in GENERATING_TASKS:
        why = "it is still training" if files.state == "running" else f"its task is {task or 'not known yet'}"
        raise RecipeError(f"{run} has no samples: {why}", "leave out --samples")
    rows, origin = rows_for_samples(data_of_run(read_facts(files.best)))
    samples = generate_samples(files.best, SampleRequest(rows, origin, num_samples, find_device(device)))
    write_text(run / FACTS, json.dumps(read_json(run / FACTS) | {"samples": samples}))
