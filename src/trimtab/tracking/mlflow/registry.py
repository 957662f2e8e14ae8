"""Find models on a tracking server, and make them available as local folders.

A name such as `best:imdb` or `models:/reviews@best` can mean another model tomorrow. It is first resolved to an exact
model, which a run records, and then to a folder: the server's own if its files are on this machine, else a cached copy.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlparse
from urllib.request import url2pathname

from trimtab.addresses import redact
from trimtab.checkpoint.export import weight_checksums
from trimtab.checkpoint.folder import atomic_folder
from trimtab.errors import ModelError, RecipeError
from trimtab.log import quiet_package, say
from trimtab.model.best_weights import cached_checksum
from trimtab.model.hub import is_adapter
from trimtab.tracking.mlflow.best_model import ALIAS, NOT_FOUND, WEIGHTS, digest, model_id_of
from trimtab.tracking.mlflow.model_folder import MODEL
from trimtab.tracking.mlflow.ranking import Ranking, all_pages, rank_experiment, suggest_names
from trimtab.tracking.mlflow.server import check_reachable, describe_failure, is_databricks, mlflow_environment
from trimtab.tracking.mlflow.uri import check_address, check_store, default_uri, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

BEST, MODELS, _BY = "best:", "models:/", "?metric="
_ID = re.compile(r"m-[0-9a-f]{32}")
_TOKENIZER = "components/tokenizer"


@dataclass(frozen=True)
class TrackedModel:
    """An exact model on a server.

    Attributes:
        asked: The name that was resolved.
        uri: The server.
        exact: `models:/ID`, or `models:/NAME/VERSION`, which never means another model.
        words: Description for the user.
    """

    asked: str
    uri: str
    exact: str
    words: str

    def as_dict(self) -> dict[str, str]:
        """Return a record for `run.json`, without credentials."""
        return asdict(self) | {"uri": redact(self.uri)}

    @classmethod
    def from_dict(cls, record: Mapping[str, str], uri: str) -> Self:
        """Restore a record; if it names the server `uri`, that address is used, which may have credentials."""
        stored = redact(record["uri"])
        return cls(record["asked"], uri if redact(uri) == stored else stored, record["exact"], record["words"])


def is_record(found: Any) -> bool:
    """Whether a value of `run.json` is what `TrackedModel.as_dict` returns."""
    return isinstance(found, dict) and all(isinstance(found.get(one.name), str) for one in fields(TrackedModel))


def is_tracked_model(text: str) -> bool:
    """Whether the name of a model refers to a tracking server."""
    return text.startswith((BEST, MODELS))


def rank_runs(experiment: str, metric: str | None = None, uri: str | None = None) -> Ranking:
    """Rank the runs of an experiment by a metric on eval rows, best first.

    Args:
        experiment: Its name.
        metric: Metric such as accuracy; None uses the one that selected its models.
        uri: The server; None uses MLFLOW_TRACKING_URI, or the store in `runs`.

    Raises:
        RecipeError: There is no such experiment, or no run has a value of that metric.
    """
    with _server(uri) as (client, address):
        return rank_experiment(client, address, experiment, metric)


def find_model(text: str, uri: str | None = None) -> TrackedModel:
    """Resolve a name to the exact model that it means now.

    Args:
        text: `best:EXPERIMENT`, `best:EXPERIMENT?metric=f1`, `models:/NAME@ALIAS`, `models:/NAME/VERSION` or
            `models:/ID`.
        uri: The server; None uses MLFLOW_TRACKING_URI, or the store in `runs`.

    Raises:
        UserError: There is no such model; the cure suggests similar names.
    """
    with _server(uri) as (client, address):
        return (_find_best if text.startswith(BEST) else _find_registered)(client, address, text)


def fetch_model(found: TrackedModel) -> Path:
    """Return a local folder with a model, downloaded into the cache if needed; a cached model needs no server."""
    cached = _cache() / re.sub(r"\W+", "-", f"{redact(found.uri)}-{found.exact}".split("://")[-1])
    if _has_model(cached):
        return cached
    with _server(found.uri) as (client, address):
        root = _artifacts_of(client, found.exact)
        local = _local_folder(root)
        if local is not None and _has_model(local / MODEL) and _has_tokenizer(local):
            files = sorted((local / MODEL).glob("*.safetensors"))
            _check_weights(client, found.exact, {path.name: cached_checksum(path) for path in files})
            return local / MODEL
        say(f"{found.asked}: {found.words} is downloaded to {cached}")
        with atomic_folder(cached, marker=None, what="model") as temporary:
            _download(root, temporary, address)
            _check_weights(client, found.exact, weight_checksums(temporary))
    return cached


def pull_model(text: str, folder: Path, *, metric: str | None = None, uri: str | None = None) -> TrackedModel:
    """Download a model from a server as a Hugging Face folder.

    Args:
        text: An experiment, or a name as for `find_model`.
        folder: Target; must be empty or missing.
        metric: Metric by which the best run of an experiment is found.
        uri: The server.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder} is not empty", "pass a new folder")
    if metric is not None and (text.startswith(MODELS) or _BY in text):
        raise RecipeError(f"--metric has no effect on {text!r}, which names a model", "remove --metric")
    if not text.startswith(MODELS):
        text = best_name(text.removeprefix(BEST), metric)
    found = find_model(text, uri)
    with _server(found.uri) as (client, address), atomic_folder(folder, marker=None, what="model") as temporary:
        _download(_artifacts_of(client, found.exact), temporary, address)
        _check_weights(client, found.exact, weight_checksums(temporary))
    return found


