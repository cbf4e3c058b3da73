"""A table of features and the devices that run them, for the engine, the planner and the docs. Needs no torch."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

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


class State(enum.Enum):
    """The state of a feature on a kind of machine."""

    VERIFIED = "verified"  # has run on such a machine, with right results
    REHEARSED = "rehearsed"  # has run in tests alone, over stand-ins for the CUDA driver and NCCL
    REFUSED = "refused"  # the engine raises an error that names another way


class Row(NamedTuple):
    """A feature and its states.

    Attributes:
        refusal: the reason for a refusal, and the remedy; empty if the feature runs everywhere.
    """

    feature: str
    cpu: State
    one_gpu: State
    several_gpus: State
    refusal: str = ""

    def state(self, device_type: str, is_several: bool = False) -> State:
        """Returns the state on machines of a kind.

        Args:
            device_type: the stages' device, "cpu" or "cuda".
            is_several: whether ranks have GPUs of their own.
        """
        return self.cpu if device_type == "cpu" else self.several_gpus if is_several else self.one_gpu


_YES, _STAND_INS, _NO = State
_BETWEEN_GPUS = 'it moves messages between GPUs, and the stages are on {device}: use "auto", or move the stages'
ROWS = {
    "steps": Row("training and evaluation, every schedule", _YES, _YES, _STAND_INS),
    "recompute": Row("`Memory(recompute=)`, `Memory(blocks=)`", _YES, _YES, _STAND_INS),
    "folder": Row(
        "`Memory(offload=FOLDER)`: a file",
        _YES,
        _NO,
        _NO,
        "a file takes what stages on the CPU save, and this one is on {device}: give Memory(offload=seq1f1b.HOST), "
        "which moves it to pinned host memory",
    ),
    "host": Row(
        "`Memory(offload=seq1f1b.HOST)`: pinned host memory",
        _NO,
        _STAND_INS,
        _STAND_INS,
        "pinned host memory takes what stages on a GPU save, and this one is on {device}: give Memory(offload=FOLDER), "
        "a directory on a fast disk",
    ),
    "times": Row('`engine.report()`, `schedule="tuned"`, `seq1f1b profile`', _YES, _STAND_INS, _STAND_INS),
    "auto": Row('messages by what is there: `transport="auto"`', _YES, _STAND_INS, _STAND_INS),
    "through host": Row('messages through host memory: `transport="shm"`, `"c10d"`', _YES, _YES, _STAND_INS),
    "between gpus": Row(
        'messages that stay on GPUs: `transport="copy"`, `"nccl"`', _NO, _YES, _STAND_INS, _BETWEEN_GPUS
    ),
}


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yields the table for a page: feature, and the words of its states on the CPU, on one GPU and on several."""
    for each in ROWS.values():
        yield each.feature, each.cpu.value, each.one_gpu.value, each.several_gpus.value


def check(feature: str, option: str, device: object) -> None:
    """Raises ValueError, with the remedy, if a feature is refused on the device.

    Args:
        option: the user's option for the feature, for the error: ``"Memory.offload"``.
        device: the stages' device, a torch.device or its text.
    """
    found = ROWS[feature]
    if found.state(str(device).partition(":")[0]) is State.REFUSED:
        raise ValueError(f"{option}: {found.refusal.format(device=device)}")


def tier_of(device_type: str) -> str | None:
    """Returns the key in ``ROWS`` of the tier for units on a type of device; None without a tier."""
    runs = [name for name in ("folder", "host") if ROWS[name].state(device_type) is not State.REFUSED]
    return runs[0] if runs else None
