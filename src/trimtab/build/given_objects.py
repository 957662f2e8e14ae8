"""Models and tokenizers that are passed to `fit` as objects: saved in a folder, which the recipe then names.

A recipe has to describe its run completely: the planner reads the config of the model, and a resumed run and the other
processes load its weights again. The folder is named after its contents, so equal objects mean the same run.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import FACTS, export_model
from trimtab.checkpoint.folder import atomic_folder
from trimtab.data.fingerprint import FingerprintError, fingerprint
from trimtab.errors import ModelError
from trimtab.log import say
from trimtab.model.quantization import is_quantized
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.tracking.mlflow.uri import RUNS, store_root

_FOLDER = "given"  # inside the folder of runs
_TOKENIZER_FILE = "tokenizer_config.json"
_WHEN_SAVED = {"architectures", "dtype", "transformers_version"}  # set in the config of a saved model


def with_given_objects(recipe: Recipe, model: Any = None, tokenizer: Any = None) -> Recipe:
    """Return the recipe with the folders in which the objects are saved; without objects, the recipe itself.

    Args:
        recipe: The recipe. Its model is replaced; the name of its tokenizer is used if only a model is passed.
        model: A model of transformers, with or without a head for the task. A copy of it is trained.
        tokenizer: A tokenizer of transformers.

    Raises:
        ModelError: If an object cannot be written to a folder and loaded from there.
    """
    if model is None and tokenizer is None:
        _check_kept(recipe)
        return recipe
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ModelError(f"tokenizer is a {type(tokenizer).__name__}", "pass a transformers tokenizer")
    before = recipe.model if isinstance(recipe.model, ModelSettings) else ModelSettings(name=recipe.model)
    changes: dict[str, Any] = {}
    if tokenizer is not None:
        changes["tokenizer"] = str(_keep_tokenizer(recipe, tokenizer))
    if model is not None:
        _check_model(model)
        changes |= {"name": str(_keep_model(recipe, model)), "config": None}
        changes.setdefault("tokenizer", before.tokenizer or before.name)
    return recipe.model_copy(update={"model": before.model_copy(update=changes)})


def _check_kept(recipe: Recipe) -> None:
    """Refuse to resume a run whose saved objects are missing."""
    named = recipe.model
    for name in (named.name, named.tokenizer) if isinstance(named, ModelSettings) else ():
        if name is not None and Path(name).parent.name == _FOLDER and not Path(name).exists():
            raise ModelError(
                f"this run was started with an object that was saved in {name}; that folder no longer exists",
                "pass the same objects again: trimtab.resume(RUN, model=…, tokenizer=…)",
            )


def _place(recipe: Recipe, kind: str, content: list[Any]) -> Path:
    try:
        digest = fingerprint(content)[:16]
    except FingerprintError as error:
        raise ModelError(f"the {kind} cannot be saved: {error}", "save it yourself, and pass its folder") from error
    if recipe.limits.fast_dev_run:
        root = Path(tempfile.gettempdir())
    else:
        root = Path(RUNS) if recipe.out is None else store_root(Path(recipe.out))
    return root.absolute() / _FOLDER / f"{kind}-{digest}"


def _keep_model(recipe: Recipe, model: Any) -> Path:
    config = {key: value for key, value in json.loads(model.config.to_json_string()).items() if key not in _WHEN_SAVED}
    content = [type(model).__name__, config, dict(model.state_dict())]
    folder = _place(recipe, "model", content)
    if not (folder / FACTS).is_file():
        export_model(folder, model, None, card={})
    say(f"the given model was saved in {folder}; resuming this run needs that folder")
    return folder


def _keep_tokenizer(recipe: Recipe, tokenizer: Any) -> Path:
    folder = _place(recipe, "tokenizer", [tokenizer])
    if not (folder / _TOKENIZER_FILE).is_file():
        with atomic_folder(folder, marker=_TOKENIZER_FILE, what="tokenizer") as place:
            tokenizer.save_pretrained(place)
    say(f"the given tokenizer was saved in {folder}; resuming this run needs that folder")
    return folder


def _check_model(model: Any) -> None:
    """Refuse a model that could not be loaded again from a folder."""
    from transformers import PreTrainedModel

    name = type(model).__name__
    if hasattr(model, "peft_config"):
        raise ModelError(
            f"{name} already has an adapter", "pass the base model and set adapter: lora, or merge the adapter first"
        )
    if not isinstance(model, PreTrainedModel):
        loop = "; train other modules in your own loop: model, optimizer, loader = trimtab.Engine().prepare(…)"
        cure = f"pass a transformers model, or the name of one{loop if isinstance(model, torch.nn.Module) else ''}"
        raise ModelError(f"model is a {name}", cure)
    if not type(model).__module__.startswith("transformers."):
        raise ModelError(
            f"{name} is a custom class, which a resumed run could not load",
            "save it together with its code, and set model: {name: FOLDER, trust_remote_code: true}",
        )
    if getattr(model.config, "quantization_config", None) or any(map(is_quantized, model.modules())):
        raise ModelError(f"the weights of {name} are quantized", "pass it unquantized, and set adapter: qlora")
    with torch.device("meta"):
        plain: Any = type(model)(model.config)
    wanted, found = ({key: value.shape for key, value in each.state_dict().items()} for each in (plain, model))
    different = sorted(key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key))
    if different:
        raise ModelError(
            f"{name} does not match its config: {', '.join(different[:3])}",
            "pass a model whose modules were not replaced",
        )
