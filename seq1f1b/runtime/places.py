"""Which of how many stages of a model the modules of a pipeline say they are: all of them, each once, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import nn

from seq1f1b.runtime.arguments import Disagreement

__all__ = ["Place", "check_places", "places_of"]

Place: TypeAlias = "tuple[int, int, int]"
"""A stage of the pipeline, and what its module says: the index of the model's stage, and their number."""


def places_of(stages: Iterable[tuple[int, Any]]) -> list[Place]:
    """The places that the modules of some stages name by their attribute ``pipeline_place``, (index, count).

    A module may be wrapped, as by DDP, or hold several stages of the model, one after the other.

    Raises:
        ValueError: the attribute is something else.
    """
    return [(stage, *place) for stage, module in stages for place in _places(module)]


def _places(module: Any) -> Iterator[tuple[int, int]]:
    place = getattr(module, "pipeline_place", None)
    if place is not None:
        is_pair = isinstance(place, tuple) and len(place) == 2 and all(type(number) is int for number in place)
        if not is_pair or not 0 <= place[0] < place[1]:
            raise ValueError(
                f"pipeline_place of {type(module).__name__} is {place!r}, must be (index, count): which of how many "
                "stages of a model it is"
            )
        yield place
    elif isinstance(module, nn.Module):
        for child in module.children():
            yield from _places(child)


def check_places(everyones: Sequence[Sequence[Place]], rank_of_stage: Sequence[int]) -> None:
    """Raises :class:`Disagreement` unless the stages that say what they are make one whole model, in order.

    Args:
        everyones: of each rank, :func:`places_of` its stages.
        rank_of_stage: of the pipeline.
    """
    found = sorted((place for theirs in everyones for place in theirs), key=lambda place: place[0])
    wanted = [(index, found[0][2]) for index in range(found[0][2])] if found else []
    if [(index, count) for _, index, count in found] == wanted:
        return
    given = ", ".join(f"stage {index} of {count} as stage {s} on rank {rank_of_stage[s]}" for s, index, count in found)
    count = len(rank_of_stage)
    raise Disagreement(
        f"the pipeline has {count} stage{'s' * (count > 1)}, and was given {given}: it needs all stages of one model, "
        f"each once and in order. Cut the model into {count}, and give each rank its own (the order of a rank's stages "
        "is that of engine.schedule.rank_of_stage)"
    )
