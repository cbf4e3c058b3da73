"""Files that ranks write together: what a folder held stays until all of them have written theirs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

from torch import Tensor

from seq1f1b.files import keep_mode, no_room

__all__: list[str] = []

_Told = TypeVar("_Told")


class Ranks(Protocol):
    """Processes that act together: those of an engine, or of all replicas of one."""

    rank: int
    num_ranks: int

    def all_gather_object(self, value: Any) -> list[Any]: ...


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def save_together(
    ranks: Ranks,
    folder: str,
    failed: str,
    needed: int,
    write: Callable[[str], _Told],
    names: Callable[[list[_Told]], Mapping[str, str]] | None = None,
    is_old: Callable[[str], bool] = lambda name: False,
) -> None:
    """Puts files of all ranks into a folder, which all see. Errors are raised on every rank.

    Args:
        failed: what an error begins with.
        needed: bytes of this rank's files.
        write: writes them to a folder of this rank's own; returns what the other ranks must know of them.
        names: takes what all ranks have told, by rank. Returns the names that this rank's files get in the folder, by
            their paths; it may write more files of this rank. None: they keep their names.
        is_old: whether a file that the folder holds in the end goes, by its name.
    Raises:
        OSError: a rank could not write.
    """
    unfinished = os.path.join(folder, f".unfinished-{ranks.rank}")
    told: list[_Told] = []
    finished: dict[str, str] = {}

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
        told.append(write(unfinished))

    def find_places() -> None:
        own = {os.path.join(unfinished, name): name for name in os.listdir(unfinished)}
        for file, name in (own if names is None else names(everyones)).items():
            target = finished[file] = os.path.join(folder, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            keep_mode(file, target)

    def move() -> None:
        for file, target in finished.items():
            os.replace(file, target)
        for name in os.listdir(folder) if ranks.rank == 0 else ():
            if is_old(name):
                os.remove(os.path.join(folder, name))

    try:
        together(ranks, failed, begin, room=(folder, needed))
        everyones: list[_Told] = ranks.all_gather_object(told[0])
        together(ranks, failed, find_places, room=(folder, needed))
        together(ranks, failed, move)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def together(
    ranks: Ranks,
    failed: str,
    action: Callable[[], None],
    kind: type[Exception] = OSError,
    room: tuple[str, int] | None = None,
) -> None:
    """Does this rank's part; an error of any rank is raised on all, as ``kind``.

    Args:
        room: a folder, and bytes that this rank writes to it. If a rank has none left, the error says how much all
            need and how much was free.
    """
    problem, lacks, free = None, "", 0
    try:
        free = _free(room[0]) if room is not None else 0
        action()
    except Exception as error:
        problem = f"rank {ranks.rank}: {type(error).__name__}: {error}"
        lacks = no_room(error) or ""
    everyones = ranks.all_gather_object((problem, lacks, free, room[1] if room is not None else 0))
    full = next(((lacks, free) for _, lacks, free, _ in everyones if lacks), None)
    if full is not None and room is not None:
        needed = sum(theirs for *_, theirs in everyones)
        raise kind(
            f"{failed}: saving to {room[0]} needs about {needed / 2**30:.3g} GiB, {full[1] / 2**30:.3g} GiB were "
            f"free ({full[0]}): make room there or choose another folder"
        )
    problems = [text for text, *_ in everyones if text]
    if problems:
        raise kind(f"{failed}: {'; '.join(problems)}")


def _free(folder: str) -> int:
    """Bytes that may be written to a folder, which need not be there yet."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free
