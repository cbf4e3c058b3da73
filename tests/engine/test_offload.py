"""Do units whose activations go to a file and come back give the same gradients, bit for bit, and free their memory?"""

from __future__ import annotations

import os
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from order_runs import LENGTH, run_order
from processes import run_processes
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import Tensor, nn

from seq1f1b import LoopbackGroup, Memory, PipelineEngine, Schedule, build_schedule
from seq1f1b.engine.offload import MovedTensors, SavedTensor

# Storages of some kilobytes each: so they move.
CONFIG = Config(hidden=32, heads=2, kv_heads=1, ffn=48, vocab=17, layers=8, v_head_dim=10)


def two_processes(rank: int, world: int, directory: str) -> None:
    tokens, target = batch(CONFIG, 12, LENGTH)
    found = []
    for where in (None, directory):
        stage = stage_of(whole_model(CONFIG), CONFIG, rank, world)
        stage = nn.Sequential(stage, nn.Dropout(0.2)) if rank == 0 else stage
        engine = PipelineEngine(
            stage, schedule="seq-zb-h1", num_microbatches=3, num_segments=3, segment_sizes=[1, 7, 5], transport="shm",
            loss_fn=cross_entropy, memory=Memory(offload=where),
        )  # fmt: skip
        torch.manual_seed(7)
        losses = [*engine.step(tokens, target=target), *engine.step(tokens, target=target)]
        found.append([*losses, *(p.grad for _, p in engine.named_parameters())])
        engine.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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


def both(rank: int, world: int, directory: str) -> None:
    two_processes(rank, world, directory)
    two_replicas(rank, world, directory)


def test_two_processes_with_dropout_and_two_replicas(tmp_path: Path) -> None:
    """Parameters that FSDP2 gathers stay: it holds them."""
    run_processes(2, both, str(tmp_path))


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


CPU = torch.device("cpu")


class InMemory:
    """A tier that holds copies in memory."""

    alignment = 4096

    def __init__(self) -> None:
        self.copies: list[bytes] = []

    def out(self, number: int, storages) -> None:
        self.copies = [bytes(torch.empty(0, dtype=torch.uint8).set_(s).tolist()) for s in storages]

    def wait(self, number: int) -> None: ...

    def load(self, number: int, storages, addresses) -> None:
        import ctypes

        for address, copy_ in zip(addresses, self.copies, strict=True):
            ctypes.memmove(address, copy_, len(copy_))


def moved(forward, *inputs: Tensor, held=()):
    """Runs a forward whose saved tensors go out, are gone and come back; the bytes that moved, and the output."""
    away, tier = MovedTensors([], inputs, CPU), InMemory()
    with away:
        output = forward(*inputs)
    away.out(tier, 0)
    away.gone(tier, 0)
    away.load(tier, 0)
    away.back()
    return [len(c) for c in tier.copies], output


def test_a_storage_moves_once_however_many_views_are_saved() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        y = x.exp()  # saved whole, and as two views of which each is saved twice
        a, b = y.t(), y[1:, 3:]
        return (a * a).sum() + (b.sin() * b).sum()

    [x_grad] = torch.autograd.grad(forward(x), x)
    sizes, output = moved(forward, x)
    assert sorted(sizes) == [63 * 61 * 4, 64 * 64 * 4], "y, and the sine of its view"
    assert torch.equal(torch.autograd.grad(output, x)[0], x_grad)


def test_what_somebody_else_holds_stays() -> None:
    x, weight = torch.randn(64, 64), nn.Parameter(torch.randn(64, 64))
    held = []

    def forward(x: Tensor) -> Tensor:
        y = (x @ weight).exp()
        held.append(y)
        return (y.tanh() * 2).sum()

    sizes, output = moved(forward, x)
    assert sizes == [64 * 64 * 4], "the tanh, and neither input, weight nor what is held"
    assert output.grad_fn is not None
    output.backward()
    assert weight.grad is not None


def test_small_tensors_stay() -> None:
    assert moved(lambda x: x.exp().sum(), torch.randn(8, 8, requires_grad=True))[0] == []


def test_memory_is_free_from_g_on_and_freed_use_by_use() -> None:
    """A graph keeps no tensor while its unit is away; afterwards each goes after its last use."""
    x = torch.randn(64, 64, requires_grad=True)
    away, tier = MovedTensors([], [x], CPU), InMemory()
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
    again = [weakref.ref(s.tensor) for _, own in away._moved for s in own]
    alive = []
    x.register_hook(lambda g: alive.append(sum(t() is not None for t in again)))
    away.back()
    output.backward()
    assert alive == [0] and all(t() is None for t in again)


def test_dead_graphs_do_not_move() -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        x.exp().sum()  # nobody keeps it
        return x.cos().sum()

    assert moved(forward, x)[0] == []  # the cosine saves its input alone, which was given


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
