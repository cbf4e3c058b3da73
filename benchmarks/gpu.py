"""A first run on a GPU: what is right there, what is fast, and what does a segment cost?

    python benchmarks/gpu.py                             all stages, fifteen minutes at most
    python benchmarks/gpu.py --only training --cases "Llama.*(torch alone|k 4$)"      some of their cases
    python benchmarks/gpu.py --rehearse                  small shapes on a machine without a GPU, over stand-ins

Stages come in order of value. Each runs in a process of its own with a time limit, so that one that fails, hangs or
breaks the CUDA context stops no other. Every case is a line of JSON in the results, written at once. Tables at the end
say what is right and fast. benchmarks/gpu.md says what the machine needs, and reads the tables.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any, TypeVar

import torch

ROOT = Path(__file__).resolve().parents[1]
STAGES = {  # its file, and the seconds that it may take
    "doctor": ("gpu", 60),
    "tests": ("gpu", 400),
    "attention": ("gpu_attention", 120),
    "edges": ("gpu_training", 60),
    "training": ("gpu_training", 260),
}
# A slice of tests/gpu for a rehearsal, which has half a minute.
FEW_TESTS = "training and (auto or option) or (attention and 192-128)"

Record = dict[str, Any]
Case = tuple[str, Callable[[], Record]]
T = TypeVar("T")


class Machine:
    """A GPU, or CPU tensors in its place."""

    def __init__(self, is_cuda: bool) -> None:
        self.is_cuda = is_cuda
        self.device = torch.device("cuda", 0) if is_cuda else torch.device("cpu")

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def timed(self, run: Callable[[], T]) -> tuple[T, float]:
        """What a call returns, and the seconds that the device takes for it, with the host ahead."""
        if not self.is_cuda:
            start = time.perf_counter()
            return run(), time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)  # cycles, in which the host launches the call
        begin.record()
        result = run()
        end.record()
        end.synchronize()
        return result, begin.elapsed_time(end) * 1e-3


# -- two stages --------------------------------------------------------------------------------------------------------


def said_by(*command: str, **environment: str) -> list[str]:
    """The lines that a Python module prints. Raises if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-1000:]
    return done.stdout.splitlines()


def doctor(machine: Machine) -> Iterator[Case]:
    def device() -> Record:
        properties = torch.cuda.get_device_properties(0)
        found: Record = {"device": properties.name, "architecture": f"sm_{properties.major}{properties.minor}"}
        found |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
        return found | {"devices": torch.cuda.device_count(), "bytes": properties.total_memory}

    if machine.is_cuda:
        yield "device", device
    yield "seq1f1b doctor", lambda: {"said": said_by("seq1f1b", "doctor")}


def tests(machine: Machine) -> Iterator[Case]:
    pytest = ("pytest", "-p", "no:cacheprovider", "-q", "tests/gpu")
    few, own = {"SEQ1F1B_STAND_INS": "1"}, {"SEQ1F1B_CUDA_KERNELS": "own"}
    if not machine.is_cuda:
        yield "pytest tests/gpu", lambda: {"said": said_by(*pytest, "-k", FEW_TESTS, **few)[-1]}
        return
    yield "pytest tests/gpu", lambda: {"said": said_by(*pytest)[-1]}
    yield "attention by our kernels", lambda: {"said": said_by(*pytest, "-k", "attention", **own)[-1]}


# -- stages in processes -----------------------------------------------------------------------------------------------


def append(path: Path, record: Record) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def run_cases(name: str, cases: Iterable[Case], path: Path) -> bool:
    """Writes what each case found, or why it failed. Returns whether none failed."""
    is_well = True
    for case, run in cases:
        record: Record = {"stage": name, "case": case, "state": "passed"}
        start = time.monotonic()
        try:
            record |= run()
        except Exception as error:
            record |= {"state": "failed", "why": f"{type(error).__name__}: {error}"[:2500]}
            is_well = False
        append(path, record | {"seconds": round(time.monotonic() - start, 2)})
        print(f"{name}: {case}: {record['state']} {record.get('why', '')}", flush=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a broken context ends the stage here, and the next one has a new process
    return is_well


def run_here(name: str, path: Path, pattern: str, is_rehearsed: bool) -> bool:
    """A stage in this process."""
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "benchmarks")]
    module = importlib.import_module(STAGES[name][0])
    with contextlib.ExitStack() as stack:
        if is_rehearsed:
            from aten_stand_ins import cuda_kernels_on_the_cpu

            stack.enter_context(cuda_kernels_on_the_cpu())
        cases = getattr(module, name)(Machine(not is_rehearsed))
        return run_cases(name, (case for case in cases if re.search(pattern, case[0])), path)


