"""Does the tier's file hold what was moved, does a failing disk end the step on every rank, and does nothing stay?"""

from __future__ import annotations

import copy
import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_offload import CONFIG
from tiny_model import batch, cross_entropy, stage_of, whole_model
from torch import Tensor

from seq1f1b import LoopbackGroup, Memory, PipelineEngine, PipelineError
from seq1f1b.engine.file_tier import FileTier
from seq1f1b.engine.offload import BLOCK, _holders
from seq1f1b.testing import run_ranks

ROOT = Path(__file__).parents[2]

# -- the file ----------------------------------------------------------------------------------------------------------


class Loads:
    """A tier, and what lies in it."""

    def __init__(self, directory: Path) -> None:
        self.tier = FileTier(directory, LoopbackGroup(1)[0].group)
        self.out_there: dict[int, list[Tensor]] = {}

    def out(self, number: int, sizes: list[int]) -> None:
        parts = [torch.randint(256, (size,), dtype=torch.uint8) for size in sizes]
        self.tier.out(number, [part.untyped_storage() for part in parts])
        self.tier.wait(number)
        self.out_there[number] = parts

    def back(self, number: int) -> None:
        parts = self.out_there.pop(number)
        rooms = [torch.empty(len(part) + 2 * BLOCK, dtype=torch.uint8) for part in parts]
        begins = [-room.data_ptr() % BLOCK for room in rooms]
        addresses = [room.data_ptr() + begin for room, begin in zip(rooms, begins, strict=True)]
        self.tier.load(number, [room.untyped_storage() for room in rooms], addresses)
        self.tier.wait(number)
        for part, room, begin in zip(parts, rooms, begins, strict=True):
            assert torch.equal(room[begin : begin + len(part)], part)


SIZES = {0: [1], 1: [4096], 2: [5000, 3, 4095], 3: [9 << 20, 4097], 4: [], 5: [(4 << 20) - 1]}


