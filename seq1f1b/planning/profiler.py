"""Measures what the units of a stage cost here, in the engine itself, and fits a Profile to it.

:mod:`seq1f1b.planning.decoder` has the stages of ``seq1f1b profile``.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
]

SEGMENTS = (1, 2, 4, 8, 16)
WARM_UP = 2  # steps whose times do not count: the first ones allocate
WARM_UP_ALONE = 1  # repetitions of a unit by itself that do not count: the first one makes .grad
_LEAST_TOKENS = 16


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
    segments: Sequence[int] = SEGMENTS,
    repeats: int = 5,
    wait: Callable[[], object] = lambda: None,
    weights: bool = True,
    progress: Callable[[], object] = lambda: None,
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
        progress: called when a number of segments is through, and, with ``weights``, once more for each.
    Raises:
        ValueError: a count below 1, no cut that leaves enough tokens, or a loss without a target.
    """
    for name, value in (("seq_len", seq_len), ("layers", layers), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    cuts = cuts_of(seq_len, segments)
    if (loss_fn is None) != (make_target is None):
        raise ValueError("loss_fn and make_target are given together, for the last stage, or not at all")
    result = Measured(layers, {}, {}, [], 0.0, 0.0, 0.0, [], [])
    for k in cuts:
        result = _measure_cut(stage, make_inputs, loss_fn, make_target, seq_len, k, repeats, wait, result)
        progress()
    for k in cuts if weights else []:
        tokens = seq_len // k
        target = None if make_target is None else make_target(tokens)
        result.alone[tokens] = _measure_alone(stage, make_inputs(tokens), loss_fn, target, repeats, wait)
        progress()
    for parameter in stage.parameters():
        parameter.grad = None
    return result


def cuts_of(seq_len: int, segments: Sequence[int]) -> list[int]:
    """The numbers of segments that leave each segment enough tokens.

    Raises:
        ValueError: there are fewer than two of them.
    """
    cuts = [k for k in sorted(set(segments)) if k >= 1 and seq_len // k >= _LEAST_TOKENS]
    if len(cuts) < 2:
        raise ValueError(
            f"segments are {list(segments)} of {seq_len} tokens: two numbers of segments must leave each segment at "
            f"least {_LEAST_TOKENS} tokens, or floor and rates cannot be told apart"
        )
    return cuts


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
        for repetition in range(WARM_UP + repeats):
            wait()
            sink.bytes, ran, begin = 0, time.thread_time(), time.perf_counter()
            engine.step(inputs, target=target)
            whole, report = time.perf_counter() - begin, engine.report()
            if repetition == 0:  # the first step of a shape counts the bytes of graphs
                saved = report.stages[feeds].activation_bytes
                if saved is not None:
                    result.saved.append((seq_len, k, saved))
            if repetition < WARM_UP:
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
    for repetition in range(WARM_UP_ALONE + repeats):
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
                if repetition >= WARM_UP_ALONE:
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
