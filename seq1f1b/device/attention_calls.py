"""Which queries of a segment attend to which keys, call by call.

An op masks from the last query and key backwards, or not at all, and takes keys that lie one after another. So what a
segment attends to is cut into calls: over its own keys, and over ranges of those before them. In a chain the keys of a
sequence lie in the first rows of a slab. In a tree those of a path lie in several ranges of rows (:class:`Place`), and
siblings that share the segment have own keys each.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

__all__: list[str] = []

MOST_REMEMBERED = 1024
"""Shapes for which calls are remembered: with documents of every length few come twice."""


class Call(NamedTuple):
    """Some of the queries over one range of keys."""

    begin: int  # the range's first key, counted along the path
    size: int  # of the range
    row: int  # of its first key in the slabs
    first: int  # of the queries that see it
    num_queries: int
    comes_first: bool  # no call before it wrote to this range of dk and dv
    is_own: bool  # its last keys are the own ones of its queries, all of them


class Place(NamedTuple):
    """The rows of a path's keys, and which of the keys the queries of its last segment see."""

    ranges: tuple[tuple[int, int, int], ...]  # begin and end of keys along the path, and the row of the first, in order
    parts: tuple[int, ...] = ()  # tokens of siblings that share the segment, one after another; empty: none do
    kept: int = 0  # keys whose rows of dk and dv are added to in a backward; those of the others are stored

    @property
    def end(self) -> int:
        return self.ranges[-1][1]

    @property
    def is_chain(self) -> bool:
        """Whether the keys lie in the first rows, and are all added to or all stored."""
        return not self.parts and self.ranges == ((0, self.end, 0),) and self.kept in (0, self.end)

    def row(self, key: int) -> int:
        """The row of a key of the last range."""
        begin, _, row = self.ranges[-1]
        return row + key - begin

    def rows_between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """The keys from ``begin`` to ``end``: the first key, the row and the number of those that lie together."""
        cut = [(max(begin, first), min(end, stop), first, row) for first, stop, row in self.ranges]
        return [(lo, row + lo - first, hi - lo) for lo, hi, first, row in cut if lo < hi]


def chain(num_keys: int, store: bool = False) -> Place:
    """The place of a chain's keys. store: dk and dv hold nothing yet."""
    return Place(((0, num_keys, 0),), (), 0 if store else num_keys)


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def calls_of(way: str, place: Place, tokens: int, window: int, longest: int, is_backward: bool) -> tuple[Call, ...]:
    """The calls of a pass of a segment of so many tokens, those over own keys first.

    A call lies within one range of rows, and is added to or stored as a whole. Keys that lie right before the own ones
    have a call with them in a forward, unless cuDNN masks it, which does so from the first key on, or siblings share
    the segment. These have one call for all by flash and cuDNN, and else a call each, or several by the plain way,
    which masks by positions.

    Args:
        longest: most keys of a call before the own ones; of any call of the plain way.
    """
    is_plain, offset = way == "plain", place.end - tokens
    start = max(0, offset - window + 1) if window else 0  # the first key that one of the tokens sees
    of_each = () if way in ("cudnn", "flash") else place.parts
    joins = way == "flash" and not is_backward and not place.parts
    lead = offset - max(start, place.ranges[-1][0]) if joins else 0
    own: list[Call] = []
    before: list[Call] = []
    for lo, hi in ((start, min(place.kept, offset - lead)), (max(start, place.kept), offset - lead)):
        for key, row, size in place.rows_between(lo, hi):
            for begin, stop in _bounds(key, key + size, longest, way):
                before += _calls(begin, stop, row + begin - key, offset, place.end, window, False, is_plain)
    for first, end in itertools.pairwise(itertools.accumulate(of_each or (tokens,), initial=offset)):
        for begin, stop in _bounds(first, end, longest, way) if is_plain else ((first - lead, end),):
            calls = _calls(begin, stop, place.row(begin), first, end, window, not is_plain, is_plain)
            own += [call._replace(first=call.first + first - offset) for call in calls]
    return (*own, *before)


def _bounds(start: int, limit: int, longest: int, way: str) -> list[tuple[int, int]]:
    """Begins and ends of ranges. cuDNN's backward on Hopper makes NaN of keys that are 64 more than a multiple of 128
    (cudnn-frontend#628), so it gets such a range in two halves."""
    found = []
    for begin in range(start, limit, longest):
        stop = min(begin + longest, limit)
        cuts = [(begin + stop) // 2] if way == "cudnn" and (stop - begin) % 128 == 64 else []
        found += list(itertools.pairwise([begin, *cuts, stop]))
    return found


def _calls(
    begin: int, stop: int, row: int, offset: int, end: int, window: int, is_own: bool, is_plain: bool
) -> list[Call]:
    """One, of queries among ``offset`` to ``end``. Under a window torch's flash ops take no more queries than keys, and
    one (they hide keys of the first ones else, whatever the window's right side): rows that see a whole range, and so
    need no window, are a call of their own where there are more."""
    calls, size = [], stop - begin
    first, last = max(begin, offset), min(end, stop + window - 1) if window else end
    is_split = window and not is_plain and last - first > size + 1 and begin + window < last
    if is_split:
        calls.append(Call(begin, size, row, first - offset, begin + window - first, True, is_own))
        first = begin + window
    calls.append(Call(begin, size, row, first - offset, last - first, not is_split, is_own))
    return calls


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def how_to_add(calls: tuple[Call, ...], tokens: int, most_parts: int) -> str:
    """How the parts of dq that calls make are added up: "total" of all, "in place" of the first's, or "wide": one by
    one in float32."""
    if len(calls) <= most_parts and all(call.num_queries == tokens for call in calls):
        return "total"
    rows = sorted((call.first, call.first + call.num_queries) for call in calls[1:])
    is_one_each = all(before[1] <= after[0] for before, after in itertools.pairwise(rows))
    return "in place" if calls[0].is_own and calls[0].num_queries == tokens and is_one_each else "wide"
