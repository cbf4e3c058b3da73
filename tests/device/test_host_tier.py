"""Do engines on GPUs (stand-ins) train the same with a tier of pinned memory, in less memory, whatever fails?"""

from __future__ import annotations

import copy
import gc
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in_engine import StandInEngine, StandInTier
from stand_in_library import STALLED, stand_in
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import Tensor

from seq1f1b import HOST, LoopbackGroup, Memory, PipelineEngine, PipelineError
from seq1f1b.device import host_tier
from seq1f1b.device.host_tier import check_host, host_room
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=32, heads=2, kv_heads=1, ffn=48, vocab=17, layers=4)
LENGTH = 24


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    gc.collect()
    stand_in().reset(1)
    yield
    gc.collect()
    assert stand_in().complaints() == []
    for counter in ("live_pinned_bytes", "live_streams", "live_events"):
        assert stand_in().count(counter) == 0, counter


def make_engine(model: Any, rank: int, num_ranks: int, group: Any, **options: Any) -> StandInEngine:
    stage = copy.deepcopy(stage_of(model, CONFIG, rank, num_ranks))
    defaults = {"schedule": "gpipe", "num_microbatches": 4, "num_segments": 2, "transport": "copy"}
    return StandInEngine(stage, group=group, loss_fn=cross_entropy, **defaults | options)


def train(num_ranks: int, memory: Memory, steps: int = 2, **options: Any) -> list[Any]:
    """For each rank, gradients and losses of all steps, the last report, and the facts of its tier."""
    model = whole_model(CONFIG)
    tokens, target = batch(CONFIG, 8, LENGTH)

    def run(group: Any) -> Any:
        engine = make_engine(model, group.rank, num_ranks, group, memory=memory, **options)
        losses = [loss for _ in range(steps) for loss in engine.step(tokens, target=target)]
        report = engine.report()
        tier = engine._pipeline.tier
        facts = None if tier is None else (tier.step_facts(), stand_in().count("cuMemHostAlloc"))
        gradients = [p.grad for _, p in sorted(engine.named_parameters())]
        engine.close()
        return gradients, losses, report, facts

    return run_ranks(num_ranks, run)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(1, {}), (2, {}), (2, {"schedule": "seq-zb-h1"}), (2, {"recompute": lambda unit: unit.segment == 1})],
    ids=["1", "2", "split", "recompute"],
)
def test_gradients_are_equal_bit_for_bit(num_ranks: int, options: dict[str, Any], seed: int) -> None:
    stand_in().reset(seed)
    options = dict(options)
    recompute = options.pop("recompute", "none")
    kept = train(num_ranks, Memory(recompute), **options)
    moved = train(num_ranks, Memory(recompute, offload=HOST), **options)
    for (gradients, losses, *_), (own, own_losses, report, facts) in zip(kept, moved, strict=True):
        assert all(torch.equal(a, b) for a, b in zip([*gradients, *losses], [*own, *own_losses], strict=True))
        assert report.moved_units > 0 and report.moved_bytes == facts[0].bytes_out == facts[0].bytes_in > 0


def test_times_of_copies_and_waits_are_the_stand_ins() -> None:
    """Copies take 1 ms a KiB, which is far more than units: the rates are close to it, and compute waits for them."""
    stand_in().reset(2, copy_ns_per_kib=1_000_000)
    [(_, _, report, _)] = train(1, Memory(offload=HOST))
    rate = 1024 / 1e-3
    assert report.clock == "device"
    assert 0.1 * rate < report.move_out_rate < 1.01 * rate and 0.1 * rate < report.move_in_rate < 1.01 * rate
    assert report.moved_bytes / rate < report.tier


def test_a_copy_that_fails_ends_the_step_on_every_rank_and_the_next_one_works() -> None:
    tokens, target = batch(CONFIG, 8, LENGTH)
    model, both = whole_model(CONFIG), threading.Barrier(2)

    def run(group: Any) -> Any:
        engine = make_engine(model, group.rank, 2, group, memory=Memory(offload=HOST))
        engine.step(tokens, target=target)
        good, failures = [p.grad.clone() for p in engine.parameters()], []
        for call in ("cuMemcpyDtoHAsync", "cuMemcpyHtoDAsync", ""):
            for p in engine.parameters():
                p.grad = None
            if both.wait() == 0 and call:  # neither is in a step: the fault is one of the next
                stand_in().fail_call(call, 0, 1)
            both.wait()
            try:
                engine.step(tokens, target=target)
            except (RuntimeError, PipelineError) as error:
                failures.append(str(error))
        assert all(torch.equal(p.grad, g) for p, g in zip(engine.parameters(), good, strict=True))
        engine.close()
        return failures

    for failures in run_ranks(2, run):
        assert ["DtoH" in failures[0], "HtoD" in failures[1], len(failures)] == [True, True, 2], failures


