"""Does every family reach the makespan, span and peak that are claimed for it, and refuse the counts it cannot take?

Times are those of equal costs: F = I = W = 1 (B = 2) per micro-batch and rank, so 1 / (v k) per unit, no transfers,
and a place for every message: the formulas know no credits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from typing import Any

import pytest

from seq1f1b import Costs, Links, ScheduleError, build_schedule, schedules
from seq1f1b.schedule import families

FAMILIES = {family.name: family for family in families()}


@dataclass(frozen=True)
class Claim:
    """Formulas of a family in P, M, k, v: valid counts, makespan - 3 M, peak, and span - 3 M if it claims one."""

    name: str
    valid: str
    fill: str
    peak: str
    span: str = ""
    segments: tuple[int, ...] = (1, 2, 3, 4, 8)
    stages: tuple[int, ...] = (1,)
    options: dict[str, Any] = field(default_factory=dict)
    at_most: bool = False  # fill is a bound

    def __call__(self, formula: str, **counts: int) -> Any:
        return eval(compiled(formula), {"ceil": ceil}, counts)


@cache
def compiled(formula: str) -> Any:
    return compile(formula, formula, "eval")


ROUND = "k * ceil(M / (M // ceil(P / k)))"
INTERLEAVED = f"min(v * M * k, (v - 1) * {ROUND} + 2 * (P - 1) + k)"
WHOLE, INTERLEAVES = {"segments": (1, 2)}, {"stages": (2, 3, 4)}
ONE, TWO, FEW, LESS = {"segments": (1,)}, {"stages": (2,)}, {"stages": (1, 2, 3, 4)}, {"stages": (2,), "at_most": True}
SEGMENTS = {"rounds": "segments"}
SPLIT_CLAIMS = [
    Claim("zb-h1", "M * k >= P - 1 + k", "(P - 1) / k", "P - 1 + k"),
    Claim("zb-h2", "M * k >= 2 * P - 2 + k", "(P - 1) / k", "2 * P - 2 + k", "0"),
    Claim("zbv", "M * k >= 2 * P - 2 + k", "(P - 1) / (2 * k)", "2 * P + 2 * (k - 1)", "0", **TWO),
    Claim("v-half", "M * k >= P // 2 + k", "3 * (P - 1) / (2 * k)", "2 * ((P + 2) // 2) + 2 * (k - 1)", **LESS),
    Claim("v-min", "M * k >= (P + 1) // 3 + k", "2 * (P - 1) / k", "2 * ((P + 4) // 3) + 2 * (k - 1)", **LESS),
]
CLAIMS = [
    Claim("gpipe", "True", "3 * (P - 1) / k", "M * k"),
    Claim("terapipe", "True", "3 * (P - 1) / k", "M * k"),
    Claim("1f1b", "True", "3 * (P - 1)", "min(P, M)", **ONE),
    Claim("seq1f1b", "True", "3 * (P - 1) / k", "min(P - 1 + k, M * k)"),
    *(
        Claim("kfkb", f"M % {q} == 0", "3 * (P - 1)", f"min({q} * P, M)", options={"group": q}, **ONE)
        for q in (1, 2, 3)
    ),
    Claim("breadth-first", "M * k >= P", "3 * (P - 1) / (v * k)", "v * M * k", **FEW),
    Claim("interleaved-1f1b", "M >= P and k == 1", "3 * (P - 1) / v", INTERLEAVED, **WHOLE, **INTERLEAVES),
    Claim("hanayo", "M == P and k == 1", "4 * (P - 1) / v", "v * P", **WHOLE, **TWO),
    Claim("hanayo", "M == P and k == 1", "(4 * (P - 1) + 2) / v", "v * P", **WHOLE, stages=(4, 6), at_most=True),
    Claim("slimpipe", "k >= P", "3 * (P - 1) / (v * k)", "min(v * M * k, v * k + 2 * (P - 1))", **FEW),
    *(replace(claim, valid=f"k == 1 and {claim.valid}", **WHOLE) for claim in SPLIT_CLAIMS),  # over whole micro-batches
    *(replace(claim, name=f"seq-{claim.name}") for claim in SPLIT_CLAIMS),
    Claim("dualpipev", "M >= 2 * P and k == 1", "(P - 1) / 2", "2 * P + 1", **WHOLE, **TWO),  # (P - 1) F
    Claim("seq1f1b-interleaved", "M * k >= P", "3 * (P - 1) / (v * k)", INTERLEAVED, **INTERLEAVES),
    Claim("seq1f1b-interleaved", "k >= P", "3 * (P - 1) / (v * k)", INTERLEAVED, options=SEGMENTS, **INTERLEAVES),
]


def grid() -> Iterator[tuple[Claim, dict[str, int]]]:
    for claim in CLAIMS:
        for P in range(1, 9):
            for M, k, v in itertools.product(range(1, 3 * P + 2), claim.segments, claim.stages):
                yield claim, {"P": P, "M": M, "k": k, "v": v}


def check(claim: Claim, of: dict[str, int]) -> None:
    case, (P, M, k, v) = (claim.name, of, claim.options), of.values()
    counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v, "options": claim.options}
    rule = FAMILIES[claim.name].broken_rule(**counts)
    assert (rule is None) == claim(claim.valid, **of), (case, rule)
    if rule is not None:
        with pytest.raises(ScheduleError) as error:
            build_schedule(claim.name, **counts)
        found = f"here P = {P} ranks, M = {M} micro-batches, k = {k} segments, v = {v} stages per rank"
        assert str(error.value) == f"{claim.name} needs {rule}: {found}"
        return
    schedule = build_schedule(claim.name, **counts)
    shape = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, schedule.num_segments)
    assert shape == (P, P * v, M, k), case
    part = 1 / (v * k)
    result = schedule.replace(prefetch=M * k).simulate(Costs(part, 2 * part, part))  # checks the order, too
    assert max(result.peak) == claim(claim.peak, **of), case
    assert result.busy == pytest.approx((3 * M,) * P), case
    bound = 3 * M + claim(claim.fill, **of)
    assert result.makespan == pytest.approx(bound) or (claim.at_most and result.makespan < bound), case
    if claim.span:
        assert max(result.span) == pytest.approx(3 * M + claim(claim.span, **of)), case


@pytest.mark.parametrize("offset", range(5))
def test_slice_of_grid(offset: int) -> None:
    """A fixed one in 35: steps through P, M, k and v of every family out of phase."""
    cases = list(itertools.islice(grid(), 7 * offset, None, 35))
    for case in cases:
        check(*case)
    assert {claim.name for claim, _ in cases} == {claim.name for claim in CLAIMS}


@pytest.mark.full
def test_whole_grid() -> None:
    for case in grid():
        check(*case)


def test_every_family_has_a_claim() -> None:
    # auto claims no formula: test_auto.py holds it to the named orders, test_exact.py to the shortest
    assert {claim.name for claim in CLAIMS} | {"auto"} == set(schedules()) == set(FAMILIES)
    for family in families():
        assert family.description and family.source and family.validity
        assert f"v = {family.stages_per_rank}" in family.validity or family.stages_per_rank < 3
        tried = [
            {"num_ranks": 2, "num_microbatches": M, "num_segments": k, "stages_per_rank": family.stages_per_rank}
            for M, k in ((4, 1), (2, 1), (4, 2))
        ]
        counts = next(counts for counts in tried if family.broken_rule(**counts) is None)
        assert family.splits_backward == ("W" in build_schedule(family.name, **counts).kinds)


def test_relatives_agree() -> None:
    """Families that are another one for some counts."""
    for P, M in itertools.product(range(1, 5), range(1, 9)):
        counts = {"num_ranks": P, "num_microbatches": M}
        assert build_schedule("kfkb", **counts, options={"group": 1}) == build_schedule("1f1b", **counts)
        assert build_schedule("seq1f1b", **counts) == build_schedule("1f1b", **counts)
        assert build_schedule("terapipe", **counts, num_segments=3) == build_schedule("gpipe", **counts, num_segments=3)
        if M >= P:
            assert build_schedule("breadth-first", **counts) == build_schedule("gpipe", **counts)
            assert build_schedule("interleaved-1f1b", **counts, stages_per_rank=2) == build_schedule(
                "seq1f1b-interleaved", **counts, stages_per_rank=2
            )


# -- options -----------------------------------------------------------------------------------------------------------


def test_groups_hide_slow_links() -> None:
    """P 4, M 12, transfers of half a forward: the bubble falls from 20 to 12."""
    makespans = [
        build_schedule("kfkb", num_ranks=4, num_microbatches=12, options={"group": q})
        .replace(prefetch=12)
        .simulate(Costs(1, 2, links=Links(latency=0.5)))
        .makespan
        for q in (1, 2)
    ]
    assert makespans == [36 + 20, 36 + 12]


def test_extra_warmup_trades_memory_for_time() -> None:
    def simulate(extra: int) -> tuple[float, int]:
        schedule = build_schedule("1f1b", num_ranks=4, num_microbatches=12, options={"extra_warmup": extra})
        result = schedule.replace(prefetch=12).simulate(Costs(1, 2, links=Links(latency=0.25)))
        return result.makespan, max(result.peak)

    assert simulate(0) == (36 + 14.5, 4)
    assert simulate(1) == (36 + 10.5, 7)


@pytest.mark.parametrize(("P", "k", "v"), [(2, 4, 2), (4, 12, 3), (3, 8, 2), (4, 7, 2), (4, 4, 4)])
def test_rounds_of_segments_need_few_places(P: int, k: int, v: int) -> None:
    """As many units are held, and fewer messages wait. One place is enough if P divides k."""
    counts = {"num_ranks": P, "num_microbatches": 3, "num_segments": k, "stages_per_rank": v}
    plain = build_schedule("seq1f1b-interleaved", **counts)
    rounds = build_schedule("seq1f1b-interleaved", **counts, options=SEGMENTS)
    assert build_schedule("seq1f1b-interleaved", **counts, options={"rounds": "microbatches"}) == plain
    assert (rounds == plain) == (k < 2 * P)
    assert rounds.simulate().peak == plain.simulate().peak
    assert sum(rounds.places) <= sum(plain.places) and (sum(rounds.places) < sum(plain.places) or k < 2 * P)
    if k % P == 0:
        assert rounds.replace(prefetch=1).simulate().makespan == 3 * (3 * v * k + P - 1)
    forwards = [unit for unit in rounds.ranks[0] if unit.kind == "F" and unit.microbatch == 0]
    sizes = [len(list(each)) for _, each in itertools.groupby(forwards, key=lambda unit: unit.stage)]
    assert len(sizes) == v * (k // P) and min(sizes) >= P and max(sizes) - min(sizes) <= 1


SPLIT = [name for name, family in FAMILIES.items() if "costs" in family.options]


@pytest.mark.parametrize("name", [name for name in SPLIT if name != "auto"])  # auto: in any memory but its cap's
def test_costs_never_make_an_order_worse(name: str) -> None:
    """Nor larger; and somewhere they gain, but in the tight memory of zb-h1."""
    rng = random.Random(name)
    v, k = FAMILIES[name].stages_per_rank, 3 if name.startswith("seq-") else 1
    gained = 0
    for P in (2, 4, 5):
        counts = {"num_ranks": P, "num_microbatches": 2 * P, "num_segments": k, "stages_per_rank": v}
        for base in ((10, 21, 3), (1, 2.1, 0.27), (1, 1.3, 0.8), (1, 0.9, 1.1)):
            costs = [[[rng.uniform(0.9, 1.1) * c * (1 + s) for s in range(k)] for _ in range(P * v)] for c in base]
            forward, inputs, weight = costs
            backward = [[i + w for i, w in zip(*rows, strict=True)] for rows in zip(inputs, weight, strict=True)]
            plain, timed = (
                build_schedule(name, **counts, options=options)
                .replace(prefetch=2 * P * k)
                .simulate(Costs(forward, backward, weight))
                for options in ({}, {"costs": costs})
            )
            assert timed.makespan <= plain.makespan * (1 + 1e-8)
            assert max(timed.peak) <= max(plain.peak)
            gained += timed.makespan < plain.makespan * 0.999
    assert gained > 0 or name == "zb-h1"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpipe", {"group": 2}, "gpipe takes no option 'group'; it takes none"),
        ("kfkb", {"gruop": 2}, "kfkb takes no option 'gruop'; it takes group, extra_warmup"),
        ("kfkb", {"group": 0}, "group is 0, must be at least 1"),
        ("kfkb", {"extra_warmup": -1}, "extra_warmup is -1, must be at least 0"),
        ("kfkb", {"group": 2**31}, "group is 2147483648, must be in 1..2147483647"),
        ("seq1f1b", {"costs": (1, 1, 1)}, "seq1f1b takes no option 'costs'; it takes extra_warmup, trees"),
        ("zb-h1", {"costs": (1, 1)}, "costs must hold the costs of F, I and W"),
        ("zb-h1", {"costs": (1, 1, -1)}, "costs hold -1, must be finite and at least 0"),
        ("zb-h1", {"costs": (1, float("nan"), 1)}, "costs hold nan, must be finite and at least 0"),
        (
            "zb-h1",
            {"costs": (1, [[1, 1]], 1)},
            "costs of I must be a number or hold 2 x 1 values, one of each segment of each stage: it holds 1",
        ),
        ("zb-h1", {"cap": 0}, "cap is 0, must be at least 1"),
        ("interleaved-1f1b", {"rounds": "units"}, "rounds is 'units', must be 'microbatches' or 'segments'"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    counts = {"num_ranks": 2, "num_microbatches": 4, "options": options}
    for call in (lambda: build_schedule(name, **counts), lambda: FAMILIES[name].broken_rule(**counts)):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == message


@pytest.mark.parametrize("value", ["2", 2.0, None])
def test_an_option_of_another_type(value: object) -> None:
    with pytest.raises(TypeError):
        build_schedule("kfkb", num_ranks=2, num_microbatches=4, options={"group": value})


def test_the_broken_rule_of_an_option() -> None:
    with pytest.raises(ScheduleError, match="kfkb needs group divides M: here P = 2 ranks, M = 5 micro-batches"):
        build_schedule("kfkb", num_ranks=2, num_microbatches=5)
    counts = {"num_ranks": 4, "num_microbatches": 8, "stages_per_rank": 2}
    assert FAMILIES["zb-h1"].broken_rule(num_ranks=4, num_microbatches=8, options={"cap": 3}) == "cap >= P - 1 + k"
    for least, rule in ((3, "round k >= P"), (9, "M >= round")):
        assert FAMILIES["interleaved-1f1b"].broken_rule(**counts, options={"round": least}) == rule
    for change, more, rule in (
        ({"num_segments": 3}, {}, "k >= P"),
        ({"num_segments": 4}, {"round": 1}, "no round where rounds is 'segments'"),
        ({"num_segments": 4, "stages_per_rank": 1}, {}, "v >= 2"),
    ):
        assert FAMILIES["seq1f1b-interleaved"].broken_rule(**counts | change, options=SEGMENTS | more) == rule
