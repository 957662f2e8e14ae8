"""The model of a recipe and its tokenizer, with the techniques that its steps use."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.build.data import texts_of
from trimtab.build.parts import Data, Loaded
from trimtab.build.teacher import cut_student
from trimtab.build.tracked_model import find_tracked_model, with_model_here
from trimtab.engine.engine import Engine
from trimtab.errors import RecipeError
from trimtab.hardware.memory import is_out_of_memory, release_cached_memory
from trimtab.log import say
from trimtab.model.freeze import Freezing
from trimtab.model.load import load_model, load_skeleton, load_tokenizer, train_tokenizer
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.techniques.apply import change_model, load_options, loads_on_host, method_values
from trimtab.techniques.base import Accelerator, LoadOptions, Phase, Site, StepSpec
from trimtab.units import parse_every

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class _Source:
    """The sources of the model of a recipe and its tokenizer."""

    model: str | dict[str, Any]
    tokenizer: str
    trust_remote_code: bool


def build_model(recipe: Recipe, data: Data, engine: Engine) -> Loaded:
    """Load the model with the head that the task needs, and its tokenizer, and add the adapter."""
    source = source_of(recipe)
    tokenizer = _build_tokenizer(source, data)
    half = engine.compute_dtype or torch.float32
    is_pure = engine.mixed_precision == "bf16-pure"
    options = load_options(recipe, LoadOptions(half if is_pure else torch.float32), half)

    def load(device: torch.device) -> torch.nn.Module:
        torch.manual_seed(recipe.seed)  # a newly initialized head depends only on the seed
        return load_model(
            source.model,
            data.task.model_kind,
            data.task.head(),
            tokenizer,
            trust_remote_code=source.trust_remote_code,
            dtype=options.dtype,
            quantization=options.quantization,
            device=device,
            draws_on=engine.device,
        )

    model = _loaded(load, recipe, engine)
    cut_student(recipe, model)
    change_model(model, method_values(recipe), _site(recipe, data, engine), [Phase.ADAPTERS])
    return Loaded(model, tokenizer)


def _loaded(load: Callable[[torch.device], torch.nn.Module], recipe: Recipe, engine: Engine) -> torch.nn.Module:
    """Load weights on the device, or on the host if a technique reads them there."""
    if loads_on_host(recipe):
        return load(_HOST)
    try:
        return load(engine.device)
    except Exception as error:
        is_too_large = engine.device.type != "cpu" and is_out_of_memory(error)
        if not is_too_large or not loads_on_host(recipe, is_too_large=True):
            raise
    release_cached_memory(engine.device)  # not in the except block, whose traceback keeps the weights alive
    say(f"the weights do not fit on {engine.device} and are loaded into host memory")
    return load(_HOST)


def build_skeleton(recipe: Recipe, data: Data) -> Loaded:
    """The tokenizer of a recipe and its model without weights, enough to tokenize the data."""
    source = source_of(recipe)
    tokenizer = _build_tokenizer(source, data)
    trust = source.trust_remote_code
    kind, head = data.task.model_kind, data.task.head()
    model = load_skeleton(source.model, kind, head, tokenizer, trust_remote_code=trust)
    cut_student(recipe, model)
    return Loaded(model, tokenizer)


def source_of(recipe: Recipe) -> _Source:
    """The sources of the model of a recipe and its tokenizer."""
    # no effect in a run, which has already resolved the model for all processes
    recipe = with_model_here(recipe, find_tracked_model(recipe))
    found = recipe.model
    if not isinstance(found, ModelSettings):
        return _Source(found, found, False)
    named: str | dict[str, Any] = dict(found.config) if found.config else str(found.name)
    tokenizer = found.tokenizer or found.name
    if found.trust_remote_code:
        say("model.trust_remote_code is on: Python code from the model's repository is executed")
    if tokenizer is None:
        raise RecipeError("model.tokenizer is required with model.config", "set it to a Hub name, a folder, or train")
    return _Source(named, tokenizer, found.trust_remote_code)


def _build_tokenizer(source: _Source, data: Data) -> Any:
    if source.tokenizer != "train":
        return load_tokenizer(source.tokenizer, trust_remote_code=source.trust_remote_code)
    config = source.model if isinstance(source.model, dict) else {}
    return train_tokenizer(texts_of(data), vocab_size=int(config.get("vocab_size", 8000)))


def place_model(recipe: Recipe, data: Data, loaded: Loaded, spec: StepSpec, freezing: Freezing, engine: Engine) -> None:
    """Move the model to its device and apply the techniques of a specification to it."""
    site = _site(recipe, data, engine, freezing.released_later())
    change_model(loaded.model, spec, site, [Phase.PLACEMENT])
    loaded.model.to(engine.device)
    change_model(loaded.model, spec, site, [phase for phase in Phase if phase > Phase.PLACEMENT])


def _site(recipe: Recipe, data: Data, engine: Engine, unfrozen_later: Sequence[torch.nn.Parameter] = ()) -> Site:
    accelerator, kind = Accelerator.of(engine.device), data.task.model_kind
    return Site(engine.device, accelerator, engine.compute_dtype, recipe, kind, unfrozen_later)


def build_freezing(recipe: Recipe, loaded: Loaded) -> Freezing:
    """Freeze the parameters of `train.freeze`; the loop unfreezes them later if the recipe sets it."""
    until = {pattern: None if word == "always" else parse_every(word) for pattern, word in recipe.train.freeze.items()}
    freezing = Freezing(loaded.model, until)
    freezing.apply()
    return freezing
