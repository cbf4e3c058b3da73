"""Ties, cuts, losses, documents, checkpoints, errors together, at random: does training equal that of one process?"""

from __future__ import annotations

import warnings

import pytest
from slices import full_only
from surroundings import make_case, run

FULL = [(range(first, first + 40),) for first in range(0, 1000, 40)]


@pytest.mark.parametrize("seeds", [*(range(i, i + 1) for i in range(4)), *full_only(*FULL)], ids=str)
def test_training_is_that_of_one_process(seeds: range) -> None:
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of losses and divisors, which have tests of their own
            error = run(seed)
        assert error < 1e-9, f"seed {seed}: {error:.1e} off; {make_case(seed)}"
