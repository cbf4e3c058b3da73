"""Do units whose activations go to a file come back as they were, free memory meanwhile, and leave nothing behind?"""

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
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from order_runs import LENGTH, run_order
from processes import run_processes
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import Tensor, nn

from seq1f1b import LoopbackGroup, Memory, PipelineEngine, PipelineError, Schedule, build_schedule
from seq1f1b.engine.offload import BLOCK, FileTier, MovedTensors, SavedTensor, _holders
from seq1f1b.testing import run_ranks

# Storages of some kilobytes each: so they move.
CONFIG = Config(hidden=32, heads=2, kv_heads=1, ffn=48, vocab=17, layers=8, v_head_dim=10)


def two_replicas(rank: int, world: int, directory: str) -> None:
    from torch.distributed.fsdp import fully_shard

    tokens, target = (part.chunk(world)[rank] for part in batch(CONFIG, 64, 24))
    for schedule, wrap in (("gpipe", nn.parallel.DistributedDataParallel), ("seq-zb-h1", fully_shard)):
        found = []
        for where in (None, directory):
            stage = wrap(whole_model(CONFIG, torch.float32))
            engine = PipelineEngine(
                stage, schedule=schedule, num_microbatches=4, num_segments=2, loss_fn=cross_entropy,
                memory=Memory(offload=where), group=LoopbackGroup(1)[0],
            )  # fmt: skip
            losses = [*engine.step(tokens, target=target), *engine.step(tokens, target=target)]
            gradients = [p.grad.full_tensor() if hasattr(p, "full_tensor") else p.grad for p in engine.parameters()]
            found.append([*losses, *gradients])
            assert where is None or engine.report().moved_bytes > 1e6
            engine.close()
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_two_replicas(tmp_path: Path) -> None:
    """Parameters that FSDP2 gathers stay: it holds them."""
    run_processes(2, two_replicas, str(tmp_path))


def test_compiled_blocks(tmp_path: Path) -> None:
    found = []
    for where in (None, tmp_path):
        torch._dynamo.reset()
        torch.manual_seed(0)
        stage = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        stage.compile(backend="aot_eager")
        engine = PipelineEngine(
            stage, num_microbatches=6, num_segments=1, schedule="gpipe", memory=Memory(offload=where),
            loss_fn=lambda o, t: (o - t).square().mean(),
        )  # fmt: skip
        losses = engine.step(torch.linspace(-1, 1, 6144).view(12, 32, 16), target=torch.zeros(12, 32, 16))
        assert where is None or engine.report().moved_bytes > 0
        found.append([*losses, *(p.grad for p in stage.parameters())])
    torch._dynamo.reset()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- what moves --------------------------------------------------------------------------------------------------------


