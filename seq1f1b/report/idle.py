"""Causes of idle time in a step: differences between simulations of the order with equal and with measured units."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from typing import Any

from seq1f1b.schedule import Schedule

__all__ = ["CAUSES", "Idle", "StepTimes", "advice", "idle_of_ranks", "mean_idle"]

_LITTLE = 0.05  # share of the ranks' time: less idle time is not worth advice
_GAIN = 0.03  # share of a stage: moves of layers must gain more, because units vary as much from step to step


@dataclass(frozen=True)
class Idle:
    """The idle seconds of one rank, split into causes: the sum is the step's makespan less the rank's busy time.

    The step's order is simulated five times, with free messages and with units ever closer to the measured units. A
    cause is the rank's additional idle time over the previous simulation:

    Attributes:
        schedule: idle time if every unit of a pass (F, B, I, W) takes the mean of the pass over the whole step.
        stages: added if a unit takes the mean of its pass and stage, over segments and micro-batches.
        segments: added if a unit takes the mean of its pass, stage and segment, over micro-batches.
        microbatches: added if every unit takes its measured time, as in ``PipelineReport.simulated``. Differently
            packed documents, and a machine with other work, show here.
        host: added if every unit comes later by the engine's own time, spread evenly over a rank's units, and a rank
            enters the step as late as measured. Python's work inside a unit is part of the unit. On a GPU the engine's
            own time is the time in which the host was late: all inputs of a unit were there, earlier work had ended,
            and the host had not started the unit.
        transfer: the rest of the measured idle time: transfers and copies of messages, occupied receive places, late
            wake-ups after waits, and waits for the tier (``Report.tier``).

    The mean of a cause over the ranks is its share of the makespan. A cause may be negative: a rank with a slow stage
    waits less than other ranks, and unequal segments may fit an order better than equal segments. If two causes act
    together, the first counts with its effect alone, the second with the rest. W in waits is busy time, and fills waits
    in the simulations as well.
    """

    schedule: float
    stages: float
    segments: float
    microbatches: float
    host: float
    transfer: float

    @property
    def total(self) -> float:
        """All idle seconds."""
        return float(sum(astuple(self)))

    def shares(self, makespan: float) -> list[str]:
        """Returns the causes in percent of the step, in the order of :data:`CAUSES`."""
        return [f"{round(seconds / makespan, 3) + 0.0:.1%}" for seconds in astuple(self)]  # + 0.0: no -0.0%


CAUSES = tuple(field.name for field in fields(Idle))


@dataclass(frozen=True)
class StepTimes:
    """Times of a step in seconds, for the causes of idle time; lists hold one entry per rank.

    Attributes:
        schedule: the order that ran.
        units: seconds of every unit in run order, including parts in waits.
        own: the engine's own time: outside of units, waits and sends.
        late: from the first start of any unit to the rank's entry into the step; 0 for ranks already inside.
        makespan: first start to last end over all ranks.
        sizes: tokens of each segment.
        layers: number of layers of each stage; 0: unknown; (): all unknown.
        is_tuned: whether the engine itself looks for the order and its segments.
    """

    schedule: Schedule
    units: list[list[float]]
    own: list[float]
    late: list[float]
    makespan: float
    sizes: tuple[int, ...]
    layers: tuple[int, ...] = ()
    is_tuned: bool = False

    def alike(self, *fields: str) -> dict[tuple[Any, ...], list[float]]:
        """Returns the seconds of units, grouped by fields of :class:`seq1f1b.Unit`."""
        found: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for order, track in zip(self.schedule.ranks, self.units, strict=True):
            for unit, seconds in zip(order, track, strict=True):
                found[tuple(getattr(unit, field) for field in fields)].append(seconds)
        return found

    def means(self, *fields: str) -> list[list[float]]:
        """Returns seconds of every unit: the mean over all units with equal fields."""
        mean = {key: sum(seconds) / len(seconds) for key, seconds in self.alike(*fields).items()}
        return [[mean[tuple(getattr(u, field) for field in fields)] for u in order] for order in self.schedule.ranks]

    def totals(self, field: str) -> list[float]:
        """Returns the seconds of all units of each stage, segment or micro-batch."""
        return [sum(seconds) for _, seconds in sorted(self.alike(field).items())]


def idle_of_ranks(times: StepTimes) -> tuple[Idle, ...]:
    """Returns the idle time of every rank by cause, as :class:`Idle` describes."""
    delayed = []  # units with a share of the engine's own time; a rank's first unit also has the late entry
    for seconds, own, late in zip(times.units, times.own, times.late, strict=True):
        delayed.append([each + own / len(seconds) for each in seconds])
        delayed[-1][0] += late
    ever_closer = [times.means("kind", *more) for more in ((), ("stage",), ("stage", "segment"))]
    spans = [times.schedule.simulate(durations=each).makespan for each in (*ever_closer, times.units, delayed)]
    busy = [[sum(track) for track in each] for each in (*ever_closer, *[times.units] * 3)]
    found = []
    for rank in range(len(times.units)):
        idle = [span - ran[rank] for span, ran in zip((*spans, times.makespan), busy, strict=True)]
        found.append(Idle(idle[0], *(after - before for before, after in pairwise(idle))))
    return tuple(found)


def mean_idle(ranks: tuple[Idle, ...]) -> Idle:
    """Returns the mean over ranks: each cause's part of the makespan, in seconds."""
    return Idle(*(sum(values) / len(ranks) for values in zip(*map(astuple, ranks), strict=True)))


