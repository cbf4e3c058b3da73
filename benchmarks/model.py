"""The decoder of the training benchmarks: the same weights under any attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_attention
from torch import Tensor, nn

import seq1f1b

HEAD_DIM = 64


class Block(nn.Module):
    def __init__(self, hidden: int, index: int, attention: str) -> None:
        super().__init__()
        self.heads, self.attention = hidden // HEAD_DIM, attention
        self.layer = seq1f1b.layer_handle(index)
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, HEAD_DIM).permute(2, 0, 3, 1, 4)
        if self.attention == "ours":
            attended = seq1f1b.causal_attention(q, k, v, layer=self.layer)
        elif self.attention == "whole sequences":
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = torch_attention.of_segment(self.attention, q, k, v, layer=self.layer)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Stage(nn.Module):
    """Blocks of one of P stages; embedding on the first, head on the last unless ``head`` is off.

    Attention is "ours", torch's over "whole sequences", or a name that ``torch_attention.of_segment`` knows.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        *,
        hidden: int,
        blocks: int,
        vocab: int,
        attention: str = "ours",
        head: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(index)
        first, last = index * blocks // num_stages, (index + 1) * blocks // num_stages
        self.embedding = nn.Embedding(vocab, hidden) if index == 0 else nn.Identity()
        self.blocks = nn.Sequential(*(Block(hidden, i, attention) for i in range(first, last)))
        is_last = index == num_stages - 1 and head
        self.head = (
            nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)) if is_last else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(x)))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class HeadLoss(nn.Module):
    """Norm, head and loss: given to the engine as loss_fn, only one segment's logits are alive."""

    def __init__(self, hidden: int, vocab: int) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False))

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden), target)
