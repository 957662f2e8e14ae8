"""Getting a model back from a tracking server: which run of an experiment is the best, and where its model is.

A name such as `best:imdb` or `models:/reviews@best` means another model tomorrow. It becomes an exact one first, which
a run can write down, and then a folder here: the server's own if its files lie on this machine, else one in the cache.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlparse
from urllib.request import url2pathname

from trimtab.addresses import redact
from trimtab.checkpoint.folder import whole_folder
from trimtab.errors import ModelError, RecipeError
from trimtab.log import say
from trimtab.model.hub import is_adapter
from trimtab.tracking.mlflow.best_model import ALIAS, model_id_of
from trimtab.tracking.mlflow.model_folder import MODEL, quiet_mlflow
from trimtab.tracking.mlflow.ranking import Ranking, all_pages, near_names, ranked
from trimtab.tracking.mlflow.server import mlflow_settings, trouble_of
from trimtab.tracking.mlflow.uri import default_uri, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

BEST, MODELS, _BY = "best:", "models:/", "?metric="
_ID = re.compile(r"m-[0-9a-f]{32}")
_TOKENIZER = "components/tokenizer"


@dataclass(frozen=True)
class TrackedModel:
    """One exact model on a server.

    Args:
        asked: The name that led to it.
        uri: The server.
        exact: `models:/ID`, or `models:/NAME/VERSION`: never another model than this.
        words: What it is, for the user.
    """

    asked: str
    uri: str
    exact: str
    words: str

    def as_dict(self) -> dict[str, str]:
        """For a record of a run; a password in the address is left out."""
        return asdict(self) | {"uri": redact(self.uri)}

    @classmethod
    def from_dict(cls, said: Mapping[str, str], uri: str) -> Self:
        """What a record says; `uri` is the address of today, which may have a password."""
        stored = redact(said["uri"])
        return cls(said["asked"], uri if redact(uri) == stored else stored, said["exact"], said["words"])


def is_on_server(text: str) -> bool:
    """Whether a name of a model means one on a tracking server."""
    return text.startswith((BEST, MODELS))


def rank_runs(experiment: str, metric: str | None = None, uri: str | None = None) -> Ranking:
    """The runs of an experiment, the best first.

    Args:
        experiment: Its name.
        metric: Such as accuracy; None is the one by which its models were chosen.
        uri: The server; None is MLFLOW_TRACKING_URI, or the store below `runs`.

    Raises:
        RecipeError: If there is no such experiment, or no run has a value of that metric.
    """
    with _server(uri) as (client, address):
        return ranked(client, address, experiment, metric)


def find_model(text: str, uri: str | None = None) -> TrackedModel:
    """The exact model that a name means now.

    Args:
        text: `best:EXPERIMENT`, `best:EXPERIMENT?metric=f1`, `models:/NAME@ALIAS`, `models:/NAME/VERSION` or
            `models:/ID`.
        uri: The server; None is MLFLOW_TRACKING_URI, or the store below `runs`.

    Raises:
        UserError: If there is no such thing, with names that are near.
    """
    with _server(uri) as (client, address):
        if text.startswith(BEST):
            return _best_of(client, address, text)
        return _registered(client, address, text)


def fetch_model(found: TrackedModel) -> Path:
    """The folder of a model on this machine; it is fetched into the cache if its files are elsewhere.

    A server whose model is in the cache is not asked.
    """
    place = _cache() / re.sub(r"\W+", "-", f"{redact(found.uri)}-{found.exact}".split("://")[-1])
    if _is_whole(place):
        return place
    with _server(found.uri) as (client, address):
        root = _artifacts_of(client, found.exact)
        here = _local_folder(root)
        if here is not None and _is_whole(here / MODEL) and _has_tokenizer(here):
            return here / MODEL
        say(f"{found.asked}: {found.words} is fetched to {place}")
        with whole_folder(place, marker=None, what="model") as beside:
            _download(root, beside, address)
    return place


def pull_model(text: str, folder: Path, *, metric: str | None = None, uri: str | None = None) -> TrackedModel:
    """Write a model from a server into a folder of its own, as Hugging Face has it.

    Args:
        text: An experiment, or a name as in `find_model`.
        folder: New or empty.
        metric: By which an experiment's best run is found.
        uri: The server.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"{folder} is not empty", "name a new folder")
    if metric is not None and (text.startswith(MODELS) or _BY in text):
        raise RecipeError(f"{text!r} says by itself which model it means", "leave --metric out")
    if not text.startswith(MODELS):
        text = best_name(text.removeprefix(BEST), metric)
    found = find_model(text, uri)
    with _server(found.uri) as (client, address), whole_folder(folder, marker=None, what="model") as place:
        _download(_artifacts_of(client, found.exact), place, address)
    return found


def local_source(text: str, uri: str | None = None) -> str:
    """A name of a model, as what reads folders and the hub understands it: names on a server become folders here."""
    if not is_on_server(text):
        return text
    found = find_model(text, uri)
    folder = fetch_model(found)
    say(f"{text} is {found.words}: {folder}")
    return str(folder)


def best_name(experiment: str, metric: str | None) -> str:
    """The name of an experiment's best model."""
    return f"{BEST}{experiment}" + ("" if metric is None else _BY + metric)


