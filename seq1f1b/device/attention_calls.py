"""Which queries of a segment attend to which keys, call by call.

An op masks from the last query and key backwards, or not at all, and takes keys that lie one after another. So what a
segment attends to is cut into pieces, each with one call or two: its own keys, and ranges of those before them. In a
chain the keys of a sequence lie in the first rows of a slab. In a tree those of a path lie in several ranges of rows
(:class:`Place`), and siblings that share the segment have own keys each.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

__all__: list[str] = []


class Call(NamedTuple):
    """Some of the queries over one range of keys."""

    piece: int  # index of the range among ``Plan.pieces``
    begin: int  # its first key, counted along the path
    first: int  # of the queries that see it
    num_queries: int
    comes_first: bool  # no call before it wrote to this range of dk and dv
    is_own: bool  # its last keys are the own ones of its queries, all of them
    row: int  # of its first key in the slabs


class Place(NamedTuple):
    """The rows of a path's keys, and which of the keys the queries of its last segment see."""

    ranges: tuple[tuple[int, int, int], ...]  # begin and end of keys along the path, and the row of the first, in order
    parts: tuple[int, ...]  # tokens of siblings that share the segment, one after another; empty: none do
    kept: int = 0  # keys whose rows of dk and dv are added to in a backward; those of the others are stored

    @property
    def end(self) -> int:
        return self.ranges[-1][1]

    def row(self, key: int) -> int:
        """The row of one of the segment's own keys."""
        begin, _, row = self.ranges[-1]
        return row + key - begin

    def rows_between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The keys from ``begin`` to ``end``: the first key, the row and the number of those that lie together."""
        cut = [(max(begin, first), min(end, stop), first, row) for first, stop, row in self.ranges]
        return [(lo, row + lo - first, hi - lo) for lo, hi, first, row in cut if lo < hi]


def bounds(start: int, limit: int, longest: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + longest, limit)) for begin in range(start, limit, longest)]


def lengths(of_bounds: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(stop - begin for begin, stop in of_bounds)


def ranges(
    start: int, offset: int, end: int, window: int, longest: int, is_plain: bool = False
) -> tuple[tuple[int, ...], tuple[Call, ...]]:
    """Lengths of the keys before ``start`` and of all ranges behind them, and the calls of a backward, in a chain.

    The queries are tokens ``offset`` to ``end``; they see no key before ``start``. The ops mask from the last query and
    key backwards. So the segment's own keys are one range, whose call comes first, and where a window hides a range
    before them from the last rows, these are left out. The plain way masks by positions, so its ranges begin and end
    anywhere.
    """
    if is_plain:
        of_bounds = bounds(start, end, longest)
    else:
        of_bounds = [*bounds(start, offset, longest), (offset, end)]
    calls: list[Call] = []
    for piece, (begin, stop) in enumerate(of_bounds, 1 if start else 0):
        is_own = not is_plain and begin == offset
        calls += _calls_of(piece, begin, stop, offset, end, window, is_own, is_plain, begin)
    if not is_plain:
        calls = calls[-1:] + calls[:-1]
    return (start,) * bool(start) + lengths(of_bounds), tuple(calls)


def ranges_of_path(
    place: Place, start: int, offset: int, window: int, longest: int, *, is_plain: bool = False, joins: bool = False,
    packs: bool = False,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Call, ...]]:  # fmt: skip
    """As ``ranges``, of a path: the first row and the length of each piece, and the calls.

    A piece lies within one range of rows, and is added to or stored as a whole. Siblings that share the segment have a
    piece each, or several in the plain way, which their queries alone see.

    Args:
        joins: keys that lie right before the own ones are a piece with them, if no siblings share the segment.
        packs: the own keys of siblings are one piece, and one call, which tells them apart.
    """
    rows: list[int] = []
    sizes: list[int] = []
    own: list[Call] = []
    before: list[Call] = []
    is_one = packs or not place.parts
    lead = offset - max(start, place.ranges[-1][0]) if joins and not place.parts else 0
    for lo, hi in ((start, min(place.kept, offset - lead)), (max(start, place.kept), offset - lead)):
        for first, row, size in place.rows_between(lo, hi):
            for begin, stop in bounds(first, first + size, longest):
                rows.append(row + begin - first)
                sizes.append(stop - begin)
                before += _calls_of(len(rows) - 1, begin, stop, offset, place.end, window, False, is_plain, rows[-1])
    ends = itertools.accumulate((place.end - offset,) if is_one else place.parts, initial=offset)
    for first, end in itertools.pairwise(ends):
        for begin, stop in bounds(max(first, start), end, longest) if is_plain else ((first - lead, end),):
            rows.append(place.row(begin))
            sizes.append(stop - begin)
            calls = _calls_of(len(rows) - 1, begin, stop, first, end, window, not is_plain, is_plain, rows[-1])
            own += [call._replace(first=call.first + first - offset) for call in calls]
    return tuple(rows), tuple(sizes), (*own, *before)


def _calls_of(
    piece: int, begin: int, stop: int, offset: int, end: int, window: int, is_own: bool, is_plain: bool, row: int
) -> list[Call]:
    """One, of queries among ``offset`` to ``end``. Under a window torch's flash ops take no more queries than keys, and
    one (they hide keys of the first ones else, whatever the window's right side): rows that see a whole range, and so
    need no window, are a call of their own where there are more."""
    calls = []
    first, last = max(begin, offset), min(end, stop + window - 1) if window else end
    is_split = window and not is_plain and last - first > stop - begin + 1 and begin + window < last
    if is_split:
        calls.append(Call(piece, begin, first - offset, begin + window - first, True, is_own, row))
        first = begin + window
    calls.append(Call(piece, begin, first - offset, last - first, not is_split, is_own, row))
    return calls


def sum_of_dq(calls: tuple[Call, ...], tokens: int, most_parts: int) -> str:
    """How the parts of dq that calls make are added up: ``Plan.sum_of_dq``."""
    if len(calls) <= most_parts and all(call.num_queries == tokens for call in calls):
        return "total"
    rows = sorted((call.first, call.first + call.num_queries) for call in calls[1:])
    is_one_each = all(before[1] <= after[0] for before, after in itertools.pairwise(rows))
    return "in place" if calls[0].is_own and calls[0].num_queries == tokens and is_one_each else "wide"
