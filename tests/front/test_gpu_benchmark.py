"""Does benchmarks/gpu.py survive what its stages may do, judge by what they say, and rehearse without a GPU?

The whole rehearsal is CI's: ``python benchmarks/gpu.py --rehearse``. Here single stages of it are broken.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from slices import slice_of

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

    said = gpu.report(gpu.read(path), ["hangs", "wrong", "dies", "fine"]).splitlines()
    table = [line.split() for line in said]
    expected = {"hangs": "1 0 1 timeout", "wrong": "1 1 0 failed", "dies": "1 0 1 failed", "fine": "2 0 0 passed"}
    for name, text in expected.items():
        (line,) = (line for line in table if line[:1] == [name])
        assert [*line[1:4], line[5]] == text.split()
    assert any(line.startswith("ENDED dies: failed: a last word") for line in said)
    assert "FAILED wrong: two: it is wrong" in said


def test_only_what_has_not_passed_runs_again(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "results.jsonl"
    for _ in range(2):
        gpu.run_stages({"fine": 60, "wrong": 60}, command, path, 200)
    runs = [record["stage"] for record in gpu.read(path) if "planned" in record]
    assert runs == ["fine", "wrong", "wrong"]


def test_a_stage_with_some_of_its_cases_runs_again(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "results.jsonl"
    for cases in ("one", "", ""):
        gpu.run_stages({"fine": 60}, command, path, 200, cases=cases)
    assert [record.get("cases") for record in gpu.read(path) if "seconds" in record] == ["one", None]


def test_no_stage_begins_when_the_time_is_up(tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "results.jsonl"
    gpu.run_stages({"fine": 60}, command, path, 5)
    assert gpu.read(path) == []
    assert ["fine", "0", "0", "0", "0", "not", "run"] in [
        line.split() for line in gpu.report([], ["fine"]).splitlines()
    ]


def test_all_stages_fit_in_the_whole_run() -> None:
    others = [seconds for name, seconds in gpu.STAGES.items() if name != "training"]
    assert max(others) <= 60 and gpu.STAGES["training"] == 200
    assert max(gpu.ALONE_STAGES.values()) <= gpu.LIMIT
    assert sum(gpu.STAGES.values()) <= gpu.LIMIT == 800


def test_cases_are_chosen_in_training_alone() -> None:
    command = [sys.executable, str(SCRIPT), "--only", "own", "--cases", "k 4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--cases goes with --only training" in done.stderr


def test_an_unknown_stage_is_named() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--only", "speeed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no stage speeed; there are doctor" in done.stderr


def test_missing_libraries_are_named_before_anything_runs(tmp_path: Path) -> None:
    """A tree without the files that are built elsewhere."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "seq1f1b").mkdir()
    script = Path(shutil.copy(SCRIPT, tmp_path / "benchmarks"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 2
    assert "seq1f1b has no _C*.so and no libseq1f1b_cuda.so" in done.stderr and "build_ext --inplace" in done.stderr
    assert not (tmp_path / "gpu.jsonl").exists()


def test_results_are_of_one_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one build has passed says nothing of the next one."""
    path, library = tmp_path / "results.jsonl", tmp_path / "libseq1f1b_cuda.so"
    monkeypatch.setattr(gpu, "PACKAGE", tmp_path)
    library.write_bytes(b"one")
    assert gpu.is_of_this_library(path) and gpu.is_of_this_library(path)
    library.write_bytes(b"another")
    assert not gpu.is_of_this_library(path)


# -- verdicts --------------------------------------------------------------------------------------------------------


def kernel_records(*changes: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of a run in which all went well and ours were faster at head_dim 128."""
    times = {"FA2 forward": "4.0 ms 1 TFLOP/s", "FA2 varlen forward": "2.0 ms 2 TFLOP/s"}
    cases: dict[str, dict[str, dict[str, Any]]] = {
        "doctor": {
            "device": {"architecture": "sm_90", "device": "a GPU"},
            "versions": {"torch": "2.13"},
            "own kernels": {"attention_forward": {"source": "5a", "compiler": "13.0.88"}},
        },
        "own": {"bfloat16 d128 kv2 [9]": {}, "bfloat16 d64 kv2 [9]": {}, "float16 d64 kv2 [9]": {}},
        "sanitizer": {"memcheck": {"state": "unmeasured", "why": "not done in 25 s"}},
        "speed": {
            "8/8 heads of 128, 4096 tokens of 4096": times | {"own forward": "1.0 ms 4 TFLOP/s"},
            "8/8 heads of 128, 4096 tokens of 16384": times | {"own forward": "2.2 ms 2 TFLOP/s"},
            "8/8 heads of 64, 4096 tokens of 16384": times | {"own forward": "2.1 ms 2 TFLOP/s"},
        },
    }
    for stage, name, change in changes:
        cases[stage].setdefault(name, {}).update(change)
        for gone in [key for key, value in cases[stage][name].items() if value is None]:
            del cases[stage][name][gone]
    return [
        {"stage": stage, "case": name, "state": "passed", **values}
        for stage, of_stage in cases.items()
        for name, values in of_stage.items()
    ]


def timed(records: list[dict[str, Any]]) -> dict[tuple[str, str, int], float | None]:
    return gpu.timed_kernels(gpu.latest_cases(records))


KERNEL = "attention_forward", "bfloat16", 128


def test_a_kernel_is_timed_where_it_is_right() -> None:
    """How fast: by the faster of torch's two ops, and not of float16, which is not timed."""
    forward = "attention_forward"
    assert timed(kernel_records()) == {
        KERNEL: 1.348, (forward, "bfloat16", 64): 0.952, (forward, "float16", 64): None,
    }  # fmt: skip
    assert gpu.defaults_text(kernel_records()) == f"'sm_90': {{{KERNEL}}}"
    assert gpu.defaults_text([]) == ""


CELL = "8/8 heads of 128, 4096 tokens of 16384"


@pytest.mark.parametrize(
    "change",
    [
        ("own", "bfloat16 d128 kv8 [9]", {"state": "failed"}),
        ("own", "bfloat16 d128 kv8 [9]", {"state": "unmeasured"}),
        ("sanitizer", "racecheck", {"state": "failed"}),
    ],
    ids=str,
)
def test_a_kernel_with_a_flaw_is_not_timed(change: tuple[str, str, dict[str, Any]]) -> None:
    assert KERNEL not in timed(kernel_records(change))


@pytest.mark.parametrize(
    "change",
    [
        {"own forward": None},
        {"FA2 forward": None, "FA2 varlen forward": None},
        {"own forward": "2.4 ms"},  # below 0.85
    ],
    ids=str,
)
def test_a_kernel_that_is_slow_somewhere_is_not_the_faster_one(change: dict[str, Any]) -> None:
    assert timed(kernel_records(("speed", CELL, change)))[KERNEL] is None


@pytest.mark.parametrize(
    "change",
    [
        ("own", "float16 d128 kv8 [9]", {"state": "failed"}),  # of another kernel
        ("sanitizer", "initcheck", {"state": "failed"}),
        ("speed", CELL, {"FA2 forward": None, "not timed": {"FA2 forward": "RuntimeError"}}),  # the other peer remains
        ("speed", CELL, {"state": "failed", "why": "own backward"}),  # another operation's
    ],
    ids=str,
)
def test_what_says_nothing_of_a_kernel_does_not_keep_it_from_being_timed(
    change: tuple[str, str, dict[str, Any]],
) -> None:
    assert timed(kernel_records(change))[KERNEL] == 1.348


def test_the_table_has_a_verdict_on_each_part() -> None:
    rows = {part: (right, fast, default) for part, right, fast, default in gpu.verdicts(kernel_records())}
    right, fast, default = rows["attention_forward bfloat16 d128"]
    assert (right, default) == ("yes", "yes") and fast.startswith("1.35 x torch's flash in 2 cells, own 3, FA2 1")
    assert rows["attention_forward bfloat16 d64"][2] == gpu.NOT_FLASH
    assert rows["attention_forward float16 d64"] == ("yes", "", gpu.NOT_FLASH)
    assert rows["attention_backward bfloat16 d128"][1:] == ("", "no")
    assert rows['transport="copy"'] == ("?", "", "if asked for")
    assert rows["attention_parts"] == ("?", "", "where its check passes")
    times = {"stage": "parts", "state": "passed", "kernel": "20 us 2500 GB/s", "torch's ops": "50 us 1000 GB/s"}
    (right, fast, _), *_ = (
        row[1:] for row in gpu.verdicts([times | {"case": "add: bfloat16"}]) if row[0] == "attention_parts"
    )
    assert (right, fast) == ("yes", "add 2.5 x torch's ops")


def test_trees_are_right_though_they_are_slow() -> None:
    cases: list[dict[str, Any]] = [
        {"case": "paths: step, float32", "state": "passed"},
        {"case": "2048 + 8 x 256", "state": "passed", gpu.ROWS_OVER_TREE: 3.1},
        {"case": "512 + 4 x 512", "state": "failed", "why": "0.9: 1.0 is wanted"},
    ]
    rows = {part: rest for part, *rest in gpu.verdicts([{"stage": "trees"} | case for case in cases])}
    assert rows["trees of segments"] == ["yes", "2048 + 8 x 256: 3.1 x rows", "if asked for"]


def arm(name: str, ms: float) -> dict[str, Any]:
    figures = {"ms": ms, "busy ms": ms - 1, "busy share": 0.99, "launches": 7, "peak growth MB": 1500}
    return {"stage": "training", "case": name, "state": "passed", **figures}


def test_the_cost_of_a_segment_is_told_beside_torch_alone() -> None:
    """Which is the mean of its two times; an arm that failed has none."""
    records = [
        arm("Llama stage, torch alone", 100.0),
        arm("Llama stage, k 4", 104.0),
        arm("Llama stage, k 8", 110.0),
        arm("Llama stage, torch alone again", 102.0),
        {"stage": "training", "case": "Llama stage, k 1", "state": "failed", "why": "out of memory"},
    ]
    assert gpu.training_ratios(gpu.latest_cases(records))["Llama stage"] == {
        "torch alone": 0.99, "k 4": 1.03, "k 8": 1.089, "torch alone again": 1.01,
    }  # fmt: skip
    said = gpu.report(records, ["training"])
    lines = [line.split() for line in said.splitlines()]
    assert ["k", "4", "104.0", "1.030", "1.03", "met", "103.0", "0.990", "7", "1.50"] in lines
    assert ["k", "8", "110.0", "1.089", "1.06", "missed", "109.0", "0.990", "7", "1.50"] in lines
    assert "hidden 2048  " not in said and "Llama stage 1.030" in said


def test_without_torch_alone_a_segment_has_no_ratio() -> None:
    found = gpu.latest_cases([arm("Llama stage, k 4", 104.0)])
    ((_, row),) = gpu.training_tables(found)
    assert row[:4] == ("k 4", "104.0", "?", "1.03")


# -- rehearsal -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rehearsal")
    subprocess.run([sys.executable, SCRIPT.parent / "gpu_rehearsal.py", folder], check=True, timeout=200)
    return folder


BREAKS = {  # stage, file of the tree, its text and what takes its place, and what the rehearsal says then
    "a file imports what is not there": (
        "training", "benchmarks/gpu_training.py", "from gpu_llama import", "from gpu_lama import",
        "No module named 'gpu_lama'",
    ),
    "a tool has no such option": (
        "ncu", "benchmarks/gpu_speed.py", '"--clock-control"', '"--clock-lock"', "no option --clock-lock",
    ),
    "an op has no such argument": (
        "speed", "benchmarks/gpu_speed.py", "*given, None, None, tokens, end, 0.0, True, False)",
        "*given, None, None, tokens, end, 0.0, True, False, keys=3)", "Unknown keyword argument 'keys'",
    ),
    "a file that a stage needs is missing": (
        "library", "tests/support/attention_runs.py", None, "", "No module named 'attention_runs'",
    ),
    "a stage is not where it is said to be": (
        "ceilings", "benchmarks/gpu_speed.py", "def ceilings(", "def floors(", "has no attribute 'ceilings'",
    ),
}  # fmt: skip


# Two are for the full run: a file that is missing ends a stage as one that cannot be imported does.
FULL = "a file that a stage needs is missing", "a stage is not where it is said to be"


@pytest.mark.parametrize("name", slice_of([(name,) for name in BREAKS], [(n,) for n in BREAKS if n not in FULL]))
def test_a_break_of_a_stage_makes_the_rehearsal_fail(name: str, built: Path, tmp_path: Path) -> None:
    stage, file, text, instead, said = BREAKS[name]
    root = SCRIPT.parents[1]
    for folder in ("benchmarks", "tests/support", "tests/cuda"):
        shutil.copytree(root / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for folder in ("seq1f1b", "kernels", "csrc"):
        (tmp_path / folder).symlink_to(root / folder)
    broken = tmp_path / file
    if text is None:
        broken.unlink()
    else:
        assert text in broken.read_text()
        broken.write_text(broken.read_text().replace(text, instead))
    code = (
        "import sys, gpu, pathlib; folder = pathlib.Path(sys.argv[1]); "
        "sys.exit(gpu.rehearse({sys.argv[2]: 60.0}, pathlib.Path(sys.argv[3]), folder))"
    )
    command = [sys.executable, "-c", code, str(built), stage, str(tmp_path / "gpu.jsonl")]
    done = subprocess.run(command, cwd=tmp_path / "benchmarks", capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout
