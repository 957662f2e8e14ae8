"""The one logger of trimtab. The library speaks through it and never prints."""

import logging

logger = logging.getLogger("trimtab")
_said: set[str] = set()


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
