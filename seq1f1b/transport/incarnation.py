"""Tells the ranks that are alive from earlier ones, whose values are still in their launcher's store.

torchrun keeps one store for a job and all of its restarts. It counts the restarts of each machine by itself, so that
the count (``TORCHELASTIC_RESTART_COUNT``) names no start that all ranks have in common.
"""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from seq1f1b.transport.descriptors import uninterrupted
from seq1f1b.transport.processes import first_line
from seq1f1b.transport.store_client import own_connection

_TAG = (1 << 31) - 1  # no edge of any generation has it, nor have exchanges
_incarnations: weakref.WeakKeyDictionary[Any, Incarnation] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class Incarnation:
    """One life of a process group, with a name: what is under the name in the store is from its ranks.

    Rank 0 chooses it. It travels through the group, whose messages come from ranks that are alive. gloo cannot be
    polled, and a thread that waits in it as the interpreter goes would end the process (torch 2.13); so nobody waits,
    and the message shows by itself that it has come: it holds one number twice, and its place holds zeros.
    """

    def __init__(self, process_group: Any, rank: int, size: int) -> None:
        self._data = torch.tensor([secrets.randbits(62) + 1] * 2 if rank == 0 else [0, 0], device="cpu")
        self._works: list[Any] = []  # keep what is under way
        self._connection: Any = None
        self.lost: tuple[int, str] | None = None
        """The first rank that was gone already, and why: later ones may have left because of it."""
        for peer in range(1, size) if rank == 0 else [0]:
            try:
                begin, end = (dist.isend, {"group_dst": peer}) if rank == 0 else (dist.irecv, {"group_src": peer})
                self._works.append(begin(self._data, group=process_group, tag=_TAG, **end))
            except RuntimeError as error:
                self.lost = self.lost or (peer, f"rank {peer} is gone (the pipeline's set-up): {first_line(error)}")

    @staticmethod
    def of(process_group: Any, rank: int, size: int) -> Incarnation:
        with _lock, uninterrupted():
            return _incarnations.get(process_group) or _incarnations.setdefault(
                process_group, Incarnation(process_group, rank, size)
            )

    def connection(self, store: Any, timeout_s: float) -> Any:
        """This process's own connection to the group's store, one for all pipelines."""
        self._connection = self._connection or own_connection(store, timeout_s)
        return self._connection

    def name(self, limit_s: float, look: Callable[[], None] = lambda: None) -> str | None:
        """None if it has not come in so many seconds, as rank 0 has not, or never will.

        Args:
            look: called while it has not; may raise.
        """
        start, pause = time.monotonic(), 1e-4
        while True:
            first, second = self._data.tolist()
            if first == second != 0:
                return f"{first:x}"
            if self.lost is not None or time.monotonic() - start > limit_s:
                return None
            look()
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
