"""Measures what the units of a stage cost here, in the engine itself, and fits it: fills a Profile."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from threading import BrokenBarrierError
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b.ops.attention as ops
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.planning.profile import Fit, Part, Profile, Sample, visible_pairs
from seq1f1b.runtime.engine import PipelineEngine
from seq1f1b.schedule import build_schedule
from seq1f1b.transport import LoopbackGroup

__all__ = [
    "Measured",
    "fit_part",
    "fit_seconds",
    "make_profile",
    "measure_stage",
    "profile_decoder",
    "profile_model",
]

_SEGMENTS = (1, 2, 4, 8, 16)
_LEAST_TOKENS = 16
_WARM_UP = 2  # steps whose times do not count: the first ones allocate


class Measured(NamedTuple):
    """What one process measured of a stage; plain numbers. Seconds of the whole stage, one list entry per repetition.

    Attributes:
        units: (begin, tokens) -> seconds of F and of B.
        alone: tokens of a first segment -> seconds of B, of its part for the inputs, and of its part for the
            parameters.
        saved: tokens and units that were live together, and the bytes of their graphs.
        kv, kv_gradients, message: bytes per token.
        unit_overhead, step_overhead: seconds, one per repetition.
    """

    layers: int
    units: dict[tuple[int, int], tuple[list[float], list[float]]]
    alone: dict[int, tuple[list[float], list[float], list[float]]]
    saved: list[tuple[int, int, float]]
    kv: float
    kv_gradients: float
    message: float
    unit_overhead: list[float]
    step_overhead: list[float]


class _Feed(nn.Module):
    """The stage before: hands on what it gets, so that the measured stage owes gradients of its inputs."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs


class _Sink(nn.Module):
    """The stage after: notes the size of the messages, and gives something to go backward from."""

    bytes = 0

    def forward(self, *inputs: Tensor) -> Tensor:
        self.bytes += sum(x.nbytes for x in inputs)
        return torch.stack([x.sum() for x in inputs if x.is_floating_point()]).sum()


