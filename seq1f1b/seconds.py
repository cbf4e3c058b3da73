"""Seconds of units: what a source of them says of one, tables of all units of a step, as costs have them, and how long
units of any length take by some that were measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
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


def spans_of(
    sizes: Sequence[int],
    documents: Sequence[int] | None = None,
    windows: Sequence[int] = (),
    parents: Sequence[int] | None = None,
    parts: Sequence[Sequence[int]] | None = None,
) -> list[Span]:
    """The segments of a row of documents, or of a tree, where each segment sees its path, and leaves that share one see
    that and their own tokens.

    Args:
        documents: None: the row is one document, or a tree.
        windows: of the model's layers.
        parents: of a tree, the segment that each follows, -1: none.
        parts: of a tree, for each segment its tokens, or those of each leaf; None: no leaves share one.
    """
    spans: list[Span] = []
    for number, size in enumerate(sizes):
        parent = number - 1 if parents is None else parents[number]
        begin = spans[parent].end if parent >= 0 else 0
        leaves = (size,) if parts is None else parts[number]
        each = [span_of(documents or (begin + n,), begin, begin + n, windows) for n in leaves]
        if len(each) > 1:
            within = tuple(map(sum, zip(*(span.within for span in each), strict=True)))
            each = [Span(size, sum(span.pairs for span in each), begin + size, within)]
        spans += each
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


# -- measured ----------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """Seconds of a pass over ``tokens`` that attend to ``pairs`` tokens in all: a floor and two rates.

    ``residual`` is the spread of the fit: the root of the mean square of measured / fitted - 1.
    """

    floor: float
    per_token: float
    per_pair: float
    residual: float

    def seconds(self, tokens: float, pairs: float, floor: bool = True) -> float:
        """``pairs``: of a token and one that it sees, itself included."""
        return (self.floor if floor else 0.0) + self.per_token * tokens + self.per_pair * pairs


def fit_seconds(rows: Sequence[tuple[float, float, float]], *, with_pairs: bool = True) -> Fit:
    """Floor and rates, none negative, that make the squares of measured / fitted - 1 smallest over (tokens, pairs,
    seconds). Measured zeros are left out; with nothing else everything is 0.

    Each set of terms that may be zero is tried, and the best one is the least-squares solution under the bounds.
    """
    rows = [row for row in rows if row[2] > 0]
    if not rows:
        return Fit(0.0, 0.0, 0.0, 0.0)
    # Dividing each row by its seconds makes every residual a relative one.
    table = np.array([[1 / s, tokens / s, pairs / s] for tokens, pairs, s in rows])
    scale = np.maximum(np.linalg.norm(table, axis=0), 1e-300)
    best = (math.inf, [0.0, 0.0, 0.0])
    columns = range(3 if with_pairs else 2)
    for size in range(1, len(columns) + 1):
        for chosen in map(list, itertools.combinations(columns, size)):
            solution = (
                np.linalg.lstsq(table[:, chosen] / scale[chosen], np.ones(len(rows)), rcond=1e-6)[0] / scale[chosen]
            )
            error = float(np.mean((table[:, chosen] @ solution - 1) ** 2))
            if solution.min() >= 0 and error < best[0] - 1e-15:
                values = dict(zip(chosen, solution.tolist(), strict=True))
                best = error, [values.get(i, 0.0) for i in range(3)]
    floor, per_token, per_pair = best[1]
    ratios = [s / (floor + per_token * tokens + per_pair * pairs) - 1 for tokens, pairs, s in rows]
    return Fit(floor, per_token, per_pair, math.sqrt(statistics.fmean(r * r for r in ratios)))
