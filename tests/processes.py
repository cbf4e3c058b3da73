"""Local processes that form a gloo group, for tests across processes."""

from __future__ import annotations

import datetime
import os
import tempfile
from collections.abc import Callable
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
