"""The memory of micro-batches that are replayed from CUDA graphs.

Memory allocated during a capture stays reserved in a separate memory pool for the whole run. Only replays can use it:
clipping, the optimizer and evaluations need memory outside the pool. Gradients are allocated once, outside the pool.

The pool is predicted for the largest micro-batch size. Smaller sizes are assumed to fit into the memory that the
largest one leaves free after its capture, and the inputs that every size keeps, a few numbers per token, are not
counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.planner.allocator import EMPTY_CACHE, peaks
from trimtab.planner.trace.recorder import Birth, Event, Trace

_POOL = -2  # the storage that represents the pool
_IN_GRAPHS = " in graphs"  # suffix of the name of a workspace of the capturing stream
_STAYS = ("weights", "inputs", "state", "library")


@dataclass(frozen=True)
class GraphMemory:
    """The allocations of a step whose micro-batches are captured.

    Attributes:
        before: Allocations outside the pool, until the first capture: the same micro-batch runs once without a graph
            and is undone, then gradients are allocated for the whole run.
        pool: Allocations in the pool, while the largest micro-batch is captured.
        after: Allocations outside the pool from then on.
    """

    before: tuple[Event, ...]
    pool: tuple[Event, ...]
    after: tuple[Event, ...]

    def events(self, *, expandable: bool = True) -> tuple[Event, ...]:
        """All allocations; the pool is a single one that is never freed.

        A capture cannot release memory to stay under a limit, so the pool has the size that it gets without a limit.
        """
        held = peaks(self.pool, expandable=expandable)[1]
        return (*self.before, EMPTY_CACHE, Event(_POOL, held), *self.after)

    def alongside(self, trace: Trace) -> "GraphMemory":
        """The allocations of other work while the pool is held, including the workspaces, which are in the pool."""
        in_pool = _graph_workspaces(trace)
        return GraphMemory((), self.pool, tuple(event for event in trace.events if event.storage not in in_pool))


def graph_memory(trace: Trace) -> GraphMemory:
    """Split the allocations of a step of two micro-batches: the first one runs without a graph, the second is captured.

    Args:
        trace: The step, `with_graph_workspaces`.
    """
    ends = [mark.event for mark in trace.marks if mark.name == "backward ends"]
    first, last = ends[len(ends) // 2 - 1], ends[-1]
    captured = _graph_workspaces(trace)
    for storage, size in trace.events[first:last]:
        if size and trace.births[storage].part not in _STAYS and storage not in trace.gradients:
            captured.add(storage)
    before = [event for event in trace.events[:first] if event.storage not in captured]
    gradients = [event for event in before if event.size and event.storage in trace.gradients]
    return GraphMemory(
        before=(*before, *(event._replace(size=0) for event in gradients), *gradients),
        pool=tuple(event for event in trace.events if event.storage in captured),
        after=tuple(event for event in trace.events[first:] if event.storage not in captured),
    )


def with_graph_workspaces(trace: Trace) -> Trace:
    """Add workspaces of libraries such as cuBLAS for the capturing stream; they have one set per stream."""
    known = [birth for birth in trace.births.values() if birth.part == "library"]
    return with_kept(trace, [birth._replace(op=birth.op + _IN_GRAPHS) for birth in known])


def with_kept(trace: Trace, births: Sequence[Birth], *, are_gradients: bool = False) -> Trace:
    """Add storages to a trace that exist before it and are never freed in it."""
    first = 1 + max(trace.births, default=0)
    added = {first + number: birth for number, birth in enumerate(births)}
    events = tuple(Event(storage, birth.size) for storage, birth in added.items())
    later = len(events)
    return replace(
        trace,
        events=(*events, *trace.events),
        births={**added, **trace.births},
        marks=tuple(replace(mark, event=mark.event + later) for mark in trace.marks),
        gradients=trace.gradients | added.keys() if are_gradients else trace.gradients,
    )


def _graph_workspaces(trace: Trace) -> set[int]:
    return {
        storage for storage, birth in trace.births.items() if birth.part == "library" and birth.op.endswith(_IN_GRAPHS)
    }
