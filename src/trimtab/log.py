"""The one logger of trimtab. The library speaks through it and never prints."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("trimtab")
_said: set[str] = set()


def _is_wanted(record: logging.LogRecord) -> bool:
    """Keep a warning of bitsandbytes away from users, who can do nothing with it.

    On CPUs with bf16 instructions it says at every import that it looked in vain for a faster kernel on a hub. PEFT
    imports it wherever it is installed, so that commands which have no use for it would show that line.
    """
    return "gemm_4bit_forward" not in record.msg if isinstance(record.msg, str) else True


logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(_is_wanted)


def say(message: str) -> None:
    """Tell the user something worth a line, also where logging was never configured.

    Python shows warnings only by default; a plain handler on our own logger makes information visible without
    touching the root logger. An application that configures logging keeps full control.
    """
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("trimtab: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    logger.info(message)


def say_once(message: str) -> None:
    """Like `say`, but a message that was said before in this process is not repeated."""
    if message not in _said:
        _said.add(message)
        say(message)


@contextmanager
def unheard() -> Iterator[None]:
    """Inside, nothing is said, and nothing counts as said: for what is only tried."""
    before, was_disabled = set(_said), logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = was_disabled
        _said.intersection_update(before)


def speak_only_to_file(rank: int) -> None:
    """Of several processes one speaks: this one writes to a file of its own, or, where no folder is known, nowhere.

    The folder is that of the environment's TRIMTAB_LOG_DIR. Warnings are shown in any case.
    """
    for before in list(logger.handlers):
        logger.removeHandler(before)
    folder = os.environ.get("TRIMTAB_LOG_DIR")
    handler: logging.Handler = logging.NullHandler()
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(Path(folder) / f"rank-{rank}.log", delay=True, encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger.addHandler(handler)
    loud = logging.StreamHandler()
    loud.setLevel(logging.WARNING)
    logger.addHandler(loud)
    logger.setLevel(logging.INFO)
    logger.propagate = False
