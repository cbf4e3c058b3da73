"""A step of an engine on one rank: units of the rank's stages, and results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.engine.batch import Batch, StepRead, merge
from seq1f1b.engine.features import Pass, Received
from seq1f1b.engine.loss import ToLoss
from seq1f1b.engine.order import RankOrder
from seq1f1b.engine.pipeline import Pipeline
from seq1f1b.engine.recompute import one_at_a_time
from seq1f1b.engine.stage import FromStage, Source, Stage, StageStep, ToStage
from seq1f1b.engine.vocabulary_step import EmbeddingStep, HeadStep, ToHead
from seq1f1b.engine.weighting import Weighting

__all__: list[str] = []

_OUTSIDE_AUTOCAST = (*"BIWTG", "fill")  # passes of unit.py; a backward runs in the dtypes of its forward


@dataclass(frozen=True)
class StepRecord:
    """Record of the last step, kept by the engine until the next step."""

    training: bool
    number: int
    sizes: list[int]  # tokens of segments, as given to the executor
    siblings: tuple[Sequence[int], Sequence[int]]  # tokens of siblings within a segment, as given to the executor
    length: int  # tokens of the longest micro-batch
    seconds: float  # until the host had called all units
    order: RankOrder
    figures: dict[int, dict[str, Any]]  # by stage and name, measurements of features
    logit_bytes: int  # at the peak, in the rank's shard of the vocabulary
    tokens: int  # of all sequences, on the rank of the first stage

    def step_seconds(self, rank: int) -> float:
        """Returns the seconds of all units; on a GPU waits until the last unit has run."""
        if not _C.executor_settle(self.order.executor):
            return self.seconds
        walked, _ = _C.executor_timeline(self.order.executor, rank)
        return (walked[-1][3] - walked[0][2]) * 1e-9

    def total(self, name: str) -> int:
        """Returns the sum of a figure over the rank's stages."""
        return sum(own.get(name, 0) for own in self.figures.values())