class Calling(nn.Module):
    """A stage that calls a function of itself and of what its layer makes."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight, self.call, self.held = nn.Parameter(torch.randn(64, 64)), call, []

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x @ self.weight)


def of_views(stage: Any, y: Tensor) -> Tensor:
    """Saves what exp returns whole, and as two views, each of them twice."""
    y = y.exp()
    a, b = y.transpose(1, 2), y[:, 1:, 3:]
    return (a * a).sum() + (b.sin() * b).sum()


def of_held(stage: Any, y: Tensor) -> Tensor:
    stage.held.append(y.exp())
    return (stage.held[-1].tanh() * 2).sum()


def of_a_dead_graph(stage: Any, y: Tensor) -> Tensor:
    y.exp().sum()  # nobody keeps it
    return y.cos().sum()


# A storage of a unit moves once, however many tensors of it are saved; the input and weights stay.
MOVED: dict[str, tuple[Callable[..., Tensor], int]] = {
    "views": (of_views, 4 * (64 * 64 + 63 * 61)),
    "held by somebody else": (of_held, 4 * 64 * 64),
    "small": (lambda stage, y: y[:, :8, :8].clone().exp().sum(), 0),
    "a dead graph": (of_a_dead_graph, 4 * 64 * 64),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_moves(tmp_path: Path, name: str) -> None:
    call, size = MOVED[name]
    options = {"schedule": "gpipe", "loss_fn": lambda y, t: y, "attention": "unchecked"}
    engine = PipelineEngine(Calling(call), num_microbatches=6, memory=Memory(offload=tmp_path), **options)
    x = torch.randn(6, 64, 64)
    engine.step(x, target=x)
    report = engine.report()
    assert report.moved_units > 0 and report.moved_bytes == size * report.moved_units


def test_memory_is_free_from_g_on_and_freed_use_by_use(tmp_path: Path) -> None:
    """A graph keeps no tensor while its unit is away; afterwards each goes after its last use."""
    x, tier = torch.randn(64, 64, requires_grad=True), FileTier(tmp_path, LoopbackGroup(1)[0].group)
    away = MovedTensors([], [x], tier.device)
    with away:
        y = x
        for _ in range(4):
            y = y.exp().tanh()
        output = y.sum()
    del y
    saved = [s for s in (r() for r in away._saved) if s is not None]
    tensors = [weakref.ref(s.tensor) for s in saved]
    assert len(saved) == 8 and all(isinstance(s, SavedTensor) for s in saved)
    del saved
    away.out(tier, 0)
    assert all(t() is not None for t in tensors)
    away.gone(tier, 0)
    assert all(t() is None for t in tensors)
    away.load(tier, 0)
    tier.wait(0)
    again = [weakref.ref(s.tensor) for _, own in away._moved for s in own]
    alive = []
    x.register_hook(lambda g: alive.append(sum(t() is not None for t in again)))
    away.back()
    output.backward()
    assert alive == [0] and all(t() is None for t in again)


class Overwriting(nn.Linear):
    """Changes what its sine has saved: at once, or when the next micro-batch runs."""

    late, left = False, None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).exp()
        z = y.sin()
        if self.left is not None:
            self.left.mul_(2)
        if self.late:
            self.left = y.detach()
        else:
            y.detach().mul_(2)
        return z


@pytest.mark.parametrize("late", [False, True])
def test_a_saved_tensor_that_is_changed_is_an_error(tmp_path: Path, late: bool) -> None:
    stage = Overwriting(32, 32)
    stage.late = late
    options = {"num_microbatches": 6, "schedule": "gpipe", "loss_fn": nn.functional.mse_loss}
    engine = PipelineEngine(stage, memory=Memory(offload=tmp_path), **options)
    x, target = torch.randn(12, 64, 32), torch.zeros(12, 64, 32)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"\[0\]B0.0: a tensor that the stage's backward needs was changed in place"
        ):
            engine.step(x, target=target)
        stage.left = None


# -- memory ------------------------------------------------------------------------------------------------------------


def test_measured_bytes_fall_as_planned(tmp_path: Path) -> None:
    """Three of 8 units are here at a time: one that runs, one on its way, and near the turn one that stays."""
    schedule = build_schedule("gpipe", num_ranks=2, num_microbatches=4, num_segments=2)
    data = batch(CONFIG, 16, LENGTH)
    kept, moved_ = (
        run_order(whole_model(CONFIG), schedule, *data, config=CONFIG, memory=Memory(offload=where))[2]
        for where in (None, tmp_path)
    )
    for one, other in zip(kept, moved_, strict=True):
        [before], [after] = one.stages, other.stages
        assert before.peak_live_units == 8
        assert after.peak_live_units == after.planned_live_units == 3
        assert after.activation_bytes < 0.62 * before.activation_bytes
        assert after.planned_activation_bytes <= after.activation_bytes < 1.25 * after.planned_activation_bytes
        assert one.moved_bytes == one.moved_units == one.tier == 0
        assert other.moved_bytes > 0.6 * before.activation_bytes * other.moved_units / 8


def test_a_closed_engine_keeps_no_file(tmp_path: Path) -> None:
    def files() -> int:
        links = (entry.path for entry in os.scandir("/proc/self/fd") if os.path.exists(entry.path))
        return sum(os.readlink(link).startswith(str(tmp_path)) for link in links)

    engine = PipelineEngine(nn.Linear(2, 2), num_microbatches=6, schedule="gpipe", memory=Memory(offload=tmp_path))
    assert files() == 1
    engine.close()
    assert files() == 0


def test_reports_and_traces_show_what_moved_and_what_ran_again(tmp_path: Path) -> None:
    from seq1f1b.view.draw import timeline_text, trace_json

    tokens, target = batch(CONFIG, 8, LENGTH)
    engine = PipelineEngine(
        stage_of(whole_model(CONFIG), CONFIG, 0, 1), num_microbatches=2, num_segments=3, loss_fn=cross_entropy,
        memory=Memory(recompute=lambda unit: unit.segment == 1, offload=tmp_path), group=LoopbackGroup(1)[0],
        schedule="gpipe",
    )  # fmt: skip
    engine.step(tokens, target=target)
    report = engine.report(gather=True)
    [own] = report.ranks
    assert own.moved_units > 0 and own.moved_bytes > 0 and own.tier > 0
    assert own.busy + own.wait + own.send + own.tier <= own.seconds
    assert abs(sum(idle.total for idle in report.idle) - (report.makespan - own.busy)) < 1e-6
    line = f"rank 0 kept {own.kept_units} units, recomputed 2 and moved {own.moved_units} ("
    assert line in str(report)
    report.save(tmp_path / "report")
    again = type(report).load(tmp_path / "report").ranks[0]
    assert (again.moved_bytes, again.recomputed_units) == (own.moved_bytes, 2)
    trace_json(tmp_path / "trace.json", report.timeline)
    assert all(word in (tmp_path / "trace.json").read_text() for word in ('"O0.0"', '"R1.1"', "recomputation"))
    assert all(word in timeline_text(report.timeline) for word in ("move out", "recomputation"))
    losses = engine.eval(tokens, target=target)
    assert len(losses) == 2 and engine.report().moved_bytes == 0
    assert engine.verify(tokens, target=target, show=False).ok


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_arguments(tmp_path: Path) -> None:
    def engine(**options):
        return PipelineEngine(nn.Linear(2, 2), **({"schedule": "gpipe", "num_microbatches": 6} | options))

    with pytest.raises(OSError, match=f"offload directory {tmp_path}/none: no file can be made there: No such file"):
        engine(memory=Memory(offload=tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="no file can be made there: Not a directory"):
        engine(memory=Memory(offload=tmp_path / "file"))
    with pytest.raises(OSError, match="offload directory /proc: no file can be made there"):
        engine(memory=Memory(offload="/proc"))
    moving = Schedule.from_text("F0.0 O0.0 F1.0 A0.0 F2.0 B2.0 L0.0 B1.0 B0.0")
    with pytest.raises(ValueError, match=r"moves units \(O, A, L\): say by Memory\(offload=...\) in which directory"):
        engine(schedule=moving, num_microbatches=3)
    with pytest.raises(ValueError, match="the order moves units already"):
        engine(schedule=moving, num_microbatches=3, memory=Memory(offload=tmp_path, units="all"))
    assert engine(schedule=moving, num_microbatches=3, memory=Memory(offload=tmp_path)).schedule == moving
    assert engine(memory=Memory(offload=tmp_path, units="none")).schedule == engine().schedule
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "O0.0" in engine(memory=Memory(offload=str(tmp_path))).schedule.to_text()
    assert {p.name for p in tmp_path.iterdir()} == {"file"}


def test_a_tier_in_memory_is_told() -> None:
    with pytest.warns(RuntimeWarning, match=r"Memory.offload='/dev/shm' lies in memory \(tmpfs\)"):
        PipelineEngine(nn.Linear(2, 2), num_microbatches=1, memory=Memory(offload="/dev/shm"))


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
        "from seq1f1b.engine.offload import FileTier\n"
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
