"""Seq1F1B for scripts that use torch.distributed.pipelining: schedules that take its stages and are called as its own.

Torch's classes split the batch and merge the outputs here as they do for their own schedules; the engine runs the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle, _PipelineSchedule

from seq1f1b.files import nearest_name
from seq1f1b.partition import ModelShape
from seq1f1b.runtime.arguments import Loss, order_of
from seq1f1b.runtime.batch import StepArguments
from seq1f1b.runtime.engine import PipelineEngine
from seq1f1b.runtime.rank_order import build
from seq1f1b.schedule import Schedule

__all__ = ["ScheduleSeq1F1B", "ScheduleSeqInterleaved1F1B"]


_TAKEN = ("stage", "num_microbatches", "num_segments", "loss_fn", "group")
"""Arguments of an engine that come from the stage and from the other arguments of a schedule."""


class _Segmented(_PipelineSchedule):
    """The common part of both schedules: torch's ``step`` and ``eval`` over a :class:`seq1f1b.PipelineEngine`."""

    _family: str  # of its orders, unless it is given another

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
        self._check_options(engine)
        loss = engine.get("loss", Loss())
        if not isinstance(loss, Loss):
            raise TypeError(f"loss must be a seq1f1b.Loss, got {type(loss).__name__}")
        self._own_stages = list(stage) if isinstance(stage, Sequence) else [stage]
        self._engine_options = {
            "num_segments": n_segments,
            "segment_sizes": segment_sizes,
            "seq_dim": seq_dim,
            "grad_dtype": None if n_segments == 1 else torch.float32,
            **engine,
            "schedule": self._build(engine.get("schedule", self._family), n_microbatches, n_segments),
            # Gradients are divided after the last backward, by gradient_divisor, as torch does.
            "loss": replace(loss, scale_grads=False),
        }
        self._engine: PipelineEngine | None = None
        construct: Any = super().__init__  # of the class that comes next, which takes the stage first
        construct(
            stage,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads=scale_grads and loss.scale_grads,
        )

    def _check_options(self, given: Iterable[str]) -> None:
        """Raises unless these are keyword arguments of an engine, and none that the stage or torch's arguments tell."""
        known = sorted({"n_microbatches", "n_segments", *inspect.signature(PipelineEngine).parameters} - {*_TAKEN})
        for option in given:
            if option not in known:
                raise TypeError(f"{type(self).__name__} has no argument {option!r}{nearest_name(option, known)}")

    def _build(self, schedule: Any, n_microbatches: int, n_segments: int) -> Schedule:
        """The order of these stages, which must lie where it has them."""
        stages, rank = self._own_stages, self._own_stages[0].group_rank
        ranks, rest = divmod(stages[0].num_stages, len(stages))
        source, _ = order_of(schedule, n_microbatches, n_segments, None)
        order = build(source, ranks, n_microbatches, n_segments, len(stages))
        if order.parents is not None:
            raise ValueError(
                "the segments of this schedule are trees, which torch's have no word for: use PipelineEngine"
            )
        own = [stage.stage_index for stage in stages]
        expected = [index for index, holder in enumerate(order.rank_of_stage) if holder == rank]
        if rest or own != expected:
            raise ValueError(f"rank {rank} has stages {own} of {stages[0].num_stages}, in {schedule} it has {expected}")
        return order

    @property
    def engine(self) -> PipelineEngine:
        """Runs the steps; for its reports, its norm over all stages. The first use joins the pipeline's ranks."""
        if self._engine is None:
            self._engine = PipelineEngine(
                [stage.submod for stage in self._own_stages],
                num_microbatches=self._n_microbatches,
                loss_fn=self._loss_fn,
                group=self._own_stages[0].group,
                **self._engine_options,
            )
        return self._engine

    def close(self) -> None:
        """Leaves the pipeline's transports."""
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
        """One step over the whole batch, as torch's schedules take it.

        Args:
            args, kwargs: the whole batch; args on the first stage's rank. Split into micro-batches along dimension 0
                or by the chunk specs, then into segments along ``seq_dim``: args all, kwargs by ``arg_rules``.
            target: targets of the whole batch, on the last stage's rank.
            losses: gets the M losses.
            return_outputs: whether to keep what the last stage returns; False saves its memory.
            loss_kwargs: keyword arguments of ``loss_fn``, given with every segment.
            arg_mbs, kwarg_mbs, target_mbs: lists of M micro-batches, in place of args, kwargs and target.
        Returns:
            The last stage's output for the whole batch on its rank, None elsewhere.
        """
        whole, given = (args, kwargs, target), (arg_mbs, kwarg_mbs, target_mbs)
        for value, microbatches, name in zip(whole, given, ("arg_mbs", "kwarg_mbs", "target_mbs"), strict=True):
            if microbatches is not None and not (value is None or value in ((), {})):
                raise ValueError(f"{name} stands for the whole batch's: give one of the two")
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

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Any:
        """Forward only and without gradients; arguments as in ``step``."""
        with torch.no_grad():
            return super().eval(*args, target=target, losses=losses, **kwargs)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = False,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> list[Any] | None:
        """Outputs of the M micro-batches, where they are asked for and this rank has them."""
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        engine = self.engine
        found, rows = engine._run(
            StepArguments(
                self._has_backward,
                arg_mbs if engine.has_first and any(arg_mbs) else None,
                target_mbs if engine.has_last else None,
                kwarg_mbs,
                gradient_divisor=self._n_microbatches if self.scale_grads else 1,
                loss_kwargs=loss_kwargs,
                return_outputs=return_outputs,
            )
        )
        if losses is not None and engine.has_last:
            losses[:] = found
        return rows


