"""Makes flat arrays of seconds, bytes and counts for the core, stage after stage."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

from seq1f1b import _C

if TYPE_CHECKING:
    from seq1f1b.schedule import Schedule
    from seq1f1b.simulation import Costs, Links, StepMemory

__all__ = [
    "HOLDINGS",
    "MOST",
    "Counts",
    "HeldBytes",
    "flat",
    "held_bytes",
    "numbers",
    "pass_seconds",
    "seconds_per_byte",
    "whole",
]


MOST = 2**31 - 1
"""Largest count that the core takes."""


class HeldBytes(NamedTuple):
    """A kind of bytes held by units: a field of :class:`seq1f1b.StepMemory`.

    Attributes:
        name: the field's name.
        text: the kind in words.
        per: form of the table of bytes: ``_C.PER_STAGE``, ``PER_SEGMENT`` or ``PER_CELL``.
        counts_with: number of the holding to whose peak the bytes count.
    """

    name: str
    text: str
    per: int
    counts_with: int


HOLDINGS = tuple(HeldBytes(*row) for row in _C.HOLDINGS)
"""The position is the number of the holding in C."""


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
    except (TypeError, OverflowError):
        for value in values:
            try:
                array(code, [value])
            except TypeError:
                wanted = "numbers" if code == "d" else "whole numbers"
                raise TypeError(f"{name} holds {value!r:.80}, must be {wanted}") from None
            except OverflowError:
                shown = f": {value}" if abs(value) < 1 << 128 else ""
                raise ValueError(f"{name} holds a number that is too large{shown}") from None
        raise


def whole(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """Returns a whole number from ``least`` to ``most``, or raises; a bool is no number."""
    if not isinstance(value, SupportsIndex) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    number = index(value)
    if not least <= number <= most:
        rule = f"at least {least}" if number < least else f"in {least}..{most}"
        raise ValueError(f"{name} is {number}, must be {rule}")
    return number


def _form(order: Counts | Schedule, per: int) -> tuple[list[Any], str]:
    """Returns the lengths of a table's nested sequences, outermost first, and a text for errors.

    A tuple stands for lengths that differ from micro-batch to micro-batch.
    """
    if per == _C.PER_RANK:
        return [order.num_ranks], f"hold {order.num_ranks}, one of each rank"
    if per == _C.PER_STAGE:
        return [order.num_stages], f"hold {order.num_stages}, one of each stage"
    if per == _C.PER_PAIR:
        return [order.num_stages - 1], f"hold {order.num_stages - 1}, one of each pair of neighbouring stages"
    k, M, S = order.num_segments, len(order.rows or ()), order.num_stages
    columns = [k] if order.rows is None else [M, tuple(order.rows)]
    if per == _C.PER_SEGMENT:
        rows = f"{M} micro-batches, each with one value for each of its segments"
        return columns, f"hold {f'{k}, one of each segment' if order.rows is None else rows}"
    rows = f"{M} micro-batches each, with one value for each of their segments"
    return [S, *columns], f"hold {S} stages of {f'{k} segments each' if order.rows is None else rows}"


def flat(order: Counts | Schedule, name: str, per: int, given: Any, code: str = "d") -> array[Any]:
    """Returns a table as one array. The table is one number for all places, nested sequences with a value for each
    place of ``per``, or an array of all units, [stage, unit] or [unit], micro-batch after micro-batch.

    Raises:
        ValueError, TypeError: a sequence has a wrong length, or a value is no number; names the table and the place.
    """
    if hasattr(given, "dtype"):  # an array of all units
        cells = order.num_segments if order.rows is None else sum(order.rows)
        wanted_shape = {_C.PER_CELL: (order.num_stages, cells), _C.PER_SEGMENT: (cells,)}.get(per)
        if given.dtype == code and given.shape == wanted_shape:
            return array(code, given.tobytes())
    if order.rows is None:  # a quick way for the usual forms
        k, S, is_nested = order.num_segments, order.num_stages, per == _C.PER_CELL
        wanted = {_C.PER_RANK: order.num_ranks, _C.PER_PAIR: S - 1, _C.PER_SEGMENT: k}.get(per, S)
        with contextlib.suppress(TypeError, OverflowError):
            if not hasattr(given, "__len__"):
                return array(code, [given]) * (wanted * k if is_nested else wanted)
            if len(given) == wanted and (not is_nested or set(map(len, given)) == {k}):
                return array(code, list(chain.from_iterable(given) if is_nested else given))
    lengths, form = _form(order, per)
    if not hasattr(given, "__len__"):
        counts = lengths[-1] if isinstance(lengths[-1], tuple) else lengths[-1:]
        stages = order.num_stages if per == _C.PER_CELL else 1
        return numbers(name, code, [given]) * (stages * sum(counts))
    found: list[Any] = [given]
    above: list[int] = []
    for wanted in lengths:
        right = wanted * (len(found) // len(wanted)) if isinstance(wanted, tuple) else (wanted,) * len(found)
        for i, (items, length) in enumerate(zip(found, right, strict=True)):
            if getattr(items, "__len__", int)() != length:
                place = ""
                for count in reversed(above):
                    i, place = i // count, f"[{i % count}]{place}"
                holds = f"holds {len(items)}" if hasattr(items, "__len__") else "is a number"
                raise ValueError(f"{name} must be a number or {form}: {place or 'it'} {holds}")
        found = list(chain.from_iterable(found))
        above += [wanted] if isinstance(wanted, int) else []
    return numbers(name, code, found)


def pass_seconds(order: Schedule, costs: Costs) -> array[float]:
    """Returns the seconds of every pass, [pass][stage][segment], with defaults for None."""
    seconds, given = array("d"), 0
    cells = order.num_stages * (order.num_segments if order.rows is None else sum(order.rows))
    for number, name in enumerate(_C.PASS_NAMES):
        table = getattr(costs, name, 0.0)  # a pass without a field in Costs costs nothing
        given |= (table is not None) << number
        is_nothing = table is None or (table.__class__ in (int, float) and table == 0)
        seconds += array("d", bytes(8 * cells)) if is_nothing else flat(order, name, _C.PER_CELL, table)
    _C.fill_in(seconds, given)
    return seconds


def seconds_per_byte(order: Schedule, links: Links) -> array[float]:
    """Returns seconds per byte between each pair of neighbouring stages; 0 if bandwidth is infinite."""
    if links.bandwidth is None:
        return array("d", bytes(8 * (order.num_stages - 1)))
    given = flat(order, "bandwidth", _C.PER_PAIR, links.bandwidth)
    for value in given:
        if not value > 0:
            raise ValueError(f"bandwidth is {value}, must be above 0")
    return array("d", (1.0 / value for value in given))


def held_bytes(order: Schedule, memory: StepMemory, links: Links | None) -> tuple[array[int] | None, ...]:
    """Returns tables of bytes: each holding, messages, and statistics of the vocabulary; None for a table of zeros."""
    tables: list[array[int] | None] = []
    for row in HOLDINGS:
        given = getattr(memory, row.name)
        is_nothing = given is None or (given.__class__ is int and given == 0)
        tables.append(None if is_nothing else flat(order, row.name, row.per, given, "q"))
    whole, kept = tables[:2]  # in C activations exclude kept_activations, the part that W reads
    if memory.kept_activations is None:
        tables[:2] = None, whole
    elif kept is not None:
        whole = tables[0] = array("q", bytes(8 * len(kept))) if whole is None else whole
        for i, (all_of_it, part) in enumerate(zip(whole, kept, strict=True)):
            if 0 <= all_of_it < part:
                raise ValueError(f"kept_activations hold {part} bytes, more than the {all_of_it} of activations")
            whole[i] -= max(part, 0)
    messages: tuple[array[int] | None, ...] = (None, None)
    if links is not None:
        messages = tuple(
            None if given.__class__ is int and given == 0 else flat(order, name, _C.PER_SEGMENT, given, "q")
            for name, given in (("message_bytes", links.message_bytes), ("statistics_bytes", links.statistics_bytes))
        )
    return *(table if table is not None and any(table) else None for table in tables), *messages
