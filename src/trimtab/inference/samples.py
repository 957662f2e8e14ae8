"""Sample generations for the report of a run: the same prompts before and after training."""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import read_facts, read_quantization
from trimtab.data.rows import Rows
from trimtab.data.tasks.messages import as_messages
from trimtab.errors import DataError, ModelError, UserError, summarize_error
from trimtab.inference.adapted import (
    add_trained_adapter,
    load_adapter_tokenizer,
    load_bare_base,
    read_adapter_source,
)
from trimtab.inference.generate import generate_texts, tokenize_prompts
from trimtab.inference.inputs import read_inputs
from trimtab.inference.load import LoadedModel, load
from trimtab.inference.model_kind import KINDS_OF_TASKS
from trimtab.log import muted
from trimtab.model.hub import adapter_config_path, is_adapter
from trimtab.model.load import load_model, max_positions, newly_initialized

_NUM_CONTINUED = 32  # maximum number of tokens of a text that a causal-lm continues
_MAX_PROMPT = 512  # tokens: samples of longer prompts would take much more memory and time, and hardly be read
_NUM_TRIED = 50  # rows per sample that are tried until a short prompt is found
_SEED = 0  # of the choice of rows


@dataclass(frozen=True)
class SampleRequest:
    """What to generate.

    Attributes:
        rows: The rows whose inputs are the prompts.
        origin: What the rows are, such as "Held-out rows".
        num_samples: Maximum number of rows to use, chosen at random from those with a prompt of at most 512 tokens.
        device: The device to generate on.
        max_new_tokens: Maximum number of tokens to generate.
        trust_remote_code: Whether Python code in the model's folder may run.
    """

    rows: Rows
    origin: str
    num_samples: int
    device: torch.device
    max_new_tokens: int = 64
    trust_remote_code: bool = False


def generate_samples(best: Path, request: SampleRequest) -> dict[str, Any]:
    """Generate with the model that a run started from and with its best model; one of them is in memory at a time.

    Args:
        best: The folder of the best model, with its trimtab.json.
        request: What to generate.

    Returns:
        `note`, a description, `step`, that of the best model, and `rows`, each with `prompt`, `before`, `after` and
        `expected`; a text that does not exist is None.

    Raises:
        DataError: No row has a prompt that is short enough.
        ModelError: The best model cannot be loaded.
    """
    facts = read_facts(best)
    if is_adapter(best):
        generated = _with_and_without_adapter(best, facts, request)
    else:
        generated = _one_after_the_other(best, facts, request)
    step = facts.get("step")
    note = (
        f"{request.origin}, greedy decoding, at most {generated.max_new_tokens} new tokens. Before: {generated.base}. "
        f"After: the best model{'' if step is None else f' (step {step})'}."
    )
    rows = [
        {"prompt": _as_text(prompt), "before": before, "after": after, "expected": expected}
        for (prompt, expected), before, after in zip(generated.prompts, generated.before, generated.after, strict=True)
    ]
    return {"note": note, "rows": rows, "step": step}


def weights_dtype(facts: Mapping[str, Any], device: torch.device) -> torch.dtype | None:
    """Return the dtype to generate in: that of the weights in training; None on a CPU, where half precision is slow."""
    if device.type == "cpu" or read_quantization(facts) is not None:  # a quantized base is loaded as in training
        return None
    settings = (facts.get("recipe") or {}).get("train") or {}
    name = (facts.get("adapter") or {}).get("base_dtype") or (
        "bfloat16" if settings.get("precision") == "bf16-pure" else None
    )
    return None if name is None else getattr(torch, name)


@dataclass(frozen=True)
class _Generated:
    """Prompts with the expected texts, and what was generated for them; `base` names the model before training."""

    prompts: Sequence[tuple[Any, str | None]]
    before: Sequence[str | None]
    after: Sequence[str]
    base: str
    max_new_tokens: int


def _with_and_without_adapter(best: Path, facts: dict[str, Any], request: SampleRequest) -> _Generated:
    """Load the base once: generate with it, add the adapter, and generate again."""
    trusted = {"trust_remote_code": request.trust_remote_code}
    source = read_adapter_source(best, **trusted)
    tokenizer = load_adapter_tokenizer(source, **trusted)
    model = load_bare_base(source, tokenizer, request.device, dtype=weights_dtype(facts, request.device), **trusted)
    loaded = LoadedModel(model.eval().to(request.device), tokenizer, str(facts["task"]), facts)
    settings = json.loads(adapter_config_path(best).read_text(encoding="utf-8"))
    length = _num_new_tokens(loaded, request, settings.get("num_virtual_tokens") or 0)
    prompts = _prompts(loaded, request, length)
    inputs = [prompt for prompt, _ in prompts]
    before = generate_texts(loaded, inputs, length)
    add_trained_adapter(source, model)
    loaded = replace(loaded, model=model.to(request.device))
    return _Generated(prompts, before, generate_texts(loaded, inputs, length), source.base, length)


