"""Local processes that form a gloo group, for tests across processes."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _enter(rank: int, world: int, store_path: str, fn: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
    try:
        fn(rank, world, *arguments)
    finally:
        dist.destroy_process_group()


def start_processes(world: int, fn: Callable[..., None], *arguments: Any) -> mp.ProcessContext:
    """Calls ``fn(rank, *arguments)`` in fresh processes. They are forked from one that has imported torch already."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch._dynamo", "seq1f1b.engine", "pytest"])
    return mp.start_processes(fn, arguments, nprocs=world, join=False, start_method="forkserver")


def run_processes(world: int, fn: Callable[..., None], *arguments: Any) -> None:
    """Calls ``fn(rank, world, *arguments)`` in fresh processes with a gloo group; the first failure is raised."""
    with tempfile.TemporaryDirectory() as folder:
        processes = start_processes(world, _enter, world, f"{folder}/store", fn, arguments)
        while not processes.join():
            pass


def shared_memory_names() -> set[str]:
    """Of segments and semaphores on this machine, but those of Python's own locks, which tests run beside may hold."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "seq1f1b.engine", "pytest"])


def _run(join: Callable[[int], None], fn: Callable[..., Any], rank: int, pipe: Connection, arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        join(rank)
        pipe.send(("result", fn(rank, pipe, *arguments)))
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise


class Ranks:
    """Processes that run ``join(rank)`` and ``fn(rank, pipe, *arguments)``, with a pipe each to this one."""

    def __init__(self, world: int, join: Callable[[int], None], fn: Callable[..., Any], *arguments: Any) -> None:
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run, args=(join, fn, rank, theirs, arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def receive(self, rank: int) -> Any:
        assert self.pipes[rank].poll(60), f"rank {rank} says nothing"
        kind, value = self.pipes[rank].recv()
        assert kind != "error", f"rank {rank}: {value}"
        return value


@contextmanager
def running_ranks(world: int, join: Callable[[int], None], fn: Callable[..., Any], *arguments: Any) -> Iterator[Ranks]:
    ranks = Ranks(world, join, fn, *arguments)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
