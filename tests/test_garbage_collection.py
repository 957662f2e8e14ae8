import gc
import weakref

import pytest

from trimtab.garbage_collection import gc_frozen


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector(_counts_frozen_objects):
    """Neither frozen nor disabled, as these tests need it."""
    gc.unfreeze()
    assert gc.isenabled()
    yield
    gc.freeze()


def test_older_objects_are_frozen_and_garbage_is_collected_first():
    garbage = weakref.ref(Node())
    older = Node()
    with gc_frozen():
        assert garbage() is None
        assert not any(thing is older for thing in gc.get_objects())
        made_inside = weakref.ref(Node())
        gc.collect()
        assert made_inside() is None, "what is made inside is still collected"
    assert any(thing is older for thing in gc.get_objects())
    assert gc.get_freeze_count() == 0


def test_an_error_inside_ends_it_too():
    with pytest.raises(KeyError), gc_frozen():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_nothing_changes_if_the_caller_froze_or_disabled_gc():
    gc.freeze()
    try:
        later = Node()
        with gc_frozen():
            assert any(thing is later for thing in gc.get_objects()), "it was frozen, too"
        assert gc.get_freeze_count() > 0  # fewer than before, where another thread has let go of some
    finally:
        gc.unfreeze()
    gc.disable()
    try:
        with gc_frozen():
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
