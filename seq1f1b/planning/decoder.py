"""Profiles of a decoder of a given shape, measured in several processes on one machine: ``seq1f1b profile``."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.benchmark import Timer

import seq1f1b.attention.causal as ops
from seq1f1b import where
from seq1f1b.engine.file_tier import FileTier
from seq1f1b.partition import ModelShape, has_equal_layers
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.profiler import (
    MEASURED_WAYS,
    MOVED_WORK,
    SEGMENTS,
    WARM_UP,
    StageTimes,
    cuts_of,
    few_cuts,
    make_profile,
    measure_stage,
    moved_cut,
)
from seq1f1b.where import HOST, Offload

__all__ = ["check_decoder", "expected_seconds", "profile_decoder", "profile_model"]


class _Block(nn.Module):
    """Decoder layer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    def __init__(self, model: ModelShape, index: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.heads, model.kv_heads
        self.head_dim = model.head_dim or model.hidden // model.heads
        self.norm_1, self.norm_2 = nn.RMSNorm(model.hidden), nn.RMSNorm(model.hidden)
        self.qkv = nn.Linear(model.hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, model.hidden, bias=False)
        self.gate_up = nn.Linear(model.hidden, 2 * model.ffn, bias=False) if model.ffn else None
        self.down = nn.Linear(model.ffn, model.hidden, bias=False) if model.ffn else None
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
    wait: Callable[[], object] = lambda: None,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, StageTimes]:
    """Measures a decoder: a stage of ``layers`` layers, a stage of a single layer, the embedding, and norm, head, loss.

    Args:
        device: device of the stages.
        offload: a directory, or ``seq1f1b.HOST`` on GPUs; also measures the rates of a tier there.
    Returns:
        Arguments of ``make_profile``, by name; without embedding and head if the shape has no vocabulary.
    Raises:
        ValueError: an unsound shape, an odd head size, experts, or layers of several kinds; or as ``measure_stage``.
    """
    check_decoder(model, seq_len)
    with torch.device(device):
        blocks = nn.Sequential(*(_Block(model, i) for i in range(layers)))
    measure = partial(measure_stage, seq_len=seq_len, repeats=repeats, wait=wait, progress=progress)

    def hidden(tokens: int) -> Tensor:
        return torch.randn(1, tokens, model.hidden, device=device)

    def words(tokens: int) -> Tensor:
        return torch.randint(model.vocab, (1, tokens), device=device)

    found = {"layer": measure(blocks, hidden, layers=layers, offload=offload)}
    if layers > 1:
        found["single"] = measure(blocks[:1], hidden, segments=few_cuts(cuts_of(seq_len, SEGMENTS)))
    if model.vocab:
        with torch.device(device):
            embedding = nn.Embedding(model.vocab, model.hidden)
            head = nn.Sequential(nn.RMSNorm(model.hidden), nn.Linear(model.hidden, model.vocab, bias=False))
        found["embedding"] = measure(embedding, words, offload=offload)
        found["head"] = measure(head, hidden, loss_fn=_cross_entropy, make_target=words, offload=offload)
    return found


# -- how long it takes -------------------------------------------------------------------------------------------------

_STARTUP = 6.0  # seconds until the processes have imported torch, and of the first step
_BESIDE_PRODUCTS = 1.5  # time of a pass over the time of its products, at the rate of a product alone


def _work_in_order(model: ModelShape, settings: dict[str, Any]) -> list[float]:
    """Returns the FLOP of a call of :func:`profile_model` with the settings, one entry per call of ``progress``."""
    seq_len, layers, moves = settings["seq_len"], settings["layers"], settings["offload"] is not None
    cuts, layer = cuts_of(seq_len, SEGMENTS), model._replace(layers=1, vocab=0).flops(0, seq_len)
    steps, plain = WARM_UP + settings["repeats"], sum(MEASURED_WAYS.values())
    work = [steps * (plain + MOVED_WORK * (moves and k == moved_cut(cuts))) for k in cuts]
    found = [forwards * layers * layer for forwards in work]
    if layers > 1:
        found += [steps * plain * layer for _ in few_cuts(cuts)]
    if model.vocab:  # an embedding multiplies nothing
        found += [0.0 for _ in work] + [forwards * 2.0 * model.hidden * model.vocab * seq_len for forwards in work]
    return found


