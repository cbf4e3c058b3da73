"""Runs steps over the rank's stages: the work before, around and after the units."""

from __future__ import annotations

import importlib
import time
from array import array
from collections.abc import Callable, Hashable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from seq1f1b import _C
from seq1f1b.above import above
from seq1f1b.attention.causal import inside_step
from seq1f1b.documents.rows import PlannedRows, Rows, Trees, check_equal_rows, read_rows
from seq1f1b.engine.batch import Batch, StepArguments, sequence_length
from seq1f1b.engine.features import Feature
from seq1f1b.engine.findings import explained, look_at_batches, look_at_targets, samples_of
from seq1f1b.engine.gradients import StepGradients, growing_wide
from seq1f1b.engine.measure import Measuring
from seq1f1b.engine.offload import Offloading
from seq1f1b.engine.options import Options
from seq1f1b.engine.order import RankOrder, Setting, schedule_of_rows
from seq1f1b.engine.pipeline import Pipeline
from seq1f1b.engine.recompute import BlockRecomputing, Recomputing
from seq1f1b.engine.split_backward import WeightGradients
from seq1f1b.engine.stage import Stage
from seq1f1b.engine.step import Step, StepRecord
from seq1f1b.placement import in_ranges, step_on, stream_of, through_host
from seq1f1b.schedule import Schedule
from seq1f1b.transport.agreement import Disagreement
from seq1f1b.transport.edges import place_views
from seq1f1b.transport.failure import mark_as_told

__all__: list[str] = []

# What an engine may do around the units of a stage. A new feature is a file, and a line here.
FEATURES: tuple[type[Feature], ...] = (
    WeightGradients,
    BlockRecomputing,
    Recomputing,
    Offloading,
    above("first look"),
    Measuring,  # the innermost, to count tensors kept by the forward, not by other features
)

MOST_ORDERS = 16  # orders that a runner keeps, with their programs