class ScheduleSeq1F1B(_Segmented, PipelineScheduleSingle):
    """Seq1F1B in the place of torch's ``Schedule1F1B``: the same stage, arguments and calls.

    With ``n_segments=1`` it is 1F1B, and its losses and gradients are those of ``Schedule1F1B`` bit for bit; fewer
    micro-batches than stages work too. Unlike torch's it runs the module in the step alone, never to learn its shapes,
    and takes sequences of another length in every step.

    Args:
        stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads: as of
            ``Schedule1F1B``. ``stage`` is a ``PipelineStage`` with one stage per rank; ``loss_fn(output, target)`` is
            called per segment. With ``scale_grads`` a step divides by M what it adds to ``.grad``, and nothing that was
            there before: steps before ``zero_grad`` accumulate.
        n_segments: k, parts of every sequence. Attention must be :func:`seq1f1b.causal_attention`, and other state
            along the sequence must be handed on by ``carry_in`` and ``carry_out``.
        segment_sizes, seq_dim: as of :class:`seq1f1b.PipelineEngine`.
        engine: any other argument of :class:`seq1f1b.PipelineEngine`. ``arg_rules`` is needed for tensor keyword
            arguments where n_segments > 1. ``grad_dtype`` is by default the parameters' own where n_segments = 1, else
            fp32. ``schedule`` may name, give or build another order for stages that lie where torch has them.
    Raises:
        ValueError, TypeError: arguments that break a rule.
    Source: Seq1F1B, arXiv:2406.03488.
    """

    _family = "seq1f1b"


class ScheduleSeqInterleaved1F1B(_Segmented, PipelineScheduleMulti):
    """Interleaved Seq1F1B in the place of torch's ``ScheduleInterleaved1F1B``: several stages per rank.

    Arguments as of :class:`ScheduleSeq1F1B`, with the rank's stages in ascending order in place of one. Stage s lies on
    rank s modulo the number of ranks.
    """

    _family = "seq1f1b-interleaved"

    def __init__(self, stages: Sequence[Any], n_microbatches: int, *arguments: Any, **keywords: Any) -> None:
        super().__init__(stages, n_microbatches, *arguments, **keywords)
