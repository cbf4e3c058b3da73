"""Seconds of units: tables for all units of a step, fits to measured units, and predictions of any length by fits."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from seq1f1b import _C

__all__: list[str] = []


class Span(NamedTuple):
    """Tokens of a segment, pairs of a query in the segment and a key seen by the query, and tokens up to the end.

    ``within``: the pairs in layers with a window, for each window of the model. Each field may be an array of many
    segments instead of a number: sources of seconds use operators and ufuncs of numpy alone.
    """

    tokens: Any
    pairs: Any
    end: Any
    within: tuple[Any, ...] = ()


class PassSeconds(NamedTuple):
    """Seconds of F, of I and W, and of the whole B, which replaces I and W if the order does not split.

    ``recompute`` is R's addition to a unit. For all units of a step, each field is a table, [stage][segment].
    """

    forward: float
    input: float
    weight: float
    backward: float
    recompute: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of F and the whole B."""
        return self.forward + self.backward


NO_SECONDS = PassSeconds(0.0, 0.0, 0.0, 0.0)
PASSES = {letter: name for letter, name in zip(_C.PASSES, _C.PASS_NAMES, strict=True) if name in PassSeconds._fields}
"""Names by letter, in the order of the core."""


def spans_of(
    sizes: Sequence[int],
    documents: Sequence[int] | None = None,
    windows: Sequence[int] = (),
    parents: Sequence[int] | None = None,
    parts: Sequence[Sequence[int]] | None = None,
) -> Span:
    """Returns a span of arrays: the segments of a row of documents, or of a tree.

    In a tree each segment sees its path; leaves in one segment see the path and their own tokens.

    Args:
        documents: None: the row is one document, or a tree.
        windows: windows of the model's layers.
        parents: the parent of each segment of a tree, -1: none.
        parts: for each segment of a tree the tokens of each leaf; None: no leaves share a segment.
    """
    ends = list(itertools.accumulate(sizes))
    if parents is not None:
        documents, ends = None, []
        for size, parent in zip(sizes, parents, strict=True):
            ends.append(size + (ends[parent] if parent >= 0 else 0))
    leaves = parts or [(size,) for size in sizes]
    owners = np.repeat(np.arange(len(sizes)), [len(each) for each in leaves])  # the segment of each leaf
    bounds = np.cumsum([0, *(documents or [sum(sizes)])], dtype=np.float64)
    begins = np.array(ends, float) - np.array(sizes, float)
    at = begins[owners] + np.array([np.zeros(len(owners)), [*itertools.chain.from_iterable(leaves)]])  # of each leaf
    document = np.minimum(np.searchsorted(bounds, at, side="right"), len(bounds) - 1) - 1
    # Whole documents, and the documents in which leaves begin and end up to these places.
    first = np.concatenate((np.diff(bounds), (at - bounds[document]).ravel()))
    pairs = []
    for window in (0, *windows):
        far = (first - window) * (first > window) if window else 0.0  # tokens whose first keys lie before the window
        seen = (first * (first + 1) - far * (far + 1)) / 2
        whole, parts_of = np.split(seen, [len(bounds) - 1])
        before, upto = np.cumsum([0.0, *whole])[document] + parts_of.reshape(2, -1)
        pairs.append(np.bincount(owners, upto - before, len(sizes)))
    return Span(np.array(sizes, float), pairs[0], np.array(ends, float), tuple(pairs[1:]))


def pairs_of(documents: Sequence[int], begin: int, end: int, window: int = 0) -> float:
    """Returns the pairs of a query in ``[begin, end)`` and a key seen by the query.

    window: number of keys seen by a query, its own included; 0: all earlier keys.
    """
    return float(spans_of((begin, end - begin), documents, (window,)).within[0][1])


def arrays_of(spans: Sequence[Span]) -> Span:
    """Joins spans of numbers or arrays into one span of arrays."""
    tokens, pairs, end, within = zip(*spans, strict=True)
    columns: Any = [np.hstack(column).astype(float) for column in (tokens, pairs, end, *zip(*within, strict=True))]
    return Span(columns[0], columns[1], columns[2], tuple(columns[3:]))


# -- measured ----------------------------------------------------------------------------------------------------------


class Fit(NamedTuple):
    """A floor and two rates: a pass takes floor + per_token * tokens + per_pair * pairs seconds.

    ``residual`` is the spread of the fit: the root of the mean square of measured / fitted - 1.
    """

    floor: float
    per_token: float
    per_pair: float
    residual: float

    def seconds(self, tokens: float, pairs: float, floor: bool = True) -> float:
        """Returns the seconds of a pass; ``pairs``: number of pairs of a query and a key seen by the query."""
        return (self.floor if floor else 0.0) + self.per_token * tokens + self.per_pair * pairs


