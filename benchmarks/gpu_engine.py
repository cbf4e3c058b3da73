"""The stages of gpu.py that run the engine: against the same model run whole, over processes and in threads."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gpu
import processes
import tiny_model
import torch
from gpu_cases import Case, Machine, Unmeasured
from gpu_runs import Rank, is_right, train
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks
from seq1f1b.transport.table import TRANSPORTS

# -- steps of tests/support/gpu_runs.py ------------------------------------------------------------------------------


def rank_of(machine: Machine, rank: int, world: int, group: Any, transport: str) -> Rank:
    made: type[seq1f1b.PipelineEngine] = seq1f1b.PipelineEngine
    if not machine.is_cuda and TRANSPORTS[transport].between_gpus:
        from stand_in_engine import StandInEngine

        made = StandInEngine
    return Rank(rank, world, machine.device, group, made)


def right(rank: Rank, transport: str, dtype: torch.dtype) -> dict[str, Any]:
    found = train(rank, transport, "Seq1F1B", dtype)
    assert is_right(found), found
    return dict(found)


def of_threads(machine: Machine, num_ranks: int, dtype: torch.dtype, transport: str = "auto") -> dict[str, Any]:
    """Ranks as threads against the whole model."""

    def run(group: Any) -> dict[str, Any]:
        return right(rank_of(machine, group.rank, num_ranks, group, transport), transport, dtype)

    if not machine.is_cuda and TRANSPORTS[transport].between_gpus:
        prepare_stand_ins(1)
    return max(run_ranks(num_ranks, run), key=lambda found: float(found["error"]))


class Scale(nn.Module):
    """A stage that computes next to nothing, and sends as much as it gets."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), device=device, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def exchange(rank: Rank, transport: str) -> float:
    """GB/s of messages of 16 MiB there and back between two ranks, by steps; what the stages compute is included."""
    num_microbatches, tokens, hidden = 8, *((2048, 4096) if rank.is_cuda else (64, 128))
    engine = rank.engine(
        Scale(rank.device), transport=transport, group=rank.group, schedule="1f1b", num_microbatches=num_microbatches,
        num_segments=1, loss_fn=lambda output, target: output[..., :1].float().mean() + 0 * target.sum(),
    )  # fmt: skip
    x = torch.ones(num_microbatches, tokens, hidden, device=rank.device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        engine.step(x, target=x[..., 0])
        if rank.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    engine.close()
    return 2 * x.numel() * x.element_size() / min(seconds[3:]) / 1e9


def prepare_stand_ins(seed: int, **options: int) -> None:
    """Makes the stand-ins for the driver and for NCCL ready, in this process."""
    from stand_in_library import stand_in

    os.environ["SEQ1F1B_NCCL"] = stand_in().path
    stand_in().reset(seed, foreign_memory=1, **options)


# -- ranks: one, and two as processes of one device ------------------------------------------------------------------


def process_rank(rank: int, world: int, rehearsal: str | None, transport: str, dtype: torch.dtype, path: str) -> None:
    """Each rank checks its own gradients; the first one's figures go to the file."""
    machine = Machine(Path(path), None if rehearsal is None else Path(rehearsal))
    rehearsed = nullcontext()
    if machine.rehearsal is not None:
        import gpu_rehearsal

        rehearsed = gpu_rehearsal.rehearsing(machine.rehearsal)
        if transport == "copy":
            prepare_stand_ins(rank, shared_memory=1)
    elif transport == "nccl":
        if torch.cuda.device_count() > 1:
            machine.device = torch.device("cuda", rank)
            torch.cuda.set_device(rank)
        else:  # NCCL takes them for two hosts
            os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    with rehearsed:
        own = rank_of(machine, rank, world, None, transport)
        found = right(own, transport, dtype)
        rate = exchange(own, transport)
    if rank == 0:
        found |= {gpu.MESSAGES: round(rate, 2)}
        Path(path).write_text(json.dumps(found), encoding="utf-8")


def ranks(machine: Machine) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        yield f"one rank, {dtype}", functools.partial(of_threads, machine, 1, dtype)

    def pair(transport: str, dtype: torch.dtype, most_ctas: int = 0) -> dict[str, Any]:
        one_gpu = machine.is_cuda and torch.cuda.device_count() < 2
        if most_ctas and (one_gpu or not machine.is_cuda):
            raise Unmeasured("needs two GPUs" if one_gpu else gpu.NEEDS_CUDA)
        if transport == "nccl" and not machine.is_cuda:
            return of_threads(machine, 2, dtype, transport)  # the stand-in of NCCL is of one process
        if most_ctas:
            os.environ["NCCL_MAX_CTAS"] = str(most_ctas)
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "found.json"
                rehearsal = None if machine.rehearsal is None else str(machine.rehearsal)
                processes.run_processes(2, process_rank, rehearsal, transport, dtype, str(path))
                return dict(json.loads(path.read_text(encoding="utf-8")))
        except Exception as error:
            if transport == "nccl" and one_gpu:
                raise Unmeasured(f"needs two GPUs; as two hosts on one: {error}") from None
            raise
        finally:
            os.environ.pop("NCCL_MAX_CTAS", None)

    for dtype in (torch.bfloat16, torch.float32) if machine.is_cuda else (torch.float32,):
        everything = ("shm", "copy", "nccl", "c10d", "auto")
        for transport in everything if machine.is_cuda else ("shm", "copy", "nccl"):
            yield f"{transport}, {dtype}", functools.partial(pair, transport, dtype)
    for most_ctas in (8, 32):  # the package asks for 2
        yield f"nccl, at most {most_ctas} CTAs", functools.partial(pair, "nccl", torch.bfloat16, most_ctas)


# -- tests/gpu -------------------------------------------------------------------------------------------------------


def tests(machine: Machine) -> Iterator[Case]:
    def run(place: str, *starter: str) -> dict[str, Any]:
        """In processes of their own, as a user starts them; a rehearsal runs them over stand-ins."""
        root = Path(__file__).resolve().parent.parent
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        environment |= {} if machine.is_cuda else {"SEQ1F1B_STAND_INS": "1"}
        command = [sys.executable, "-m", *starter, "pytest", "-p", "no:cacheprovider", "-q", place]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        return {"pytest": done.stdout.strip().splitlines()[-1]}

    yield "pytest tests/gpu", functools.partial(run, "tests/gpu")
    num_ranks = str(max(2, torch.cuda.device_count()))
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks, "-m")
    place = "tests/gpu/test_training.py"
    yield f"torchrun -m pytest {place}", functools.partial(run, place, *torchrun)


