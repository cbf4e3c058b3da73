"""The tier of a GPU: pinned host memory. The GPU's copy engines move the saved tensors of units there.

C code orders host, streams and events (``csrc/device/host_tier.h``).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from array import array
from itertools import chain
from pathlib import PurePosixPath

import torch

from seq1f1b import _C, where
from seq1f1b.engine.offload import Load, Tier, TierFacts
from seq1f1b.transport import RankGroup

__all__: list[str] = []

# Control groups of version 2, then version 1: folder, files of limit and use, and the statistic of file pages without
# recent use, which the kernel frees before it kills a process.
_GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class HostTier(Tier):
    """A tier of pinned host memory, usable after :meth:`open`.

    Args:
        device: GPU of the stages.
    """

    def __init__(self, device: torch.device, group: RankGroup) -> None:
        super().__init__(device, 1)
        launched = os.environ.get("LOCAL_WORLD_SIZE", "")  # counts ranks of other pipelines on this host, too
        self._host_ranks = max(group.local_size, int(launched) if launched.isdigit() else 1)

    @staticmethod
    def check(device: torch.device) -> None:
        """Raises ValueError if the stages lie on no GPU."""
        where.check("host", "Memory.offload=seq1f1b.HOST", device)

    def open(self, gpu: object) -> None:
        """Creates the tier's streams from the core's handle of the GPU. Raises RuntimeError if the driver fails."""
        self.handle = _C.host_tier(gpu, functools.partial(check_host, self._host_ranks))

    def begin_step(self, most_loads: int) -> None:
        _C.host_tier_begin_step(self.handle, most_loads)

    def step_facts(self) -> TierFacts | None:
        return None if self.handle is None else TierFacts(*_C.host_tier_facts(self.handle))

    def reset(self) -> None:
        """Ends copies under way. Memory of moved tensors must stay until the end."""
        if self._loads:  # else compute has waited for all copies
            _C.host_tier_reset(self.handle)
        super().reset()

    def _begin(self, number: int, load: Load, storages: list[torch.UntypedStorage], addresses: list[int]) -> None:
        parts = ((address, size, at) for address, (at, size) in zip(addresses, load.parts, strict=True))
        _C.host_tier_move(self.handle, not load.comes_in, number, array("q", chain.from_iterable(parts)))

    def _wait(self, number: int) -> None:
        _C.host_tier_wait(self.handle, number)


def check_host(host_ranks: int, needed: int, root: str = "") -> None:
    """Raises MemoryError if the host lacks the needed bytes for each rank. Without this check, a container is killed.

    Args:
        host_ranks: number of ranks on the host, each with the need of this rank. root: folder of /proc and /sys.
    """
    left, what = host_room(root)
    if needed > left / host_ranks:
        raise MemoryError(
            f"Memory(offload=HOST) needs {needed} bytes of pinned host memory more for each of {host_ranks} ranks of "
            f"this host, and {what} leaves {left:.0f}: move fewer units by Memory(units=), use shorter segments, or "
            "allow more memory"
        )


def host_room(root: str) -> tuple[float, str]:
    """Returns the bytes left on the host, and the name of the limit: free memory, or the tightest control group of this
    process. A sixteenth of each limit stays reserved for other programs."""
    found = [(math.inf, "")]
    memory = _numbers(f"{root}/proc/meminfo")
    if memory.keys() >= {"MemTotal:", "MemAvailable:"}:
        found.append((1024 * (memory["MemAvailable:"] - memory["MemTotal:"] // 16), "free memory"))
    with contextlib.suppress(OSError), open(f"{root}/proc/self/cgroup", encoding="utf-8") as file:
        for _, controllers, path in (line.rstrip("\n").split(":", 2) for line in file):
            if controllers not in _GROUPS:
                continue
            folder, limit_file, use_file, spare = _GROUPS[controllers]
            # In a container, the path may exist on the host only; the root of the groups then counts.
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                own = f"{root}/sys/fs/cgroup/{folder}{group}/"
                limit, used = _numbers(own + limit_file).get("", math.inf), _numbers(own + use_file).get("", math.inf)
                if limit < 1 << 62 and used < math.inf:  # version 1 writes a very large number for no limit
                    spared = _numbers(f"{own}memory.stat").get(spare, 0)
                    found.append((limit - used + spared - limit // 16, f"the limit of control group {group}"))
    left, what = min(found)
    return max(0, left), what


def _numbers(path: str) -> dict[str, int]:
    """Returns the number of each line of a file, by the words before the number; empty if there is no file."""
    found = {}
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        for line in file:
            *words, number = line.removesuffix(" kB\n").split() or [""]
            if number.isdigit():
                found[" ".join(words)] = int(number)
    return found
