"""Resolve a model name to a folder, a GGUF file or a Hub name, and turn transformers' load errors into ModelErrors."""

import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.addresses import path_problem
from trimtab.errors import MissingDependency, ModelError, TrimtabError, UserError, as_argument
from trimtab.hardware.extras import import_failure, require_extra
from trimtab.model.best_weights import check_best_weights

_ON_A_SERVER = ("models:/", "best:")
PEFT_CONFIG = "adapter_config.json"
SIDE_CONFIG = "side_network.json"
_MAX_REASON = 600  # characters of an error message of transformers
CHECK_FILES = "check its files, or choose another model"
_RUST_PANIC = "PanicException"  # not an Exception; raised by tokenizers and safetensors
_RUN_FILES = ("recipe.yaml", "plan.json", "metrics.jsonl", "checkpoints")


@dataclass(frozen=True)
class Source:
    """A folder or Hub name for transformers, and the file in it if the weights are GGUF."""

    name: str
    gguf_file: str | None = None

    @property
    def arguments(self) -> dict[str, str]:
        """Keyword arguments for `from_pretrained`, besides the name."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def resolve_source(text: str, *, adapters: bool = False) -> str:
    """Resolve a model given by the user, whose weights will be read.

    Args:
        text: A run folder, a model folder, a `.gguf` file, or a Hub name.
        adapters: Whether a folder with only an adapter is allowed.

    Returns:
        The folder of the model (of the best model for a run), the `.gguf` file, or the Hub name unchanged.

    Raises:
        ModelError: The path does not lead to a model, or to a damaged best model of a run.
    """
    found = _find_source(text, adapters)
    check_best_weights(Path(found))
    return found


def _find_source(text: str, adapters: bool) -> str:
    if text.startswith(_ON_A_SERVER):  # recipes, trimtab.load and the command line have already downloaded these
        raise ModelError(f"{text!r} is on a tracking server", f"download it: trimtab pull {text} DIR")
    if not text.strip():
        raise ModelError("no model was given", "pass a folder that contains config.json, or a Hub name")
    if problem := path_problem(text):
        raise ModelError(f"{text!r} {problem}", "pass a folder that contains config.json, or a Hub name: OWNER/NAME")
    path = Path(os.path.expanduser(text))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}", "pass an existing .gguf file")
        return str(path)
    if path.is_dir():
        return str(_model_folder(path, adapters))
    if path.is_file():
        raise ModelError(f"{path} is a file, not a model", "pass the folder that contains config.json, or a .gguf file")
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        cure = _similar_folder(text) + "pass a folder that contains config.json, or a Hub name"
        raise ModelError(f"there is no folder {text!r}", cure)
    return text


def _similar_folder(text: str) -> str:
    """Suggest a folder next to a path that does not exist; empty if none has a similar name."""
    path = Path(os.path.expanduser(text))
    try:
        names = [folder.name for folder in path.parent.iterdir() if folder.is_dir()]
    except OSError:  # there is no such folder, or it cannot be read
        return ""
    near = get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"did you mean the folder {path.parent / near[0]}? If not, " if near else ""


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder contains an adapter, PEFT's or a side network, without the weights of its base model."""
    found = Path(folder)
    whole = ("model*.safetensors", "pytorch_model*.bin")
    has_config = (found / PEFT_CONFIG).is_file() or is_side_network(found)
    return has_config and not any(path for pattern in whole for path in found.glob(pattern))


def is_side_network(folder: str | Path) -> bool:
    """Whether a folder contains a side network."""
    return (Path(folder) / SIDE_CONFIG).is_file()


def adapter_config_path(folder: str | Path) -> Path:
    """The file of an adapter that names its base model."""
    return Path(folder) / (SIDE_CONFIG if is_side_network(folder) else PEFT_CONFIG)


def _model_folder(folder: Path, adapters: bool) -> Path:
    outdated = sorted(folder.glob(".best.outdated-*"))  # exists if the writer was killed between its two renames
    for place in (folder, folder / "best", *outdated):
        if is_adapter(place):
            if not adapters:
                merge = f"merge it first: trimtab merge {as_argument(folder)} DIR"
                cure = "train its base again, or merge a LoRA adapter" if is_side_network(place) else merge
                raise ModelError(f"{place} contains only an adapter", cure)
            return place
        if (place / "config.json").is_file():
            return place
        if len(files := sorted(place.glob("*.gguf"))) == 1:
            return files[0]
    if any((folder / name).exists() for name in _RUN_FILES):
        cure = f"let it run until its first evaluation: trimtab resume {as_argument(folder)}"
        raise ModelError(f"the run {folder} has no best model yet", cure)
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    names = sorted(path.name for path in folder.iterdir())
    found = f"it contains {', '.join(names[:4])}" if names else "it is empty"
    cure = f"pass {folder / inside[0]}" if inside else "pass a folder that save_pretrained or trimtab wrote"
    raise ModelError(f"{folder} is not a model: it has no config.json ({found})", cure)


