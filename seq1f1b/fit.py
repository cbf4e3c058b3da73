"""How long units of any length take, from those of some that were measured."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Fit", "fit_seconds"]


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
