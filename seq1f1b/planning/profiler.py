"""Measures the costs of a stage's units on this machine, in the engine itself, and fits a Profile to the costs.

:mod:`seq1f1b.planning.decoder` has the stages of ``seq1f1b profile``.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seq1f1b.engine.lone import LoneEngine
from seq1f1b.engine.options import Memory
from seq1f1b.engine.split_backward import deferrable
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.planning.profile import TIER, Part, Profile, Sample
from seq1f1b.schedule import Schedule, Unit, build_schedule
from seq1f1b.seconds import NO_SECONDS, PASSES, Fit, PassSeconds, fit_seconds, pairs_of
from seq1f1b.transport import LoopbackGroup
from seq1f1b.where import Offload

__all__ = ["StageTimes", "measure_stage"]

SEGMENTS = (1, 2, 4, 8, 16)
WARM_UP = 2  # steps whose times do not count: the first steps allocate
MEASURED_WAYS = {"whole": 3, "split": 3, "recomputed": 4}
"""The ways in which each cut is measured, and its work in forwards: B counts as two of them, and so do I and W."""
_REPEATED = ("unit_overhead", "step_overhead", "tier", "moving")  # fields of StageTimes with an entry per repetition
MOVED_WORK = 3  # work, in forwards, of a cut whose units move to a tier and back
_LEAST_TOKENS = 16
_APART = 1.5  # least ratio of the longest to the shortest unit for a line through both


class StageTimes(NamedTuple):
    """Measurements of a stage by one process: seconds of the whole stage, one list entry per repetition.

    Attributes:
        units: (begin, tokens) -> seconds of each kind of unit, ``F``, ``B``, ``I`` and ``W``; ``R`` has the sum of R
            and of the F before R, which builds no graph.
        saved: (tokens, units, bytes of graphs) live at once, one entry for each cut.
        left: bytes per token that I leaves to W, one entry for each cut: the part saved by F, and the part added by I.
        kv, kv_gradients, message: bytes per token.
        unit_overhead, step_overhead: seconds, one entry per repetition.
        moved: bytes per token that a unit sent to the tier; 0 without a tier.
        tier: bytes per second on the way out, and on the way back, per repetition; empty if no unit moved.
        moving: seconds per byte by which moved units slow down, out and back, per repetition; empty if no unit moved.
        workspace: (tokens of a unit, most temporary bytes of F, of B, most bytes added by I), one entry for each cut;
            the bytes added by I include the tensors left to W.
    """

    layers: int
    units: dict[tuple[int, int], dict[str, list[float]]]
    saved: list[tuple[int, int, float]]
    left: list[tuple[float, float]]
    kv: float
    kv_gradients: float
    message: float
    unit_overhead: list[float]
    step_overhead: list[float]
    moved: float
    tier: list[tuple[float, float]]
    moving: list[tuple[float, float]]
    workspace: list[tuple[int, float, float, float]]


class _Feed(nn.Module):
    """A stage before the measured stage: an identity that makes the measured stage compute gradients of inputs."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs


