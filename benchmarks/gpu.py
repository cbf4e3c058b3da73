"""A first run on a GPU: is everything right there, how fast is it, and what of the machine is unknown?

    python benchmarks/gpu.py                                     all stages, under 8 minutes
    python benchmarks/gpu.py --only environment,attention        some of them
    python benchmarks/gpu.py --out results.jsonl                 again with the same file: only what has not passed

After ``pip install -e .``, or from a tree with an in-place build: ``python setup.py build_ext --inplace`` needs a C
compiler and no torch, and may be done on another machine, for any Python from 3.10 and torch from 2.10. With nvcc and
``SEQ1F1B_CUDA_TILES=all`` before that command, the package's own CUDA kernels come along in every shape that is to be
timed, and the probes of their primitives. No network.

Stages come in order of value. Each runs in a process of its own with a time limit, so that one that fails, hangs or
breaks the CUDA context stops no other. Every case is a line of JSON in the results, written through to the disk at
once. The table at the end counts cases passed, failed and unmeasured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

HERE = Path(__file__).resolve().parent
STAGES = {  # seconds that a stage may take
    "environment": 40,
    "primitives": 30,
    "attention": 100,
    "own kernels": 100,
    "sanitizer": 80,
    "engine": 60,
    "processes": 60,
    "ceilings": 20,
    "speed": 120,
    "sweep": 60,
    "ncu": 60,
    "training": 60,
    "probes": 60,
}
LIMIT = 450  # seconds of the whole run


def append(path: Path, record: dict[str, Any]) -> None:
    cut_off = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # a process was stopped within a line
    with open(path, "a") as file:
        file.write("\n" * cut_off + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[dict[str, Any]]:
    """The lines that are whole."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def run_stage(command: Sequence[str], name: str, path: Path, seconds: float) -> str:
    """Runs the stage and ends all of its processes; returns "passed", "failed" or "timeout"."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    before, start = len(read(path)), time.monotonic()
    process = subprocess.Popen(
        [*command, "--stage", name, "--out", str(path), "--seconds", str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment,
    )  # fmt: skip
    timed_out = False
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        timed_out = True
    with contextlib.suppress(ProcessLookupError):  # what the stage started goes with it: it has a session of its own
        os.killpg(process.pid, signal.SIGKILL)
    if timed_out:
        output, _ = process.communicate()
    cases = [record for record in read(path)[before:] if record.get("case")]
    bad = process.returncode != 0 or any(record["state"] == "failed" for record in cases)
    state = "timeout" if timed_out else "failed" if bad else "passed"
    end = {"stage": name, "state": state, "seconds": round(time.monotonic() - start, 1)}
    if state != "passed":
        end["output"] = output[-3000:]
    append(path, end)
    return state


def run_stages(stages: dict[str, float], command: Sequence[str], path: Path, limit: float) -> None:
    """Runs stages in order, within the limit, but for those that have passed according to the file."""
    done = {record["stage"] for record in read(path) if not record.get("case") and record.get("state") == "passed"}
    deadline = time.monotonic() + limit
    for name, seconds in stages.items():
        left = deadline - time.monotonic()
        if name in done or left < 10:
            print(f"{name}: {'passed before' if name in done else 'no time left'}", flush=True)
            continue
        state = run_stage(command, name, path, min(seconds, left))
        print(f"{name}: {state}, {read(path)[-1]['seconds']} s", flush=True)


def latest_cases(records: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """The last result of each case by stage; one that was planned and has none is unmeasured."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        cases = found.setdefault(record["stage"], {})
        for case in record.get("planned", []):
            cases[case] = {"case": case, "state": "unmeasured", "why": "the stage ended before"}
        if record.get("case"):
            cases[record["case"]] = record
    return found


