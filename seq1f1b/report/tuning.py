"""Finds an engine's order during training: measures units, simulates orders with these costs, tries the best orders.

The steps are ordinary training steps, under different orders. All ranks take equal orders: rank 0 decides, and before
each step the ranks compare progress.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import torch

from seq1f1b import ScheduleError
from seq1f1b.engine.options import Options, first_family
from seq1f1b.engine.order import Setting, with_options
from seq1f1b.engine.step import StepRecord
from seq1f1b.partition import partition_sequence
from seq1f1b.placement import free_bytes
from seq1f1b.plan import TunedOrder
from seq1f1b.report.report import Report
from seq1f1b.schedule import Costs, build_schedule
from seq1f1b.seconds import MeasuredUnits, spans_of, terms_of

__all__: list[str] = []

MEASURED = 2  # steps of each probe with measured units, after a first step to warm caches
ROUNDS = 5  # timed steps of each tried order
TRIED = 3  # tried orders, beside the engine's first order
LEAST_GAIN = 0.01  # share of the step: an order that gains less does not replace the engine's first order
MOST_CHANGE = 1.25  # ratio of lengths that may share an order
PATIENCE = 10  # steps in a row of other lengths, before a new search begins
MOST_UNITS = 8192  # units of an order built by `auto`
SHORTEST = 32  # tokens of a segment
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # numbers of segments to simulate
SEARCHED = 4  # cuts of a sequence for which `auto` searches an order: those with the shortest named orders
MOST_STEPS = 2 + 4 * (1 + MEASURED) + (1 + TRIED) * (1 + ROUNDS)  # steps of a search with four probes
MEMORY = 0.8  # share of free memory that an order may take beyond the first order


class Choice(NamedTuple):
    """An order as told by rank 0 to the other ranks.

    Attributes:
        family, options: name and options of :func:`seq1f1b.build_schedule`.
        fills: whether W runs in waits.
        balance: 0: the engine's argument cuts segments. Else segments take equal time, by ``balance``, the position at
            which attention takes as long as a token's other work.
    """

    family: str
    options: dict[str, Any]
    num_segments: int
    fills: bool = False
    balance: float = 0.0

    def __str__(self) -> str:
        whole = " of whole backwards" * (self.options.get("backward") == "whole")
        count = "1 segment" if self.num_segments == 1 else f"{self.num_segments} segments"
        balance = " of equal time" * (self.balance > 0)
        return f"{self.family}{whole}, {count}{balance}" + ", W in waits" * self.fills


Figures: TypeAlias = "tuple[Any, ...]"
"""One rank's figures of a step: tokens; in timed steps also seconds; in probes also the units' seconds by pass, stage
and segment, the median of the micro-batches; the bytes per live token of each stage; the free bytes of the device."""

Walk: TypeAlias = "Generator[Choice | None, list[Figures], None]"
"""Yields the order of the next step (None: the first one); is sent what all ranks measured of it."""


class Tuner:
    """The state of the search, equal on every rank.

    Args:
        first: the setting of the engine's first steps, a safe setting.
        group: the pipeline's ranks.
        report: the rank's report of the last step.
    """

    def __init__(
        self,
        first: Setting,
        stages_per_rank: int,
        *,
        group: Any,
        device: torch.device,
        report: Callable[[], Report],
    ) -> None:
        self.first = self.setting = first
        self._device = device
        self._told = ""
        self._stages_per_rank, self._group, self._report = stages_per_rank, group, report
        self._settings: dict[str, Setting] = {}  # settings of the current search
        self._stamp = 0
        self._kept: tuple[int, Setting] | None = None  # length and setting at the end of a search
        self._ran = first
        self._begin()

    @property
    def text(self) -> str:
        """Words about the found order, or about the progress of the search."""
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms is on: nothing is tuned"
        steps = f"{self._stamp - self._started} of at most {MOST_STEPS}"
        return self._told or f"tuning: {steps} steps of training, under one order or another"

    @property
    def has_found(self) -> bool:
        """Whether steps run the found order."""
        return bool(self._told) and not torch.are_deterministic_algorithms_enabled()

    def _begin(self) -> None:
        self._told, self._started, self._reads = "", self._stamp, ""
        self._length = self._others = 0
        self._settings.clear()
        self._walk: Walk = self._search()
        self._take(next(self._walk))

    def next(self, record: StepRecord | None, length: int) -> Setting:
        """Returns the setting of the next training step. Collective.

        Args:
            record: record of the last step; None: no step yet, or a failed step.
            length: tokens of the next step; 0: unknown on this rank.
        """
        if torch.are_deterministic_algorithms_enabled():
            return self.first
        own = None if record is None else self._figures(record)
        everyones = self._group.all_gather_object((self._stamp, length, own))
        measured = [figures for *_, figures in everyones if figures is not None]
        if len({stamp for stamp, *_ in everyones}) > 1:  # a step failed on some ranks alone
            self._stamp = 1 + max(stamp for stamp, *_ in everyones)
            self._begin()
        elif len(measured) == len(everyones) and self._ran is self.setting:
            self._stamp += 1
            self._advance(measured)
        self._ran = self._fitting(self.setting, max(known for _, known, _ in everyones))
        return self._ran

    def evaluate(self, length: int) -> Setting:
        """Returns the setting for evaluation: the last training step's, or the first if ``length`` is too short."""
        return self._fitting(self._ran, length)

    def _fitting(self, setting: Setting, length: int) -> Setting:
        is_fit = length >= setting.options.num_segments and not torch.are_deterministic_algorithms_enabled()
        return setting if is_fit else self.first

    def _advance(self, measured: list[Figures]) -> None:
        length = measured[0][0]
        is_alike = not self._length or 1 / MOST_CHANGE <= length / self._length <= MOST_CHANGE
        self._others = 0 if is_alike else self._others + 1
        if self._others == PATIENCE:
            self._begin()
        elif is_alike:
            self._length = self._length or length
            self._take(self._walk.send(measured))

    def found(self) -> TunedOrder:
        """Returns the found order. Raises RuntimeError during the first search."""
        if self._kept is None:
            raise RuntimeError(f"no order has been found yet, after {self._stamp} steps: {self.text}; train on")
        length, setting = self._kept
        first = self.first.options
        choice = setting.choice or Choice(first_family(self._stages_per_rank), {}, first.num_segments)
        is_even = choice.balance == 0 and first.segment_sizes is None
        sizes = () if is_even else tuple(setting.options.sizes_of(length))
        return TunedOrder(choice.family, seq_len=length, segment_sizes=sizes, **self._counts(choice))

    def _figures(self, record: StepRecord) -> Figures:
        if self._reads == "seconds":  # in timed steps alone, because reading a GPU's time waits
            return record.length, record.step_seconds(self._group.rank)
        if self._reads == "units":
            report, alike = self._report(), defaultdict[tuple[str, int, int], list[float]](list)
            for (kind, stage, _, segment), seconds in report._shared_seconds.items():
                alike[kind, stage, segment].append(seconds)
            units = [(*key, median(seconds)) for key, seconds in alike.items()]
            of_token = [(s.activation_bytes or 0) / max(1, s.peak_live_tokens) for s in report.stages]
            return record.length, units, of_token, free_bytes(self._device)
        return (record.length,)

    def _take(self, choice: Choice | None) -> None:
        if choice is not self.setting.choice:  # as in no step after the search
            name = repr(choice)
            if name not in self._settings:
                self._settings[name] = self.first if choice is None else self.make(choice)
            self.setting = self._settings[name]

    def make(self, choice: Choice) -> Setting:
        """Returns the setting of a choice."""
        first = self.first
        schedule = build_schedule(choice.family, **self._counts(choice))
        if schedule.rank_of_stage != first.schedule.rank_of_stage:
            raise ValueError(f"{choice.family} holds its stages on other ranks")
        options = self._options(choice)
        return Setting(with_options(schedule, options, self._device), options, choice)

    def _counts(self, choice: Choice) -> dict[str, Any]:
        """Returns arguments of :func:`seq1f1b.build_schedule` for a choice, and fields of a :class:`TunedOrder`."""
        return {
            "num_ranks": self.first.schedule.num_ranks,
            "num_microbatches": self.first.schedule.num_microbatches,
            "num_segments": choice.num_segments,
            "stages_per_rank": self._stages_per_rank,
            "options": choice.options,
            "weights": "fill" if choice.fills else "planned",
        }

    def _options(self, choice: Choice) -> Options:
        sizes = self.first.options.segment_sizes if choice.balance == 0 else equal_time(choice)
        return replace(self.first.options, num_segments=choice.num_segments, segment_sizes=sizes)

    # -- the search --------------------------------------------------------------------------------------------------

    def _search(self) -> Walk:
        yield None
        length = (yield None)[0][0]
        self._reads = "units"
        steps: list[tuple[Setting, list[Figures]]] = []
        for probe in list(self._probes(length)):
            yield probe
            for _ in range(MEASURED):
                measured = yield probe
                steps.append((self.setting, measured))
        self._reads = ""
        choices = [tuple(choice) for choice in self._candidates(length, steps)] if self._group.rank == 0 else []
        decided = self._group.all_gather_object(choices)[0]
        tried: list[Choice | None] = [None, *(Choice(*choice) for choice in decided)]
        for choice in tried:
            yield choice
        self._reads = "seconds"
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(ROUNDS):
            for choice in tried:
                measured = yield choice
                seconds[repr(choice)].append(max(own[1] for own in measured) * length / measured[0][0])
        self._reads = ""
        found = {name: median(each) for name, each in seconds.items()}
        best = min(tried, key=lambda choice: found[repr(choice)])
        if found[repr(best)] > (1 - LEAST_GAIN) * found[repr(None)]:
            best = None
        self._told = self._words(best, tried, found, length)
        self._take(best)
        self._kept = length, self.setting
        while True:
            yield best

    def _probes(self, length: int) -> Iterator[Choice]:
        first = self.first.options.num_segments
        fewer = max(2, first) if length >= 2 * SHORTEST else 1
        families = ["seq1f1b", "seq-zb-h1"] if self._stages_per_rank == 1 else ["seq1f1b-interleaved"]
        for family in families:
            for num_segments in (fewer, 2 * fewer):
                choice = Choice(family, {}, num_segments)
                if num_segments * SHORTEST <= length:
                    with contextlib.suppress(ValueError):
                        self.make(choice)
                        yield choice

    def _candidates(self, length: int, steps: Sequence[tuple[Setting, list[Figures]]]) -> list[Choice]:
        """Returns the shortest orders by simulation with the seconds of measured units, best first."""
        if not steps:
            return []
        units, most = measured_units(steps)
        _, measured = steps[-1]
        of_token = max((each for own in measured for each in own[2]), default=0.0)  # bytes per live token
        first, found = self.first, list[tuple[float, Choice]]()
        room = max(first.schedule.peak_tokens(first.options.sizes_of(length))) * of_token
        room += MEMORY * min(own[3] for own in measured) / len(measured)

        def simulate(choices: Iterable[Choice]) -> None:
            for choice in choices:
                with contextlib.suppress(ValueError, ScheduleError):
                    setting = self.make(choice)
                    sizes = setting.options.sizes_of(length)
                    if max(setting.schedule.peak_tokens(sizes)) * of_token <= room:
                        simulated = setting.schedule.simulate(costs_of(units, sizes))
                        found.append((simulated.makespan, choice))
            found.sort(key=lambda each: each[0])

        simulate(self._named(length, units, most))
        cuts = dict.fromkeys((choice.num_segments, choice.balance) for _, choice in found)
        for num_segments, balance in list(cuts)[:SEARCHED]:
            simulate(self._found(length, num_segments, balance, units))
        return [choice for _, choice in found[:TRIED]]

    def _named(self, length: int, units: MeasuredUnits, most: int) -> Iterator[Choice]:
        most = max(1, min(length // SHORTEST, 4 * most))
        own = self.first.options.segment_sizes is not None
        names = ["seq1f1b"] + ["seq-zb-h1", "seq-zb-h2"] * units.splits
        if self._stages_per_rank > 1:
            names = ["seq1f1b-interleaved"] + ["seq-zbv"] * units.splits
        for k in (k for k in COUNTS if k <= most):
            for balance in (0.0,) if own or k == 1 or not units.balance else (0.0, units.balance):
                for name in names:
                    yield Choice(name, {}, k, False, balance)
                    if units.splits:
                        yield Choice(name, {}, k, True, balance)

    def _found(self, length: int, k: int, balance: float, units: MeasuredUnits) -> Iterator[Choice]:
        first, v = self.first, self._stages_per_rank
        if 3 * first.schedule.num_stages * first.schedule.num_microbatches * k > MOST_UNITS:
            return
        sizes = self._options(Choice("auto", {}, k, False, balance)).sizes_of(length)
        placement = {} if v == 1 else {"placement": "loop"}
        seconds, _ = units.seconds(spans_of(sizes))
        tables = [table.tolist() for table in (seconds.forward, seconds.input, seconds.weight)]
        for backward in ("whole", "split") if units.splits else ("whole",):
            for fills in (False, True) if units.splits and self._device.type == "cpu" else (False,):
                yield Choice("auto", {"costs": tables, "backward": backward, **placement}, k, fills, balance)

    def _words(self, best: Choice | None, tried: list[Choice | None], found: dict[str, float], length: int) -> str:
        first = f"the engine's own order ({found[repr(None)]:.4g} s)"
        others = ", ".join(f"{choice} ({found[repr(choice)]:.4g} s)" for choice in tried if choice not in (None, best))
        gain = found[repr(None)] / found[repr(best)] - 1
        what = first if best is None else f"{best} ({found[repr(best)]:.4g} s), {gain:.0%} faster than {first}"
        steps = self._stamp - self._started
        return f"tuned for {length} tokens in {steps} steps: {what}" + f"; tried besides: {others}" * bool(others)


def equal_time(choice: Choice) -> Callable[[int], list[int]]:
    """Returns a function that cuts a sequence of any length into segments of equal time, by the choice's balance."""

    def cut(length: int) -> list[int]:
        pieces = min(length, 1024)
        costs = [choice.balance + length * (i + 0.5) / pieces for i in range(pieces)]
        return partition_sequence(length, choice.num_segments, strategy="profiled", costs=costs)

    return cut


def measured_units(steps: Iterable[tuple[Setting, list[Figures]]]) -> tuple[MeasuredUnits, int]:
    """Returns a source of seconds of units of any length, and the largest measured number of segments."""
    found, most = [], 0
    for setting, measured in steps:
        spans = spans_of(setting.options.sizes_of(measured[0][0]))
        tokens, pairs = spans.tokens.tolist(), spans.pairs.tolist()
        most = max(most, len(tokens))
        units = (unit for own in measured for unit in own[1])
        found += [(kind, stage, tokens[s], pairs[s], seconds) for kind, stage, s, seconds in units]
    return MeasuredUnits(terms_of(found)), most


def costs_of(units: MeasuredUnits, sizes: list[int]) -> Costs:
    """Returns the costs of an order with segments of ``sizes`` tokens."""
    seconds, shards = units.seconds(spans_of(sizes))
    return Costs(**seconds._asdict(), **shards)
