"""Does state along the sequence other than attention's pass between segments, forward and backward?"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from slices import pairs_of
from tiny_model import gradient_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seq1f1b
from seq1f1b import Memory, PipelineEngine
from seq1f1b.testing import run_ranks

HIDDEN, LENGTH = 6, 17


class CausalConvolution(nn.Module):
    """Depth-wise, width 4: carries the last three inputs."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.randn(HIDDEN, 1, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        before = seq1f1b.carry_in(self.index, x.new_zeros(x.size(0), 3, HIDDEN))
        window = torch.cat([before, x], 1)
        seq1f1b.carry_out(self.index, window[:, -3:])
        return x + F.conv1d(window.transpose(1, 2), self.weight, groups=HIDDEN).transpose(1, 2)


class LinearAttention(nn.Module):
    """Carries the sum of outer products of keys and values."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        state = seq1f1b.carry_in(self.index, x.new_zeros(x.size(0), HIDDEN, HIDDEN))
        sums = state.unsqueeze(1) + (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(1)
        seq1f1b.carry_out(self.index, sums[:, -1])
        return x + torch.einsum("bsd,bsde->bse", q, sums) / LENGTH


class Recurrent(nn.Module):
    """A GRU: carries its hidden state."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.gru = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = seq1f1b.carry_in(self.index, x.new_zeros(1, x.size(0), HIDDEN))
        out, state = self.gru(x, state)
        seq1f1b.carry_out(self.index, state)
        return x + out


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if torch.is_grad_enabled() else self.inner(x)


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@pytest.mark.parametrize(
    ("kind", "sizes", "again"),
    pairs_of(
        [CausalConvolution, LinearAttention, Recurrent],
        [[17], [5, 1, 11], [1, 1, 1, 14]],
        ["none", "checkpoint", "recompute"],
    ),
)
def test_state_along_the_sequence(kind, sizes, again):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), kind(i)).double() for i in range(2)]
    x, y = torch.randn(6, LENGTH, HIDDEN).double(), torch.randn(6, LENGTH, HIDDEN).double()
    whole = nn.Sequential(*stages)
    losses = [squared(whole(a), b) for a, b in zip(x.chunk(3), y.chunk(3), strict=True)]
    (sum(losses) / 3).backward()
    truth = {name: p.grad.clone() for name, p in whole.named_parameters()}
    whole.zero_grad()

    def run(group):
        stage = Checkpointed(stages[group.rank]) if again == "checkpoint" else stages[group.rank]
        engine = PipelineEngine(
            stage, num_microbatches=3, num_segments=len(sizes), segment_sizes=sizes, loss_fn=squared, group=group,
            memory=Memory(recompute="all" if again == "recompute" else "none"),
        )  # fmt: skip
        return engine.step(x, target=y)

    found = run_ranks(2, run)[-1]
    assert all(abs(float(a) - float(b)) < 1e-12 for a, b in zip(found, losses, strict=True))
    assert gradient_error({name: p.grad for name, p in whole.named_parameters()}, truth) <= 1e-10


def test_what_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="add_loss needs a tensor of one element, got NoneType"):
        seq1f1b.add_loss(None)
    with pytest.raises(TypeError, match="x is None, must be a tensor"):
        seq1f1b.positions(None)
    with pytest.raises(TypeError, match="doc_ids is 3, must be a tensor or None"):
        seq1f1b.positions(torch.zeros(1, 2), doc_ids=3)
    with pytest.raises(TypeError, match=r"model is 3, must be a seq1f1b\.ModelShape"):
        seq1f1b.partition_sequence(8, 2, model=3)
