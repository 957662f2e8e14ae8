"""Build the rows, task and tokens of a recipe."""

import math
from pathlib import Path
from typing import Any

from trimtab.build.batches import fast_steps
from trimtab.build.parts import Data, Loaded, Tokens
from trimtab.data.notices import data_notices
from trimtab.data.sources import Rows, held_out_split, hold_out_rows, load_rows, names_files
from trimtab.data.streams import StreamNeed
from trimtab.data.tasks.base import Task
from trimtab.data.tasks.build import build_task
from trimtab.data.tasks.columns import column_list, strings_in
from trimtab.data.tasks.decoder_start import generation_start
from trimtab.data.tokens import TokenDataset, cached
from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.load import max_positions
from trimtab.recipe.schema import Recipe
from trimtab.techniques.adapter import num_virtual_tokens

_USUAL_LENGTH = 1024  # of the rows made from texts, if data.max_length is not set
_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer has on average: rather too much text than too little
_SHORTEST = 2  # minimum number of tokens of a row, of which the first is not a label
_MAX_WEIGHTS = 20  # number of weights that are logged


def build_data(recipe: Recipe) -> Data:
    """Load the rows, detect the task, and split off rows for evaluation."""
    settings = recipe.data
    train = load_rows(settings.train, on_bad_rows=settings.on_bad_rows, need=_stream_need(recipe))
    evaluation = settings.eval
    if evaluation is None and settings.eval_share > 0:
        evaluation = held_out_split(settings.train)
    held_out = None
    if evaluation is not None:
        held_out = load_rows(evaluation, on_bad_rows=settings.on_bad_rows, role="eval")
    task = build_task(
        recipe.task,
        train,
        text=settings.text,
        label=settings.label,
        target=settings.target,
        messages=settings.messages,
        prompt=settings.prompt,
        answer=settings.answer,
        eval_rows=held_out,
        seed=recipe.seed,
        on_bad_rows=settings.on_bad_rows,
    )
    for line in task.notes:
        say(line)
    train = task.usable(train)
    held_out = None if held_out is None else task.usable(held_out)
    if held_out is None and settings.eval_share > 0:
        label = task.columns.get("label") if task.name == "classify" else None
        train, held_out = hold_out_rows(
            train, settings.eval_share, recipe.seed, label=label if isinstance(label, str) else None
        )
        num_rows = len(train) + len(held_out)
        say(f"data.eval is not set: {len(held_out):,} of {num_rows:,} rows are held out for evaluation")
    notices = data_notices(task, train, held_out, is_held_out=evaluation is None)
    for line in notices:
        say(line)
    return Data(task, train, held_out, notices, _class_weights(recipe, task, train))


def _class_weights(recipe: Recipe, task: Task, train: Rows) -> tuple[float, ...] | None:
    wanted = recipe.train.class_weights
    if wanted is None:
        return None
    weights = task.class_weights(wanted, train)
    shown = [f"{name!r} {weight:.4g}" for name, weight in zip(task.head()["label2id"], weights, strict=True)]
    say(f"class weights: {', '.join(shown[:_MAX_WEIGHTS])}{' …' if len(shown) > _MAX_WEIGHTS else ''}")
    return weights


def _stream_need(recipe: Recipe) -> StreamNeed | None:
    """How many rows of a training set without a length are read; None if the recipe does not say it."""
    train, data = recipe.train, recipe.data
    num_steps = fast_steps(recipe) if recipe.limits.fast_dev_run else train.max_steps
    if num_steps is None:
        return None
    num_rows = num_steps * train.batch_size
    num_characters = 0
    if recipe.task in (None, "causal-lm"):
        num_characters = num_rows * (data.max_length or _USUAL_LENGTH) * _CHARACTERS_PER_TOKEN
    kept = 1 if data.eval is not None else 1 - data.eval_share
    reason = "limits.fast_dev_run" if recipe.limits.fast_dev_run else f"train.max_steps: {num_steps}"
    return StreamNeed(math.ceil(num_rows / kept), math.ceil(num_characters / kept), reason)


def build_tokens(recipe: Recipe, data: Data, loaded: Loaded) -> Tokens:
    """Tokenize the rows, or read the tokens of an earlier run with the same rows, tokenizer and settings."""
    limit = max_positions(loaded.model)
    if limit is not None and (num_virtual := num_virtual_tokens(recipe)):
        if limit - num_virtual < _SHORTEST:
            raise RecipeError(
                f"adapter.tokens is {num_virtual}, but the model has {limit} positions: no room is left for the rows",
                f"set adapter.tokens to {max(1, limit // 2)} or less",
            )
        limit -= num_virtual
    max_length = recipe.data.max_length or limit or 512
    if limit is not None and max_length > limit:
        say(f"data.max_length {max_length} exceeds the model's {limit} positions; using {limit}")
        max_length = limit
    task = data.task
    config: Any = loaded.model.config
    task.bind(loaded.tokenizer, config)
    generation = getattr(loaded.model, "generation_config", None)
    if task.model_kind == "seq2seq-lm" and generation is not None:
        # so that generation with the saved model starts with the first token that the decoder reads in training
        generation.update(**generation_start(loaded.tokenizer, config.model_type))

    def encode(rows: Rows) -> TokenDataset:
        key = [task.name, task.settings, rows, loaded.tokenizer, max_length]
        return cached(key, lambda: task.encode(rows, loaded.tokenizer, max_length))

    train = encode(data.train)
    held_out = encode(data.eval) if data.eval is not None else None
    if train.num_truncated:
        say(f"{train.num_truncated:,} of {len(train):,} rows are longer than {max_length} tokens and were truncated")
    return Tokens(train, held_out, max_length)


def texts_of(data: Data) -> list[str]:
    """Every text of the training rows."""
    names = [name for columns in data.task.columns.values() for name in column_list(columns)]
    return [text for name in names if name in data.train.columns for text in strings_in(data.train.columns[name])]


def run_name(recipe: Recipe) -> str:
    """The experiment of a recipe as the name of a folder; named after its data if it has none."""
    if recipe.track.experiment:
        return recipe.track.experiment.rpartition("/")[2]
    source = recipe.data.train
    source = source[0] if names_files(source) else source
    if isinstance(source, str | Path):
        words = [part.split("[")[0].split(":")[0].split(".")[0] for part in reversed(Path(str(source)).parts)]
        return next((word for word in words if word and not set(word) & set("*?/")), "run")
    return "run"
