"""Check of a stage in the first step of a shape, for modules that mix tokens without the engine's knowledge.

At the end of the step, after all units, the stage runs again on a few tokens of a unit, as two segments and as one
(``by_values.py``). Some stages cannot run alone, and a warning says so: stages under FSDP2 or ``sequence_parallel``,
stages that talk to other processes or draw random numbers, stages with arguments of unknown value for other tokens, and
stages that take a fixed number of tokens. Later steps are not checked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from seq1f1b.attention.unit import LiveUnit
from seq1f1b.checks.by_values import FEWEST, Look, Sample, take_sample
from seq1f1b.engine.replicas import Fsdp
from seq1f1b.engine.stage import Feature, StageStep

__all__: list[str] = []


class FirstLook(Feature):
    """The check of a stage, once for every kind of step: training or not, and names of keyword arguments."""

    is_for_new = True

    def __init__(self, stage: Any, options: Any) -> None:
        self.is_idle = options.attention == "unchecked"
        self._shares_tokens = options.sequence_parallel != (0, 1)
        self._known: set[Any] = set()  # kinds of steps already compared by values

    def start(self, step: StageStep) -> bool:
        rows, stage = step.batch.rows, step.stage
        several = next((m for m, row in enumerate(rows) if len(row) > 1), None)
        if several is None:
            return False
        parameters = [p for module in stage.modules for p in module.parameters()]
        is_sharded = any(isinstance(p, Fsdp) for p in stage.wrappers) or any(hasattr(p, "to_local") for p in parameters)
        why = "shares its tokens with other ranks" if self._shares_tokens else "is sharded" if is_sharded else ""
        # The reason why the stage cannot run alone; "" if there is none.
        self._why = "has no values" if any(p.is_meta for p in parameters) else why
        first = max(range(len(rows)), key=lambda m: min(rows[m][0], FEWEST))
        self._first = sum(map(len, rows[:first]))  # cell of the unit whose tokens are taken
        self._heard = sum(map(len, rows[:several])) + 1  # not the first unit, in which DDP may exchange its buckets
        self._sample: Sample | None = None
        self._kind: Any = None
        self._figures: dict[str, Any] = {}
        return True

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        if unit.is_again:
            return None
        if unit.cell == self._first and not self._why:
            self._sample = take_sample(self._step, unit, inputs)
            if self._sample is not None:
                self._kind = self._step.batch.training, tuple(sorted(self._step.kwargs_of(unit)))
        return self._listening() if unit.cell == self._heard else None

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Finds whether the unit talks to other processes, as experts over several processes do.

        Such a stage must not run more often than its partners.
        """
        own = self._step.stage.group and self._step.stage.group.process_group
        before = _collectives(own)
        yield
        if before != _collectives(own):
            self._why = "talks to other processes"

    def look_back(self) -> None:
        if self._kind in self._known:
            return
        stage, start = self._step.stage, time.perf_counter()
        sample, self._sample = self._sample, None
        found = None if sample is None or self._why else Look(stage, sample).findings()
        if found is None:
            why = self._why or "draws random numbers, or takes no other tokens or arguments"
            stage.findings.say(
                f"stage {stage.index} was not compared in segments with the whole, because it {why}: let engine.verify "
                "compare its bare modules"
            )
            return
        self._figures = {"look_seconds": time.perf_counter() - start}
        stage.findings.judge(found)
        self._known.add(self._kind)  # not after an error of judge: the next try raises the error again

    def figures(self) -> dict[str, Any]:
        return self._figures


def _collectives(own: Any) -> list[int]:
    """Returns the number of collectives begun by this process in each process group except the pipeline's own."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    counts = []
    for group in list(distributed._world.pg_map) if distributed is not None else ():
        if group is not own:
            try:
                counts.append(group._get_sequence_number_for_group())
            except RuntimeError:  # from a backend without a count
                counts.append(-1)
    return counts
