"""A first run on a GPU: what is right there, what is fast, and what is to be the default?

    python benchmarks/gpu.py                             all stages, fifteen minutes at most
    python benchmarks/gpu.py --only doctor,own           some of them
    python benchmarks/gpu.py --only tests                pytest tests/gpu, some minutes
    python benchmarks/gpu.py --only training --cases "Llama.*(torch alone|k 4$)"      some arms of the training
    python benchmarks/gpu.py --out results.jsonl         again with the same file: only what has not passed
    python benchmarks/gpu.py --rehearse                  all of it on a machine without a GPU, over stand-ins

It needs this tree, torch, and two files that are built elsewhere, where there are a C compiler and nvcc:
``SEQ1F1B_CUDA=1 python setup.py build_ext --inplace`` puts ``_C.abi3.so`` and ``libseq1f1b_cuda.so`` into seq1f1b/, for
any Python from 3.10, torch from 2.10, and glibc from 2.34. No network.

Stages come in order of value. Each runs in a process of its own with a time limit, so that one that fails, hangs or
breaks the CUDA context stops no other. Every case is a line of JSON in the results, written through to the disk at
once. At the end one table says of each part whether it is right, fast and the default, and the records by which our
kernels become the default are written to the table of the package. benchmarks/gpu.md reads it line by line.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import geometric_mean
from typing import Any

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "seq1f1b"
STAGES = {  # seconds that a stage may take; together no more than LIMIT
    "doctor": 60,  # imports torch and touches CUDA for the first time, so that later stages find both in memory
    "library": 60,
    "own": 60,
    "parts": 30,
    "ranks": 60,
    "speed": 60,
    "training": 200,
    "threads": 40,
    "times": 60,
    "ceilings": 20,
    "ncu": 35,
    "sanitizer": 60,
}
ALONE_STAGES = {"tests": 500, "tier": 150, "trees": 150}  # run where they are asked for by --only
LIMIT = 800  # seconds of the whole run; two models in eight arms take three minutes of it
NEEDS_CUDA = "needs a CUDA device"  # why a case is unmeasured in a rehearsal

Record = dict[str, Any]
Cases = dict[str, dict[str, Record]]  # by stage and case


# -- results ---------------------------------------------------------------------------------------------------------


def append(path: Path, record: Record) -> None:
    cut_off = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # a process was stopped within a line
    with open(path, "a", encoding="utf-8") as file:
        file.write("\n" * cut_off + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Record]:
    """The lines that are whole."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def latest_cases(records: list[Record]) -> Cases:
    """The last result of each case by stage; one that was planned and has none is unmeasured."""
    found: Cases = {}
    for record in records:
        cases = found.setdefault(record["stage"], {})
        for case in record.get("planned", []):
            cases[case] = {"case": case, "state": "unmeasured", "why": "the stage ended before"}
        if record.get("case"):
            cases[record["case"]] = record
    return found


def of_stage(path: Path, name: str) -> list[Record]:
    return [record for record in read(path) if record["stage"] == name]


def stage_ends(records: list[Record]) -> dict[str, Record]:
    return {r["stage"]: r for r in records if not r.get("case") and "state" in r}


# -- stages ----------------------------------------------------------------------------------------------------------