def local_source(text: str, uri: str | None = None) -> str:
    """Replace the name of a model on a server with a local folder; other names are returned unchanged."""
    if not is_tracked_model(text):
        return text
    found = find_model(text, uri)
    folder = fetch_model(found)
    say(f"{text} is {found.words}: {folder}")
    return str(folder)


def best_name(experiment: str, metric: str | None) -> str:
    """Return the name of an experiment's best model."""
    return f"{BEST}{experiment}" + ("" if metric is None else _BY + metric)


@contextmanager
def _server(uri: str | None) -> Iterator[tuple["MlflowClient", str]]:
    """Open a client with short timeouts, and translate its exceptions."""
    address = default_uri() if uri in (None, "local") else str(uri)
    check_address(address)
    path = sqlite_file(address)
    if path is not None and not path.is_file():  # MLflow would create it
        others = [*Path().glob(path.name), *sorted(Path().glob(f"*/{path.name}"))]  # of runs with an --out of their own
        cure = f"--uri sqlite:///{others[0]}" if others else "train something first"
        raise RecipeError(
            f"there is no tracking store {path}", f"{cure}; or --uri ADDRESS, or MLFLOW_TRACKING_URI, for a server"
        )
    check_store(address)
    with mlflow_environment(address), quiet_package("mlflow"):
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        check_reachable(address)
        try:
            registry = None if is_databricks(address) else address  # None: Unity Catalog of the workspace
            yield MlflowClient(tracking_uri=address, registry_uri=registry), address
        except MlflowException as error:
            failure = describe_failure(error, address)
            if failure.is_gone:
                raise ModelError(failure.words, "see what exists: trimtab ui") from error
            cure = failure.cure or "start it, or use another: --uri ADDRESS, MLFLOW_TRACKING_URI, or track.uri"
            raise ModelError(f"the tracking server did not respond: {failure.words}", cure) from error


def _find_best(client: "MlflowClient", uri: str, text: str) -> TrackedModel:
    name, separator, metric = text.removeprefix(BEST).partition(_BY)
    if not name or (separator and not metric):
        raise RecipeError(f"{text!r} is not the name of a model", "write best:EXPERIMENT, or best:EXPERIMENT?metric=f1")
    ranking = rank_experiment(client, uri, name, metric or None)
    best = next((run for run in ranking.runs if run.value is not None and run.model_id is not None), None)
    if best is None:
        raise ModelError(
            f"no run of {name} that has a value of {ranking.metric} has logged its model",
            "train with track.log_model: true; or trimtab track sync RUN",
        )
    if best is not ranking.winner:
        say(f"{name}: run {ranking.winner.name} is better, but its model was not logged")
    words = f"the model of run {best.name}, {ranking.metric} {best.value:.4g}"
    return TrackedModel(text, uri, f"{MODELS}{best.model_id}", words)


