"""Some layers of Llama 3 in plain torch, for stages of gpu.py that train: grouped heads, SwiGLU, RoPE, no biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gpu_cases import Machine
from torch import Tensor, nn

import seq1f1b

ROPE_BASE = 500_000.0


@dataclass(frozen=True)
class Sizes:
    """Llama 3 8B's, of which a pipeline of eight stages has four layers on each. The vocabulary is small: embedding
    and head belong to other stages, and are here so that there are tokens and a loss."""

    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    layers: int = 4
    vocab: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def rotary(x: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the tokens' positions, (tokens, head_dim) each."""
    rates = ROPE_BASE ** (torch.arange(0, head_dim, 2, device=x.device, dtype=torch.float32) / -head_dim)
    angles = seq1f1b.positions(x).float()[:, None] * rates
    angles = torch.cat([angles, angles], 1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, index: int, is_ours: bool) -> None:
        super().__init__()
        self.sizes, self.is_ours, self.layer = sizes, is_ours, seq1f1b.layer_handle(index)
        hidden, ffn, of_kv = sizes.hidden, sizes.ffn, sizes.kv_heads * sizes.head_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(hidden, eps=1e-5), nn.RMSNorm(hidden, eps=1e-5)
        self.q, self.out = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = nn.Linear(hidden, of_kv, bias=False), nn.Linear(hidden, of_kv, bias=False)
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, self.sizes.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.is_ours:
            attended = seq1f1b.causal_attention(q, k, v, layer=self.layer)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x), cos, sin)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class LlamaStage(nn.Module):
    """All layers between embedding and head. Attention is ours, or torch's over whole sequences."""

    def __init__(self, sizes: Sizes, *, is_ours: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head_dim = sizes.head_dim
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(Layer(sizes, index, is_ours) for index in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.hidden, eps=1e-5), nn.Linear(sizes.hidden, sizes.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = rotary(x, self.head_dim)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def sizes_on(machine: Machine, sizes: Sizes) -> Sizes:
    """A rehearsal has small ones."""
    return sizes if machine.is_cuda else Sizes(hidden=64, heads=4, kv_heads=2, ffn=96, layers=1, vocab=50)


def stage_on(machine: Machine, sizes: Sizes, *, is_ours: bool = True) -> LlamaStage:
    """In bfloat16, in a rehearsal in float32."""
    with machine.device:
        stage = LlamaStage(sizes_on(machine, sizes), is_ours=is_ours)
    return stage.to(torch.bfloat16 if machine.is_cuda else torch.float32)
