"""Seconds of units: what a source of them says of one, and tables of all units of a step, as costs have them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from seq1f1b import _C

__all__: list[str] = []


class Span(NamedTuple):
    """Tokens of a segment, pairs of one of them and a token that it attends to, and tokens up to its end.

    ``within``: the pairs in layers with a window, for each window of the model. Each field may be an array instead, of
    many segments: sources of seconds use operators and ufuncs of numpy alone.
    """

    tokens: int
    pairs: float
    end: int
    within: tuple[float, ...] = ()


class PassSeconds(NamedTuple):
    """Seconds of F, of I and W, and of the whole B, which takes the place of I and W where the order does not split.

    ``recompute`` is what R adds to a unit. Seconds of all units of a step are tables, each [stage][segment].
    """

    forward: float
    input: float
    weight: float
    backward: float
    recompute: float = 0.0

    @property
    def total(self) -> float:
        """F and the whole B."""
        return self.forward + self.backward


class ShardSeconds(NamedTuple):
    """Seconds of a rank's S, T, E and G, of a vocabulary over the ranks."""

    statistics: float
    loss: float
    embed: float
    embed_gradient: float


NO_SECONDS = PassSeconds(0.0, 0.0, 0.0, 0.0)
PASSES = {letter: name for letter, name in zip(_C.PASSES, _C.PASS_NAMES, strict=True) if name in PassSeconds._fields}
"""Names by letter, in the order of the core."""
SHARD_PASSES = {name: letter for letter, name in zip(_C.PASSES, _C.PASS_NAMES, strict=True)}


def pairs_of(documents: Sequence[int], begin: int, end: int, window: int = 0) -> float:
    """Pairs of one of the tokens ``[begin, end)`` of a row of documents and a token up to it that it attends to.

    window: tokens that one attends to, itself included; 0: all before it.
    """
    first, pairs = 0, 0.0
    for length in documents:
        low, high = max(begin - first, 0), min(end - first, length)
        if low < high:
            pairs += (high * (high + 1) - low * (low + 1)) / 2
            if window:  # the tokens beyond it: as many pairs as without a window, of a document that begins later
                far, near = max(high - window, 0), max(low - window, 0)
                pairs -= (far * (far + 1) - near * (near + 1)) / 2
        first += length
    return pairs


def span_of(documents: Sequence[int], begin: int, end: int, windows: Sequence[int] = ()) -> Span:
    """Tokens ``[begin, end)`` of a row of documents."""
    within = tuple([pairs_of(documents, begin, end, window) for window in windows]) if windows else ()
    return Span(end - begin, pairs_of(documents, begin, end), end, within)


def spans_of(sizes: Sequence[int], documents: Sequence[int] | None = None, windows: Sequence[int] = ()) -> list[Span]:
    """The segments of a row of documents; None: it is one document. windows: of the model's layers."""
    documents = documents or (sum(sizes),)
    return [span_of(documents, end - size, end, windows) for size, end in zip(sizes, accumulate(sizes), strict=True)]


def spans_of_tree(parts: Sequence[Sequence[int]], parents: Sequence[int], windows: Sequence[int] = ()) -> list[Span]:
    """The segments of a tree: each sees its path, and leaves that share a segment see it and their own tokens.

    Args:
        parts: for each segment its tokens, or those of each leaf.
        parents: the segment that each follows, -1: none.
        windows: of the model's layers.
    """
    spans: list[Span] = []
    for part, parent in zip(parts, parents, strict=True):
        begin, tokens = spans[parent].end if parent >= 0 else 0, sum(part)
        own = tokens * (tokens + 1) if len(part) == 1 else sum([size * (size + 1) for size in part])
        within = [sum(pairs_of((begin + size,), begin, begin + size, window) for size in part) for window in windows]
        spans.append(Span(tokens, tokens * begin + own / 2, begin + tokens, tuple(within)))
    return spans


def seconds_of(source: Any, spans: Sequence[Span]) -> Any:
    """Tables of the units over these spans, of any rows, as a ``PassSeconds``. Stages of one kind share a list.

    source: parts of a model on a machine or in a profile, or measured stages: ``kinds`` has a number for each stage,
        alike for stages that cost alike; ``seconds(span)`` tells those of a unit, for each kind, and ``shard(span)``
        those of a vocabulary over the ranks.
    """
    by_kind = [_lists(found, len(spans)) for found in source.seconds(arrays_of(spans))]
    return PassSeconds._make([by_kind[kind][i] for kind in source.kinds] for i in range(len(PassSeconds._fields)))


def shards_of(source: Any, spans: Sequence[Span]) -> dict[str, list[list[float]]]:
    """The passes of a vocabulary over the ranks, as :class:`seq1f1b.Costs` has them."""
    rows = _lists(source.shard(arrays_of(spans)), len(spans))
    return {name: [row] * len(source.kinds) for name, row in zip(ShardSeconds._fields, rows, strict=True)}


def arrays_of(spans: Sequence[Span]) -> Span:
    """One span for all, of arrays."""
    tokens, pairs, end, within = zip(*spans, strict=True)
    columns: Any = [np.array(column, float) for column in (tokens, pairs, end, *zip(*within, strict=True))]
    return Span(columns[0], columns[1], columns[2], tuple(columns[3:]))


def _lists(seconds: Sequence[Any], count: int) -> list[list[float]]:
    """Arrays, or numbers where all are alike, as lists of so many numbers."""
    return [np.broadcast_to(each, count).tolist() for each in seconds]
