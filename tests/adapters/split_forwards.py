"""Models with one peculiarity each: ties, contexts, hooks, random numbers, values of Python, patches, arguments."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from split_parts import HIDDEN, VOCAB, Base, Block, Mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seq1f1b


def changed(change: Callable[[Any], Any], kind: Callable[[], nn.Module] = Base) -> Callable[[], nn.Module]:
    """Makes a model, and does something with it."""

    def make() -> nn.Module:
        model = kind()
        change(model)
        return model

    return make


# -- ties --------------------------------------------------------------------------------------------------------------


def tie_head(model: Any) -> None:
    model.head.weight = model.words.weight


def tie_three(model: Any) -> None:
    model.blocks[1].out.weight = model.blocks[2].out.weight = model.blocks[0].out.weight
    tie_head(model)


class SharedNorm(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self.norm(self.words(tokens)))))


class OneBlockInARange(Base):
    """One block is run four times by a loop; each stage runs its part of it."""

    def __init__(self) -> None:
        super().__init__(Mlp, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(self.blocks[0](x))
        return self.head(x + self.norm(x))


def share_statistics(model: Any) -> None:
    model.blocks[3].stats = model.blocks[0].stats


def parametrize(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.blocks[1].up)
    nn.utils.parametrizations.weight_norm(model.blocks[3].up)


# -- contexts ----------------------------------------------------------------------------------------------------------


class ContextBlock(Block):
    """Contexts in a block are the block's."""

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            gate = x.sigmoid()
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return checkpoint(super().forward, x * gate, doc_ids, use_reentrant=False)


# -- hooks -------------------------------------------------------------------------------------------------------------


def doubled(tensors: Any) -> Any:
    return tuple(None if t is None else t * 2 for t in tensors)


def hook_blocks(model: Any) -> None:
    model.blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    model.blocks[2].register_forward_pre_hook(lambda module, args: doubled(args))
    model.blocks[3].register_full_backward_hook(lambda module, of_inputs, of_outputs: doubled(of_inputs))
    model.blocks[0].register_full_backward_pre_hook(lambda module, of_outputs: doubled(of_outputs))


# -- patched -----------------------------------------------------------------------------------------------------------


def patch_block(model: Any) -> None:
    block = model.blocks[2]
    block.forward = types.MethodType(lambda self, x: type(self).forward(self, x) * 2, block)


# -- nested ------------------------------------------------------------------------------------------------------------


def sequential() -> nn.Module:
    inner = [nn.Sequential(Block(2 * i), Block(2 * i + 1)) for i in range(2)]
    return nn.Sequential(nn.Embedding(VOCAB, HIDDEN), nn.Sequential(*inner), nn.Linear(HIDDEN, VOCAB))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Base()
        self.bias = nn.Parameter(torch.linspace(-1, 1, VOCAB))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(tokens).tanh() + self.bias


# -- arguments and outputs ---------------------------------------------------------------------------------------------


class Documents(Base):
    def forward(self, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x, doc_ids=doc_ids)
        return self.head(self.norm(x))


def document_ids() -> Tensor:
    return seq1f1b.document_starts(torch.tensor([[0] * 5 + [1] * 7, [0] * 9 + [1] * 3]))


class PairBlock(Mlp):
    def forward(self, x: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x) + left, x


class Pairs(Base):
    def __init__(self) -> None:
        super().__init__(PairBlock)

    def run(self, x: Tensor) -> Tensor:
        left = x * 0.5
        for block in self.blocks:
            x, left = block(x, left)
        return x + left


class ReturnsDict(Base):
    def forward(self, tokens: Tensor) -> Any:
        hidden = self.run(self.words(tokens))
        return {"logits": self.head(self.norm(hidden)), "hidden": hidden}


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor | None = None


class ReturnsDataclass(Base):
    def forward(self, tokens: Tensor) -> Any:
        hidden = self.run(self.words(tokens))
        return Output(self.head(self.norm(hidden)), hidden=hidden)


class StateBlock(Mlp):
    def forward(self, state: Any) -> Any:
        return {"x": super().forward(state["x"]), "before": [state["x"], None]}


class States(Base):
    def __init__(self) -> None:
        super().__init__(StateBlock)

    def run(self, x: Tensor) -> Tensor:
        state: Any = {"x": x, "before": None}
        for block in self.blocks:
            state = block(state)
        return state["x"] + state["before"][0]
