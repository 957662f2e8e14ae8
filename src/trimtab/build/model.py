"""The model of a recipe and its tokenizer, in the form in which it trains: format, kernels, adapter."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from trimtab.build.data import texts_of
from trimtab.build.parts import Data, Loaded
from trimtab.build.tracked_model import find_tracked_model, with_model_here
from trimtab.engine.engine import Engine
from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.adapters import LoraSpec, add_adapter
from trimtab.model.freeze import Freezing
from trimtab.model.grouped_heads import flash_runs, repeat_heads
from trimtab.model.load import load_model, load_skeleton, load_tokenizer, train_tokenizer
from trimtab.model.nf4 import Nf4
from trimtab.recipe.schema import AdapterSettings, ModelSettings, Recipe
from trimtab.techniques.gradient_checkpointing import checkpoint_layers
from trimtab.techniques.host_embeddings import keep_embeddings_on_host
from trimtab.techniques.kernels import choose_kernels, use_liger
from trimtab.units import parse_every

_LR_OF_ADAPTERS = 1e-4  # below it adapters learn slowly


@dataclass(frozen=True)
class _Source:
    """Where the model of a recipe and its tokenizer come from."""

    model: str | dict[str, Any]
    tokenizer: str
    trust_remote_code: bool


def build_model(recipe: Recipe, data: Data, engine: Engine) -> Loaded:
    """Load the model with the head that the task needs, and its tokenizer, and add the adapter."""
    source = source_of(recipe)
    tokenizer = _build_tokenizer(source, data)
    torch.manual_seed(recipe.seed)  # a head that is newly initialised depends on the seed alone
    adapter = adapter_settings(recipe)
    half = engine.compute_dtype or torch.float32
    model = load_model(
        source.model,
        data.task.model_kind,
        data.task.head(),
        tokenizer,
        trust_remote_code=source.trust_remote_code,
        # weights that do not train need no fp32: what computes with them rounds them in any case
        dtype=half if adapter is not None or engine.mixed_precision == "bf16-pure" else torch.float32,
        nf4=Nf4(compute_dtype=half) if adapter is not None and adapter.kind == "qlora" else None,
        device=engine.device,
    )
    if adapter is not None:
        _add_adapter(recipe, adapter, model)
    return Loaded(model, tokenizer)


def build_skeleton(recipe: Recipe, data: Data) -> Loaded:
    """The tokenizer of a recipe, and its model without weights: enough to see what the data becomes."""
    source = source_of(recipe)
    tokenizer = _build_tokenizer(source, data)
    trust = source.trust_remote_code
    kind, head = data.task.model_kind, data.task.head()
    return Loaded(load_skeleton(source.model, kind, head, tokenizer, trust_remote_code=trust), tokenizer)


def source_of(recipe: Recipe) -> _Source:
    """Where the model of a recipe and its tokenizer come from."""
    recipe = with_model_here(recipe, find_tracked_model(recipe))  # a run has done so before, for all its processes
    found = recipe.model
    if not isinstance(found, ModelSettings):
        return _Source(found, found, False)
    named: str | dict[str, Any] = dict(found.config) if found.config else str(found.name)
    tokenizer = found.tokenizer or found.name
    if found.trust_remote_code:
        say("model.trust_remote_code is on: Python code that comes with the model is run")
    if tokenizer is None:
        raise RecipeError(
            "model.tokenizer is missing: a config alone has none", "a name, a folder, or tokenizer: train"
        )
    return _Source(named, tokenizer, found.trust_remote_code)


def _build_tokenizer(source: _Source, data: Data) -> Any:
    if source.tokenizer != "train":
        return load_tokenizer(source.tokenizer, trust_remote_code=source.trust_remote_code)
    config = source.model if isinstance(source.model, dict) else {}
    return train_tokenizer(texts_of(data), vocab_size=int(config.get("vocab_size", 8000)))


def place_model(recipe: Recipe, loaded: Loaded, freezing: Freezing, engine: Engine) -> Loaded:
    """Bring the model to its device, as far as it belongs there, and give it its kernels."""
    model, memory = loaded.model, recipe.memory
    if memory.offload == "embeddings":
        keep_embeddings_on_host(model, engine.device, trained_later=freezing.released_later())
    model.to(engine.device)
    if engine.device.type == "cuda":
        capability = torch.cuda.get_device_capability(engine.device)
        if not flash_runs(capability, engine.compute_dtype):
            repeat_heads(model)
    kernels = choose_kernels(memory.kernels, model, engine.device, engine.compute_dtype)
    if kernels == "liger":
        use_liger(model)
    checkpoint_layers(model, memory.gradient_checkpointing)
    return replace(loaded, kernels=kernels)


def adapter_settings(recipe: Recipe) -> AdapterSettings | None:
    """The adapter of a recipe with all its settings, or None."""
    if isinstance(recipe.adapter, AdapterSettings):
        return recipe.adapter
    return None if recipe.adapter == "none" else AdapterSettings(kind=recipe.adapter)


def add_adapter_of(settings: AdapterSettings, model: torch.nn.Module) -> None:
    """Add the adapter that settings describe."""
    spec = {name: value for name, value in settings.model_dump().items() if name != "kind"}
    if settings.layers is not None:
        spec["layers"] = (settings.layers[0], settings.layers[1])
    add_adapter(model, LoraSpec(**spec))


def _add_adapter(recipe: Recipe, settings: AdapterSettings, model: torch.nn.Module) -> None:
    add_adapter_of(settings, model)
    if isinstance(recipe.model, ModelSettings) and recipe.model.config:
        say("the model is made from a config and is not kept: the adapter alone cannot be loaded afterwards")
    if recipe.train.lr < _LR_OF_ADAPTERS:
        say(f"train.lr is {recipe.train.lr:g}; adapters usually learn best with {_LR_OF_ADAPTERS:g} to 3e-4")


def build_freezing(recipe: Recipe, loaded: Loaded) -> Freezing:
    """Freeze what the recipe says; what begins to train later does so in the loop."""
    until = {pattern: None if word == "always" else parse_every(word) for pattern, word in recipe.train.freeze.items()}
    freezing = Freezing(loaded.model, until)
    freezing.apply()
    return freezing