def run_stage(command: Sequence[str], name: str, path: Path, seconds: float, cases: str = "") -> str:
    """Runs the stage, or some of its cases, and ends all of its processes; returns "passed", "failed" or "timeout"."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    before, start = len(of_stage(path, name)), time.monotonic()
    process = subprocess.Popen(
        [*command, "--stage", name, "--out", str(path), *(["--cases", cases] if cases else [])],
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
    ran = [record for record in of_stage(path, name)[before:] if record.get("case")]
    bad = process.returncode != 0 or any(record["state"] == "failed" for record in ran)
    state = "timeout" if timed_out else "failed" if bad else "passed"
    end = {"stage": name, "state": state, "seconds": round(time.monotonic() - start, 1)}
    if cases:
        end["cases"] = cases
    if state != "passed":
        end["output"] = output[-3000:]
    append(path, end)
    return state


def run_stages(
    stages: dict[str, float], command: Sequence[str], path: Path, limit: float, at_once: int = 1, cases: str = ""
) -> None:
    """Runs stages in order, within the limit, but for those that have passed whole according to the file."""
    ends = stage_ends(read(path)).items()
    done = {name for name, end in ends if end["state"] == "passed" and "cases" not in end}
    deadline = time.monotonic() + limit

    def run(name: str) -> None:
        left = deadline - time.monotonic()
        if name in done or left < 10:
            print(f"{name}: {'passed before' if name in done else 'no time left'}", flush=True)
            return
        state = run_stage(command, name, path, min(stages[name], left), cases)
        print(f"{name}: {state}, {of_stage(path, name)[-1]['seconds']} s", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, stages))


# -- verdicts --------------------------------------------------------------------------------------------------------

PEERS = {  # of an operation: torch's flash ops, of which the faster counts, and others that are named beside them
    "attention_forward": (
        ("FA2 forward", "FA2 varlen forward"),
        ("cuDNN in segments forward", "cuDNN forward", "FA3 forward"),
        "own forward",
    ),
    "attention_backward": (
        ("FA2 backward + fp32 add",),
        ("cuDNN in segments backward", "cuDNN backward", "FA3 backward"),
        "own backward",
    ),
}
NOT_FLASH = "documents, soft cap: where its check passes"  # what torch's flash ops do not take
MESSAGES = "GB/s of 16 MiB messages"  # a figure of the stage of ranks
ROWS_OVER_TREE = "rows over tree"  # a figure of the stage of trees: times of a step
TRANSPORTS = {  # of which "auto" takes one, by a proof
    "auto": 'transport="auto"',
    "copy": 'transport="copy"',
    "nccl": 'transport="nccl"',
    "shm": "messages over pageable host memory",
}


def milliseconds(case: Record, names: Iterable[str]) -> list[float]:
    return [float(case[name].split()[0]) for name in names if name in case]


def speed_cells(found: Cases, head_dim: int) -> Iterator[Record]:
    for name, case in found.get("speed", {}).items():
        if (shape := re.match(r"\d+/\d+ heads of (\d+), ", name)) and int(shape[1]) == head_dim:
            yield case


def of_shape(cases: dict[str, Record], dtype: str, head_dim: int) -> list[Record]:
    return [case for name, case in cases.items() if name.startswith(f"{dtype} d{head_dim} ")]


def state_of(cases: Iterable[Record]) -> str:
    """ "yes" if all passed, "no" if one failed, or how many were measured."""
    states = [case["state"] for case in cases]
    if "failed" in states:
        return "no"
    passed = states.count("passed")
    return "yes" if states and passed == len(states) else f"{passed} of {len(states)} measured" if passed else "?"


def is_right(found: Cases, dtype: str, head_dim: int) -> str:
    """Whether all cases of our kernels in a shape passed, and nothing that looks closer found a flaw."""
    closer = [case for tool, case in found.get("sanitizer", {}).items() if tool != "initcheck"]
    if any(case["state"] == "failed" for case in closer):
        return "no"
    return state_of(of_shape(found.get("own", {}), dtype, head_dim))


def ratios(found: Cases, operation: str, head_dim: int) -> list[float | None]:
    """How many times as fast as torch's flash op ours is, by cell; None where one of them has no time."""
    theirs, _, ours = PEERS[operation]
    pairs = [(milliseconds(case, theirs), milliseconds(case, [ours])) for case in speed_cells(found, head_dim)]
    return [min(t) / o[0] if t and o else None for t, o in pairs]


def speed_ratio(found: Cases, operation: str, head_dim: int) -> float | None:
    """Ours beside torch's flash op by geometric mean; None if a cell has no time of both, or less than 0.85 of it."""
    of_cells = ratios(found, operation, head_dim)
    measured = [ratio for ratio in of_cells if ratio is not None]
    if not measured or len(measured) < len(of_cells) or min(measured) < 0.85:
        return None
    return round(geometric_mean(measured), 3)


def timed_kernels(found: Cases) -> dict[tuple[str, str, int], float | None]:
    """By operation, dtype and head size, of kernels that are right: ``speed_ratio``; None also where nobody timed it.

    Right: see ``is_right``; what was not measured closer is no flaw. A kernel takes calls that torch's flash ops take
    if it is faster over all cells of its head size, each of which was checked in the same call.
    """
    built = found.get("doctor", {}).get("own kernels", {})
    return {
        (operation, dtype, head_dim): speed_ratio(found, operation, head_dim) if dtype == "bfloat16" else None
        for operation, dtype, head_dim in itertools.product(PEERS, ("bfloat16", "float16"), (64, 128))
        if operation in built and is_right(found, dtype, head_dim) == "yes"
    }


