"""The logger of trimtab. The library logs through it and never prints."""

import functools
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TextIO, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger("trimtab")
_logged_once: set[str] = set()


_CONTROL = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))} | {
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def printable(text: str, keep: str = "") -> str:
    """Replace control characters, with which a label or a name could clear or retitle a terminal, by escapes.

    Args:
        text: The text.
        keep: Control characters to leave, such as line breaks.
    """
    return text.translate({number: escape for number, escape in _CONTROL.items() if chr(number) not in keep})


def for_stream(text: str, stream: TextIO | None) -> str:
    """Return a text as it may be written to a stream: on a terminal, control characters except line breaks are escaped.

    Files and pipes get the text unchanged. Everything that may contain text from data, models or files passes here, or
    through `screen.build_console` where rich draws it.
    """
    return printable(text, keep="\n\t") if stream is not None and stream.isatty() else text


class _Muted(threading.local):
    """Whether log output of the current thread is suppressed."""

    now = False


_muted = _Muted()
logger.addFilter(lambda _: not _muted.now)


# Warnings of other packages that users cannot act on, by logger; a part of the message identifies them.
_FOREIGN_NOISE = {
    # PEFT and transformers import bitsandbytes and torchao whenever they are installed. Without these filters,
    # unrelated commands would warn about a missing faster kernel, or about kernels for other machines.
    "bitsandbytes.backends.cpu.ops": "gemm_4bit_forward",
    "torchao": "Failed to load",
    "torch.utils._pytree": "is an Enum subclass",
    # repeated for every matrix product with 8-bit weights
    "bitsandbytes.autograd._functions": "inputs will be cast",
}


def _is_not(noise: str) -> Callable[[logging.LogRecord], bool]:
    return lambda record: noise not in record.msg if isinstance(record.msg, str) else True


for _name, _noise in _FOREIGN_NOISE.items():
    logging.getLogger(_name).addFilter(_is_not(_noise))


def _show_unless_configured() -> logging.Handler | None:
    """Print messages unless the application has configured logging; return the handler that does it, if any."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = _Printed()
        handler.setFormatter(logging.Formatter("trimtab: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    return next((handler for handler in logger.handlers if isinstance(handler, _Printed)), None)


class _Printed(logging.StreamHandler[TextIO]):
    """Prints messages of an application that has not configured logging."""


def quiet_on_request(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function with `progress="quiet"` print errors only; handlers of the application get every message."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        printed = _show_unless_configured() if kwargs.get("progress") == "quiet" else None
        if printed is None:
            return function(*args, **kwargs)
        before = printed.level
        printed.setLevel(logging.ERROR)
        try:
            return function(*args, **kwargs)
        finally:
            printed.setLevel(before)

    return called


def say(message: str) -> None:
    """Log a message at level INFO, visible even if the application never configured logging.

    By default Python shows warnings only. If neither our logger nor the root logger has a handler, a stream handler is
    added to our logger. Nothing is added if the application has configured logging.
    """
    _show_unless_configured()
    logger.info(printable(message, keep="\n\t"))


def log_info_once(message: str) -> None:
    """Log a message with `say` unless this process has logged it before."""
    if message not in _logged_once and not _muted.now:
        _logged_once.add(message)
        say(message)


@contextmanager
def muted() -> Iterator[None]:
    """Suppress log output of this thread during trial runs; `log_info_once` does not count suppressed messages."""
    before, _muted.now = _muted.now, True
    try:
        yield
    finally:
        _muted.now = before


def is_muted() -> bool:
    """Whether log output of this thread is suppressed."""
    return _muted.now


@contextmanager
def unmuted() -> Iterator[None]:
    """Show log output inside `muted`, for messages about the result of a trial run."""
    before, _muted.now = _muted.now, False
    try:
        yield
    finally:
        _muted.now = before


@contextmanager
def quiet_package(name: str) -> Iterator[None]:
    """Suppress Python warnings and a package's log messages below ERROR, for calls whose warnings users cannot act on.

    Args:
        name: Name of the package's logger.
    """
    theirs = logging.getLogger(name)
    level = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        theirs.setLevel(level)


def log_to_file_only(rank: int) -> None:
    """Log this process's INFO messages only to `$TRIMTAB_LOG_DIR/rank-N.log`, or nowhere if the variable is not set.

    Every rank except the main process calls it. Warnings still go to stderr.
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
    warnings_handler = logging.StreamHandler()
    warnings_handler.setLevel(logging.WARNING)
    logger.addHandler(warnings_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
