"""From a recipe to the parts of a run. Only this package reads the recipe; every part takes plain arguments."""

from trimtab.build.data import build_data, build_tokens, run_name
from trimtab.build.engine import build_engine, compare_processes
from trimtab.build.model import build_freezing, build_model, build_skeleton, place_model
from trimtab.build.parts import Data, Loaded, Tokens
from trimtab.build.paths import with_absolute_paths, with_moved_paths
from trimtab.build.plan import build_plan
from trimtab.build.tracked_model import find_tracked_model, with_model_here
from trimtab.build.tracking import build_uploader, sync_run
from trimtab.build.training import build_trainer

__all__ = [
    "Data",
    "Loaded",
    "Tokens",
    "build_uploader",
    "build_data",
    "build_engine",
    "build_freezing",
    "build_model",
    "build_plan",
    "build_skeleton",
    "build_tokens",
    "build_trainer",
    "compare_processes",
    "find_tracked_model",
    "place_model",
    "run_name",
    "sync_run",
    "with_absolute_paths",
    "with_model_here",
    "with_moved_paths",
]
