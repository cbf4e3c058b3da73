"""Do models whose stages share parameters train as they do whole, when they are cut by split or pipeline_stage?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tiny_model import cross_entropy
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks

VOCAB, HIDDEN, TOKENS = 16, 8, 12


class Model(nn.Module):
    """The head is the embedding; two layers run at both ends, and one in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.a, self.b = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        shared = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(HIDDEN), shared, nn.GELU()) for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.head.weight = self.embedding.weight
        self.embedding.weight.no_weight_decay = True  # type: ignore[attr-defined] # a mark, as users set it
        self.a.bias.lr_scale = 0.5  # type: ignore[attr-defined] # a mark, too

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.b(self.a(self.embedding(tokens)))
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.a(self.b(x)))


def make() -> Any:
    torch.manual_seed(0)
    return Model().double()


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return tokens, seq1f1b.shift_labels(tokens)


Named = Iterable[tuple[str, nn.Parameter]]


def by_name(named: Named) -> dict[nn.Parameter, tuple[float, float]]:
    """Weight decay and learning rate."""
    return {p: (0.0 if "embedding" in n or "bias" in n else 0.5, 0.2 if n.startswith("a.") else 0.1) for n, p in named}


def by_attribute(named: Named) -> dict[nn.Parameter, tuple[float, float]]:
    return {p: (0.0 if hasattr(p, "no_weight_decay") else 0.5, 0.1 * getattr(p, "lr_scale", 1.0)) for _, p in named}


GROUPS: dict[str, Callable[[Named], dict[nn.Parameter, tuple[float, float]]]] = {
    "by name": by_name,
    "by attribute": by_attribute,
}


def optimizer_of(options: dict[nn.Parameter, tuple[float, float]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p], "weight_decay": decay, "lr": lr} for p, (decay, lr) in options.items()])


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@pytest.mark.parametrize("way", GROUPS)
def test_groups_are_those_of_the_model(way, stages_per_rank):
    whole = make()
    stages = seq1f1b.split(make(), at=["blocks.0", "blocks.2", "blocks.3"][: 1 if stages_per_rank == 1 else 3])
    tokens, target = batch()

    def run(group: Any) -> None:
        engine = seq1f1b.PipelineEngine(
            stages[group.rank :: 2], num_microbatches=2, num_segments=3, loss_fn=cross_entropy, group=group,
            schedule="seq1f1b" if stages_per_rank == 1 else "seq1f1b-interleaved",
        )  # fmt: skip
        optimizer = optimizer_of(GROUPS[way](engine.named_parameters()))
        for _ in range(3):
            optimizer.zero_grad()
            engine.step(tokens, target=target)
            engine.clip_grad_norm_(0.1)
            optimizer.step()

    run_ranks(2, run)
    optimizer = optimizer_of(GROUPS[way](whole.named_parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        (sum(cross_entropy(whole(t), y) for t, y in zip(tokens.split(1), target.split(1), strict=True)) / 2).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        optimizer.step()
    want = dict(whole.named_parameters(remove_duplicate=False))
    found = [(name, p) for stage in stages for name, p in stage.named_parameters(remove_duplicate=False)]
    assert {name for name, _ in found} == want.keys()
    for name, parameter in found:
        torch.testing.assert_close(parameter, want[name], rtol=1e-9, atol=1e-12)


def test_a_copy_has_the_attributes_the_gradient_and_the_dtype_of_its_gradient():
    model = make()
    model.embedding.weight.mask = mask = torch.ones(3)
    model.embedding.weight.grad = torch.full((VOCAB, HIDDEN), 2.0, dtype=torch.float64)
    model.b.weight = nn.Parameter(model.b.weight.detach().bfloat16())
    model.b.weight.grad_dtype = torch.float32
    first, last = (stage.tied_parameters for stage in seq1f1b.split(model, 2))
    copied = last["embedding.weight"]
    assert copied is not first["embedding.weight"] and copied.no_weight_decay
    assert torch.equal(copied.mask, mask) and copied.mask is not mask
    assert torch.equal(copied.grad, model.embedding.weight.grad) and copied.grad is not model.embedding.weight.grad
    assert last["a.bias"].lr_scale == 0.5
    assert last["b.weight"].grad_dtype == torch.float32 and last["b.weight"] is not first["b.weight"]


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_copy_is_refused_and_others_are_kept(kind):
    model, calls = make(), []
    model.blocks[3][0].weight.register_hook(calls.append)
    stages = seq1f1b.split(model, 2)
    stages[1](torch.zeros(1, 3, HIDDEN, dtype=torch.float64)).sum().backward()
    assert len(calls) == 1
    getattr(model.a.weight, kind)(lambda given: None)
    with pytest.raises(ValueError, match=r"tied parameter 'a\.weight' has copies on several stages, and hooks"):
        seq1f1b.split(model, 2)
    assert len(seq1f1b.split(model, 1)) == 1


def test_a_tied_parameter_that_is_gone_is_named():
    first = seq1f1b.split(make(), 2)[0]
    del first.b
    with pytest.raises(ValueError, match=r"the stage has no parameter b\.weight any more"):
        first.tied_parameters  # noqa: B018