def summary(records: list[dict[str, Any]], stages: Sequence[str]) -> str:
    found = latest_cases(records)
    lines, details = [f"{'stage':14}{'passed':>8}{'failed':>8}{'unmeasured':>12}  state"], []
    for name in stages:
        cases = found.get(name, {})
        counts = [
            sum(case["state"] == state for case in cases.values()) for state in ("passed", "failed", "unmeasured")
        ]
        ends = [r["state"] for r in records if r["stage"] == name and not r.get("case") and "state" in r]
        lines.append(f"{name:14}{counts[0]:8}{counts[1]:8}{counts[2]:12}  {ends[-1] if ends else 'not run'}")
        for case in cases.values():
            values = {k: v for k, v in case.items() if k not in ("stage", "case", "state", "why")}
            if case["state"] == "failed":
                details.append(f"FAILED {name}: {case['case']}: {case.get('why', '')[:300]}")
            elif values and case["state"] == "passed" and name not in ("attention", "own kernels", "engine"):
                details.append(f"{name}: {case['case']}: " + ", ".join(f"{k} {v}" for k, v in values.items()))
    return "\n".join([*details, "", *lines])


PEERS = {  # of an operation: the case's times of torch's ops, of which the fastest counts, and of ours
    "attention_forward": (("dense forward", "varlen forward"), "own forward"),
    "attention_backward": (("dense backward + fp32 add",), "own backward"),
}


def verified_kernels(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records for seq1f1b/data/kernels/verified.json, by which a kernel of ours becomes the default.

    Right: all cases of the stages that look at our kernels passed (a tool that is not there is no failure). Faster:
    over all cells of its dtype and head size, each of which was checked in the same call, by geometric mean, and in
    none less than 0.85 times as fast.
    """
    found = latest_cases(records)
    versions = found.get("environment", {}).get("versions", {})
    states = {name: {case["state"] for case in found.get(name, {}).values()} for name in ("primitives", "own kernels")}
    watched = {case["state"] for case in found.get("sanitizer", {}).values()}
    if any(of_stage != {"passed"} for of_stage in states.values()) or "failed" in watched:
        return []
    entries = []
    for operation, of_library in versions.get("own CUDA kernels", {}).items():
        theirs, ours = PEERS[operation]
        ratios: dict[tuple[str, int], list[float | None]] = {}
        for name, case in found.get("speed", {}).items():
            shape = re.match(r"\d+/\d+ heads of (\d+), ", name)
            if shape:
                times = [float(case[which].split()[0]) for which in (*theirs, ours) if which in case]
                complete = case["state"] == "passed" and len(times) == len(theirs) + 1
                key = (case.get("dtype", "bfloat16"), int(shape[1]))
                ratios.setdefault(key, []).append(min(times[:-1]) / times[-1] if complete else None)
        for (dtype, head_dim), of_cells in ratios.items():
            measured = [ratio for ratio in of_cells if ratio is not None]
            if len(measured) == len(of_cells) and min(measured) >= 0.85 and geometric_mean(measured) > 1:
                entries.append({
                    "architecture": f"sm_{versions['sm']}", "operation": operation, "dtype": dtype,
                    "head_dim": head_dim, "source": of_library["source"], "compiler": of_library["compiler"],
                    "times as fast as torch": round(geometric_mean(measured), 3), "cells": len(measured),
                    "device": versions["device"], "torch": versions["torch"],
                })  # fmt: skip
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"), help="cpu: small sizes, for the script itself"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="results, added to")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, comma-separated")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of the whole run")
    options = parser.parse_args()
    unknown = set(options.only.split(",")) - STAGES.keys()
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    chosen = {name: float(seconds) for name, seconds in STAGES.items() if name in options.only.split(",")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-u", str(HERE / "gpu_stages.py"), "--device", options.device]
    run_stages(chosen, command, options.out, options.limit)
    print(summary(read(options.out), list(chosen)))
    for entry in verified_kernels(read(options.out)):
        print("for seq1f1b/data/kernels/verified.json:", json.dumps(entry))
    cases = [case for stage in latest_cases(read(options.out)).values() for case in stage.values()]
    return int(any(case["state"] == "failed" for case in cases))


if __name__ == "__main__":
    sys.exit(main())
