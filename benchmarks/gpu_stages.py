"""One stage of gpu.py, in a process of its own: a list of cases, each a function that returns figures and raises where
something is wrong. A stage imports its own file only, so that a mistake in another's does not end it."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "cuda"))

import torch
from gpu_cases import Machine, run_cases

STAGES = {  # file: its stages, each a function that yields cases
    "gpu_doctor": ["doctor"],
    "gpu_attention": ["library", "own", "sanitizer", "tiny"],  # tiny: of sanitizer
    "gpu_parts": ["parts"],
    "gpu_engine": ["ranks", "threads", "tests"],
    "gpu_training": ["training"],
    "gpu_times": ["times"],
    "gpu_tier": ["tier"],
    "gpu_trees": ["trees"],
    "gpu_speed": ["speed", "ceilings", "ncu", "one_shape"],  # one_shape: of ncu
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", required=True, choices=[name for names in STAGES.values() for name in names])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="", help="those whose names hold this regular expression")
    parser.add_argument("--rehearsal", type=Path, help="folder of gpu_rehearsal.py")
    options = parser.parse_args()
    rehearsed = nullcontext()
    if options.rehearsal is not None:
        import gpu_rehearsal

        rehearsed = gpu_rehearsal.rehearsing(options.rehearsal)
    machine = Machine(options.out, options.rehearsal)
    torch.manual_seed(0)
    file = next(file for file, names in STAGES.items() if options.stage in names)
    stage = getattr(importlib.import_module(file), options.stage)
    with rehearsed:
        cases = [case for case in stage(machine) if re.search(options.cases, case[0])]
        run_cases(options.stage, cases, options.out, machine)


if __name__ == "__main__":
    main()
