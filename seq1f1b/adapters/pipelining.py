"""Seq1F1B schedules for scripts that use torch.distributed.pipelining, with torch's stages and torch's calls.

Torch's base classes split the batch and merge the outputs; the engine runs the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, _PipelineSchedule

from seq1f1b.engine.batch import StepArguments
from seq1f1b.engine.engine import PipelineEngine
from seq1f1b.engine.options import Loss, order_of
from seq1f1b.engine.order import build
from seq1f1b.partition import ModelShape
from seq1f1b.schedule import Schedule

__all__ = ["ScheduleSeq1F1B", "ScheduleSeqInterleaved1F1B"]


class _SegmentSchedule(_PipelineSchedule):
    """The common part of both schedules: torch's ``step`` over a :class:`seq1f1b.PipelineEngine`."""

    _family: str  # default value of the engine's argument schedule

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        n_segments: int = 1,
        segment_sizes: ModelShape | Sequence[int] | None = None,
        seq_dim: int = 1,
        **engine: Any,
    ) -> None:
        self._own_stages = list(stage) if isinstance(stage, Sequence) else [stage]
        self._order = self._build(engine.pop("schedule", self._family), n_microbatches, n_segments)
        loss = engine.pop("loss", Loss())
        if not isinstance(loss, Loss):
            raise TypeError(f"loss must be a seq1f1b.Loss, got {type(loss).__name__}")
        if not loss.scale_grads:
            raise ValueError("Loss.scale_grads is False: give the schedule its own argument scale_grads=False instead")
        engine.setdefault("grad_dtype", None if n_segments == 1 else torch.float32)
        self._arguments = dict(
            schedule=self._order,
            num_microbatches=n_microbatches,
            num_segments=n_segments,
            segment_sizes=segment_sizes,
            seq_dim=seq_dim,
            loss_fn=loss_fn,
            loss=replace(loss, scale_grads=scale_grads),
            group=self._own_stages[0].group,
            **engine,
        )
        inspect.signature(PipelineEngine).bind(None, **self._arguments)
        self._engine: PipelineEngine | None = None
        of_torch: Any = super()  # the second base of the classes below, whose arguments differ from those of its base
        of_torch.__init__(
            stage,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads,
        )

    def _build(self, schedule: Any, n_microbatches: int, n_segments: int) -> Schedule:
        """Returns the units' order; raises ValueError if the order places a stage on another rank."""
        stages = self._own_stages
        ranks, rest = divmod(stages[0].num_stages, len(stages))
        if rest:
            raise ValueError(f"{stages[0].num_stages} stages do not fill ranks of {len(stages)} stages each")
        source, _ = order_of(schedule, n_microbatches, n_segments, None)
        order = build(source, ranks, n_microbatches, n_segments, len(stages))
        if order.parents is not None:
            raise ValueError(
                "the segments of this schedule are trees, which torch's schedules cannot hold: use PipelineEngine"
            )
        for stage in stages:
            rank, group_rank = order.rank_of_stage[stage.stage_index], stage.group_rank
            if rank != group_rank:
                raise ValueError(
                    f"stage {stage.stage_index} of {schedule} belongs to rank {rank}, but lies on rank {group_rank}"
                )
        return order

    @property
    def engine(self) -> PipelineEngine:
        """The engine of the steps, for reports and the norm over all stages. The first use connects the ranks."""
        if self._engine is None:
            self._engine = PipelineEngine([stage.submod for stage in self._own_stages], **self._arguments)
        return self._engine

    def close(self) -> None:
        """Closes the engine's transports."""
        if self._engine is not None:
            self._engine.close()

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs one step over the whole batch, called like the step of torch's schedules.

        Args:
            args, kwargs: the whole batch; args on the first stage's rank. Split into micro-batches along dimension 0
                or by the chunk specs, then into segments along ``seq_dim``: all args, and kwargs by ``arg_rules``.
            target: targets of the whole batch, on the last stage's rank.
            losses: a list, filled with the M losses.
            return_outputs: whether to keep the last stage's outputs; False saves memory.
            loss_kwargs: keyword arguments of ``loss_fn``, given with every segment.
            arg_mbs, kwarg_mbs, target_mbs: lists of M micro-batches, in place of args, kwargs and target.
        Returns:
            The last stage's output for the whole batch on its rank, None elsewhere.
        """
        if self._has_backward and not torch.is_grad_enabled():
            raise RuntimeError("step() computes gradients, which torch.no_grad() forbids: call eval() instead")
        whole, given = (args, kwargs, target), (arg_mbs, kwarg_mbs, target_mbs)
        for value, microbatches, name in zip(whole, given, ("arg_mbs", "kwarg_mbs", "target_mbs"), strict=True):
            if microbatches is not None and not (value is None or value in ((), {})):
                raise ValueError(f"{name} stands for an argument of the whole batch: give one of the two")
        split_args, split_kwargs = self._split_inputs(args, kwargs)
        if target_mbs is None and target is not None:
            target_mbs = list(torch.tensor_split(target, self._n_microbatches))
        rows = self._step_microbatches(
            split_args if arg_mbs is None else arg_mbs,
            split_kwargs if kwarg_mbs is None else kwarg_mbs,
            target_mbs,
            losses,
            return_outputs,
            loss_kwargs,
        )
        return self._merge_outputs(rows) if rows is not None else None

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> list[Any] | None:
        """Returns the outputs of the M micro-batches, or None if not requested or on a rank without the last stage."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        engine = self.engine
        inputs = [args if isinstance(args, tuple) else (args,) for args in arg_mbs] if engine.has_first else None
        if engine.has_first and not any(inputs or ()):
            raise ValueError("the rank of the first stage needs the model's positional arguments")
        target = target_mbs if engine.has_last else None
        given = StepArguments(
            self._has_backward, inputs, target, kwarg_mbs, loss_kwargs=loss_kwargs, return_outputs=return_outputs
        )
        with torch.set_grad_enabled(self._has_backward):
            found, rows = engine._runner.run(given)
        if losses is not None and engine.has_last and self._loss_fn is not None and target_mbs is not None:
            losses[:] = found
        return rows