@pytest.mark.parametrize("directory", ["disk", "through the page cache", "/dev/shm"])
@pytest.mark.filterwarnings("ignore:Memory.offload")  # lies in memory
def test_what_went_out_comes_back(tmp_path: Path, directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if directory == "through the page cache":  # a file system that refuses O_DIRECT

        def refuse(file: int, command: int, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return 0

        monkeypatch.setattr("fcntl.fcntl", refuse)
    loads = Loads(Path(directory) if directory == "/dev/shm" else tmp_path)
    for number in (2, 0, 3, 4, 5, 1):
        loads.out(number, SIZES[number])
    for number in (3, 0, 2):
        loads.back(number)
    loads.out(3, SIZES[3])
    for number in (1, 3, 4, 5):
        loads.back(number)
    assert not any(tmp_path.iterdir())


def test_the_file_is_as_large_as_most_that_is_out_at_once(tmp_path: Path) -> None:
    """Times are those of transfers, without the waits between them."""
    loads, begin = Loads(tmp_path), time.monotonic_ns()
    for number in range(40):
        loads.out(number, [10_000, 3])  # 3 blocks and 1
        if number >= 3:
            loads.back(number - 3)
    moving = time.monotonic_ns() - begin
    time.sleep(0.1)
    facts = loads.tier.step_facts()
    assert (facts.room_bytes, facts.bytes_out, facts.bytes_in) == (4 * 4 * 4096, 40 * 10_003, 37 * 10_003)
    assert facts.ns_out > 0 and facts.ns_in > 0 and facts.ns_out + facts.ns_in <= moving


# -- disks that fail ---------------------------------------------------------------------------------------------------


def file_of(directory: Path) -> int:
    """The descriptor of the tier's file, which has no name."""
    [found] = [
        int(entry.name) for entry in os.scandir("/proc/self/fd")
        if os.path.exists(entry.path) and os.readlink(entry.path).startswith(f"{directory}/")
    ]  # fmt: skip
    return found


@contextmanager
def replaced(file: int, path: str) -> Iterator[None]:
    """Meanwhile another file lies behind the descriptor."""
    own, other = os.dup(file), os.open(path, os.O_RDWR)
    os.dup2(other, file)
    try:
        yield
    finally:
        os.dup2(own, file)
        os.close(own)
        os.close(other)


@contextmanager
def truncated(file: int, path: str) -> Iterator[None]:
    """Whatever is written is lost at once, so that a read comes to the end of the file."""
    stop: list[bool] = []

    def cut() -> None:
        while not stop:
            os.ftruncate(file, 0)

    thread = threading.Thread(target=cut)
    thread.start()
    try:
        yield
    finally:
        stop.append(True)
        thread.join()


FULL = (
    r"\(\S+\): writing \d+ bytes failed after 0: No space left on device; the file holds up to \d+ bytes, and \d+ are "
    r"free: give Memory\(offload=\) a directory with more room, or move fewer units by Memory\(units=\)"
)
BROKEN = r": writing \d+ bytes failed after 0: Input/output error: give Memory\(offload=\) a directory on another disk"
SHORT = r": reading \d+ bytes failed after \d+: Input/output error: give Memory\(offload=\) a directory on another disk"


@pytest.mark.parametrize(
    ("how", "path", "unit", "message"),
    [
        (replaced, "/dev/full", "A", FULL),
        (replaced, "/proc/self/mem", "A", BROKEN),
        (truncated, "", "[ABI]", SHORT),
    ],
    ids=["full", "EIO", "short read"],
)
def test_a_failing_disk_ends_the_step_on_every_rank(
    tmp_path: Path, how: Callable[..., object], path: str, unit: str, message: str
) -> None:
    """The next step works again."""
    tokens, target = batch(CONFIG, 12, 12)
    model = whole_model(CONFIG)

    def run(group):
        directory = tmp_path / f"{how.__name__}{path.replace('/', '-')}{group.rank}"
        directory.mkdir()
        stage = copy.deepcopy(stage_of(model, CONFIG, group.rank, 2))
        engine = PipelineEngine(
            stage, schedule="gpipe", num_microbatches=3, num_segments=3, loss_fn=cross_entropy, group=group,
            memory=Memory(offload=directory),
        )  # fmt: skip
        engine.step(tokens, target=target)
        good = [p.grad.clone() for p in stage.parameters()]
        for _ in range(2):
            stage.zero_grad()
            try:
                if group.rank == 1:
                    with how(file_of(directory), path):
                        engine.step(tokens, target=target)
                else:
                    engine.step(tokens, target=target)
            except (OSError, PipelineError) as error:
                failure = error
        stage.zero_grad()
        engine.step(tokens, target=target)
        equal = all(torch.equal(p.grad, g) for p, g in zip(stage.parameters(), good, strict=True))
        engine.close()
        assert not any(directory.iterdir())
        return failure, equal

    (elsewhere, first), (here, second) = run_ranks(2, run)
    assert first and second
    assert isinstance(here, OSError) and isinstance(elsewhere, PipelineError) and elsewhere.rank == 1
    told = f"offload directory {tmp_path}/.*{message}"
    assert re.match(told, str(here)), here
    assert re.match(f"rank 1 ended the step: .1.{unit}\\d.\\d: OSError: offload directory {tmp_path}", str(elsewhere))


# -- nothing stays -----------------------------------------------------------------------------------------------------

DRIVER = """
import os, random, signal, sys, time
import torch
from torch import nn
from seq1f1b import LoopbackGroup, Memory, PipelineEngine

torch.set_num_threads(1)
directory, count = sys.argv[1], int(sys.argv[2])
for seed in range(count):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        stage = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        x, target = torch.randn(12, 256, 64), torch.zeros(12, 256, 64)
        os.write(theirs, b"1")
        for _ in range(1000):
            engine = PipelineEngine(
                stage, num_microbatches=6, schedule="gpipe", memory=Memory(offload=directory),
                group=LoopbackGroup(1)[0], loss_fn=lambda o, t: (o - t).square().mean(),
            )
            for _ in range(3):
                engine.step(x, target=target)
            engine.close()
        os._exit(1)
    os.read(ours, 1)
    time.sleep(random.Random(seed).random() * 0.12)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert os.listdir(directory) == [], os.listdir(directory)
print("killed", count)
"""


def test_killed_at_any_moment_nothing_is_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, str(tmp_path), "20"], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout == "killed 20\n", done.stderr


class Interrupted(Exception):
    pass


def test_an_interrupt_ends_a_wait_for_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reset then ends what is under way, after few of 8 GB."""
    written: list[int] = []
    pwrite = os.pwrite

    def counted(*arguments: Any) -> int:
        written.append(pwrite(*arguments))
        return written[-1]

    monkeypatch.setattr(os, "pwrite", counted)

    def interrupt(*_: object) -> None:
        raise Interrupted

    loads, part = Loads(tmp_path), torch.zeros(64 << 20, dtype=torch.uint8)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        loads.tier.out(1, [part.untyped_storage()] * 128)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(Interrupted):
            loads.tier.wait(1)
        loads.tier.reset()
        loads.out(1, [5000])
        loads.back(1)
        assert 0 < sum(written) < 6 << 30
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert _holders(part.untyped_storage()) == 1, "the thread holds it no more"


def test_a_forked_process_leaves_the_tier_alone(tmp_path: Path) -> None:
    """It has no thread of the tier's that it could wait for."""
    code = (
        "import os, sys\n"
        "from seq1f1b.engine.file_tier import FileTier\n"
        "tier = FileTier(sys.argv[1], None)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del tier\n"
        "    sys.exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == "7\n", done.stderr


def test_a_file_system_without_files_that_have_no_name(tmp_path: Path) -> None:
    """Then the file is unlinked at once."""
    library, directory = tmp_path / "failing_calls.so", tmp_path / "offload"
    directory.mkdir()
    source = ROOT / "tests/faults/failing_calls.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    code = (
        "import ctypes, errno, os, sys\n"
        "from seq1f1b.engine.file_tier import FileTier\n"
        "ctypes.CDLL(None).failing_calls_arm(16, ctypes.c_long(0), errno.EOPNOTSUPP)\n"
        "tier = FileTier(sys.argv[1], None)\n"
        "print(ctypes.CDLL(None).failing_calls_disarm(), os.listdir(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory)], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "LD_PRELOAD": str(library)},
    )  # fmt: skip
    assert done.stdout == "1 []\n", done.stderr