def expected_seconds(
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
) -> float:
    """Returns the estimated seconds of :func:`profile_decoder`: FLOP at the rate of a matrix product, timed on the
    spot. A tier slower than the units takes longer.
    Raises:
        ValueError, OSError: as :func:`profile_decoder`.
    """
    settings = _settings(model, seq_len, layers, repeats, device, offload, processes=processes, threads=threads)
    rows, inner = min(seq_len, 512), max(model.hidden, model.ffn)
    factors = {
        "x": torch.randn(rows, model.hidden, device=device),
        "weight": torch.randn(model.hidden, inner, device=device),
    }
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        timer = Timer("x @ weight", globals=factors, num_threads=threads)
        product = min(timer.timeit(1).median for _ in range(4))
    sharing = processes / torch.cuda.device_count() if device == "cuda" else processes * threads / (os.cpu_count() or 1)
    work = sum(_work_in_order(model, settings)) / (2.0 * rows * model.hidden * inner)
    return _STARTUP + _BESIDE_PRODUCTS * max(1.0, sharing) * work * product


# -- processes ---------------------------------------------------------------------------------------------------------

_shared: Any = None  # set at the start of a worker process: barrier, FLOP measured so far, number of the process


def _start_worker(barrier: Any, done: Any, started: Any, threads: int) -> None:
    global _shared
    with started.get_lock():
        _shared = barrier, done, started.value
        started.value += 1
    torch.set_num_threads(threads)


def _work(model: ModelShape, bf16: bool, settings: dict[str, Any]) -> dict[str, StageTimes]:
    """Runs :func:`profile_model` in a worker process."""
    torch.manual_seed(0)
    (barrier, done, number), device = _shared, settings["device"]
    if device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    work = itertools.accumulate(_work_in_order(model, settings))

    def progress() -> None:
        done.value = max(done.value, next(work))

    try:
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            return profile_model(model, **settings, wait=barrier.wait, progress=progress)
    except BaseException:
        barrier.abort()  # otherwise the remaining processes wait without end
        raise


def _settings(
    model: ModelShape, seq_len: int, layers: int, repeats: int, device: str, offload: Offload, **counts: int
) -> dict[str, Any]:
    """Returns the arguments of :func:`profile_model`; raises before a measurement, also if the tier cannot be made."""
    if device not in ("cpu", "cuda"):
        raise ValueError(f'device is {device!r}, must be "cpu" or "cuda"')
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError('device is "cuda", and torch finds no GPU: measure on the machine that will train')
    for name, value in {**counts, "layers": layers, "repeats": repeats}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    if offload is not None:
        where.check("host" if offload is HOST else "folder", f"offload={offload!r}", device)
    if offload is not None and offload is not HOST:
        offload = os.fspath(offload)
        FileTier(offload, None).close()
    check_decoder(model, seq_len)
    return {"seq_len": seq_len, "layers": layers, "repeats": repeats, "device": device, "offload": offload}


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
    progress: Callable[[float], object] | None = None,
) -> Profile:
    """Runs :func:`profile_model` in several processes at once and returns the profile.

    Choose as many processes as ranks that will share the machine, because ranks compete for caches, memory and clock.

    Args:
        threads: threads of each process.
        bf16: measures under autocast.
        device: "cpu" or "cuda"; the processes take the machine's GPUs in turn.
        offload: a directory, or ``seq1f1b.HOST`` on GPUs; also measures the rates of a tier there, while all processes
            move units at once.
        progress: called now and then with the finished share of the work.
    Raises:
        ValueError: a count below 1, "cuda" without a GPU; or as :func:`profile_model`.
        OSError: the tier's file cannot be made, written or read.
    """
    settings = _settings(model, seq_len, layers, repeats, device, offload, processes=processes, threads=threads)
    total = sum(_work_in_order(model, settings))
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    barrier, done, started = context.Barrier(processes), context.Value("d", 0.0), context.Value("i", 0)
    with ProcessPoolExecutor(processes, context, _start_worker, (barrier, done, started, threads)) as pool:
        tasks = [pool.submit(_work, model, bf16, settings) for _ in range(processes)]
        while wait(tasks, timeout=0.5).not_done:
            if progress is not None:
                progress(done.value / total)
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])
        found = [task.result() for task in tasks]
    parts = {name: [each[name] for each in found] for name in found[0]}
    return make_profile(
        model,
        **parts,
        seq_len=seq_len,
        threads=threads,
        dtype="bfloat16 autocast" if bf16 else "float32",
        seconds=time.perf_counter() - begin,
        device=device,
    )
