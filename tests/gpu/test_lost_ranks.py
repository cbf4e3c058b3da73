"""If a rank is killed in a step, stalls in it, or has an error of its GPU, do all others say so in time and leave?

Starts its own ranks.
"""

from __future__ import annotations

import pytest
from gpu_runs import LOST, MOVERS, STAND_IN_OF_NCCL, STEP_LIMIT_S, Ranks, lose_a_rank


@pytest.mark.parametrize("transport", MOVERS)
@pytest.mark.parametrize("kind", ["killed", "stalled", "asserts"])
def test_the_others_name_the_lost_rank(ranks: Ranks, transport: str, kind: str) -> None:
    if ranks.is_torchruns:
        pytest.skip("torchrun ends all ranks when one dies: run plain pytest")
    if why := ranks.why_not(transport):
        pytest.skip(why)
    if ranks.is_rehearsed and transport == "nccl":
        pytest.skip(STAND_IN_OF_NCCL)
    if ranks.is_rehearsed and kind == "asserts":
        pytest.skip("no kernel of a stand-in fails: tests/device/test_gpu_errors.py has its driver fail")
    for blamed, seconds, text in ranks.run_processes(min(3, ranks.world), lose_a_rank, transport, kind, lost=LOST):
        assert blamed == LOST, text
        assert seconds < (2 if kind == "asserts" else STEP_LIMIT_S + 10), text
        assert kind != "asserts" or "CUDA" in text
