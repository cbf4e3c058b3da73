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
    """Plans, their order, tables, refusals: equal, numbers to twelve digits; or plans that are faster under the cap."""
    told = recorded()[name]
    found = recorded_plans.answer(name, told["cap"])
    assert recorded_plans.worse(found, told["answer"], told["cap"]) is None


def test_a_difference_is_found() -> None:
    """A plan that is slower, above its cap, or missing; one that is faster is none."""
    told, cap = recorded()["plan 3"]["answer"], recorded()["plan 3"]["cap"]
    (first, *rest) = told["plans"]

    def worse(**change: Any) -> str | None:
        return recorded_plans.worse({"plans": [{**first, **change}, *rest]}, told, cap)

    slower = first["seconds"] * (1 + 1e-11)
    assert worse(seconds=slower) == f"/plans/0/seconds: {slower!r} is not {first['seconds']!r}"
    assert worse() is worse(seconds=first["seconds"] * 0.99) is None
    assert worse(seconds=first["seconds"] * 0.99, peak=[cap + 1]) is not None
    assert recorded_plans.worse({"plans": rest}, told, cap) is not None