class ScheduleSeq1F1B(_SegmentSchedule, PipelineScheduleSingle):
    """A Seq1F1B schedule that replaces torch's ``Schedule1F1B``, with equal stage, arguments and calls.

    ``n_segments=1`` gives 1F1B; losses and gradients equal ``Schedule1F1B``'s bit for bit, except for the rounding of
    1 / M: the backward starts from 1 / M here, while torch divides at the end. M may be below the number of stages.
    Torch's schedule also runs the module to infer shapes; this schedule runs the module in steps only, and takes
    sequences of any length in each step.

    Args:
        stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads: arguments of
            ``Schedule1F1B``. ``stage`` is a ``PipelineStage`` with one stage per rank; ``loss_fn(output, target)`` is
            called per segment. With ``scale_grads``, a step adds the gradients of the mean of M losses and leaves
            earlier gradients undivided, so steps before ``zero_grad`` accumulate.
        n_segments: k, parts of every sequence. Attention must be :func:`seq1f1b.causal_attention`; ``carry_in`` and
            ``carry_out`` must hand on any further state along the sequence.
        segment_sizes, seq_dim: arguments of :class:`seq1f1b.PipelineEngine`.
        engine: any further argument of :class:`seq1f1b.PipelineEngine`. If n_segments > 1, tensor keyword arguments
            need ``arg_rules``. ``grad_dtype`` defaults to the parameters' dtype if n_segments = 1, else to fp32.
            ``schedule`` may name, give or build another order that places stages on torch's ranks.
    Raises:
        ValueError, TypeError: arguments that break a rule.
    Source: Seq1F1B, arXiv:2406.03488.
    """

    _family = "seq1f1b"


class ScheduleSeqInterleaved1F1B(_SegmentSchedule, PipelineScheduleMulti):
    """An interleaved Seq1F1B schedule that replaces torch's ``ScheduleInterleaved1F1B``: several stages per rank.

    Takes the arguments of :class:`ScheduleSeq1F1B`, with a list of the rank's stages in ascending order. Stage s lies
    on rank s modulo the number of ranks.
    """

    _family = "seq1f1b-interleaved"

    def __init__(self, stages: Sequence[Any], n_microbatches: int, *arguments: Any, **keywords: Any) -> None:
        super().__init__(stages, n_microbatches, *arguments, **keywords)