class _Sink(nn.Module):
    """A stage after the measured stage: adds up bytes of messages, and returns a scalar from which backward starts."""

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
    offload: Offload = None,
    wait: Callable[[], object] = lambda: None,
    progress: Callable[[], object] = lambda: None,
) -> StageTimes:
    """Runs a stage in the engine, over lengths and offsets, and times the units.

    The sequence is cut into each number of equal segments in turn. F and B of every segment are a sample, with the
    earlier segments in the cache. Every cut then runs with every B split into I and W, and with every unit recomputed.
    Floating-point inputs get a stage before, which takes gradients; without a loss, a stage after takes the outputs.
    Gradients of parameters are added to ``.grad``, as in a step's later units. Call with the threads, and under the
    autocast, of the training.

    Args:
        make_inputs: tokens -> inputs of one micro-batch of that length: token ids, or outputs of a previous stage.
        layers: number of equal layers of the stage; a profile has the costs of one layer.
        loss_fn, make_target: loss of the last stage; the target is made in the form of the inputs.
        segments: numbers of segments to cut into; numbers that leave a segment fewer than 16 tokens are skipped.
        repeats: measured steps of each cut. The half of the steps that was disturbed least counts: the steps in which
            this thread was stopped for the shortest time; on a GPU, the shortest steps.
        offload: a directory, or ``seq1f1b.HOST``. An additional cut, with a middle number of segments, runs with units
            that move to a tier there.
        wait: called before each step, to keep several processes in step.
        progress: called after each number of segments.
    Raises:
        ValueError: a count below 1, fewer than two cuts with enough tokens, or a loss without a target.
        OSError: the tier's file cannot be made, written or read.
    """
    for name, value in (("seq_len", seq_len), ("layers", layers), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} is {value}, must be at least 1")
    cuts = cuts_of(seq_len, segments)
    if (loss_fn is None) != (make_target is None):
        raise ValueError("loss_fn and make_target are given together, for the last stage, or not at all")
    case = _Case(stage, make_inputs, loss_fn, make_target, seq_len, repeats, offload, wait)
    result = StageTimes(layers, {}, [], [], 0.0, 0.0, 0.0, [], [], 0.0, [], [], [])
    for k in cuts:
        for way in MEASURED_WAYS:
            result = _measure_cut(case, k, way, result)
        if offload is not None and k == moved_cut(cuts):
            result = _measure_cut(case, k, "moved", result)
        progress()
        tokens = seq_len // k
        result.workspace.append((tokens, *measure_workspace(stage, _leaves(make_inputs(tokens)), case.loss(tokens))))
    for parameter in stage.parameters():
        parameter.grad = None
    return result


