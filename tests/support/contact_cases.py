"""Cases for a supervisor of seq1f1b.first_contact, one of which hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seq1f1b.first_contact.cases import Case, Figures, Rank


class Sleeper(nn.Linear):
    """A stage that goes on for ever in its third unit, on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__(4, 4)
        self.rank, self.units = rank, 0

    def forward(self, x: Tensor) -> Tensor:
        self.units += self.training and torch.is_grad_enabled()
        if self.rank == 1 and self.units == 3:
            time.sleep(600)
        return super().forward(x)


def cases(rank: Rank) -> Iterator[Case]:
    def well() -> Figures:
        return {"pids": {f"{rank.rank}": os.getpid()}, f"of rank {rank.rank}": 1, "ms": rank.rank + 1}

    def hangs() -> Figures:
        engine = rank.make_engine(
            Sleeper(rank.rank), transport="auto", num_microbatches=4, num_segments=1, loss_fn=nn.functional.mse_loss
        )
        x = torch.ones(4, 2, 4)
        engine.step(x, target=x)
        return {}

    yield from (("well", well), ("hangs", hangs), ("after", well))


def broken(rank: Rank) -> Iterator[Case]:
    """Two cases, of which a rank's own process hears nothing."""
    if dist.is_initialized():
        raise RuntimeError(f"no GPU for rank {rank.rank}")
    yield from (("one", dict), ("two", dict))
