"""A logger for scripts on several processes: the main process speaks, unless a call says otherwise."""

import logging
import os
from typing import Any

from trimtab.accelerate.latest import PartialState


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls take `main_process_only` (True if left out) and `in_order`: one process after the other."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log, where this process should."""
        only_main = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)  # the line of the caller, not this one
        state = PartialState()
        if in_order:
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self.logger.log(level, msg, *args, **kwargs)
                state.wait_for_everyone()
        elif state.is_main_process or not only_main:
            self.logger.log(level, msg, *args, **kwargs)

    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """A warning that is not repeated."""
        said = self.__dict__.setdefault("_said", set())
        if msg not in said:
            said.add(msg)
            self.warning(msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """The logger of that name, for several processes."""
    log_level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})
