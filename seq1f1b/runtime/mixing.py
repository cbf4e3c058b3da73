"""Looks at a stage in the first step of a shape for what mixes tokens without the engine's knowledge.

At the end of that step, once all units have run, the stage gets a few tokens of its first unit again: as two segments
and as one (``by_values.py``). The values tell. Where they cannot, the operations that the unit F0.1 called do
(``operations.py``): under FSDP2 and ``sequence_parallel``, in a stage that talks to other processes or draws random
numbers, with arguments of which nobody knows what they are for other tokens, and where the stage takes no other number
of tokens. No later step is looked at.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from seq1f1b.runtime.by_values import Look
from seq1f1b.runtime.compiled import is_compiled
from seq1f1b.runtime.data_parallel import Fsdp
from seq1f1b.runtime.findings import Finding
from seq1f1b.runtime.operations import Operations, findings_of, places_of, sizes_of
from seq1f1b.runtime.parts import Feature, Part
from seq1f1b.runtime.samples import Sample, take_samples
from seq1f1b.runtime.stage import StageStep
from seq1f1b.runtime.unit import LiveUnit

__all__: list[str] = []


class Looking(Feature):
    """Looks at a stage once for every kind of step: training or not, with these keyword arguments."""

    def __init__(self, stage: Any, options: Any, tier: Any) -> None:
        self._is_off = options.attention == "unchecked"
        self._shares_tokens = options.sequence_parallel != (0, 1)
        self.known: set[Any] = set()  # kinds of steps that values have told of

    def begin(self, step: StageStep) -> FirstLook | None:
        arguments, stage = step.arguments, step.stage
        # F0.1, or that of the first micro-batch of several segments.
        several = next((m for m, row in enumerate(arguments.rows) if len(row) > 1), None)
        if self._is_off or not arguments.is_new or several is None:
            return None
        has_values = not self._shares_tokens and not any(isinstance(p, Fsdp) for p in stage.wrappers)
        parameters = [p for module in stage.modules for p in module.parameters()]
        has_values &= not any(hasattr(p, "to_local") or p.is_meta for p in parameters)
        return FirstLook(self, step, sum(map(len, arguments.rows[:several])) + 1, has_values)


class FirstLook(Part):
    """The look in one step.

    Args:
        cell: of the unit whose operations are noted.
        has_values: whether the stage can be run by itself.
    """

    def __init__(self, feature: Looking, step: StageStep, cell: int, has_values: bool) -> None:
        self._feature, self._step, self._cell, self._has_values = feature, step, cell, has_values
        rows = step.arguments.rows
        first = max(range(len(rows)), key=lambda m: min(rows[m][0], 8))  # long enough, if any is
        self._first = sum(map(len, rows[:first]))
        self._samples: list[Sample] = []
        self._kind: Any = None
        self._is_known = False
        self._found: list[Finding] = []  # by operations
        self._attends = False
        self._seconds: float | None = None

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        if unit.is_again:
            return None
        if unit.cell == self._first and self._has_values:
            self._take(unit, inputs)
        is_noted = unit.cell == self._cell and not self._is_known
        return self._note(unit, inputs) if is_noted else None

    def _take(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> None:
        start = time.perf_counter()
        arguments, stage = self._step.arguments, self._step.stage
        kwargs, rules = self._step.kwargs_of(unit), arguments.arg_rules
        self._samples = take_samples(
            inputs,
            kwargs,
            lambda name: rules.get(name) == "slice",
            arguments.seq_dim,
            self._step.lengths[unit.cell],
            sum(arguments.rows[unit.microbatch]),
            sizes_of(stage.modules),
            is_first=stage.is_first,
        )
        if self._samples:
            self._kind = arguments.training, self._samples[0].sizes, tuple(sorted(kwargs))
            self._is_known = self._kind in self._feature.known
        self._seconds = time.perf_counter() - start

    @contextmanager
    def _note(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> Iterator[None]:
        stage, arguments = self._step.stage, self._step.arguments
        row = arguments.rows[unit.microbatch]
        kwargs = self._step.kwargs_of(unit)
        given = [(value, True) for value in inputs]
        given += [(value, arguments.arg_rules.get(name) == "slice") for name, value in kwargs.items()]
        before = _collectives(stage.group and stage.group.process_group)
        if any(map(is_compiled, stage.modules)):  # it would be traced again
            yield
        else:
            modules = stage.modules
            with Operations(modules, given, sum(row[: unit.segment]), row[unit.segment]) as unit.watch:
                yield
            seen, unit.watch = unit.watch, None
            self._found = findings_of(seen.sure(), places_of(stage.index, modules))
            self._attends = seen.attends
        self._has_values &= before == _collectives(stage.group and stage.group.process_group)

    def look_back(self) -> None:
        if self._is_known:
            return
        stage, start = self._step.stage, time.perf_counter()
        found: list[Finding] | None = None
        for sample in self._samples if self._has_values else ():
            look = Look(stage, sample, shares_generators=stage.in_threads and stage.num_stages > 1)
            told = look.findings()
            if told is not None and (found is None or not told):
                found, self._attends = told, look.attends
            if told == []:
                break  # else the tokens may lie elsewhere
        self._samples = []
        if self._seconds is not None:
            self._seconds += time.perf_counter() - start
        stage.findings.judge(self._found if found is None else found, self._attends)
        if found is not None:
            self._feature.known.add(self._kind)

    def figures(self) -> dict[str, Any]:
        return {} if self._seconds is None or self._is_known else {"look_seconds": self._seconds}


def _collectives(own: Any) -> list[int]:
    """How many operations this process has begun in each of its process groups but the pipeline's own.

    A stage that does so, as with experts or tensors over several processes, must not run more often than the others'.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return []
    counts = []
    for group in list(distributed._world.pg_map):
        if group is not own:
            try:
                counts.append(group._get_sequence_number_for_group())
            except RuntimeError:  # of a backend that does not count
                counts.append(-1)
    return counts