class Runner:
    """Runner of steps over a pipeline: an engine's own, or, in a verification, the whole model's.

    Args:
        schedule: complete order of plain training steps.
        build: makes the order of a step of rows, from num_ranks, num_microbatches, num_segments (one for each
            micro-batch) and stages_per_rank; None: only a plan brings an order.
        is_tuned: whether plain training steps find their order, see :mod:`seq1f1b.report.tuning`.
        is_whole: units are whole micro-batches, as outside a step.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        options: Options,
        schedule: Schedule,
        build: Callable[..., Schedule] | None = None,
        *,
        is_tuned: bool = False,
        is_whole: bool = False,
    ) -> None:
        self.pipeline = pipeline
        self.setting = Setting(schedule, options)
        self.cache = _C.kv_cache_create()
        self.stages = {
            index: Stage(index, pipeline, options, FEATURES, is_whole=is_whole) for index in pipeline.modules
        }
        self.orders: dict[Hashable, RankOrder] = {}  # by the key of `order`; the last used at the end
        self.build = build
        can_divide = options.head is None and options.loss.reduction == "mean"
        # Whether loss_fn returns a sum and a divisor; None until a training step has told all ranks.
        self.divides = self._untold = None if can_divide else False
        self.last_step: StepRecord | None = None
        self._known_shapes: set[tuple[bool, int, int]] = set()
        # By stage, figures of the features that measure in first steps of a shape, as of the last such step.
        self.first_figures: dict[int, dict[str, Any]] = {index: {} for index in pipeline.modules}
        self._has_had_rows, self._epoch = False, 0  # the group's epoch at the last meeting
        self._executor: Any = None  # the executor of the running units
        self._bare = pipeline.bare_modules()
        self._unreduced = [module for _, module in pipeline.placed_modules() if id(module) not in pipeline.parallels]
        self._last_was_plain = False  # whether the last step was a plain training step
        self.tuner: Any = None
        if not is_tuned:
            return
        if any(stage.wrappers for stage in self.stages.values()):
            raise ValueError(
                'schedule="tuned" would find another order in each replica, and stages under DDP or FSDP2 take one: '
                "tune the stages alone, write engine.found_order() to a file, and give that as schedule"
            )
        self._check_clock()
        count, group = len(self.stages), pipeline.group
        self.tuner = above("tuner")(self.setting, count, group=group, device=pipeline.device, report=self.report)

    @property
    def options(self) -> Options:
        """The engine's options, with the number of segments of plain steps."""
        return self.setting.options

    @property
    def schedule(self) -> Schedule:
        """The order of plain training steps."""
        return self.setting.schedule

    # -- orders ----------------------------------------------------------------------------------------------------

    def order(
        self, training: bool, rows: Rows | None = None, trees: Trees | None = None, plan: PlannedRows | None = None
    ) -> RankOrder:
        """Returns the order of a step, lowered and with an executor; of known steps, the order made before.

        Args:
            training: False: without backwards.
            rows: tokens of the segments of every micro-batch, in a step of rows; None: a plain step.
            trees: the segments' parents; None: each segment follows the one before it.
            plan: a plan with the order of a step of rows.
        """
        counts = None if rows is None else tuple(map(len, rows))
        parents = None if trees is None else trees.followed
        of_rows = (counts, parents) if plan is None else plan.digest
        key = training, of_rows, None if rows is not None else self.setting
        found = self.orders.pop(key, None)
        if found is None:
            schedule = self.setting.schedule
            if counts is not None:
                schedule = schedule_of_rows(counts, parents, plan, self.build, self.pipeline, self.setting.options)
            schedule = schedule if training else schedule.forward_only()
            program = schedule._lower_for(self.pipeline.is_between_gpus, self.pipeline.rank)
            executor = self.pipeline.make_executor(program, self.cache, fills=schedule.fills)
            found = RankOrder(schedule, self.pipeline.rank, program, executor)
            if len(self.orders) == MOST_ORDERS:
                del self.orders[next(iter(self.orders))]
        self.orders[key] = found
        return found

    def settle(self, arguments: StepArguments) -> None:
        """Takes the tuner's setting for an evaluation, for callers that run units without :meth:`run`. Collective."""
        if self.tuner is not None:
            self._tune(replace(arguments, training=False))

    # -- a step ----------------------------------------------------------------------------------------------------

    def run(self, arguments: StepArguments) -> tuple[list[Tensor], list[Any] | None]:
        """Runs one step, or one evaluation.

        Returns:
            losses, and the outputs of the M micro-batches if asked for.
        """
        group = self.pipeline.group
        with self.pipeline.in_use():
            self._executor = None  # an error before the units has no unit
            try:
                with ExitStack() as around:
                    step, losses, seconds = self._run(arguments, around)
                group.end_step(failed=False)
            except BaseException as error:
                # The next step waits until every rank has left this step. Gradients that `StepGradients` keeps apart
                # are as before the step; all others hold the sums of the units that have run.
                told = error
                if not isinstance(error, (Disagreement, _C.PipelineError)):
                    told, text = explained(error, self._executor, self.stages)
                    group.fail(text)
                group.end_step(failed=not isinstance(error, Disagreement))  # which is raised on every rank
                mark_as_told(told)
                if told is error:
                    raise
                raise told from error
        self.last_step = record = step.record(group.step, seconds)
        if step.batch.is_new:
            self._known_shapes.add((record.training, record.length, self.setting.options.num_segments))
            for index, own in record.figures.items():
                self.first_figures[index] |= own
        schedule = record.order.schedule
        self._last_was_plain = record.training and schedule.rows is None and schedule is self.setting.schedule
        if not arguments.training:  # other ranks may have left: an error stays on this rank
            losses = step.losses()
        return losses, step.outputs() if arguments.return_outputs else None

    def _run(self, arguments: StepArguments, around: ExitStack) -> tuple[Step, list[Tensor], float]:
        """Runs the phases of a step; an error of any rank ends the step on all.

        Args:
            around: the stack of contexts and callbacks that end with the step, or with its error.
        Returns:
            the step, its losses if it trains, and the seconds of its units.
        """
        pipeline, group, training = self.pipeline, self.pipeline.group, arguments.training
        # 1. Failures since this rank's last step; the order and the batch of this step.
        group.enter()
        for parallel in pipeline.parallels.values():
            around.callback(parallel.end_step)
            parallel.begin_step()
        if arguments.rows is not None:
            rows, trees = read_rows(arguments.rows, arguments.parents, self.options.sequence_parallel[1])
            arguments = replace(arguments, rows=rows, trees=trees)
        if is_tuned := self.tuner is not None and arguments.rows is None:
            group.begin_step(training)  # messages between ranks may follow
            self._tune(arguments)
        self._last_was_plain = False
        order = self.order(training, arguments.rows, arguments.trees, arguments.plan)
        batch = Batch(replace(arguments, divides=self.divides), self.setting.options, pipeline)
        batch.check()
        if training and not self._known_shapes:
            # A first backward with given gradients imports this in 0.5 s and more. Here all ranks import it at once,
            # instead of one after the other.
            importlib.import_module("torch.fx.experimental.symbolic_shapes")
        step = Step(batch, order, self.stages, pipeline, self._known_shapes)
        around.callback(step.end)
        if batch.length:
            step.prepare(batch.length)
        else:  # the length may turn out to be new, and then a peer may compile for minutes
            group.set_limits(batch.options.limits.longest)
        # 2. The ranks compare their arguments: in the first step, after a failure, and in steps of rows.
        if not is_tuned:
            group.begin_step(training)
        self._meet(arguments, order)
        if training and group.size > 1 and (arguments.loss_weight is not None or batch.by_targets):
            step.share_weights()
        # 3. The units, inside the contexts around all units.
        if pipeline.tier is not None:
            around.callback(pipeline.tier.reset)
        if training:
            batch.gradients = self._step_gradients()
            around.enter_context(batch.gradients.apart())
        self._executor = order.executor
        seconds = self._run_units(step, order)
        if batch.is_new:
            self._executor = None  # an error of a look belongs to no unit
            step.look_back()
            self._executor = order.executor
        if training and group.size > 1:
            group.finish_units(pipeline.rank_of_stage[0])
        # 4. After the units: late division, arguments that require grad, copies of parameters, earlier gradients.
        losses = step.losses() if training and pipeline.has_last else []  # an error here adds no gradients
        factor = self._divide(step) if training and self.divides is not False else 1.0
        if batch.leaves.pairs:
            batch.leaves.propagate(factor)
        if pipeline.has_last:
            step.tell_of_counts()
        if batch.gradients is not None:
            pipeline.tied.end_step(batch.gradients)
            batch.gradients.end(factor)
        return step, losses, seconds

    def _tune(self, arguments: StepArguments) -> None:
        length = 0  # on ranks without inputs, or with inputs that are refused later
        with suppress(ValueError, TypeError, AttributeError, IndexError):
            if self.pipeline.has_first:
                length = sequence_length(arguments.inputs, self.options.seq_dim)
        if arguments.training:
            self.setting = self.tuner.next(self.last_step if self._last_was_plain else None, length)
        else:
            self.setting = self.tuner.evaluate(max(self.pipeline.group.all_gather_object(length)))

    def _meet(self, arguments: StepArguments, order: RankOrder) -> None:
        """Compares the arguments of all ranks in the first step, after a failure, and in and between steps of rows.
        Raises on every rank."""
        group = self.pipeline.group
        if is_after_failure := self._epoch != group.epoch:  # ranks may have different results of a collective
            self._epoch, self.divides, self._has_had_rows = group.epoch, self._untold, False
        if self.pipeline.agreement.checked_in != group.epoch:
            self.pipeline.agreement.check()
        # Plain steps between those of rows are compared, too.
        if arguments.rows is not None or self._has_had_rows or is_after_failure:
            check_equal_rows(group, arguments.rows, arguments.trees, arguments.plan, order.digest)
            self._has_had_rows = self._has_had_rows or arguments.rows is not None
        samples = self.pipeline.tied.meet(lambda: samples_of(arguments, self.options.arg_rules, self.options.seq_dim))
        if samples:
            look_at_batches(samples)
            # With one segment the loss itself may shift the targets.
            if self.pipeline.has_last and (self.options.num_segments > 1 or arguments.rows is not None):
                look_at_targets(samples)

    def _run_units(self, step: Step, order: RankOrder) -> float:
        pipeline = self.pipeline
        run, views = step.run, place_views
        on_device = nullcontext() if pipeline.device.type == "cpu" else step_on(pipeline.device)
        if pipeline.device.type == "cuda":
            run = in_ranges(run, order.texts)
        if pipeline.device_edges is not None:
            pipeline.device_edges.begin_step()
            run, views = pipeline.device_edges.around(run), pipeline.device_edges.place_views()
        elif pipeline.gpu is not None:
            _C.device_begin_step(pipeline.gpu, stream_of(pipeline.device.index))
            run = through_host(run, pipeline.device, pipeline.gpu)
        if pipeline.tier is not None:
            pipeline.tier.begin_step(order.most_away)
        start = time.perf_counter()
        with inside_step(), on_device, step.around:
            _C.executor_step(
                order.executor,
                pipeline.group.step,
                step.batch.training,
                step.batch.length,
                array("q", step.batch.sizes),
                run,
                step.fill,
                lambda length: array("q", step.prepare(length)),
                views,
                *(array("q", values) for values in step.batch.siblings),
            )
            return time.perf_counter() - start

    def _divide(self, step: Step) -> float:
        """Returns the factor for the gradients of a step, known to the rank of the last stage. Collective."""
        pipeline, mine = self.pipeline, step.divisor()
        everyones = [mine] if pipeline.num_ranks == 1 else pipeline.group.all_gather_object(mine)
        last = everyones[pipeline.rank_of_stage[-1]]
        self.divides = last[0]
        if not self.divides:
            return 1.0
        refused = ""
        if not self.options.loss.scale_grads:
            refused = "Loss(scale_grads=False), as in torch's schedules, leaves gradients undivided"
        elif any(has_auxiliary for *_, has_auxiliary in everyones):
            refused = "an auxiliary loss (add_loss) has no part in that divisor"
        if refused:
            raise Disagreement(
                f"loss_fn returned its sum and its divisor, and {refused}: return one loss, and count its targets by "
                "Loss(weight=...)"
            )
        return float(last[1])

    def _check_clock(self) -> None:
        pipeline = self.pipeline
        if pipeline.device.type != "cpu" and pipeline.group.is_thread and pipeline.num_ranks > 1:
            raise ValueError(
                f"the times of a step on {pipeline.device} are those of a stream, and ranks that are threads of one "
                "process share it: run ranks as processes"
            )

    def report(self, gather: Callable[[Any], list[Any]] | None = None) -> Any:
        """Reports the last step, see :meth:`seq1f1b.PipelineEngine.report`."""
        self._check_clock()
        return above("report")(self, gather)

    def _step_gradients(self) -> StepGradients:
        """Returns the gradients that a training step keeps apart; under DDP and FSDP2, gradients do not grow wider."""
        dtype, wide = self.setting.options.grad_dtype, dict[int, nn.Parameter]()
        for module in self._unreduced if dtype is not None else ():
            wide |= growing_wide(module)
        tied = self.pipeline.tied
        apart = {id(p): p for p in tied.parameters()} if tied.has_lists else {}
        if self.divides is not False:
            apart |= {id(p): p for module in self._bare for p in module.parameters()}
        return StepGradients(list((apart | wide).values()), wide, dtype)
