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


def run_processes(world: int, fn: Callable[..., None], *arguments: Any) -> None:
    """Calls ``fn(rank, world, *arguments)`` in fresh processes with a gloo group; the first failure is raised."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_enter, (world, f"{folder}/store", fn, arguments), nprocs=world, join=True)


def shared_memory_names() -> set[str]:
    """Of segments and semaphores on this machine, but those of Python's own locks, which tests run beside may hold."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}