def measure_stage(
    stage: nn.Module,
    make_inputs: Callable[[int], Tensor | tuple[Tensor, ...]],
    *,
    seq_len: int,
    layers: int = 1,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
    make_target: Callable[[int], Tensor] | None = None,
    segments: Sequence[int] = _SEGMENTS,
    repeats: int = 5,
    wait: Callable[[], object] = lambda: None,
    weights: bool = True,
) -> Measured:
    """Runs a stage in the engine, over lengths and offsets, and times its units.

    The sequence is cut into each number of equal segments in turn: F and B of every segment are a sample, with what
    came before in the cache. Where the inputs are floating-point, a stage before takes their gradients; where there is
    no loss, a stage after takes the outputs. Gradients of parameters are added to ``.grad``, as in a step's later
    units. Run it with the threads, and under the autocast, of the training.

    Args:
        make_inputs: tokens -> inputs of one micro-batch of that length: token ids, or what a stage before would send.
        layers: equal layers of the stage, of which the profile tells one.
        loss_fn, make_target: of the last stage; the target is made as the inputs are.
        segments: numbers of segments to cut into; those with fewer than 16 tokens each are left out.
        repeats: measured steps of each, of which the half counts that other processes disturbed least: by the time that
            this thread did not run. wait: called before each, to keep several processes together.
        weights: also tell W from the rest of B.
    Raises:
        ValueError: a count below 1, no cut that leaves enough tokens, or a loss without a target.
    """
    for name, value in (("seq_len", seq_len), ("layers", layers), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    cuts = [k for k in sorted(set(segments)) if k >= 1 and seq_len // k >= _LEAST_TOKENS]
    if len(cuts) < 2:
        raise ValueError(
            f"segments are {list(segments)} of {seq_len} tokens: two numbers of segments must leave each segment at "
            f"least {_LEAST_TOKENS} tokens, or floor and rates cannot be told apart"
        )
    if (loss_fn is None) != (make_target is None):
        raise ValueError("loss_fn and make_target are given together, for the last stage, or not at all")
    result = Measured(layers, {}, {}, [], 0.0, 0.0, 0.0, [], [])
    for k in cuts:
        result = _measure_cut(stage, make_inputs, loss_fn, make_target, seq_len, k, repeats, wait, result)
    for k in cuts if weights else []:
        tokens = seq_len // k
        target = None if make_target is None else make_target(tokens)
        result.alone[tokens] = _measure_alone(stage, make_inputs(tokens), loss_fn, target, repeats, wait)
    for parameter in stage.parameters():
        parameter.grad = None
    return result


def _as_tuple(inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _leaves(inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in _as_tuple(inputs))


def _measure_cut(
    stage: nn.Module,
    make_inputs: Callable[[int], Tensor | tuple[Tensor, ...]],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    make_target: Callable[[int], Tensor] | None,
    seq_len: int,
    k: int,
    repeats: int,
    wait: Callable[[], object],
    result: Measured,
) -> Measured:
    sizes = partition_sequence(seq_len, k, strategy="even")
    inputs, sink = _leaves(make_inputs(seq_len)), _Sink()
    feeds = any(x.requires_grad for x in inputs)
    modules: list[nn.Module] = [_Feed()] * feeds + [stage] + [sink] * (loss_fn is None)
    order = build_schedule(
        "breadth-first", num_ranks=1, num_microbatches=1, num_segments=k, stages_per_rank=len(modules)
    )
    engine = PipelineEngine(
        modules,
        schedule=order,
        num_microbatches=1,
        num_segments=k,
        segment_sizes=sizes,
        loss_fn=loss_fn or (lambda output, _: output),
        group=LoopbackGroup(1)[0],
    )
    target = torch.zeros(inputs[0].shape[0], seq_len) if make_target is None else make_target(seq_len)
    starts = [sum(sizes[:s]) for s in range(k)]
    steps: list[tuple[float, float, Any]] = []  # seconds lost to other processes, of the step, and its report
    try:
        for repetition in range(_WARM_UP + repeats):
            wait()
            sink.bytes, ran, begin = 0, time.thread_time(), time.perf_counter()
            engine.step(inputs, target=target)
            whole, report = time.perf_counter() - begin, engine.report()
            if repetition == 0:  # the first step of a shape counts the bytes of graphs
                saved = report.stages[feeds].activation_bytes
                if saved is not None:
                    result.saved.append((seq_len, k, saved))
            if repetition < _WARM_UP:
                continue
            steps.append((whole - (time.thread_time() - ran), whole, report))
        steps.sort(key=lambda step: step[0])
        for _, whole, report in steps[: (repeats + 1) // 2]:
            for unit, start, end in report.timeline:
                if unit.stage == feeds:
                    key = starts[unit.segment], sizes[unit.segment]
                    result.units.setdefault(key, ([], []))[unit.kind == "B"].append(end - start)
            result.unit_overhead.append((report.seconds - report.busy) / len(report.timeline))
            result.step_overhead.append(whole - report.seconds)
        return result._replace(
            kv=report.planned_kv_bytes / seq_len,
            kv_gradients=report.planned_grad_bytes / seq_len,
            message=sink.bytes / seq_len,
        )
    finally:
        engine.close()


def _measure_alone(
    stage: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    target: Tensor | None,
    repeats: int,
    wait: Callable[[], object],
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of a first segment's B, of the gradients of its inputs alone, and of its parameters alone."""
    leaves = _leaves(inputs)
    wanted = [x for x in leaves if x.requires_grad]
    parameters = [p for p in stage.parameters() if p.requires_grad]
    seconds: tuple[list[float], list[float], list[float]] = ([], [], [])
    for repetition in range(1 + repeats):
        output = stage(*leaves)
        if loss_fn is not None:
            output = loss_fn(output, target)
        roots = [x for x in _as_tuple(output) if x.requires_grad]
        seeds = [torch.ones_like(x) for x in roots]
        passes: list[Callable[[], object]] = [
            lambda r=roots, s=seeds: torch.autograd.backward(r, s, retain_graph=True),  # type: ignore[misc]
            *(
                (lambda r=roots, s=seeds, of=of: torch.autograd.grad(r, of, s, retain_graph=True)) if of else float
                for of in (wanted, parameters)
            ),
        ]
        with torch.autocast("cpu", enabled=False):
            for run, times in zip(passes, seconds, strict=True):
                wait()
                begin = time.perf_counter()
                run()
                if repetition > 0:  # the first one makes .grad
                    times.append(time.perf_counter() - begin)
        for leaf in wanted:
            leaf.grad = None
    return seconds


# -- fitting -----------------------------------------------------------------------------------------------------------


def fit_seconds(rows: Sequence[tuple[float, float, float]], *, with_pairs: bool = True) -> Fit:
    """Floor and rates, none negative, that make the squares of measured / fitted - 1 smallest over (tokens, pairs,
    seconds). Measured zeros are left out; with nothing else everything is 0.

    Of the few sets of terms that may be zero the best is taken, which is the least-squares solution under the bounds.
    """
    rows = [row for row in rows if row[2] > 0]
    if not rows:
        return Fit(0.0, 0.0, 0.0, 0.0)
    # Dividing each row by its seconds makes every residual a relative one.
    table = torch.tensor([[1 / s, tokens / s, pairs / s] for tokens, pairs, s in rows], dtype=torch.float64)
    scale = table.norm(dim=0).clamp_min(1e-300)
    ones, best = torch.ones(len(rows), 1, dtype=torch.float64), (math.inf, [0.0, 0.0, 0.0])
    columns = range(3 if with_pairs else 2)
    for size in range(1, len(columns) + 1):
        for chosen in map(list, itertools.combinations(columns, size)):
            solution = torch.linalg.lstsq(table[:, chosen] / scale[chosen], ones).solution[:, 0] / scale[chosen]
            error = float((table[:, chosen] @ solution - 1).square().mean())
            if float(solution.min()) >= 0 and error < best[0]:
                values = dict(zip(chosen, solution.tolist(), strict=True))
                best = error, [values.get(i, 0.0) for i in range(3)]
    floor, per_token, per_pair = best[1]
    ratios = [s / (floor + per_token * tokens + per_pair * pairs) - 1 for tokens, pairs, s in rows]
    return Fit(floor, per_token, per_pair, math.sqrt(statistics.fmean(r * r for r in ratios)))


def _joined(measured: Sequence[Measured]) -> Measured:
    """The repetitions of all processes as those of one."""
    first = measured[0]
    return first._replace(
        units={k: tuple([t for m in measured for t in m.units[k][i]] for i in (0, 1)) for k in first.units},  # type: ignore[misc]
        alone={k: tuple([t for m in measured for t in m.alone[k][i]] for i in (0, 1, 2)) for k in first.alone},  # type: ignore[misc]
        unit_overhead=[t for m in measured for t in m.unit_overhead],
        step_overhead=[t for m in measured for t in m.step_overhead],
    )


def fit_part(measured: Sequence[Measured]) -> Part:
    """One layer of what one process, or several at a time, measured of the same stage."""
    all_ = _joined(measured)
    layers, median = all_.layers, statistics.median
    samples = [Sample(*key, median(f), median(b)) for key, (f, b) in sorted(all_.units.items())]
    attends = all_.kv > 0

    def fit(rows: Sequence[tuple[float, float, float]], with_pairs: bool) -> Fit:
        found = fit_seconds(rows, with_pairs=with_pairs)
        return Fit(found.floor / layers, found.per_token / layers, found.per_pair / layers, found.residual)

    sizes = [(s.tokens, visible_pairs(s.begin, s.begin + s.tokens)) for s in samples]
    forward = [(*size, s.forward) for size, s in zip(sizes, samples, strict=True)]
    backward = [(*size, s.backward) for size, s in zip(sizes, samples, strict=True)]
    # What the inputs' gradients have that the whole has not is noise: a weight's share cannot be negative.
    added = [(n, 0.0, max(0.0, median(b) - median(i or [0.0]))) for n, (b, i, _) in all_.alone.items()]
    alone = [(n, visible_pairs(0, n), median(w or [0.0])) for n, (_, _, w) in all_.alone.items()]
    saved = _line([(tokens / units, size / units) for tokens, units, size in all_.saved])
    return Part(
        layers=layers,
        forward=fit(forward, attends),
        backward=fit(backward, attends),
        weight=fit(added, False),
        weight_alone=fit(alone, attends),
        noise=median(_noise(times) for pair in all_.units.values() for times in pair),
        saved_bytes=saved[0] / layers,
        saved_token_bytes=saved[1] / layers,
        kv_bytes=all_.kv / layers,
        kv_gradient_bytes=all_.kv_gradients / layers,
        message_bytes=all_.message,
        samples=tuple(samples),
    )


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Floor and slope, not negative, of bytes over tokens; zeros where nothing was counted (compiled modules)."""
    fit = fit_seconds([(tokens, 0.0, size) for tokens, size in points], with_pairs=False)
    return fit.floor, fit.per_token


def _noise(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def make_profile(
    model: ModelShape,
    layer: Sequence[Measured],
    *,
    embedding: Sequence[Measured] | None = None,
    head: Sequence[Measured] | None = None,
    seq_len: int,
    threads: int,
    dtype: str,
    seconds: float,
) -> Profile:
    """A profile of what :func:`measure_stage` found, one entry of a list for each process that ran at the time."""
    all_ = _joined(layer)
    return Profile(
        machine=f"{_processor()}, {os.cpu_count()} cores",
        torch=torch.__version__,
        threads=threads,
        processes=len(layer),
        dtype=dtype,
        seconds=seconds,
        seq_len=seq_len,
        model=model,
        unit_overhead=statistics.median(all_.unit_overhead),
        step_overhead=statistics.median(all_.step_overhead),
        layer=fit_part(layer),
        embedding=None if embedding is None else fit_part(embedding),
        head=None if head is None else fit_part(head),
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


# -- a decoder of a given shape ----------------------------------------------------------------------------------------


class _Block(nn.Module):
    """One layer: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

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
        rates = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
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


def profile_model(
    model: ModelShape,
    *,
    seq_len: int,
    layers: int = 2,
    repeats: int = 5,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, Measured]:
    """Measures a decoder of this shape: a stage of ``layers`` layers, the embedding, and norm, head and loss.

    Returns:
        What :func:`make_profile` takes, by name; no ends where the shape has no vocabulary.
    Raises:
        ValueError: the shape is unsound, its head size is odd, or it has experts; or as :func:`measure_stage`.
    """
    model.flops(0, seq_len)  # raises unless the shape is sound
    if model.experts > 1:
        raise ValueError(
            f"the model has {model.experts} experts: there is no built-in layer for them; give your own stage to "
            "seq1f1b.planning.profiler.measure_stage"
        )
    if (model.head_dim or model.hidden // model.heads) % 2:
        raise ValueError(f"rotary positions need an even head size, this is {model.head_dim or model.hidden}")
    blocks = nn.Sequential(*(_Block(model, i) for i in range(layers)))
    settings: dict[str, Any] = {"seq_len": seq_len, "repeats": repeats, "wait": wait}

    def hidden(tokens: int) -> Tensor:
        return torch.randn(1, tokens, model.hidden)

    def words(tokens: int) -> Tensor:
        return torch.randint(model.vocab, (1, tokens))

    found = {"layer": measure_stage(blocks, hidden, layers=layers, **settings)}
    if model.vocab:
        found["embedding"] = measure_stage(nn.Embedding(model.vocab, model.hidden), words, **settings)
        head = nn.Sequential(nn.RMSNorm(model.hidden), nn.Linear(model.hidden, model.vocab, bias=False))
        found["head"] = measure_stage(head, hidden, loss_fn=_cross_entropy, make_target=words, **settings)
    return found


_barrier: Any = None  # of the worker processes of profile_decoder, set as each of them starts


def _start_worker(barrier: Any, threads: int) -> None:
    global _barrier
    _barrier = barrier
    torch.set_num_threads(threads)


def _work(model: ModelShape, seq_len: int, layers: int, repeats: int, bf16: bool) -> dict[str, Measured]:
    torch.manual_seed(0)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            return profile_model(model, seq_len=seq_len, layers=layers, repeats=repeats, wait=_barrier.wait)
    except BaseException:
        _barrier.abort()  # the others wait for this one
        raise


def profile_decoder(
    model: ModelShape,
    *,
    seq_len: int,
    layers: int = 2,
    repeats: int = 5,
    processes: int = 1,
    threads: int = 1,
    bf16: bool = False,
) -> Profile:
    """:func:`profile_model` in processes of their own, all at the same time: as many as the ranks that will share this
    machine, since they share its caches, its memory and its clock.

    Args:
        threads: of each process. bf16: under autocast.
    Raises:
        ValueError: a count below 1; or as :func:`profile_model`.
    """
    for name, value in (("processes", processes), ("threads", threads), ("layers", layers), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    begin = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    with ProcessPoolExecutor(processes, context, _start_worker, (barrier, threads)) as pool:
        tasks = [pool.submit(_work, model, seq_len, layers, repeats, bf16) for _ in range(processes)]
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
    )
