"""Reasons for the end of a step, and marks on errors already reported to all ranks."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from seq1f1b import _C

__all__: list[str] = []


def error_of(rank: int, text: str) -> _C.PipelineError:
    """Returns an error with the rank to blame."""
    error = _C.PipelineError(text)
    error.rank = rank
    return error


class Failure(NamedTuple):
    """The reason why a step ended or did not begin.

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


_TOLD = "_seq1f1b_told"  # marks an error raised by a call of the engine: the call reports the error to all ranks


def has_been_told(error: BaseException | None) -> bool:
    """Returns whether a call of the engine raised the error, or an earlier error in its chain."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if hasattr(error, _TOLD):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def mark_as_told(error: BaseException) -> None:
    """Marks an error as reported to all ranks: see :func:`has_been_told`."""
    with suppress(Exception):  # some types of errors take no attributes
        setattr(error, _TOLD, True)
