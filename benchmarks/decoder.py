"""The decoder of the training benchmarks: the same weights under any attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
import torch_attention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seq1f1b

HEAD_DIM = 64

HeadPart: TypeAlias = "bool | Literal['norm']"


def add_adapters(module: nn.Module, rank: int) -> None:
    """Freezes a module of blocks, and adds peft's adapters to the matrices."""
    from peft import LoraConfig, inject_adapter_in_model  # here, so that other arms do without peft

    module.requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=rank, target_modules=["qkv", "out", "up", "down"]), module)


class Block(nn.Module):
    def __init__(self, hidden: int, index: int, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = hidden // HEAD_DIM, attention
        self.layer = seq1f1b.layer_handle(index)
        self.in_segments = torch_attention.InSegments() if attention == "two calls" else None
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        if self.attention == "ours":
            attended = seq1f1b.causal_attention(q, k, v, layer=self.layer)
        elif self.in_segments is not None:
            attended = self.in_segments(q, k, v)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Stage(nn.Module):
    """Blocks of one of P stages; embedding on the first, head on the last unless ``head`` is off; "norm":
    of the head, only the norm before it.

    Weights and their names are those of the whole model however many stages there are. Attention is "ours", or torch's
    over "whole sequences" or in "two calls" (torch_attention.py). ``layers``: blocks of each stage, where they are not
    spread evenly.
    """

    checkpoints = False  # whether the backward computes each block again, by torch.utils.checkpoint

    def __init__(
        self,
        index: int,
        num_stages: int,
        *,
        hidden: int,
        blocks: int,
        vocab: int,
        attention: str = "ours",
        head: HeadPart = True,
        layers: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        first, last = index * blocks // num_stages, (index + 1) * blocks // num_stages
        if layers is not None:
            first, last = sum(layers[:index]), sum(layers[: index + 1])
        if index == 0:
            torch.manual_seed(blocks)
            self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleDict()
        for i in range(first, last):
            torch.manual_seed(i)
            self.blocks[str(i)] = Block(hidden, i, attention)
        if index == num_stages - 1 and head:
            self.head = make_head(hidden, vocab)
            if head == "norm":
                del self.head[1]

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x)
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x) if hasattr(self, "head") else x


def make_head(hidden: int, vocab: int) -> nn.Sequential:
    torch.manual_seed(vocab)
    return nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


class HeadLoss(nn.Module):
    """Norm, head and loss: given to the engine as loss_fn, only one segment's logits are alive."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.head = make_head(hidden, vocab)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden), target)
