"""The pipeline engine: trains stages of torch modules under any checked order of units."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b import _C
from seq1f1b.device.device_edges import TRANSPORTS as DEVICE_TRANSPORTS
from seq1f1b.device.device_edges import DeviceEdges
from seq1f1b.device.devices import common_device, move, step_on, through_host
from seq1f1b.ops.attention import check_shard
from seq1f1b.ops.context import inside_step
from seq1f1b.ops.packing import document_lengths
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.planning.search import Plan
from seq1f1b.runtime.data_parallel import data_parallel, without_wrapper
from seq1f1b.runtime.report import EdgeReport, StepRecord, make_report
from seq1f1b.runtime.splitting import (
    Leaves,
    Rule,
    check_count,
    check_rules,
    microbatches,
    sequence_length,
    shard_sizes,
    split_inputs,
    split_kwargs,
    split_sequence,
)
from seq1f1b.runtime.stage import StageRuntime
from seq1f1b.runtime.tied import TiedParameters
from seq1f1b.runtime.weighting import combine, count_targets, make_seeds, shares
from seq1f1b.schedule import Schedule, build_schedule, unit_of
from seq1f1b.transport import DTYPES, RankGroup, resolve_group

__all__ = ["PipelineEngine"]

_REDUCED = (torch.bfloat16, torch.float16)
_DTYPE_CODES: dict[object, int] = {dtype: code for code, dtype in enumerate(DTYPES)}


class PipelineEngine:
    """Runs one rank's part of a pipeline-parallel training step.

    Args:
        stage: the module of this rank; a list where the rank holds several stages, in ascending order of stage. Their
            parameters lie on the CPU or on one CUDA device, to which a step moves its arguments. A middle stage gets
            what the one before returned: a tensor, or a tuple of tensors. Under DDP or FSDP2 (``fully_shard``), over
            ranks that hold the same stage, gradients are reduced once: in the last backward.
            Of parameters that a stage lists in an attribute ``tied_parameters``, a dict by name, other stages hold
            copies under the same name: at a step's end all get the sum of their gradients, and a norm counts it once.
        schedule: a name of :func:`seq1f1b.schedules`, or a :class:`seq1f1b.Schedule` (checked here).
        num_microbatches, num_segments: M and k. A batch is split into M along dimension 0, each of them into k along
            ``seq_dim``.
        segment_sizes: None for an even split; ``"balanced"`` for equal FLOPs (needs ``model_shape``), of the documents
            where a step has a sliced keyword argument ``doc_ids``, on every rank then; k token counts; or, where steps
            differ in length, a mapping from the tokens of a sequence to its k token counts.
        model_shape: of the whole model, for ``"balanced"``.
        arg_rules: for each tensor keyword argument: ``"slice"`` (batch and sequence), ``"replicate"`` (given whole),
            or a callable of the unit (``.microbatch .segment .offset .length``).
        loss_fn: ``loss_fn(output, target)`` -> scalar, called per segment on the last stage. A module that holds
            parameters is run forward and backward at once, so that only one segment's logits are alive.
        loss_reduction: ``"mean"``: a segment weighs by its share of the micro-batch's counted targets; ``"sum"``:
            segments are added.
        loss_weight: counts the targets of a segment; default: elements that are not -100.
        scale_grads: gradients of the mean of the M losses; False: of their sum.
        group: a ProcessGroup, ``LoopbackGroup(P)[rank]``, or None: the default group if there is one, else P = 1.
        transport: ``"auto"``: shared memory between ranks of one host, the process group between hosts; ``"shm"`` or
            ``"c10d"``: that on every edge. Messages of CUDA stages go through host memory; ``"nccl"``, or ``"copy"``
            within a host, leave them on the GPUs: these two have run over stand-ins only, never on a GPU.
            ``engine.edges`` says which one carries each.
        timeout: seconds that a peer may make no progress; ``first_step_timeout`` while a shape is new (compilation).
        grad_dtype: accumulates gradients of 16-bit parameters in this dtype during a step, unless they are under DDP or
            FSDP2; None: in their own.
        prefetch: receive places beyond the peak of live ones.
        spin_us: microseconds of spinning before a wait sleeps; None: 20, or 0 where ranks outnumber cores.
        shard: (rank, size) among ranks that hold the same stage and share every segment's tokens (sequence
            parallelism, :func:`seq1f1b.ulysses_attention`). Each is given whole sequences and runs its part of each
            segment. Losses and gradients are such that their mean over these ranks is that of the whole, as in data
            parallelism: put the stage under DDP or FSDP2 over them.
        plan: a :class:`seq1f1b.planning.search.Plan`, or a file that it wrote: stands for schedule, num_microbatches,
            num_segments and segment_sizes, and for a prefetch below its own. Refused by name where it needs what the
            engine does not do.
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
        loss_weight: Callable[[Any], float] | None = None,
        scale_grads: bool = True,
        group: Any = None,
        transport: str = "auto",
        timeout: float = 300.0,
        first_step_timeout: float = 1800.0,
        grad_dtype: torch.dtype | None = torch.float32,
        prefetch: int = 1,
        spin_us: float | None = None,
        shard: tuple[int, int] = (0, 1),
        plan: Plan | str | os.PathLike[str] | None = None,
    ) -> None:
        if plan is not None:
            schedule, num_microbatches, num_segments, segment_sizes, least = _of_plan(
                plan, (schedule, num_microbatches, num_segments, segment_sizes)
            )
            prefetch = max(prefetch, least)
        if num_microbatches is None:
            raise TypeError("PipelineEngine needs num_microbatches=, or plan=")
        modules: list[nn.Module] = list(stage) if isinstance(stage, Sequence) else [stage]
        for module in modules:
            if not callable(module):
                raise TypeError(f"stage must be a module or a list of modules, got {type(module).__name__}")
        _check_counts(num_microbatches=num_microbatches, num_segments=num_segments, prefetch=prefetch, seq_dim=seq_dim)
        _check_numbers(timeout=timeout, first_step_timeout=first_step_timeout, spin_us=spin_us)
        _check_choices(schedule, loss_fn, loss_weight, grad_dtype, transport)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is {loss_reduction!r}, must be 'mean' or 'sum'")
        check_rules({}, arg_rules or {})
        self.num_microbatches, self.num_segments, self.seq_dim = num_microbatches, num_segments, seq_dim
        self.shard = check_shard(shard)
        self._check_sizes_argument(segment_sizes, model_shape)
        self._segment_sizes, self._model_shape = segment_sizes, model_shape
        self._arg_rules = dict(arg_rules or {})
        self._loss_fn, self._loss_reduction, self._loss_weight = loss_fn, loss_reduction, loss_weight
        self._scale_grads = scale_grads
        self._timeout, self._first_timeout, self._spin_us = timeout, max(timeout, first_step_timeout), spin_us
        self._grad_dtype, self._prefetch = grad_dtype, prefetch
        self.device = common_device(modules)

        self._device_transport = transport if transport in DEVICE_TRANSPORTS else None
        self._device_edges: DeviceEdges | None = None
        self._group: RankGroup = resolve_group(group, transport)
        try:
            self._join(modules, schedule)
        except BaseException as error:
            # Peers for which all was right wait for this rank, while edges open or in their first step.
            self._group.fail(f"{type(error).__name__}: {error}")
            if self._group is not group:
                self._group.close()
            raise
        self._eval_program: Any = None
        self._eval_executor: Any = None
        self._step = 0
        self._known_shapes: set[Any] = set()
        self._activations: dict[int, tuple[float, int]] = {}  # bytes per token and at the peak, by stage
        self._closed = self._running = False
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
    ) -> list[Tensor]:
        """Forward and backward of one batch; adds to ``.grad``.

        Args:
            inputs: the whole batch, a tensor or a tuple (the first stage's positional arguments), or a list of M
                micro-batches. Needed on the first stage's rank, ignored elsewhere.
            target: the whole batch's targets, or a list of M. Needed on the last stage's rank, ignored elsewhere.
            kwargs: keyword arguments of this rank's stages, by ``arg_rules``; or a list of M.
            loss_weight: divide by this global number of counted targets (all micro-batches, all data-parallel ranks)
                instead of by each micro-batch's and M. Gradients are then those of the mean over all of them: under DDP
                or FSDP2 what the reduction divides by is made up for. The losses returned are not changed by it.
            grad_scaler: scales gradients, not the losses returned; its ``unscale_``, ``step`` and ``update`` are called
                as always, on every rank. Where gradients of one rank overflow, all ranks skip the optimizer's step.
        Returns:
            M losses on the rank of the last stage, [] elsewhere.
        Raises:
            ValueError, TypeError: arguments that break a rule, on the rank that was given them.
            PipelineError: another rank failed, was lost or made no progress.
        """
        if grad_scaler is None or not grad_scaler.is_enabled():
            return self.run(True, inputs, target, kwargs, loss_weight=loss_weight)[0]
        grad_scaler.scale(torch.zeros((), device=self.device))  # a rank without the loss would have no scale
        scale = grad_scaler.get_scale()
        losses, _ = self.run(True, inputs, target, kwargs, loss_weight=loss_weight, gradient_scale=scale)
        self._share_overflow()
        return losses

    def eval(
        self,
        inputs: Any = None,
        *,
        target: Any = None,
        kwargs: Mapping[str, Any] | list[dict[str, Any]] | None = None,
        return_outputs: bool = False,
    ) -> Any:
        """Forward only, without gradients. Arguments as :meth:`step`; target may be left out.

        Returns:
            M losses on the rank of the last stage ([] elsewhere, and without target); with ``return_outputs`` a pair of
            them and the output of the whole batch, segments and micro-batches merged (None elsewhere).
        """
        with torch.no_grad():
            losses, outputs = self.run(False, inputs, target, kwargs, return_outputs=return_outputs)
            if not return_outputs:
                return losses
            return losses, None if outputs is None else _merge(outputs, 0)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank, each once."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank under their modules' own names, those of a loss that holds the head included."""
        seen: set[int] = set()
        for module in self.modules():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def modules(self) -> list[nn.Module]:
        """This rank's stages in ascending order, and on the last stage's rank a loss that holds parameters."""
        return [without_wrapper(module) for module in self._wrapped_modules()]

    def _wrapped_modules(self) -> list[nn.Module]:
        """As they were given: under DDP or not."""
        modules = [r.module for r in self._runtimes.values() if isinstance(r.module, nn.Module)]
        if self.has_last and isinstance(self._loss_fn, nn.Module):
            modules.append(self._loss_fn)
        return modules

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clips by one norm over the gradients of all stages. Collective over the pipeline.

        Returns:
            The norm before clipping, equal on every rank.
        """
        elsewhere = self.tied_elsewhere()
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        counted = [p.grad for p in self.parameters() if p.grad is not None and id(p) not in elsewhere]
        if norm_type == float("inf"):
            local = max((_norm(g, norm_type) for g in counted if g.numel()), default=0.0)
            total = max(self._group.all_gather_object(local))
        else:
            power = sum(_norm(g, norm_type) ** norm_type for g in counted)
            # Summed in rank order on every rank, so that all scale by the same number.
            total = sum(self._group.all_gather_object(power)) ** (1.0 / norm_type)
        scale = max_norm / (total + 1e-6)
        if scale < 1.0 or total != total:
            for gradient in gradients:
                gradient.mul_(scale)
        return torch.tensor(total, dtype=torch.float64)

    def tied_elsewhere(self) -> set[int]:
        """Ids of this rank's parameters whose first copy another stage holds, by the attribute ``tied_parameters``."""
        self._tied.meet()
        return self._tied.counted_elsewhere()

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks of the pipeline, by rank. Collective; for small ones, between steps."""
        return self._group.all_gather_object(value)

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
            gather=self._group.all_gather_object if gather else None,
        )

    def close(self) -> None:
        """Leaves the pipeline's transports. The engine is unusable afterwards."""
        self._closed = True
        self._executor = self._eval_executor = None
        self._ends.clear()
        if self._device_edges is not None:
            self._device_edges.close()
        self._group.close()

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _join(self, modules: list[nn.Module], schedule: str | Schedule) -> None:
        """Takes this rank's place in the pipeline: its stages, the memory they share, and its edges."""
        self.rank, self.num_ranks = self._group.rank, self._group.size
        self.schedule = self._make_schedule(schedule, len(modules))
        self.num_stages = self.schedule.num_stages
        self.stages = [i for i, rank in enumerate(self.schedule.rank_of_stage) if rank == self.rank]
        if len(self.stages) != len(modules):
            raise ValueError(
                f"rank {self.rank} holds stages {self.stages} in this schedule, {len(modules)} modules were given"
            )
        self.has_first, self.has_last = 0 in self.stages, self.num_stages - 1 in self.stages

        self._thread_scope = self._group.is_thread
        self._runtimes = {
            index: StageRuntime(
                module,
                index,
                num_stages=self.num_stages,
                num_segments=self.num_segments,
                loss_fn=self._loss_fn,
                device=self.device,
                thread_scope=self._thread_scope,
                order=self.schedule.ranks[self.rank],
            )
            for index, module in zip(self.stages, modules, strict=True)
        }
        for index, runtime in self._runtimes.items():
            runtime.previous = self._runtimes.get(index - 1)
            runtime.following = self._runtimes.get(index + 1)
        self._tied = TiedParameters(self.modules(), self._group)
        self._cache = _C.kv_cache_create()
        self._ends: dict[tuple[int, int], Any] = {}
        self._program = self._lower(self.schedule.handle)
        self._connect()
        self._executor = self._make_executor(self._program)

    def _check_sizes_argument(
        self, sizes: str | Sequence[int] | Mapping[int, Sequence[int]] | None, shape: ModelShape | None
    ) -> None:
        if isinstance(sizes, str):
            if sizes != "balanced":
                raise ValueError(f"segment_sizes is {sizes!r}; it must be None, 'balanced' or a list of token counts")
            if shape is None:
                raise ValueError("segment_sizes='balanced' needs model_shape=seq1f1b.ModelShape(...)")
            partition_sequence(self.num_segments, self.num_segments, model=shape)  # raises unless the shape is sound
        elif isinstance(sizes, Mapping):
            for length, of_length in sizes.items():
                if isinstance(of_length, str) or not isinstance(of_length, Sequence):
                    raise TypeError(f"segment_sizes[{length}] must be a list, got {type(of_length).__name__}")
                self._check_sizes_argument(of_length, shape)
                if sum(of_length) != length:
                    raise ValueError(f"segment_sizes[{length}] sum to {sum(of_length)}, must sum to {length}")
        elif sizes is not None:
            if not isinstance(sizes, Sequence):
                raise TypeError(f"segment_sizes must be None, 'balanced' or a list, got {type(sizes).__name__}")
            if len(sizes) != self.num_segments:
                raise ValueError(f"segment_sizes has {len(sizes)} entries, num_segments is {self.num_segments}")
            for s, size in enumerate(sizes):
                if not isinstance(size, int) or isinstance(size, bool):
                    raise TypeError(f"segment_sizes[{s}] is {size!r}, must be an int")
                if size < 1:
                    raise ValueError(f"segment_sizes[{s}] is {size}, must be at least 1")

    def _make_schedule(self, schedule: str | Schedule, stages_per_rank: int) -> Schedule:
        if isinstance(schedule, str):
            schedule = build_schedule(
                schedule,
                num_ranks=self.num_ranks,
                num_microbatches=self.num_microbatches,
                num_segments=self.num_segments,
                stages_per_rank=stages_per_rank,
            )
        expected = (self.num_ranks, self.num_microbatches, self.num_segments)
        found = (schedule.num_ranks, schedule.num_microbatches, schedule.num_segments)
        if found != expected:
            raise ValueError(
                f"the schedule is for (ranks, micro-batches, segments) = {found}, the engine has {expected}: "
                "the group's size and num_microbatches, num_segments must agree with it"
            )
        split = next((u for rank in schedule.ranks for u in rank if u.kind in ("I", "W")), None)
        if split is not None:
            raise _C.ScheduleError(
                f"the engine does not run split backward yet: the order has {split} of pass {split.kind}"
            )
        schedule.check()
        return schedule

    def _connect(self) -> None:
        """Opens every edge; all ranks in the same order."""
        edges, is_receiver = [], {}
        for source, destination, source_rank, destination_rank, *_ in _C.program_edges(self._program):
            kind = "gradients" if destination < source else "activations"
            text = f"{kind} of stage {source} to stage {destination}"
            if self.rank in (source_rank, destination_rank):
                receiver = self.rank == destination_rank
                peer = source_rank if receiver else destination_rank
                is_receiver[source, destination] = receiver
                self._ends[source, destination] = self._group.edge_end(source, destination, peer, receiver, text)
                transport = self._device_transport or self._group.transport_to(peer)
                edges.append(EdgeReport(source, destination, peer, transport))
        self.edges = tuple(edges)
        if self._device_transport is not None:
            self._device_edges = self._device_edges_class(self._device_transport, self._group, self.device)
            self._ends = self._device_edges.open(self._ends, is_receiver)

    def _lower(self, schedule: Any) -> Any:
        return _C.program_lower(schedule, self._prefetch, self._device_transport is not None)

    def _make_executor(self, program: Any) -> Any:
        ends = [self._ends.get((edge[0], edge[1])) for edge in _C.program_edges(program)]
        executor = _C.executor_create(
            program, self.rank, self._group.group, self._cache, ends, self._thread_scope, _DTYPE_CODES
        )
        if self._device_edges is not None:
            self._device_edges.set_on(executor)
        return executor

    def _eval_parts(self) -> tuple[Any, Any]:
        if self._eval_executor is None:
            self._eval_program = self._lower(_C.schedule_forward_only(self.schedule.handle))
            self._eval_executor = self._make_executor(self._eval_program)
        return self._eval_program, self._eval_executor

    # -- a step ----------------------------------------------------------------------------------------------------

    def sizes_of(self, length: int, documents: Sequence[int] | None = None) -> list[int]:
        """Segment sizes for a sequence of this many tokens. documents: of packed rows, for ``"balanced"``."""
        if length < self.num_segments:
            raise ValueError(f"a sequence of {length} tokens has fewer than num_segments = {self.num_segments}")
        sizes = self._choose_sizes(length, documents)
        num_shards = self.shard[1]
        for s, size in enumerate(sizes):
            if size % num_shards:
                raise ValueError(
                    f"segment {s} has {size} tokens, which {num_shards} shards do not divide: pad the sequence of "
                    f"{length} tokens to a multiple of {num_shards}, and give segment_sizes of "
                    f"partition_sequence(multiple_of={num_shards})"
                )
        return sizes

    def _choose_sizes(self, length: int, documents: Sequence[int] | None) -> list[int]:
        k, num_shards = self.num_segments, self.shard[1]
        if self._segment_sizes is None:
            return partition_sequence(length, k, strategy="even", multiple_of=num_shards)
        if isinstance(self._segment_sizes, str):
            return partition_sequence(length, k, model=self._model_shape, documents=documents, multiple_of=num_shards)
        if isinstance(self._segment_sizes, Mapping):
            if length not in self._segment_sizes:
                known = ", ".join(map(str, sorted(self._segment_sizes)))
                raise ValueError(f"segment_sizes are for {known} tokens, the sequence has {length}: pad it")
            return list(self._segment_sizes[length])
        sizes = list(self._segment_sizes)
        if sum(sizes) != length:
            raise ValueError(f"segment_sizes sum to {sum(sizes)} tokens, the sequence has {length}")
        return sizes

    def run(
        self,
        training: bool,
        inputs: Any,
        target: Any,
        kwargs: Any,
        *,
        loss_weight: float | None = None,
        gradient_scale: float = 1.0,
        loss_kwargs: Mapping[str, Any] | None = None,
        return_outputs: bool = False,
    ) -> tuple[list[Tensor], list[Any] | None]:
        """What :meth:`step` and :meth:`eval` share: losses, and where asked for the outputs of the M micro-batches."""
        if self._closed:
            raise RuntimeError("the engine is closed")
        if self._running:
            raise RuntimeError("the engine is inside a step already: a stage or a loss called step or eval again")
        self._running = True
        entered = None  # the executor, once the step has begun
        batch = _Batch(
            self, training, inputs, target, kwargs, loss_weight, gradient_scale, loss_kwargs or {}, return_outputs
        )
        try:
            program, executor = (self._program, self._executor) if training else self._eval_parts()
            batch.prepare()
            self._step = self._group.begin_step()
            self._tied.meet()
            accumulators = self._enter_grad_dtype() if training else []
            if training:
                self._tied.begin_step()
            forward, backward = self._forward, self._backward
            if torch.is_autocast_enabled(self.device.type):
                backward = self._backward_without_autocast
            place_views = self._group.place_views
            if self._device_edges is not None:
                self._device_edges.begin_step(self._group.timeout_s)
                place_views = self._device_edges.place_views()
            elif self.device.type != "cpu":
                forward, backward = (through_host(run, self.device) for run in (forward, backward))
            entered = executor
            start = time.perf_counter()
            try:
                with inside_step(), step_on(self.device):
                    _C.executor_step(
                        executor,
                        self._step,
                        training,
                        batch.length,
                        batch.sizes,
                        forward,
                        backward,
                        batch.learn,
                        place_views,
                    )
                elapsed = time.perf_counter() - start
                batch.leaves.propagate()
                if training:
                    self._tied.end_step()
            finally:
                self._leave_grad_dtype(accumulators)
                for runtime in self._runtimes.values():
                    runtime.end_step()
            self._group.end_step(failed=False)
        except BaseException as error:
            explained = self._end_failed_step(error, entered)
            if explained is error:
                raise
            raise explained from error
        finally:
            self._running = False
        self._known_shapes.add(batch.shape_key)
        for index, runtime in self._runtimes.items():
            if runtime.saved_tokens:
                self._activations[index] = runtime.saved_bytes / runtime.saved_tokens, runtime.peak_saved_bytes
        self.last_step = StepRecord(
            training, self._step, batch.sizes, elapsed, program, executor, self.stages, dict(self._activations)
        )
        return batch.losses(), batch.outputs() if return_outputs else None

    def _forward(self, stage: int, m: int, s: int, offset: int, length: int, received: Any) -> Any:
        return self._runtimes[stage].forward(m, s, length, received)

    def _backward(self, stage: int, m: int, s: int, offset: int, length: int, received: Any) -> Any:
        return self._runtimes[stage].backward(m, s, received)

    def _backward_without_autocast(self, stage: int, m: int, s: int, offset: int, length: int, received: Any) -> Any:
        with torch.autocast(self.device.type, enabled=False):
            return self._runtimes[stage].backward(m, s, received)

    def _share_overflow(self) -> None:
        """A gradient that is not finite becomes one on every rank: else only its stage would skip the step."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        finite = all(bool(torch.isfinite(g).all()) for g in gradients)
        if not all(self._group.all_gather_object(finite)) and finite and gradients:
            gradients[0].fill_(float("inf"))

    def _set_limits(self, shape_known: bool) -> None:
        """Seconds without a peer's progress. A peer may compile for minutes while a shape is new."""
        self._group.set_limits(self._timeout if shape_known else self._first_timeout, self._spin_us)

    def _enter_grad_dtype(self) -> list[nn.Parameter]:
        """16-bit parameters are added to M k times in a step: their gradients grow in a wider dtype meanwhile."""
        if self._grad_dtype is None:
            return []
        own = [module for module in self._wrapped_modules() if data_parallel(module) is None]
        parameters = {id(p): p for module in own for p in module.parameters()}.values()
        changed = [p for p in parameters if p.requires_grad and p.dtype in _REDUCED]
        for parameter in changed:
            _set_grad_dtype(parameter, self._grad_dtype)
        return changed

    def _leave_grad_dtype(self, changed: list[nn.Parameter]) -> None:
        for parameter in changed:
            _set_grad_dtype(parameter, parameter.dtype)

    def _end_failed_step(self, error: BaseException, executor: Any) -> BaseException:
        """Ends the step on every rank, and gives the error its place: stage and unit.

        The next step may try again: it waits until every rank has left this one. Gradients are undefined.
        """
        unit = _last_unit(executor)
        explained = error
        if not isinstance(error, _C.PipelineError):
            explained = _explain(error, unit)
            place = f"{unit}: " if unit else ""
            self._group.fail(f"{place}{type(explained).__name__}: {str(explained).removeprefix(place)}")
        for runtime in self._runtimes.values():
            runtime.begin_step(training=False)
        self._group.end_step(failed=True)
        return explained


