"""The stages of gpu.py that run the engine: against the same model run whole, over processes, and in training."""

from __future__ import annotations

import functools
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import model as benchmark_model
import processes as local_processes
import tiny_model
import torch
from gpu_cases import Case, Machine
from torch import Tensor

import seq1f1b
from seq1f1b.testing import run_ranks

# -- engine: against the same model run whole ------------------------------------------------------------------------


Step = Callable[[tiny_model.Config, tiny_model.Stage, Tensor, Tensor], dict[str, Tensor]]


def compare_with_whole(machine: Machine, dtype: torch.dtype, run: Step) -> dict[str, Any]:
    """The error of a step's gradients beside that of the whole model in the same dtype, both from fp64."""
    config = tiny_model.Config(kv_heads=2)
    tokens, target = tiny_model.batch(config, 3, 40)
    on_device = tokens.to(machine.device), target.to(machine.device)
    exact = tiny_model.whole_model(config).to(machine.device)
    _, truth = tiny_model.run_whole(exact, *on_device, 3)
    model = tiny_model.whole_model(config).to(machine.device, dtype)
    _, whole = tiny_model.run_whole(model, *on_device, 3)
    theirs = tiny_model.gradient_error(whole, truth)
    ours = tiny_model.gradient_error(run(config, model, tokens, target), truth)
    floor = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps  # the whole model in fp64 is the truth itself
    assert ours <= 2 * theirs + floor, f"{ours:.1e}, the whole model in {dtype} {theirs:.1e}"
    return {"error": f"{ours:.1e}", "whole": f"{theirs:.1e}"}


def step_of_rank(
    group: Any,
    num_ranks: int,
    transport: str,
    config: tiny_model.Config,
    model: tiny_model.Stage,
    tokens: Tensor,
    target: Tensor,
) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    stage = tiny_model.stage_of(model, config, group.rank, num_ranks).to(device)
    engine = seq1f1b.PipelineEngine(
        stage, num_microbatches=3, num_segments=4, segment_sizes=[17, 4, 12, 7], loss_fn=tiny_model.cross_entropy,
        group=group, transport=transport, timeout=30.0, first_step_timeout=50.0,
    )  # fmt: skip
    for _ in range(3):  # copies go through host memory in the first step of a shape
        stage.zero_grad()
        engine.step(tokens, target=target)
    engine.close()
    return {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}


def engine(machine: Machine) -> Iterator[Case]:
    def ranks(num_ranks: int, dtype: torch.dtype, transport: str) -> dict[str, Any]:
        if transport != "auto":
            machine.need_cuda()

        def run(*arguments: Any) -> dict[str, Tensor]:
            found = run_ranks(num_ranks, lambda group: step_of_rank(group, num_ranks, transport, *arguments))
            return {name: g for grads in found for name, g in grads.items()}

        return compare_with_whole(machine, dtype, run)

    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for num_ranks in (1, 2, 4):
            yield f"{num_ranks} ranks as threads, {dtype}", functools.partial(ranks, num_ranks, dtype, "auto")
    for num_ranks, dtype in ((2, torch.float32), (4, torch.bfloat16)):
        name = f"{num_ranks} ranks as threads, copies on the device, {dtype}"
        yield name, functools.partial(ranks, num_ranks, dtype, "copy")

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
        machine.need_cuda()  # compiling on the CPU is tests/runtime/test_engine_compile.py's
        config = tiny_model.Config(layers=2)
        stage = torch.compile(tiny_model.whole_model(config).to(machine.device, torch.bfloat16))
        tokens, target = tiny_model.batch(config, 2, 32)
        pipeline = seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=2, loss_fn=tiny_model.cross_entropy)
        start = time.perf_counter()
        losses = pipeline.step(tokens, target=target)
        assert all(bool(torch.isfinite(loss)) for loss in losses)
        return {"seconds": round(time.perf_counter() - start, 1)}

    yield from (("steady memory", steady), ("own thread", own_thread), ("autocast", autocast), ("compiled", compiled))


# -- processes: two on one device ------------------------------------------------------------------------------------