def defaults_text(records: list[Record]) -> str:
    """The row of ``kernel_library.TIMED`` that makes our kernels the default on such a GPU; "" where none was timed."""
    found = latest_cases(records)
    timed = timed_kernels(found)
    faster = {key for key, ratio in timed.items() if ratio is not None and ratio > 1.0}
    return f"{found['doctor']['device']['architecture']!r}: {faster or 'set()'}" if timed else ""


def speed_text(found: Cases, operation: str, head_dim: int) -> str:
    """Ours beside the faster of torch's flash ops, and TFLOP/s of each that was timed: geometric means over cells."""
    theirs, others, ours = PEERS[operation]
    measured = [ratio for ratio in ratios(found, operation, head_dim) if ratio is not None]
    texts = [f"{geometric_mean(measured):.2f} x torch's flash in {len(measured)} cells"] if measured else []
    for name in (ours, *theirs, *others):
        rates = [float(case[name].split()[2]) for case in speed_cells(found, head_dim) if name in case]
        if rates and all(rates):
            texts.append(f"{re.split(' (?:for|back)ward', name)[0]} {geometric_mean(rates):.0f}")
    return ", ".join(texts)


def parts_text(found: Cases) -> str:
    """How many times as fast as torch's ops the kernels around attention are."""
    by_name: dict[str, list[float]] = {}
    for name, case in found.get("parts", {}).items():
        if "kernel" in case and "torch's ops" in case:
            ours, theirs = milliseconds(case, ("kernel", "torch's ops"))
            if ours > 0:
                by_name.setdefault(name.partition(":")[0], []).append(theirs / ours)
    texts = [f"{name} {geometric_mean(ratios):.1f}" for name, ratios in by_name.items()]
    return f"{'; '.join(texts)} x torch's ops" if texts else ""


def verdicts(records: list[Record]) -> list[tuple[str, str, str, str]]:
    """Part, right, fast, default."""
    found = latest_cases(records)
    timed = timed_kernels(found)
    built = found.get("doctor", {}).get("own kernels", {})

    def right(stage: str, begin: str = "") -> str:
        return state_of(case for name, case in found.get(stage, {}).items() if name.startswith(begin))

    rows = [("attention by torch's ops", right("library"), "", "yes")]
    for operation in PEERS:
        for head_dim in (128, 64):
            for dtype in ("bfloat16", "float16"):
                key = operation, dtype, head_dim
                is_faster = (timed.get(key) or 0) > 1
                default = "yes" if is_faster else NOT_FLASH if operation in built else "no"
                fast = speed_text(found, operation, head_dim) if dtype == "bfloat16" else ""
                rows.append((f"{operation} {dtype} d{head_dim}", is_right(found, dtype, head_dim), fast, default))
    rows.append(("attention_parts", right("parts"), parts_text(found), "where its check passes"))
    rows.append(("engine: one rank", right("ranks", "one rank"), "", "yes"))
    for transport, part in TRANSPORTS.items():
        figures = [
            f"{case[MESSAGES]} GB/s"
            for name, case in found.get("ranks", {}).items()
            if name.startswith(f"{transport},") and MESSAGES in case
        ]
        default = "yes" if transport == "auto" else "if asked for"
        rows.append((part, right("ranks", f"{transport},"), ", ".join(figures), default))
    rows.append(("engine: ranks as threads", right("threads"), "", "if asked for"))
    if "tier" in found:
        case = found["tier"].get("tier", {})
        names = ("time over everything kept", "memory over everything kept")
        fast = ", ".join(f"{name} {case[name]}" for name in names if name in case)
        rows.append(("Memory(offload=HOST)", right("tier"), fast, "if asked for"))
    if "trees" in found:
        fast = ", ".join(
            f"{name}: {case[ROWS_OVER_TREE]} x rows" for name, case in found["trees"].items() if ROWS_OVER_TREE in case
        )
        rows.append(("trees of segments", right("trees", "paths:"), fast, "if asked for"))
    if "tests" in found:
        rows.append(("pytest tests/gpu", right("tests"), "", ""))
    costs = [f"{model} {of[arm]:.3f}" for model, of in training_ratios(found).items() if (arm := "k 4") in of]
    fast = f"time of 4 segments over torch alone: {', '.join(costs)}" if costs else ""
    rows.append(("times of the GPU, tuning, profile", right("times"), "", "yes"))
    return [*rows, ("training in bfloat16", right("training"), fast, "yes")]