def cuts_of(seq_len: int, segments: Sequence[int]) -> list[int]:
    """Returns the numbers of segments that leave each segment enough tokens.

    Raises:
        ValueError: fewer than two numbers are left.
    """
    cuts = [k for k in sorted(set(segments)) if k >= 1 and seq_len // k >= _LEAST_TOKENS]
    if len(cuts) < 2:
        raise ValueError(
            f"segments are {list(segments)} of {seq_len} tokens: two numbers of segments must leave each segment at "
            f"least {_LEAST_TOKENS} tokens, or floor and rates cannot be told apart"
        )
    return cuts


def few_cuts(cuts: Sequence[int]) -> list[int]:
    """Returns the numbers of segments for a stage of one layer: the largest two, since short units show the seconds
    beyond layers best."""
    return list(cuts[-2:])


def moved_cut(cuts: Sequence[int]) -> int:
    """Returns the number of segments of the cut whose units move to the tier."""
    return cuts[len(cuts) // 2]


class _Case(NamedTuple):
    """Arguments of :func:`measure_stage`."""

    stage: nn.Module
    make_inputs: Callable[[int], Tensor | tuple[Tensor, ...]]
    loss_fn: Callable[[Any, Any], Tensor] | None
    make_target: Callable[[int], Tensor] | None
    seq_len: int
    repeats: int
    offload: Offload
    wait: Callable[[], object]

    def loss(self, tokens: int) -> Callable[[Any], Any]:
        """Returns a function of a stage's outputs: the loss of ``tokens`` tokens, or without a loss an identity."""
        loss_fn, target = self.loss_fn, self.make_target and self.make_target(tokens)
        return (lambda outputs: outputs) if loss_fn is None else lambda outputs: loss_fn(outputs, target)


def _leaves(inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    return tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in given)


def _order(num_stages: int, k: int, split: bool) -> Schedule:
    """Returns an order of one rank: all F, then all B; ``split`` replaces each B by I and W."""
    order = build_schedule("breadth-first", num_ranks=1, num_microbatches=1, num_segments=k, stages_per_rank=num_stages)
    if not split:
        return order

    def parts(unit: Unit) -> list[Unit]:
        return [unit._replace(kind=kind) for kind in ("IW" if unit.kind == "B" else unit.kind)]

    return Schedule([[part for unit in order.ranks[0] for part in parts(unit)]])


def _measure_cut(case: _Case, k: int, way: str, result: StageTimes) -> StageTimes:
    """Adds the measurements of steps in ``k`` segments to the result. way: one of ``MEASURED_WAYS``, or "moved"."""
    sizes = partition_sequence(case.seq_len, k, strategy="even")
    inputs, sink = _leaves(case.make_inputs(case.seq_len)), _Sink()
    feeds = any(x.requires_grad for x in inputs)
    modules: list[nn.Module] = [_Feed()] * feeds + [case.stage] + [sink] * (case.loss_fn is None)

    def is_measured(unit: Unit) -> bool:
        return unit.stage == feeds

    engine = LoneEngine(
        modules,
        schedule=_order(len(modules), k, way == "split"),
        num_microbatches=1,
        num_segments=k,
        segment_sizes=sizes,
        loss_fn=case.loss_fn or (lambda output, _: output),
        memory=Memory(
            recompute=is_measured if way == "recomputed" else "none",
            offload=case.offload if way == "moved" else None,
            units=is_measured if way == "moved" else None,
        ),
        group=LoopbackGroup(1)[0],
    )
    target = (
        torch.zeros(inputs[0].shape[0], case.seq_len, device=inputs[0].device)
        if case.make_target is None
        else case.make_target(case.seq_len)
    )
    steps: list[tuple[float, float, Any]] = []  # seconds lost to other processes, seconds of the step, report
    device = inputs[0].device
    try:
        for repetition in range(WARM_UP + case.repeats):
            case.wait()
            _wait_for(device)
            sink.bytes, ran, begin = 0, time.thread_time(), time.perf_counter()
            engine.step(inputs, target=target)
            _wait_for(device)
            whole, report = time.perf_counter() - begin, engine.report()
            held = engine.activations_of(int(feeds))
            if repetition == 0 and held is not None:  # the engine counts bytes of graphs in the first step of a shape
                if way == "split":
                    result.left.append((held.kept, held.gradients))
                elif way == "whole":
                    result.saved.append((case.seq_len, k, held.peak_saved))
            if repetition < WARM_UP:
                continue
            lost = whole if device.type != "cpu" else whole - (time.thread_time() - ran)
            steps.append((lost, whole, report))
            if report.move_out_rate and report.move_in_rate:
                result.tier.append((report.move_out_rate, report.move_in_rate))
        if way == "moved":
            tokens = sum(sizes[unit.segment] for unit, _, _ in report.timeline if unit.kind == "O")
            result.moving.extend(_moving(report, sizes, result.units) for _, _, report in steps if report.moved_bytes)
            return result._replace(moved=report.moved_bytes / max(1, tokens))
        steps.sort(key=lambda step: step[0])
        for _, whole, report in steps[: (case.repeats + 1) // 2]:
            found = {
                (unit.kind, unit.segment): end - start for unit, start, end in report.timeline if is_measured(unit)
            }
            for s, size in enumerate(sizes):
                times = result.units.setdefault((sum(sizes[:s]), size), {kind: [] for kind in PASSES})
                if way == "recomputed":
                    times["R"].append(found["F", s] + found["R", s])
                else:
                    for kind in "FB" if way == "whole" else "FIW":
                        times[kind].append(found[kind, s])
            result.unit_overhead.append((report.seconds - report.busy) / len(report.timeline))
            result.step_overhead.append(whole - report.seconds)
        return result._replace(
            kv=report.planned_kv_bytes / case.seq_len,
            kv_gradients=report.planned_grad_bytes / case.seq_len,
            message=sink.bytes / case.seq_len,
        )
    finally:
        engine.close()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _moving(report: Any, sizes: Sequence[int], units: Any) -> tuple[float, float]:
    """Returns the seconds per byte by which moved units take longer than units of an equal cut that stay, out and
    back."""
    moved = {(unit.stage, unit.segment) for unit, _, _ in report.timeline if unit.kind == "O"}
    spent: dict[tuple[str, int], float] = defaultdict(float)
    for unit, start, end in report.timeline:
        if (unit.stage, unit.segment) in moved:
            spent[unit.kind, unit.segment] += end - start

    def longer(kind: str, with_it: str) -> float:
        points = [
            (statistics.median(units[sum(sizes[:s]), sizes[s]][kind]), sum(spent[each, s] for each in with_it))
            for _, s in sorted(moved)
        ]
        return _line_through(points, 1.0)[0] * len(moved) / int(report.moved_bytes)

    return longer("F", "FOA"), longer("B", "BL")


# -- bytes that a pass allocates beside what its graph keeps -----------------------------------------------------------


def measure_workspace(
    stage: Callable[..., Any], inputs: tuple[Tensor, ...], loss: Callable[[Any], Any] = lambda outputs: outputs
) -> tuple[float, float, float]:
    """Runs a forward and a backward, and again with the backward as I, and counts bytes.

    Gradients of inputs count. Gradients of parameters do not: they exist before, as in a step's later units.

    Args:
        inputs: leaf tensors of one segment, outside of a step.
        loss: function of the stage's outputs, for a last stage.
    Returns:
        Bytes of one unit: most that F allocates and frees; most that B adds; most that I adds, tensors left to W
        included.
    """
    device = inputs[0].device

    def passes() -> tuple[float, float]:
        """Returns the bytes that a forward allocates and frees, and the most bytes that the backward adds."""
        outputs, most, end = _allocated(lambda: loss(stage(*inputs)), device)
        roots = [x for x in (outputs if isinstance(outputs, tuple) else (outputs,)) if x.requires_grad]
        back = partial(torch.autograd.backward, roots, [torch.ones_like(x) for x in roots])
        backward = _allocated(back, device)[1] if roots else 0.0
        for x in inputs:
            x.grad = None
        return most - end, backward

    passes()  # not counted: allocates the gradients of the parameters
    forward, backward = passes()
    with _leaving_weights(stage):
        return forward, backward, passes()[1]


@contextmanager
def _leaving_weights(stage: Any) -> Iterator[None]:
    """Makes backward act as I within the context: layers with deferrable weight gradients compute none, and keep
    inputs and gradients of outputs for W."""
    left: list[Any] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        left.append(inputs)
        if output.requires_grad:
            output.register_hook(left.append)  # type: ignore[no-untyped-call] # torch's has no types

    layers = [layer for layer in deferrable(stage) if layer.weight.requires_grad]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    for layer in layers:
        layer.weight.requires_grad_(False)
    try:
        yield
    finally:
        for hook, layer in zip(hooks, layers, strict=True):
            hook.remove()
            layer.weight.requires_grad_()


def _allocated(run: Callable[[], Any], device: torch.device) -> tuple[Any, float, float]:
    """Calls ``run``; returns the result, and the bytes allocated since the begin: at the peak, and at the end."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = run()
        peak, after = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return result, float(peak - before), float(after - before)
    with (
        _without_noise(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        result = run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return result, float(most), float(now)


@contextmanager
def _without_noise() -> Iterator[None]:
    """Silences standard error within the context: torch's profiler writes a line there at its start and stop."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# -- fitting -----------------------------------------------------------------------------------------------------------


def _joined(measured: Sequence[StageTimes]) -> StageTimes:
    """Joins the repetitions of all processes into one object."""
    lists: dict[str, Any] = {
        name: list(chain.from_iterable(getattr(each, name) for each in measured)) for name in _REPEATED
    }
    units = {
        key: {kind: list(chain.from_iterable(each.units[key][kind] for each in measured)) for kind in PASSES}
        for key in measured[0].units
    }
    return measured[0]._replace(units=units, **lists)


def _samples(measured: StageTimes) -> list[Sample]:
    found = []
    for key, times in sorted(measured.units.items()):
        medians = {kind: statistics.median(times[kind]) for kind in PASSES}
        medians["R"] = max(0.0, medians["R"] - medians["F"])
        found.append(Sample(*key, *medians.values()))
    return found


def _line_through(points: Sequence[tuple[float, float]], slope: float) -> tuple[float, float]:
    """Returns floor and slope of a line through pairs of seconds. Between the two measurements of a pair, the machine's
    speed may have changed; points too close together get the given slope, of an unchanged speed."""
    found = [(x, y) for x, y in points if x > 0 and y > 0]
    if not found:
        return 0.0, slope
    if max(x for x, _ in found) < _APART * min(x for x, _ in found):
        return max(0.0, statistics.median(y - slope * x for x, y in found)), slope
    return _line(found)


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Returns floor and slope, not negative; zeros if all points are zero (bytes of compiled modules)."""
    return fit_seconds([(x, 0.0, y) for x, y in points], with_pairs=False)[:2]


def beyond_layers(several: StageTimes, one: StageTimes) -> PassSeconds:
    """Returns the seconds of a unit beyond layers, from common units of a stage of several layers and a smaller stage.

    Raises:
        ValueError: the second stage has as many layers, or no unit in common with the first.
    """
    alone = {(sample.begin, sample.tokens): sample for sample in _samples(one)}  # c + n l; several layers: c + m l
    pairs = [(x, alone[x.begin, x.tokens]) for x in _samples(several) if (x.begin, x.tokens) in alone]
    if several.layers <= one.layers or not pairs:
        raise ValueError(
            f"stages of {several.layers} and {one.layers} layers with {len(pairs)} units in common do not tell what a "
            "unit takes beyond its layers: measure more layers in the first, and some of its cuts in the second"
        )

    def rest(name: str) -> float:
        points = [(getattr(many, name), getattr(few, name)) for many, few in pairs]
        floor, slope = _line_through(points, one.layers / several.layers)
        return min(*map(min, points), floor / (1 - slope)) if slope < 1 else 0.0  # at most the seconds of any unit

    return PassSeconds(*map(rest, PassSeconds._fields))


def fit_part(measured: StageTimes, unit: PassSeconds = NO_SECONDS) -> Part:
    """Fits the costs of one layer to a measured stage. unit: seconds of a unit beyond layers."""
    layers, samples = measured.layers, _samples(measured)

    def fit(name: str) -> Fit:
        beyond = getattr(unit, name)
        rows = [
            (s.tokens, pairs_of((s.begin + s.tokens,), s.begin, s.begin + s.tokens), getattr(s, name) - beyond)
            for s in samples
        ]
        found = fit_seconds(rows, with_pairs=measured.kv > 0 and name != "weight")
        return Fit(found.floor / layers, found.per_token / layers, found.per_pair / layers, found.residual)

    floor, saved = _line((tokens / units, size / units) for tokens, units, size in measured.saved)
    kept, gradients = (statistics.fmean(column) for column in zip(*(measured.left or [(0.0, 0.0)]), strict=True))
    grows = max(0.0, kept + gradients - saved) / layers  # bytes of a token, added by every layer that I goes through
    lines = {
        "saved": (floor / layers, saved / layers),
        "forward_workspace": _line((tokens, most) for tokens, most, _, _ in measured.workspace),
        "workspace": _line((tokens, most) for tokens, _, most, _ in measured.workspace),
        "input": _line((tokens, most - (layers - 1) * grows * tokens) for tokens, _, _, most in measured.workspace),
    }
    found: dict[str, Any] = {name: fit(name) for name in PASSES.values()}
    found |= {f"{name}_bytes": floor for name, (floor, _) in lines.items()}
    found |= {f"{name}_token_bytes": slope for name, (_, slope) in lines.items()}
    return Part(
        layers=layers,
        **found,
        noise=statistics.median(_noise(times) for kinds in measured.units.values() for times in kinds.values()),
        kept_token_bytes=kept / layers,
        gradient_token_bytes=gradients / layers,
        moved_token_bytes=measured.moved / layers,
        kv_bytes=measured.kv / layers,
        kv_gradient_bytes=measured.kv_gradients / layers,
        message_bytes=measured.message,
        samples=tuple(samples),
    )


def _noise(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4)
    return (high - low) / 2 / middle


def make_profile(
    model: ModelShape,
    layer: Sequence[StageTimes],
    *,
    single: Sequence[StageTimes] | None = None,
    embedding: Sequence[StageTimes] | None = None,
    head: Sequence[StageTimes] | None = None,
    seq_len: int,
    threads: int,
    dtype: str,
    seconds: float,
    device: str = "cpu",
) -> Profile:
    """Makes a profile from results of :func:`measure_stage`, lists with an entry for each process.

    single: results of a stage of fewer layers than ``layer``, in some of the cuts of ``layer``; tells the seconds of a
    unit beyond layers.
    """
    layers = _joined(layer)
    unit = NO_SECONDS if single is None else beyond_layers(layers, _joined(single))
    of_tier = (*zip(*layers.tier, strict=True), *zip(*layers.moving, strict=True)) if layers.tier else ()
    return Profile(
        machine=f"{_processor()}, {os.cpu_count()} cores" if device == "cpu" else torch.cuda.get_device_name(),
        device=device,
        torch=torch.__version__,
        threads=threads,
        processes=len(layer),
        dtype=dtype,
        seconds=seconds,
        seq_len=seq_len,
        model=model,
        unit_overhead=statistics.median(layers.unit_overhead),
        step_overhead=statistics.median(layers.step_overhead),
        unit=unit,
        layer=fit_part(layers, unit),
        embedding=None if embedding is None else fit_part(_joined(embedding)),
        head=None if head is None else fit_part(_joined(head)),
        **dict(zip(TIER if of_tier else (), map(statistics.median, of_tier), strict=True)),
    )


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
