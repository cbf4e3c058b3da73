"""Costs, bytes and sizes as a caller gives them, and flat as the core reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__: list[str] = []


def per_unit(costs: Any, name: str, num_stages: int, num_segments: int, rows: Sequence[int] | None = None) -> list[Any]:
    """One value per (stage, segment), flat; with rows, segments of every micro-batch, one per (stage, m, segment)."""
    if not hasattr(costs, "__len__"):
        return [costs] * (num_stages * (num_segments if rows is None else sum(rows)))
    if rows is not None:
        if len(costs) != num_stages:
            raise ValueError(f"{name} must be a number or hold {num_stages} stages of {len(rows)} micro-batches each")
        return [cost for of_stage in costs for cost in flat_rows(of_stage, name, rows)]
    if len(costs) != num_stages or any(len(row) != num_segments for row in costs):
        raise ValueError(f"{name} must be a number or hold {num_stages} stages of {num_segments} segments each")
    return [cost for row in costs for cost in row]


def flat_rows(values: Any, name: str, rows: Sequence[int]) -> list[Any]:
    """The values of [micro-batch][segment], one after the other."""
    if not all(hasattr(row, "__len__") for row in values) or [len(row) for row in values] != list(rows):
        raise ValueError(f"{name} must hold, for each of {len(rows)} micro-batches, one value for each of its segments")
    return [value for row in values for value in row]


def per_place(values: Any, name: str, count: int, place: str) -> list[Any]:
    """One value per rank or stage."""
    if not hasattr(values, "__len__"):
        return [values] * count
    if len(values) != count:
        raise ValueError(f"{name} holds {len(values)} values, must be one number or {count}, one of each {place}")
    return list(values)
