"""Is a balance loss of the whole sequence the same in any number of segments and stages?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from slices import pairs_of
from tiny_model import gradient_error
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b
from seq1f1b import Loss, PipelineEngine
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


class Routed(nn.Module):
    """A stage with a loss of its router, a mean over tokens or their sum."""

    def __init__(self, index: int, reduction: str) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.first = nn.Linear(HIDDEN, HIDDEN) if index else nn.Embedding(EXPERTS, HIDDEN)
        self.router, self.reduction = nn.Linear(HIDDEN, EXPERTS), reduction

    def forward(self, x: Tensor) -> Tensor:
        squares = self.router(x := self.first(x)).logsumexp(-1).square()
        self.added = 0.3 * getattr(squares, self.reduction)()
        seq1f1b.add_loss(self.added)
        return x + self.router(x).sum(-1, keepdim=True)


def entropy(output: Tensor, target: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target, reduction=reduction)


WEIGHTED: dict[str, dict[str, Any]] = {
    "means": {},
    "targets": {"loss": Loss(weight="targets")},
    "a weight": {"loss_weight": 99.0},
    "a weight, by token": {"loss_weight": 99.0, "reduction": "none"},
    "a weight, steps": {"loss_weight": 99.0, "num_microbatches": 1},
    "a weight of a sum": {"loss_weight": 99.0, "reduction": "sum", "loss": Loss(reduction="sum")},
    "rows": {"segment_sizes": [[3, 5], [4], [6, 1, 5]]},
    "rows, a weight": {"segment_sizes": [[3, 5], [4], [6, 1, 5]], "loss_weight": 99.0},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", WEIGHTED)
def test_an_auxiliary_loss_weighs_as_the_main_one(name: str, ranks: int) -> None:
    options, of_step = {"num_microbatches": 3, "num_segments": 3, **WEIGHTED[name]}, {}
    rows, weight = options.pop("segment_sizes", None), options.pop("loss_weight", None)
    reduction = options.pop("reduction", "mean")
    summed = "sum" if reduction == "sum" else "mean"
    torch.manual_seed(4)
    tokens = [torch.randint(EXPERTS, (2, sum(row))) for row in rows or [[12]] * 3]
    targets = [seq1f1b.shift_labels(row) for row in tokens]
    targets[0][:, :2] = targets[1][0] = -100
    counts = [float((target != -100).sum()) for target in targets]
    weights = [1 / 3] * 3 if name == "means" else [count / (weight or sum(counts)) for count in counts]
    weights = [1 / weight] * 3 if summed == "sum" else weights
    stages, truth = ([Routed(i, summed).double() for i in range(ranks)] for _ in range(2))
    for x, y, share in zip(tokens, targets, weights, strict=True):
        (share * (entropy(nn.Sequential(*truth)(x), y, summed) + sum(stage.added for stage in truth))).backward()
    of_step |= {"segment_sizes": rows} if rows else {}
    of_step |= {"loss_weight": weight} if weight else {}
    batches = [(tokens, targets)] if rows else [(torch.cat(tokens), torch.cat(targets))]
    batches = list(zip(tokens, targets, strict=True)) if options["num_microbatches"] == 1 else batches

    def run(group: Any) -> None:
        engine = PipelineEngine(
            stages[group.rank], loss_fn=partial(entropy, reduction=reduction), group=group, **options
        )
        for x, y in batches:
            engine.step(x if engine.has_first else None, target=y if engine.has_last else None, **of_step)

    run_ranks(ranks, run)
    found, expected = (
        {f"{i}.{n}": p.grad for i, s in enumerate(e) for n, p in s.named_parameters()} for e in (stages, truth)
    )
    assert gradient_error(found, expected) <= 1e-12


def test_of_is_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"of is 'tokens', must be"):
        seq1f1b.add_loss(torch.zeros(()), of="tokens")
