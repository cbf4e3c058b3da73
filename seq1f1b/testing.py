"""Ranks as threads of one process: for tests, and for looking at a schedule without launching anything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from seq1f1b._C import PipelineError
from seq1f1b.transport import LoopbackGroup

__all__ = ["run_ranks"]

T = TypeVar("T")


def run_ranks(num_ranks: int, fn: Callable[[Any], T]) -> list[T]:
    """Calls ``fn(group)`` once per rank, each in a thread of its own, with the rank's loopback group.

    The threads take over the caller's grad mode and autocast state, and share torch's generators: make modules with
    random weights before the call. Returns the results by rank. If threads fail, raises an error once every thread has
    ended: the earliest error that is no PipelineError, because other ranks raise a PipelineError as a consequence.
    """
    groups = LoopbackGroup(num_ranks)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []
    grad = torch.is_grad_enabled()
    autocasts = [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in ("cpu", "cuda")]

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad), ExitStack() as stack:
                for each in autocasts:
                    stack.enter_context(torch.autocast(*each))
                results[rank] = fn(groups[rank])
        except BaseException as error:
            errors.append(error)
            groups[rank].fail(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, PipelineError)), errors[0])
    return results
