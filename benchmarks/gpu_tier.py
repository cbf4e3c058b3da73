"""The stage of gpu.py that moves units: what the tier of pinned memory costs, and what it saves, beside recomputation.

A stage of Llama 3 8B with one sequence of 65,536 tokens in segments of 4,096. The first arm keeps everything; others
are compared with it in loss, gradients, time and memory.
"""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from gpu_cases import Case, Machine, worst_difference
from gpu_llama import Sizes, sizes_on, stage_on
from gpu_times import engine_of, steps_of
from torch import Tensor

import seq1f1b

KEPT = "everything kept"
TIME, MEMORY = 1.10, 0.6  # of the tier over everything kept: what is aimed at
GRADIENT_DIFFERENCE = 0.01  # of a parameter's gradient, by norms: flash and cuDNN add dQ in any order

Gradients = dict[str, Tensor]


def is_odd(unit: Any) -> bool:
    return bool(unit.segment % 2)


def is_even(unit: Any) -> bool:
    return not unit.segment % 2


def arms(machine: Machine) -> dict[str, seq1f1b.Memory]:
    """Without a GPU the tier is a file."""
    place = seq1f1b.HOST if machine.is_cuda else str(machine.out.parent)
    return {
        KEPT: seq1f1b.Memory(),
        "tier": seq1f1b.Memory(offload=place),
        "recompute": seq1f1b.Memory(recompute="all"),
        "half tier, half recompute": seq1f1b.Memory(recompute=is_odd, offload=place, units=is_even),
        "half tier": seq1f1b.Memory(offload=place, units=is_even),
    }


class Bench:
    """The model and batch of all arms, and what the first arm found."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.num_segments, self.timed = (16, 3) if machine.is_cuda else (2, 1)
        self.stage = stage_on(machine, Sizes())
        vocab, length = sizes_on(machine, Sizes()).vocab, 65536 if machine.is_cuda else 32
        self.tokens = torch.randint(vocab, (1, length), device=machine.device)
        self.kept: dict[str, Any] = {}
        self.gradients: Gradients = {}

    def run(self, name: str, memory: seq1f1b.Memory) -> dict[str, Any]:
        machine = self.machine
        engine = engine_of(self.stage, self.num_segments, num_microbatches=1, memory=memory)
        target = seq1f1b.shift_labels(self.tokens)
        losses = engine.step(self.tokens, target=target)
        gradients = {n: p.grad for n, p in self.stage.named_parameters() if p.grad is not None}
        found: dict[str, Any] = {"loss": round(float(losses[0]), 4)}
        if name == KEPT:
            self.gradients = {n: gradient.clone() for n, gradient in gradients.items()}
        else:
            found["gradient difference"] = self._compare(gradients)
        del gradients
        for parameter in self.stage.parameters():
            parameter.grad = None
        steps_of(machine, engine, self.tokens, self.timed - 1)
        gc.collect()
        if machine.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if machine.is_cuda else 0
        seconds = steps_of(machine, engine, self.tokens, self.timed)
        peak = torch.cuda.max_memory_allocated() - before if machine.is_cuda else 0
        report = engine.report()
        found |= {
            "ms": round(statistics.median(seconds) * 1e3, 1),
            "peak growth GB": round(peak / 1e9, 2),
            "moved GB": round(report.moved_bytes / 1e9, 2),
            "GB/s out": round(report.move_out_rate / 1e9, 1),
            "GB/s back": round(report.move_in_rate / 1e9, 1),
            "waits for the tier ms": round(report.tier * 1e3, 1),
            "units": {"kept": report.kept_units, "moved": report.moved_units, "again": report.recomputed_units},
        }
        engine.close()
        if name == KEPT:
            self.kept = found
        elif machine.is_cuda:
            found["time over everything kept"] = round(found["ms"] / self.kept["ms"], 3)
            found["memory over everything kept"] = round(peak / 1e9 / self.kept["peak growth GB"], 3)
            found["aim"] = f"time {TIME}, memory {MEMORY}" if name == "tier" else ""
        return found

    def _compare(self, gradients: Gradients) -> float:
        assert self.gradients, f"{KEPT} has to run before"
        return worst_difference(gradients, self.gradients, GRADIENT_DIFFERENCE)


def tier(machine: Machine) -> Iterator[Case]:
    bench: list[Bench] = []

    def arm(name: str, memory: seq1f1b.Memory) -> dict[str, Any]:
        if not bench:
            bench.append(Bench(machine))
        if machine.is_cuda:
            torch.cuda.empty_cache()
        return bench[0].run(name, memory)

    for name, memory in arms(machine).items():
        yield name, functools.partial(arm, name, memory)
