"""Are parameters that several stages hold as copies trained as the one parameter that they are?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks

VOCAB, HIDDEN, TOKENS, M = 11, 6, 8, 2


class Part(nn.Module):
    """An embedding, a linear layer, or a head that is the embedding's transpose."""

    def __init__(self, kind: str, weight: Tensor) -> None:
        super().__init__()
        if kind == "embedding":
            self.layer: nn.Module = nn.Embedding(*weight.shape)
        else:
            self.layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.layer.weight = nn.Parameter(weight.clone())
        self.tied_parameters = {} if kind == "linear" else {"embedding": self.weight}

    @property
    def weight(self) -> nn.Parameter:
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(VOCAB, HIDDEN), (HIDDEN, HIDDEN)]
    embedding, linear = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return embedding, linear


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def whole_gradients(steps: int) -> tuple[Tensor, Tensor]:
    embedding, linear = (w.requires_grad_() for w in weights(torch.float64))
    tokens = batch()
    logits = F.linear(F.linear(F.embedding(tokens, embedding), linear), embedding)
    loss_fn(logits, seq1f1b.shift_labels(tokens)).backward()
    assert embedding.grad is not None and linear.grad is not None
    return steps * embedding.grad, steps * linear.grad


def batch() -> Tensor:
    return torch.randint(VOCAB, (M, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("schedule", "kinds"),
    [
        ("seq1f1b", [["embedding"], ["linear"], ["head"]]),
        ("seq1f1b-interleaved", [["embedding", "head"], ["linear", "copy"]]),  # two copies on one rank
        ("seq-zb-h1", [["embedding"], ["linear"], ["head"]]),  # W makes the head's gradients
    ],
)
def test_gradients_are_summed_over_steps_and_counted_once(schedule, kinds, dtype):
    embedding, linear = weights(dtype)
    tokens = batch()

    def run(group: Any) -> tuple[list[Tensor], float]:
        stages = []
        for kind in kinds[group.rank]:
            weight = linear if kind == "linear" else torch.eye(VOCAB, dtype=dtype) if kind == "copy" else embedding
            stages.append(Part("linear" if kind == "copy" else kind, weight))
        engine = seq1f1b.PipelineEngine(
            stages, schedule=schedule, num_microbatches=M, num_segments=2, loss_fn=loss_fn, group=group
        )
        for _ in range(2):
            engine.step(tokens, target=seq1f1b.shift_labels(tokens))
        if schedule == "seq-zb-h1":
            left_to_w = {"embedding": 0, "linear": HIDDEN * HIDDEN, "head": VOCAB * HIDDEN}
            assert engine.report().stages[0].deferred_weights == left_to_w[kinds[group.rank][0]]
        gradients = [p.grad for s in stages for p in s.parameters() if p.grad is not None and p.shape != (VOCAB, VOCAB)]
        for kind, stage in zip(kinds[group.rank], stages, strict=True):
            if kind == "copy":
                stage.weight.grad = None  # the norm is that of the model without it
        return gradients, float(engine.clip_grad_norm_(1e9))

    results = run_ranks(len(kinds), run)
    want = whole_gradients(steps=2)
    found = [g for gradients, _ in results for g in gradients]
    rtol = 1e-12 if dtype == torch.float64 else 0.02  # one step's rounding of weights, logits and sums in bfloat16
    for gradient in found:
        expected = want[0] if gradient.shape == want[0].shape else want[1]
        assert (gradient.double() - expected).norm() <= rtol * expected.norm()
    copies = [g for g in found if g.shape == want[0].shape]
    assert len(copies) == 2 and torch.equal(*copies)
    norm = float(sum(g.square().sum() for g in want) ** 0.5)
    for _, total in results:
        assert abs(total - norm) <= rtol * norm


def test_copies_start_equal_and_frozen_ones_get_no_gradient():
    embedding = weights(torch.float64)[0]

    def run(group: Any) -> tuple[Tensor, Tensor | None]:
        tied = Part("embedding" if group.rank == 0 else "head", embedding + group.rank)
        tied.weight.requires_grad_(False)
        stage = nn.Sequential(tied, Part("linear", torch.eye((HIDDEN, VOCAB)[group.rank], dtype=torch.float64)))
        engine = seq1f1b.PipelineEngine(stage, num_microbatches=M, num_segments=2, loss_fn=loss_fn, group=group)
        engine.step(batch(), target=seq1f1b.shift_labels(batch()))
        return tied.weight.detach(), tied.weight.grad

    for start, gradient in run_ranks(2, run):
        assert torch.equal(start, embedding) and gradient is None


@pytest.mark.parametrize("difference", ["shape", "frozen"])
def test_copies_that_differ_are_refused(difference):
    def run(group: Any) -> None:
        rows = VOCAB + (group.rank if difference == "shape" else 0)
        stage = Part("embedding" if group.rank == 0 else "head", torch.zeros(rows, HIDDEN))
        stage.weight.requires_grad_(difference == "shape" or group.rank == 0)
        seq1f1b.PipelineEngine(stage, num_microbatches=M, loss_fn=loss_fn, group=group).tied_elsewhere()

    with pytest.raises(ValueError, match="tied parameter 'embedding' differs between ranks"):
        run_ranks(2, run)
