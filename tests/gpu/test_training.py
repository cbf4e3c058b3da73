"""Does a pipeline over this machine's GPUs train as the whole model does, by each transport, in steady memory?"""

from __future__ import annotations

import pytest
import torch
from gpu_runs import MOVERS, ORDERS, Ranks, is_right, steady, train

from seq1f1b import HOST, Memory


@pytest.fixture(params=MOVERS)
def transport(request: pytest.FixtureRequest, ranks: Ranks) -> str:
    if why := ranks.why_not(request.param):
        pytest.skip(why)
    return str(request.param)


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_those_of_the_whole_model(ranks: Ranks, transport: str, order: str) -> None:
    found = ranks.run(train, transport, order)
    assert all(map(is_right, found)), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gradients_in_other_dtypes(ranks: Ranks, dtype: torch.dtype) -> None:
    found = ranks.run(train, "auto", "Seq1F1B", dtype)
    assert all(map(is_right, found)), found


@pytest.mark.parametrize("memory", [Memory("all"), Memory(offload=HOST)], ids=["recompute", "pinned memory"])
def test_gradients_under_a_memory_option(ranks: Ranks, memory: Memory) -> None:
    found = ranks.run(train, "auto", "Seq1F1B", torch.float32, memory)
    assert all(map(is_right, found)), found


def test_memory_is_steady_from_the_third_step_on(ranks: Ranks, transport: str) -> None:
    for held in ranks.run(steady, transport):
        assert len(set(held[2:])) == 1, held
