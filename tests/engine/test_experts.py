"""Is a balance loss of the whole sequence the same in any number of segments and stages?"""

from __future__ import annotations

import pytest
import torch
from slices import pairs_of
from tiny_model import gradient_error
from torch import Tensor, nn

import seq1f1b
from seq1f1b import PipelineEngine
from seq1f1b.testing import run_ranks

EXPERTS, HIDDEN, LENGTH, M = 3, 8, 24, 2


class Experts(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.router, self.index = nn.Linear(HIDDEN, EXPERTS), index
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, and the sums over tokens of probabilities and of choices."""
        probabilities = self.router(x).softmax(-1)
        best, choice = probabilities.max(-1)
        parts = [(choice == i)[..., None] * expert(x) for i, expert in enumerate(self.experts)]
        counts = nn.functional.one_hot(choice, EXPERTS).sum(1).to(x.dtype)
        return x + best[..., None] * torch.stack(parts).sum(0), probabilities.sum(1), counts

    def forward(self, x: Tensor) -> Tensor:
        out, probabilities, counts = self.route(x)
        new = torch.stack([probabilities, counts])
        sums = seq1f1b.carry_in(self.index, torch.zeros_like(new)) + new
        seq1f1b.carry_out(self.index, sums)
        seq1f1b.add_loss(balance(sums[0], sums[1]), of="sequence")
        return out


def balance(probabilities: Tensor, counts: Tensor) -> Tensor:
    tokens = counts.sum(-1, keepdim=True)
    return EXPERTS * (probabilities / tokens * (counts / tokens).detach()).sum(-1).mean()


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def whole(stages: list[Experts], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Without a pipeline, and without its carry and add_loss."""
    for a, b in zip(x.chunk(M), y.chunk(M), strict=True):
        total = 0.0
        for stage in stages:
            a, probabilities, counts = stage.route(a)
            total = total + balance(probabilities, counts)
        ((squared(a, b) + total) / M).backward()
    found = {f"{i}.{n}": p.grad.clone() for i, stage in enumerate(stages) for n, p in stage.named_parameters()}
    for stage in stages:
        stage.zero_grad()
    return found


@pytest.mark.parametrize(("ranks", "k", "schedule"), pairs_of([1, 2, 3, 4], [1, 2, 4, 8], ["seq1f1b", "seq-zb-h1"]))
def test_the_balance_of_a_sequence(ranks: int, k: int, schedule: str) -> None:
    torch.manual_seed(0)
    stages = [Experts(i).double() for i in range(ranks)]
    x, y = torch.randn(2 * M, LENGTH, HIDDEN).double(), torch.randn(2 * M, LENGTH, HIDDEN).double()
    truth = whole(stages, x, y)

    def run(group):
        sizes = None if k != 4 else [9, 7, 5, 3]
        engine = PipelineEngine(
            stages[group.rank], schedule=schedule, num_microbatches=M, num_segments=k, segment_sizes=sizes,
            loss_fn=squared, group=group,
        )  # fmt: skip
        engine.step(x, target=y)

    try:
        run_ranks(ranks, run)
    except seq1f1b.ScheduleError as error:
        assert schedule == "seq-zb-h1" and ranks > M, error
        return
    found = {f"{i}.{n}": p.grad for i, stage in enumerate(stages) for n, p in stage.named_parameters()}
    assert gradient_error(found, truth) <= 1e-12


def test_of_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"of is 'tokens', must be"):
        seq1f1b.add_loss(torch.zeros(()), of="tokens")
