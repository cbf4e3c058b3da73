"""Check of a stage in the first step of a shape, for modules that mix tokens without the engine's knowledge.

At the end of the step, after all units, the stage runs again on a few tokens of its first unit, as two segments and as
one (``by_values.py``). Some stages cannot run alone: stages under FSDP2 or
``sequence_parallel``, stages that talk to other processes or draw random numbers, stages with arguments of unknown
value for other tokens, and stages that take a fixed number of tokens. For these stages the check only finds whether the
unit F0.1 calls attention other than ``causal_attention`` (``watch.py``). Later steps are not checked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from seq1f1b.attention.unit import LiveUnit
from seq1f1b.checks.by_values import FEWEST, Look, Sample, take_sample
from seq1f1b.checks.watch import Watch, sizes_of
from seq1f1b.engine.compiled import is_compiled
from seq1f1b.engine.features import Feature
from seq1f1b.engine.findings import ATTENTION, Finding
from seq1f1b.engine.model_state import uncompiled
from seq1f1b.engine.replicas import Fsdp
from seq1f1b.engine.stage import StageStep
from seq1f1b.nested import tensors_of

__all__: list[str] = []


class FirstLook(Feature):
    """The check of a stage, once for every kind of step: training or not, and names of keyword arguments."""

    needs = "is_new"

    def __init__(self, stage: Any, options: Any, tier: Any) -> None:
        self.is_idle = options.attention == "unchecked"
        self._shares_tokens = options.sequence_parallel != (0, 1)
        self._known: set[Any] = set()  # kinds of steps already compared by values

    def start(self, step: StageStep) -> bool:
        arguments, stage = step.batch, step.stage
        # The watched unit is the second segment of the first micro-batch that has several: F0.1, as a rule.
        several = next((m for m, row in enumerate(arguments.rows) if len(row) > 1), None)
        if several is None:
            return False
        parameters = [p for module in stage.modules for p in module.parameters()]
        is_sharded = any(isinstance(p, Fsdp) for p in stage.wrappers) or any(hasattr(p, "to_local") for p in parameters)
        why = "shares its tokens with other ranks" if self._shares_tokens else "is sharded" if is_sharded else ""
        # The reason why the stage cannot run alone; "" if there is none.
        self._why = "has no values" if any(p.is_meta for p in parameters) else why
        rows = arguments.rows
        self._cell = sum(map(len, rows[:several])) + 1  # the watched unit's
        first = max(range(len(rows)), key=lambda m: min(rows[m][0], 8))  # a first segment of 8 tokens, if possible
        self._first = sum(map(len, rows[:first]))
        self._sample: Sample | None = None
        self._kind: Any = None
        self._watch: Watch | None = None
        self._figures: dict[str, Any] = {}
        return True

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        if unit.is_again:
            return None
        if unit.cell == self._first and not self._why:
            self._sample = take_sample(self._step, unit, inputs)
            if self._sample is not None:
                kwargs = self._step.kwargs_of(unit)
                is_long = sum(self._sample.sizes) >= FEWEST
                self._kind = self._step.batch.training, is_long, tuple(sorted(kwargs))
        is_watched = unit.cell == self._cell and self._kind not in self._known
        return self._watched(unit, inputs) if is_watched else None

    @contextmanager
    def _watched(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> Iterator[None]:
        stage, arguments = self._step.stage, self._step.batch
        before = _collectives(stage.group and stage.group.process_group)
        if any(map(is_compiled, stage.modules)):  # a watch would trigger another trace
            yield
        else:
            row, kwargs = arguments.rows[unit.microbatch], self._step.kwargs_of(unit)
            others = [value for name, value in kwargs.items() if arguments.arg_rules.get(name) != "slice"]
            sizes = sizes_of(stage.modules) | {size for t in tensors_of(others) for size in t.shape}
            rows = next((t.shape[0] for t in tensors_of(inputs) if t.dim()), 1)
            with uncompiled(), Watch(rows, sum(row[: unit.segment]), row[unit.segment], sizes) as self._watch:
                unit.watch = self._watch
                yield
            unit.watch = None
        if before != _collectives(stage.group and stage.group.process_group):
            self._why = "talks to other processes"

    def look_back(self) -> None:
        if self._kind in self._known:
            return
        stage, start = self._step.stage, time.perf_counter()
        found, sample, self._sample = None, self._sample, None
        if sample is not None and not self._why:
            found = Look(stage, sample, shares_generators=stage.in_threads and stage.num_stages > 1).findings()
        if found is not None:
            self._figures = {"look_seconds": time.perf_counter() - start}
            stage.findings.judge(found)
            self._known.add(self._kind)  # not after an error of judge: the next try raises the error again
            return
        watch = self._watch
        if watch is not None and watch.foreign and "attends" not in watch.noted:  # a segment would only see itself
            what = f"{watch.foreign} in each segment alone"
            stage.findings.judge([Finding(ATTENTION, f"stage {stage.index}", what)])
        why = self._why or "draws random numbers, or takes no other tokens or arguments"
        stage.findings.say(
            f"stage {stage.index} was not compared in segments with the whole, but for calls of attention, because it "
            f"{why}: let engine.verify compare its bare modules"
        )

    def figures(self) -> dict[str, Any]:
        return self._figures


def _collectives(own: Any) -> list[int]:
    """Returns the number of collectives begun by this process in each process group except the pipeline's own.

    A stage with collectives, as with experts over several processes, must not run more often than its partners.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None or not distributed.is_initialized():
        return []
    counts = []
    for group in list(distributed._world.pg_map):
        if group is not own:
            try:
                counts.append(group._get_sequence_number_for_group())
            except RuntimeError:  # from a backend without a count
                counts.append(-1)
    return counts