def run_stage(command: Sequence[str], name: str, path: Path, seconds: float) -> None:
    """Runs a stage in a process of its own, and ends all that it has started."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    start, is_late = time.monotonic(), False
    process = subprocess.Popen(
        [*command, "--stage", name, "--out", str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True, env=environment,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        is_late = True
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own
    if is_late:
        output, _ = process.communicate()
    state = "timeout" if is_late else "failed" if process.returncode else "passed"
    end = {"stage": name, "state": state, "seconds": round(time.monotonic() - start, 1)}
    append(path, end if state == "passed" else end | {"output": output[-3000:]})
    print(f"{name}: {state}, {end['seconds']} s", flush=True)


# -- tables ------------------------------------------------------------------------------------------------------------

ALONE = ("torch alone", "torch alone again")  # arms of a model: the first and the last that runs
OWN, FLASH_OP = "own", "torch's flash op"


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table]


def training_tables(cases: list[Record]) -> Iterator[list[tuple[str, ...]]]:
    """By model: its arms, and their time over torch alone's, the mean of its first and its last."""
    arms: dict[str, dict[str, Record]] = {}
    for case in cases:
        if case["stage"] == "training" and "ms" in case:
            model, _, arm = case["case"].partition(", ")
            arms.setdefault(model, {})[arm] = case
    for model, own in arms.items():
        theirs = [own[arm]["ms"] for arm in ALONE if arm in own]
        rows = [(model, "ms", "ratio", "busy ms", "launches", "peak GB")]
        for arm, case in own.items():
            ratio = f"{case['ms'] * len(theirs) / sum(theirs):.3f}" if theirs else "?"
            figures = f"{case['busy ms']:.1f}", str(case["launches"]), f"{case['peak growth MB'] / 1e3:.2f}"
            rows.append((arm, f"{case['ms']:.1f}", ratio, *figures))
        yield rows


def attention_shapes(cases: list[Record]) -> dict[tuple[str, str], list[dict[str, float]]]:
    """TFLOP/s by way, of each shape, by head size and pass."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for case in cases:
        if case["stage"] == "attention" and (shape := re.match(r"\d+/\d+ heads of (\d+), \d+ tokens of", case["case"])):
            for which in ("forward", "backward"):
                ways = {name.removesuffix(f" {which}"): text for name, text in case.items() if name.endswith(which)}
                rates = {way: float(text.split()[2]) for way, text in ways.items()}
                found.setdefault((shape[1], which), []).append(rates)
    return found


def attention_table(cases: list[Record]) -> list[tuple[str, ...]]:
    """Geometric means over the shapes."""
    rows = []
    for (head_dim, which), shapes in attention_shapes(cases).items():
        ways = dict.fromkeys(way for rates in shapes for way in rates)
        means = {way: geometric_mean(rates[way] for rates in shapes if way in rates) for way in ways}
        text = ", ".join(f"{way} {mean:.0f}" for way, mean in means.items())
        rows.append((f"{which}, heads of {head_dim}", f"{len(shapes)} shapes", text))
    return [("TFLOP/s in bfloat16", "", ""), *rows] if rows else []


def report(records: list[Record]) -> str:
    """The last result of each case, and tables of those that were timed."""
    latest = {(r["stage"], r["case"]): r for r in records if "case" in r}
    cases, lines = list(latest.values()), []
    for case in cases:
        told = {name: value for name, value in case.items() if name not in ("stage", "case", "state", "seconds")}
        lines.append(f"{case['state']} {case['stage']}: {case['case']}: {json.dumps(told, ensure_ascii=False)}")
    for end in {r["stage"]: r for r in records if "case" not in r}.values():
        lines.append(f"{end['stage']}: {end['state']} in {end['seconds']} s {end.get('output', '')[-600:]}".rstrip())
    for table in (*training_tables(cases), attention_table(cases)):
        lines += ["", *aligned(table)] if table else []
    return "\n".join(lines)


def run(stages: Sequence[str], path: Path, flags: Sequence[str]) -> int:
    command = [sys.executable, "-u", __file__, *flags]
    before = len(read(path))
    with ThreadPoolExecutor(2 if "--rehearse" in flags else 1) as pool:
        list(pool.map(lambda name: run_stage(command, name, path, STAGES[name][1]), stages))
    records = read(path)[before:]
    print(report(records))
    states = [record["state"] for record in records if "case" in record]
    print(f"\n{', '.join(stages)}: {states.count('passed')} of {len(states)} cases passed, torch {torch.__version__}")
    return int(any(record["state"] != "passed" for record in records))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results, added to (default: gpu.jsonl; a rehearsal keeps none)")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, comma-separated (default: %(default)s)")
    parser.add_argument("--cases", default="", help="those whose names hold this regular expression")
    parser.add_argument("--rehearse", action="store_true", help="over stand-ins, without a GPU")
    parser.add_argument("--stage", help=argparse.SUPPRESS)  # that this process is to run
    options = parser.parse_args()
    if options.stage:
        return int(not run_here(options.stage, options.out, options.cases, options.rehearse))
    chosen = options.only.split(",")
    if unknown := set(chosen) - STAGES.keys():
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    if not options.rehearse and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --rehearse runs small shapes without one")
    flags = ["--cases", options.cases, *["--rehearse"] * options.rehearse]
    with tempfile.TemporaryDirectory() as folder:
        default = Path(folder) if options.rehearse else Path()
        return run(chosen, options.out or default / "gpu.jsonl", flags)


if __name__ == "__main__":
    sys.exit(main())
