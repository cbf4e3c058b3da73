"""Set-up of an engine: the ranks meet, compare their arguments, and open the edges between their stages."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from seq1f1b.engine.options import Options, agreement_of, check_launch, first_order, order_of
from seq1f1b.engine.order import plain_schedule
from seq1f1b.engine.pipeline import Pipeline, check_places, places_of
from seq1f1b.engine.runner import Runner
from seq1f1b.placement import common_device
from seq1f1b.plan import Plan, TunedOrder
from seq1f1b.schedule import Schedule
from seq1f1b.transport import RankGroup, connect, meeting_of
from seq1f1b.transport.agreement import Agreement, Disagreement

__all__: list[str] = []


def set_up(
    stage: nn.Module | Sequence[nn.Module],
    schedule: str | os.PathLike[str] | Schedule | Plan | TunedOrder | Callable[..., Schedule],
    given: Mapping[str, Any],
    group: Any,
    gpu_part: Callable[[str], Any],
    *,
    is_whole: bool,
) -> Runner:
    """Returns the runner of a rank's steps, over a connected pipeline. An error is told to the other ranks.

    Args:
        stage, schedule, group: as given to the engine.
        given: the engine's other arguments, by the names of :class:`Options`.
        gpu_part: returns a part for GPUs by name.
        is_whole: whether the stages have to be all stages of their model.
    """
    joined: RankGroup | None = None
    meeting = meeting_of(group)
    try:
        counts = (given[name] for name in ("num_microbatches", "num_segments", "segment_sizes"))
        source, counted = order_of(schedule, *counts)
        modules: list[nn.Module] = list(stage) if isinstance(stage, Sequence) else [stage]
        for module in modules:
            if not callable(module):
                raise TypeError(f"stage must be a module or a list of modules, got {type(module).__name__}")
        options = Options(**{**given, **counted})
        device = common_device(modules)
        check_launch(group)
        waits = {"timeout": options.limits.step, "arrival_timeout": options.limits.longest}
        joined = connect(group, options.transport, meeting=meeting, **waits)
        joined.set_limits(options.limits.step)

        order = plain_schedule(source, joined.size, len(modules), options, device)
        own = [i for i, rank in enumerate(order.rank_of_stage) if rank == joined.rank]
        places = places_of(zip(own, modules, strict=False)) if is_whole else []
        check = partial(check_places, rank_of_stage=order.rank_of_stage)
        agreement = Agreement(joined, agreement_of(options, order, source, device), places, check)
        if not joined.is_thread:  # ranks that are threads may make engines one by one: they meet in a step
            agreement.check()
        pipeline = Pipeline(modules, device, options, joined, order, agreement, gpu_part)
        builder = None if isinstance(source, Schedule) else source
        runner = Runner(pipeline, options, order, builder, is_tuned=source is first_order)
        pipeline.connect(order._lower_for(pipeline.is_between_gpus, pipeline.rank))
        if not pipeline.is_between_gpus:
            runner.order(training=True)
        if not joined.is_thread:
            joined.begin()
        if pipeline.is_between_gpus:  # the first messages of an edge between GPUs test the edge
            pipeline.connect_gpus()
            runner.order(training=True)
        return runner
    except BaseException as error:
        # Other ranks may wait for this rank: to arrive, to open edges, or in the first step.
        if joined is None and meeting is not None:
            meeting.fail(error)
        elif joined is not None and not isinstance(error, Disagreement):
            joined.fail(f"{type(error).__name__}: {error}")
        if joined is not None and joined is not group:
            joined.close()
        raise
