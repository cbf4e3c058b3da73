"""Does benchmarks/gpu.py survive what its stages may do, take up where it stopped, and run without a GPU?"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from seq1f1b.device import kernel_library

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
assert spec is not None and spec.loader is not None
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)

STAGES = """
import json, os, subprocess, sys, time
stage, path = sys.argv[sys.argv.index("--stage") + 1], sys.argv[sys.argv.index("--out") + 1]
def write(**record):
    with open(path, "a") as file:
        file.write(json.dumps({"stage": stage, **record}) + "\\n")
write(planned=["one", "two"])
write(case="one", state="passed", value=3)
if stage == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.path.dirname(path) + "/child", "w").write(str(child.pid))
    time.sleep(600)
if stage == "dies":
    print("a last word", flush=True)
    open(path, "a").write('{"stage": "dies", "case": "tw')  # within a line
    os._exit(9)
if stage == "wrong":
    write(case="two", state="failed", why="it is wrong")
else:
    write(case="two", state="passed")
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    (tmp_path / "stages.py").write_text(STAGES)
    return [sys.executable, str(tmp_path / "stages.py")]


def ends(path: Path) -> dict[str, dict[str, Any]]:
    return {record["stage"]: record for record in gpu.read(path) if "seconds" in record}


def test_a_stage_that_fails_stops_no_other(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "results.jsonl"
    gpu.run_stages({"hangs": 3, "wrong": 60, "dies": 60, "fine": 60}, command, path, 200)
    states = {name: end["state"] for name, end in ends(path).items()}
    assert states == {"hangs": "timeout", "wrong": "failed", "dies": "failed", "fine": "passed"}
    assert "a last word" in ends(path)["dies"]["output"]
    child = int((tmp_path / "child").read_text())
    for _ in range(100):  # killed with its stage
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            break
        if state == "Z":
            break
        time.sleep(0.1)
    else:
        raise AssertionError("a child of the stage lives on")

    table = gpu.summary(gpu.read(path), ["hangs", "wrong", "dies", "fine"]).splitlines()[-4:]
    assert [line.split() for line in table] == [
        ["hangs", "1", "0", "1", "timeout"],
        ["wrong", "1", "1", "0", "failed"],
        ["dies", "1", "0", "1", "failed"],
        ["fine", "2", "0", "0", "passed"],
    ]
    assert "FAILED wrong: two: it is wrong" in gpu.summary(gpu.read(path), ["wrong"])


def test_only_what_has_not_passed_runs_again(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "results.jsonl"
    for _ in range(2):
        gpu.run_stages({"fine": 60, "wrong": 60}, command, path, 200)
    runs = [record["stage"] for record in gpu.read(path) if "planned" in record]
    assert runs == ["fine", "wrong", "wrong"]


def test_no_stage_begins_when_the_time_is_up(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "results.jsonl"
    gpu.run_stages({"fine": 60}, command, path, 5)
    assert gpu.read(path) == []
    assert gpu.summary([], ["fine"]).splitlines()[-1].split() == ["fine", "0", "0", "0", "not", "run"]


def test_the_script_on_the_cpu(tmp_path: Path) -> None:
    """The first two stages whole: every case ends, the second one's figures are of real tensors."""
    path = tmp_path / "results.jsonl"
    arguments = ["--device", "cpu", "--only", "environment,attention", "--out", str(path), "--limit", "400"]
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = gpu.latest_cases(gpu.read(path))
    unmeasured = {(stage, case) for stage, of in cases.items() for case in of if of[case]["state"] == "unmeasured"}
    assert unmeasured == {("environment", "driver")}
    assert len(cases["attention"]) >= 8
    assert json.loads(path.read_text().splitlines()[0])["planned"][0] == "versions"


def test_an_unknown_stage_is_named() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--only", "speeed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no stage speeed; there are environment" in done.stderr


def kernel_records(**changes: Any) -> list[dict[str, Any]]:
    """Of a run in which all went well and ours were faster."""
    library = {"attention_forward": {"source": "5a", "compiler": "13.0.88"}}
    environment = {"sm": "90", "device": "a GPU", "torch": "2.13", "own CUDA kernels": library}
    times = {"dense forward": "4.0 ms", "varlen forward": "2.0 ms", "own forward": "1.0 ms", "dtype": "bfloat16"}
    cells = {
        "8/8 heads of 128, 4096 tokens of 4096": times,
        "8/8 heads of 128, 4096 tokens of 16384": times | {"own forward": "2.2 ms"},
        "8/8 heads of 64, 4096 tokens of 16384": times | {"own forward": "2.1 ms"},
    }
    cases = {
        "environment": {"versions": environment}, "primitives": {"sums": {}}, "own kernels": {"d64": {}},
        "sanitizer": {"memcheck": {"state": "unmeasured"}}, "speed": cells,
    }  # fmt: skip
    for stage, name, change in changes.values():
        cases[stage].setdefault(name, {}).update(change)
    return [
        {"stage": stage, "case": name, "state": "passed", **values}
        for stage, of_stage in cases.items()
        for name, values in of_stage.items()
    ]


def test_a_kernel_is_verified_where_it_is_right_and_faster() -> None:
    (entry,) = gpu.verified_kernels(kernel_records())  # 64: slower than the faster of torch's two
    assert entry == {
        "architecture": "sm_90", "operation": "attention_forward", "dtype": "bfloat16", "head_dim": 128, "source": "5a",
        "compiler": "13.0.88", "times as fast as torch": 1.348, "cells": 2, "device": "a GPU", "torch": "2.13",
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        ("own kernels", "d128", {"state": "failed"}),
        ("primitives", "sums", {"state": "unmeasured"}),
        ("sanitizer", "racecheck", {"state": "failed"}),
        ("speed", "8/8 heads of 128, 4096 tokens of 16384", {"state": "failed"}),
        ("speed", "8/8 heads of 128, 4096 tokens of 4096", {"state": "unmeasured"}),
        ("speed", "8/8 heads of 128, 4096 tokens of 16384", {"own forward": "2.4 ms"}),  # below 0.85
    ],
    ids=str,
)
def test_a_kernel_with_a_flaw_is_not_verified(change: tuple[str, str, dict[str, Any]]) -> None:
    assert gpu.verified_kernels(kernel_records(change=change)) == []


def test_verified_kernels_are_read_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "verified.json"
    path.write_text(json.dumps(gpu.verified_kernels(kernel_records())))
    (record,) = kernel_library.verified(path)
    assert record == ("sm_90", "attention_forward", "bfloat16", 128, "5a", "13.0.88")
