"""What models that are written to be cut have in common: blocks, a decoder around them, and how a case is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seq1f1b

VOCAB, HIDDEN, HEADS, TOKENS = 29, 16, 2, 12
WIDTH = HIDDEN // HEADS


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        cut: arguments of split; two stages, if it says nothing.
        says: what the refusal says; "": the model is cut.
        kwargs: keyword arguments of every stage.
        engine: whether it also trains in segments on two or three ranks.
    """

    make: Callable[[], nn.Module]
    cut: dict[str, Any] = field(default_factory=lambda: {"num_stages": 2})
    says: str = ""
    kwargs: Callable[[], dict[str, Any]] = dict
    engine: bool = False


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(3))


def heads(x: Tensor, count: int = HEADS) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


class Block(nn.Module):
    """Attention and an MLP, with dropout."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down, self.drop = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN), nn.Dropout(0.1)
        self.layer, self.residual = seq1f1b.layer_handle(index), 1.0
        self.activation: Callable[[Tensor], Tensor] = F.gelu

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        q, k, v = map(heads, self.qkv(self.norm(x)).chunk(3, -1))
        y = seq1f1b.causal_attention(q, k, v, layer=self.layer, doc_ids=doc_ids)
        x = x * self.residual + self.out(y.transpose(1, 2).flatten(2))
        return x + self.drop(self.down(self.activation(self.up(x))))


class Mlp(nn.Module):
    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Base(nn.Module):
    """What most models are: embedding, blocks, norm and head."""

    def __init__(self, block: Callable[[int], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(VOCAB, HIDDEN), nn.ModuleList(block(i) for i in range(count))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.norm(self.run(self.words(tokens))))


class Plain(nn.Module):
    """Embedding, blocks and head, without attention; what is between them is a subclass's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.trunk(self.embedding(tokens)))


def model_of(forward: Callable[..., Any], **attributes: Any) -> Any:
    """A plain model with this forward, and these attributes."""
    torch.manual_seed(0)
    model = type("Own", (Plain,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model