def _one_after_the_other(best: Path, facts: dict[str, Any], request: SampleRequest) -> _Generated:
    dtype = weights_dtype(facts, request.device)
    loaded = load(best, device=request.device, dtype=dtype, trust_remote_code=request.trust_remote_code)
    length = _num_new_tokens(loaded, request)
    prompts = _prompts(loaded, request, length)
    inputs = [prompt for prompt, _ in prompts]
    after = generate_texts(loaded, inputs, length)
    tokenizer = loaded.tokenizer
    del loaded
    gc.collect()  # frees the model, which has reference cycles, before the other one is loaded
    base, obstacle = _start_of(facts) or "random weights", _no_start(facts)
    before: Sequence[str | None] = [None] * len(inputs)
    try:
        if obstacle is None:
            before = generate_texts(_load_start(base, facts, tokenizer, dtype, request), inputs, length)
    except Exception as error:  # the texts of the best model are worth showing without it
        obstacle = error.problem if isinstance(error, UserError) else summarize_error(error)
    return _Generated(prompts, before, after, base if obstacle is None else f"{base} ({obstacle})", length)


def _no_start(facts: Mapping[str, Any]) -> str | None:
    """Return why no saved model is the one that training started from; None if one is."""
    if not _start_of(facts):
        return "no samples"
    is_cut = ((facts.get("recipe") or {}).get("distill") or {}).get("student") is not None
    return "no samples of the layers that the student has" if is_cut else None


def _load_start(
    name: str, facts: dict[str, Any], tokenizer: Any, dtype: torch.dtype | None, request: SampleRequest
) -> LoadedModel:
    """Load the model that training started from as training did: with the tokenizer of the run.

    Raises:
        ModelError: It has no weights for some part of the model.
    """
    task = str(facts["task"])
    with torch.random.fork_rng():  # as in training, the seed draws the rows of added tokens
        torch.manual_seed((facts.get("recipe") or {}).get("seed", 0))
        model: Any = load_model(
            name,
            KINDS_OF_TASKS[task],
            {},
            tokenizer,
            dtype=dtype or torch.float32,
            trust_remote_code=request.trust_remote_code,
        )
    if missing := sorted(newly_initialized(model)):
        raise ModelError(f"it has no weights for {', '.join(missing[:2])}")
    return LoadedModel(model.eval().to(request.device), tokenizer, task, facts)


def _start_of(facts: Mapping[str, Any]) -> str | None:
    """Return the model that the recipe names; None if training started from random weights."""
    model = (facts.get("recipe") or {}).get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    return None if not name else str(name)


def _num_new_tokens(loaded: LoadedModel, request: SampleRequest, num_virtual: int = 0) -> int:
    """Return the number of tokens to generate: at most half of the model's positions, so that prompts have space.

    Args:
        loaded: The model.
        request: What to generate.
        num_virtual: Number of positions that the virtual tokens of an adapter take.
    """
    limit = max_positions(loaded.model)
    return request.max_new_tokens if limit is None else max(1, min(request.max_new_tokens, (limit - num_virtual) // 2))


def _prompts(loaded: LoadedModel, request: SampleRequest, num_new_tokens: int) -> list[tuple[Any, str | None]]:
    """Return prompts with the text that the data has for each, None if it has no separate one."""
    order = torch.randperm(len(request.rows), generator=torch.Generator().manual_seed(_SEED))
    found: list[tuple[Any, str | None]] = []
    problem = DataError(f"no row has a prompt of at most {_MAX_PROMPT} tokens")
    for row in order[: _NUM_TRIED * request.num_samples].tolist():
        rows = request.rows.select([row])
        try:
            prompt = _read_prompt(loaded, rows)
            if prompt and _num_tokens(loaded, prompt, num_new_tokens) <= _MAX_PROMPT:
                found.append((prompt, _expected(loaded, rows, prompt)))
        except DataError as error:  # training may have skipped this row
            problem = error
        if len(found) == request.num_samples:
            break
    if not found:
        raise problem
    return found


def _read_prompt(loaded: LoadedModel, rows: Rows) -> Any:
    """Return the input of a row; for a causal-lm, the start of its text, at most half of it."""
    prompt = read_inputs(loaded, rows)[0]
    if prompt is None or loaded.task_name != "causal-lm":
        return prompt
    tokens = loaded.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    return str(loaded.tokenizer.decode(tokens[: min(_NUM_CONTINUED, max(1, len(tokens) // 2))]))


def _num_tokens(loaded: LoadedModel, prompt: Any, num_new_tokens: int) -> int:
    with muted():  # `tokenize_prompts` reports those that it truncates
        return len(tokenize_prompts(loaded, [prompt], num_new_tokens)[0]["input_ids"])


def _expected(loaded: LoadedModel, rows: Rows, prompt: Any) -> str | None:
    columns = loaded.facts.get("columns") or {}
    messages = columns.get("messages")
    if isinstance(messages, str) and messages in rows.columns:
        last = as_messages(rows.columns[messages][0], messages)[-1]
        return str(last["content"]) if last["role"] == "assistant" else None
    role = {"seq2seq": "target", "chat": "answer", "causal-lm": "text"}[loaded.task_name]
    name = columns.get(role)
    if not isinstance(name, str) or name not in rows.columns:
        return None
    text = str(rows.columns[name][0])
    if role != "text":
        return text
    return text.removeprefix(prompt) if text.startswith(prompt) else None


def _as_text(prompt: Any) -> str:
    if isinstance(prompt, Mapping):
        prompt = prompt["messages"]
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
