"""Split of a segment's attention into calls of an op, each with its queries and range of keys.

An op takes contiguous keys, and masks backwards from the last query and key or not at all. Attention of a segment is
therefore cut into calls over its own keys and calls over ranges of earlier keys. In a chain, the keys of a sequence lie
in the first rows of a slab. In a tree, the keys of a path lie in several ranges of rows (:class:`PathRows`), and each
sibling in a shared segment has its own keys.
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
    size: int  # keys of the range
    row: int  # the first key's row in the slabs
    first: int  # the first query, within the segment
    num_queries: int
    comes_first: bool  # whether no earlier call writes to this range of dk and dv
    is_own: bool  # whether the range ends with the queries' own keys, all of them


class PathRows(NamedTuple):
    """The rows of a path's keys, and the siblings in its last segment."""

    ranges: tuple[tuple[int, int, int], ...]  # begin and end of keys along the path, and the first key's row, in order
    parts: tuple[int, ...] = ()  # tokens of each sibling in a shared segment, in order; empty: no siblings
    kept: int = 0  # leading keys with gradients in dk and dv: a backward adds to their rows, and stores the other rows

    @property
    def end(self) -> int:
        return self.ranges[-1][1]

    @property
    def is_chain(self) -> bool:
        """Returns whether the keys lie in the first rows, and a backward adds to all of them or stores all."""
        return not self.parts and self.ranges == ((0, self.end, 0),) and self.kept in (0, self.end)

    def row(self, key: int) -> int:
        """Returns the row of a key in the last range."""
        begin, _, row = self.ranges[-1]
        return row + key - begin

    def rows_between(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """Returns contiguous pieces of the keys from ``begin`` to ``end``: first key, row and number of keys."""
        cut = [(max(begin, first), min(end, stop), first, row) for first, stop, row in self.ranges]
        return [(lo, row + lo - first, hi - lo) for lo, hi, first, row in cut if lo < hi]


def chain(num_keys: int, store: bool = False) -> PathRows:
    """Returns the place of a chain's keys. ``store``: dk and dv hold no values yet."""
    return PathRows(((0, num_keys, 0),), (), 0 if store else num_keys)


@functools.lru_cache(maxsize=MOST_REMEMBERED)
def calls_of(way: str, place: PathRows, tokens: int, window: int, longest: int, is_backward: bool) -> tuple[Call, ...]:
    """Returns the calls of a segment's forward or backward; calls over own keys come first.

    The keys of a call lie in one range of rows, and its gradients are all added or all stored. In a forward by flash,
    keys right before the own keys join the call over own keys, unless siblings share the segment. cuDNN masks from the
    first key on and gets two calls. Siblings share one call over own keys by flash and cuDNN; by the plain way, which
    masks by positions, each sibling has calls of its own.

    Args:
        longest: most keys of a call before the own keys; by the plain way, most keys of any call.
    """
    is_plain, offset = way == "plain", place.end - tokens
    start = max(0, offset - window + 1) if window else 0  # the first visible key
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
    """Returns begins and ends of ranges of at most ``longest`` keys."""
    found = []
    for begin in range(start, limit, longest):
        stop = min(begin + longest, limit)
        # cuDNN's backward on Hopper returns NaN for 128 n + 64 keys (cudnn-frontend#628): two halves avoid this size.
        cuts = [(begin + stop) // 2] if way == "cudnn" and (stop - begin) % 128 == 64 else []
        found += list(itertools.pairwise([begin, *cuts, stop]))
    return found


def _calls(
    begin: int, stop: int, row: int, offset: int, end: int, window: int, is_own: bool, is_plain: bool
) -> list[Call]:
    """Returns one or two calls over a range of keys, for queries from ``offset`` to ``end``."""
    # With a window, torch's flash ops allow one more query than keys at most: with more queries, they hide keys of the
    # first queries, whatever the window's right side. Queries that see the whole range then get a call without window.
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
    """Returns how to add up the calls' parts of dq: "total" in one launch, "in place" in the first call's part, or
    "wide", one by one in float32."""
    if len(calls) <= most_parts and all(call.num_queries == tokens for call in calls):
        return "total"
    rows = sorted((call.first, call.first + call.num_queries) for call in calls[1:])
    is_one_each = all(before[1] <= after[0] for before, after in itertools.pairwise(rows))
    return "in place" if calls[0].is_own and calls[0].num_queries == tokens and is_one_each else "wide"
