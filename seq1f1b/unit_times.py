"""Predicts seconds of units of any length from measured ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from seq1f1b.seconds import PASSES, Fit, PassSeconds, Span, fit_seconds

__all__: list[str] = []

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

    def seconds(self, span: Span) -> Any:
        """Returns the seconds of units, a ``PassSeconds`` of arrays [stage, unit]."""
        known = None if self._like is None else self._like.seconds(span)
        stages = []
        for stage, fits in enumerate(self._stages):
            like = _ASSUMED if known is None else PassSeconds(*(table[stage] for table in known))
            stages.append([seconds + 0.0 * span.tokens for seconds in _measured(fits, span, like)])
        return PassSeconds._make(np.array(table) for table in zip(*stages, strict=True))

    def shards(self, span: Span) -> dict[str, Any]:
        """Returns the seconds of S, T, E and G of a vocabulary over the ranks, the mean of all ranks; 0 without
        measurements: arrays [stage, unit], by names of :class:`seq1f1b.Costs`."""
        found = {}
        for name, fits in self._shards.items():
            seconds = sum(fit.seconds(span.tokens, span.pairs) for fit in fits) / max(1, len(fits))
            found[name] = np.array([seconds + 0.0 * span.tokens] * len(self._stages))
        return found


def _measured(fits: dict[str, Fit], span: Span, like: PassSeconds) -> PassSeconds:
    own = {name: fit.seconds(span.tokens, span.pairs) for name, fit in fits.items()}
    own.setdefault("forward", like.forward)
    own.setdefault("recompute", _like(own["forward"], like.recompute, like.forward))
    if "backward" not in own:
        own["backward"] = own["input"] + own["weight"] if {"input", "weight"} <= own.keys() else like.backward
    if "weight" not in own:
        own |= {part: _like(own["backward"], getattr(like, part), like.backward) for part in ("input", "weight")}
    own.setdefault("input", own["backward"])
    return PassSeconds(**own)


def _like(measured: Any, wanted: Any, known: Any) -> Any:
    is_known = np.greater(known, 0)
    return np.where(is_known, measured * wanted / np.where(is_known, known, 1.0), wanted)
