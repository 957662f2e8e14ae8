"""Keeps Python's cyclic garbage collector from costing time, and from running where it must not.

After the imports and the construction of a model half a million objects are alive. A full collection runs every few
dozen steps and visits each of them: 0.3 to 0.5 s during which the GPU waits. A planner allocates a million small
objects that all live until it is done; visiting them again and again took a quarter of its time.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude all objects that are alive now from collections. Does nothing if the caller froze or disabled `gc`."""
    if not gc.isenabled() or gc.get_freeze_count():  # counting takes 0.2 s where a million objects are frozen
        yield
        return
    gc.collect()  # garbage that is frozen would stay until the end
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable collections: for a few seconds in which little garbage arises, or nothing may be freed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