@contextmanager
def _server(uri: str | None) -> Iterator[tuple["MlflowClient", str]]:
    """A client of a server, which does not wait for minutes; its failures are told in our words."""
    address = default_uri() if uri in (None, "local") else str(uri)
    path = sqlite_file(address)
    if path is not None and not path.is_file():  # MLflow would make one
        raise RecipeError(
            f"there is no tracking store {path}",
            "train something first; or --uri ADDRESS, or MLFLOW_TRACKING_URI, for a server",
        )
    with mlflow_settings(), quiet_mlflow():
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        try:
            yield MlflowClient(tracking_uri=address, registry_uri=address), address
        except MlflowException as error:
            trouble = trouble_of(error, address)
            if trouble.kind == "gone":
                text = " ".join(str(error).split())[:200]
                raise ModelError(f"{redact(address)}: {text}", "see what there is: trimtab ui") from error
            cure = trouble.cure or "start it, or name another: --uri ADDRESS, MLFLOW_TRACKING_URI, or track.uri"
            raise ModelError(f"the tracking server did not answer: {trouble.words}", cure) from error


def _best_of(client: "MlflowClient", uri: str, text: str) -> TrackedModel:
    name, asks, metric = text.removeprefix(BEST).partition(_BY)
    if not name or (asks and not metric):
        raise RecipeError(f"{text!r} names no model", "write best:EXPERIMENT, or best:EXPERIMENT?metric=f1")
    ranking = ranked(client, uri, name, metric or None)
    with_value = [run for run in ranking.runs if run.value is not None]
    with_model = next((run for run in with_value if run.model_id is not None), None)
    if with_model is None:
        raise ModelError(
            f"no run of {name} that has a value of {ranking.metric} has logged its model",
            "train with track.log_model: true; or trimtab track sync RUN",
        )
    if with_model is not ranking.winner:
        say(f"{name}: run {ranking.winner.name} is better, but its model was not logged")
    words = f"the model of run {with_model.name}, {ranking.metric} {with_model.value:.4g}"
    return TrackedModel(text, uri, f"{MODELS}{with_model.model_id}", words)


def _registered(client: "MlflowClient", uri: str, text: str) -> TrackedModel:
    rest = text.removeprefix(MODELS)
    if _ID.fullmatch(rest):
        return TrackedModel(text, uri, text, f"the logged model {rest}")
    name, at, alias = rest.partition("@")
    number = ""
    if not at:
        name, _, number = rest.rpartition("/")
        if not name or not number.isdecimal():
            raise RecipeError(f"{text!r} names no version", f"write {MODELS}NAME@{ALIAS}, or {MODELS}NAME/3")
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
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
    known = {model.name: model for model in all_pages(lambda token: client.search_registered_models(page_token=token))}
    if name not in known:
        raise RecipeError(f"{redact(uri)} has no registered model {name!r}", near_names(name, list(known), "it has"))
    if number:
        raise RecipeError(f"{name} has no version {number}", "see its versions with trimtab ui")
    aliases = dict(client.get_registered_model(name).aliases)
    raise RecipeError(f"{name} has no alias {alias!r}", near_names(alias, list(aliases), "it has"))


def _artifacts_of(client: "MlflowClient", exact: str) -> str:
    """Where the files of an exact model are."""
    rest = exact.removeprefix(MODELS)
    if _ID.fullmatch(rest):
        location: str = client.get_logged_model(rest).artifact_location
        return location
    name, _, number = rest.rpartition("/")
    uri: str = client.get_model_version_download_uri(name, number)
    return uri


def _local_folder(uri: str) -> Path | None:
    parts = urlparse(uri)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        return None
    return Path(url2pathname(parts.path))


def _is_whole(folder: Path) -> bool:
    return (folder / "config.json").is_file() or is_adapter(folder)


def _has_tokenizer(root: Path) -> bool:
    """Whether the tokenizer lies beside the model; MLflow puts that of a model of others into a folder of its own."""
    return (root / MODEL / "tokenizer_config.json").is_file() or not (root / _TOKENIZER).is_dir()


def _download(root: str, place: Path, uri: str) -> None:
    """Put the Hugging Face files of an MLflow model into a folder.

    Raises:
        ModelError: If it is no model of transformers.
    """
    from mlflow.artifacts import download_artifacts

    fetched = place / ".fetched"
    here = _local_folder(root)
    if here is None:
        here = Path(download_artifacts(artifact_uri=root, dst_path=str(fetched), tracking_uri=uri))
    model = next((folder for folder in (here / MODEL, here) if _is_whole(folder)), None)
    if model is None:
        raise ModelError(
            f"{root} holds no model of transformers", "trimtab takes models that it, or mlflow.transformers, has logged"
        )
    if model == here / MODEL and not _has_tokenizer(here):
        shutil.copytree(here / _TOKENIZER, place, dirs_exist_ok=True)
    shutil.copytree(model, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns(fetched.name))
    shutil.rmtree(fetched, ignore_errors=True)


def _cache() -> Path:
    place = os.environ.get("TRIMTAB_CACHE") or "~/.cache/trimtab"
    if place == "off":  # tokens need not be kept, but a model has to lie somewhere
        place = "~/.cache/trimtab"
    return Path(place).expanduser() / "models"
