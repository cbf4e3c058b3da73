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


def share(layers: list[Any]) -> None:
    """The second and the last but one layer have one matrix."""
    layers[-2].weight = layers[1].weight


def same_values(layers: list[Any], is_trained: bool = True) -> None:
    """As after a checkpoint of a tied model that was loaded into one that forgot to tie."""
    layers[-1].weight = nn.Parameter(layers[0].weight.detach().clone(), is_trained)


# Each is cut in two, or in four for two ranks: (makes the layers, stages, the parameters that are named)
TIED: dict[str, tuple[Callable[[], list[nn.Module]], int, str]] = {
    "embedding and head": (tied, 2, "0.weight of stage 0 and 2.weight of stage 1"),
    "a head with a bias": (lambda: tied(bias=True), 2, "0.weight of stage 0 and 2.weight of stage 1"),
    "modules of the user's own": (lambda: tied(own=True), 2, "0.weight of stage 0 and 2.weight of stage 1"),
    "several stages on a rank": (tied, 4, "0.weight of stage 0 and 1.weight of stage 3"),
    "one end frozen": (
        lambda: changed(tied(), lambda m: same_values(m, False)), 2, "0.weight of stage 0 and 2.weight of stage 1",
    ),
    "values of a checkpoint": (lambda: changed(tied(), same_values), 2, "0.weight of stage 0 and 2.weight of stage 1"),
    "a matrix of two layers": (
        lambda: changed(layers_of(linear(), linear(), linear(), linear()), share), 2,
        "1.weight of stage 0 and 1.weight of stage 1",
    ),
    "a head in the loss": (tied, 0, "0.weight of stage 0 and head.weight of the loss"),
    "a head alone": (lambda: tied()[::4], 2, "0.weight of stage 0 and 0.weight of stage 1"),
}  # fmt: skip


def told(layers: list[nn.Module], count: int) -> list[str]:
    """The warnings of two steps over two ranks, with ``count`` stages; 0: two, and the last layer in the loss."""
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
    return [str(warning.message) for warning in caught if "bit-equal" in str(warning.message)]


@pytest.mark.parametrize("name", TIED)
def test_a_tie_that_nobody_listed_is_named_once(name):
    torch.manual_seed(0)
    make, count, named = TIED[name]
    (text,) = told(make(), count)
    assert text.startswith(f"{named} are bit-equal: if the model ties them, list both") and "tied_parameters" in text


def from_one_seed(*makes: Callable[[], nn.Module]) -> list[nn.Module]:
    """As where each process makes its own layers after the same seed."""
    made = []
    for make in makes:
        torch.manual_seed(0)
        made.append(make())
    return made


def listed() -> list[nn.Module]:
    layers = tied()
    layers[0].tied_parameters = {"embedding": layers[0].weight}
    layers[-1].tied_parameters = {"embedding": layers[-1].weight}
    return layers


RIGHT: dict[str, Callable[[], list[nn.Module]]] = {
    "nothing is equal": lambda: layers_of(linear(), linear()),
    "listed": listed,
    "layers of one seed": lambda: layers_of(*from_one_seed(linear, linear, linear, linear)),
    "stages of one seed": lambda: from_one_seed(
        lambda: nn.Sequential(nn.Embedding(VOCAB, HIDDEN), linear()),
        lambda: nn.Sequential(linear(), nn.Linear(HIDDEN, VOCAB)),
    ),
    "stages that begin alike": lambda: from_one_seed(
        lambda: nn.Sequential(Bare(nn.Parameter(torch.randn(VOCAB, HIDDEN)))),
        lambda: nn.Sequential(Bare(nn.Parameter(torch.randn(VOCAB, HIDDEN)))),
    ),
    "copies of one layer": lambda: layers_of(*[copy.deepcopy(layer) for layer in [linear()] * 4]),
    "both frozen": lambda: changed(tied(), lambda m: [m[i].requires_grad_(False) for i in (0, -1)]),
    "the identity": lambda: changed(
        layers_of(linear(), linear()), lambda m: [nn.init.eye_(layer.weight) for layer in m[1:3]]
    ),
    "constants": lambda: changed(
        layers_of(linear(), linear()), lambda m: [nn.init.constant_(layer.weight, 0.1) for layer in m]
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_equal_and_not_tied_is_not_named(name):
    torch.manual_seed(0)
    assert told(RIGHT[name](), 2) == []


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
