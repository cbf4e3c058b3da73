"""One stage of gpu.py, in a process of its own: a list of cases, each a function that returns figures and raises where
something is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cuda"))

import gpu_attention
import gpu_engine
import gpu_probes
import gpu_speed
import torch
from gpu_cases import Case, Machine, run_cases

STAGES: dict[str, Callable[[Machine], Iterator[Case]]] = {
    "environment": gpu_probes.environment,
    "primitives": gpu_attention.primitives,
    "attention": gpu_attention.attention,
    "own kernels": gpu_attention.own_kernels,
    "sanitizer": gpu_attention.sanitizer,
    "engine": gpu_engine.engine,
    "processes": gpu_engine.processes,
    "ceilings": gpu_speed.ceilings,
    "speed": gpu_speed.speed,
    "sweep": gpu_speed.sweep,
    "ncu": gpu_speed.ncu,
    "training": gpu_engine.training,
    "probes": gpu_probes.probes,
    "tiny": gpu_attention.tiny,  # of sanitizer
    "one shape": gpu_speed.one_shape,  # of ncu
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--stage", required=True, choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)  # ends this process from outside
    options = parser.parse_args()
    machine = Machine(options.device)
    torch.manual_seed(0)
    run_cases(options.stage, list(STAGES[options.stage](machine)), options.out, machine)


if __name__ == "__main__":
    main()
