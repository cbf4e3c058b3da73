"""Do the stages of a module of one's own train as the module does whole, and is what cannot be cut refused by name?"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from split_forwards import Decoder
from split_parts import HIDDEN, VOCAB, Block, tokens
from tiny_model import cross_entropy
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks


class Chain(nn.Module):
    """Embedding, blocks and head, with code of its own between them."""

    def __init__(self, blocks: int = 5, tied: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(64, HIDDEN)
        self.blocks = nn.ModuleList(Block(i) for i in range(blocks))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.tensor(0.25), persistent=False)
        if tied:
            self.head.weight = self.words.weight
        if unused:
            self.second = nn.Linear(3, 3)

    def forward(self, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        x = self.words(tokens) * self.scale + self.places(seq1f1b.positions(tokens))
        for block in self.blocks:
            x = block(x, doc_ids=doc_ids)
        return self.head(self.norm(x) + self.shift) * self.scale


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *(Block(i) for i in range(4)), nn.Linear(HIDDEN, VOCAB))


def make(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(**options).double()


CUTS = {
    "sequential": (sequential, {}, {"num_stages": 3}, {"2"}),
    "sequential, by numbers": (sequential, {}, {"at": [1, 5]}, {"1"}),
    "chain": (Chain, {}, {"num_stages": 2}, {"blocks.3"}),
    "before the head": (Chain, {}, {"at": ["blocks.1", "norm"]}, {"norm"}),
    "tied": (Chain, {"tied": True}, {"num_stages": 3}, {"blocks.4"}),
    "inner": (Decoder, {}, {"num_stages": 2}, {"inner.blocks.2"}),
}


@pytest.mark.parametrize("name", CUTS)
def test_stages_begin_where_they_should(name):
    kind, options, cut, begins = CUTS[name]
    stages = seq1f1b.split(make(kind, **options), **cut)
    targets = [[n.target for n in s.graph.nodes if n.op == "call_module"] for s in stages]
    assert len(stages) == cut.get("num_stages", len(cut.get("at", ())) + 1)
    assert begins <= {names[0] for names in targets}


def test_a_tied_weight_is_copied_and_listed_and_all_else_is_shared():
    model = make(Chain, tied=True)
    stages = seq1f1b.split(model, 3)
    assert [set(stage.tied_parameters) for stage in stages] == [
        {"words.weight", "scale"},
        set(),
        {"words.weight", "scale"},
    ]
    assert stages[0].tied_parameters["words.weight"] is model.words.weight
    assert stages[2].tied_parameters["words.weight"] is stages[2].get_parameter("head.weight")
    assert stages[2].get_parameter("head.weight") is not model.words.weight is model.head.weight
    assert stages[1].get_parameter("blocks.2.qkv.weight") is model.blocks[2].qkv.weight
    again = copy.deepcopy(stages[2]).float()
    assert again.tied_parameters["words.weight"] is again.get_parameter("head.weight")
    assert [name for name, _ in stages[2].named_buffers()] == ["shift"] and "shift" not in stages[2].state_dict()


def test_stages_are_verified_and_saved_by_their_names():
    stages = seq1f1b.split(make(Chain, tied=True), 2)

    def run(group: Any) -> Any:
        engine = seq1f1b.PipelineEngine(
            stages[group.rank], num_microbatches=2, num_segments=4, loss_fn=cross_entropy, group=group
        )
        result = engine.verify(tokens(), target=seq1f1b.shift_labels(tokens()))
        return result.ok, set(seq1f1b.PipelineState(engine).state_dict()["model"])

    results = run_ranks(2, run)
    assert all(ok for ok, _ in results)
    assert set.union(*(names for _, names in results)) == {
        name for name, _ in make(Chain, tied=True).named_parameters()
    }
    with pytest.raises(TypeError, match="is not pickled: save its state_dict"):
        pickle.dumps(stages[0])


# -- what is refused ---------------------------------------------------------------------------------------------------


class Numbers(Chain):
    def forward(self, tokens: Tensor) -> Tensor:
        most = tokens.amax().item()
        return super().forward(tokens) * most


class Constant(Chain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = super().forward(tokens)
        seq1f1b.carry_out(0, x[:, -1:])
        return x + seq1f1b.carry_in(0, ZERO)


ZERO = torch.zeros(())


class Backwards(Chain):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x + self.shift)) * self.scale


@pytest.mark.parametrize(
    ("kind", "cut", "text"),
    [
        (Chain, {}, "split takes num_stages= or at=, one of the two"),
        (Chain, {"num_stages": 2, "at": ["norm"]}, "one of the two"),
        (Chain, {"num_stages": 6}, "num_stages is 6, must be from 1 to the 5 modules of 'blocks'"),
        (Chain, {"num_stages": 0}, "num_stages is 0, must be"),
        (Chain, {"at": ["blocks.9"]}, r"at names \['blocks.9'\], which Chain does not have; it has"),
        (Chain, {"at": ["norm", "blocks.1"]}, "Chain runs 'blocks.1' before 'norm': no stage begins there"),
        (Chain, {"at": ["norm", "norm"]}, "each stage must begin with a module of its own"),
        (Chain, {"at": ["blocks"]}, "Chain does not run 'blocks', so no stage begins there"),
        (lambda: nn.Linear(2, 2), {"num_stages": 1}, "Linear has no nn.Sequential or nn.ModuleList: say by at= where"),
        (lambda: Chain(unused=True), {"num_stages": 2}, "Chain does not use second.weight, second.bias, which"),
        (Numbers, {"num_stages": 2}, "Numbers uses item behind the cut, in mul.*: item is a number"),
        (Constant, {"num_stages": 2}, "Constant cannot be cut: it gives carry_in a constant"),
        (Backwards, {"num_stages": 3}, "Backwards runs 'blocks.4' before 'blocks.2': no stage begins there"),
    ],
)  # fmt: skip
def test_what_is_refused(kind, cut, text):
    with pytest.raises(ValueError, match=text):
        seq1f1b.split(kind(), **cut)


def test_another_thing_than_a_module():
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got list"):
        seq1f1b.split([nn.Linear(2, 2)], 1)