def as_source(text: str, *, adapters: bool = False) -> Source:
    """Resolve a model given by the user to the arguments of transformers; its weights are not checked."""
    found = _find_source(text, adapters)
    if found.endswith(".gguf"):
        require_extra("gguf", "reading a .gguf file")
        return Source(str(Path(found).parent), Path(found).name)
    return Source(found)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' warnings and progress bars inside, and restore its settings on exit.

    Downloads, which can take minutes, keep the Hub's progress bar (on a terminal only).
    """
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging as their_logging

    their_gguf: Any = modeling_gguf_pytorch_utils

    hub_logger = logging.getLogger("huggingface_hub")
    verbosity, hub_level = their_logging.get_verbosity(), hub_logger.level
    hook = their_logging.set_tqdm_hook(_without_bar)
    gguf_bar = their_gguf.tqdm  # the only progress bar that ignores the hook
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


@contextmanager
def model_errors_explained(
    source: str, what: str = "", cure: str = CHECK_FILES, *, folder: str | Path = "", done: str = "loaded"
) -> Iterator[None]:
    """Turn whatever is raised while a model is loaded or used into an error with a cure; arguments as in `explained`.

    The files of a model may contain anything, and the libraries that read them raise almost any type. An accelerator
    that is out of memory says nothing about the files: its error is not changed.
    """
    try:
        yield
    except TrimtabError:
        raise
    except BaseException as error:
        name = type(error).__name__
        if name == "OutOfMemoryError" or not (isinstance(error, Exception) or name == _RUST_PANIC):
            raise
        raise explained(source, error, what, cure, folder=folder, done=done) from error


def explained(
    source: str,
    error: BaseException,
    what: str = "",
    cure: str = CHECK_FILES,
    *,
    folder: str | Path = "",
    done: str = "loaded",
) -> UserError:
    """Turn an exception of transformers into an error with a cure.

    Args:
        source: The model as the user named it.
        error: The exception of transformers.
        what: The part that was loaded, such as "the tokenizer of "; empty for the whole model.
        cure: Cure for errors that are not recognized.
        folder: Its folder, to name a file in it that is damaged; by default the source.
        done: What was done with the model.
    """
    kinds = {type(cause).__name__ for cause in _causes(error)}
    text = str(error)
    if isinstance(error, UserError):
        return error
    failure = import_failure(error)
    if failure is not None:
        return MissingDependency(f"{source}: {failure.problem}", failure.cure)
    if "GatedRepoError" in kinds:
        return ModelError(
            f"{source} is gated: its license has to be accepted first",
            f"accept it on the model's page on the Hub ({source}), then run: hf auth login",
        )
    if "RepositoryNotFoundError" in kinds:
        return ModelError(
            f"the Hub has no model {source!r}, or it is private",
            "check the spelling; for a private model run: hf auth login",
        )
    unreachable = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError", "ConnectionError"}
    if kinds & unreachable:
        return ModelError(
            f"{source!r} is neither a folder nor in the Hub's cache, and the Hub cannot be reached",
            _similar_folder(source) + "pass a folder, or connect once (and unset HF_HUB_OFFLINE) to download it",
        )
    if damage := _first_damage(Path(folder or source)):
        return ModelError(damage, "download or save it again")
    if "trust_remote_code" in text:
        return ModelError(
            f"{source} contains Python code that would be executed on this machine",
            f"if you trust its authors: model: {{name: {source}, trust_remote_code: true}}",
        )
    if isinstance(error, ImportError):
        return MissingDependency(f"{source} needs a package that is not installed: {_first_line(text)}", "install it")
    if "does not recognize this architecture" in text or "model type" in text and "not" in text:
        return ModelError(f"{source}: {_first_line(text)}", "pip install --upgrade transformers")
    if "UnpicklingError" in kinds:
        return ModelError(
            f"the weights of {source} are a pickle with more than tensors, and loading it could execute any code",
            "get the model as safetensors",
        )
    if "SafetensorError" in kinds:
        return ModelError(f"the weights of {source} cannot be read: {_first_line(text)}", "download or save them again")
    if isinstance(error, OSError | ValueError) or type(error) is Exception:
        reason = _first_line(text)
    else:  # such as KeyError: 'name'
        reason = f"{type(error).__name__}: {_first_line(text)}" if text else type(error).__name__
    if "untagged enum" in text:  # tokenizers: a kind of component that it does not know
        cure = "it is damaged, or of another version: pip install --upgrade tokenizers, or save it again"
    return ModelError(f"{what}{source} cannot be {done}: {reason}", cure)


def _first_damage(folder: Path) -> str | None:
    """Name the first file of a local model that cannot be read at all, and why; None if all can be."""
    if folder.suffix == ".gguf" or not folder.is_dir():
        return None
    return next(filter(None, map(file_damage, sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]))), None)


def file_damage(path: Path) -> str | None:
    """Say why a JSON or safetensors file cannot be read; None if it can be."""
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        else:
            with safe_open(path, framework="pt"):
                pass
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        return f"{path} is damaged: {error}"
    return None


def check_text(settings: Any) -> None:
    r"""Raise a UnicodeError if settings contain half a character (`"\ud800"`), which no file or terminal can take."""
    json.dumps(settings, ensure_ascii=False, default=str, skipkeys=True).encode()


def shards_of(folder: Path) -> set[str]:
    """Return the names of the weight files of a sharded model according to its index; empty without an index.

    Raises:
        ModelError: The index names something other than files next to it.
    """
    path = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(path.read_bytes())["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()
    odd = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if odd:
        raise ModelError(f"{path} names the file {odd[0]!r}, which is not in its folder", "download the model again")
    return names


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _first_line(text: str) -> str:
    """The first line of a message, or all of it if the first line ends with a colon."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason given"]
    reason = " ".join(lines) if lines[0].endswith(":") else lines[0]
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} …"
