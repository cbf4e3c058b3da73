"""Small orders of every family; and random ones that keep every rule: loop and V, split backward or whole, or none."""

import itertools
import random
from collections.abc import Iterable, Iterator

from trees import makers_of

from seq1f1b import Schedule, ScheduleError, Unit, build_schedule
from seq1f1b.schedule import families


def small_schedule(name: str, P: int, M: int, k: int | tuple[int, ...]) -> Schedule | None:
    """None where the family's rule forbids these counts."""
    family = next(family for family in families() if family.name == name)
    counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": family.stages_per_rank}
    return build_schedule(name, **counts) if family.broken_rule(**counts) is None else None


def small_schedules(name: str, *columns: Iterable[int]) -> Iterator[Schedule]:
    """Yields the schedules of all these P, M and k."""
    return filter(None, (small_schedule(name, *counts) for counts in itertools.product(*columns)))


def random_order(rng: random.Random) -> Schedule:
    """A random order that keeps every rule: units start in a random one of the orders that the rules allow."""
    P, v = rng.randint(1, 3), rng.randint(1, 2)
    M, k = rng.randint(1, 3), rng.randint(1, 3)
    S = P * v
    placement = rng.choice([[s % P for s in range(S)], [min(s % (2 * P), 2 * P - 1 - s % (2 * P)) for s in range(S)]])
    has_backward, split = rng.random() < 0.8, rng.random() < 0.4
    kinds = "F" + has_backward * ("IW" if split else "B")
    chains = [list(range(-1, k - 1))] * M
    cells = [[Unit(kind, *cell) for kind in kinds] for cell in itertools.product(range(S), range(M), range(k))]
    makers = {unit: makers_of(unit, chains, S, kinds) for cell in cells for unit in cell}
    done: set[Unit] = set()
    ranks: list[list[Unit]] = [[] for _ in range(P)]
    while True:
        following = [next((unit for unit in cell if unit not in done), None) for cell in cells]
        ready = [unit for unit in following if unit is not None and makers[unit] <= done]
        if not ready:
            return Schedule(ranks)
        unit = rng.choice(ready)
        done.add(unit)
        ranks[placement[unit.stage]].append(unit)


def with_recomputation(schedule: Schedule, rng: random.Random, share: float = 0.6) -> Schedule:
    """Gives some units of an order an R, each anywhere between F and the backward of its unit."""
    ranks = [list(order) for order in schedule.ranks]
    for order in ranks:
        for back in [unit for unit in order if unit.kind in "BI"]:
            if rng.random() < share:
                places = range(order.index(back._replace(kind="F")) + 1, order.index(back) + 1)
                order.insert(rng.choice(places), back._replace(kind="R"))
    return Schedule(ranks)


def with_moves(schedule: Schedule, rng: random.Random, share: float = 0.6) -> Schedule:
    """Has some units of an order go away and come back, anywhere that the rules allow."""
    for rank, order in enumerate(schedule.ranks):
        recomputed = {unit[1:] for unit in order if unit.kind == "R"}
        for back in [unit for unit in order if unit.kind in "BI" and unit[1:] not in recomputed]:
            if rng.random() < share:
                ranks = [list(each) for each in schedule.ranks]
                own = ranks[rank]
                begin, end = own.index(back._replace(kind="F")) + 1, own.index(back)
                places = sorted(rng.randint(begin, end) for _ in "OAL")
                for i, kind in enumerate("OAL"):
                    own.insert(places[i] + i, back._replace(kind=kind))
                try:
                    changed = Schedule(ranks)
                    changed.check()
                    schedule = changed
                except ScheduleError:  # too many on their way at once
                    pass
    return schedule
