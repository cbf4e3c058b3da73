"""The tier of a GPU: pinned host memory, to which its copy engines move what units save.

How host, streams and events are ordered is C (``csrc/device/host_tier.h``).
"""

from __future__ import annotations

import os

import torch

from seq1f1b import _C, where
from seq1f1b.runtime.offload import Tier
from seq1f1b.transport import RankGroup

__all__: list[str] = []


class HostTier(Tier):
    """A tier of pinned host memory, once it is open.

    Args:
        device: of the stages, whose tensors move.
        num_cells: segments of all micro-batches.
    """

    root = ""  # where /proc and /sys lie

    def __init__(self, device: torch.device, group: RankGroup, num_cells: int) -> None:
        super().__init__(None, device, 1, group.group, num_cells)
        launched = os.environ.get("LOCAL_WORLD_SIZE", "")  # other pipelines of this host pin as well
        self._host_ranks = max(group.local_size, int(launched) if launched.isdigit() else 1)

    @staticmethod
    def check(device: torch.device) -> None:
        """Raises ValueError where stages lie on no GPU."""
        where.check("host", "Memory.offload=seq1f1b.HOST", device)

    def open(self, gpu: object) -> None:
        """Makes its streams, by the core's handle of the GPU. Raises RuntimeError if the driver fails."""
        self.handle = _C.host_tier(gpu, self._host_ranks, self.root)
