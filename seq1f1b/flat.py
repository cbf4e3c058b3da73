"""Makes flat arrays of seconds, bytes and counts for the core, stage after stage."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat, SupportsIndex

from seq1f1b import _C

if TYPE_CHECKING:
    from seq1f1b.schedule import Schedule
    from seq1f1b.simulation import Costs, Links, StepMemory

__all__: list[str] = []


MOST = 2**31 - 1
"""Largest count that the core takes."""


class Counts(NamedTuple):
    """The counts of an order, which decide the form of tables; ``rows``: segments of each micro-batch, if unequal."""

    num_ranks: int
    num_stages: int
    num_segments: int
    rows: Sequence[int] | None


def numbers(name: str, code: str, given: Iterable[Any]) -> array[Any]:
    """Returns numbers as an array of typecode ``d``, ``q`` or ``i``; errors name the array and the wrong number."""
    values = list(given)
    try:
        return array(code, values)
    except TypeError:
        kind, wanted = (SupportsFloat, "numbers") if code == "d" else (SupportsIndex, "whole numbers")
        wrong = next((value for value in values if not isinstance(value, kind)), values)
        raise TypeError(f"{name} holds {wrong!r:.80}, must be {wanted}") from None
    except OverflowError:
        most = max(values, key=abs)
        shown = f": {most}" if abs(most) < 1 << 128 else ""
        raise ValueError(f"{name} holds a number that is too large{shown}") from None


def whole(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """Returns a whole number from ``least`` to ``most``, or raises; a bool is no number."""
    if type(value) is int and least <= value <= most:  # quickly, for the usual case
        return value
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    number = index(value)
    if not least <= number <= most:
        rule = f"at least {least}" if number < least else f"in {least}..{most}"
        raise ValueError(f"{name} is {number}, must be {rule}")
    return number


_PLACES = {
    _C.PER_RANK: "rank",
    _C.PER_STAGE: "stage",
    _C.PER_PAIR: "pair of neighbouring stages",
    _C.PER_SEGMENT: "segment",
    _C.PER_CELL: "segment of each stage",
}


def flat(order: Counts | Schedule, name: str, per: int, given: Any, code: str = "d") -> array[Any]:
    """Returns a table as one array. The table is one number for all places, nested sequences with a value for each
    place of ``per``, or an array of all units, [stage, unit] or [unit], micro-batch after micro-batch.

    Raises:
        ValueError, TypeError: a sequence has a wrong length, or a value is no number; names the table and the place.
    """
    S, rows = order.num_stages, order.rows
    cells = order.num_segments if rows is None else sum(rows)
    shapes = {_C.PER_CELL: (S, cells), _C.PER_SEGMENT: (cells,), _C.PER_PAIR: (S - 1,), _C.PER_STAGE: (S,)}
    shape = shapes.get(per, (order.num_ranks,))
    if not hasattr(given, "__len__"):
        one = array(code, [0]) if given == 0 else numbers(name, code, [given])
        return one * prod(shape)
    if hasattr(given, "dtype") and given.dtype == code and given.shape == shape:
        return array(code, given.tobytes())
    lengths: list[Any] = list(shape)
    if rows is not None and per in (_C.PER_CELL, _C.PER_SEGMENT):
        lengths[-1:] = [len(rows), tuple(rows)]

    found: list[Any] = [given]
    for level, wanted in enumerate(lengths):
        right = wanted * (len(found) // len(wanted)) if isinstance(wanted, tuple) else (wanted,) * len(found)
        for i, (items, length) in enumerate(zip(found, right, strict=True)):
            if getattr(items, "__len__", int)() != length:
                place = ""
                for count in reversed(lengths[:level]):
                    i, place = i // count, f"[{i % count}]{place}"
                holds = f"holds {len(items)}" if hasattr(items, "__len__") else "is a number"
                form = f"{' x '.join(map(str, lengths))} values, one of each {_PLACES[per]}"
                raise ValueError(f"{name} must be a number or hold {form}: {place or 'it'} {holds}")
        found = list(chain.from_iterable(found))
    return numbers(name, code, found)


def pass_and_link_seconds(order: Schedule, costs: Costs) -> tuple[array[float], array[float], array[float]]:
    """Returns the seconds of every pass, [pass][stage][segment], with defaults for None; and latency and seconds per
    byte, 0 if bandwidth is infinite, between each pair of neighbouring stages."""
    seconds, given, links = array("d"), 0, costs.links
    nothing = flat(order, "nothing", _C.PER_CELL, 0.0)
    for number, name in enumerate(_C.PASS_NAMES):
        table = getattr(costs, name, 0.0)  # a pass without a field in Costs costs nothing
        given |= (table is not None) << number
        is_nothing = table is None or (table.__class__ is float and table == 0)
        seconds += nothing if is_nothing else flat(order, name, _C.PER_CELL, table)
    _C.fill_in(seconds, given)
    latency = flat(order, "latency", _C.PER_PAIR, links.latency)
    bandwidth = flat(order, "bandwidth", _C.PER_PAIR, float("inf") if links.bandwidth is None else links.bandwidth)
    for value in bandwidth:
        if not value > 0:
            raise ValueError(f"bandwidth is {value}, must be above 0")
    return seconds, latency, array("d", (1.0 / value for value in bandwidth))


def held_bytes(order: Schedule, memory: StepMemory, links: Links) -> array[int]:
    """Returns tables of bytes, one after another: each holding, messages, and statistics of the vocabulary."""
    cells = order.num_segments if order.rows is None else sum(order.rows)
    counts = {_C.PER_CELL: order.num_stages * cells, _C.PER_STAGE: order.num_stages, _C.PER_SEGMENT: cells}
    given = [(name, per, getattr(memory, name)) for name, per, _ in _C.HOLDINGS]
    given += [(name, _C.PER_SEGMENT, getattr(links, name)) for name in ("message_bytes", "statistics_bytes")]
    tables = []
    for name, per, held in given:
        held = memory.activations if held is None else held
        if isinstance(held, int) and held == 0:  # quickly, for the usual case
            tables.append(array("q", bytes(8 * counts[per])))
        else:
            tables.append(flat(order, name, per, held, "q"))
    activations, kept = tables[:2]  # in C activations exclude kept_activations, the part that W reads
    if memory.kept_activations is None:
        tables[0] = array("q", bytes(8 * len(kept)))
    else:
        for i, (all_of_it, part) in enumerate(zip(activations, kept, strict=True)):
            if 0 <= all_of_it < part:
                raise ValueError(f"kept_activations hold {part} bytes, more than the {all_of_it} of activations")
            activations[i] -= max(part, 0)
    return sum(tables, array("q"))


def unit_seconds(schedule: Schedule, rows: Sequence[Sequence[float]]) -> array[float]:
    """Returns the seconds of every unit, rank after rank."""
    counts = schedule._num_units
    if len(rows) != len(counts):
        raise ValueError(f"durations hold {len(rows)} ranks, the schedule has {len(counts)}")
    for count, row in zip(counts, rows, strict=True):
        if len(row) != count:
            raise ValueError(f"durations of one rank holds {len(row)} values, must hold {count}")
    return numbers("durations", "d", chain.from_iterable(rows))
