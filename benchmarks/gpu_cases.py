"""Cases, the machine and our kernels, as all stages of gpu.py use them, and how cases are run."""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import torch
from torch import Tensor

from seq1f1b.device import cuda_attention, kernel_library

STAGES_SCRIPT = str(Path(__file__).resolve().parent / "gpu_stages.py")
Case = tuple[str, Callable[[], dict[str, Any]]]
TOOL_FOUND_ERRORS = 9  # exit code that compute-sanitizer is asked for


class Unmeasured(Exception):
    """Something that a case needs is not here."""


class Machine:
    """rehearsal: the folder of gpu_rehearsal.py, in whose place there are stand-ins and CPU tensors; None: a GPU."""

    def __init__(self, out: Path, rehearsal: Path | None = None) -> None:
        self.out, self.rehearsal = out, rehearsal
        self.is_cuda = rehearsal is None
        self.device = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")

    def need_cuda(self) -> None:
        if not self.is_cuda:
            raise Unmeasured(gpu.NEEDS_CUDA)

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], repeats: int = 15, budget: float = 0.4) -> float:
        """Median of a call, warm; by events of the device. Fewer repeats where they would take more than the budget."""
        if not self.is_cuda:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        run()
        self.sync()
        start = time.perf_counter()
        run()
        self.sync()
        repeats = max(3, min(repeats, int(budget / max(time.perf_counter() - start, 1e-6))))
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        self.sync()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e-3

    def poison(self) -> None:
        """NaN in what the caching allocator hands out next: a kernel that reads what nobody wrote shows it."""
        if self.is_cuda:
            blocks = [torch.full((1 << bits,), float("nan"), device=self.device) for bits in range(8, 25)]
            del blocks

    def peak_bytes(self, run: Callable[[], Any]) -> int:
        """More than before, at most, that torch's allocator held while the call ran."""
        if not self.is_cuda:
            run()
            return 0
        gc.collect()
        self.sync()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.sync()
        return torch.cuda.max_memory_allocated() - before


def random(machine: Machine, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*sizes, device=machine.device, dtype=torch.float32).to(dtype)


def hold(found: dict[str, list[float]], dtype: torch.dtype) -> dict[str, str]:
    """The errors as texts. Raises where one is more than twice that of the formula in the same dtype, and a floor.

    Args:
        found: errors of out, dq, dk and dv to float64, by what computed them; "formula" is the one to compare with.
    """
    texts = {name: " ".join(f"{error:.1e}" for error in errors) for name, errors in found.items()}
    floor = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps / 16)
    for errors in found.values():
        assert all(error <= 2 * theirs + floor for error, theirs in zip(errors, found["formula"], strict=True)), texts
    return texts


def worst_difference(gradients: dict[str, Tensor], truth: dict[str, Tensor], allowed: float) -> float:
    """Between two gradients of a parameter, by norms. Raises where it is more than allowed, or a gradient missing."""
    assert gradients.keys() == truth.keys(), f"no gradient of {sorted(gradients.keys() ^ truth.keys())}"
    values = {}
    for name, gradient in gradients.items():
        wanted = truth[name].float()
        values[name] = float(torch.linalg.vector_norm(gradient.float() - wanted) / torch.linalg.vector_norm(wanted))
    worst = max(values, key=values.__getitem__)
    assert all(value <= allowed for value in values.values()), f"the gradient of {worst} is {values[worst]:.2%} off"
    return round(values[worst], 5)


def own_operations(machine: Machine) -> dict[str, kernel_library.Operation]:
    found = kernel_library.operations()
    if not found:
        raise Unmeasured(f"there is no {kernel_library.LIBRARY.name}: it was not built")
    return found


def use_cudnn(is_used: bool) -> None:
    """Whether cuDNN computes all that it takes, or nothing: else it begins with shapes that came often."""
    cuda_attention.PLAN_FLOPS = 0.0 if is_used else float("inf")
    cuda_attention.forget_plans()


def stage_command(machine: Machine, stage: str, out: Path) -> list[str]:
    rehearsal = [] if machine.rehearsal is None else ["--rehearsal", str(machine.rehearsal)]
    return [sys.executable, STAGES_SCRIPT, "--stage", stage, "--out", str(out), *rehearsal]


def watched(machine: Machine, tool: str, options: list[str], stage: str, seconds: float, **environment: str) -> str:
    """A stage of gpu_stages.py under a tool of the CUDA toolkit; its output. An error that the tool found is raised; a
    tool that is not there, cannot look, or takes too long has measured nothing."""
    own_operations(machine)
    path = shutil.which(tool)
    if path is None:
        raise Unmeasured(f"there is no {tool}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "watched.jsonl"
        command = [path, *options, *stage_command(machine, stage, out)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, env=os.environ | environment
            )
        except subprocess.TimeoutExpired:
            raise Unmeasured(f"not done in {seconds:.0f} s") from None
        states = {record["state"] for record in gpu.read(out) if record.get("case")}
    said = f"{states}, exit code {done.returncode}: {done.stdout[-1200:]}{done.stderr[-600:]}"
    assert done.returncode != TOOL_FOUND_ERRORS and "failed" not in states, said
    if done.returncode != 0 or states != {"passed"}:
        raise Unmeasured(said)
    return done.stdout


def run_cases(name: str, cases: list[Case], path: Path, machine: Machine) -> None:
    gpu.append(path, {"stage": name, "planned": [case for case, _ in cases]})
    for case, run in cases:
        record: dict[str, Any] = {"stage": name, "case": case, "state": "passed"}
        start = time.monotonic()
        try:
            record |= run()
        except Unmeasured as reason:
            record |= {"state": "unmeasured", "why": str(reason)[-1500:]}
        except Exception as error:
            record |= {"state": "failed", "why": f"{type(error).__name__}: {error}"[:1500]}
        record["seconds"] = round(time.monotonic() - start, 2)
        gpu.append(path, record)
        print(f"{name}: {case}: {record['state']} {record.get('why', '')}", flush=True)
        gc.collect()
        machine.sync()  # a broken context ends the stage here, and the next one has a new process