class Step:
    """A step of the rank, dropped at the end with all state of units.

    Args:
        known_shapes: (training, tokens, k) of earlier steps.
    """

    _weighting: Weighting  # set by prepare

    def __init__(
        self, batch: Batch, order: RankOrder, stages: dict[int, Stage], pipeline: Pipeline, known_shapes: set[Any]
    ) -> None:
        self.batch, self._order, self._stages = batch, order, stages
        self._pipeline, self._device, self._known_shapes = pipeline, pipeline.device, known_shapes
        self._head: HeadStep | None = None  # the rank's shard of the output layer, if spread
        if (head := batch.options.head) is not None:
            self._head = HeadStep(head, pipeline, order.last_cells.get("T", -1), batch.training)
        self._embedding: EmbeddingStep | None = None  # the rank's shard of the input embedding, if spread
        if (shard := batch.options.embedding_shard) is not None:
            self._embedding = EmbeddingStep(shard, pipeline, order.last_cells.get("G", -1), batch.training)
        self._autocast = torch.is_autocast_enabled(self._device.type)
        self._last = next((stage for stage in stages.values() if stage.is_last), None)
        self._loss: ToLoss | None = None
        self._stage_steps: dict[int, StageStep] = {}
        self._passes: dict[int, tuple[Any, ...]] = {}  # by stage; position: the number of the pass in C
        self._fills: dict[int, Pass | None] = {}  # by stage: runs a piece of W
        self.around = ExitStack()  # the features' contexts around all units, from `prepare` to the last unit

    def share_weights(self) -> None:
        """Shares weights of micro-batches found by targets with all ranks, for auxiliary losses. Collective."""
        batch, arguments, group = self.batch, self.batch.arguments, self._pipeline.group
        if arguments.rows is None and (length := max(group.all_gather_object(batch.length))) and not batch.length:
            self.prepare(length)
        self._weighting.weights = group.all_gather_object(self._weighting.weights)[self._pipeline.rank_of_stage[-1]]

    # -- the executor's ----------------------------------------------------------------------------------------------

    def run(self, kind: int, stage: int, cell: int, received: Received) -> Any:
        """Runs a unit; called by the executor."""
        return self._passes[stage][kind](cell, received)

    def fill(self, stage: int, cell: int) -> bool:
        """Runs a piece of W while the executor waits; returns whether any is left."""
        fill = self._fills.get(stage)
        return fill is not None and bool(fill(cell, None))

    def prepare(self, length: int) -> list[int]:
        """Splits the rank's arguments and sets up the units; returns the segment sizes.

        On a rank without inputs, the executor calls ``prepare`` with the length from the first message.
        """
        batch, options = self.batch, self.batch.options
        batch.split(length)
        batch.is_new = (batch.training, length, options.num_segments) not in self._known_shapes
        self._pipeline.group.set_limits(options.limits.longest if batch.is_new else options.limits.step)
        if self._embedding is not None and batch.inputs is not None:
            self._embedding.take(batch.inputs, batch.read)
        if self._head is not None and batch.targets is not None:
            self._head.check(batch.target, batch.read)
        weighting = self._weighting = Weighting(batch, self._device)
        for index, stage in self._stages.items():
            self._stage_steps[index] = StageStep(stage, self._order.stages[index], batch, weighting.auxiliary_seeds)
        if self._last is not None and batch.targets is not None:
            weighting.weigh(self._last)
        if batch.read.asked:
            batch.read.read()
        for index, stage_step in self._stage_steps.items():
            self._connect(index, stage_step, weighting)
            others = [m for other in self._stages.values() if other is not stage_step.stage for m in other.modules]
            for feature in stage_step.features:
                context = feature.in_step(others)
                if context is not None:
                    self.around.enter_context(context)
        return batch.sizes

    def _connect(self, index: int, stage_step: StageStep, weighting: Weighting) -> None:
        source: Source = Source(self.batch.inputs or ()) if self._embedding is None else self._embedding
        if not stage_step.stage.is_first:
            source = FromStage(self.batch.training, self._stage_steps.get(index - 1))
        sink: Any = ToStage(stage_step, self._stage_steps.get(index + 1))
        if stage_step.stage.is_last and self._head is not None:
            sink = ToHead(stage_step, self._head, weighting)
        elif stage_step.stage.is_last:
            sink = self._loss = ToLoss(stage_step, weighting)
        found = stage_step.connect(source, sink)
        draws_again = "R" in self._order.schedule.kinds or self.batch.options.memory.blocks is not None
        if draws_again and stage_step.stage.in_threads:  # which share torch's generators
            found |= {letter: one_at_a_time(found[letter]) for letter in "FBIWR" if letter in found}
        for shard in (self._head, self._embedding):
            found |= {} if shard is None else shard.passes()
        if self._autocast:
            outside = torch.autocast(self._device.type, enabled=False)
            found |= {letter: outside(found[letter]) for letter in _OUTSIDE_AUTOCAST if letter in found}
        self._fills[index] = found.get("fill")
        self._passes[index] = tuple(map(found.get, _C.PASSES))

    def look_back(self) -> None:
        """Calls the features' ``look_back`` in the first step of a shape, after the units and outside of contexts."""
        for feature in chain.from_iterable(stage_step.features for stage_step in self._stage_steps.values()):
            feature.look_back()

    # -- its end -----------------------------------------------------------------------------------------------------

    def divisor(self) -> tuple[bool | None, float, bool]:
        """Returns, after the last unit: whether the loss has a divisor (None: no loss was called), the
        gradients' factor, and whether a stage of the rank has added auxiliary losses.
        """
        has_auxiliary = any(each.has_auxiliary for each in self._stage_steps.values())
        loss = self._loss
        if loss is None or not loss.divides:
            return None if loss is None else loss.divides, 1.0, has_auxiliary
        return True, self._weighting.factor(self._last, self._divisors), has_auxiliary

    @cached_property
    def _divisors(self) -> dict[int, float]:
        """Reads the losses' divisors by cell, after the last unit: the only read of a step with divisors."""
        assert self._loss is not None
        divisors, constants = self._loss.divisors, self._loss.constants
        numbers, read = list[list[float]](), StepRead()
        read.ask([*divisors.values(), *constants.values()], numbers.extend)
        read.read()
        found = {cell: number for cell, (number,) in zip(divisors, numbers, strict=False)}
        if any(number for (number,) in numbers[len(divisors) :]) or any(found[cell] for cell in constants):
            raise ValueError("loss_fn returned a loss that does not require grad, its input does")
        return found

    def tell_of_counts(self) -> None:
        """Warns of means over unlike numbers of targets, after the last unit, on the rank of the last stage."""
        if self._loss is None or not self._loss.divides:
            self._weighting.tell_of_counts(self._last)

    def end(self) -> None:
        """Ends the step of stages, after the last unit or an error."""
        self.around.close()
        for each in self._stage_steps.values():
            each.end()

    def losses(self) -> list[Tensor]:
        """Returns losses of the M micro-batches, or of all tokens, on the last stage's rank; [] elsewhere."""
        if self._last is None or self.batch.target is None:
            return []
        found = self._loss if self._head is None else self._head
        assert found is not None
        if found.values:  # of tokens, (batch, tokens) for each micro-batch; 0 in segments without counted targets
            first, dim = next(iter(found.values.values())), self.batch.seq_dim
            parts = []
            for cell, size in enumerate(chain.from_iterable(self.batch.rows)):
                shape = [*first.shape[:dim], size, *first.shape[dim + 1 :]]
                parts.append(found.values[cell] if cell in found.values else first.new_zeros(shape))
            each = iter(parts)
            return [torch.cat([next(each) for _ in row], dim) for row in self.batch.rows]
        if self._loss is not None and self._loss.divides:
            return self._weighting.divided(self._loss.losses, self._divisors)
        return self._weighting.combined(found.losses)

    def outputs(self) -> list[Any] | None:
        """Returns the outputs of the M micro-batches on the rank of the last stage, None elsewhere."""
        if self._last is None:
            return None
        units = self._stage_steps[self._last.index].units
        outputs = iter([units[cell].output for cell in range(len(units))])
        return [merge([next(outputs) for _ in row], self.batch.seq_dim) for row in self.batch.rows]

    def record(self, number: int, seconds: float) -> StepRecord:
        """Returns the record of the step, once it has ended; ``seconds`` of all units."""
        batch, tokens = self.batch, 0
        if self._pipeline.has_first:
            lengths = [size for row in batch.rows for size in row]
            first = [next((t for t in given if isinstance(t, Tensor) and t.dim()), ()) for given in batch.inputs or ()]
            tokens = sum(len(sequences) * size for sequences, size in zip(first, lengths, strict=False))
        return StepRecord(
            training=batch.training,
            number=number,
            sizes=batch.sizes,
            siblings=batch.siblings,
            length=batch.length,
            seconds=seconds,
            order=self._order,
            figures={index: each.figures for index, each in self._stage_steps.items()},
            logit_bytes=0 if self._head is None else self._head.peak_bytes,
            tokens=tokens,
        )
