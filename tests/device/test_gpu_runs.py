"""Do tests/gpu and ``seq1f1b doctor`` see what is wrong between GPUs? Over stand-ins, in threads.

``SEQ1F1B_STAND_INS=1 pytest tests/gpu`` rehearses all of tests/gpu.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import gpu_runs
import pytest
import torch
from gpu_runs import Rank, Ranks, is_right, train
from stand_in_engine import StandInEdges, StandInEngine
from stand_in_library import CORRUPT, stand_in
from torch import Tensor, nn

import seq1f1b
from seq1f1b.cli import doctor
from seq1f1b.testing import run_ranks
from seq1f1b.transport.table import TRANSPORTS


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQ1F1B_NCCL", stand_in().path)
    gc.collect()  # what an engine of the last test still holds goes before the stand-ins forget it
    stand_in().reset(1, foreign_memory=1)


@pytest.mark.parametrize("change", [0.0, 1e-3, float("nan")])
def test_a_unit_that_is_a_little_off_is_seen(change: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one unit's result, as what a place that was overwritten might hold."""
    units = 0

    def late(rank: Rank) -> Callable[[Tensor], Tensor]:
        def spoil(x: Tensor) -> Tensor:
            nonlocal units
            units += rank.rank == 0
            if rank.rank == 1 or units != 24:  # in the second of three steps
                return x
            spoilt = torch.zeros_like(x)
            spoilt[0, 0, 0] = change
            return x + spoilt

        return spoil

    monkeypatch.setattr(gpu_runs, "delays", late)
    found = Ranks(is_torchruns=False, is_rehearsed=True).run(train, "copy", "Seq1F1B")
    assert all(map(is_right, found)) == (change == 0.0), found


def test_the_doctor_tells_the_rate_of_each_edge_or_why_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(fn: Any, num_ranks: int, transport: str) -> list[list[str]]:
        if transport == "nccl":
            stand_in().damage("nccl", StandInEdges.proof_bytes, CORRUPT)

        def run(group: Any) -> list[str]:
            return doctor.sending_edges(group.rank, nn.Linear(1, 1), transport=transport, group=group)

        return run_ranks(num_ranks, run)

    stand_in().reset(1, foreign_memory=1)  # once: engines that failed still hold what they have of it
    monkeypatch.setattr(seq1f1b, "launch", launch)
    monkeypatch.setattr(seq1f1b, "PipelineEngine", StandInEngine)
    lines = list(doctor.edges_between(3))
    for transport in ("copy", "auto"):
        told = [line for line in lines if line.startswith(f"transport={transport!r}: GPU ")]
        assert [line.split(": ")[1] for line in told] == [
            f"GPU {a} to GPU {b}" for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))
        ]
        assert all(": copy, " in line and " GB/s, " in line for line in told)
    (failed,) = (line for line in lines if line.startswith("transport='nccl'"))
    assert "failed its proof" in failed
    assert len(lines) >= 4 * (1 + sum(row.between_gpus for row in TRANSPORTS.values())) - 3
