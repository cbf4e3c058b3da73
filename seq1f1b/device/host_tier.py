"""The tier of a GPU: pinned host memory, to which its copy engines move what units save.

How host, streams and events are ordered is C (``csrc/device/host_tier.h``).
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from pathlib import PurePosixPath

import torch

from seq1f1b import _C, where
from seq1f1b.engine.offload import Tier
from seq1f1b.transport import RankGroup

__all__: list[str] = []

# Version 2 of control groups, and version 1: folder, limit, use, and what goes before it kills: pages of files that
# nobody used lately.
_GROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


class HostTier(Tier):
    """A tier of pinned host memory, once it is open.

    Args:
        device: of the stages, whose tensors move.
    """

    def __init__(self, device: torch.device, group: RankGroup) -> None:
        super().__init__(None, device, 1, group.group)
        launched = os.environ.get("LOCAL_WORLD_SIZE", "")  # other pipelines of this host pin as well
        self._host_ranks = max(group.local_size, int(launched) if launched.isdigit() else 1)

    @staticmethod
    def check(device: torch.device) -> None:
        """Raises ValueError where stages lie on no GPU."""
        where.check("host", "Memory.offload=seq1f1b.HOST", device)

    def open(self, gpu: object) -> None:
        """Makes its streams, by the core's handle of the GPU. Raises RuntimeError if the driver fails."""
        self.handle = _C.host_tier(gpu, functools.partial(check_host, self._host_ranks))


def check_host(host_ranks: int, needed: int, root: str = "") -> None:
    """Raises MemoryError where each rank of the host cannot have so many bytes: a container is killed, not refused.

    Args:
        host_ranks: that are taken to need as much. root: the folder in which /proc and /sys lie.
    """
    left, what = host_room(root)
    if needed > left / host_ranks:
        raise MemoryError(
            f"Memory(offload=HOST) needs {needed} bytes of pinned host memory more for each of {host_ranks} ranks of "
            f"this host, and {what} leaves {left:.0f}: move fewer units by Memory(units=), use shorter segments, or "
            "allow more memory"
        )


def host_room(root: str) -> tuple[float, str]:
    """Bytes that the host can still give, and what says so: the least of its free memory and of what every control
    group of this process leaves. A sixteenth of what limits is left for others."""
    found = [(math.inf, "")]
    memory = _numbers(f"{root}/proc/meminfo")
    if memory.keys() >= {"MemTotal:", "MemAvailable:"}:
        found.append((1024 * (memory["MemAvailable:"] - memory["MemTotal:"] // 16), "free memory"))
    with contextlib.suppress(OSError), open(f"{root}/proc/self/cgroup", encoding="utf-8") as file:
        for _, controllers, path in (line.rstrip("\n").split(":", 2) for line in file):
            if controllers not in _GROUPS:
                continue
            folder, limit_file, use_file, spare = _GROUPS[controllers]
            # In a container the path may name what only the host sees; then its root stands.
            for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                own = f"{root}/sys/fs/cgroup/{folder}{group}/"
                limit, used = _numbers(own + limit_file).get("", math.inf), _numbers(own + use_file).get("", math.inf)
                if limit < 1 << 62 and used < math.inf:  # version 1 writes a very large number for none
                    spared = _numbers(f"{own}memory.stat").get(spare, 0)
                    found.append((limit - used + spared - limit // 16, f"the limit of control group {group}"))
    left, what = min(found)
    return max(0, left), what


def _numbers(path: str) -> dict[str, int]:
    """The number of each line of a file, by the words before it; none where there is no such file."""
    found = {}
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        for line in file:
            *words, number = line.removesuffix(" kB\n").split() or [""]
            if number.isdigit():
                found[" ".join(words)] = int(number)
    return found
