"""Convert a trace to plain JSON values and back, for the cache of predictions.

Blocks repeat their operations, and storages their sizes and names, so each distinct one is stored once.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from trimtab.planner.trace.recorder import Birth, Event, Mark, Op, Owner, Place, Segment, Trace


def as_plain(trace: Trace) -> dict[str, Any]:
    """The values of a trace, without `shares`: only the extension of a shortened model reads those."""
    births = trace.births.values()
    owners, owner_at = _distinct(birth.owner for birth in births)
    kinds, kind_at = _distinct((birth.size, birth.part, birth.op, birth.is_wide, birth.name) for birth in births)
    ops, op_at = _distinct(trace.ops)
    return {
        "storages": [event.storage for event in trace.events],
        "sizes": [event.size for event in trace.events],
        "born": list(trace.births),
        "owners": owners,
        "owner_at": owner_at,
        "kinds": kinds,
        "kind_at": kind_at,
        "ops": ops,
        "op_at": op_at,
        "marks": [(mark.name, mark.event) for mark in trace.marks],
        "gradients": sorted(trace.gradients),
        "segments": [(*segment.place, segment.first_event, segment.first_op) for segment in trace.segments],
        "stacks": trace.stacks,
        "remarks": trace.remarks,
    }


def from_plain(values: dict[str, Any]) -> Trace:
    """Restore a trace from the result of `as_plain`, which may have been stored as JSON.

    Raises:
        KeyError, IndexError, TypeError, ValueError: These are not the values of a trace.
    """
    owners = [_owner(owner) for owner in values["owners"]]
    kinds, ops = values["kinds"], [Op(*op) for op in values["ops"]]
    births: dict[int, Birth] = {}
    for number, kind, owner in zip(values["born"], values["kind_at"], values["owner_at"], strict=True):
        size, part, op, is_wide, name = kinds[kind]
        births[number] = Birth(size, part, op, is_wide, owners[owner], name)
    return Trace(
        events=tuple(map(Event, values["storages"], values["sizes"])),
        births=births,
        ops=tuple([ops[at] for at in values["op_at"]]),
        marks=tuple(Mark(*mark) for mark in values["marks"]),
        gradients=frozenset(values["gradients"]),
        segments=tuple(
            Segment(Place(kind, _owner(owner), number), first_event, first_op)
            for kind, owner, number, first_event, first_op in values["segments"]
        ),
        shares={},
        stacks=tuple(values["stacks"]),
        remarks=tuple(values["remarks"]),
    )


def _owner(values: Sequence[int] | None) -> Owner | None:
    return None if values is None else Owner(*values)


def _distinct(values: Iterable[Any]) -> tuple[list[Any], list[int]]:
    """The distinct values, and the position of each value among them."""
    found: dict[Any, int] = {}
    positions = [found.setdefault(value, len(found)) for value in values]
    return list(found), positions
