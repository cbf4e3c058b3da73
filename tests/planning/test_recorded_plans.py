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
