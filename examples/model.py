"""A small decoder-only language model, written to be read and to be cut into pipeline stages.

RMSNorm before each sublayer, rotary positions, grouped-query attention (GQA), SwiGLU; no biases, no dropout. What it
takes from seq1f1b is three calls: ``layer_handle``, ``positions`` and ``causal_attention``. Outside a pipeline step
these are plain torch, so a stage, or the whole model, also runs on its own.

A stage keeps the parameter names of the whole model (``blocks.3.mlp.down.weight`` wherever block 3 lives), so a
checkpoint knows nothing of how many stages wrote it.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b

Attend = Callable[..., Tensor]  # attend(q, k, v, layer=handle): causal attention, as seq1f1b.causal_attention


@dataclass(frozen=True)
class Config:
    """Shape of the model."""

    vocab: int
    hidden: int = 128
    layers: int = 5
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 384
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must divide hidden={self.hidden}, kv_heads={self.kv_heads} the heads")
        if (self.hidden // self.heads) % 2:
            raise ValueError(f"rotary positions need an even head size, hidden/heads is {self.hidden // self.heads}")

    @property
    def shape(self) -> seq1f1b.ModelShape:
        """What a split into equal FLOPs needs to know of the model."""
        return seq1f1b.ModelShape(
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ffn=self.ffn,
            vocab=self.vocab,
        )


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions: turns each pair (x1, x2) of x (..., S, D) by its angle (..., S, D/2). [arXiv:2104.09864]"""
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def of_whole_sequences(q: Tensor, k: Tensor, v: Tensor, *, layer: Tensor) -> Tensor:
    """Torch's own attention, for pipelines that run whole sequences: nothing came before."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, config: Config, index: int, attend: Attend) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.head_dim = config.hidden // config.heads
        self.qkv = nn.Linear(config.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        self.layer = seq1f1b.layer_handle(index)
        self.attend = attend

    def forward(self, x: Tensor, angles: Tensor, documents: dict[str, Tensor]) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, all heads, S, D)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, angles), rotate(k, angles)
        out = self.attend(q, k, v, layer=self.layer, **documents)
        mixed: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return mixed


class MLP(nn.Module):
    """SwiGLU. [arXiv:2002.05202]"""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self, config: Config, index: int, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.attention = Attention(config, index, attend)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: Tensor, documents: dict[str, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, documents)
        x = x + self.mlp(self.mlp_norm(x))
        return x


class Stage(nn.Module):
    """A run of blocks; the first stage also embeds tokens (B, S), the last may turn hidden states into logits."""

    frequencies: Tensor

    def __init__(self, config: Config, blocks: range, *, embed: bool, head: bool, attend: Attend) -> None:
        super().__init__()
        head_dim = config.hidden // config.heads
        frequencies = config.rope_base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.embedding = nn.Embedding(config.vocab, config.hidden) if embed else None
        self.blocks = nn.ModuleDict({str(i): Block(config, i, attend) for i in blocks})
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6) if head else None
        self.head = nn.Linear(config.hidden, config.vocab, bias=False) if head else None

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        # A segment and its positions start at the end of the segment before; positions of a document start at 0.
        documents = {} if doc_ids is None else {"doc_ids": doc_ids}
        positions = seq1f1b.positions(x, **documents)
        angles = (positions.float().unsqueeze(-1) * self.frequencies).unflatten(-2, (1, -1))  # ([B,] 1, S, D/2)
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks.values():
            x = block(x, angles, documents)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean loss in nats per token; logits (B, S, vocab), target (B, S)."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class HeadLoss(nn.Module):
    """The model's head inside the loss: the engine runs it forward and backward in one go, segment by segment, so only
    one segment's logits are alive at a time."""

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        initialise(self, config, seed)

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(self.head(self.norm(hidden)), target)


def initialise(module: nn.Module, config: Config, seed: int) -> None:
    """Draws each weight from the seed and its name alone, so that any number of stages starts as the same model."""
    generator = torch.Generator()
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue  # norms start at 1
        if name == "embedding.weight":
            std = 0.5  # blocks add to it: as small as the other weights, it drowns, and training stalls for 100 steps
        elif name.endswith(("attention.out.weight", "mlp.down.weight")):
            std = 0.02 / (2 * config.layers) ** 0.5
        else:
            std = 0.02
        nn.init.normal_(parameter, std=std, generator=generator.manual_seed(zlib.crc32(f"{seed} {name}".encode())))


def blocks_of(config: Config, stage_index: int, num_stages: int) -> range:
    """Blocks of one stage, at least one each; the last stage has fewer, as the head is work too."""
    if not 0 <= stage_index < num_stages <= config.layers:
        raise ValueError(
            f"stage {stage_index} of {num_stages}: {config.layers} layers make 1 to {config.layers} stages"
        )
    head_dim = config.hidden // config.heads
    block = 2 * (config.heads + config.kv_heads) * head_dim + 3 * config.ffn  # multiplications per hidden element
    work = config.layers + config.vocab / block  # in blocks

    def end(stage: int) -> int:
        earliest, latest = stage + 1, config.layers - (num_stages - 1 - stage)
        return min(max(round(work * (stage + 1) / num_stages), earliest), latest)

    return range(end(stage_index - 1) if stage_index else 0, end(stage_index))


def build_stage(
    config: Config,
    stage_index: int = 0,
    num_stages: int = 1,
    *,
    head: bool = True,
    seed: int = 0,
    attend: Attend = seq1f1b.causal_attention,
) -> Stage:
    """Stage `stage_index` of `num_stages`; by default the whole model.

    Args:
        head: the last stage gives logits; False where the loss holds the head (`HeadLoss`).
        attend: the attention of every block; `of_whole_sequences` for torch's own pipeline.
    """
    blocks = blocks_of(config, stage_index, num_stages)
    last = stage_index == num_stages - 1
    stage = Stage(config, blocks, embed=stage_index == 0, head=head and last, attend=attend)
    initialise(stage, config, seed)
    return stage
