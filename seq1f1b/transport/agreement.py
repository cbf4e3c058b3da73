"""Comparison of arguments that must be equal on all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__: list[str] = []


class Disagreement(ValueError):
    """Error of ranks with different arguments. Every rank of the pipeline raises it."""


def check_agreement(everyones: Sequence[Mapping[str, tuple[str, str]]]) -> None:
    """Raises :class:`Disagreement` with the first different argument, unless all ranks' arguments are equal."""
    for name in everyones[0]:
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyones):
            ranks.setdefault(theirs[name][0], []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(
                f"{everyones[own[0]][name][1]} on rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
                for own in ranks.values()
            )
            raise Disagreement(f"{name} differs between the ranks of the pipeline: {values}; give all ranks the same")


@dataclass
class Agreement:
    """Comparison of the arguments of a pipeline's ranks: once, and again after a failure.

    Args:
        group: the ranks' group.
        own: the rank's arguments, by name: a value to compare, and a text for errors.
        beside: a further value, sent to all ranks.
        check_beside: raises unless the further values of all ranks fit together.
    """

    group: Any
    own: Mapping[str, tuple[str, str]]
    beside: Any
    check_beside: Callable[[Sequence[Any]], None]
    checked_in: int = -1  # the group's epoch: a check may have passed on some ranks and failed on others

    def check(self) -> None:
        """Raises, on every rank, unless all ranks' arguments are equal. Collective."""
        found = self.group.all_gather_object((self.own, self.beside))
        check_agreement([own for own, _ in found])
        self.check_beside([beside for _, beside in found])
        self.checked_in = self.group.epoch
