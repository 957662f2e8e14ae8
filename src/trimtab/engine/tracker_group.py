"""The trackers of an engine, chosen by `log_with`; only the main process writes to them."""

from typing import Any

from trimtab.errors import RecipeError
from trimtab.tracking.trackers import Tracker, set_up


class TrackerGroup:
    """All trackers of an engine.

    Args:
        trackers: The trackers.
        is_main_process: Whether this process writes to them.
    """

    def __init__(self, trackers: list[Tracker], is_main_process: bool) -> None:
        self.trackers = trackers
        self._active = trackers if is_main_process else []

    def start(self, project_name: str, config: dict[str, Any] | None, settings: dict[str, Any] | None) -> None:
        """Pass each tracker its settings, which validates them on all processes, and start the runs."""
        set_up(self.trackers, settings)
        for tracker in self._active:
            tracker.start(project_name, config)

    def log(self, values: dict[str, Any], step: int | None, log_kwargs: dict[str, Any] | None) -> None:
        """Pass values to every tracker; no tracker supports `log_kwargs`."""
        if log_kwargs:
            names = ", ".join(sorted(log_kwargs))
            raise RecipeError(f"log_kwargs has settings for {names}, which no tracker accepts", "leave log_kwargs out")
        for tracker in self._active:
            tracker.log(values, step)

    def get(self, name: str) -> Tracker:
        """Return the tracker with that name."""
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker
        raise RecipeError(f"there is no tracker {name!r}", f"log_with has {[t.name for t in self.trackers]}")

    def finish(self) -> None:
        """Close every tracker."""
        for tracker in self._active:
            tracker.finish()
