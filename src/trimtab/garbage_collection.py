"""Control Python's cyclic garbage collector, which otherwise slows down training and planning.

After the imports and the construction of a model half a million objects are alive. A full collection runs every few
dozen steps and visits each of them: 0.3 to 0.5 s during which the GPU waits. A planner allocates a million small
objects that all live until it is done; visiting them repeatedly took a quarter of its time.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude all objects that are alive now from collections. Do nothing if the caller froze or disabled `gc`."""
    if not gc.isenabled() or gc.get_freeze_count():  # counting takes 0.2 s when a million objects are frozen
        yield
        return
    gc.collect()  # frozen garbage would stay alive until the process ends
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable collections for a few seconds, when little garbage is created or nothing may be freed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
