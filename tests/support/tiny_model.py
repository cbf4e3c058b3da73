"""A decoder small enough to run whole in fp64 hundreds of times, in stages that keep the whole model's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seq1f1b


@dataclass(frozen=True)
class Config:
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 48
    vocab: int = 29
    layers: int = 4
    checkpoint: bool = False
    sinks: bool = False
    v_head_dim: int = 0  # 0: hidden / heads, as of q and k
    options: dict[str, Any] = field(default_factory=dict)  # of attention


class Block(nn.Module):
    attention = staticmethod(seq1f1b.causal_attention)

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.hidden // config.heads
        self.layer = seq1f1b.layer_handle(index)
        self.norm_1, self.norm_2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.q = nn.Linear(config.hidden, config.hidden)
        v_head_dim = config.v_head_dim or self.head_dim
        self.kv = nn.Linear(config.hidden, config.kv_heads * (self.head_dim + v_head_dim))
        self.out = nn.Linear(config.heads * v_head_dim, config.hidden)
        self.sinks = nn.Parameter(torch.randn(config.heads)) if config.sinks else None
        self.up, self.down = nn.Linear(config.hidden, config.ffn), nn.Linear(config.ffn, config.hidden)

    def attend(self, x: Tensor, **documents: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.config.heads, self.head_dim).transpose(1, 2)
        keys_and_values = self.kv(x).tensor_split([self.config.kv_heads * self.head_dim], 2)
        k, v = (t.unflatten(2, (self.config.kv_heads, -1)).transpose(1, 2) for t in keys_and_values)
        options = {**self.config.options, **documents}
        out = self.attention(q, k, v, layer=self.layer, sinks=self.sinks, **options)
        return self.out(out.transpose(1, 2).reshape(batch, length, -1))

    def run(self, x: Tensor, **documents: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x), **documents)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))

    def forward(self, x: Tensor, **documents: Tensor) -> Tensor:
        if self.config.checkpoint and torch.is_grad_enabled():
            return checkpoint(self.run, x, use_reentrant=False, **documents)
        return self.run(x, **documents)


class Stage(nn.Module):
    """Blocks [first, last) of the model, with the embedding before the first and the head after the last."""

    def __init__(self, config: Config, first: int, last: int) -> None:
        super().__init__()
        if first == 0:
            self.embedding = nn.Embedding(config.vocab, config.hidden)
            self.position = nn.Embedding(256, config.hidden)
        self.blocks = nn.ModuleDict({str(i): Block(config, i) for i in range(first, last)})
        if last == config.layers:
            self.norm = nn.LayerNorm(config.hidden)
            self.head = nn.Linear(config.hidden, config.vocab)

    def embed(self, x: Tensor, **documents: Tensor) -> Tensor:
        return self.embedding(x) + self.position(seq1f1b.positions(x, **documents))

    def forward(self, x: Tensor, **documents: Tensor) -> Tensor:
        """documents: doc_ids, or nothing."""
        if hasattr(self, "embedding"):
            x = self.embed(x, **documents)
        for block in self.blocks.values():
            x = block(x, **documents)
        return self.head(self.norm(x)) if hasattr(self, "head") else x


class Attends(nn.Module):
    """Adds causal attention of two heads to what comes in."""

    def __init__(self, hidden: int, index: int) -> None:
        super().__init__()
        self.qkv, self.layer = nn.Linear(hidden, 3 * hidden), seq1f1b.layer_handle(index)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return x + seq1f1b.causal_attention(q, k, v, layer=self.layer).transpose(1, 2).flatten(2)


def whole_model(config: Config, dtype: torch.dtype = torch.float64, seed: int = 0) -> Stage:
    torch.manual_seed(seed)
    return Stage(config, 0, config.layers).to(dtype)


def stage_of(model: Stage, config: Config, index: int, num_stages: int) -> Stage:
    """Stage ``index`` of P with the whole model's parameters, copied."""
    first, last = index * config.layers // num_stages, (index + 1) * config.layers // num_stages
    stage = Stage(config, first, last).to(next(model.parameters()).dtype)
    state = model.state_dict()
    stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    return stage


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(config: Config, num_microbatches: int, length: int, *, size: int = 2, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Tokens and next-token targets, (M size, length); some targets are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (num_microbatches * size, length), generator=generator)
    target = seq1f1b.shift_labels(tokens)
    target[torch.rand(target.shape, generator=generator) < 0.2] = -100
    return tokens, target


def run_whole(
    model: Stage, tokens: Tensor, target: Tensor, num_microbatches: int
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of the micro-batches and gradients of their mean, by the whole model run outside any step."""
    model.zero_grad()
    losses = []
    for x, y in zip(tokens.chunk(num_microbatches), target.chunk(num_microbatches), strict=True):
        loss = cross_entropy(model(x), y)
        (loss / num_microbatches).backward()
        losses.append(loss.detach())
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(gradients: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Worst ||g - g64|| / max(||g64||, 1e-3 x RMS of the model's gradient norms) over the parameters."""
    assert gradients.keys() == truth.keys()
    norms = torch.stack([g.double().norm() for g in truth.values()])
    floor = 1e-3 * norms.square().mean().sqrt()
    errors = [
        (gradients[n].double() - g.double()).norm() / torch.maximum(g.double().norm(), floor) for n, g in truth.items()
    ]
    return float(torch.stack(errors).max())  # NaN, if any is


def full_gradient(gradient: Any) -> Tensor:
    """The whole of what may be a shard of it (DTensor)."""
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
