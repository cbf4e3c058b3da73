"""Ties, cuts, losses, documents, checkpoints, errors together, at random: does training equal that of one process?"""

from __future__ import annotations

import warnings

import pytest
from surroundings import make_case, run

SLICE = 4  # cases of the plain run; `pytest -m full` runs a thousand


def check(seeds: range) -> None:
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of losses and divisors, which have tests of their own
            error = run(seed)
        assert error < 1e-9, f"seed {seed}: {error:.1e} off; {make_case(seed)}"


@pytest.mark.parametrize("part", range(4))
def test_slice(part: int) -> None:
    check(range(part * SLICE // 4, (part + 1) * SLICE // 4))


@pytest.mark.full
@pytest.mark.parametrize("part", range(25))
def test_a_thousand(part: int) -> None:
    check(range(part * 40, (part + 1) * 40))
