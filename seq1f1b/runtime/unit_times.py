"""Seconds of units of any length, from those of some that were measured."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, TypeAlias

from seq1f1b.fit import Fit, fit_seconds
from seq1f1b.runtime.report import Report

__all__: list[str] = []

Terms: TypeAlias = "dict[tuple[str, int], Fit]"
"""By pass and stage."""


def unit_seconds(report: Report) -> dict[tuple[str, int, int, int], float]:
    """Seconds of each unit of a rank by (pass, stage, micro-batch, segment), with the engine's own time around it."""
    spans: dict[tuple[str, int, int, int], float] = defaultdict(float)
    for unit, start, end in (*report.timeline, *report.fills):
        spans[unit.kind, unit.stage, unit.microbatch, unit.segment] += end - start
    own = max(0.0, report.seconds - report.busy - report.wait - report.send - report.tier) / max(1, len(spans))
    return {key: seconds + own for key, seconds in spans.items()}


def pairs(start: Any, tokens: int) -> float:
    """Keys that the queries of a segment of one document see, all together."""
    return float(tokens) * float(start) + tokens * (tokens + 1) / 2.0


class UnitTimes:
    """Measured units, and what they tell of others.

    A unit of n tokens whose queries see p keys in all takes a + b n + c p: launches and what else is the same for every
    unit, products with weights, attention. Each pass of each stage has its own three numbers, none of them below 0.
    """

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], list[tuple[int, float, float]]] = defaultdict(list)

    def add(self, kind: str, stage: int, tokens: int, keys: float, seconds: float) -> None:
        """Takes one measured unit."""
        self._samples[kind, stage].append((tokens, keys, seconds))

    def terms(self) -> Terms:
        """The three numbers of each pass and stage."""
        return {key: fit_seconds(each) for key, each in self._samples.items()}
