"""The price of candidates: what they cost from step to step, and why a family is not among the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from seq1f1b.partition import ModelShape
from seq1f1b.plan import Layout
from seq1f1b.planning.case import Candidate, Case, Uncertain
from seq1f1b.planning.cost import CostModel, Price
from seq1f1b.planning.hardware import Hardware
from seq1f1b.planning.orders import LEVELS
from seq1f1b.schedule import Costs, Schedule, build_schedule
from seq1f1b.seconds import Span, seconds_of
from seq1f1b.table import rounded

__all__ = ["GIB", "LEAST_GAIN", "STEPS", "Pricing", "group_lengths"]

GIB = 1 << 30
_MOST_UNITS = 10_000_000  # of one candidate, about 300 bytes each
LEAST_GAIN = 0.002  # share of the step; what gains less is not looked for
_MOST_OF_AUTO = 40_000  # units of all orders that are searched for unless auto is asked for: a second or two
_MOST_LENGTHS = 8  # that sequences are padded to, where they have more
STEPS = {True: 2, False: 3}  # simulated for the period, by optimizer_sync; with it all steps but the first are alike
_MOST_KEPT = 4_000_000  # units of the orders that several candidates share, kept for the next one


class Length(NamedTuple):
    """Steps of one length: what sequences are padded to, their share of all steps, tokens of a sequence in the mean."""

    seq_len: int
    share: float
    tokens: float


def group_lengths(seq_len: int | None, lengths: Mapping[int, int] | None, layout: Layout | None) -> list[Length]:
    """Ascending, at most ``_MOST_LENGTHS``."""
    if (seq_len is None) == (lengths is None):
        raise ValueError("give seq_len, or lengths where sequences differ: one of the two")
    if lengths is None:
        lengths = {seq_len or 0: 1}
    elif layout is not None and layout.documents is not None:
        raise ValueError("documents are packed into sequences of one length: give seq_len, not lengths")
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"{'seq_len' if seq_len is not None else 'a length'} is {min(lengths, default=0)}, must be at least 1"
        )
    if min(lengths.values()) < 1:
        raise ValueError(f"a length has {min(lengths.values())} sequences, must have at least 1")
    total, before = sum(length * count for length, count in lengths.items()), 0
    groups: dict[int, list[tuple[int, int]]] = {}
    for number, (length, count) in enumerate(sorted(lengths.items())):
        group = number if len(lengths) <= _MOST_LENGTHS else _MOST_LENGTHS * before // total
        groups.setdefault(group, []).append((length, count))
        before += length * count
    grouped = []
    for members in groups.values():
        sequences = sum(count for _, count in members)
        tokens = sum(length * count for length, count in members)
        grouped.append(Length(members[-1][0], sequences / sum(lengths.values()), tokens / sequences))
    return grouped


@dataclass(eq=False)
class Pricing:
    """The work of all candidates, their price, the best of them, and what became of each family.

    Attributes:
        lengths: of the sequences, ascending.
        cap: bytes of a device.
        best, within: how many are kept at most, none slower than ``within`` times the fastest.
        fitting: the best, fastest first.
        is_quick: whether orders with remedies are searched for by one level, until they are refined.
    """

    model: ModelShape
    hardware: Hardware
    lengths: Sequence[Length]
    num_ranks: int
    num_microbatches: int
    layout: Layout
    optimizer_sync: bool
    cap: int
    best: int
    within: float
    progress: Callable[[int, int], None] | None
    fitting: list[Case] = field(default_factory=list)
    num_candidates: int = 0
    num_simulated: int = 0
    is_quick: bool = False

    def __post_init__(self) -> None:
        self._left_of_auto = _MOST_OF_AUTO
        self._seconds: dict[Candidate, tuple[int, float]] = {}  # by all but k: at which it is fastest, and its seconds
        self._of_k: dict[int, float] = {}  # the least seconds of each number of segments
        self._units_priced = 0  # of all ranks, in F and B
        self._too_large: dict[Candidate, int] = {}  # peak bytes of what did not fit, by all but k and the split
        self._bounds: dict[tuple[Any, ...], tuple[float, ...]] = {}
        self._costs: dict[tuple[int, str, int, int, str], CostModel] = {}
        self._priced: dict[tuple[Any, ...], Price] = {}
        self._broken: dict[str, dict[str, None]] = {}  # rules that a family's counts break
        self._orders: dict[tuple[str, int, int], Schedule] = {}  # those that do not depend on costs, by family, v and k
        self._least: dict[str, tuple[int, Candidate]] = {}  # peak bytes, of what does not fit
        self._slower: dict[str, tuple[float, bool]] = {}  # seconds; whether they are only a lower bound
        self.longest = self.lengths[-1].seq_len
        alone = [self._cost_of(each.seq_len, 1, self.layout) for each in self.lengths]  # raises unless all is sound
        wholes = [(cost.parts, cost.span(0, cost.seq_len)) for cost in alone]
        layers = [
            sum(n * parts.layer(whole, kind).total for kind, n in enumerate(parts.counts)) for parts, whole in wholes
        ]
        seconds = [each.share * layer for each, layer in zip(self.lengths, layers, strict=True)]
        main = self.lengths[seconds.index(max(seconds))].seq_len  # most of the time goes to this length
        self.balances = tuple(dict.fromkeys((self.longest, main, 0)))

    def mean(self, values: Iterable[float]) -> float:
        """Over the steps, of one value for each length."""
        return sum(each.share * value for each, value in zip(self.lengths, values, strict=True))

    def period(self, schedule: Schedule, costs: Costs) -> tuple[float, float]:
        """Seconds from step to step, and the share of them in which ranks neither compute nor update."""
        run = schedule.simulate(costs, steps=STEPS[self.optimizer_sync], optimizer_sync=self.optimizer_sync)
        assert run.period is not None and isinstance(costs.optimizer, Sequence)
        return run.period, 1 - (sum(run.busy) + sum(costs.optimizer)) / (run.period * self.num_ranks)

    # -- orders

    def _rule(self, candidate: Candidate) -> str | None:
        """The rule of the family, or of the model's layers, that the counts break; None if they break none."""
        if self.num_ranks * candidate.stages_per_rank > self.model.layers:
            return f"P v <= {self.model.layers} layers"
        if self.num_units(candidate) > _MOST_UNITS:
            return f"2 P v M k <= {_MOST_UNITS} units"
        return candidate.family.broken_rule(**self._counts(candidate))

    def _counts(self, candidate: Candidate) -> dict[str, Any]:
        counts = {"num_ranks": self.num_ranks, "num_microbatches": self.num_microbatches}
        return counts | {"num_segments": candidate.num_segments, "stages_per_rank": candidate.stages_per_rank}

    def build(self, candidate: Candidate, options: Mapping[str, Any]) -> Schedule:
        """The order; that of a family which takes no costs is kept for other candidates, the oldest kept ones go
        first."""
        key = (candidate.family.name, candidate.stages_per_rank, candidate.num_segments)
        if options:
            return build_schedule(candidate.family.name, options=options, **self._counts(candidate))
        if key not in self._orders:
            self._orders[key] = build_schedule(candidate.family.name, **self._counts(candidate))
            units = 2 * self.num_ranks * self.num_microbatches
            while len(self._orders) > 1 and units * sum(v * k for _, v, k in self._orders) > _MOST_KEPT:
                del self._orders[next(iter(self._orders))]
        return self._orders[key]

    # -- prices

    def _cost_of(self, seq_len: int, stages_per_rank: int, layout: Layout) -> CostModel:
        counts = {"num_ranks": self.num_ranks, "stages_per_rank": stages_per_rank, "seq_len": seq_len}
        return CostModel(self.model, self.hardware, layout=layout, **counts)

    def _price(self, candidate: Candidate, seq_len: int) -> Price:
        """The price of its units in sequences of one length. Candidates share stages and segments."""
        _, v, k, mix, inside, balance, _, vocabulary = candidate
        of_cost = (v, inside, balance, seq_len, vocabulary)
        if of_cost not in self._costs:
            layout = replace(self.layout, inside=inside, layers=None, vocabulary=vocabulary)
            if balance:
                layout = replace(layout, layers=self._cost_of(balance, v, layout).balanced_layers())
            self._costs[of_cost] = self._cost_of(seq_len, v, layout)
        of_price = (*of_cost, k, mix)
        if of_price not in self._priced:
            step = math.lcm(self.layout.tensor * self.layout.context, 128)
            step = 1 if seq_len < 8 * step * k else step
            cost = self._costs[of_cost]
            self._priced[of_price] = cost.price(cost.split(k, mix=mix, multiple_of=step))
        return self._priced[of_price]

    def _prices(self, candidate: Candidate) -> list[Price]:
        """For each length."""
        return [self._price(candidate, each.seq_len) for each in self.lengths]

    def is_repeated(self, candidate: Candidate) -> bool:
        """Whether its layers are those of a balance before it."""
        before = self.balances[: self.balances.index(candidate.balance)]
        layers = self._price(candidate, self.longest).cost.layers
        others = (self._price(candidate._replace(balance=balance), self.longest) for balance in before)
        return any(other.cost.layers == layers for other in others)

    def _bound_of(self, price: Price, splits: bool) -> float:
        """Seconds that no order of these units can beat. splits: whether the order may split backwards.

        A step takes at least the mean of the ranks' work, and at least the work of each stage. If steps do not overlap,
        the first segment's way down to that stage and the way back up come on top.
        """
        seconds, M = price.seconds, self.num_microbatches
        # What a backward takes, and its part on the way up: a W that is its own unit may run beside that.
        backward = way_up = seconds.backward
        if splits:  # some such orders have whole backwards, too
            tables = zip(seconds.backward, seconds.input, seconds.weight, strict=True)
            backward = [[min(b, i + w) for b, i, w in zip(*rows, strict=True)] for rows in tables]
            tables_up = zip(seconds.backward, seconds.input, strict=True)
            way_up = [[min(b, i) for b, i in zip(*rows, strict=True)] for rows in tables_up]
        optimizer = price.cost.optimizer_seconds()
        work = [[M * sum(row) for row in part] for part in (seconds.forward, backward, way_up)]
        least: float = (sum(work[0]) + sum(work[1]) + sum(optimizer)) / self.num_ranks + M * of_shards(price)
        down, up = optimizer[0], 0.0
        for stage, (forward, back, back_up) in enumerate(zip(*work, strict=True)):
            least = max(least, optimizer[stage] + forward + back)
            if self.optimizer_sync:
                least = max(least, down + forward + back_up + up)
            down += seconds.forward[stage][0]
            up += way_up[stage][0]
        return least

    def bound(self, candidate: Candidate) -> float:
        """Seconds that no order of these units can beat, in the mean over the steps."""
        return self.mean(self._bounds_of(candidate))

    def _bounds_of(self, candidate: Candidate) -> tuple[float, ...]:
        """The least seconds of the steps of each length."""
        splits = candidate.family.splits_backward
        key = (candidate._replace(family=None, remedies=()), splits)  # type: ignore[arg-type]
        if key not in self._bounds:
            self._bounds[key] = tuple(self._bound_of(price, splits) for price in self._prices(candidate))
        return self._bounds[key]

    def fill_tokens(self) -> int:
        """Tokens from which on a segment fills the device: its time per token is at most twice that of a long one."""
        sizes = [1 << i for i in range(5, 21)]
        cost = self._cost_of(self.longest, 1, self.layout)
        none = (0.0,) * len(cost.parts.windows)
        found = seconds_of(cost.source, [Span(size, 0.0, size, none) for size in sizes])
        rates = [(f + b) / n for f, b, n in zip(found.forward[0], found.backward[0], sizes, strict=True)]
        return next(n for n, rate in zip(sizes, rates, strict=True) if rate <= 2 * rates[-1])

    def num_units(self, candidate: Candidate) -> int:
        """F and B of all ranks."""
        return 2 * self.num_ranks * candidate.stages_per_rank * self.num_microbatches * candidate.num_segments

    def allowed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that can be built, the lowest bound first."""
        self.num_candidates += len(candidates)
        possible = []
        for i, candidate in enumerate(candidates):
            if (rule := self._rule(candidate)) is None:
                possible.append((candidate, i))
            else:
                self._broken.setdefault(candidate.family.name, {})[rule] = None
        known = sorted((self.bound(candidate), i) for candidate, i in possible if not self.is_repeated(candidate))
        return [candidates[i] for _, i in known]

    def consider(self, tried: Sequence[Candidate], most_units: float = math.inf) -> None:
        """Prices candidates in turn, until so many units have been priced."""
        begin = self._units_priced
        for done, candidate in enumerate(tried):
            if self.progress is not None:
                self.progress(done, len(tried))
            if self._units_priced - begin >= most_units:
                continue
            seconds = self._consider(candidate)
            of = candidate._replace(num_segments=0, mix=1.0)
            k = candidate.num_segments
            if seconds is None:
                continue
            self._of_k[k] = min(seconds, self._of_k.get(k, math.inf))
            if seconds < self._seconds.get(of, (0, math.inf))[1]:
                self._seconds[of] = (k, seconds)

    def _consider(self, candidate: Candidate) -> float | None:
        """Prices a candidate unless it cannot be among the best; keeps it if it fits and is.

        Returns:
            Its seconds, where it was priced and fits.
        """
        name, bound, fitting = candidate.family.name, self.bound(candidate), self.fitting
        limit = self.within * fitting[0].seconds if fitting else math.inf
        if len(fitting) >= self.best:
            limit = min(limit, fitting[-1].seconds)
        if bound >= limit:
            if bound < self._slower.get(name, (math.inf, True))[0]:
                self._slower[name] = (bound, True)
            return None
        case = Case(self, candidate, self._prices(candidate), self._bounds_of(candidate))
        if fitting and not candidate.remedies:
            least = case.longest.least_bytes()
            if least > self.cap:
                self._least.setdefault(name, (math.ceil(least), candidate))
                return None
        found = case.priced(LEVELS[:1] if self.is_quick else LEVELS)
        is_dear = candidate.remedies or isinstance(found, Case)  # else it was only looked at
        self._units_priced += self.num_units(candidate) // (1 if is_dear else 4)
        if found is None:
            return None  # it fits without its remedies, and so does the candidate without
        if isinstance(found, int):
            self._too_large[candidate._replace(num_segments=0, mix=1.0)] = found
            if found < self._least.get(name, (math.inf, candidate))[0]:
                self._least[name] = (found, candidate)
            return None
        if found.seconds < self._slower.get(name, (math.inf, True))[0] or self._slower[name][1]:
            self._slower[name] = (found.seconds, False)
        alike = [other for other in fitting if self._is_alike(other, found)]
        if any(other.sort_key <= found.sort_key for other in alike):
            return found.seconds  # another split or name of the same is as good
        fitting[:] = [other for other in fitting if other not in alike]
        fitting.append(found)
        fitting.sort(key=lambda each: each.sort_key)
        fitting[:] = [each for each in fitting[: self.best] if each.seconds <= self.within * fitting[0].seconds]
        return found.seconds

    @staticmethod
    def _is_alike(one: Case, other: Case) -> bool:
        """Whether they differ in the split, or the family's name, alone."""
        of_other = other.candidate._replace(mix=one.candidate.mix)
        if one.candidate == of_other:
            return True
        counts = one.candidate._replace(family=of_other.family, remedies=of_other.remedies)
        return counts == of_other and one.made.schedule == other.made.schedule

    @staticmethod
    def as_uncertain(found: Case, terms: Iterable[Uncertain], like: Case) -> tuple[Uncertain, ...]:
        """The terms of another plan, taken to move this one by the same share."""
        scale = found.seconds / like.seconds
        return tuple(
            each._replace(change_at_low=scale * each.change_at_low, change_at_high=scale * each.change_at_high)
            for each in terms
        )

    # -- what to try

    def goes_on(self, k: int) -> bool:
        """Whether more than k segments may help: nothing fits so far, or k are better than half of them."""
        if not self.fitting:
            return True
        fewer = min((seconds for other, seconds in self._of_k.items() if other < k), default=math.inf)
        return self._of_k.get(k, math.inf) <= fewer * (1 - LEAST_GAIN)

    def likeliest(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The fastest first, by the bound, and by what the same with other segments took over it or lacked of room:
        more segments come nearer to the bound, and need less."""

        def expected(candidate: Candidate) -> float:
            of = candidate._replace(num_segments=0)
            bound, found = self.bound(candidate), self._seconds.get(of)
            if found is None:
                return 1.05 * bound * math.sqrt(max(1.0, self._too_large.get(of, 0) / self.cap))
            k, seconds = found
            return bound * math.sqrt(math.sqrt(max(1.0, seconds / self.bound(candidate._replace(num_segments=k)))))

        return sorted(candidates, key=expected)

    def between(self, most: int) -> list[Candidate]:
        """The best ones with numbers of segments that lie between those tried."""
        numbers = [(found.candidate, k * found.candidate.num_segments // 4) for found in self.fitting for k in (3, 6)]
        return self.allowed([each._replace(num_segments=k) for each, k in numbers if 4 < k <= most])

    @staticmethod
    def mixed(found: Sequence[Case], mixes: Sequence[float]) -> list[Candidate]:
        """Candidates of what was found, with other splits."""
        cut = [each.candidate for each in found if each.candidate.num_segments > 1]
        return [each._replace(mix=mix) for each in cut for mix in mixes if mix != each.mix and 0 <= mix <= 1]

    def instead(self, most: float = math.inf, **changes: Any) -> list[Candidate]:
        """The best ones, at most so many, in another way, where it may gain and, searched for, has few enough units."""
        found = list[Candidate]()
        for each in self.fitting:
            candidate = each.candidate._replace(**changes)
            if candidate in found or self.bound(candidate) > self.fitting[0].seconds * (1 - LEAST_GAIN):
                continue
            units = self.num_units(candidate) if candidate.family.name == "auto" else 0
            if units <= self._left_of_auto and len(found) < most:
                self._left_of_auto -= units
                found.append(candidate)
        return found

    def refine(self) -> None:
        """Searches for longer in place of the best order that was searched for with what its units give up."""
        made = next((i for i, each in enumerate(self.fitting) if each.candidate.is_searched), None)
        if made is not None:
            self.fitting[made] = self.fitting[made].refined()
            self.fitting.sort(key=lambda each: each.sort_key)

    # -- what is told

    def share_again(self, found: Case) -> float:
        """The share of the step in which ranks compute what they had computed before, or wait for the tier."""
        kept, P = [], self.num_ranks
        for price in self._prices(found.candidate._replace(inside="none")):
            seconds = price.seconds
            backward = [seconds.backward]
            if "W" in found.made.schedule.kinds:
                backward = [seconds.input, seconds.weight]
            work = sum(sum(map(sum, table)) for table in (seconds.forward, *backward)) + P * of_shards(price)
            kept.append((self.num_microbatches * work + sum(price.cost.optimizer_seconds())) / P)
        return max(0.0, 1 - found.bubble - self.mean(kept) / found.seconds)

    def explain_nothing(self) -> str:
        """Why there is no plan."""
        if not self._least:
            rules = sorted(f"{name} needs {rule}" for name, broken in self._broken.items() for rule in broken)
            return f"no schedule can be built for these counts: {'; '.join(rules)}"
        peak, candidate = min(self._least.values(), key=lambda least: least[0])
        return (
            f"nothing fits in {self.cap / GIB:.2f} GiB: the least possible is {peak / GIB:.2f} GiB, {candidate}; "
            "more ranks, a higher tensor or context degree, or more segments need less"
        )

    def reasons(self, slowest: float) -> dict[str, str]:
        """Why each family is not among the best: a kind of reason, a colon, and what says it."""
        reasons = {name: f"cannot be built: needs {', and '.join(rules)}" for name, rules in self._broken.items()}
        too_large = {
            name: f"too large: at least {peak / GIB:.1f} GiB ({candidate.counts})"
            for name, (peak, candidate) in self._least.items()
        }
        reasons |= too_large
        for name, (seconds, is_bound) in self._slower.items():
            digits = next((n for n in (3, 4) if f"{seconds:.{n}g}" != f"{slowest:.{n}g}"), None)
            if digits is None:
                last = rounded(slowest)
                reason = (
                    f"as fast: {last} s like the last, in more memory" if not is_bound else f"slower: than {last} s"
                )
            else:
                texts = [rounded(x, digits) for x in (seconds, slowest)]
                reason = f"slower: {'at least ' if is_bound else ''}{texts[0]} s against {texts[1]} s"
            reasons[name] = f"{reason}; or {too_large[name]}" if name in too_large else reason
        return reasons


def of_shards(price: Price) -> float:
    """Seconds of a rank's passes of the vocabulary in one micro-batch; 0 where it is not over the ranks."""
    return sum(sum(table[0]) for table in price.shard_seconds.values())
