"""Are parameters of two stages that are likely one, and that nobody listed as tied, named, and no others?"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks

VOCAB, HIDDEN, TOKENS, M = 11, 6, 8, 2


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch() -> Tensor:
    return torch.randint(VOCAB, (M, TOKENS), generator=torch.Generator().manual_seed(1))


class Bare(nn.Module):
    """An embedding of the user's own, or its head."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if x.is_floating_point() else F.embedding(x, self.weight)


class HeadLoss(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(HIDDEN), head

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return loss_fn(self.head(self.norm(hidden)), target)


def tied(bias: bool = False, own: bool = False) -> list[nn.Module]:
    """A model whose head is its embedding."""
    embedding, head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=bias)
    head.weight = embedding.weight
    ends = [Bare(embedding.weight), Bare(embedding.weight)] if own else [embedding, head]
    return [ends[0], nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), ends[1]]


def changed(layers: list[nn.Module], change: Callable[[list[Any]], Any]) -> list[nn.Module]:
    change(layers)
    return layers


def layers_of(*layers: nn.Module) -> list[nn.Module]:
    return [nn.Embedding(VOCAB, HIDDEN), *layers, nn.Linear(HIDDEN, VOCAB, bias=False)]


def linear() -> nn.Linear:
    return nn.Linear(HIDDEN, HIDDEN)


def same(layers: list[Any], values: Any = lambda weight: weight, at: tuple[int, int] = (0, -1)) -> list[nn.Module]:
    """Two layers get one matrix, or two of the same values."""
    layers[at[1]].weight = values(layers[at[0]].weight)
    return layers


def loaded(weight: nn.Parameter) -> nn.Parameter:
    """As after a checkpoint of a tied model that was loaded into one that forgot to tie."""
    return nn.Parameter(weight.detach().clone())


def from_one_seed(*makes: Callable[[], nn.Module]) -> list[nn.Module]:
    """As where each process makes its own layers after the same seed."""
    made = []
    for make in makes:
        torch.manual_seed(0)
        made.append(make())
    return made


def listed() -> list[nn.Module]:
    layers = tied()
    for end in (0, -1):
        layers[end].tied_parameters = {"embedding": layers[end].weight}
    return layers


def bare() -> nn.Module:
    return nn.Sequential(Bare(nn.Parameter(torch.randn(VOCAB, HIDDEN))))


ENDS = "0.weight of stage 0 and 2.weight of stage 1"
# Each is cut in two, or in four for two ranks: (makes the layers, stages, the parameters that are named)
LAYERS: dict[str, tuple[Callable[[], list[nn.Module]], int, str]] = {
    "embedding and head": (tied, 2, ENDS),
    "a head with a bias": (lambda: tied(bias=True), 2, ENDS),
    "modules of the user's own": (lambda: tied(own=True), 2, ENDS),
    "several stages on a rank": (tied, 4, "0.weight of stage 0 and 1.weight of stage 3"),
    "one end frozen": (lambda: same(tied(), lambda weight: nn.Parameter(weight.detach(), False)), 2, ENDS),
    "values of a checkpoint": (lambda: same(tied(), loaded), 2, ENDS),
    "a matrix of two layers": (
        lambda: same(layers_of(linear(), linear(), linear(), linear()), at=(1, -2)), 2,
        "1.weight of stage 0 and 1.weight of stage 1",
    ),
    "a head in the loss": (tied, 0, "0.weight of stage 0 and head.weight of the loss"),
    "a head alone": (lambda: tied()[::4], 2, "0.weight of stage 0 and 0.weight of stage 1"),
    "nothing is equal": (lambda: layers_of(linear(), linear()), 2, ""),
    "listed": (listed, 2, ""),
    "layers of one seed": (lambda: layers_of(*from_one_seed(linear, linear, linear, linear)), 2, ""),
    "stages of one seed": (
        lambda: from_one_seed(
            lambda: nn.Sequential(nn.Embedding(VOCAB, HIDDEN), linear()),
            lambda: nn.Sequential(linear(), nn.Linear(HIDDEN, VOCAB)),
        ), 2, "",
    ),
    "stages that begin alike": (lambda: from_one_seed(bare, bare), 2, ""),
    "copies of one layer": (lambda: layers_of(*[copy.deepcopy(layer) for layer in [linear()] * 4]), 2, ""),
    "both frozen": (lambda: [layer.requires_grad_(False) for layer in tied()], 2, ""),
    "the identity": (
        lambda: changed(layers_of(linear(), linear()), lambda m: [nn.init.eye_(layer.weight) for layer in m[1:3]]), 2,
        "",
    ),
    "constants": (
        lambda: changed(layers_of(linear(), linear()), lambda m: [nn.init.constant_(x.weight, 0.1) for x in m]), 2, "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_a_tie_that_nobody_listed_is_named_once_and_nothing_else(name):
    torch.manual_seed(0)
    make, count, named = LAYERS[name]
    layers = make()
    loss: Any = loss_fn if count else HeadLoss(copy.deepcopy(layers.pop())).double()
    cuts = [len(layers) * i // (count or 2) for i in range((count or 2) + 1)]
    stages = [nn.Sequential(*copy.deepcopy(layers[a:b])).double() for a, b in pairwise(cuts)]

    def run(group: Any) -> None:
        engine = seq1f1b.PipelineEngine(
            stages[group.rank :: 2],
            schedule="seq1f1b-interleaved" if count == 4 else "seq1f1b",
            num_microbatches=M,
            num_segments=2,
            loss_fn=loss,
            group=group,
        )
        for _ in range(2):
            engine.step(batch(), target=seq1f1b.shift_labels(batch()))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(2, run)
    texts = [str(warning.message) for warning in caught if "bit-equal" in str(warning.message)]
    assert len(texts) == bool(named)
    if named:
        assert texts[0].startswith(f"{named} are bit-equal: if the model ties them, list both in the dict attribute")


def test_verify_says_what_it_takes_for_granted():
    torch.manual_seed(0)
    layers = tied()

    def run(group: Any) -> Any:
        stage = nn.Sequential(*copy.deepcopy(layers[:2] if group.rank == 0 else layers[2:]))
        engine = seq1f1b.PipelineEngine(stage, num_microbatches=M, num_segments=2, loss_fn=loss_fn, group=group)
        return engine.verify(batch(), target=seq1f1b.shift_labels(batch()), show=False)

    with pytest.warns(UserWarning, match="bit-equal"):
        results = run_ranks(2, run)
    note = "Assumed not to be tied, though bit-equal: 0.weight of stage 0 and 2.weight of stage 1."
    assert all(result.ok and note in result.notes for result in results)