# -- what a segment costs --------------------------------------------------------------------------------------------

ALONE, ALONE_AGAIN = "torch alone", "torch alone again"  # arms of a model: the first and the last that runs
TARGETS = {  # of a model's arms: the most that their time may be over torch alone's
    "Llama stage": {"k 1": 1.01, "k 4": 1.03, "k 8": 1.06, "k 16": 1.12, "k 4, seq-zb-h1": 1.04},
    "hidden 2048": {"k 4": 1.08, "k 8": 1.16},
}


def ratios_to_alone(ms: dict[str, float]) -> dict[str, float]:
    """Times of a model's arms over torch alone's, which is the mean of its first and its last time."""
    theirs = [ms[arm] for arm in (ALONE, ALONE_AGAIN) if arm in ms]
    return {arm: round(own * len(theirs) / sum(theirs), 3) for arm, own in ms.items()} if theirs else {}


def training_arms(found: Cases, model: str) -> Cases:
    """By arm, the cases of a model that were timed."""
    cases = found.get("training", {})
    own = {name.removeprefix(f"{model}, "): case for name, case in cases.items() if name.startswith(f"{model}, ")}
    return {arm: case for arm, case in own.items() if "ms" in case}


def training_ratios(found: Cases) -> dict[str, dict[str, float]]:
    arms = {model: training_arms(found, model) for model in TARGETS}
    return {model: ratios_to_alone({arm: case["ms"] for arm, case in own.items()}) for model, own in arms.items()}


def training_tables(found: Cases) -> Iterator[list[tuple[str, ...]]]:
    """By model: what the arms of the training cost."""
    for model, ratios in training_ratios(found).items():
        rows = [(model, "ms", "ratio", "target", "busy ms", "busy", "launches", "peak GB")]
        for arm, case in training_arms(found, model).items():
            ratio, target = ratios.get(arm), TARGETS[model].get(arm)
            verdict = "" if target is None or ratio is None else "  met" if ratio <= target else "  missed"
            rows.append((
                arm, f"{case['ms']:.1f}", "?" if ratio is None else f"{ratio:.3f}",
                "" if target is None else f"{target:.2f}{verdict}", f"{case['busy ms']:.1f}",
                f"{case['busy share']:.3f}", f"{case['launches']}", f"{case['peak growth MB'] / 1e3:.2f}",
            ))  # fmt: skip
        if len(rows) > 1:
            yield rows


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in table]
    return ["  ".join(row).rstrip() for row in rows]


def report(records: list[Record], stages: Iterable[str]) -> str:
    """What failed, the stages, and the table of verdicts."""
    found, ends = latest_cases(records), stage_ends(records)
    lines = []
    for name in stages:
        for case in found.get(name, {}).values():
            if case["state"] == "failed":
                lines.append(f"FAILED {name}: {case['case']}: {case.get('why', '')[:300]}")
        if ends.get(name, {}).get("state") not in (None, "passed"):
            lines.append(f"ENDED {name}: {ends[name]['state']}: {ends[name]['output'][-600:]}")
    lines += ["", f"{'stage':12}{'passed':>8}{'failed':>8}{'unmeasured':>12}{'seconds':>9}  state"]
    for name in stages:
        states = [case["state"] for case in found.get(name, {}).values()]
        counts = [states.count(state) for state in ("passed", "failed", "unmeasured")]
        end = ends.get(name, {"state": "not run", "seconds": 0})
        lines.append(f"{name:12}{counts[0]:8}{counts[1]:8}{counts[2]:12}{end['seconds']:9}  {end['state']}")
    for table in (*training_tables(found), [("part", "right", "fast", "default"), *verdicts(records)]):
        lines += ["", *aligned(table)]
    return "\n".join(lines)


# -- the run ---------------------------------------------------------------------------------------------------------


