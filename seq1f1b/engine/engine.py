"""The pipeline engine: trains stages of torch modules under any checked order of units."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seq1f1b.above import above
from seq1f1b.documents.rows import PlannedRows, rows_given
from seq1f1b.engine.batch import StepArguments, merge
from seq1f1b.engine.gradients import clip, share_overflow, total_norm
from seq1f1b.engine.options import Limits, Loss, Memory, Options, Rule
from seq1f1b.engine.set_up import set_up
from seq1f1b.engine.vocabulary import join_shards
from seq1f1b.partition import ModelShape
from seq1f1b.plan import Plan, TunedOrder
from seq1f1b.schedule import Schedule
from seq1f1b.transport.group import OfOneProcess

if TYPE_CHECKING:
    from seq1f1b.checks.verify import Verification

__all__ = ["PipelineEngine"]


class PipelineEngine(OfOneProcess):
    """Engine of one rank in pipeline-parallel training: runs the rank's stages in every step.

    Args:
        stage: the module of the rank; a list if the rank holds several stages, in ascending order of stage. Parameters
            lie on the CPU or on one CUDA device, to which a step moves its arguments. A middle stage gets the previous
            stage's output: a tensor, or a tuple of tensors. Under DDP or FSDP2 (``fully_shard``), over ranks with the
            same stage, gradients are reduced once: in the last backward, or after the last W. A stage may list
            parameters in a dict attribute ``tied_parameters``, by their names in the unsplit model, as a checkpoint has
            them. Stages with the same name in the list hold copies of one parameter: at a step's end all copies get the
            sum of their gradients, and a norm counts the sum once. The engine compares the copies now and then; an
            error names copies with different values, and hooks for their gradients are refused. An attribute
            ``pipeline_place``, (index, count), says which of how many stages of a model a stage is;
            :func:`seq1f1b.split` and ``pipeline_stage`` set the attribute. A wrong number or order of stages is an
            error.
        schedule: a name of :func:`seq1f1b.schedules`, a :class:`seq1f1b.Schedule` (checked here), or a callable that
            builds a schedule, for instance ``functools.partial(build_schedule, "seq-zb-h1", prefetch=2)``. The callable
            gets ``num_ranks``, ``num_microbatches``, ``num_segments`` and ``stages_per_rank`` by name. A name and a
            callable serve steps of rows, too; ``num_segments`` is a sequence there. A :class:`seq1f1b.plan.Plan`, or a
            plan's file, replaces num_microbatches, num_segments and segment_sizes. If a plan needs a feature that the
            engine lacks, the error names the feature. With ``"tuned"`` the engine finds the order, num_segments and the
            split of the sequence for plain steps while training, in some 40 steps, and again after ten steps whose
            lengths differ by a quarter. The search begins with num_segments, and keeps num_segments if
            ``segment_sizes`` is given. Gradients of a step are those of its batch under every order; bits differ, so
            nothing is tuned under ``torch.use_deterministic_algorithms``. ``"tuned"`` refuses stages under DDP or
            FSDP2. See :meth:`found_order`.
        num_microbatches, num_segments: M and k. A batch is split into M micro-batches along dimension 0, each
            micro-batch into k segments along ``seq_dim``.
        segment_sizes: None for an even split; the :class:`seq1f1b.ModelShape` of the whole model for equal FLOPs; k
            token counts; or a mapping or a callable from the tokens of a sequence to k token counts, if steps differ in
            length. With a sliced keyword argument ``doc_ids``, FLOPs are counted by packed documents; then every rank
            needs ``doc_ids``.
        seq_dim: the dimension of tokens.
        arg_rules: for each tensor keyword argument: ``"slice"`` (batch and sequence), ``"replicate"`` (given whole), or
            a callable of the unit (``.microbatch .segment .offset .length``; in a tree the offset is a position along
            the path).
        loss_fn: ``loss_fn(output, target)`` -> scalar, called per segment on the last stage. Or -> (sum, divisor): the
            loss is then the sum of all sums divided by the sum of all divisors, over the segments and micro-batches of
            a step, and over replicas under DDP or FSDP2. This form suits every mean, but takes no
            :func:`seq1f1b.add_loss` and no ``Loss(scale_grads=False)``. A module with parameters runs forward and
            backward at once, so only one segment's logits are alive. A :class:`seq1f1b.VocabularyParallelHead` is given
            on every rank.
        loss: how losses of segments become the loss of a step, see :class:`seq1f1b.Loss`.
        group: a ProcessGroup, ``LoopbackGroup(P)[rank]``, or None: the default group if there is one, else P = 1. All
            ranks must give the same counts, schedule, sizes and loss options; otherwise every rank raises an error with
            the argument's name and the values.
        transport: ``"auto"``: shared memory between ranks of one host, the process group between hosts; between stages
            on CUDA devices the first transport that passes a test at set-up: within a host copies between the GPUs,
            NCCL, host memory; between hosts NCCL, host memory. ``"copy"`` or ``"nccl"``: only this transport; a failure
            is an error. ``"shm"`` or ``"c10d"``: this transport on every edge; messages of CUDA stages go through host
            memory. ``engine.edges`` names the transport of each edge with the reason.
        limits: seconds that a rank waits for others, see :class:`seq1f1b.Limits`.
        grad_dtype: accumulates gradients of 16-bit parameters in this dtype during a step, except under DDP or FSDP2;
            None: in the parameters' dtype.
        memory: saves memory by recomputing or moving activations, see :class:`seq1f1b.Memory`.
        sequence_parallel: (rank, size) among ranks of the same stage that share every segment's tokens
            (:func:`seq1f1b.ulysses_attention`). Each rank is given whole sequences and runs its part of each segment.
            The mean over the ranks of losses and gradients is that of the whole sequence, as in data parallelism: put
            the stage under DDP or FSDP2 over these ranks.
        attention: ``"own"``: if a stage never calls :func:`seq1f1b.causal_attention`, other attention is an error; in a
            stage that calls both, a :class:`seq1f1b.SegmentWarning`. ``"any"``: a warning in every stage. The check
            runs each stage again in the first step on a few tokens, as one segment and as two, and finds all modules
            that mix tokens. ``"unchecked"``: no check.
        embedding: a :class:`seq1f1b.VocabularyParallelEmbedding`, on every rank: the rank's rows of the input
            embedding. Then every rank gives ``inputs`` to a step, and the first stage gets embedded tokens.
    Source: Seq1F1B, arXiv:2406.03488.
    """

    _gpu_part = staticmethod(above)  # tests replace it, to stand in for GPUs
    _needs_whole_model = True  # False: one stage of a model may run alone
    _scaler: torch.amp.GradScaler | None = None  # given to the last training step

    def __init__(
        self,
        stage: nn.Module | Sequence[nn.Module],
        *,
        schedule: str | os.PathLike[str] | Schedule | Plan | TunedOrder | Callable[..., Schedule] = "seq1f1b",
        num_microbatches: int | None = None,
        num_segments: int = 1,
        segment_sizes: ModelShape
        | Sequence[int]
        | Mapping[int, Sequence[int]]
        | Callable[[int], Sequence[int]]
        | None = None,
        seq_dim: int = 1,
        arg_rules: Mapping[str, Rule] | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        loss: Loss = Loss(),
        group: Any = None,
        transport: str = "auto",
        limits: Limits = Limits(),
        grad_dtype: torch.dtype | None = torch.float32,
        memory: Memory = Memory(),
        sequence_parallel: tuple[int, int] = (0, 1),
        attention: str = "own",
        embedding: nn.Module | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in Options.__dataclass_fields__}
        given |= {"arg_rules": arg_rules or {}}
        self._runner = set_up(stage, schedule, given, group, self._gpu_part, is_whole=self._needs_whole_model)
        pipeline = self._pipeline = self._runner.pipeline
        self._group, self._options = pipeline.group, pipeline.options
        self.rank, self.num_ranks, self.device = pipeline.rank, pipeline.num_ranks, pipeline.device
        self.num_microbatches = self._options.num_microbatches
        self.seq_dim, self.sequence_parallel = seq_dim, sequence_parallel
        self.num_stages, self.stages, self.edges = pipeline.num_stages, list(pipeline.modules), pipeline.edges
        self.has_first, self.has_last = pipeline.has_first, pipeline.has_last
        self._leave = weakref.finalize(self, self._group.leave)
        self._leave.atexit = False

    # -- public ----------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any = None,
        *,
        target: Any = None,
        kwargs: Mapping[str, Any] | list[dict[str, Any]] | None = None,
        loss_weight: float | None = None,
        grad_scaler: torch.amp.GradScaler | None = None,
        segment_sizes: Sequence[Sequence[int | Sequence[int]]] | None = None,
        parents: Sequence[Sequence[int] | None] | None = None,
        plan: PlannedRows | None = None,
    ) -> list[Tensor]:
        """Runs forward and backward of one batch; adds to ``.grad``.

        Args:
            inputs: the whole batch, a tensor or a tuple (the first stage's positional arguments), or a list of M
                micro-batches. Needed on the first stage's rank, ignored elsewhere.
            target: the whole batch's targets, or a list of M. Needed on the last stage's rank, ignored elsewhere.
            kwargs: keyword arguments of the rank's stages, by ``arg_rules``; or a list of M.
            loss_weight: the global number of counted targets (all micro-batches, all data-parallel ranks), by which
                losses are divided instead of by each micro-batch's number and by M. Gradients are then those of the
                mean over all these targets; under DDP or FSDP2 the division by the reduction is undone. The returned
                losses do not change.
            grad_scaler: scales gradients, not the returned losses. Call ``unscale_``, ``step`` and ``update`` as
                always, on every rank. If gradients of any rank overflow, all ranks skip the optimizer's step.
            segment_sizes: makes the step a step of rows: for every micro-batch the tokens of its segments, equal on
                every rank. Lengths and numbers of segments may differ between micro-batches, and the number of
                micro-batches may differ between steps; ``inputs``, ``target`` and sliced keyword arguments are lists
                with one entry per micro-batch, all of one batch size. The engine's schedule, a name or a callable,
                builds the order for these counts. Gradients are those of the mean over all counted targets of the step
                (of all micro-batches, on this replica), however long the micro-batches are; with ``loss_weight`` as
                above; with ``Loss(scale_grads=False)`` those of the sum of the losses. An auxiliary loss weighs by the
                micro-batch's targets. The returned losses are the micro-batches' means. ``Loss(reduction="sum")`` works
                as in other steps.
            parents: makes the segments of these micro-batches trees, for prompts with several answers: for every
                micro-batch the segment that each segment follows, -1 for segment 0, a lower number than the segment's
                own for all others; None for a micro-batch whose segments follow each other. A segment sees its path
                (the segments from 0 to itself) and nothing more; positions count along the path. Inputs and targets lie
                in the order of the segments' numbers. A size that is a list, such as ``[[1024, [256, 256]]]``, puts
                several leaves of one parent into one unit; layers then have no state (:func:`seq1f1b.carry_in`), window
                or ALiBi. A token of several paths is computed once: the paths share one dropout mask, and an auxiliary
                loss (:func:`seq1f1b.add_loss`) counts the token once.
            plan: a plan of :func:`seq1f1b.planning.step_plan.plan_step`, in place of ``segment_sizes``: the step runs
                the plan's rows in the plan's order, with its recomputed or moved units and its receive places. Equal on
                every rank. ``causal_attention`` of a row of several documents needs ``doc_ids``.
        Returns:
            M losses on the rank of the last stage, [] elsewhere. The losses have no graph: the step has run the
            backward. If ``loss_fn`` returns one value per token, (batch, tokens): these values for the M micro-batches,
            0 in segments without counted targets; the loss is then their sum over the number of counted targets.
        Raises:
            ValueError, TypeError: an argument breaks a rule; raised on the rank with the argument.
            PipelineError: another rank failed, was lost or made no progress.
        """
        given = StepArguments(True, inputs, target, kwargs, loss_weight)
        if segment_sizes is not None or parents is not None or plan is not None:
            given = replace(given, **rows_given(segment_sizes, parents, plan))
        self._scaler = grad_scaler if grad_scaler is not None and grad_scaler.is_enabled() else None
        if self._scaler is None:
            return self._runner.run(given)[0]
        self._scaler.scale(torch.zeros((), device=self.device))  # makes the scale on ranks without a loss
        losses, _ = self._runner.run(replace(given, gradient_scale=self._scaler.get_scale()))
        with self._group.telling():
            share_overflow(self._pipeline)
        return losses

    def eval(
        self,
        inputs: Any = None,
        *,
        target: Any = None,
        kwargs: Mapping[str, Any] | list[dict[str, Any]] | None = None,
        return_outputs: bool = False,
        segment_sizes: Sequence[Sequence[int | Sequence[int]]] | None = None,
        parents: Sequence[Sequence[int] | None] | None = None,
        plan: PlannedRows | None = None,
    ) -> Any:
        """Runs the forward of one batch, without gradients. Arguments as :meth:`step`; target may be left out.

        Returns:
            M losses on the rank of the last stage ([] elsewhere, and without target); with ``return_outputs`` a pair:
            the losses, and the output of the whole batch, segments and micro-batches merged (None elsewhere); with
            ``segment_sizes`` or ``plan`` a list of the micro-batches' outputs.
        """
        given = StepArguments(False, inputs, target, kwargs, **rows_given(segment_sizes, parents, plan))
        with torch.no_grad():
            losses, outputs = self._runner.run(replace(given, return_outputs=return_outputs))
            if not return_outputs:
                return losses
            return losses, outputs if outputs is None or given.rows is not None else merge(outputs, 0)

    def verify(
        self,
        inputs: Any = None,
        *,
        target: Any = None,
        kwargs: Mapping[str, Any] | list[dict[str, Any]] | None = None,
        loss_weight: float | None = None,
        dtype: torch.dtype | None = None,
        show: bool = True,
        model: nn.Module | None = None,
        segment_sizes: Sequence[Sequence[int | Sequence[int]]] | None = None,
        parents: Sequence[Sequence[int] | None] | None = None,
        plan: PlannedRows | None = None,
    ) -> Verification:
        """Compares a pipeline step with the whole model on the same batch. Arguments as :meth:`step`. Collective.

        The whole model is the stages in a chain, run with one segment and one micro-batch (or one path of a tree) at a
        time; or ``model``, from which the stages were cut. Afterwards parameters, gradients, buffers, attributes of
        modules that are tensors or containers, and random state are as before, in the model too. Hooks on parameters do
        not run. Refused are stages under DDP or FSDP2, DTensors and ``sequence_parallel=``.

        Args:
            dtype: dtype of the whole model; None: float64 if the memory suffices, else the stages' own.
            show: prints the result on rank 0.
            model: the whole model, on rank 0, where the engine then needs ``loss_fn``, too; ranks above 0 give None or
                the model, and do not read it. The model keeps its training mode, and takes the parameters and buffers
                of all stages by name. Two kinds of buffers stay the model's own: buffers outside of checkpoints, and,
                if all parameters are as in the model, buffers that no step changes; the latter must be equal.
        Raises:
            ValueError: a refused case; or model and stages disagree in names or shapes, the model does not fit in the
                memory of rank 0, or does not run. Raised on every rank.
        """
        self._pipeline.check_idle()
        given = StepArguments(True, inputs, target, kwargs, loss_weight, **rows_given(segment_sizes, parents, plan))
        found: Verification = above("verify")(self._runner, given, dtype, model)
        if show and self.rank == 0:
            print(found)
        return found

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields the parameters of the rank, each once."""
        yield from (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters of the rank, including the parameters of a loss that holds the head.

        A copy of a tied parameter has the whole model's name, as stages list it in ``tied_parameters``, on every rank.
        So an optimizer's groups by name are alike for all copies.
        """
        return self._pipeline.named_parameters()

    def modules(self) -> list[nn.Module]:
        """Returns the rank's stages in ascending order, and the loss if it is a module (shard or last stage's)."""
        return self._pipeline.bare_modules()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float | str = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips gradients by one norm over all stages. Collective over the pipeline.

        The arithmetic is that of ``torch.nn.utils.clip_grad_norm_`` on the unsplit model: a norm for each parameter,
        and the norm of all norms in the model's order. So equal gradients give the same norm, and the same clipped
        gradients, bit for bit, for any number of ranks. Two cases differ: norms of 16-bit gradients are taken in
        float32; and if ranks share a parameter (FSDP2, tensor parallelism), its norm is the norm of the DTensor, which
        depends on the number of shards, but not on the number of stages.

        Args:
            norm_type: order of the norm; ``math.inf`` or ``"inf"``: the largest absolute value.
            error_if_nonfinite: whether a norm that is not finite is an error, on every rank; if False, gradients are
                clipped by this norm.
        Returns:
            The norm before clipping, equal on every rank: float64 if any gradient is float64, else float32.
        Raises:
            RuntimeError: the norm is not finite, with ``error_if_nonfinite``. Gradients are as before.
            ValueError: the gradients are still scaled by the step's ``grad_scaler``.
        """
        with self._group.telling():
            scaler = self._scaler
            if scaler and all(state["stage"].name == "READY" for state in scaler._per_optimizer_states.values()):
                raise ValueError(
                    f"the gradients are still scaled by grad_scaler, by {scaler.get_scale():g}: call "
                    "scaler.unscale_(optimizer) on every rank between engine.step and engine.clip_grad_norm_"
                )
            total = total_norm(self._pipeline, float(norm_type))
        clip(self._pipeline, total, max_norm, float(norm_type), error_if_nonfinite)
        return total

    def all_gather_object(self, value: Any) -> list[Any]:
        """Gathers a value from all ranks of the pipeline; returns the values by rank. Collective; for small values,
        between steps.

        Args:
            value: None, bool, int, float, str, bytes, or lists, tuples and dicts of these types; no code is ever
                received.
        Raises:
            TypeError: the value has another type.
        """
        with self._group.telling():
            return self._group.all_gather_object(value)

    def whole_vocabulary(self) -> dict[str, Tensor]:
        """Returns the whole parameters of layers whose vocabulary is spread, by name, on the last stage's rank.
        Collective.

        Each parameter comes once. Other ranks get an empty dict.
        """
        shards = [shard for shard in (self._options.embedding_shard, self._options.head) if shard is not None]
        with self._group.telling():
            return join_shards(shards, self._group, self.schedule.rank_of_stage[-1])

    def fail(self, reason: str) -> None:
        """Fails in place of the rank's next step or eval; the other ranks' call ends with a PipelineError.

        Afterwards a loop on any rank goes on with the batch behind the failed one. While an error of the engine is
        being handled, as in an ``except`` block, this call does nothing, because the other ranks know of the error
        already.
        """
        self._pipeline.fail(reason)

    def report(self, gather: bool = False) -> Any:
        """Returns measurements of the last step, beside the plan's figures.

        Args:
            gather: collective: reports of all ranks, the makespan, and a simulation with the measured durations.
        Returns:
            :class:`seq1f1b.report.report.Report`, or with ``gather`` a :class:`seq1f1b.report.report.PipelineReport`.
        """
        if not gather:
            return self._runner.report()
        with self._group.telling():
            return self._runner.report(self._group.all_gather_object)

    def found_order(self) -> TunedOrder:
        """Returns the order that a tuned engine has found, to be written to a file and given as ``schedule``.

        Raises:
            RuntimeError: the engine is not tuned, or not yet.
        """
        if self._runner.tuner is None:
            raise RuntimeError('the engine has searched no order: its order was given; give schedule="tuned"')
        return self._runner.tuner.found()  # type: ignore[no-any-return]

    @property
    def schedule(self) -> Schedule:
        """The order of plain steps; a tuned engine changes the order."""
        return self._runner.schedule

    @property
    def num_segments(self) -> int:
        """Segments of a micro-batch in plain steps; a tuned engine changes the number."""
        return self._runner.options.num_segments

    def close(self) -> None:
        """Leaves the pipeline's transports. The engine is unusable afterwards."""
        self._leave.detach()
        self._runner.orders.clear()
        self._pipeline.close()


class LoneEngine(PipelineEngine):
    """Engine of a model's stage alone, to look at the stage or to time it."""

    _needs_whole_model = False
