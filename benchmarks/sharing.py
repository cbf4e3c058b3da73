"""Replays an order whose ranks share the cores of one machine: what the simulator does not know."""

from __future__ import annotations

import math
from collections.abc import Mapping

from seq1f1b import Schedule, Unit
from seq1f1b.unit import inputs_of

UnitSeconds = Mapping[tuple[str, int, int], float]  # (kind, stage, segment) -> seconds


def replay(
    order: Schedule,
    alone: UnitSeconds,
    together: UnitSeconds,
    *,
    cores: int,
    crowding: float = 1.0,
    waking: float = 0.0,
) -> float:
    """Makespan in seconds. Every rank runs its units in order, each once its message is there; places are not counted.

    A running unit goes at a speed that changes whenever a rank starts or stops: its seconds are those ``alone`` while
    nothing else runs, those ``together`` while all cores do, on a line between; with more running ranks than cores all
    get equal shares, and together ``crowding`` times less is done where they are twice as many.

    Args:
        waking: seconds from the end of a unit to the start of what waits on another rank.
    """
    ranks, now = order.ranks, 0.0
    inputs = inputs_of(unit for rank in ranks for unit in rank)
    arrives: dict[Unit, float] = {}
    position = [0] * len(ranks)
    left: dict[int, float] = {}  # running ranks, and what is left of their units, 1 to 0

    def starts_at(rank: int) -> float:
        """Infinite while what the next unit waits for has not ended."""
        unit = ranks[rank][position[rank]]
        is_near = {other: order.rank_of_stage[other.stage] == rank for other in inputs[unit]}
        times = (arrives.get(other, math.inf) - (waking if near else 0.0) for other, near in is_near.items())
        return max(times, default=0.0)

    def speed(rank: int) -> float:
        unit = ranks[rank][position[rank]]
        key = unit.kind, unit.stage, unit.segment
        if len(left) <= cores:
            share = (len(left) - 1) / max(1, cores - 1)
            return 1 / (alone[key] + share * (together[key] - alone[key]))
        crowded = 1 + (crowding - 1) * min(1.0, (len(left) - cores) / cores)
        return cores / len(left) / (together[key] * crowded)

    while True:
        idle = [r for r in range(len(ranks)) if r not in left and position[r] < len(ranks[r])]
        coming = {r: starts_at(r) for r in idle}
        left |= {r: 1.0 for r, start in coming.items() if start <= now}
        if not left and not coming:
            return now
        speeds = {r: speed(r) for r in left}
        ends = {r: now + left[r] / speeds[r] for r in left}
        event = min([*ends.values(), *(start for r, start in coming.items() if r not in left)])
        assert event < math.inf, "an order that was checked does not stop"
        for r, end in ends.items():
            if end <= event:
                ended = ranks[r][position[r]]
                arrives[ended] = event + waking
                position[r] += 1
                del left[r]
            else:
                left[r] -= (event - now) * speeds[r]
        now = event
