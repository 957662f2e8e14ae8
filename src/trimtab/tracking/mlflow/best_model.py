"""The best model of a run goes to the tracking server: logged with the run, and registered where a name is given.

The alias `best` of a registered name moves only to a version that beats the one that has it, by the same metric.
"""

import json
import math
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.checkpoint.export import read_facts
from trimtab.errors import UserError
from trimtab.log import say
from trimtab.model.hub import is_adapter
from trimtab.tracking.mlflow.model_folder import (
    fingerprint,
    kind_of_folder,
    quiet_mlflow,
    write_mlflow_folder,
    write_plain_folder,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient

ALIAS = "best"
METRIC, VALUE, HIGHER_IS_BETTER = "trimtab.metric", "trimtab.value", "trimtab.higher_is_better"
METRICS, STEP, NOTE = "trimtab.metrics", "trimtab.step", "trimtab.note"
MODEL_ID = "trimtab.model_id"
_FINGERPRINT = "trimtab.fingerprint"
_MAX_TAG = 5000  # characters; MLflow's own limit is higher


def log_best_model(
    client: "MlflowClient",
    run_id: str,
    folder: Path,
    *,
    name: str = "model",
    register: str | None = None,
    metric: str,
    value: float | None,
    higher_is_better: bool | None,
    tell: Callable[[str], None] = say,
) -> str | None:
    """Log a model with its run, and register it. What is there already is not sent again.

    Args:
        client: Of the server that has the run.
        run_id: The run.
        folder: The model, or the adapter, as Hugging Face writes it.
        name: The model's name within the run.
        register: The name under which a version is registered; None registers nothing.
        metric: By which it was chosen.
        value: Of that metric; None where nothing was evaluated.
        higher_is_better: Whether more of the metric is better; None where nobody knows, and it cannot be the best.
        tell: Takes lines for the user.

    Returns:
        Its address, `models:/ID`; None where there is no model in the folder.
    """
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        return None
    facts = read_facts(folder)
    tags = {
        METRIC: metric,
        **({} if higher_is_better is None else {HIGHER_IS_BETTER: str(higher_is_better).lower()}),
        **({} if value is None or not math.isfinite(value) else {VALUE: repr(float(value))}),
    }
    about_step = {METRICS: json.dumps(facts.get("metrics") or {})[:_MAX_TAG], STEP: str(facts.get("step", ""))}
    mark = fingerprint(folder)
    with quiet_mlflow():
        run = client.get_run(run_id)
        model = _logged_before(client, run, mark)
        if model is None:
            model = client.create_logged_model(
                experiment_id=run.info.experiment_id,
                name=name,
                source_run_id=run_id,
                tags={**tags, **about_step, _FINGERPRINT: mark},
                model_type=str(facts.get("task", "")) or None,
            )
        if str(model.status) != "READY":
            _upload(client, run, model, folder, int(facts.get("step") or 0), tell)
        if register is not None:
            tell(_register(client, register, model, run_id, tags))
    return f"models:/{model.model_id}"


def _logged_before(client: "MlflowClient", run: Any, mark: str) -> Any:
    """The same model of the same run, whole or half sent."""
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
    about = {"run_id": run_id, "model_id": model_id, "model_uuid": model_id, "artifact_path": model.artifact_location}
    with tempfile.TemporaryDirectory(prefix="trimtab-model-") as temporary:
        place = Path(temporary) / "model"
        note = _write(folder, place, about)
        if note is not None:
            client.set_logged_model_tags(model_id, {NOTE: note[:_MAX_TAG]})
            tell(note)
        client.log_model_artifacts(model_id, str(place))
    client.finalize_logged_model(model_id, "READY")


def _write(folder: Path, place: Path, about: Mapping[str, Any]) -> str | None:
    """An MLflow model, or, of a model that cannot become one, its plain files: the model is never lost for that."""
    from mlflow.exceptions import MlflowException

    unknown = (UserError, MlflowException, ValueError, LookupError, TypeError, AttributeError, ImportError)
    try:
        return write_mlflow_folder(kind_of_folder(folder), place, **about)
    except (*unknown, RuntimeError) as error:
        why = error.problem if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        write_plain_folder(folder, place, **about)
        return f"MLflow cannot load or serve this model ({why}); its files are logged as they are"


def _register(client: "MlflowClient", name: str, model: Any, run_id: str, tags: Mapping[str, str]) -> str:
    """Make a version of a name, if there is none, and give it the alias, if it is the best.

    Returns:
        What was done, for the user.
    """
    from mlflow.exceptions import MlflowException

    with suppress(MlflowException):
        client.create_registered_model(name)  # else it is there; if it is not, the next call says why
    before = client.search_model_versions(f"name = '{name}' AND run_id = '{run_id}'")
    version = next((found for found in before if model_id_of(found) == model.model_id), None)
    if version is None:
        # Not models:/ID as its source: a store that is used without a server would look for it on MLflow's default one.
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
        if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            raise
        current = None
    which = f"{name}: version {version.version}"
    is_best = current is not None and str(current.version) == str(version.version)
    reason = None if is_best else _why_not(tags, current)
    if reason is not None:
        return f"{which} is registered, {reason}"
    if not is_best:
        client.set_registered_model_alias(name, ALIAS, version.version)
    value = f" ({tags[METRIC]} {float(tags[VALUE]):.4g})" if VALUE in tags else ""  # else somebody has chosen it
    return f"{which} is {ALIAS}{value}"


def model_id_of(version: Any) -> str | None:
    """The logged model that a version is; None of one that others have registered from files."""
    found: str | None = version.tags.get(MODEL_ID) or version.model_id
    return found


def _why_not(tags: Mapping[str, str], current: Any) -> str | None:
    """Why a version does not get the alias; None if it does."""
    if VALUE not in tags:
        return f"without the alias {ALIAS}: nothing was evaluated"
    if HIGHER_IS_BETTER not in tags:
        return f"without the alias {ALIAS}: nobody knows whether more {tags[METRIC]} is better"
    if current is None:
        return None
    there, metric = current.tags, tags[METRIC]
    stays = f"and the alias {ALIAS} stays with version {current.version}"
    if there.get(METRIC) != metric or there.get(HIGHER_IS_BETTER) != tags[HIGHER_IS_BETTER]:
        return f"{stays}, which was chosen by {there.get(METRIC, 'no metric that is known')} and not by {metric}"
    try:
        old = float(there[VALUE])
    except (LookupError, ValueError):
        return f"{stays}, whose {metric} is not known"
    new = float(tags[VALUE])
    if (new > old) if tags[HIGHER_IS_BETTER] == "true" else (new < old):
        return None
    return f"{stays} ({metric} {old:.4g}, here {new:.4g})"
