"""A decoder in stages that keep the whole model's names, and the same model run whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seq1f1b.ops.attention import causal_attention, layer_handle, positions

__all__: list[str] = []


@dataclass(frozen=True)
class Config:
    """Sizes of the whole model. length: most tokens of a sequence."""

    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 48
    vocab: int = 29
    layers: int = 4
    length: int = 64


class Block(nn.Module):
    """is_ours: with the attention of this package, which the engine needs; else torch's, over whole sequences."""

    def __init__(self, config: Config, index: int, is_ours: bool) -> None:
        super().__init__()
        self.config, self.is_ours, self.layer = config, is_ours, layer_handle(index)
        hidden, self.head_dim = config.hidden, config.hidden // config.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        of_kv = config.kv_heads * self.head_dim
        self.k = nn.Linear(hidden, of_kv, bias=False)  # softmax does not see one: its gradient would be rounding alone
        self.v = nn.Linear(hidden, of_kv)
        self.up, self.down = nn.Linear(hidden, config.ffn), nn.Linear(config.ffn, hidden)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.is_ours:
            out = causal_attention(q, k, v, layer=self.layer)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Stage ``index`` of ``num_stages``: the embedding is on the first, the head on the last."""

    delay: Callable[[Tensor], Tensor] | None = None  # what each unit's result goes through

    def __init__(self, config: Config, index: int = 0, num_stages: int = 1, *, is_ours: bool = True) -> None:
        super().__init__()
        first, last = index * config.layers // num_stages, (index + 1) * config.layers // num_stages
        if index == 0:
            self.embedding = nn.Embedding(config.vocab, config.hidden)
            self.position = nn.Embedding(config.length, config.hidden)
        self.blocks = nn.ModuleDict({str(i): Block(config, i, is_ours) for i in range(first, last)})
        if index == num_stages - 1:
            self.norm = nn.LayerNorm(config.hidden)
            self.head = nn.Linear(config.hidden, config.vocab)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "embedding"):
            x = self.embedding(x) + self.position(positions(x))
        for block in self.blocks.values():
            x = block(x)
        if hasattr(self, "head"):
            x = self.head(self.norm(x))
        return x if self.delay is None else self.delay(x)


def whole_model(config: Config, dtype: torch.dtype = torch.float64) -> Stage:
    """The whole model; its weights are the same in every process and thread."""
    with torch.device("cpu"):
        model = Stage(config).double()
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.1
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, scale, generator=generator)
    return model.to(dtype)


def stage_of(model: Stage, config: Config, index: int, num_stages: int) -> Stage:
    """A stage with the whole model's parameters, copied."""
    first = next(model.parameters())
    with torch.device("cpu"):
        stage = Stage(config, index, num_stages)
    stage.to(first.device, first.dtype)
    state = model.state_dict()
    stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    return stage


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float() if output.dtype == torch.bfloat16 else output.flatten(0, 1),
                           target.flatten())  # fmt: skip


def batch(config: Config, rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens and next tokens, (rows, length) each."""
    generator = torch.Generator("cpu").manual_seed(seed)
    tokens = torch.randint(config.vocab, (rows, length + 1), generator=generator, device="cpu")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run_whole(model: Stage, tokens: Tensor, target: Tensor, num_microbatches: int) -> dict[str, Tensor]:
    """Gradients of the mean of the micro-batches' losses, by the whole model outside any step."""
    model.zero_grad()
    for x, y in zip(tokens.chunk(num_microbatches), target.chunk(num_microbatches), strict=True):
        (cross_entropy(model(x), y) / num_microbatches).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradient_error(
    gradients: Mapping[str, Tensor], truth: Mapping[str, Tensor], names: Iterable[str] | None = None
) -> float:
    """Worst ||g - g64|| / max(||g64||, 1e-3 x RMS of the model's gradient norms) over the parameters.

    Args:
        names: of these parameters, each of which must have a gradient; None: of all.
    """
    norms = torch.stack([g.double().norm() for g in truth.values()])
    floor = 1e-3 * norms.square().mean().sqrt()
    errors = [
        (gradients[name].double() - truth[name].double()).norm() / torch.maximum(truth[name].double().norm(), floor)
        for name in (truth if names is None else names)
    ]
    return float(torch.stack(errors).max())  # NaN where one is