def _find_registered(client: "MlflowClient", uri: str, text: str) -> TrackedModel:
    rest = text.removeprefix(MODELS)
    if _ID.fullmatch(rest):
        return TrackedModel(text, uri, text, f"the logged model {rest}")
    name, at, alias = rest.partition("@")
    number = ""
    if not at:
        name, _, number = rest.rpartition("/")
        if not name or not number.isdecimal():
            raise RecipeError(
                f"{text!r} is not the name of a version", f"write {MODELS}NAME@{ALIAS}, or {MODELS}NAME/3"
            )
    version = _version(client, uri, name, alias, number)
    exact = MODELS + (model_id_of(version) or f"{name}/{version.version}")
    return TrackedModel(text, uri, exact, f"version {version.version} of {name}")


def _version(client: "MlflowClient", uri: str, name: str, alias: str, number: str) -> Any:
    from mlflow.exceptions import MlflowException

    try:
        if number:
            return client.get_model_version(name, number)
        return client.get_model_version_by_alias(name, alias)
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
    names = [model.name for model in all_pages(client.search_registered_models)]
    if name not in names:
        raise RecipeError(f"{redact(uri)} has no registered model {name!r}", suggest_names(name, names, "it has"))
    if number:
        raise RecipeError(f"{name} has no version {number}", "list its versions: trimtab ui")
    aliases = list(client.get_registered_model(name).aliases)
    raise RecipeError(f"{name} has no alias {alias!r}", suggest_names(alias, aliases, "it has"))


def _artifacts_of(client: "MlflowClient", exact: str) -> str:
    """Return the location of the files of an exact model."""
    rest = exact.removeprefix(MODELS)
    if _ID.fullmatch(rest):
        return str(client.get_logged_model(rest).artifact_location)
    name, _, number = rest.rpartition("/")
    return str(client.get_model_version_download_uri(name, number))


def _check_weights(client: "MlflowClient", exact: str, checksums: Mapping[str, str]) -> None:
    """Refuse weights that are not those that were logged."""
    model_id = exact.removeprefix(MODELS)
    expected = client.get_logged_model(model_id).tags.get(WEIGHTS) if _ID.fullmatch(model_id) else None
    if expected is not None and digest(checksums) != expected:
        raise ModelError(
            f"the weights of {exact} on the tracking server are damaged: they are not those that were logged",
            "log the model again: delete it in `trimtab ui`, then trimtab track sync RUN",
        )


def _local_folder(uri: str) -> Path | None:
    parts = urlparse(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return Path(url2pathname(parts.path))


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or is_adapter(folder)


def _has_tokenizer(root: Path) -> bool:
    """Whether the tokenizer is in the model's folder; `mlflow.transformers` itself saves it in another one."""
    return (root / MODEL / "tokenizer_config.json").is_file() or not (root / _TOKENIZER).is_dir()


def _download(root: str, target: Path, uri: str) -> None:
    """Copy the Hugging Face files of an MLflow model into a folder.

    Raises:
        ModelError: It is not a transformers model.
    """
    from mlflow.artifacts import download_artifacts

    downloaded = target / ".fetched"
    local = _local_folder(root)
    if local is None:
        local = Path(download_artifacts(artifact_uri=root, dst_path=str(downloaded), tracking_uri=uri))
    model = next((folder for folder in (local / MODEL, local) if _has_model(folder)), None)
    if model is None:
        raise ModelError(f"{root} has no transformers model", "log it with trimtab or mlflow.transformers")
    if model == local / MODEL and not _has_tokenizer(local):
        shutil.copytree(local / _TOKENIZER, target, dirs_exist_ok=True)
    shutil.copytree(model, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(downloaded.name))
    shutil.rmtree(downloaded, ignore_errors=True)


def _cache() -> Path:
    folder = os.environ.get("TRIMTAB_CACHE") or "off"
    if folder == "off":  # the cache is for tokens: a downloaded model needs a folder
        folder = "~/.cache/trimtab"
    return Path(os.path.expanduser(folder)) / "models"
