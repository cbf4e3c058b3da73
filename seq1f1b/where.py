"""Places to which saved tensors of units may move, and the devices of each place. Needs no torch."""

from __future__ import annotations

import enum
import os
from typing import Final, Literal, TypeAlias

__all__ = ["HOST"]


class _Place(enum.Enum):
    """Pinned host memory, the place to which ``Memory(offload=seq1f1b.HOST)`` moves saved tensors of units on a GPU."""

    HOST = "pinned host memory"

    def __repr__(self) -> str:
        return "seq1f1b.HOST"


HOST: Final = _Place.HOST
"""Pinned host memory, the place to which ``Memory(offload=seq1f1b.HOST)`` moves saved tensors of units on a GPU."""


Offload: TypeAlias = "str | os.PathLike[str] | Literal[_Place.HOST] | None"
"""Places to which units may move: a directory for a file, pinned host memory, nowhere."""


_TIERS = {
    "folder": ("cpu", "a file takes what stages on the CPU save", "seq1f1b.HOST), pinned host memory"),
    "host": ("cuda", "pinned host memory takes what stages on a GPU save", "FOLDER), a directory on a fast disk"),
}


def check(tier: str, option: str, device: object) -> None:
    """Raises ValueError, with the remedy, if a tier takes no units of a device.

    Args:
        tier: "folder" or "host".
        option: the user's option, for the error: ``"Memory.offload"``.
        device: the stages' device, a torch.device or its text.
    """
    kind, rule, remedy = _TIERS[tier]
    if str(device).partition(":")[0] != kind:
        raise ValueError(f"{option}: {rule}, and this one is on {device}: give Memory(offload={remedy}")
