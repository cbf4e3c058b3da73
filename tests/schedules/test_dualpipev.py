"""Is DualPipeV's order the one that torch builds, and how long does it take?"""

from __future__ import annotations

import pytest

from seq1f1b import Schedule, build_schedule


def test_dualpipev_is_what_torch_builds() -> None:
    """Torch has the order from DeepSeek's code, too, and writes an F with its B in one cell."""
    pipelining = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch")
    for P in range(1, 7):
        for M in (2 * P, 2 * P + 1, 4 * P):
            theirs = pipelining.ScheduleDualPipeV.__new__(pipelining.ScheduleDualPipeV)
            theirs.pp_group_size, theirs._n_microbatches = P, M
            lines = [",".join(map(str, theirs._calculate_single_rank_operations(rank))) for rank in range(P)]
            ours = build_schedule("dualpipev", num_ranks=P, num_microbatches=M, stages_per_rank=2)
            assert Schedule.from_csv("\n".join(lines), num_segments=1) == ours, (P, M)