# -- threads: ranks of one process, and what an engine promises ------------------------------------------------------


def threads(machine: Machine) -> Iterator[Case]:
    for dtype, num_ranks in ((torch.float32, 2), (torch.bfloat16, 4), (torch.float64, 4)):
        yield f"{num_ranks} ranks, {dtype}", functools.partial(of_threads, machine, num_ranks, dtype)
    for num_ranks, dtype in ((2, torch.float32), (4, torch.bfloat16)):
        name = f"{num_ranks} ranks, copies on the device, {dtype}"
        yield name, functools.partial(of_threads, machine, num_ranks, dtype, "copy")

    def steady() -> dict[str, Any]:
        """No memory is added after the third step, and how often the host waits for the device in a step."""
        config = tiny_model.Config(kv_heads=2)
        stage = tiny_model.whole_model(config).to(machine.device, torch.bfloat16)
        tokens, target = (t.to(machine.device) for t in tiny_model.batch(config, 3, 40))
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=3, num_segments=4, loss_fn=tiny_model.cross_entropy)
        held, waits = [], 0
        for step in range(6):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if machine.is_cuda and step == 5:
                    torch.cuda.set_sync_debug_mode("warn")
                pipeline.step(tokens, target=target)
                if machine.is_cuda:
                    torch.cuda.set_sync_debug_mode("default")
            waits = sum("synchroniz" in str(warning.message) for warning in caught)
            stage.zero_grad()
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) if machine.is_cuda else (0, 0))
        assert held[2] == held[5], held
        return {"allocated": held[5][0], "reserved": held[5][1], "waits in a step": waits}

    def own_thread() -> dict[str, Any]:
        """Backward runs in the thread of the rank."""
        seen = []
        config = tiny_model.Config(layers=1)
        stage = tiny_model.whole_model(config).to(machine.device, torch.float32)
        next(stage.blocks["0"].parameters()).register_hook(lambda grad: seen.append(threading.get_ident()))
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=1, num_segments=2, loss_fn=tiny_model.cross_entropy)
        tokens, target = tiny_model.batch(config, 1, 16)
        pipeline.step(tokens, target=target)
        assert set(seen) == {threading.get_ident()}, "another thread"
        return {}

    def autocast() -> dict[str, Any]:
        config = tiny_model.Config(layers=2)
        stage = tiny_model.whole_model(config).to(machine.device, torch.float32)
        tokens, target = tiny_model.batch(config, 2, 32)
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=tiny_model.cross_entropy)
        with torch.autocast(machine.device.type, torch.bfloat16):
            losses = pipeline.step(tokens, target=target)
            whole, _ = tiny_model.run_whole(stage, tokens.to(machine.device), target.to(machine.device), 2)
        difference = max(abs(float(a) - float(b)) for a, b in zip(losses, whole, strict=True))
        assert difference < 0.02, difference
        return {"difference of losses": f"{difference:.1e}"}

    def compiled() -> dict[str, Any]:
        machine.need_cuda()  # on the CPU it takes a compiler, and tests/runtime/test_engine_compile.py looks at it
        config = tiny_model.Config(layers=2)
        stage = torch.compile(tiny_model.whole_model(config).to(machine.device, torch.bfloat16))
        tokens, target = tiny_model.batch(config, 2, 32)
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=tiny_model.cross_entropy)
        start = time.perf_counter()
        losses = pipeline.step(tokens, target=target)
        assert all(bool(torch.isfinite(loss)) for loss in losses)
        return {"seconds": round(time.perf_counter() - start, 1)}

    yield from (("steady memory", steady), ("own thread", own_thread), ("autocast", autocast), ("compiled", compiled))
