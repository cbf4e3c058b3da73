"""The stage of gpu.py that looks at clocks: are the engine's times on a GPU those of the GPU, and do tuning and profile
follow from them?"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

import decoder
import torch
from gpu_cases import Case, Machine
from gpu_llama import LlamaStage, Sizes, rotary, sizes_on, stage_on
from torch import Tensor, nn

import seq1f1b
from seq1f1b.planning.profiler import fit_part, measure_stage
from seq1f1b.seconds import pairs_of

SUM_DIFFERENCE = 0.03  # of a step: between its units and gaps by the GPU's clock, and the whole by the host's
TUNED_SLOWER = 0.02  # of the best number of segments tried by hand
PREDICTED_DIFFERENCE = 0.08  # of cuts that the profile has not seen
BY_HAND = (1, 2, 4, 8)
MEASURED, HELD_OUT = (1, 2, 4, 8), (3, 6)
SIZES = Sizes(layers=2)


def model(machine: Machine) -> tuple[LlamaStage, Tensor]:
    """Two layers of Llama 3 8B, and two sequences."""
    vocab, length = sizes_on(machine, SIZES).vocab, 16384 if machine.is_cuda else 128
    return stage_on(machine, SIZES), torch.randint(vocab, (2, length), device=machine.device)


def engine_of(stage: nn.Module, num_segments: int, **options: Any) -> seq1f1b.PipelineEngine:
    defaults: dict[str, Any] = {"num_microbatches": 2, "loss_fn": decoder.cross_entropy}
    group = seq1f1b.LoopbackGroup(1)[0]
    return seq1f1b.PipelineEngine(stage, num_segments=num_segments, group=group, **defaults | options)


def steps_of(machine: Machine, engine: seq1f1b.PipelineEngine, tokens: Tensor, count: int) -> list[float]:
    """Seconds of whole steps by the host's clock, which waits for the GPU before and after."""
    target, seconds = seq1f1b.shift_labels(tokens), []
    for _ in range(count):
        machine.sync()
        start = time.perf_counter()
        engine.step(tokens, target=target)
        machine.sync()
        seconds.append(time.perf_counter() - start)
        for parameter in engine.parameters():
            parameter.grad = None
    return seconds


def sums(machine: Machine, num_segments: int) -> dict[str, Any]:
    """Units and gaps of a step add up to it; no span is outside of it, and none overlaps another."""
    stage, tokens = model(machine)
    engine = engine_of(stage, num_segments)
    steps_of(machine, engine, tokens, 3)
    (whole,) = steps_of(machine, engine, tokens, 1)
    report = engine.report()
    engine.close()
    assert report.clock == ("device" if machine.is_cuda else "host")
    spans = [span for _, *span in report.timeline]
    assert all(a <= b for a, b in spans), "a unit ends before it begins"
    assert all(b <= c + 1e-9 for (_, b), (c, _) in itertools.pairwise(spans)), "units overlap"
    late = report.seconds - report.busy - report.wait
    found = {
        "step ms": round(whole * 1e3, 2),
        "units ms": round(report.busy * 1e3, 2),
        "host late ms": round(late * 1e3, 2),
        "difference": round(report.seconds / whole - 1, 4),
    }
    if machine.is_cuda:  # a tiny step on a CPU is mostly what surrounds its units
        assert abs(report.seconds / whole - 1) < SUM_DIFFERENCE, found
    return found


def tuned(machine: Machine) -> dict[str, Any]:
    """What schedule="tuned" finds, beside every number of segments by hand, in turn."""
    stage, tokens = model(machine)
    engine = engine_of(stage, 4, schedule="tuned")
    for _ in range(60):
        steps_of(machine, engine, tokens, 1)
        if engine.report(gather=True).is_tuned:
            break
    else:
        raise AssertionError(f"nothing was found in 60 steps: {engine.report(gather=True).tuning}")
    others = {k: engine_of(stage, k) for k in BY_HAND}
    arms = {"tuned": engine, **{f"k {k}": other for k, other in others.items()}}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for repetition in range(4):
        for name, arm in arms.items():
            took = steps_of(machine, arm, tokens, 1)
            seconds[name] += took if repetition else []
    text = engine.report(gather=True).tuning
    for arm in arms.values():
        arm.close()
    ms = {name: round(statistics.median(each) * 1e3, 2) for name, each in seconds.items()}
    best = min(value for name, value in ms.items() if name != "tuned")
    found = {"ms": ms, "over the best": round(ms["tuned"] / best, 4), "found": text}
    if machine.is_cuda:
        assert ms["tuned"] <= (1 + TUNED_SLOWER) * best, found
    return found


class Layers(nn.Module):
    """The layers of a Llama stage without its ends, for what a profile measures."""

    def __init__(self, stage: LlamaStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = rotary(x, self.stage.head_dim)
        for layer in self.stage.layers:
            x = layer(x, cos, sin)
        return x


def predicted(machine: Machine) -> dict[str, Any]:
    """F and B of cuts that a profile has not seen, from those that it has."""
    stage, tokens = model(machine)
    length, hidden = tokens.shape[1], sizes_on(machine, SIZES).hidden
    dtype = next(stage.parameters()).dtype

    def inputs(count: int) -> Tensor:
        return torch.randn(1, count, hidden, device=machine.device, dtype=dtype)

    settings: dict[str, Any] = {"seq_len": length, "layers": len(stage.layers), "repeats": 3}
    part = fit_part([measure_stage(Layers(stage), inputs, segments=MEASURED, **settings)])
    seen = measure_stage(Layers(stage), inputs, segments=HELD_OUT, **settings).units
    found = {}
    for k in HELD_OUT:
        cut = {key: times for key, times in seen.items() if key[1] in (length // k, length // k + 1)}
        real = sum(statistics.median(times[kind]) for times in cut.values() for kind in "FB")
        foretold = part.layers * sum(
            fit.seconds(count, pairs_of((begin + count,), begin, begin + count))
            for begin, count in cut
            for fit in (part.forward, part.backward)
        )
        found[f"k {k}"] = round(foretold / real, 4)
        if machine.is_cuda:
            assert abs(foretold / real - 1) < PREDICTED_DIFFERENCE, found
    return {"foretold over measured": found}


def times(machine: Machine) -> Iterator[Case]:
    for k in (1, 4, 16):
        yield f"units and gaps add up to the step, k {k}", functools.partial(sums, machine, k)
    yield "profile", lambda: predicted(machine)
    yield "tuned", lambda: tuned(machine)
