"""Why a step ended, and which errors the other ranks hear of."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from seq1f1b import _C

__all__: list[str] = []


def error_of(rank: int, text: str) -> _C.PipelineError:
    """Returns an error that blames a rank."""
    error = _C.PipelineError(text)
    error.rank = rank
    return error


class Failure(NamedTuple):
    """The reason for which a step ended, or would not begin.

    Attributes:
        rank: the rank to blame; -1: unknown.
        unit, edge: "" if unknown.
        step: the first step that the failure ends.
    """

    rank: int
    text: str
    unit: str
    edge: str
    step: int

    def error(self) -> _C.PipelineError:
        found = error_of(self.rank, f"rank {self.rank} ended the step: {self.text}")
        found.unit, found.edge = self.unit or None, self.edge or None
        return found


_TOLD = "_seq1f1b_told"  # an error that came out of a call of the engine, which the other ranks hear of by that call


def has_been_told(error: BaseException | None) -> bool:
    """Returns whether an error came out of a call of the engine, or was raised while handling such an error."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if hasattr(error, _TOLD):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def mark_as_told(error: BaseException) -> None:
    """Notes that the other ranks hear of an error: see :func:`has_been_told`."""
    with suppress(Exception):  # a type of error that takes no attributes
        setattr(error, _TOLD, True)