def missing_files() -> str:
    """What a run on a GPU needs beside the sources and is not there; "" if all is."""
    missing = [name for name in ("_C*.so", "libseq1f1b_cuda.so") if not list(PACKAGE.glob(name))]
    if not missing:
        return ""
    return (
        f"{PACKAGE} has no {' and no '.join(missing)}. Where there are a C compiler and nvcc, run\n"
        "    SEQ1F1B_CUDA=1 python setup.py build_ext --inplace\n"
        "and put the .so files beside the package's sources here: they need glibc 2.34, and neither compiler."
    )


def is_of_this_library(path: Path) -> bool:
    """Whether the results in the file, if there are any, are of the kernels at hand; notes which these are."""
    libraries = sorted(PACKAGE.glob("*.so"))
    digest = hashlib.sha256(b"".join(library.read_bytes() for library in libraries)).hexdigest()
    before = [record["library"] for record in of_stage(path, "start")]
    if not before:
        append(path, {"stage": "start", "library": digest})
    return before in ([], [digest])


def flaws_of_rehearsal(records: list[Record], stages: Iterable[str]) -> list[str]:
    """Without a GPU all that can be done is done, so whatever is missing is a mistake of the stages."""
    found, ends = latest_cases(records), stage_ends(records)
    flaws = [f"{name}: {ends.get(name, {}).get('state', 'not run')}" for name in stages]
    flaws = [flaw for flaw in flaws if not flaw.endswith(": passed")]
    for name in stages:
        cases = found.get(name, {}).values()
        flaws += [
            f"{name}: {case['case']}: {case['why']}"
            for case in cases
            if case["state"] == "unmeasured" and case["why"] != NEEDS_CUDA
        ]
        if not any(case["state"] == "passed" for case in cases):
            flaws.append(f"{name}: no case passed")
    return flaws


def rehearse(stages: dict[str, float], path: Path, folder: Path, cases: str = "") -> int:
    """folder: of gpu_rehearsal.py, with what it has built."""
    command = [sys.executable, "-u", str(HERE / "gpu_stages.py"), "--rehearsal", str(folder)]
    patient = {name: 3 * seconds for name, seconds in stages.items()}  # others may use this machine too
    run_stages(patient, command, path, LIMIT, at_once=2, cases=cases)
    records = read(path)
    print(report(records, stages))
    flaws = flaws_of_rehearsal(records, stages)
    print(*flaws, sep="\n")
    return int(bool(flaws))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results, added to (default: gpu.jsonl; a rehearsal keeps none)")
    parser.add_argument("--only", help=f"stages, comma-separated (default: all but {', '.join(ALONE_STAGES)})")
    parser.add_argument("--cases", default="", help="with --only training: arms that hold this regular expression")
    parser.add_argument("--rehearse", action="store_true", help="over stand-ins, without a GPU")
    options = parser.parse_args()
    stages = STAGES | ALONE_STAGES
    only = options.only.split(",") if options.only else list(stages if options.rehearse else STAGES)
    if unknown := set(only) - stages.keys():
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(stages)}")
    chosen = {name: float(seconds) for name, seconds in stages.items() if name in only}
    if options.cases and options.only != "training":
        parser.error("--cases goes with --only training: of another stage, some cases are no verdict")
    if options.rehearse:
        with tempfile.TemporaryDirectory(prefix="seq1f1b-rehearsal-") as folder:
            subprocess.run([sys.executable, str(HERE / "gpu_rehearsal.py"), folder], check=True)
            return rehearse(chosen, options.out or Path(folder) / "gpu.jsonl", Path(folder), options.cases)
    if missing := missing_files():
        print(missing, file=sys.stderr)
        return 2
    path = options.out or Path("gpu.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not is_of_this_library(path):
        print(f"{path} has results of other .so files than those of {PACKAGE}: name a new --out", file=sys.stderr)
        return 2
    run_stages(chosen, [sys.executable, "-u", str(HERE / "gpu_stages.py")], path, LIMIT, cases=options.cases)
    records = read(path)
    print(report(records, chosen))
    if row := defaults_text(records):
        print(f"the row of TIMED in seq1f1b/device/kernel_library.py: {row}")
    return int(any(case["state"] == "failed" for stage in latest_cases(records).values() for case in stage.values()))


if __name__ == "__main__":
    sys.exit(main())
