"""What every benchmark shares: who else uses the cores, pairs of arms in one run, and the header of a result."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
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
from collections.abc import Callable, Iterable, Sequence
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


def keep_heap() -> None:
    """Begins this program anew where its process would give freed memory back: arms would then wait for pages."""
    if os.environ != os.environ | KEPT_HEAP:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | KEPT_HEAP)


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

    def describe(self, name: str) -> str:
        ratio, low, high = self.ratio()
        a, b = (statistics.median(x) if x else math.nan for x in (self.a, self.b))
        state = "" if self.measured else f"  UNMEASURED: fewer than {MIN_COUNTED} counted"
        return (
            f"{name}: {a:.4g} against {b:.4g} s, ratio {ratio:.3f} [{low:.3f}, {high:.3f}], "
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


def resident_bytes() -> int:
    """Resident memory of this process, after a collection and after malloc has given back what it can."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("VmRSS")


def status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


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


def parser_of(about: str | None) -> argparse.ArgumentParser:
    """Options of a benchmark that counts steps."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "cores that others may use in a step that counts; inf: any"
    parser.add_argument("--foreign", type=float, default=FOREIGN_LIMIT, help=text)
    return parser


def show_and_write(show: Callable[[], None], path: Path) -> None:
    """Prints what a function prints, and writes it to a file."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show()
    sys.stdout.write(text.getvalue())
    path.write_text(text.getvalue(), encoding="utf-8")


class Records:
    """JSON lines of what was measured, added to piece by piece: every piece begins with its header. A round has, in
    "steps", seconds by arm, the cores that other processes used meanwhile, and what else a benchmark notes.

    limit: cores that other processes may use during a step that counts.
    """

    def __init__(self, path: str, limit: float = FOREIGN_LIMIT) -> None:
        self.path, self.limit = path, limit
        self.records: list[dict[str, Any]] = []
        self.reload()

    def reload(self) -> None:
        """Reads what other processes have added."""
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                self.records = [json.loads(line) for line in file]

    def add(self, **record: Any) -> None:
        self.records.append(record)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def of(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        wanted = {"what": what, **fields}
        return [r for r in self.records if all(r.get(name) == value for name, value in wanted.items())]

    def last(self, what: str, **fields: Any) -> dict[str, Any] | None:
        return next(iter(self.of(what, **fields)[::-1]), None)

    def counted(self, arm: str, **fields: Any) -> tuple[list[list[float]], int]:
        """Seconds, and what else was noted, of each step that counts; and the number of those that do not."""
        steps = [r["steps"][arm] for r in self.of("round", **fields) if arm in r["steps"]]
        counted = [[seconds, *others] for seconds, foreign, *others in steps if foreign < self.limit]
        return counted, len(steps) - len(counted)

    def pairs(self, a: str, b: str, **fields: Any) -> Pairs:
        """Seconds of both arms in the rounds that hold both."""
        pairs = Pairs()
        for r in self.of("round", **fields):
            if a in r["steps"] and b in r["steps"]:
                (x, foreign_x, *_), (y, foreign_y, *_) = r["steps"][a], r["steps"][b]
                pairs.add(x, y, max(foreign_x, foreign_y) < self.limit)
        return pairs

    def missing(
        self, arms: Iterable[str], rounds: int, base: Callable[[str], str] = lambda arm: arm, **fields: Any
    ) -> int:
        """Counted steps beside those of its base that the arm with the fewest lacks."""
        return max((rounds - len(self.pairs(base(arm), arm, **fields).a) for arm in arms), default=0)

    def begin(self, title: str) -> None:
        """Raises SystemExit where earlier pieces are of another commit or machine: they would be compared with it."""
        lines = header(title).split("\n")
        for r in self.of("header"):
            if r["lines"][:3] != lines[:3]:
                sys.exit("\n".join([f"{self.path} holds results of", *r["lines"], "and this is", *lines]))
        self.add(what="header", lines=lines)

    def header(self) -> str:
        """Each line once: the commands of all pieces under one head."""
        return "\n".join(dict.fromkeys(line for r in self.of("header") for line in r["lines"]))


def quartiles(seconds: Sequence[float]) -> str:
    """The middle half of them."""
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 4]:.3f}..{ordered[-1 - len(ordered) // 4]:.3f}"


def gathered(value: Any) -> list[Any]:
    """Every rank's."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def agreed(value: Any, group: Any = None) -> Any:
    """Rank 0's, on every rank."""
    box = [value]
    dist.broadcast_object_list(box, src=0, group=group)
    return box[0]
