"""What every benchmark shares: who else uses the cores, pairs of arms in one run, and the header of a result."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from seq1f1b import _C

FOREIGN_LIMIT = 0.08  # of one core; a step during which others used more does not count
MIN_COUNTED = 15  # fewer counted steps per arm: "unmeasured"
LOOKS, LOOK_SECONDS = 20, 0.001  # at what a core can multiply
# The environment of processes that keep freed memory. Others also measure how fast the kernel hands out pages.
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}


def machine_busy_seconds() -> float:
    """CPU seconds that all processes of the machine have used."""
    with open("/proc/stat", encoding="utf-8") as file:
        fields = [int(x) for x in file.readline().split()[1:]]
    user, nice, system, _, _, irq, softirq, steal = fields[:8]
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """CPU seconds of one process, all threads."""
    with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """Cores that other processes used between two moments."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = list(pids)
        self.start()

    def _now(self) -> tuple[float, float, float]:
        return time.perf_counter(), machine_busy_seconds(), sum(process_seconds(pid) for pid in self._pids)

    def start(self) -> None:
        self._begin = self._now()

    def cores(self) -> float:
        wall, busy, own = (b - a for a, b in zip(self._begin, self._now(), strict=True))
        return max(0.0, busy - own) / wall if wall > 0 else 0.0


def look_at_rates() -> list[tuple[float, float]]:
    """FLOP/s of the calling thread on registers alone, fp32 multiply-adds and vdpbf16ps, several times: the median is a
    rate that lasts."""
    return [_C.attention_rates(LOOK_SECONDS) for _ in range(LOOKS)]


@dataclass
class Pairs:
    """Times of two arms, measured in turn; a pair counts where both counted."""

    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    discarded: int = 0

    def add(self, a: float, b: float, counted: bool) -> None:
        if counted:
            self.a.append(a)
            self.b.append(b)
        else:
            self.discarded += 1

    @property
    def measured(self) -> bool:
        return len(self.a) >= MIN_COUNTED

    def ratio(self) -> tuple[float, float, float]:
        """Median of a / b over the pairs, and its 95 % interval (bootstrap of the median, fixed seed)."""
        ratios = [x / y for x, y in zip(self.a, self.b, strict=True)]
        if not ratios:
            return math.nan, math.nan, math.nan
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
        return statistics.median(ratios), medians[50], medians[-51]

    def describe(self, name: str, unit: str = "s", scale: float = 1.0) -> str:
        ratio, low, high = self.ratio()
        a, b = (statistics.median(x) * scale if x else math.nan for x in (self.a, self.b))
        state = "" if self.measured else f"  UNMEASURED: fewer than {MIN_COUNTED} counted"
        return (
            f"{name}: {a:.4g} against {b:.4g} {unit}, ratio {ratio:.3f} [{low:.3f}, {high:.3f}], "
            f"{len(self.a)} pairs, {self.discarded} discarded{state}"
        )


def _worker(rank: int, store: str, world: int, fn: Callable[..., None], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    fn(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def spawn(world: int, fn: Callable[..., None], *arguments: object) -> None:
    """Calls ``fn(rank, *arguments)`` in processes of one thread that form a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (f"{folder}/store", world, fn, arguments), nprocs=world)


def in_turn(first: Callable[[], float], second: Callable[[], float], *, flip: bool) -> tuple[float, float]:
    """Runs A B, or B A where flipped; returns (A, B)."""
    if flip:
        b = second()
        return first(), b
    a = first()
    return a, second()


def header(title: str) -> str:
    """Commit, machine, versions and command: the top of a result."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True).stdout.strip()

    dirty = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), "")
    lines = [
        f"# {title}",
        f"# commit {git('rev-parse', '--short', 'HEAD')}{dirty}, {time.strftime('%Y-%m-%d')}",
        f"# {model or platform.machine()}, {os.cpu_count()} cores; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}",
        f"# python {os.path.relpath(sys.argv[0], root)} {' '.join(sys.argv[1:])}".rstrip(),
    ]
    return "\n".join(lines)


def show_and_write(show: Callable[[], None], path: Path) -> None:
    """Prints what a function prints, and writes it to a file."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show()
    sys.stdout.write(text.getvalue())
    path.write_text(text.getvalue(), encoding="utf-8")


class Records:
    """JSON lines of what was measured, added to piece by piece: every piece begins with its header."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self.records = [json.loads(line) for line in file]

    def add(self, **record: Any) -> None:
        self.records.append(record)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def begin(self, title: str) -> None:
        """Raises SystemExit where earlier pieces are of another commit or machine: they would be compared with it."""
        lines = header(title).split("\n")
        for r in self.records:
            if r["what"] == "header" and r["lines"][:3] != lines[:3]:
                sys.exit("\n".join([f"{self.path} holds results of", *r["lines"], "and this is", *lines]))
        self.add(what="header", lines=lines)

    def header(self) -> str:
        """Each line once: the commands of all pieces under one head."""
        return "\n".join(dict.fromkeys(line for r in self.records if r["what"] == "header" for line in r["lines"]))
