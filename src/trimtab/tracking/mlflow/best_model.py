"""Log the best model of a run to the tracking server, and register it if a name is given.

The alias `best` of a registered model moves only to a version that is better by the same metric.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.checkpoint.export import read_facts, weight_checksums
from trimtab.checkpoint.folder import temporary_folder
from trimtab.errors import UserError
from trimtab.log import quiet_package, say
from trimtab.model.hub import is_adapter
from trimtab.tracking.mlflow.model_folder import (
    fingerprint,
    inspect_model,
    write_mlflow_folder,
    write_plain_folder,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS = "best"
METRIC, VALUE, HIGHER_IS_BETTER = "trimtab.metric", "trimtab.value", "trimtab.higher_is_better"
METRICS, STEP, NOTE = "trimtab.metrics", "trimtab.step", "trimtab.note"
WEIGHTS = "trimtab.weights"  # digest of the checksums of the files of weights
MODEL_ID = "trimtab.model_id"
NOT_FOUND = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # error codes for an unknown alias or version
_FINGERPRINT = "trimtab.fingerprint"
_MAX_TAG = 5000  # characters; MLflow's own limit is higher


def log_best_model(
    client: "MlflowClient",
    run_id: str,
    folder: Path,
    *,
    register: str | None = None,
    metric: str,
    value: float | None,
    higher_is_better: bool | None,
    tell: Callable[[str], None] = say,
) -> str | None:
    """Log a model with its run, and register it; a model that the server already has is not uploaded again.

    Args:
        client: Client of the server that has the run.
        run_id: The run.
        folder: Hugging Face folder of the model or adapter.
        register: Name under which to register a version; None registers nothing.
        metric: Metric that has selected the model.
        value: Its value; None if nothing was evaluated.
        higher_is_better: Its direction; None if unknown, which rules out the alias `best`.
        tell: Called with each line for the user.

    Returns:
        The address `models:/ID`; None if the folder contains no model.
    """
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        return None
    facts = read_facts(folder)
    tags = {
        METRIC: metric,
        **({} if higher_is_better is None else {HIGHER_IS_BETTER: str(higher_is_better).lower()}),
        **({} if value is None or not math.isfinite(value) else {VALUE: repr(float(value))}),
    }
    step_tags = {METRICS: json.dumps(facts.get("metrics") or {})[:_MAX_TAG], STEP: str(facts.get("step", ""))}
    mark = fingerprint(folder)
    with quiet_package("mlflow"):
        run = client.get_run(run_id)
        model = _find_logged(client, run, mark)
        if model is None:
            model = client.create_logged_model(
                experiment_id=run.info.experiment_id,
                name="model",
                source_run_id=run_id,
                tags={**tags, **step_tags, _FINGERPRINT: mark, WEIGHTS: digest(weight_checksums(folder))},
                model_type=str(facts.get("task", "")) or None,
            )
        if str(model.status) != "READY":
            _upload(client, run, model, folder, int(facts.get("step") or 0), tell)
        if register is not None:
            tell(_register(client, register, model, run_id, tags))
    return f"models:/{model.model_id}"


def digest(checksums: Mapping[str, str]) -> str:
    """Combine the checksums of the files of a model into one that fits into a tag."""
    return f"sha256:{hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()}"


def _find_logged(client: "MlflowClient", run: Any, mark: str) -> Any:
    """Return the same model of the same run, uploaded completely or partially; None if there is none."""
    found = client.search_logged_models(
        [run.info.experiment_id],
        filter_string=f"source_run_id = '{run.info.run_id}' AND tags.`{_FINGERPRINT}` = '{mark}'",
    )
    return next((model for model in found if str(model.status) != "FAILED"), None)


def _upload(client: "MlflowClient", run: Any, model: Any, folder: Path, step: int, tell: Callable[[str], None]) -> None:
    from mlflow.entities import LoggedModelOutput

    run_id, model_id = run.info.run_id, model.model_id
    known = [output.model_id for output in (run.outputs.model_outputs if run.outputs else [])]
    if model_id not in known:
        client.log_outputs(run_id, [LoggedModelOutput(model_id, step)])
    ids = {"run_id": run_id, "model_id": model_id, "model_uuid": model_id, "artifact_path": model.artifact_location}
    with temporary_folder("upload") as temporary:
        target = temporary / "model"
        note = _write(folder, target, ids)
        if note is not None:
            client.set_logged_model_tags(model_id, {NOTE: note[:_MAX_TAG]})
            tell(note)
        client.log_model_artifacts(model_id, str(target))
    client.finalize_logged_model(model_id, "READY")


def _write(folder: Path, target: Path, ids: Mapping[str, Any]) -> str | None:
    """Write an MLflow model, or the plain files if that fails for any reason: the model must reach the server."""
    from mlflow.exceptions import MlflowException

    expected = (UserError, MlflowException, ValueError, LookupError, TypeError, AttributeError, ImportError)
    try:
        return write_mlflow_folder(inspect_model(folder), target, **ids)
    except (*expected, RuntimeError) as error:
        why = error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        write_plain_folder(folder, target, **ids)
        return f"MLflow can neither load nor serve this model ({why}); its plain files are logged"


def _register(client: "MlflowClient", name: str, model: Any, run_id: str, tags: Mapping[str, str]) -> str:
    """Register a version, unless it exists, and move the alias to it if it is the best.

    Returns:
        A line for the user.
    """
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):
        client.create_registered_model(name)  # usually it exists; for any other error the next call raises
    found = client.search_model_versions(f"name = '{name}'")  # Unity Catalog filters by nothing else, without tags
    versions = [client.get_model_version(name, one.version) for one in found if one.run_id == run_id]
    version = next((known for known in versions if model_id_of(known) == model.model_id), None)
    if version is None:
        # The source is not models:/ID, which a store without a server would look up on MLflow's default server.
        version = client.create_model_version(
            name,
            model.artifact_location,
            run_id,
            tags={**tags, MODEL_ID: model.model_id},
            model_id=model.model_id,
            await_creation_for=60,
        )
    try:
        current = client.get_model_version_by_alias(name, ALIAS)
    except MlflowException as error:
        if error.error_code not in NOT_FOUND:
            raise
        current = None
    label = f"{name}: version {version.version}"
    is_best = current is not None and str(current.version) == str(version.version)
    reason = None if is_best else _why_not_best(tags, current)
    if reason is not None:
        return f"{label} is registered, {reason}"
    if not is_best:
        client.set_registered_model_alias(name, ALIAS, version.version)
    value = f" ({tags[METRIC]} {float(tags[VALUE]):.4g})" if VALUE in tags else ""  # a user may have set the alias
    return f"{label} is {ALIAS}{value}"


def model_id_of(version: Any) -> str | None:
    """Return the id of the logged model of a version; None if the version was registered from files."""
    found: str | None = version.tags.get(MODEL_ID) or version.model_id
    return found


def _why_not_best(tags: Mapping[str, str], current: Any) -> str | None:
    """Return why a version does not get the alias; None if it does."""
    if VALUE not in tags:
        return f"without the alias {ALIAS}: nothing was evaluated"
    if HIGHER_IS_BETTER not in tags:
        return f"without the alias {ALIAS}: it is unknown whether a higher {tags[METRIC]} is better"
    if current is None:
        return None
    there, metric = current.tags, tags[METRIC]
    stays = f"and the alias {ALIAS} stays with version {current.version}"
    if there.get(METRIC) != metric or there.get(HIGHER_IS_BETTER) != tags[HIGHER_IS_BETTER]:
        return f"{stays}, which was selected by {there.get(METRIC, 'an unknown metric')} and not by {metric}"
    try:
        old = float(there[VALUE])
    except (LookupError, ValueError):
        return f"{stays}, whose {metric} is unknown"
    new = float(tags[VALUE])
    if (new > old) if tags[HIGHER_IS_BETTER] == "true" else (new < old):
        return None
    return f"{stays} ({metric} {old:.4g}, here {new:.4g})"
