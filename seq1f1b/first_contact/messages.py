"""Does each edge carry what was sent, by each transport, and how fast?"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.first_contact.cases import Case, Figures, Rank, Unmeasured
from seq1f1b.transport.table import TRANSPORTS

__all__: list[str] = []

RATE, BY, PROOF = "GB/s", "by", "GB/s alone"  # figures of an edge; alone: the largest message of its proof
MICROBATCHES = 8
TIMED = 4


def numbers(count: int, device: torch.device, turn: int) -> Tensor:
    """The contents of message ``turn`` of a direction: integers that bfloat16 has exactly."""
    return ((torch.arange(count, device=device) * 7 + 13 * turn) % 251).to(torch.bfloat16)


class Sender(nn.Module):
    """The first stage: sends a pattern, and counts wrong elements of the gradients that come back.

    Args:
        sizes: (tokens, hidden) of a message.
    """

    def __init__(self, rank: Rank, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), device=rank.device, dtype=torch.bfloat16))
        self.wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
        self.sent = self.returned = 0
        self.checks, self._device, self._sizes = True, rank.device, sizes
        self.same = numbers(sizes[0] * sizes[1], rank.device, 0).view(1, *sizes)

    def pattern(self, turn: int) -> Tensor:
        if not self.checks:
            return self.same
        return numbers(self._sizes[0] * self._sizes[1], self._device, turn).view(1, *self._sizes)

    def forward(self, x: Tensor) -> Tensor:
        stage = self

        class Send(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, weight: Tensor) -> Tensor:
                stage.sent += 1
                return stage.pattern(stage.sent).clone()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                stage.returned += 1
                if stage.checks:
                    stage.wrong += (gradients[0] != stage.pattern(-stage.returned)).sum()
                return torch.zeros((), device=gradients[0].device, dtype=torch.bfloat16)

        return Send.apply(self.weight)  # type: ignore[no-any-return,no-untyped-call]


class Taker(Sender):
    """The last stage: counts wrong elements of what comes, and sends a pattern back."""

    def forward(self, x: Tensor) -> Tensor:
        stage = self

        class Take(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                stage.sent += 1
                if stage.checks:
                    stage.wrong += (x != stage.pattern(stage.sent)).sum()
                return x[..., :1].float() + weight

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
                stage.returned += 1
                weight = torch.zeros((), device=gradients[0].device, dtype=torch.bfloat16)
                return stage.pattern(-stage.returned).clone(), weight

        return Take.apply(x, self.weight)  # type: ignore[no-any-return,no-untyped-call]


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.float().mean() + 0 * target.sum()


def exchange(rank: Rank, transport: str, group: Any, is_first: bool) -> float:
    """GB/s of messages there and back, the units' few copies included. Raises where one came that was not sent."""
    tokens, hidden = (2048, 4096) if rank.is_cuda else (64, 128)  # 16 MiB on a GPU, or 64 where a rank has its own
    if rank.is_cuda and rank.share == 1:
        tokens, hidden = 2 * tokens, 2 * hidden
    stage = (Sender if is_first else Taker)(rank, (tokens, hidden))
    rank.poison_device()
    engine = rank.make_engine(
        stage, transport=transport, group=group, schedule="1f1b", num_microbatches=MICROBATCHES, num_segments=1,
        loss_fn=mean,
    )  # fmt: skip
    x = torch.zeros(MICROBATCHES, tokens, device=rank.device)
    for _ in range(3):
        engine.step(x, target=x)
    rank.sync()
    wrong = int(stage.wrong)
    assert wrong == 0, f"{wrong} elements of messages that came by {transport} are not those that were sent"
    stage.checks, times = False, []
    for _ in range(TIMED):
        start = time.perf_counter()
        engine.step(x, target=x)
        rank.sync()
        times.append(time.perf_counter() - start)
    engine.close()
    return 2 * MICROBATCHES * tokens * hidden * 2 / min(times) / 1e9


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """All edges between neighbours, and that of the last rank to the first, in rounds in which each rank has one."""
    neighbours = [(rank, rank + 1) for rank in range(world - 1)]
    found = [neighbours[::2], neighbours[1::2], [(world - 1, 0)] if world > 2 else []]
    return [pairs for pairs in found if pairs]


def try_edges(rank: Rank, transport: str, pairs: list[tuple[int, int]]) -> Figures:
    groups = [rank.new_group(pair) for pair in pairs]
    for pair, group in zip(pairs, groups, strict=True):
        if rank.rank not in pair:
            continue
        rank.need(transport, pair)
        first = min(pair)  # a group counts its ranks in ascending order
        rate = exchange(rank, transport, group, rank.rank == first)
        name = f"{pair[0]}-{pair[1]}"
        ways = sorted({edge.transport for edge in rank.edges})
        found = {f"{RATE} {name}": float(f"{rate:.3g}"), f"{BY} {name}": ", ".join(ways)}
        if proof := max(edge.rate for edge in rank.edges):
            found[f"{PROOF} {name}"] = float(f"{proof * 1e-9:.3g}")
        return found
    raise Unmeasured("this rank has no edge here")


def messages(rank: Rank) -> Iterator[Case]:
    for transport in TRANSPORTS:
        for pairs in rounds(rank.world):
            name = f"{transport}, edges {' '.join(f'{a}-{b}' for a, b in pairs)}"
            yield name, functools.partial(try_edges, rank, transport, pairs)
