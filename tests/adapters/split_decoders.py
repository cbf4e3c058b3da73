"""Models with constants, buffers and control flow; and decoders as people write them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from split_parts import HIDDEN, VOCAB, WIDTH, Base, Block, Mlp, heads
from torch import Tensor, nn

import seq1f1b

# -- constants, buffers, dtypes ----------------------------------------------------------------------------------------


class Buffers(Base):
    """Buffers of both kinds, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.linspace(0.5, 1.5, HIDDEN))
        self.register_buffer("shift", torch.linspace(-1, 1, HIDDEN), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) * torch.tensor(8.0).sqrt() + torch.ones(HIDDEN)
        gain = self.gain * torch.arange(HIDDEN) / math.sqrt(HIDDEN)
        return self.head(self.norm(self.run(x * self.gain + self.shift)) * gain)


class RunningBlock(Mlp):
    """Keeps statistics of its rows, and uses them in evaluation."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.stats = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stats(x.transpose(1, 2)).transpose(1, 2))


def freeze(model: Any) -> None:
    model.words.requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].qkv.weight.requires_grad_(False)


class MixedDtypes(Base):
    """Blocks in float32 between an embedding and a head in float64."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens).to(torch.float32)
        return self.head(self.norm(self.run(x).double()))


def mixed() -> nn.Module:
    model = MixedDtypes()
    model.words.double(), model.norm.double(), model.head.double()
    return model


# -- control flow ------------------------------------------------------------------------------------------------------


class CarriedSum(Base):
    """State along the tokens outside of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.state = seq1f1b.layer_handle(99)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        total = x.cumsum(1) + seq1f1b.carry_in(self.state, torch.zeros(()))
        seq1f1b.carry_out(self.state, total[:, -1:])
        return self.head(self.norm(self.run(x + 0.1 * total)))


class AsksForType(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        if isinstance(x, Tensor):
            x = x * 2
        return self.head(self.norm(self.run(x)))


class SizesBehind(Base):
    def forward(self, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        return self.head(self.norm(self.run(self.words(tokens)))).view(batch, length, VOCAB)


# -- decoders as people write them -------------------------------------------------------------------------------------


class GptBlock(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.c_attn, self.c_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN), nn.Dropout(0.1))
        self.layer = seq1f1b.layer_handle(index)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads, self.c_attn(self.ln_1(x)).split(HIDDEN, 2))
        x = x + self.c_proj(seq1f1b.causal_attention(q, k, v, layer=self.layer).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """nanoGPT's names, ties and forward."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB, HIDDEN),
                "wpe": nn.Embedding(64, HIDDEN),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(GptBlock(i) for i in range(4)),
                "ln_f": nn.LayerNorm(HIDDEN),
            }
        )
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(seq1f1b.positions(idx)))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-100)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(HIDDEN)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Rotary(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.register_buffer("inverse", 0.1 ** (torch.arange(width // 2) / (width // 2)), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].to(self.inverse.dtype) * self.inverse
        return angles.cos(), angles.sin()


class LlamaBlock(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.input_norm, self.post_norm = RmsNorm(), RmsNorm()
        self.q, self.kv = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, 2 * WIDTH, bias=False)
        self.o = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, 24, bias=False), nn.Linear(HIDDEN, 24, bias=False)
        self.down, self.layer = nn.Linear(24, HIDDEN, bias=False), seq1f1b.layer_handle(index)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        y = self.input_norm(x)
        q, (k, v) = heads(self.q(y)), (heads(each, 1) for each in self.kv(y).chunk(2, -1))
        y = seq1f1b.causal_attention(rotated(q, *rotary), rotated(k, *rotary), v, layer=self.layer)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.post_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """RMSNorm, grouped queries, and rotary tables that are made once and go to every block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.rotary, self.norm = nn.Embedding(VOCAB, HIDDEN), Rotary(), RmsNorm()
        self.layers, self.lm_head = nn.ModuleList(LlamaBlock(i) for i in range(4)), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        rotary = self.rotary(seq1f1b.positions(input_ids))
        for layer in self.layers:
            x = layer(x, rotary)
        return self.lm_head(self.norm(x))


class UNet(Base):
    """Outputs of the first half are added in the second half, in reverse."""

    def __init__(self) -> None:
        super().__init__(Block, 6)
        self.skips = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def run(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.blocks):
            if i >= 3:
                x = x + self.skips[5 - i] * kept.pop()
            x = block(x)
            if i < 3:
                kept.append(x)
        return x
