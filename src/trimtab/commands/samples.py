"""Sample generations of a run for its report: the same prompts before and after training."""

import gc
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.commands.held_out import held_out_of
from trimtab.commands.report import write_text
from trimtab.data.rows import Rows
from trimtab.errors import ModelError, RecipeError, TrimtabError
from trimtab.hardware.inventory import find_device
from trimtab.inference.generate import generate_texts
from trimtab.inference.held_out import HeldOut
from trimtab.inference.inputs import read_inputs
from trimtab.inference.load import LoadedModel, load
from trimtab.log import say
from trimtab.model.load import max_positions
from trimtab.report.page.run_files import FACTS, read_json, read_run

_TASKS = ("causal-lm", "chat", "seq2seq")
_MAX_PROMPT = 32  # number of tokens of the text that a causal-lm continues


def write_samples(run: Path, num_samples: int, *, max_new_tokens: int = 64, device: str | None = None) -> None:
    """Generate from held-out rows with the model that a run started from and with its best model.

    Args:
        run: The folder of a run that has ended.
        num_samples: Number of rows.
        max_new_tokens: Maximum number of tokens to generate.
        device: The device to generate on; None chooses one.

    Raises:
        RecipeError: The run has no model yet, is still training, or its task does not generate text.
    """
    files = read_run(run)
    task = files.card.get("task")
    if files.state == "running" or task not in _TASKS:
        why = "it is still training" if files.state == "running" else f"its task is {task or 'not known yet'}"
        raise RecipeError(f"{run} has no samples: {why}", "leave out --samples")
    where = find_device(device)
    after = load(run, device=where)
    max_new_tokens = min(max_new_tokens, (max_positions(after.model) or 2 * max_new_tokens) // 2)
    held_out = held_out_of(after, None, num_samples)
    prompts = _prompts(after, held_out.rows)
    written = generate_texts(after, prompts, max_new_tokens)
    expected = [_expected(after, held_out, row, prompt) for row, prompt in enumerate(prompts)]
    tokenizer = after.tokenizer
    del after
    gc.collect()  # frees the model, which has reference cycles, before the other one is loaded
    before, base = _generate_before(files.card, tokenizer, prompts, max_new_tokens, where)
    rows = [
        {"prompt": _as_text(prompt), "before": before[row], "after": written[row], "expected": expected[row]}
        for row, prompt in enumerate(prompts)
    ]
    note = (
        f"Held-out rows, greedy decoding, at most {max_new_tokens} new tokens. Before: {base}. After: the best model."
    )
    facts = read_json(run / FACTS) | {"samples": {"note": note, "rows": rows}}
    write_text(run / FACTS, json.dumps(facts))


def _prompts(loaded: LoadedModel, rows: Rows) -> list[Any]:
    """Return the input of each row; for a causal-lm, the start of its text, at most half of it."""
    inputs = [prompt for prompt in read_inputs(loaded, rows) if prompt is not None]
    if loaded.task_name != "causal-lm":
        return inputs
    prompts = []
    for text in inputs:
        tokens = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
        prompts.append(str(loaded.tokenizer.decode(tokens[: min(_MAX_PROMPT, max(1, len(tokens) // 2))])))
    return prompts


def _expected(loaded: LoadedModel, held_out: HeldOut, row: int, prompt: Any) -> str | None:
    """Return the expected text for a generated one; None if the data has no separate text for it."""
    rows, columns = held_out.rows, held_out.task.columns
    role = {"seq2seq": "target", "chat": "answer", "causal-lm": "text"}[loaded.task_name]
    name = columns.get(role)
    if not isinstance(name, str) or name not in rows.columns:
        return None
    text = str(rows.columns[name][row])
    if role != "text":
        return text
    return text.removeprefix(prompt) if text.startswith(prompt) else None


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, Mapping):
        prompt = prompt["messages"]
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def _generate_before(
    card: Mapping[str, Any], tokenizer: Any, prompts: list[Any], max_new_tokens: int, device: Any
) -> tuple[list[str | None], str]:
    """Return the texts of the model that the run started from, and its name; None if it cannot be loaded."""
    model = (card.get("recipe") or {}).get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    if not name:
        return [None] * len(prompts), "random weights (no samples)"
    try:
        base = load(name, device=device)
        if base.model.get_input_embeddings().weight.shape[0] < len(tokenizer):
            raise ModelError("training added tokens that the base model does not have", "none")
        base = replace(base, tokenizer=tokenizer, task_name=str(card["task"]))
        return list(generate_texts(base, prompts, max_new_tokens)), str(name)
    except TrimtabError as error:
        say(f"no samples of the base model: {error}")
        return [None] * len(prompts), f"{name} (not available)"
