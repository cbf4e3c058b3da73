"""Profiles of a decoder of a given shape, measured in several processes on one machine: ``seq1f1b profile``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b.attention.causal as ops
from seq1f1b import where
from seq1f1b.engine.offload import FileTier
from seq1f1b.flat import whole
from seq1f1b.launcher import launch
from seq1f1b.partition import ModelShape, has_equal_layers
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.profiler import SEGMENTS, StageTimes, cuts_of, make_profile, measure_stage
from seq1f1b.where import HOST, Offload

__all__ = ["check_decoder", "profile_decoder", "profile_model"]


class _AdaptedLinear(nn.Module):
    """A frozen matrix W with a low-rank adapter, as peft computes it: W x + scale B A x."""

    def __init__(self, reads: int, writes: int, lora: int) -> None:
        super().__init__()
        self.whole = nn.Linear(reads, writes, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(reads, lora, bias=False), nn.Linear(lora, writes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.whole(x) + self.up(self.down(x)) * 2.0
        return found


class _Block(nn.Module):
    """Decoder layer: RMSNorm, rotary positions, grouped-query attention, SwiGLU. lora: rank of adapters, 0: none."""

    def __init__(self, model: ModelShape, index: int, lora: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.heads, model.kv_heads
        self.head_dim = model.head_dim or model.hidden // model.heads
        self.norm_1, self.norm_2 = (nn.RMSNorm(model.hidden).requires_grad_(not lora) for _ in range(2))
        linear: Any = partial(_AdaptedLinear, lora=lora) if lora else partial(nn.Linear, bias=False)
        self.qkv = linear(model.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim)
        self.out = linear(self.heads * self.head_dim, model.hidden)
        self.gate_up = linear(model.hidden, 2 * model.ffn) if model.ffn else None
        self.down = linear(model.ffn, model.hidden) if model.ffn else None
        self.layer = ops.layer_handle(index)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        half = self.head_dim // 2
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = torch.outer(ops.positions(x).float(), rates).to(q.dtype)
        q, k = _rotate(q, angles), _rotate(k, angles)
        attended = ops.causal_attention(q, k, v, layer=self.layer)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        if self.gate_up is not None and self.down is not None:
            gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
            x = x + self.down(F.silu(gate) * up)
        return x


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos(), angles.sin()
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def check_decoder(model: ModelShape, seq_len: int) -> None:
    """Raises ``ValueError`` unless :func:`profile_model` can build the shape and cut ``seq_len`` tokens."""
    model.flops(0, seq_len)  # raises unless the shape is sound
    cuts_of(seq_len, SEGMENTS)
    if model.experts > 1 or not has_equal_layers(model):
        what = f"{model.experts} experts" if model.experts > 1 else "layers of kinds"
        raise ValueError(
            f"the model has {what} for which there is no built-in layer; give your own stage to "
            "seq1f1b.planning.profiler.measure_stage"
        )
    if (model.head_dim or model.hidden // model.heads) % 2:
        raise ValueError(f"rotary positions need an even head size, got {model.head_dim or model.hidden}")


def profile_model(
    model: ModelShape,
    *,
    seq_len: int,
    layers: int = 2,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    offload: Offload = None,
    lora: int = 0,
    wait: Callable[[], object] = lambda: None,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, StageTimes]:
    """Measures a decoder: a stage of ``layers`` layers, the embedding, and norm, head, loss.

    Args:
        device: device of the stages.
        offload: a directory, or ``seq1f1b.HOST`` on GPUs; also measures the rates of a tier there.
        lora: rank of adapters beside the frozen matrices of layers; 0: all weights are trained.
    Returns:
        Arguments of ``make_profile``, by name; without embedding and head if the shape has no vocabulary.
    Raises:
        ValueError: an unsound shape, an odd head size, experts, or layers of several kinds; or as ``measure_stage``.
    """
    check_decoder(model, seq_len)
    with torch.device(device):
        blocks = nn.Sequential(*(_Block(model, i, lora) for i in range(layers)))
    measure = partial(measure_stage, seq_len=seq_len, repeats=repeats, wait=wait, progress=progress)

    def hidden(tokens: int) -> Tensor:
        return torch.randn(1, tokens, model.hidden, device=device)

    def words(tokens: int) -> Tensor:
        return torch.randint(model.vocab, (1, tokens), device=device)

    found = {"layer": measure(blocks, hidden, layers=layers, offload=offload)}
    if model.vocab:
        with torch.device(device):
            embedding = nn.Embedding(model.vocab, model.hidden)
            head = nn.Sequential(nn.RMSNorm(model.hidden), nn.Linear(model.hidden, model.vocab, bias=False))
        found["embedding"] = measure(embedding, words, offload=offload)
        found["head"] = measure(head, hidden, loss_fn=_cross_entropy, make_target=words, offload=offload)
    return found


# -- processes ---------------------------------------------------------------------------------------------------------


def _measure(
    model: ModelShape, threads: int, bf16: bool, show: bool, settings: dict[str, Any]
) -> dict[str, StageTimes]:
    """Runs :func:`profile_model` on one rank, and returns its result."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device, cuts = settings["device"], len(cuts_of(settings["seq_len"], SEGMENTS)) * (3 if model.vocab else 1)
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    done = count(1)

    def progress() -> None:
        if show and dist.get_rank() == 0:
            print(f"measured {next(done)} of {cuts} cuts", file=sys.stderr, flush=True)

    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        return profile_model(model, **settings, wait=dist.barrier, progress=progress)


def profile_decoder(
    model: ModelShape,
    *,
    seq_len: int,
    layers: int = 2,
    repeats: int = 5,
    processes: int = 1,
    threads: int = 1,
    bf16: bool = False,
    device: str = "cpu",
    offload: Offload = None,
    lora: int = 0,
    show: bool = False,
) -> Profile:
    """Runs :func:`profile_model` in several processes at once and returns the profile.

    Choose as many processes as ranks that will share the machine, because ranks compete for caches, memory and clock.
    Call from a script under ``if __name__ == "__main__":``, as :func:`seq1f1b.launch`.

    Args:
        threads: threads of each process.
        bf16: measures under autocast.
        device: "cpu" or "cuda"; the processes take the machine's GPUs in turn.
        show: prints the number of measured cuts to stderr after each cut.
        Other arguments are those of :func:`profile_model`.
    Raises:
        ValueError: a count below 1, "cuda" without a GPU; or as :func:`profile_model`.
        OSError: the tier's file cannot be made, written or read.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device is {device!r}, must be "cpu" or "cuda"')
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda", and torch finds no GPU: measure on the machine that will train')
    for name, value in (("processes", processes), ("threads", threads), ("layers", layers), ("repeats", repeats)):
        whole(name, value, 1)
    whole("lora", lora, 0)
    if offload is not None:
        where.check("host" if offload is HOST else "folder", f"offload={offload!r}", device)
    if offload is not None and offload is not HOST:
        offload = os.fspath(offload)
        FileTier(offload, None).close()
    check_decoder(model, seq_len)
    settings: dict[str, Any] = {"seq_len": seq_len, "layers": layers, "repeats": repeats, "device": device}
    settings |= {"offload": offload, "lora": lora}
    begin = time.perf_counter()
    found = launch(_measure, processes, model, threads, bf16, show, settings)
    return make_profile(
        model,
        **{name: [each[name] for each in found] for name in found[0]},
        seq_len=seq_len,
        threads=threads,
        dtype="bfloat16 autocast" if bf16 else "float32",
        seconds=time.perf_counter() - begin,
        device=device,
        lora=lora,
    )
