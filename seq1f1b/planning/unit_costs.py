"""Seconds and bytes of the units of a step, as orders that are made for them take both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from seq1f1b.planning.cost import CostModel, RankBytes, UnitSeconds
from seq1f1b.schedule import Costs, Schedule, StepMemory

__all__ = ["SequenceCosts", "UnitCosts"]


class UnitCosts(ABC):
    """What an order's units cost. A table is [stage][segment] where all micro-batches are alike, and else
    [stage][micro-batch][segment].

    Attributes:
        cost: of the model on a machine.
    """

    cost: CostModel

    @property
    @abstractmethod
    def seconds(self) -> Any:
        """Seconds of each pass, a :class:`seq1f1b.planning.cost.UnitSeconds` of tables."""

    @property
    @abstractmethod
    def message_bytes(self) -> list[Any]:
        """Bytes of a message, a table of one stage."""

    @abstractmethod
    def held_bytes(self) -> list[Any]:
        """A table, see :meth:`seq1f1b.planning.cost.CostModel.held_bytes`."""

    @abstractmethod
    def memory(self, schedule: Schedule) -> StepMemory:
        """Bytes of what units hold, see :meth:`seq1f1b.planning.cost.CostModel.unit_memory`."""

    @abstractmethod
    def costs(self, schedule: Schedule, *, moves: bool = False) -> Costs:
        """Costs of the order, see :meth:`seq1f1b.planning.cost.CostModel.costs`."""

    @abstractmethod
    def rank_bytes(self, schedule: Schedule) -> list[RankBytes]:
        """The peak of every rank."""

    @abstractmethod
    def microbatches(self, row: list[Any]) -> list[list[Any]]:
        """The row of a stage in a table, by micro-batch; those that are alike are one."""

    @property
    @abstractmethod
    def longest(self) -> list[int]:
        """Tokens of the segments of the micro-batch that holds most."""

    def least_bytes(self) -> float:
        """What no order can go below, in the mean over the ranks."""
        return self.cost.least_bytes(self.longest)


class SequenceCosts(UnitCosts):
    """Costs of a step whose micro-batches are alike.

    Args:
        cost: of the model.
        sizes: tokens of the segments of every sequence.
    """

    def __init__(self, cost: CostModel, sizes: Sequence[int]) -> None:
        self.cost, self._sizes = cost, list(sizes)

    @cached_property
    def seconds(self) -> UnitSeconds:
        return self.cost.unit_seconds(self._sizes)

    @property
    def message_bytes(self) -> list[int]:
        return self.cost.message_bytes(self._sizes)

    def held_bytes(self) -> list[list[int]]:
        return self.cost.held_bytes(self._sizes)

    def memory(self, schedule: Schedule) -> StepMemory:
        return self.cost.unit_memory(self._sizes, schedule.rank_of_stage)

    def costs(self, schedule: Schedule, *, moves: bool = False) -> Costs:
        return self.cost.costs(schedule, self._sizes, moves=moves)

    def rank_bytes(self, schedule: Schedule) -> list[RankBytes]:
        return self.cost.rank_bytes(schedule, self._sizes)

    def microbatches(self, row: list[Any]) -> list[list[Any]]:
        return [row]

    @property
    def longest(self) -> list[int]:
        return self._sizes