def _last_unit(executor: Any) -> str:
    """The unit at which the executor left the step, with its stage, "" where the step did not begin."""
    if executor is None:
        return ""
    unit = unit_of(_C.executor_last_unit(executor))
    return f"[{unit.stage}]{unit}"


def _explain(error: BaseException, unit: str) -> BaseException:
    """The error with its unit in front.

    An op of ours that failed raises RuntimeError by way of torch: gives back the kind it failed with.
    """
    failure = _C.take_op_failure()
    if failure is not None and isinstance(error, RuntimeError) and str(failure) in str(error):
        error = failure
    if type(error) in (ValueError, TypeError, RuntimeError) and unit not in str(error):
        error.args = (f"{unit}: {error}",)
    return error


class _Batch:
    """One step's arguments, split for this rank's units once the sequence length is known."""

    def __init__(
        self,
        engine: PipelineEngine,
        training: bool,
        inputs: Any,
        target: Any,
        kwargs: Any,
        loss_weight: float | None,
        gradient_scale: float,
        loss_kwargs: Mapping[str, Any],
        keep_outputs: bool,
    ) -> None:
        self._engine, self._training = engine, training
        if engine.device.type != "cpu":
            inputs, target, kwargs = (move(value, engine.device) for value in (inputs, target, kwargs))
        self._inputs, self._target, self._kwargs = inputs, target, kwargs
        self._global_count, self._gradient_scale, self._keep_outputs = loss_weight, gradient_scale, keep_outputs
        self._loss_kwargs = loss_kwargs
        self.leaves = Leaves()
        self.length, self.sizes = 0, [0] * engine.num_segments
        self._weights: list[list[float]] = []

    @property
    def shape_key(self) -> tuple[bool, int]:
        return self._training, self.length

    def prepare(self) -> None:
        """On the first stage's rank everything is known; elsewhere :meth:`learn` follows with the first message."""
        engine = self._engine
        engine._set_limits(shape_known=False)  # until the length is learnt
        if self._training and not torch.is_grad_enabled():
            raise RuntimeError("step needs gradients; use eval, or leave torch.no_grad()")
        if engine.has_last and self._training and (engine._loss_fn is None or self._target is None):
            raise ValueError("a training step needs loss_fn and target on the rank of the last stage")
        if self._target is not None and engine.has_last and engine._loss_fn is None:
            raise ValueError("target was given, but the engine has no loss_fn")
        if self._global_count is not None:
            _check_numbers(loss_weight=self._global_count)
        check_rules(self._kwargs, engine._arg_rules, is_split=engine.num_segments == 1)
        if engine.has_last and self._target is not None:
            self._target = microbatches(self._target, engine.num_microbatches, "target")
        if engine.has_first:
            if self._inputs is None:
                raise ValueError("inputs are needed on the rank of the first stage")
            check_count(self._inputs, engine.num_microbatches, "inputs")
            self._inputs = self.leaves.replace(self._inputs)
            self.learn(sequence_length(self._inputs, engine.seq_dim))

    def learn(self, length: int) -> list[int]:
        """Splits what this rank was given; returns the segment sizes. The executor calls it with the first message."""
        engine = self._engine
        M, dim, shard = engine.num_microbatches, engine.seq_dim, engine.shard
        self.length, self.sizes = length, engine.sizes_of(length, self._documents())
        engine._set_limits(self.shape_key in engine._known_shapes)
        inputs = split_inputs(self._inputs, M, self.sizes, dim, shard) if engine.has_first else None
        kwargs = None
        if self._kwargs or engine._arg_rules:
            kwargs = split_kwargs(self.leaves.replace(self._kwargs), engine._arg_rules, M, self.sizes, dim, shard)
        targets = seeds = segment_shares = None
        if engine.has_last and self._target is not None:
            targets = self._split_targets(self._target, dim)
            segment_shares, seeds = self._weigh(self._target, dim)
        scale = self._gradient_scale / (M if engine._scale_grads and self._global_count is None else 1.0)
        mean = engine._loss_reduction == "mean"
        for runtime in engine._runtimes.values():
            last = runtime.is_last
            runtime.begin_step(
                training=self._training,
                inputs=inputs if runtime.is_first else None,
                kwargs=kwargs,
                targets=targets if last else None,
                seeds=seeds if last else None,
                shares=segment_shares if last else None,
                loss_kwargs=self._loss_kwargs,
                auxiliary_seed=[scale * (size / length if mean else float(shard[1])) for size in self.sizes],
                keep_outputs=self._keep_outputs and last,
                measure_activations=self._training and self.shape_key not in engine._known_shapes,
            )
        return self.sizes

    def _documents(self) -> list[int] | None:
        """Lengths of the packed documents of all rows, where segments are balanced by them."""
        engine = self._engine
        if engine._segment_sizes != "balanced" or engine._arg_rules.get("doc_ids") != "slice":
            return None
        kwargs = self._kwargs if isinstance(self._kwargs, list) else [self._kwargs or {}]
        rows = [microbatch["doc_ids"] for microbatch in kwargs if isinstance(microbatch.get("doc_ids"), Tensor)]
        return [length for doc_ids in rows for length in document_lengths(doc_ids)] or None

    def _split_targets(self, whole: list[Any], dim: int) -> list[list[Any]]:
        engine = self._engine
        if engine.num_segments * engine.shard[1] == 1:
            return [[target] for target in whole]
        return [
            split_sequence(t, self.sizes, dim, f"target of micro-batch {m}", engine.shard) for m, t in enumerate(whole)
        ]

    def _weigh(self, whole: list[Any], dim: int) -> tuple[list[list[float]], list[list[Tensor]]]:
        """Shares of this rank's segments in their micro-batch's loss, and the seeds of their backwards.

        Of a segment in shards each rank's share counts as many times as there are shards: their mean is to be the loss.
        """
        engine = self._engine
        M, k, (rank, num_shards) = engine.num_microbatches, engine.num_segments, engine.shard
        if engine._loss_reduction == "sum":
            counts = segment_shares = [[1.0] * k for _ in range(M)]
        else:
            pieces = shard_sizes(self.sizes, engine.shard)
            all_counts = count_targets(whole, pieces, dim, engine._loss_weight)
            counts, segment_shares = (
                [row[rank::num_shards] for row in rows] for rows in (all_counts, shares(all_counts))
            )
        self._weights = [[num_shards * share for share in row] for row in segment_shares]
        if self._global_count is not None:
            divisor = engine._runtimes[engine.num_stages - 1].gradient_divisor
            scale = self._gradient_scale * (num_shards if divisor is None else divisor)
            seeds = [[scale * count / self._global_count for count in row] for row in counts]
        else:
            scale = self._gradient_scale / (M if engine._scale_grads else 1.0)
            seeds = [[weight * scale for weight in row] for row in self._weights]
        return self._weights, make_seeds(seeds, engine.device)

    def losses(self) -> list[Tensor]:
        runtime = self._last_runtime()
        if runtime is None or self._target is None:
            return []
        return combine(runtime.losses, self._weights, self._engine.device)

    def outputs(self) -> list[Any] | None:
        runtime = self._last_runtime()
        if runtime is None:
            return None
        k = self._engine.num_segments
        return [
            _merge([runtime.outputs[m * k + s] for s in range(k)], self._engine.seq_dim)
            for m in range(self._engine.num_microbatches)
        ]

    def _last_runtime(self) -> StageRuntime | None:
        return self._engine._runtimes.get(self._engine.num_stages - 1)


