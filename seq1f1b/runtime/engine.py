"""The pipeline engine: trains stages of torch modules under any checked order of units."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b import _C
from seq1f1b.device.edges import DeviceEdges
from seq1f1b.device.placement import common_device, step_on
from seq1f1b.ops.context import inside_step
from seq1f1b.partition import ModelShape
from seq1f1b.plan import Plan
from seq1f1b.runtime.arguments import (
    Disagreement,
    Options,
    agreement,
    check_agreement,
    check_launch,
    modules_of,
    order_of,
)
from seq1f1b.runtime.blocks import Blocks
from seq1f1b.runtime.data_parallel import data_parallel, without_wrapper
from seq1f1b.runtime.gradients import REDUCED, StepGradients, growing_wide
from seq1f1b.runtime.looks import look_at_targets, sample_of
from seq1f1b.runtime.offload import Tier
from seq1f1b.runtime.orders import has_units, with_options
from seq1f1b.runtime.report import EdgeReport, StepRecord, make_report
from seq1f1b.runtime.rows import PlannedRows, RankOrder, RowOrders, check_equal_rows, check_rows
from seq1f1b.runtime.saved_bytes import Activations
from seq1f1b.runtime.shards import EmbeddingStep, HeadStep
from seq1f1b.runtime.splitting import Rule
from seq1f1b.runtime.stage import Stage
from seq1f1b.runtime.step import Step, StepArguments, merge
from seq1f1b.runtime.tied import TiedParameters
from seq1f1b.runtime.verify import Verification, verify
from seq1f1b.runtime.vocabulary import join_shards
from seq1f1b.schedule import Schedule, Unit, build_schedule, unit_of
from seq1f1b.transport import DTYPES, RankGroup, last_attempt, resolve_group, withdraw
from seq1f1b.transport.group import Edge, leave_place

__all__ = ["PipelineEngine"]

_CHANNELS = (  # what edges carry
    "activations",
    "gradients",
    "the hidden state",
    "statistics",
    "gradients of the hidden state",
    "embedded tokens",
    "gradients of embedded tokens",
)
_IN_PLACE_ON_LEAF = "leaf Variable that requires grad is being used in an in-place operation"  # torch's words
_DTYPE_CODES: dict[object, int] = {dtype: code for code, dtype in enumerate(DTYPES)}


class PipelineEngine:
    """Runs one rank's part of a pipeline-parallel training step.

    Args:
        stage: the module of this rank; a list where the rank holds several stages, in ascending order of stage. Their
            parameters lie on the CPU or on one CUDA device, to which a step moves its arguments. A middle stage gets
            what the one before returned: a tensor, or a tuple of tensors. Under DDP or FSDP2 (``fully_shard``), over
            ranks that hold the same stage, gradients are reduced once: in the last backward, or after the last W.
            A stage may list parameters by name in a dict attribute ``tied_parameters``. Stages that list the same name
            hold copies of one parameter: at a step's end all copies get the sum of their gradients, and a norm counts
            it once.
        schedule: a name of :func:`seq1f1b.schedules`, or a :class:`seq1f1b.Schedule` (checked here).
        num_microbatches, num_segments: M and k. A batch is split into M along dimension 0, each of them into k along
            ``seq_dim``.
        segment_sizes: None for an even split; ``"balanced"`` for equal FLOPs (needs ``model_shape``); k token counts;
            or a mapping from the tokens of a sequence to its k token counts, if steps differ in length. ``"balanced"``
            counts the packed documents' FLOPs if a step has a sliced keyword argument ``doc_ids``; every rank needs it
            then.
        model_shape: shape of the whole model, for ``"balanced"``.
        arg_rules: for each tensor keyword argument: ``"slice"`` (batch and sequence), ``"replicate"`` (given whole),
            or a callable of the unit (``.microbatch .segment .offset .length``).
        loss_fn: ``loss_fn(output, target)`` -> scalar, called per segment on the last stage. Or -> (sum, divisor): the
            loss is then the sum of all sums divided by the sum of all divisors, over the segments and micro-batches of
            a step, and over replicas under DDP or FSDP2; it suits every loss that is a mean of some kind, but takes
            no :func:`seq1f1b.add_loss` and no ``scale_grads=False``. A module that holds parameters is run forward and
            backward at once, so that only one segment's logits are alive. A
            :class:`seq1f1b.VocabularyParallelHead` is given on every rank.
        loss_reduction: ``"mean"``: a segment weighs by its share of the micro-batch's counted targets; ``"sum"``:
            segments are added.
        loss_weight: ``"targets"``: the loss is the mean over all counted targets of a step, of all its micro-batches,
            and of all replicas under DDP or FSDP2. ``"microbatches"``, or None: the mean of the M micro-batches' means;
            None tells once where they count different numbers. Counted are elements of the target, or of its first
            tensor, that are not -100. Or a callable that counts the targets of a segment, for the mean of means.
        scale_grads: gradients of the mean of the M losses; False: of their sum.
        group: a ProcessGroup, ``LoopbackGroup(P)[rank]``, or None: the default group if there is one, else P = 1. Its
            ranks must be given the same counts, schedule, sizes and loss options; otherwise every rank raises an error
            that names the argument and the values.
        transport: ``"auto"``: shared memory between ranks of one host, the process group between hosts; ``"shm"`` or
            ``"c10d"``: that on every edge. Messages of CUDA stages go through host memory; ``"nccl"``, or ``"copy"``
            within a host, leave them on the GPUs: these two have run over stand-ins only, never on a GPU.
            ``engine.edges`` says which one carries each.
        timeout: seconds that a peer may make no progress; ``first_step_timeout`` while a shape is new (compilation),
            and until all ranks have come here.
        grad_dtype: accumulates gradients of 16-bit parameters in this dtype during a step, unless they are under DDP or
            FSDP2; None: in their own.
        prefetch: receive places beyond the most that the order needs at once.
        spin_us: microseconds of spinning before a wait sleeps; None: 20, or 0 where ranks outnumber cores.
        weights: when weight gradients are made. ``"planned"``: where the order has them. ``"fill"``: also while a rank
            waits for a message, product by product and in the order's own sequence, so that gradients are bit-equal
            from run to run; at the latest where the order has them, so that memory stays as planned. An order of whole
            backwards becomes :meth:`seq1f1b.Schedule.defer_weights` of it.
        recompute: which units keep their stage's input alone, and run the stage again just before their backward:
            ``"none"``, ``"all"``, or a callable of a unit (``.stage .microbatch .segment``). Units that the schedule
            itself recomputes, by an R, are recomputed in any case. Random numbers are the same both times; a loss that
            holds the head runs once.
        check_recompute: whether the first step of a length compares what R computes with what F did, bit for bit. A
            stage that does not do the same both times is an error there, and wrong gradients without it.
        recompute_blocks: (name, share): the name of a list of blocks in every stage, such as ``"blocks"``, and the
            share of them, in 0..1 or a callable of a unit, that units compute again block by block within their
            backward. The list is a ModuleList, ModuleDict or Sequential of modules that each run once in a forward; the
            first ones are computed again. Units of ``recompute`` run again whole.
        offload: a directory on a fast disk. What units save goes to a file there while other units run, and comes back
            before their backward reads it: its memory is free meanwhile. The file has no name and is gone with the
            process. Each rank may have a directory of its own. For stages on the CPU. None: nothing moves.
        offload_units: which units move: ``"all"``, ``"none"`` or a callable of a unit, see
            :meth:`seq1f1b.Schedule.offload`. None: those that the schedule itself moves, by O, A and L, or all if it
            moves none. Units that are recomputed stay.
        shard: (rank, size) among ranks that hold the same stage and share every segment's tokens (sequence
            parallelism, :func:`seq1f1b.ulysses_attention`). Each rank is given whole sequences and runs its part of
            each segment. The mean of their losses and gradients is that of the whole, as in data parallelism: put the
            stage under DDP or FSDP2 over them.
        plan: a :class:`seq1f1b.plan.Plan`, or a file that it wrote. It stands for schedule, num_microbatches,
            num_segments and segment_sizes, and raises prefetch to its own. A plan that needs something which the engine
            does not do is refused by name.
        embedding: a :class:`seq1f1b.VocabularyParallelEmbedding`, on every rank: this rank's rows of the input
            embedding. Then every rank gives ``inputs`` to a step, and the first stage gets embedded tokens.
        unchecked: True: attention of another kind than :func:`seq1f1b.causal_attention` gives a
            :class:`seq1f1b.SegmentWarning`, also in a stage that calls no other; False: there it is an error. The first
            step of a length is looked at, see :meth:`verify`.
    Source: Seq1F1B, arXiv:2406.03488.
    """

    _device_edges_class = DeviceEdges

    def __init__(
        self,
        stage: nn.Module | Sequence[nn.Module],
        *,
        schedule: str | Schedule = "seq1f1b",
        num_microbatches: int | None = None,
        num_segments: int = 1,
        segment_sizes: str | Sequence[int] | Mapping[int, Sequence[int]] | None = None,
        model_shape: ModelShape | None = None,
        seq_dim: int = 1,
        arg_rules: Mapping[str, Rule] | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        loss_reduction: str = "mean",
        loss_weight: str | Callable[[Any], float] | None = None,
        scale_grads: bool = True,
        group: Any = None,
        transport: str = "auto",
        timeout: float = 300.0,
        first_step_timeout: float = 1800.0,
        grad_dtype: torch.dtype | None = torch.float32,
        prefetch: int = 1,
        spin_us: float | None = None,
        weights: str = "planned",
        recompute: str | Callable[[Unit], bool] = "none",
        check_recompute: bool = False,
        recompute_blocks: tuple[str, float | Callable[[Unit], float]] | None = None,
        offload: str | os.PathLike[str] | None = None,
        offload_units: str | Callable[[Unit], bool] | None = None,
        shard: tuple[int, int] = (0, 1),
        plan: Plan | str | os.PathLike[str] | None = None,
        unchecked: bool = False,
        embedding: nn.Module | None = None,
    ) -> None:
        joined: RankGroup | None = None
        attempt = last_attempt()
        try:
            schedule, num_microbatches, num_segments, segment_sizes, prefetch = order_of(
                schedule, num_microbatches, num_segments, segment_sizes, prefetch, plan
            )
            modules = modules_of(stage)
            self._options = Options(
                num_microbatches=num_microbatches,
                num_segments=num_segments,
                segment_sizes=segment_sizes,
                model_shape=model_shape,
                seq_dim=seq_dim,
                arg_rules=arg_rules or {},
                loss_fn=loss_fn,
                loss_reduction=loss_reduction,
                loss_weight=loss_weight,
                scale_grads=scale_grads,
                transport=transport,
                timeout=timeout,
                first_step_timeout=first_step_timeout,
                grad_dtype=grad_dtype,
                prefetch=prefetch,
                spin_us=spin_us,
                weights=weights,
                recompute=recompute,
                check_recompute=check_recompute,
                recompute_blocks=recompute_blocks,
                offload=offload,
                offload_units=offload_units,
                shard=shard,
                unchecked=unchecked,
                embedding=embedding,
            )
            self.num_microbatches, self.num_segments, self.seq_dim = num_microbatches, num_segments, seq_dim
            self.shard = shard
            self.device = common_device(modules)
            check_launch(group)
            self._device_edges: DeviceEdges | None = None
            arrival_timeout = max(timeout, first_step_timeout)
            joined = resolve_group(group, transport, timeout=timeout, arrival_timeout=arrival_timeout)
            self._group: RankGroup = joined
            joined.set_limits(timeout, spin_us)
            self._join(modules, schedule)
        except BaseException as error:
            # The other ranks may wait for this one, while all come, while edges open, or in their first step.
            if joined is None:
                withdraw(group, error, attempt)
            elif not isinstance(error, Disagreement):
                joined.fail(f"{type(error).__name__}: {error}")
            if joined is not None and joined is not group:
                joined.close()
            raise
        self._eval_parts: tuple[Any, Any] | None = None  # program and executor
        self._step = 0
        self._known_shapes: set[tuple[bool, int]] = set()
        self._activations: dict[int, Activations] = {}  # by stage, where they were measured
        self._closed = self._running = self._has_had_rows = False
        # Whether loss_fn returns a sum and a divisor, once a training step has told all ranks.
        can_divide = self._options.head is None and self._options.loss_reduction == "mean"
        self._divides: bool | None = None if can_divide else False
        self.last_step: StepRecord | None = None

    # -- public ----------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any = None,
        *,
        target: Any = None,
        kwargs: Mapping[str, Any] | list[dict[str, Any]] | None = None,
        loss_weight: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        segment_sizes: Sequence[Sequence[int]] | None = None,
        plan: PlannedRows | None = None,
    ) -> list[Tensor]:
        """Forward and backward of one batch; adds to ``.grad``.

        Args:
            inputs: the whole batch, a tensor or a tuple (the first stage's positional arguments), or a list of M
                micro-batches. Needed on the first stage's rank, ignored elsewhere.
            target: the whole batch's targets, or a list of M. Needed on the last stage's rank, ignored elsewhere.
            kwargs: keyword arguments of this rank's stages, by ``arg_rules``; or a list of M.
            loss_weight: divide by this global number of counted targets (all micro-batches, all data-parallel ranks)
                instead of by each micro-batch's and M. Gradients are then those of the mean over all of them; under DDP
                or FSDP2 the division of their reduction is undone. The losses returned do not change.
            grad_scaler: scales gradients, not the losses returned. Call its ``unscale_``, ``step`` and ``update`` as
                always, on every rank. If gradients of one rank overflow, all ranks skip the optimizer's step.
            segment_sizes: makes this a step of rows: for every micro-batch the tokens of its own segments, the same on
                every rank. Lengths and numbers of segments may differ between micro-batches, and so may their number
                from step to step; ``inputs``, ``target`` and sliced keyword arguments are lists of them, of one batch
                size. The order is that of the engine's schedule, given by name, for these numbers of segments.
                Gradients are those of the mean over all counted targets of the step (of all micro-batches, on this
                replica), however long the micro-batch of a target is; with ``loss_weight`` as above; with
                ``scale_grads=False`` those of the sum of the losses. An auxiliary loss weighs by its tokens. The
                losses returned are the mean of each micro-batch; with ``loss_reduction="sum"`` nothing changes.
            plan: a plan of :func:`seq1f1b.planning.step_plan.plan_step`, in place of ``segment_sizes``: the step runs
                its rows in its order, with the units that it recomputes or moves. Equal on every rank.
        Returns:
            M losses on the rank of the last stage, [] elsewhere.
        Raises:
            ValueError, TypeError: arguments that break a rule, on the rank that was given them.
            PipelineError: another rank failed, was lost or made no progress.
        """
        if plan is not None and segment_sizes is not None:
            raise ValueError("plan= stands for segment_sizes: give one of them")
        rows = segment_sizes if plan is None else plan.segment_sizes
        if grad_scaler is None or not grad_scaler.is_enabled():
            return self.run(StepArguments(True, inputs, target, kwargs, loss_weight, rows=rows, plan=plan))[0]
        grad_scaler.scale(torch.zeros((), device=self.device))  # a rank without the loss would have no scale
        scale = grad_scaler.get_scale()
        losses, _ = self.run(StepArguments(True, inputs, target, kwargs, loss_weight, scale, rows=rows, plan=plan))
        self._share_overflow()
        return losses

    def eval(
        self,
        inputs: Any = None,
        *,
        target: Any = None,
        kwargs: Mapping[str, Any] | list[dict[str, Any]] | None = None,
        return_outputs: bool = False,
        segment_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        """Forward only, without gradients. Arguments as :meth:`step`; target may be left out.

        Returns:
            M losses on the rank of the last stage ([] elsewhere, and without target); with ``return_outputs`` a pair of
            them and the output of the whole batch, segments and micro-batches merged (None elsewhere); with
            ``segment_sizes`` a list of the micro-batches' outputs.
        """
        with torch.no_grad():
            losses, outputs = self.run(
                StepArguments(False, inputs, target, kwargs, return_outputs=return_outputs, rows=segment_sizes)
            )
            if not return_outputs:
                return losses
            return losses, outputs if outputs is None or segment_sizes is not None else merge(outputs, 0)

    def verify(
        self,
        inputs: Any = None,
        *,
        target: Any = None,
        kwargs: Mapping[str, Any] | list[dict[str, Any]] | None = None,
        loss_weight: float | None = None,
        dtype: torch.dtype | None = None,
        show: bool = True,
    ) -> Verification:
        """Compares a pipeline step with the whole model on the same batch. Arguments as :meth:`step`. Collective.

        The whole model is the stages in a chain, with one segment and one micro-batch at a time. Parameters, gradients,
        buffers, tensors and containers that are attributes of modules, and random state are as before afterwards.
        Hooks on parameters do not run. Stages under DDP or FSDP2, DTensors and ``shard=`` are refused.

        Args:
            dtype: of the whole model; None: float64 where it fits in memory, else the engine's own.
            show: prints the result on rank 0.
        """
        self._check_idle()
        found = verify(self, StepArguments(True, inputs, target, kwargs, loss_weight), dtype)
        if show and self.rank == 0:
            print(found)
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under their modules' own names, including those of a loss that holds the head."""
        seen: set[int] = set()
        for module in self.modules():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def modules(self) -> list[nn.Module]:
        """This rank's stages in ascending order, and a loss that is a module: its shard, or the last stage's."""
        return [without_wrapper(module) for module in self._wrapped_modules()]

    def _wrapped_modules(self) -> list[nn.Module]:
        """The same modules as they were given: under DDP or not."""
        return [module for _, module in self._placed_modules()]

    def _placed_modules(self) -> list[tuple[str, nn.Module]]:
        """The same, each with its place in words."""
        stages = self._stages.items()
        modules = [(f"stage {i}", stage.module) for i, stage in stages if isinstance(stage.module, nn.Module)]
        if self._options.embedding is not None:
            modules.insert(0, ("the embedding", self._options.embedding))
        if (self.has_last or self._options.head is not None) and isinstance(self._options.loss_fn, nn.Module):
            modules.append(("the loss", self._options.loss_fn))
        return modules

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips by one norm over the gradients of all stages. Collective over the pipeline.

        The arithmetic of ``torch.nn.utils.clip_grad_norm_`` on the unsplit model: a norm for each parameter, and the
        norm of these in the model's order. So equal gradients give the same norm, and the same clipped gradients, bit
        for bit, whatever the number of ranks. Two cases differ: norms of 16-bit gradients are taken in float32; where
        ranks share a parameter (FSDP2, tensor parallelism), its norm is that of its DTensor, which depends on the
        number of shards, though not on the number of stages.

        Args:
            norm_type: of the norm; ``math.inf`` or ``"inf"``: the largest absolute value.
            error_if_nonfinite: whether a norm that is not finite is an error, on every rank; else it clips as well.
        Returns:
            The norm before clipping, float32, or float64 where any gradient is; equal on every rank.
        Raises:
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``. Gradients are as before.
        """
        norm_type = float(norm_type)
        counted = self._gradients_in_order(self.tied_elsewhere())
        is_double = any(g.dtype == torch.float64 for _, gradients in counted for g in gradients)
        norms = [(stage, [_norm(g, norm_type) for g in gradients]) for stage, gradients in counted]
        everyones = self._group.all_gather_object((is_double, norms))
        in_order = sorted((entry for _, theirs in everyones for entry in theirs), key=lambda entry: entry[0])
        dtype = torch.float64 if any(theirs for theirs, _ in everyones) else torch.float32
        found = torch.tensor([norm for _, theirs in in_order for norm in theirs], dtype=dtype, device="cpu")
        total = torch.linalg.vector_norm(found, norm_type) if len(found) else found.new_zeros(())
        if error_if_nonfinite and not torch.isfinite(total):
            raise RuntimeError(
                f"the norm of order {norm_type:g} over the gradients of all stages is {float(total)}, which cannot "
                "clip: leave out the optimizer's step, or pass error_if_nonfinite=False"
            )
        for shared in (False, True):  # torch takes DTensors and tensors apart only
            own = [p for p in self.parameters() if hasattr(p.grad, "full_tensor") == shared]
            nn.utils.clip_grads_with_norm_(own, max_norm, total)
        return total

    def _gradients_in_order(self, excluded: set[int]) -> list[tuple[int, list[Tensor]]]:
        """Gradients by stage, the loss as the last one, each parameter's once. Excluded: ids of parameters."""
        parts: list[tuple[int, Any]] = [(self.rank - self.num_ranks, self._options.embedding)]
        parts += [(index, stage.module) for index, stage in self._stages.items()]
        if self.has_last or self._options.head is not None:
            parts.append(
                (self.num_stages + (self.rank if self._options.head is not None else 0), self._options.loss_fn)
            )
        seen, found = set(excluded), []
        for index, part in parts:
            parameters = part.parameters() if isinstance(part, nn.Module) else ()
            gradients = []
            for parameter in parameters:
                if id(parameter) not in seen and parameter.grad is not None and parameter.grad.numel():
                    gradients.append(parameter.grad)
                seen.add(id(parameter))
            found.append((index, gradients))
        return found

    def tied_elsewhere(self) -> set[int]:
        """Ids of this rank's parameters whose first copy another stage holds, by the attribute ``tied_parameters``."""
        self._tied.meet()
        return self._tied.counted_elsewhere()

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks of the pipeline, by rank. Collective; for small ones, between steps.

        Args:
            value: None, bool, int, float, str, bytes, or lists, tuples and dicts of them: what a peer sends is data.
        Raises:
            TypeError: the value is something else.
        """
        return self._group.all_gather_object(value)

    def whole_vocabulary(self) -> dict[str, Tensor]:
        """The parameters of layers whose vocabulary is spread, whole, by name, on the last stage's rank. Collective.

        Each once; empty on other ranks.
        """
        shards = [shard for shard in (self._options.embedding_shard, self._options.head) if shard is not None]
        return join_shards(shards, self._group, self.schedule.rank_of_stage[-1])

    def fail(self, reason: str) -> None:
        """Gives up between two steps: what the other ranks do or wait for ends with a PipelineError of this reason."""
        if not self._closed:
            self._group.fail(reason)
            self._group.end_step(failed=True)

    def report(self, gather: bool = False) -> Any:
        """What the last step measured, beside what the plan says.

        Args:
            gather: collective: reports of all ranks, the makespan, and its simulation from measured durations.
        Returns:
            :class:`seq1f1b.runtime.report.Report`, or with ``gather`` a :class:`seq1f1b.runtime.report.PipelineReport`.
        """
        return make_report(
            self.last_step,
            rank=self.rank,
            schedule=self.schedule,
            cache=self._cache,
            edges=self.edges,
            trained={index: stage.trained_weights for index, stage in self._stages.items()},
            gather=self._group.all_gather_object if gather else None,
        )

    def close(self) -> None:
        """Leaves the pipeline's transports. The engine is unusable afterwards."""
        self._closed = True
        self._executor, self._eval_parts = None, None
        self._row_orders.clear()
        if self._tier is not None:
            self._tier.close()
        self._ends.clear()
        if self._device_edges is not None:
            self._device_edges.close()
        self._group.close()

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _join(self, modules: list[nn.Module], schedule: str | Schedule) -> None:
        """Takes this rank's place in the pipeline: its stages, the memory they share, and its edges."""
        self.rank, self.num_ranks = self._group.rank, self._group.size
        self.schedule = self._make_schedule(schedule, len(modules))
        self._agreement: dict[str, tuple[str, str]] | None = agreement(self._options, self.schedule, schedule)
        if not self._group.is_thread:  # engines of threads may be made one after the other: they meet in a step
            self._agree()
        self.num_stages = self.schedule.num_stages
        self.stages = [i for i, rank in enumerate(self.schedule.rank_of_stage) if rank == self.rank]
        if len(self.stages) != len(modules):
            raise ValueError(
                f"rank {self.rank} holds stages {self.stages} in this schedule, {len(modules)} modules were given"
            )
        for shard in (self._options.head, self._options.embedding_shard):
            if shard is not None:
                shard.check_place(self.rank, self.num_ranks)
        self.has_first, self.has_last = 0 in self.stages, self.num_stages - 1 in self.stages

        self._tier = self._make_tier()
        self._stages = self._make_stages(modules)
        placed = [(place, without_wrapper(module)) for place, module in self._placed_modules()]
        self._tied = TiedParameters(placed, self._group)
        self._cache = _C.kv_cache_create()
        self._ends: dict[Edge, Any] = {}
        self._program = self._lower(self.schedule.handle)
        self._connect()
        self._executor = self._make_executor(self._program)
        self._row_orders = RowOrders(schedule if isinstance(schedule, str) else None, self.rank, self.num_ranks)
        if not self._group.is_thread:
            self._group.begin()

    def _blocks(self, module: Any, index: int) -> Blocks | None:
        """The blocks of a stage that units compute again."""
        chosen = self._options.recompute_blocks
        return None if chosen is None else Blocks(without_wrapper(module), index, *chosen)

    def _make_stages(self, modules: Sequence[Any], *, is_whole: bool = False) -> dict[int, Stage]:
        return {
            index: Stage(
                module,
                index,
                num_stages=self.num_stages,
                first_cells=self.schedule.first_cells,
                loss_fn=self._options.loss_fn,
                device=self.device,
                order=self.schedule.ranks[self.rank],
                unchecked=self._options.unchecked,
                is_whole=is_whole,
                in_threads=self._group.is_thread,
                recomputes=has_units(self.schedule, "R"),
                tier=self._tier,
                blocks=self._blocks(module, index),
                spreads_vocabulary=self._options.head is not None,
            )
            for index, module in zip(self.stages, modules, strict=True)
        }

    def _make_tier(self) -> Tier | None:
        if self._options.offload is None:
            return None
        if self.device.type != "cpu":
            raise ValueError(f"offload= moves what stages on the CPU save, and this one is on {self.device}")
        return Tier(self._options.offload, self._group.group, self.num_microbatches * self.num_segments)

    def _agree(self) -> None:
        """Raises, on every rank, unless all were given the same. Collective; once, but again after a failure."""
        if self._agreement is not None:
            check_agreement(self._group.all_gather_object(self._agreement))
            self._agreement = None

    def _make_schedule(self, schedule: str | Schedule, stages_per_rank: int) -> Schedule:
        if isinstance(schedule, str):
            schedule = build_schedule(
                schedule,
                num_ranks=self.num_ranks,
                num_microbatches=self.num_microbatches,
                num_segments=self.num_segments,
                stages_per_rank=stages_per_rank,
            )
        if schedule.rows is not None:
            raise ValueError("the schedule is one of rows: give its name, and the sizes of the rows to every step")
        expected = (self.num_ranks, self.num_microbatches, self.num_segments)
        found = (schedule.num_ranks, schedule.num_microbatches, schedule.num_segments)
        if found != expected:
            raise ValueError(
                f"the schedule is for (ranks, micro-batches, segments) = {found}, the engine has {expected}: "
                "the group's size and num_microbatches, num_segments must agree with it"
            )
        schedule.check()
        return with_options(schedule, self._options)

    def _connect(self) -> None:
        """Opens every edge; all ranks in the same order."""
        edges, is_receiver = [], {}
        for source, destination, source_rank, destination_rank, channel, *_ in _C.program_edges(self._program):
            edge, text = (
                Edge(source, destination, channel),
                f"{_CHANNELS[channel]} of stage {source} to stage {destination}",
            )
            if self.rank in (source_rank, destination_rank):
                receiver = self.rank == destination_rank
                peer = source_rank if receiver else destination_rank
                is_receiver[edge] = receiver
                self._ends[edge] = self._group.edge_end(edge, peer, receiver, text)
                transport = self._options.device_transport or self._group.transport_to(peer)
                edges.append(EdgeReport(source, destination, peer, transport))
        self.edges = tuple(edges)
        if self._options.device_transport is not None:
            self._device_edges = self._device_edges_class(self._options.device_transport, self._group, self.device)
            self._ends = self._device_edges.open(self._ends, is_receiver)

    def _lower(self, schedule: Any) -> Any:
        return _C.program_lower(schedule, self._options.prefetch, self._options.device_transport is not None)

    def _make_executor(self, program: Any) -> Any:
        ends = [self._ends.get(Edge(edge[0], edge[1], edge[4])) for edge in _C.program_edges(program)]
        executor = _C.executor_create(
            program,
            self.rank,
            self._group.group,
            self._cache,
            ends,
            self._group.is_thread,
            _DTYPE_CODES,
            self._options.weights == "fill",
            leave_place,
        )
        if self._device_edges is not None:
            self._device_edges.set_on(executor)
        if self._tier is not None:
            _C.executor_set_tier(executor, self._tier.handle)
        return executor

    def _make_parts(self, schedule: Schedule, training: bool) -> tuple[Any, Any]:
        """The program of an order, and its executor."""
        program = self._lower(schedule.handle if training else _C.schedule_forward_only(schedule.handle))
        return program, self._make_executor(program)

    def _complete(self, schedule: Schedule) -> Schedule:
        """The order of a step of rows, with what the engine's options add. It runs over the edges that are open."""
        found = (schedule.num_ranks, schedule.rank_of_stage)
        expected = (self.num_ranks, self.schedule.rank_of_stage)
        if found != expected:
            raise ValueError(f"the plan is for (ranks, ranks of the stages) = {found}, the engine has {expected}")
        return with_options(schedule, self._options)

    def _order_of(self, arguments: StepArguments) -> RankOrder:
        """The order of a step."""
        if arguments.rows is not None:
            check_rows(arguments.rows, self.shard[1])
            return self._row_orders.find(
                arguments.rows, arguments.plan, arguments.training, self._stages, self._complete, self._make_parts
            )
        if arguments.training:
            return RankOrder(self.schedule, self._stages, self._program, self._executor)
        if self._eval_parts is None:
            self._eval_parts = self._make_parts(self.schedule, training=False)
        return RankOrder(self.schedule, self._stages, *self._eval_parts)

    # -- a step ----------------------------------------------------------------------------------------------------

    def sizes_of(self, length: int, documents: Sequence[int] | None = None) -> list[int]:
        """Segment sizes for a sequence of this many tokens; ``documents``: lengths of its packed documents."""
        return self._options.sizes_of(length, documents)

    def run(self, arguments: StepArguments) -> tuple[list[Tensor], list[Any] | None]:
        """Runs :meth:`step` or :meth:`eval`; returns losses, and the outputs of the M micro-batches if asked for."""
        self._check_idle()
        self._running = True
        entered = None  # the executor, once the step has begun
        try:
            order = self._order_of(arguments)
            step = Step(
                replace(arguments, divides=self._divides),
                self._options,
                order.stages,
                self.num_stages,
                self.device,
                self._enter_shape,
                self.rank,
                *self._shard_steps(arguments.training, order.schedule),
            )
            program, executor = order.program, order.executor
            if self._tier is not None:
                self._tier.num_cells = order.schedule.first_cells[-1]
            self._set_limits(shape_known=False)  # until the length is learnt
            step.prepare()
            self._step = self._group.begin_step(step.training)
            self._agree()
            if arguments.rows is not None or self._has_had_rows:  # plain steps between those of rows are compared, too
                check_equal_rows(self._group, arguments.rows, arguments.plan)
                self._has_had_rows = True
            samples = self._tied.meet(lambda: self._samples(arguments))
            if self.has_last:
                look_at_targets(samples)
            place_views = self._group.place_views
            if self._device_edges is not None:
                self._device_edges.begin_step(self._group.timeout_s)
                place_views = self._device_edges.place_views()
            run_unit = self._choose_run(step)
            entered = executor
            gradients = self._step_gradients(arguments.gradient_divisor) if step.training else None
            start = time.perf_counter()
            try:
                with inside_step(), step_on(self.device), step.changed_layers():
                    _C.executor_step(
                        executor,
                        self._step,
                        step.training,
                        step.length,
                        step.sizes,
                        run_unit,
                        step.fill,
                        step.learn,
                        place_views,
                    )
                elapsed = time.perf_counter() - start
                factor = self._divide(step) if gradients is not None and self._divides is not False else 1.0
                step.propagate(factor)
                if gradients is not None:
                    self._tied.end_step(gradients)
                    gradients.end(factor)
            except BaseException:
                if gradients is not None:
                    gradients.fail()
                raise
            finally:
                if self._tier is not None:
                    self._tier.reset()
                step.end()
            self._group.end_step(failed=False)
        except BaseException as error:
            explained = self._end_failed_step(error, entered)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._running = False
        self._known_shapes.add((step.training, step.length))
        self._activations |= step.activations()
        self.last_step = StepRecord(
            step.training,
            self._step,
            step.sizes,
            elapsed,
            program,
            executor,
            self.stages,
            self.num_stages,
            dict(self._activations),
            step.deferred_weights(),
            step.moved_bytes(),
            step.blocks_again(),
            step.logit_bytes(),
            step.length,
            order.schedule if arguments.rows is not None else None,
        )
        return step.losses(), step.outputs() if arguments.return_outputs else None

    def _divide(self, step: Step) -> float:
        """By what the gradients of a step are multiplied; the rank of the last stage knows it. Collective."""
        mine = step.divides()
        everyones = [mine] if self.num_ranks == 1 else self._group.all_gather_object(mine)
        last = everyones[self.schedule.rank_of_stage[-1]]
        self._divides = last[0]
        if not self._divides:
            return 1.0
        refused = ""
        if not self._options.scale_grads:
            refused = "scale_grads=False, as in torch's schedules, leaves gradients undivided"
        elif any(has_auxiliary for *_, has_auxiliary in everyones):
            refused = "an auxiliary loss (add_loss) has no part in that divisor"
        if refused:
            raise Disagreement(
                f"loss_fn returned its sum and its divisor, and {refused}: return one loss, and count its targets by "
                "loss_weight="
            )
        return float(last[1])

    def _samples(self, arguments: StepArguments) -> list[Any]:
        """Some of this rank's tokens and targets, where the loss cannot be what shifts them."""
        if self.num_segments == 1 and arguments.rows is None:
            return [None, None]
        tokens = sample_of(arguments.inputs, self.seq_dim) if self.has_first else None
        return [tokens, sample_of(arguments.target, self.seq_dim) if self.has_last else None]

    def _shard_steps(self, training: bool, schedule: Schedule) -> tuple[HeadStep | None, EmbeddingStep | None]:
        """What the shards of the output layer and of the embedding do in a step; None for a layer that is whole."""
        options, order, first = self._options, schedule.ranks[self.rank], schedule.first_cells
        head = embedding = None
        if options.head is not None:
            assert isinstance(options.loss_fn, nn.Module)
            head = HeadStep(
                options.loss_fn,
                self.schedule.rank_of_stage[-1],
                first_cells=first,
                training=training,
                is_mean=options.loss_reduction == "mean",
                order=order,
            )
        if options.embedding is not None:
            embedding = EmbeddingStep(options.embedding, first_cells=first, training=training, order=order)
        return head, embedding

    def _check_idle(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._running:
            raise RuntimeError("the engine is inside a step already: a stage or a loss called step or eval again")

    def _choose_run(self, step: Step) -> Callable[..., Any]:
        """Returns what the executor calls for every unit of a step."""
        return step.choose_run(host_messages=self._device_edges is None)

    def _share_overflow(self) -> None:
        """A gradient that is not finite becomes one on every rank: else only its stage would skip the step."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        finite = all(bool(torch.isfinite(g).all()) for g in gradients)
        if not all(self._group.all_gather_object(finite)) and finite and gradients:
            gradients[0].fill_(float("inf"))

    def _set_limits(self, shape_known: bool) -> None:
        """Seconds without a peer's progress. A peer may compile for minutes while a shape is new."""
        options = self._options
        limit = options.timeout if shape_known else max(options.timeout, options.first_step_timeout)
        self._group.set_limits(limit, options.spin_us)

    def _enter_shape(self, shape: tuple[bool, int]) -> bool:
        """Called once a step's (training, tokens) are known. Returns whether such a step has run before."""
        is_known = shape in self._known_shapes
        self._set_limits(is_known)
        return is_known

    def _step_gradients(self, divisor: int) -> StepGradients:
        """What a training step does with gradients; DDP and FSDP2 own those of the modules under them."""
        dtype, wide = self._options.grad_dtype, set[int]()
        if dtype is not None:
            wide = set().union(*(growing_wide(m) for m in self._wrapped_modules() if data_parallel(m) is None))
        tied = {id(p): p for p in self._tied.parameters()}  # a stage may list one that it has not registered
        is_apart = self._divides is not False
        needs_all = bool(wide) or divisor > 1 or is_apart
        parameters = ({id(p): p for p in self.parameters()} if needs_all else {}) | tied
        return StepGradients(list(parameters.values()), wide, dtype, tied, divisor, is_apart=is_apart)

    def _end_failed_step(self, error: BaseException, executor: Any) -> BaseException:
        """Ends the step on every rank, and gives the error its place: stage and unit.

        The next step may try again: it waits until every rank has left this one. Gradients are undefined.
        """
        if isinstance(error, Disagreement):  # every rank raises it and leaves the step
            self._group.end_step(failed=False)
            return error
        unit = _last_unit(executor)
        explained = error
        if not isinstance(error, _C.PipelineError):
            explained = _explain(error, unit, self._hint(error, executor))
            place = f"{unit}: " if unit else ""
            self._group.fail(f"{place}{type(explained).__name__}: {str(explained).removeprefix(place)}")
        self._group.end_step(failed=True)
        return explained

    def _hint(self, error: BaseException, executor: Any) -> str:
        """What an error in a forward is likely to mean."""
        unit = unit_of(_C.executor_last_unit(executor)) if executor is not None else None
        if (
            unit is None
            or unit.kind != "F"
            or unit.stage == 0
            or not any(text in str(error) for text in _TOKENS_WANTED)
        ):
            return ""
        stage = self._stages[unit.stage]
        if not any(isinstance(part, nn.Embedding) for module in stage.modules for part in module.modules()):
            return ""
        return (
            f". Stage {unit.stage} received hidden states from stage {unit.stage - 1} and treats them as tokens: did "
            "every rank build the whole model? Give each rank the layers of its own stages"
        )


# What torch and Python say where a module that wants tokens, (batch, tokens), gets hidden states.
_TOKENS_WANTED = (
    "for argument #1 'indices'",
    "used as indices must be",
    "values to unpack",
    "one_hot is only applicable",
)


def _last_unit(executor: Any) -> str:
    """The unit at which the executor left the step, with its stage, "" where the step did not begin."""
    if executor is None:
        return ""
    unit = unit_of(_C.executor_last_unit(executor))
    return f"[{unit.stage}]{unit}"


def _explain(error: BaseException, unit: str, hint: str) -> BaseException:
    """The error with its unit in front, and a hint behind it.

    An op of ours that failed raises RuntimeError by way of torch: gives back the kind it failed with.
    """
    failure = _C.take_op_failure()
    if failure is not None and isinstance(error, RuntimeError) and str(failure) in str(error):
        error = failure
    if type(error) is RuntimeError and _IN_PLACE_ON_LEAF in str(error):
        error.args = (
            f"{error} If it is an input of the stage, the stage must work on a copy: x = x * 2 in place of x *= 2",
        )
    if type(error) in (ValueError, TypeError, RuntimeError, IndexError) and unit not in str(error):
        error.args = (f"{unit}: {error}{hint}",)
    return error


def _norm(gradient: Tensor, norm_type: float) -> float:
    """Norm of the whole gradient, also where this rank holds a shard of it (DTensor)."""
    dtype = torch.float32 if gradient.dtype in REDUCED else None
    norm = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
