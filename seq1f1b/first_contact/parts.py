"""The parts of a first contact, and the groups of processes that each one takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from seq1f1b.first_contact.cases import Case, Rank

__all__: list[str] = []

BLOCKS = (1, 2, 8, 32)  # of an edge of NCCL


@dataclass(frozen=True)
class Group:
    """Processes that run cases of a part together.

    Attributes:
        name: added to those of its cases.
        world: the first so many ranks.
        dies: a rank of it is killed by each case that can run, so the next one has new processes.
        environment: of its processes.
    """

    name: str
    world: int
    dies: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """Attributes:
    title: its heading on the page.
    source: "module:function" that yields a rank's cases, without effects until they are called.
    seconds: that one case may take.
    groups: made from the number of all ranks, and of those that share a GPU.
    """

    title: str
    source: str
    seconds: float
    groups: Callable[[int, int], list[Group]]


def cases_of(source: str, rank: Rank) -> Iterator[Case]:
    module, _, function = source.partition(":")
    cases: Iterator[Case] = getattr(importlib.import_module(module), function)(rank)
    return cases


def everybody(world: int, share: int) -> list[Group]:
    return [Group("", world)]


def some(world: int, share: int) -> list[Group]:
    """2, 3, 4 and all ranks. Ranks that share one GPU take turns, so 3 of them are left out."""
    sizes = [size for size in (2, 3, 4) if size <= world and (share == 1 or size != 3)]
    return [Group(f"{size} ranks", size) for size in dict.fromkeys([*sizes, world])]


def doomed(world: int, share: int) -> list[Group]:
    return [Group("", min(world, 3), dies=True)]


def with_blocks(world: int, share: int) -> list[Group]:
    pair = min(world, 2)
    return [
        Group(f"{count} blocks", pair, environment={"NCCL_MIN_CTAS": f"{count}", "NCCL_MAX_CTAS": f"{count}"})
        for count in BLOCKS
    ]


def doubling(world: int, share: int) -> list[Group]:
    """1, 2, 4 and 8 ranks; where they share a GPU, two at most, to have run once."""
    sizes = [size for size in (1, 2, 4, 8) if size <= world and (share == 1 or size <= 2)]
    return [Group(f"P {size}", size) for size in sizes]


_HERE = "seq1f1b.first_contact"
PARTS = {
    "machine": Part("Machine", f"{_HERE}.facts:machine", 40, everybody),
    "messages": Part("Messages", f"{_HERE}.messages:messages", 60, everybody),
    "drills": Part("Drills", f"{_HERE}.drills:drills", 60, some),
    "killed": Part("A killed rank", f"{_HERE}.drills:killed", 90, doomed),
    "training": Part("Training", f"{_HERE}.computing:training", 60, doubling),
    "blocks": Part("NCCL's thread blocks beside computing", f"{_HERE}.computing:thread_blocks", 60, with_blocks),
}