def _merge(parts: list[Any], dim: int) -> Any:
    if isinstance(parts[0], (tuple, list)):
        return tuple(_merge([part[i] for part in parts], dim) for i in range(len(parts[0])))
    if isinstance(parts[0], dict):
        return {key: _merge([part[key] for part in parts], dim) for key in parts[0]}
    return torch.cat(parts, dim) if isinstance(parts[0], Tensor) and len(parts) > 1 else parts[0]


def _norm(gradient: Tensor, norm_type: float) -> float:
    """Of the whole gradient, also where this rank holds a shard of it (DTensor)."""
    norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def _set_grad_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    gradient = parameter.grad
    parameter.grad = None
    parameter.grad_dtype = dtype
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        least = 0 if name == "prefetch" else 1  # seq_dim: dimension 0 is the batch
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name} is {value}, must be at least {least}")


def _check_numbers(**seconds: float | None) -> None:
    for name, value in seconds.items():
        if name == "spin_us" and value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if not (value >= 0 if name == "spin_us" else value > 0):
            raise ValueError(f"{name} is {value}, must be {'at least' if name == 'spin_us' else 'above'} 0")


def _check_choices(schedule: Any, loss_fn: Any, loss_weight: Any, grad_dtype: Any, transport: str) -> None:
    if not isinstance(schedule, (str, Schedule)):
        raise TypeError(f"schedule must be a name or a seq1f1b.Schedule, got {type(schedule).__name__}")
    for name, value in (("loss_fn", loss_fn), ("loss_weight", loss_weight)):
        if value is not None and not callable(value):
            raise TypeError(f"{name} must be callable, got {type(value).__name__}")
    if grad_dtype is not None and not (isinstance(grad_dtype, torch.dtype) and grad_dtype.is_floating_point):
        raise TypeError(f"grad_dtype is {grad_dtype!r}, must be a floating dtype or None")
    known = ("auto", "shm", "c10d", *DEVICE_TRANSPORTS)
    if transport not in known:
        raise ValueError(f"transport is {transport!r}, must be one of {', '.join(map(repr, known))}")


def _of_plan(plan: Plan | str | os.PathLike[str], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Schedule, num_microbatches, num_segments, segment_sizes and prefetch of a plan."""
    if given != ("seq1f1b", None, 1, None):
        raise ValueError("plan= stands for schedule, num_microbatches, num_segments, segment_sizes: give none of them")
    arguments = (plan if isinstance(plan, Plan) else Plan.load(plan)).engine_arguments()
    names = ("schedule", "num_microbatches", "num_segments", "segment_sizes", "prefetch")
    return tuple(arguments[name] for name in names)
