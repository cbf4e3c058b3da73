"""Measures the costs of a stage's units on this machine, in the engine itself, and fits a Profile to the costs.

:mod:`seq1f1b.planning.decoder` has the stages of ``seq1f1b profile``.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seq1f1b.engine.engine import LoneEngine
from seq1f1b.engine.options import Memory
from seq1f1b.flat import whole
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.planning.profile import TIER, Part, Profile
from seq1f1b.schedule import Schedule, Unit, build_schedule
from seq1f1b.seconds import PASSES, Fit, fit_seconds, pairs_of
from seq1f1b.transport import LoopbackGroup
from seq1f1b.where import Offload

__all__ = ["StageTimes", "measure_stage"]

SEGMENTS = (1, 2, 4, 8, 16)
_WARM_UP = 2  # steps whose times do not count: the first steps allocate
_LEAST_TOKENS = 16


class StageTimes(NamedTuple):
    """Measurements of a stage by one process: seconds of the whole stage, one list entry per repetition.

    Attributes:
        units: (begin, tokens) -> seconds of each kind of unit, ``F``, ``B``, ``I`` and ``W``; ``R`` has the sum of R
            and of the F before R, which builds no graph.
        saved: (tokens, units, bytes of graphs) live at once, one entry for each cut.
        left: bytes per token that I leaves to W, one entry for each cut: the part saved by F, and the part added by I.
        unit_overhead, step_overhead: seconds.
        tier: bytes per second on the way out, and on the way back; empty if no unit moved.
        moving: seconds per byte by which moved units slow down, out and back; empty if no unit moved.
        kv, kv_gradients, message: bytes per token.
        moved: bytes per token that a unit sent to the tier; 0 without a tier.
    """

    layers: int
    units: dict[tuple[int, int], dict[str, list[float]]]
    saved: list[tuple[int, int, float]]
    left: list[tuple[float, float]]
    unit_overhead: list[float]
    step_overhead: list[float]
    tier: list[tuple[float, float]]
    moving: list[tuple[float, float]]
    kv: float = 0.0
    kv_gradients: float = 0.0
    message: float = 0.0
    moved: float = 0.0


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
        layers: number of equal layers of the stage; a profile has the costs of one layer, with its share of the fixed
            time of a unit. As many layers as a training stage has predict short units best.
        loss_fn, make_target: loss of the last stage; the target is made in the form of the inputs.
        segments: numbers of segments to cut into; numbers that leave a segment fewer than 16 tokens are skipped.
        repeats: measured steps of each cut. The shorter half of the steps counts, which other processes disturbed
            least.
        offload: a directory, or ``seq1f1b.HOST``. An additional cut, with a middle number of segments, runs with units
            that move to a tier there.
        wait: called before each step, to keep several processes in step.
        progress: called after each number of segments.
    Raises:
        ValueError: a count below 1, fewer than two cuts with enough tokens, or a loss without a target.
        OSError: the tier's file cannot be made, written or read.
    """
    for name, value in (("seq_len", seq_len), ("layers", layers), ("repeats", repeats)):
        whole(name, value, 1)
    cuts = cuts_of(seq_len, segments)
    if (loss_fn is None) != (make_target is None):
        raise ValueError("loss_fn and make_target are given together, for the last stage, or not at all")
    found, moved = StageTimes(layers, {}, [], [], [], [], [], []), 0.0

    def run(k: int, way: str) -> _Cut:
        """Runs steps in ``k`` segments. way: "whole", "split" and "recomputed" backwards, or "moved" units."""
        sizes, sink = partition_sequence(seq_len, k, strategy="even"), _Sink()
        made = make_inputs(seq_len)
        given = made if isinstance(made, tuple) else (made,)
        inputs = tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in given)
        feeds = any(x.requires_grad for x in inputs)
        modules: list[nn.Module] = [_Feed()] * feeds + [stage] + [sink] * (loss_fn is None)
        device = inputs[0].device
        counts: Any = {"num_ranks": 1, "num_microbatches": 1, "stages_per_rank": len(modules)}
        (order,) = build_schedule("breadth-first", num_segments=k, **counts).ranks
        kinds = {"B": "IW"} if way == "split" else {}

        def is_measured(unit: Unit) -> bool:
            return unit.stage == feeds

        engine = LoneEngine(
            modules,
            schedule=Schedule([[unit._replace(kind=x) for unit in order for x in kinds.get(unit.kind, unit.kind)]]),
            num_microbatches=1,
            num_segments=k,
            segment_sizes=sizes,
            loss_fn=loss_fn or (lambda output, _: output),
            memory=Memory(
                recompute=is_measured if way == "recomputed" else "none",
                offload=offload if way == "moved" else None,
                units=is_measured if way == "moved" else None,
            ),
            group=LoopbackGroup(1)[0],
        )
        target = torch.zeros(len(inputs[0]), seq_len, device=device) if make_target is None else make_target(seq_len)
        steps: list[tuple[float, Any]] = []
        held: Any = None
        try:
            for repetition in range(_WARM_UP + repeats):
                wait()
                _wait_for(device)
                sink.bytes, begin = 0, time.perf_counter()
                engine.step(inputs, target=target)
                _wait_for(device)
                steps.append((time.perf_counter() - begin, engine.report()))
                if repetition == 0:  # the engine counts bytes of graphs in the first step of a shape
                    held = engine._runner.first_figures[int(feeds)].get("activations")
        finally:
            engine.close()
        shortest = sorted(steps[_WARM_UP:], key=lambda step: step[0])[: (repeats + 1) // 2]
        return _Cut(sizes, int(feeds), shortest, held, sink.bytes)

    for k in cuts:
        kept, split, recomputed = (run(k, way) for way in ("whole", "split", "recomputed"))
        for cut, kinds in ((kept, ("F", "B")), (split, ("F", "I", "W")), (recomputed, ("FR",))):
            cut.add_times(found, kinds)
        if kept.held is not None and split.held is not None:  # else a compiled stage, whose bytes are unknown
            found.saved.append((seq_len, k, kept.held.peak_saved))
            found.left.append((split.held.kept, split.held.gradients))
        if offload is not None and k == cuts[len(cuts) // 2]:
            moved = run(k, "moved").add_moves(found)
        progress()
    for parameter in stage.parameters():
        parameter.grad = None
    report = kept.steps[0][1]
    cache = report.planned_kv_bytes / seq_len, report.planned_grad_bytes / seq_len
    return found._replace(kv=cache[0], kv_gradients=cache[1], message=kept.message_bytes / seq_len, moved=moved)


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


class _Cut(NamedTuple):
    """Steps of a stage in segments of equal length, all in one way."""

    sizes: list[int]  # tokens of each segment
    stage: int  # number of the measured stage
    steps: list[tuple[float, Any]]  # seconds of a step, and the engine's report, of the shorter half of the steps
    held: Any  # bytes in graphs, as the engine counted them; None: not counted
    message_bytes: int  # bytes of the stage's outputs in a step

    def add_times(self, found: StageTimes, kinds: Sequence[str]) -> None:
        """Adds the seconds of units, under the last letter of each of ``kinds``: sums over the letters of a kind."""
        for seconds, report in self.steps:
            times = {(unit.kind, unit.segment): t for unit, t in self._times(report)}
            for s, size in enumerate(self.sizes):
                of_unit = found.units.setdefault((sum(self.sizes[:s]), size), {kind: [] for kind in PASSES})
                for kind in kinds:
                    of_unit[kind[-1]].append(sum(times[letter, s] for letter in kind))
            found.unit_overhead.append((report.seconds - report.busy) / len(report.timeline))
            found.step_overhead.append(seconds - report.seconds)

    def add_moves(self, found: StageTimes) -> float:
        """Adds the rates of moves, and the seconds by which moved units take longer than units that stay, by byte.
        Returns the moved bytes per token."""
        tokens, moved_bytes = 0, 0
        for _, report in self.steps:
            segments = [unit.segment for unit, _ in self._times(report) if unit.kind == "O"]
            tokens, moved_bytes = sum(self.sizes[s] for s in segments), int(report.moved_bytes)
            if not moved_bytes:
                continue
            slower = []
            for letters in ("FOA", "BL"):
                kept = [found.units[sum(self.sizes[:s]), self.sizes[s]][letters[0]] for s in segments]
                spent = sum(t for u, t in self._times(report) if u.segment in segments and u.kind in letters)
                slower.append(max(0.0, spent - sum(map(statistics.median, kept))) / moved_bytes)
            found.moving.append((slower[0], slower[1]))
            if report.move_out_rate and report.move_in_rate:
                found.tier.append((report.move_out_rate, report.move_in_rate))
        return moved_bytes / max(1, tokens)

    def _times(self, report: Any) -> list[tuple[Unit, float]]:
        """Returns the seconds of the measured stage's units."""
        return [(unit, end - start) for unit, start, end in report.timeline if unit.stage == self.stage]


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- fitting -----------------------------------------------------------------------------------------------------------


def _joined(measured: Sequence[StageTimes]) -> StageTimes:
    """Joins the repetitions of all processes into one object."""
    first, lists = measured[0], ("unit_overhead", "step_overhead", "tier", "moving")
    units = {
        key: {kind: [t for each in measured for t in each.units[key][kind]] for kind in PASSES} for key in first.units
    }
    together: dict[str, Any] = {name: [x for each in measured for x in getattr(each, name)] for name in lists}
    return first._replace(units=units, **together)


def fit_part(measured: StageTimes) -> Part:
    """Fits the costs of one layer to a measured stage."""
    layers = measured.layers
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in PASSES.values()}
    for (begin, tokens), times in sorted(measured.units.items()):
        medians = {kind: statistics.median(times[kind]) for kind in PASSES}
        medians["R"] -= medians["F"]
        pairs = pairs_of((begin + tokens,), begin, begin + tokens)
        for kind, name in PASSES.items():
            rows[name].append((tokens, pairs, max(0.0, medians[kind])))

    def fit(name: str) -> Fit:
        whole = fit_seconds(rows[name], with_pairs=measured.kv > 0 and name != "weight")
        return Fit(whole.floor / layers, whole.per_token / layers, whole.per_pair / layers, whole.residual)

    points = [(tokens / units, 0.0, size / units) for tokens, units, size in measured.saved]
    saved = fit_seconds(points, with_pairs=False)  # a line; zeros for compiled modules, whose bytes are unknown
    left = [statistics.fmean(column) / layers for column in zip(*(measured.left or [(0.0, 0.0)]), strict=True)]
    fits: dict[str, Any] = {name: fit(name) for name in rows}
    return Part(
        layers=layers,
        **fits,
        noise=statistics.median(_noise(times) for kinds in measured.units.values() for times in kinds.values()),
        saved_bytes=saved.floor / layers,
        saved_token_bytes=saved.per_token / layers,
        kept_token_bytes=left[0],
        gradient_token_bytes=left[1],
        moved_token_bytes=measured.moved / layers,
        kv_bytes=measured.kv / layers,
        kv_gradient_bytes=measured.kv_gradients / layers,
        message_bytes=measured.message,
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
    embedding: Sequence[StageTimes] | None = None,
    head: Sequence[StageTimes] | None = None,
    seq_len: int,
    threads: int,
    dtype: str,
    seconds: float,
    device: str = "cpu",
    lora: int = 0,
) -> Profile:
    """Makes a profile from results of :func:`measure_stage`, lists with an entry for each process."""
    layers = _joined(layer)
    of_tier = (*zip(*layers.tier, strict=True), *zip(*layers.moving, strict=True)) if layers.tier else ()
    return Profile(
        machine=f"{_processor()}, {os.cpu_count()} cores" if device == "cpu" else torch.cuda.get_device_name(),
        device=device,
        lora=lora,
        torch=torch.__version__,
        threads=threads,
        processes=len(layer),
        dtype=dtype,
        seconds=seconds,
        seq_len=seq_len,
        model=model,
        unit_overhead=statistics.median(layers.unit_overhead),
        step_overhead=statistics.median(layers.step_overhead),
        layer=fit_part(layers),
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
