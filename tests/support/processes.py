"""Local processes that form a gloo group, for tests across processes."""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# One server of forks for all tests of a process: it has imported what their processes need.
context = multiprocessing.get_context("forkserver")
PRELOADED = [
    *("torch.distributed.fsdp", "torch._dynamo", "seq1f1b.engine.engine", "pytest"),
    *("torch.distributed.checkpoint", "torch.distributed.pipelining", "matplotlib.figure", "tokenizers", "tqdm"),
]
context.set_forkserver_preload(PRELOADED)

# Seconds in which what is seen at once is seen on a busy machine, too. Time-outs, where none is set, are 300 s or more.
AT_ONCE = 10.0


def _enter(rank: int, world: int, store_path: str, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    try:
        return fn(rank, world, *arguments)
    finally:
        dist.destroy_process_group()


def start_processes(world: int, fn: Callable[..., None], *arguments: Any) -> mp.ProcessContext:
    """Calls ``fn(rank, *arguments)`` in fresh processes. They are forked from one that has imported torch already."""
    return mp.start_processes(fn, arguments, nprocs=world, join=False, start_method="forkserver")


def _live(pipe: Connection) -> None:
    """Does what it is told, one function after another; sends an error text, or "", and what each has returned."""
    while True:
        rank, world, store, fn, arguments = pipe.recv()
        try:
            pipe.send(("", _enter(rank, world, store, fn, arguments)))
        except BaseException:
            pipe.send((traceback.format_exc(), None))


class LivingRanks:
    """Processes that live as long as this one, or until a function fails in one of them.

    Args:
        daemon: if not, they may start processes of their own, and end with :meth:`end` alone.
    """

    def __init__(self, daemon: bool = True) -> None:
        self._daemon = daemon
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []

    def run(self, world: int, fn: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        while len(self.pipes) < world:
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_live, args=(theirs,), daemon=self._daemon))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)
        with tempfile.TemporaryDirectory() as folder:
            busy: list[Any] = self.pipes[:world]
            results: list[Any] = [None] * world
            for rank, pipe in enumerate(busy):
                pipe.send((rank, world, f"{folder}/store", fn, arguments))
            try:
                while busy:
                    for pipe in wait(busy):
                        busy.remove(pipe)
                        error, results[self.pipes.index(pipe)] = pipe.recv()
                        assert not error, error
            except BaseException:  # of a rank, EOFError of one that has died, or a time-out of the test
                self.end()
                raise
        return results

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.pipes.clear()
        self.processes.clear()


LIVING = LivingRanks()


def run_processes(world: int, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Calls ``fn(rank, world, *arguments)`` in living processes with a gloo group; returns the results by rank.

    The first failure is raised.
    """
    return LIVING.run(world, fn, arguments)


def give_back_what_is_freed() -> None:
    """Has glibc give the memory of a tensor back as it is freed, in this process: a heap would keep some of it."""
    m_mmap_threshold = -3  # malloc.h
    assert ctypes.CDLL(None).mallopt(m_mmap_threshold, 1 << 16)


def resident_bytes(peak: bool = False) -> int:
    """Returns the resident bytes of this process, now or at its peak."""
    field = "VmHWM:" if peak else "VmRSS:"
    with open("/proc/self/status", encoding="ascii") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))


def shared_memory_names() -> set[str]:
    """Names of shared segments and semaphores, but for Python's own locks, which other tests may hold."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def join_and_run(
    rank: int, pipe: Connection, join: Callable[[int], None], fn: Callable[..., Any], *arguments: Any
) -> None:
    """Part of :class:`PipedProcesses`: ``join(rank)``, then sends what ``fn(rank, pipe, *arguments)`` returns."""
    torch.set_num_threads(1)
    try:
        join(rank)
        pipe.send(("result", fn(rank, pipe, *arguments)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise


class PipedProcesses:
    """Processes that run ``fn(rank, pipe, *arguments)``, a pipe each to this one; a block ends them all."""

    def __init__(self, world: int, fn: Callable[..., Any], *arguments: Any) -> None:
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=fn, args=(rank, theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()

    def receive(self, rank: int, timeout: float = 60.0) -> Any:
        """What the rank sends next."""
        assert self.pipes[rank].poll(timeout), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def result(self, rank: int, timeout: float = 60.0) -> Any:
        """The value of a (kind, value) that the rank sends next, which must be no error."""
        kind, value = self.receive(rank, timeout)
        assert kind != "error", f"rank {rank}: {value}"
        return value


def meet(at: str, world: int, rank: int) -> None:
    """Joins gloo's group over a file, or where rank 0 listens."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    dist.init_process_group("gloo", init_method=at, rank=rank, world_size=world)


def running(world: int, folder: Path, fn: Callable[..., Any], *arguments: Any) -> PipedProcesses:
    """Processes of one group, each of which calls ``fn(rank, pipe, *arguments)`` and sends what that returns."""
    return PipedProcesses(world, join_and_run, partial(meet, f"file://{folder}/store", world), fn, *arguments)


def results_of(world: int, folder: Path, fn: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What ``fn(rank, pipe, *arguments)`` returns on every rank of a group. All processes must exit with 0."""
    with running(world, folder, fn, *arguments) as ranks:
        found = [ranks.result(rank) for rank in range(world)]
    assert [process.exitcode for process in ranks.processes] == [0] * world
    return found


def outcome(call: Callable[[], Any]) -> tuple[str, str, Any, float]:
    """Kind, text, (rank, unit, edge) of the error that a call ends with, and when it did."""
    try:
        call()
    except BaseException as error:
        attributes = tuple(getattr(error, name, None) for name in ("rank", "unit", "edge"))
        return type(error).__name__, str(error), attributes, time.monotonic()
    return "", "", None, time.monotonic()
