"""Build the uploader of a run, and the description of the run on the tracking server."""

from pathlib import Path

import torch

from trimtab import __version__
from trimtab.addresses import redact
from trimtab.build.consent import check_address_is_given
from trimtab.build.data import run_name
from trimtab.build.parts import Tokens
from trimtab.engine.engine import Engine
from trimtab.errors import RecipeError, TrimtabError, UserError, as_argument
from trimtab.hardware.environment import describe_environment
from trimtab.log import say
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.runs.consent import add_address
from trimtab.runs.plan import Plan
from trimtab.runs.run_folder import Folder, ReadOnlyRunFolder, find_run, is_own_loop, read_status
from trimtab.runs.tracking_file import RunDescription, Tracking, upload_lock
from trimtab.runs.uploader import NoUploader, Uploader
from trimtab.tracking.mlflow.origin_tags import origin_tags
from trimtab.tracking.mlflow.server import describe_failure, mlflow_environment
from trimtab.tracking.mlflow.uri import check_address, check_store, tracking_uri
from trimtab.tracking.upload.run_upload import flatten_params, upload_run
from trimtab.tracking.upload.uploader import MlflowUploader


def build_uploader(
    recipe: Recipe, plan: Plan, tokens: Tokens, engine: Engine, folder: Folder, higher_is_better: bool
) -> Uploader:
    """Build the uploader of a run's metrics and files; only the main process has one.

    Args:
        recipe: The recipe.
        plan: The plan of the run.
        tokens: The rows, for their digests.
        engine: The engine of the run.
        folder: The run's folder.
        higher_is_better: Whether higher values of the metric that selects the best model are better.
    """
    uri = tracking_uri(recipe.track.uri, folder.path)
    if uri is None or recipe.limits.fast_dev_run or isinstance(folder, ReadOnlyRunFolder):
        return NoUploader()
    about = _about(recipe, folder.path)
    about.tags |= _facts(plan, tokens, engine)
    about.metric, about.higher_is_better = plan.metric, higher_is_better
    return MlflowUploader(folder.path, uri, about)


def _about(recipe: Recipe, folder: Path) -> RunDescription:
    known = (read_status(folder) or {}).get("id")  # so that a folder that has lost tracking.json finds its run again
    return RunDescription(
        **({} if known is None else {"run": known}),
        name=folder.absolute().name,
        experiment=recipe.track.experiment or run_name(recipe),
        params=flatten_params(recipe.model_dump(mode="json")),
        tags=origin_tags(folder),
        log_model=recipe.track.log_model,
        register=recipe.track.register_as,
    )


def _facts(plan: Plan, tokens: Tokens, engine: Engine) -> dict[str, str]:
    """Hardware, versions, data, and the predictions or measurements before the first step."""
    found = describe_environment(str(engine.device), torch.get_num_threads())
    facts = {
        "trimtab.hardware": found["hardware"],
        "trimtab.versions": f"trimtab {__version__}, {found['versions']}",
        "trimtab.data.train": tokens.train.content_digest(),
    }
    if tokens.eval is not None:
        facts["trimtab.data.eval"] = tokens.eval.content_digest()
    facts |= {f"trimtab.plan.{key}": text for key, text in plan.texts.items()}
    known = {name: value for name, value in plan.as_dict().items() if name.startswith(("predicted_", "measured_"))}
    known.pop("measured_steps", None)
    return facts | {f"trimtab.{name}": str(value) for name, value in known.items() if value}


def sync_run(folder: Path, to: str | None = None) -> str:
    """Upload everything in a run's folder to its tracking server, or to another one.

    Args:
        folder: The run's folder.
        to: The server; by default the one it was last uploaded to, else that of its recipe.

    Returns:
        A line that says where it is now.

    Raises:
        RecipeError: There is no run, or no server is known.
        TrimtabError: The server could not be reached, or did not accept everything.
    """
    if to is not None:
        check_address(to)
    status = find_run(folder)
    if status is None:
        raise RecipeError(f"{folder} is not a run", "pass a run's folder; trimtab runs lists them")
    recipe = None if is_own_loop(status) else load_recipe(folder / "recipe.yaml", {}, []).recipe
    with upload_lock(folder, patience_s=5.0):
        tracking = Tracking.read(folder) or Tracking(folder, _about_before(recipe, folder))
        place = folder if recipe is not None else folder.absolute().parent  # loops have one store for all projects
        uri = _server_of(tracking, recipe, place) if to is None else tracking_uri(to, place)
        if to is None and uri not in (None, tracking_uri("local", place)):
            cure = f"if you trust it: trimtab track sync {as_argument(folder)} --to {as_argument(redact(uri))}"
            check_address_is_given(folder, uri, cure)
        elif to is not None and uri is not None:
            add_address(folder, uri)
        if uri is None:
            raise RecipeError(f"{folder} is not tracked", "pass a server: --to http://…, or --to local")
        check_store(uri)
        try:
            with mlflow_environment(uri):
                troubles = upload_run(tracking, uri, say)
        except TrimtabError:
            raise
        except Exception as error:
            trouble = describe_failure(error, uri)
            if trouble.cure:
                raise UserError(trouble.words, trouble.cure) from error
            cure = "repeat the command when the server is up, or pass another server: --to http://…"
            raise TrimtabError(f"{trouble}\n  cure: {cure}") from error  # an outage is not a mistake by the user
    if troubles:
        raise TrimtabError(f"not everything could be sent: {'; '.join(map(str, troubles))}")
    at = tracking.at(uri)
    return f"{folder} is on {at.uri}: experiment {at.experiment}, run {at.run_id}, {at.status}"


def _about_before(recipe: Recipe | None, folder: Path) -> RunDescription:
    """What the folder still contains about a run that was not tracked when it was trained."""
    status = find_run(folder) or {}
    if recipe is None:  # a user's own loop: ROOT/PROJECT/NAME
        path = folder.absolute()
        about = RunDescription(run=status["id"], name=path.name, experiment=path.parent.name, tags=origin_tags(folder))
    else:
        about = _about(recipe, folder)
    about.started_ms = int(status.get("started", 0) * 1000)
    about.metric = status.get("metric_name")
    return about


def _server_of(tracking: Tracking, recipe: Recipe | None, place: Path) -> str | None:
    """The server that a run was last uploaded to; its password, if any, comes from the address in the environment."""
    of_recipe = tracking_uri("local" if recipe is None else recipe.track.uri, place)
    if not tracking.servers:
        return of_recipe
    last = tracking.servers[-1].uri
    return of_recipe if of_recipe is not None and redact(of_recipe) == last else last
