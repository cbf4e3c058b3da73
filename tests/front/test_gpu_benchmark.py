"""Does benchmarks/gpu.py survive what its stages may do, and do its tables say what they found?

The whole rehearsal is CI's: ``python benchmarks/gpu.py --rehearse``.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"
spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
assert spec is not None and spec.loader is not None
gpu = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpu)

STAGES = """
import json, os, subprocess, sys, time
stage, path = sys.argv[sys.argv.index("--stage") + 1], sys.argv[sys.argv.index("--out") + 1]
open(path, "a").write(json.dumps({"stage": stage, "case": "one", "state": "passed", "value": 3}) + "\\n")
if stage == "hangs":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.path.dirname(path) + "/child", "w").write(str(child.pid))
    time.sleep(600)
if stage == "dies":
    print("a last word", flush=True)
    os._exit(9)
"""


def test_a_stage_that_hangs_or_dies_stops_no_other(tmp_path: Path) -> None:
    (tmp_path / "stages.py").write_text(STAGES)
    path = tmp_path / "results.jsonl"
    for name, seconds in (("hangs", 3), ("dies", 60), ("fine", 60)):
        gpu.run_stage([sys.executable, str(tmp_path / "stages.py")], name, path, seconds)
    records = gpu.read(path)
    states = {record["stage"]: record["state"] for record in records if "case" not in record}
    assert states == {"hangs": "timeout", "dies": "failed", "fine": "passed"}
    child = int((tmp_path / "child").read_text())
    give_up = time.monotonic() + 10
    with suppress(FileNotFoundError, ProcessLookupError):  # killed with its stage, and perhaps waited for
        while Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < give_up, "a child of the stage lives on"
            time.sleep(0.1)
    said = gpu.report(records).splitlines()
    assert 'passed dies: one: {"value": 3}' in said
    assert any(line.startswith("dies: failed in ") and line.endswith("a last word") for line in said)


def test_a_case_that_fails_says_why_and_stops_no_other(tmp_path: Path) -> None:
    def wrong() -> dict[str, Any]:
        raise ValueError("it is wrong")

    path = tmp_path / "results.jsonl"
    assert not gpu.run_cases("edges", [("one", wrong), ("two", lambda: {"GB/s": 3})], path)
    assert [record["state"] for record in gpu.read(path)] == ["failed", "passed"]
    assert 'failed edges: one: {"why": "ValueError: it is wrong"}' in gpu.report(gpu.read(path))


def test_an_unknown_stage_is_named() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), "--only", "speeed"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no stage speeed; there are doctor" in done.stderr