def fit_seconds(rows: Sequence[tuple[float, float, float]], *, with_pairs: bool = True) -> Fit:
    """Fits floor and rates, none negative, to (tokens, pairs, seconds), by least squares of relative errors.

    Measured zeros are left out; without other rows everything is 0. The fit tries every subset of the three terms,
    others at zero: the best solution without a negative term is the least-squares solution under the bounds.
    """
    measured = np.array([row for row in rows if row[2] > 0], float).reshape(-1, 3)
    # Dividing each row by its seconds makes every residual a relative error.
    table = np.column_stack((np.ones(len(measured)), measured[:, :2])) / measured[:, 2:]
    scale = np.maximum(np.linalg.norm(table, axis=0), 1e-300)
    least, best = math.inf, np.zeros(3)
    for size in (1, 2, 3) if len(measured) else ():
        for chosen in map(list, itertools.combinations(range(3 if with_pairs else 2), size)):
            scaled = table[:, chosen] / scale[chosen]
            solution = np.linalg.lstsq(scaled, np.ones(len(table)), rcond=1e-6)[0] / scale[chosen]
            error = float(np.mean((table[:, chosen] @ solution - 1) ** 2))
            if solution.min() >= 0 and error < least - 1e-15:
                least, best = error, np.zeros(3)
                best[chosen] = solution
    residual = float(np.sqrt(np.mean((1 / (table @ best) - 1) ** 2))) if best.any() else 0.0
    floor, per_token, per_pair = best.tolist()
    return Fit(floor, per_token, per_pair, residual)


Terms: TypeAlias = "dict[tuple[str, int], Fit]"
"""By pass and stage."""

_SHARDS = {"statistics": "S", "loss": "T", "embed": "E", "embed_gradient": "G"}  # passes of a vocabulary over the ranks
_ASSUMED = PassSeconds(1.0, 1.0, 1.0, 2.0, 1.0)  # only ratios count: passes without measurement follow them


def terms_of(measured: Iterable[tuple[str, int, float, float, float]]) -> Terms:
    """Returns a ``Fit`` for each pass of each stage, from measured units: pass, stage, tokens, pairs and seconds.

    A unit of n tokens and p pairs of query and key takes a + b n + c p seconds: a for launches and other fixed work, b
    for products with weights, c for attention. No term is negative.
    """
    samples: dict[tuple[str, int], list[tuple[float, float, float]]] = defaultdict(list)
    for kind, stage, tokens, pairs, seconds in measured:
        samples[kind, stage].append((tokens, pairs, seconds))
    return {key: fit_seconds(each) for key, each in samples.items()}


class MeasuredUnits:
    """A source of seconds from measured stages. A pass without measurement takes a measured pass's seconds, times the
    ratio of the two passes in ``like``.

    Args:
        terms: fits of every stage.
        like: another source for these stages; None: B takes twice as long as F, and I and W half of B each.

    Attributes:
        splits: whether I and W were measured.
        balance: position in the sequence at which attention takes as long as a token's other work.
    """

    def __init__(self, terms: Terms, like: Any = None) -> None:
        self._like = like
        num_stages = 1 + max(stage for _, stage in terms) if like is None else len(like.layers)
        self._stages = [
            {name: terms[letter, stage] for letter, name in PASSES.items() if (letter, stage) in terms}
            for stage in range(num_stages)
        ]
        self._shards = {
            name: [fit for (each, _), fit in terms.items() if each == letter] for name, letter in _SHARDS.items()
        }
        self.splits = any("weight" in fits for fits in self._stages)
        whole = [fits[name] for fits in self._stages for name in ("forward", "backward") if name in fits]
        attention = sum(fit.per_pair for fit in whole)
        self.balance = sum(fit.per_token for fit in whole) / attention if attention > 0 else 0.0

    def seconds(self, span: Span) -> tuple[Any, dict[str, Any]]:
        """Returns the seconds of units, a ``PassSeconds`` of arrays [stage, unit]; and of S, T, E and G of a vocabulary
        over the ranks, the mean of all ranks, 0 without measurements: arrays by names of :class:`seq1f1b.Costs`."""
        known = None if self._like is None else self._like.seconds(span)[0]
        stages = []
        for stage, fits in enumerate(self._stages):
            like = _ASSUMED if known is None else PassSeconds(*(table[stage] for table in known))
            own = {name: fit.seconds(span.tokens, span.pairs) for name, fit in fits.items()}
            own.setdefault("forward", like.forward)
            own.setdefault("recompute", _like(own["forward"], like.recompute, like.forward))
            if "backward" not in own:
                own["backward"] = own["input"] + own["weight"] if {"input", "weight"} <= own.keys() else like.backward
            for part in ("input", "weight") if "weight" not in own else ():
                own[part] = _like(own["backward"], getattr(like, part), like.backward)
            own.setdefault("input", own["backward"])
            stages.append([own[name] + 0.0 * span.tokens for name in PassSeconds._fields])
        shards = {}
        for name, measured in self._shards.items():
            seconds = sum(fit.seconds(span.tokens, span.pairs) for fit in measured) / max(1, len(measured))
            shards[name] = np.array([seconds + 0.0 * span.tokens] * len(self._stages))
        return PassSeconds._make(np.array(table) for table in zip(*stages, strict=True)), shards


def _like(measured: Any, wanted: Any, known: Any) -> Any:
    is_known = np.greater(known, 0)
    return np.where(is_known, measured * wanted / np.where(is_known, known, 1.0), wanted)
