"""Does the planner choose the plans that it chose before, at the same price?"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import recorded_plans
from slices import slice_of

KEPT = [(f"plan {n}",) for n in range(2, recorded_plans.NUM_PLANS, 13)]
KEPT += [(f"other {n}",) for n in (1, 5, 10, 12, 22, 31, 33)]


@cache
def recorded() -> dict[str, Any]:
    return recorded_plans.recorded()


@pytest.mark.parametrize("name", slice_of([(name,) for name in recorded_plans.names()], KEPT))
def test_the_answer_is_the_recorded_one(name: str) -> None:
    """Plans, their order, tables, refusals: equal; numbers to twelve digits."""
    told = recorded()[name]
    assert recorded_plans.difference(recorded_plans.answer(name, told["cap"]), told["answer"]) is None


def test_a_difference_is_found() -> None:
    told = recorded()["plan 3"]["answer"]
    (first, *rest) = told["plans"]
    dearer = {**told, "plans": [{**first, "seconds": first["seconds"] * (1 + 1e-11)}, *rest]}
    assert recorded_plans.difference(told, dearer) == f"/plans/0/seconds: {first['seconds']!r} is not " + repr(
        dearer["plans"][0]["seconds"]
    )
    assert recorded_plans.difference(told, {**told, "plans": rest}) is not None