def advice(times: StepTimes, ranks: tuple[Idle, ...]) -> str:
    """Returns a sentence: the main cause of idle time, in numbers, and a remedy."""
    if not times.makespan > 0:
        return "the step took no time"
    mean = mean_idle(ranks)
    if mean.total < _LITTLE * times.makespan:
        return f"the ranks are busy {1 - mean.total / times.makespan:.0%} of the step: there is little to gain"
    cause = max(CAUSES, key=lambda name: float(getattr(mean, name)))
    most = max(range(len(ranks)), key=lambda rank: float(getattr(ranks[rank], cause)))
    seconds = getattr(ranks[most], cause)
    share = f"{seconds / times.makespan:.0%} of the step ({seconds:.3g} s)"
    return f"rank {most} waits {share} because {_REMEDIES[cause](times)}"


def _of_order(times: StepTimes) -> str:
    why = "the order itself fills and drains the pipeline"
    more = f"more micro-batches (now {times.schedule.num_microbatches})"
    if times.is_tuned:
        return f"{why}, and the engine takes the best one that it finds: take {more}"
    split = ' or an order that splits the backward (schedule="seq-zb-h1")' if "B" in times.schedule.kinds else ""
    return f"{why}: take more segments (now {times.schedule.num_segments}), {more}{split}"


def _of_stages(times: StepTimes) -> str:
    """Returns advice for unequal stages: a move of whole layers that makes the slower of two stages faster.

    The quickest layer of any stage counts for a layer, because the ends of the model have other work beside layers.
    """
    seconds, layers = times.totals("stage"), times.layers
    last = len(seconds) - 1
    slow, quick = seconds.index(max(seconds)), seconds.index(min(seconds))
    loss = ", which also runs the loss," if slow == last else ""
    what = f"stage {slow}{loss} takes {seconds[slow] * len(seconds) / sum(seconds):.2f} times the mean stage"
    spread = 'spread the output head over the ranks (vocabulary="ranks", VocabularyParallelHead)'
    has_head = slow == last and "S" not in times.schedule.kinds
    if not layers or not layers[slow]:
        share = f"{1 - seconds[quick] / seconds[slow]:.0%} of its time"
        head = f", or {spread} if the loss takes more than that" * has_head
        return f"{what}: move layers from stage {slow} to stage {quick}, if one takes less than {share}{head}"
    layer = min(each / count for each, count in zip(seconds, layers, strict=True) if count)
    number = max(1, math.ceil((seconds[slow] - seconds[quick]) / layer / 2 - 0.5))
    after = max(seconds[slow] - number * layer, seconds[quick] + number * layer)
    if number < layers[slow] and after < (1 - _GAIN) * seconds[slow]:
        moved = "1 layer" if number == 1 else f"{number} layers"
        return f"{what}: move {moved} of {layers[slow]} from stage {slow} to stage {quick}"
    found = f"{what}, and no split of whole layers is better, as one layer is {layer / seconds[slow]:.0%} of that stage"
    rest = seconds[last] - layers[last] * layer
    if has_head and rest * last / len(seconds) > _GAIN * seconds[slow]:
        return f"{found}; what is no layer there takes as long as {rest / layer:.1f} of them: {spread}"
    return found


def _of_segments(times: StepTimes) -> str:
    seconds = times.totals("segment")
    long, short = seconds.index(max(seconds)), seconds.index(min(seconds))
    ratio = seconds[long] / seconds[short] if seconds[short] > 0 else math.inf
    what = f"segment {long} takes {ratio:.2f} times as long as segment {short}: "
    if max(times.sizes) < 1.1 * min(times.sizes):
        return (
            f"{what}cut them by cost, with segment_sizes=ModelShape(...) or "
            'partition_sequence(strategy="profiled", costs=report.segment_seconds)'
        )
    return f"{what}make segment {long} shorter and segment {short} longer"


def _of_microbatches(times: StepTimes) -> str:
    groups = times.alike("kind", "stage", "segment").items()
    (kind, stage, segment), seconds = max(groups, key=lambda group: max(group[1]) - min(group[1]))
    return (
        f"units differ from one micro-batch to the next, {kind} of stage {stage}, segment {segment} from "
        f"{min(seconds) * 1e3:.3g} to {max(seconds) * 1e3:.3g} ms: measure a later step if this is the first of its "
        "shape, pack documents alike, and see what else runs on the machine"
    )


def _of_host(times: StepTimes) -> str:
    latest = max(range(len(times.late)), key=times.late.__getitem__)
    if times.late[latest] > max(times.own):
        return (
            f"rank {latest} enters the step {times.late[latest] * 1e3:.3g} ms after its first unit began: "
            "see what that rank does between steps"
        )
    count = sum(map(len, times.units))
    unit, own = sum(map(sum, times.units)) * 1e3 / count, sum(times.own) * 1e3 / count
    return (
        f"the engine on the host needs {own:.2g} ms around each unit, and a unit takes only {unit:.3g} ms: take fewer "
        f"segments (now {times.schedule.num_segments}) or larger micro-batches"
    )


def _of_transfer(times: StepTimes) -> str:
    return (
        f"messages take time: take fewer segments (now {times.schedule.num_segments}), an order with a forward more in "
        'flight (for the engine schedule=partial(build_schedule, "seq1f1b", options={"extra_warmup": 1})), or more '
        "places (prefetch= or costs= of Schedule.replace)"
    )


_REMEDIES: dict[str, Callable[[StepTimes], str]] = {
    "schedule": _of_order,
    "stages": _of_stages,
    "segments": _of_segments,
    "microbatches": _of_microbatches,
    "host": _of_host,
    "transfer": _of_transfer,
}