def test_what_is_refused() -> None:
    stage = torch.nn.Linear(2, 2)
    with pytest.raises(
        ValueError,
        match=r"Memory\.offload=seq1f1b\.HOST: pinned host memory takes what stages on a GPU save, and this one is on "
        r"cpu: give Memory\(offload=FOLDER\), a directory on a fast disk",
    ):
        PipelineEngine(stage, num_microbatches=1, memory=Memory(offload=HOST))
    stand_in().fail_call("cuStreamCreateWithPriority", 0, 2)
    with pytest.raises(RuntimeError, match="cuStreamCreateWithPriority: error 2"):
        make_engine(whole_model(CONFIG), 0, 1, LoopbackGroup(1)[0], memory=Memory(offload=HOST))


def test_the_room_of_a_host_is_the_least_that_limits_it(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def room() -> tuple[float, str]:
        return host_room(str(tmp_path))

    assert room() == (math.inf, "")
    write("proc/meminfo", "MemTotal:       16000 kB\nMemFree: 5 kB\nMemAvailable:   9000 kB\n")
    assert room() == ((9000 - 1000) * 1024, "free memory")
    check_host(2, 4_096_000, str(tmp_path))
    with pytest.raises(
        MemoryError,
        match=r"needs 4096001 bytes of pinned host memory more for each of 2 ranks of this host, and free memory "
        r"leaves 8192000: move fewer units by Memory\(units=\), use shorter segments, or allow more memory",
    ):
        check_host(2, 4_096_001, str(tmp_path))
    write("proc/self/cgroup", "0::/a/b\n")  # the tightest of its ancestors
    write("sys/fs/cgroup/a/b/memory.max", "max\n")
    write("sys/fs/cgroup/a/b/memory.current", "4096\n")
    write("sys/fs/cgroup/a/memory.max", "1600000\n")
    write("sys/fs/cgroup/a/memory.current", "1000000\n")
    write("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 200000\n")
    assert room() == (600_000 + 200_000 - 100_000, "the limit of control group /a")
    write("sys/fs/cgroup/a/memory.current", "1700000\n")  # the group is beyond its limit already
    write("sys/fs/cgroup/a/memory.stat", "")
    assert room() == (0, "the limit of control group /a")
    write("proc/self/cgroup", "12:cpu:/x\n0::/docker/0123\n")  # in a container that sees its own group as the root
    write("sys/fs/cgroup/memory.max", "3200000\n")
    write("sys/fs/cgroup/memory.current", "1000000\n")
    assert room() == (2_200_000 - 200_000, "the limit of control group /")


# -- the tier alone ----------------------------------------------------------------------------------------------------


class HostTime(StandInTier):
    """A tier whose computing stream runs on."""

    def wait(self, number: int) -> None:
        super(StandInTier, self).wait(number)


@contextmanager
def opened(seed: int = 1, **options: int) -> Iterator[HostTime]:
    stand_in().reset(seed, **options)
    made = HostTime(torch.device("cpu"), LoopbackGroup(1)[0])
    yield made
    made.close()


@pytest.fixture
def tier() -> Iterator[HostTime]:
    with opened() as made:
        yield made


def bytes_of(size: int) -> Tensor:
    return torch.randint(256, (size,), dtype=torch.uint8)


def move(tier: HostTime, number: int, data: Tensor, *, out: bool) -> None:
    vars(tier).setdefault("moved", []).append(data)  # a stream of the stand-in reads it after all have let it go
    if out:
        tier.out(number, [data.untyped_storage()])
    else:
        tier.load(number, [data.untyped_storage()], [data.data_ptr()])


def go_and_come(tier: HostTime, *loads: Tensor) -> list[Tensor]:
    found = [torch.zeros_like(data) for data in loads]
    for is_out, moved in ((True, loads), (False, found)):
        for number, data in enumerate(moved):
            move(tier, number, data, out=is_out)
            tier.wait(number)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_the_room_is_written_after_its_last_reader_whatever_stream_computes(seed: int) -> None:
    with opened(seed, copy_ns_per_kib=1000) as tier:
        first, second = bytes_of(6000), bytes_of(6000)
        tier.begin_step(1)
        [found] = go_and_come(tier, first)  # the next step computes on a stream that has waited for no copy
        tier.cuda.computes = tier.cuda.Stream(tier.device)
        tier.begin_step(1)
        [again] = go_and_come(tier, second)
        assert stand_in().drain(10_000)
        assert torch.equal(found, first) and torch.equal(again, second)


def test_later_steps_pin_nothing_and_the_host_never_waits() -> None:
    piece = 8 << 20
    data = [bytes_of(piece // 2 + 5), bytes_of(piece + 1)]  # the second goes across pieces
    size = sum(map(len, data))
    with opened(copy_ns_per_kib=10_000) as tier:
        for _ in range(3):
            tier.begin_step(2)
            found = go_and_come(tier, *data)
            assert stand_in().count("synchronisations") == 0
            assert stand_in().drain(60_000)
            assert all(map(torch.equal, data, found))
            facts = tier.step_facts()
            assert facts.room_bytes == 2 * piece and facts.bytes_out == facts.bytes_in == size
            assert facts.ns_out > 9 * size and facts.ns_in > 9 * size
        assert stand_in().count("cuMemHostAlloc") == 2 and stand_in().count("pageable_copies") == 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ("cuMemHostAlloc", MemoryError, "on cpu could not pin 8388608 bytes of host memory beside 0: cuMemHostAlloc"),
        ("cuMemcpyDtoHAsync", RuntimeError, "cuMemcpyDtoHAsync"),
        ("cuMemcpyHtoDAsync", RuntimeError, "cuMemcpyHtoDAsync"),
    ],
)
def test_a_call_that_fails_is_told_and_the_next_step_works(
    tier: HostTime, call: str, error: type[Exception], text: str
) -> None:
    data = bytes_of(6000)
    tier.begin_step(1)
    stand_in().fail_call(call, 0, 1)
    with pytest.raises(error, match=re.escape(text)):
        go_and_come(tier, data)
    tier.reset()
    tier.begin_step(1)
    [found] = go_and_come(tier, data)
    assert stand_in().drain(10_000) and torch.equal(found, data)


@pytest.mark.parametrize("seed", range(8))
def test_after_a_reset_no_copy_touches_memory(seed: int) -> None:
    with opened(seed, copy_ns_per_kib=100_000) as tier:
        tier.begin_step(2)
        first, second, room = bytes_of(6000), bytes_of(6000), bytes_of(6000)
        move(tier, 0, first, out=True)
        tier.wait(0)
        move(tier, 1, second, out=True)
        move(tier, 0, room, out=False)
        held = [each.data_ptr() for storages in tier._held.values() for each in storages]
        assert held == [second.data_ptr(), room.data_ptr()]  # whoever drops the tensors
        tier.reset()
        assert torch.equal(room, first) and not tier._held
        room.zero_()
        assert stand_in().drain(10_000) and not room.any()


@pytest.mark.parametrize(("fails", "why"), [(True, "cuStreamQuery: error 702"), (False, "they do not end")])
def test_a_tier_whose_copies_do_not_end_refuses_further_steps(
    tier: HostTime, monkeypatch: pytest.MonkeyPatch, fails: bool, why: str
) -> None:
    monkeypatch.setattr(host_tier, "_FAREWELL_S", 0.1)
    monkeypatch.setattr(host_tier, "_stuck", kept := [])
    tier.begin_step(1)
    if not fails:
        stand_in().damage("cuMemcpyDtoH", -1, STALLED)
    move(tier, 0, bytes_of(6000), out=True)
    if fails:
        stand_in().fail_call("cuStreamQuery", 0, 702)
    tier.reset()
    with pytest.raises(RuntimeError, match=re.escape(f"copies have failed ({why}), and what waits for them cannot")):
        tier.begin_step(1)
    assert [list(held) for held, _ in kept] == [[0]]
    stand_in().damage("", 0, 0)
    assert stand_in().drain(10_000)
    kept.clear()
    tier._broken = ""


def test_what_all_loads_need_is_refused_at_the_first(tier: HostTime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "host_room", lambda root: (80 << 20, "free memory"))
    tier.begin_step(4)
    with pytest.raises(MemoryError, match="needs 83902464 bytes of pinned host memory more"):
        move(tier, 0, bytes_of((20 << 20) + 1), out=True)
    assert stand_in().count("cuMemHostAlloc") == 0
    tier.begin_step(4)
    for number in range(4):  # loads that fit, of which the later ones begin behind others
        move(tier, number, bytes_of(20 << 20), out=True)
        tier.wait(number)
    tier.reset()