def process_rank(rank: int, world: int, device: str, transport: str, dtype: torch.dtype) -> None:
    """Steps over two processes. Every rank has the whole model, so it checks the gradients of its own stage."""
    if transport == "nccl":  # takes two ranks of one GPU for two hosts
        os.environ |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    machine = Machine(device)

    def run(config: Any, model: Any, tokens: Tensor, target: Tensor) -> dict[str, Tensor]:
        stage = tiny_model.stage_of(model, config, rank, world).to(machine.device)
        pipeline = seq1f1b.PipelineEngine(
            stage, num_microbatches=3, num_segments=4, segment_sizes=[17, 4, 12, 7], loss_fn=tiny_model.cross_entropy,
            transport=transport, timeout=20.0, first_step_timeout=30.0,
        )  # fmt: skip
        for _ in range(3):
            stage.zero_grad()
            pipeline.step(tokens, target=target)
        mine = {name: p.grad.cpu() for name, p in pipeline.named_parameters() if p.grad is not None}
        gathered = pipeline.all_gather_object({name: g.float().tolist() for name, g in mine.items()})
        pipeline.close()
        return {name: torch.tensor(g, device=machine.device) for grads in gathered for name, g in grads.items()}

    compare_with_whole(machine, dtype, run)


def processes(machine: Machine) -> Iterator[Case]:
    def pair(transport: str, dtype: torch.dtype) -> dict[str, Any]:
        if transport in ("copy", "nccl"):
            machine.need_cuda()
        local_processes.run_processes(2, process_rank, machine.device.type, transport, dtype)
        return {}

    for transport in ("shm", "copy", "nccl", "c10d"):
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{transport}, {dtype}", functools.partial(pair, transport, dtype)


# -- training: steps of a model --------------------------------------------------------------------------------------


def training(machine: Machine) -> Iterator[Case]:
    shape = (
        {"hidden": 2048, "blocks": 8, "vocab": 32000} if machine.is_cuda else {"hidden": 64, "blocks": 2, "vocab": 50}
    )
    length, microbatches = (16384, 4) if machine.is_cuda else (32, 2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape["vocab"], (microbatches, length), generator=generator).to(machine.device)
    target = seq1f1b.shift_labels(tokens)
    dtype = torch.bfloat16 if machine.is_cuda else torch.float32

    first_losses: list[float] = []  # of each arm: the same model

    def measured(step: Callable[[], float]) -> dict[str, Any]:
        losses = [step()]
        first_losses.append(losses[0])
        assert abs(losses[0] - first_losses[0]) < 0.02, first_losses
        peak = machine.peak_bytes(lambda: losses.append(step()))
        times = []
        for _ in range(3):
            machine.sync()
            start = time.perf_counter()
            losses.append(step())
            machine.sync()
            times.append(time.perf_counter() - start)
        rate = microbatches * length / statistics.median(times)
        return {"tokens/s": round(rate), "peak growth MB": round(peak / 1e6), "loss": round(losses[0], 4)}

    def plain() -> dict[str, Any]:
        """The whole model by torch's own attention, one micro-batch after the other."""
        stage = benchmark_model.Stage(0, 1, attention="whole sequences", **shape).to(machine.device, dtype)

        def step() -> float:
            losses = []
            for x, y in zip(tokens.chunk(microbatches), target.chunk(microbatches), strict=True):
                loss = benchmark_model.cross_entropy(stage(x), y)
                (loss / microbatches).backward()
                losses.append(loss.detach())
            stage.zero_grad()
            return float(torch.stack(losses).mean())

        return measured(step)

    def pipelined(num_ranks: int, num_segments: int) -> dict[str, Any]:
        def rank(group: Any) -> Any:
            stage = benchmark_model.Stage(group.rank, num_ranks, **shape).to(machine.device, dtype)
            return seq1f1b.PipelineEngine(
                stage, num_microbatches=microbatches, num_segments=num_segments,
                loss_fn=benchmark_model.cross_entropy, group=group,
            )  # fmt: skip

        groups = seq1f1b.LoopbackGroup(num_ranks)
        engines = [rank(groups[index]) for index in range(num_ranks)]

        def step() -> float:
            losses: list[Any] = [None] * num_ranks

            def run(index: int) -> None:
                try:
                    losses[index] = engines[index].step(tokens, target=target)
                    for parameter in engines[index].parameters():
                        parameter.grad = None
                except BaseException as error:
                    losses[index] = error

            threads = [threading.Thread(target=run, args=(index,)) for index in range(num_ranks)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for found in losses:
                if isinstance(found, BaseException):
                    raise found
            return float(torch.stack(losses[-1]).mean())

        return measured(step)

    yield "torch, whole sequences", plain
    for num_ranks, num_segments in ((1, 1), (1, 4), (1, 8), (2, 4)):
        yield f"{num_ranks} ranks, {num_segments} segments", functools.partial(pipelined, num_ranks, num_segments)
