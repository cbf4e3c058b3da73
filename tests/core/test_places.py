"""Does every message find a place in time, with no more places than that takes, and are more places never slower?"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import pytest
from orders import random_order

from seq1f1b import _C, Costs, Links, Schedule, build_schedule
from seq1f1b.schedule import families
from seq1f1b.unit import edges_of

FAMILIES = {family.name: family for family in families()}
AMPLE = 10**6  # every message has a place of its own


def orders(rng: random.Random, count: int) -> Iterator[Schedule]:
    """Some orders of every family, and some that belong to none."""
    grid = list(itertools.product((2, 3, 4), (1, 2, 5), (1, 2, 8), (1, 2, 4)))
    for name, family in FAMILIES.items():
        for P, M, k, v in rng.sample(grid, count):
            counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
            if family.broken_rule(**counts) is None:
                yield build_schedule(name, **counts)
    for _ in range(5 * count):
        yield random_order(rng)


def counted_places(schedule: Schedule, costs: Costs) -> list[int]:
    """Places of every edge by a run in which each message has its own.

    The most that hold a message at once, from the end of the unit that makes it to the end of its last reader; at least
    one more than the receiver needs at once, which has to post messages 0..n before it uses number n.
    """
    run = schedule.replace(prefetch=AMPLE).simulate(costs)
    end_of = {
        unit: end
        for units, row in zip(schedule.ranks, run.end, strict=True)
        for unit, end in zip(units, row, strict=True)
    }
    last_kind = "W" if "W" in schedule.kinds else "B" if "B" in schedule.kinds else "F"
    found = []
    for edge in edges_of(_C.program_lower(schedule.handle, 0, False, _C.NO_RANK)):
        kinds = "BI" if edge.channel else "F"
        makers = [u for u in schedule.ranks[edge.source_rank] if u.stage == edge.source_stage and u.kind in kinds]
        readers = [unit._replace(kind=last_kind, stage=edge.destination_stage) for unit in makers]
        freed = sorted(end_of[unit] for unit in readers)
        at_once = [n + 1 - sum(end <= end_of[unit] for end in freed) for n, unit in enumerate(makers)]
        number, num_freed, needed = {unit[2:]: n for n, unit in enumerate(makers)}, 0, 0
        for unit in schedule.ranks[edge.destination_rank]:
            if unit.stage == edge.destination_stage and unit.kind in kinds:
                needed = max(needed, number[unit[2:]] + 1 - num_freed)
            num_freed += unit in readers
        found.append(min(max(*at_once, needed + 1), edge.num_messages))
    return found


def random_costs(rng: random.Random, schedule: Schedule) -> Costs:
    """Whole numbers, whose sums are exact."""
    S, k = schedule.num_stages, schedule.num_segments
    forward, inputs, weight = ([[float(rng.randint(1, 9)) for _ in range(k)] for _ in range(S)] for _ in range(3))
    both = [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(inputs, weight, strict=True)]
    return Costs(forward, both, weight, inputs, links=Links(latency=float(rng.randint(0, 3))))


def test_places_by_time_are_those_of_a_run_with_places_for_all() -> None:
    """So that no sender waits in the run that places are counted by."""
    rng = random.Random(3)
    for schedule in orders(rng, 3):
        for costs in (Costs(), random_costs(rng, schedule)):
            order = schedule.replace(costs=costs)
            assert list(order.places) == counted_places(schedule, costs)
            ample = schedule.replace(prefetch=AMPLE).simulate(costs)
            assert list(map(list, order.simulate(costs).start)) == list(map(list, ample.start))
        assert (schedule.prefetch, schedule.places) == (None, schedule.replace(costs=Costs()).places)


def test_an_order_made_for_costs_has_places_by_these_costs() -> None:
    rng = random.Random(7)
    for name, extra in (
        ("seq-zb-h1", {}),
        ("auto", {"transfer": 2.0}),
        ("auto", {"transfer": 1.0, "backward": "whole"}),
    ):
        counts = {"num_ranks": 4, "num_microbatches": 6, "num_segments": 2}
        costs = random_costs(rng, build_schedule("seq1f1b", **counts))
        latency = extra.get("transfer", 0.0)
        options = {"costs": (costs.forward, costs.input, costs.weight), **extra}
        schedule = build_schedule(name, **counts, options=options)
        given = Costs(costs.forward, costs.backward, costs.weight, costs.input, links=Links(latency=latency))
        assert list(schedule.places) == counted_places(schedule, given)
        assert schedule._places_text != "None" and build_schedule(name, **counts, options=options) == schedule
        assert build_schedule(name, **counts, options=options, prefetch=2)._places_text == "2"
        forward = schedule.forward_only()
        assert list(forward.places) == counted_places(forward, Costs())
        assert re.fullmatch(r"None \(places [0-9a-f]{8} by costs\)", schedule.recompute()._places_text)


def test_a_link_takes_its_latency_and_the_time_of_the_longest_message() -> None:
    order = build_schedule("seq1f1b", num_ranks=3, num_microbatches=4, num_segments=2, options={"extra_warmup": 2})
    slow = Links(latency=[1.0, 2.0], bandwidth=[2.0, 8.0], message_bytes=[4, 16])
    by_slow, by_sums = (order.replace(costs=Costs(links=links)) for links in (slow, Links(latency=[9.0, 4.0])))
    assert by_slow.places == by_sums.places != order.places


@pytest.mark.parametrize("P", [2, 4, 8])
def test_more_places_are_never_slower(P: int) -> None:
    """An edge once got more places of few than of many: at first, or where they break cycles."""
    for M, k, v in itertools.product((1, 2, 4, 8), (8, 16, 32), (2, 4)):
        order = build_schedule(
            "seq1f1b-interleaved", num_ranks=P, num_microbatches=M, num_segments=k, stages_per_rank=v
        )
        runs = [order.replace(prefetch=places) for places in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)] + [order]
        for few, many in itertools.pairwise(runs[:-1]):
            assert all(a <= b for a, b in zip(few.places, many.places, strict=True))
        times = [run.simulate().makespan for run in runs]
        assert times == sorted(times, reverse=True)


def test_more_places_are_never_slower_in_any_order() -> None:
    rng = random.Random(11)
    for schedule in orders(rng, 2):
        places = [schedule.replace(prefetch=prefetch).places for prefetch in range(4)]
        assert all(a <= b for few, many in itertools.pairwise(places) for a, b in zip(few, many, strict=True))


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_costs_that_are_refused() -> None:
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match="costs count places where prefetch is None, not 2"):
        order.replace(prefetch=2, costs=Costs())
    with pytest.raises(ValueError, match="forward must be a number or hold 2 x 1 values, one of each segment"):
        order.replace(costs=Costs([[1.0]]))
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"seconds by which places are counted hold {wrong:g}, must be finite"):
            order.replace(costs=Costs(wrong)).simulate()
        with pytest.raises(ValueError, match=f"latency by which places are counted is {wrong:g}, must be finite"):
            order.replace(costs=Costs(links=Links(latency=wrong))).check()
            order.replace(costs=Costs(links=Links(latency=wrong))).simulate()
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"bandwidth is .*, must be above 0"):
            order.replace(costs=Costs(links=Links(bandwidth=wrong)))
    other = build_schedule("seq1f1b", num_ranks=3, num_microbatches=2)
    with pytest.raises(ValueError, match="seconds holds"):
        _C.program_lower(order.handle, None, False, _C.NO_RANK, other._seconds_of(Costs()))
