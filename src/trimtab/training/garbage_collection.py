"""Keeps Python's collector of cycles away from where it only costs time.

After the imports and the building of a model half a million objects live, and a full collection, which comes by itself
every few dozen steps, looks at each of them: 0.3 to 0.5 s in which the GPU waits. A planner makes a million small ones
that all live until it is done: looking through them again and again took a quarter of its time.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def older_objects_set_aside() -> Iterator[None]:
    """Inside, collections see only what was made inside. Who has frozen objects already keeps them as they are."""
    if gc.get_freeze_count() or not gc.isenabled():
        yield
        return
    gc.collect()  # what is garbage now would stay until the end
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Inside, nothing is collected: for seconds, in which little garbage is made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
