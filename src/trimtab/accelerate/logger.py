"""A logger for several processes: only the main process logs by default."""

import logging
import os
from typing import Any

from trimtab.accelerate.shared_state import PartialState


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls accept `main_process_only` (default True) and `in_order` (one process after another)."""

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log on the processes that the call selects."""
        only_main = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)  # report the line of the caller
        state = PartialState()
        if in_order:
            for rank in range(state.num_processes):
                if rank == state.process_index:
                    self.logger.log(level, msg, *args, **kwargs)
                state.wait_for_everyone()
        elif state.is_main_process or not only_main:
            self.logger.log(level, msg, *args, **kwargs)

    def warning_once(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Log a warning once per message."""
        logged = self.__dict__.setdefault("_logged", set())
        if msg not in logged:
            logged.add(msg)
            self.warning(msg, *args, **{"stacklevel": 3, **kwargs})


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger for several processes."""
    log_level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    logger = logging.getLogger(name)
    if log_level is not None:
        logger.setLevel(log_level.upper())
        logger.root.setLevel(log_level.upper())
    return MultiProcessAdapter(logger, {})
