"""Where models come from: what a user names becomes a folder, a GGUF file or a hub name.

transformers is kept quiet while it loads, and its failures are told in our words, with a cure.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.errors import MissingDependency, ModelError, UserError
from trimtab.hardware.extras import require_extra

_ON_A_SERVER = ("models:/", "best:")
_ADAPTER = "adapter_config.json"
_LONGEST_REASON = 600
_MARKS_OF_A_RUN = ("recipe.yaml", "plan.json", "metrics.jsonl", "checkpoints")


@dataclass(frozen=True)
class Source:
    """What transformers is asked for: a folder or hub name, and the file in it where the weights are GGUF."""

    name: str
    gguf_file: str | None = None

    @property
    def arguments(self) -> dict[str, str]:
        """What `from_pretrained` needs beside the name."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def resolve_source(text: str, *, adapters: bool = False) -> str:
    """Find what a user's word for a model means.

    Args:
        text: A run folder, a folder of a model, a `.gguf` file, or a name on the hub.
        adapters: Whether a folder may hold an adapter alone.

    Returns:
        The folder of the model (of a run: its best one), the file, or the hub name as it is.

    Raises:
        ModelError: If it is a path that leads to no model.
    """
    if text.startswith(_ON_A_SERVER):  # recipes, trimtab.load and the command line have made folders of them before
        raise ModelError(f"{text!r} is on a tracking server, not here", f"fetch it: trimtab pull {text} DIR")
    if not text.strip():
        raise ModelError("no model is named", "name a folder that holds config.json, or a name on the hub")
    path = Path(text).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}", "name an existing .gguf file")
        return str(path)
    if path.is_dir():
        return str(_model_folder(path, adapters))
    if path.is_file():
        raise ModelError(f"{path} is a file, not a model", "name the folder that holds config.json, or a .gguf file")
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelError(f"there is no folder {text!r}", "name a folder that holds config.json, or a name on the hub")
    return text


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter without the weights of its base."""
    found = Path(folder)
    whole = ("model*.safetensors", "pytorch_model*.bin")
    return (found / _ADAPTER).is_file() and not any(path for pattern in whole for path in found.glob(pattern))


def _model_folder(folder: Path, adapters: bool) -> Path:
    outdated = sorted(folder.glob(".best.outdated-*"))  # a writer was killed between its two renames
    for place in (folder, folder / "best", *outdated):
        if is_adapter(place):
            if not adapters:
                raise ModelError(f"{place} holds an adapter alone", f"merge it first: trimtab merge {folder} DIR")
            return place
        if (place / "config.json").is_file():
            return place
    if any((folder / mark).exists() for mark in _MARKS_OF_A_RUN):
        raise ModelError(f"the run {folder} has no best model yet", "let it run until its first evaluation")
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    names = sorted(path.name for path in folder.iterdir())
    found = f"it holds {', '.join(names[:4])}" if names else "it is empty"
    cure = f"name {folder / inside[0]}" if inside else "name a folder that save_pretrained or trimtab wrote"
    raise ModelError(f"{folder} is no model: it has no config.json ({found})", cure)


def as_source(text: str, *, adapters: bool = False) -> Source:
    """What `resolve_source` finds, in the form that transformers takes."""
    found = resolve_source(text, adapters=adapters)
    if found.endswith(".gguf"):
        require_extra("gguf", "reading a .gguf file")
        return Source(str(Path(found).parent), Path(found).name)
    return Source(found)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside, transformers shows neither warnings nor its own progress bars; afterwards it is as it was.

    Downloads keep the hub's progress bar, which appears on a terminal only: they can take minutes.
    """
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as their_logging

    their_gguf: Any = modeling_gguf_pytorch_utils

    hub_logger = logging.getLogger("huggingface_hub")
    verbosity, hub_level = their_logging.get_verbosity(), hub_logger.level
    hook = their_logging.set_tqdm_hook(_without_bar)
    gguf_bar = their_gguf.tqdm  # the one bar that does not ask the hook
    their_gguf.tqdm = partial(gguf_bar, disable=True)
    their_logging.set_verbosity(logging.ERROR)
    hub_logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        their_logging.set_verbosity(verbosity)
        hub_logger.setLevel(hub_level)
        their_logging.set_tqdm_hook(hook)
        their_gguf.tqdm = gguf_bar


def _without_bar(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return factory(*args, **{**kwargs, "disable": True})


def explained(
    source: str, error: Exception, what: str = "", cure: str = "check its files, or name another model"
) -> UserError:
    """What went wrong while `source` was loaded, and the cure, in place of transformers' own error.

    Args:
        source: The name that the user gave.
        error: What transformers raised.
        what: Which part of it was loaded, such as "the tokenizer of "; empty for all of it.
        cure: What mends it, where the error is none that is known.
    """
    kinds = {type(cause).__name__ for cause in _causes(error)}
    text = str(error)
    if isinstance(error, UserError):
        return error
    if "GatedRepoError" in kinds:
        return ModelError(
            f"{source} is gated: its owner wants you to accept a licence first",
            f"accept it on the model's page on the Hub ({source}), then run: hf auth login",
        )
    if "RepositoryNotFoundError" in kinds:
        return ModelError(
            f"the hub has no model {source!r}, or it is private",
            "check the spelling; for a private model run: hf auth login",
        )
    unreachable = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}
    if kinds & unreachable:
        return ModelError(
            f"{source!r} is no folder here, is not in the hub's cache, and the hub cannot be reached",
            "name a folder, or connect (and unset HF_HUB_OFFLINE) once so that it is fetched",
        )
    if "trust_remote_code" in text:
        return ModelError(
            f"{source} brings Python code of its own, which would run on this machine",
            f"if you trust its authors: model: {{name: {source}, trust_remote_code: true}}",
        )
    if isinstance(error, ImportError):
        return MissingDependency(f"{source} needs a package that is not installed: {_first_line(text)}", "install it")
    if "does not recognize this architecture" in text or "model type" in text and "not" in text:
        return ModelError(f"{source}: {_first_line(text)}", "pip install --upgrade transformers")
    if "UnpicklingError" in kinds:
        return ModelError(
            f"the weights of {source} are a pickle that holds more than tensors, and loading it could run any code",
            "get the model as safetensors",
        )
    if "SafetensorError" in kinds:
        return ModelError(f"the weights of {source} cannot be read: {_first_line(text)}", "fetch or write them again")
    return ModelError(f"{what}{source} cannot be loaded: {_first_line(text)}", cure)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(text: str) -> str:
    """The first line of a message; all of one whose first line announces a list."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    told = " ".join(lines) if lines[0].endswith(":") else lines[0]
    return told if len(told) <= _LONGEST_REASON else f"{told[:_LONGEST_REASON]} …"
