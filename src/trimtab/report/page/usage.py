"""How to use the model of a run: code that runs unchanged."""

import json
import shlex

from trimtab.data.tasks.base import GENERATING_TASKS
from trimtab.report.page.document import code, paragraph
from trimtab.report.page.run_files import RunFiles

_TEXT = "a film that stays with you"
_PIPELINES = {"classify": "text-classification", "causal-lm": "text-generation"}


def usage_section(run: RunFiles) -> str:
    """Return Python code and commands that load the best model, or how to get one."""
    place = shlex.quote(str(run.path.absolute()))
    if not run.card:
        if run.state not in ("stopped", "killed", "failed"):
            return paragraph("This run has no model yet.")
        start = "from its last checkpoint" if run.checkpoints else "from the start"
        return paragraph(f"This run has no model. Continue it {start}:") + code(f"trimtab resume {place}")
    parts = [code(python_code(run))]
    if pipeline := pipeline_code(run):
        parts += [paragraph("With transformers alone:"), code(pipeline)]
    return "".join(parts) + paragraph("On the command line:") + code("\n".join(_commands(run, place)))


def samples_command(run: RunFiles) -> str:
    """Return the command that adds sample generations to the page; empty if the model does not generate text."""
    if run.card.get("task") not in GENERATING_TASKS or run.state == "running":
        return ""
    what = "No samples yet. This command lets the model before and after training continue three held-out prompts:"
    return paragraph(what) + code(f"trimtab report {shlex.quote(str(run.path.absolute()))} --samples 3")


def python_code(run: RunFiles) -> str:
    """Return Python code that loads the best model and uses it."""
    task, folder = run.card.get("task"), json.dumps(str(run.best), ensure_ascii=False)
    lines = ["from trimtab import load", "", f"model = load({folder})"]
    if task in ("classify", "regress"):
        columns = run.card.get("columns", {}).get("text")
        text = f'("{_TEXT}", "another text")' if isinstance(columns, list) and len(columns) == 2 else f'"{_TEXT}"'
        lines.append(f"print(model.predict([{text}]))")
    elif task in GENERATING_TASKS:
        lines.append(f'print(model.generate("{_TEXT}", max_new_tokens=40))')
    else:
        lines.append("print(model.model.config)  # the model and model.tokenizer are those of transformers")
    return "\n".join(lines)


def pipeline_code(run: RunFiles) -> str:
    """Return code that needs only transformers; empty if the model is an adapter, or its task has no pipeline."""
    pipeline = _PIPELINES.get(str(run.card.get("task")))
    columns = run.card.get("columns", {}).get("text")
    if pipeline is None or not (run.best / "config.json").is_file() or isinstance(columns, list):
        return ""
    folder = json.dumps(str(run.best), ensure_ascii=False)
    return "\n".join(
        [
            "from transformers import pipeline",
            "",
            f'use = pipeline("{pipeline}", model={folder})',
            f'print(use("{_TEXT}"))',
        ]
    )


def _commands(run: RunFiles, place: str) -> list[str]:
    lines = [] if run.card.get("task") == "masked-lm" else [f'trimtab predict {place} --text "{_TEXT}"']
    if run.plan.get("num_eval_rows"):
        lines.append(f"trimtab evaluate {place}")
    if run.state == "running":
        return lines
    if run.state != "finished":
        return [*lines, f"trimtab resume {place}"]
    asked = {value.key: value.value for value in run.recipe}
    key = "train.epochs" if asked.get("train.max_steps", "null") == "null" else "train.max_steps"
    try:
        return [*lines, f"trimtab resume {place} --set {key}={2 * float(asked[key]):g}  # train longer"]
    except (KeyError, ValueError):
        return lines
