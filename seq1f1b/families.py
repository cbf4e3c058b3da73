"""Families of orders by name; ``csrc/schedules`` builds them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any

from seq1f1b import _C
from seq1f1b.files import nearest_name
from seq1f1b.flat import MOST, Counts, flat, numbers, whole
from seq1f1b.unit import Unit

if TYPE_CHECKING:
    from seq1f1b.schedule import Schedule

__all__ = ["Family", "build_schedule", "families", "families_named", "schedules"]


@dataclass(frozen=True)
class Family:
    """A named way to order units.

    Attributes:
        name: name for :func:`seq1f1b.build_schedule`.
        description, source: one line each.
        validity: the rule of the family's counts, in P, M, k, v (ranks, micro-batches, segments, stages per rank).
        stages_per_rank: least v.
        options: names of the family's options.
        splits_backward: whether orders have I and W, unless an option says otherwise.
        has_segments: whether the source cuts micro-batches into segments; drawings and comparisons give other families
            whole micro-batches.
    """

    name: str
    description: str
    source: str
    validity: str
    stages_per_rank: int
    options: tuple[str, ...]
    splits_backward: bool
    has_segments: bool

    def broken_rule(
        self,
        *,
        num_ranks: int,
        num_microbatches: int,
        num_segments: int | Sequence[int] = 1,
        stages_per_rank: int = 1,
        options: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Returns the rule broken by the counts and options; None if the schedule can be built.

        Raises:
            ValueError: a count below 1, an option of another family.
        """
        counts = (num_ranks, num_microbatches, num_segments, stages_per_rank)
        return _C.schedule_broken_rule(*self.request(counts, options or {}))

    def request(
        self,
        counts: tuple[int, int, Any, int],
        options: Mapping[str, Any],
        parents: Sequence[Sequence[int] | None] | None = None,
    ) -> tuple[Any, ...]:
        """Returns the core's arguments: counts, options in the core's order, segments and parents of micro-batches."""
        num_ranks, num_microbatches, segments, stages_per_rank = counts
        rows = of_all = None
        if parents is not None:
            segments = segments if hasattr(segments, "__len__") else [segments] * num_microbatches
            of_all = _parents_of_all(num_microbatches, segments, parents)
        if hasattr(segments, "__len__"):
            rows, segments = numbers("num_segments", "i", segments), max(segments, default=0)
            if len(rows) != num_microbatches:
                rule = f"one number or one for each of {num_microbatches} micro-batches"
                raise ValueError(f"num_segments holds {len(rows)} values, must be {rule}")
        for name in options:
            if name not in self.options:
                raise ValueError(f"{self.name} takes no option '{name}'; it takes {', '.join(self.options) or 'none'}")
        whole("num_ranks", num_ranks, 1, MOST)
        whole("num_microbatches", num_microbatches, 1, MOST)
        whole("num_segments", segments, 1, MOST)
        whole("stages_per_rank", stages_per_rank, 1, MOST)
        form = Counts(num_ranks, num_ranks * stages_per_rank, segments, rows)
        read = tuple(
            _option(form, options[row[0]], *row) if row[0] in options else _LEFT_OUT[row[0]]
            for row in _C.FAMILY_OPTIONS
        )
        return self.name, num_ranks, num_microbatches, segments, stages_per_rank, read, rows, of_all


_LEFT_OUT = {name: None if kind in ("costs", "units", "ranks") else 0 for name, kind, _, _ in _C.FAMILY_OPTIONS}


def _option(form: Counts, value: Any, name: str, kind: str, least: int, words: tuple[str, str]) -> Any:
    """Returns an option in the core's form: a number, 1 or 2 for a word, or an array. The core refuses wrong counts."""
    is_table = kind in ("costs", "units", "ranks")
    columns = form.num_segments if form.rows is None else sum(form.rows)
    if is_table and not 0 < form.num_stages * columns < 2**31:
        return _LEFT_OUT[name]
    if kind == "costs":
        if not hasattr(value, "__len__") or len(value) != 3:
            raise ValueError("costs must hold the costs of F, I and W")
        tables = (flat(form, f"costs of {p}", _C.PER_CELL, table) for p, table in zip("FIW", value, strict=True))
        return sum(tables, array("d"))
    if is_table:
        return flat(form, name, _C.PER_CELL if kind == "units" else _C.PER_RANK, value, "q")
    if kind == "word":
        if value not in words:
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{name} is {value!r}, must be '{words[0]}' or '{words[1]}'")
        return words.index(value) + 1
    if kind == "seconds":
        return numbers(name, "d", [value])[0]
    return whole(name, value, least, MOST if kind == "int32" else 2**63 - 1)


_FAMILIES = {family.name: family for family in (Family(*facts) for facts in _C.schedule_families())}


def families() -> tuple[Family, ...]:
    """Returns every family of :func:`seq1f1b.build_schedule`, with its facts."""
    return tuple(_FAMILIES.values())


def schedules() -> tuple[str, ...]:
    """Returns the names for :func:`build_schedule`."""
    return tuple(_FAMILIES)


def families_named(names: Collection[str]) -> list[Family]:
    """Returns the families with the given names."""
    for name in names:
        if name not in _FAMILIES:
            raise ValueError(f"there is no schedule named {name!r}{nearest_name(name, _FAMILIES)}")
    return [_FAMILIES[name] for name in names]


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int | Sequence[int] = 1,
    stages_per_rank: int = 1,
    options: Mapping[str, Any] | None = None,
    parents: Sequence[Sequence[int] | None] | None = None,
    recompute: str | Callable[[Unit], bool] = "none",
    offload_units: str | Callable[[Unit], bool] = "none",
    prefetch: int | None = None,
    weights: str = "planned",
) -> Schedule:
    """Builds the order of a named family.

    Args:
        name: one of :func:`schedules`.
        num_ranks, num_microbatches, num_segments, stages_per_rank: P, M, k, v. ``num_segments`` may be a sequence, a
            number for each micro-batch: an order of rows, with costs and bytes ``[stage][micro-batch][segment]``. In
            rules of rows k is the largest number, and ``M k`` the sum. A family that needs equal numbers raises.
        options: further settings; ``seq1f1b.schedule.families()`` lists the options of each family.
            ``group``: micro-batches that go forward, and back, together.
            ``round``: interleaving: least number of micro-batches in a round.
            ``rounds``: interleaving, ``"microbatches"``, or ``"segments"``: each micro-batch goes round the ranks in
            groups of P segments or a few more, so fewer messages wait; k >= P, and without ``round``.
            ``extra_warmup``: more forwards before the first backward, for each stage behind the rank's own: trades
            memory for time if transfers are slow.
            ``cap``: most (stage, segment) units of a rank, if the backward is split; more than the family's own cap
            lets W wait for a bubble.
            ``unit_bytes``, ``cap_bytes``: a cap in bytes: ``unit_bytes`` of each unit from F to the end of W, a number
            or ``[stage][segment]``; ``cap_bytes`` of a rank, a number or a number per rank.
            ``transfer``: seconds of a message between two ranks.
            ``placement``: ``"loop"`` or ``"v"``, for ``"auto"``; default: the better of both.
            ``backward``: for ``"auto"``, ``"split"`` into I and W (default), or ``"whole"``, a B.
            ``trees``: with ``parents``, ``"nested"``: one branch after another, so a rank holds a path and P - 1 units
            more in place of a tree, and leaves use the memory of their keys in turn; or ``"numbers"``: segments
            go forward by their numbers and back in reverse, as in every other family.
            ``costs``: seconds of F, I and W, each a number or ``[stage][segment]``, if the backward is split: Ws fill
            the bubbles left by F and I; under these costs the order is never worse than the order for equal costs.
            ``"auto"`` searches the whole order by costs, and is never worse than a named family within an equal cap.
        parents: trees of segments: for each micro-batch a list with the parent of each segment, -1 for segment 0, the
            root, and a lower number than the segment's own for all other segments; None for a micro-batch without
            branches. F of a segment runs after F of its parent, the backward after the children's backwards. Every
            family builds for trees.
        recompute: units to recompute: ``"none"``, ``"all"``, or a callable of a unit, see :meth:`Schedule.recompute`.
        offload_units: units to move to a tier and back: ``"none"``, ``"all"``, or a callable of a unit, see
            :meth:`Schedule.offload`.
        prefetch, weights: number of receive places, and whether W fills waits (``"fill"``) or not (``"planned"``), see
            :meth:`Schedule.replace`. For places by time (None), the options ``costs`` and ``transfer`` are the times.

    Raises:
        ValueError: unknown name or option, or a number out of range.
        ScheduleError: the counts break a rule of the family; names the rule.
    """
    from seq1f1b.schedule import Schedule  # which names this function, too

    [family] = families_named([name])
    counts = (num_ranks, num_microbatches, num_segments, stages_per_rank)
    schedule = Schedule._from_handle(_C.schedule_build(*family.request(counts, options or {}, parents)))
    if prefetch is None and options and not {"costs", "transfer"}.isdisjoint(options):
        schedule._times = _times_of_options(schedule, options)
    if prefetch is not None or weights != "planned":
        schedule = schedule.replace(prefetch=prefetch, weights=weights)
    if recompute != "none":
        schedule = schedule.recompute(recompute)
    return schedule if offload_units == "none" else schedule.offload(offload_units)


def _times_of_options(order: Schedule, options: Mapping[str, Any]) -> array[float]:
    """Returns the seconds by which places are counted: those of the options, or 1 for F, I and W, and 0 for others."""
    forward, inputs, weight = (flat(order, "costs", _C.PER_CELL, each) for each in options.get("costs", (1, 1, 1)))
    known = {"forward": forward, "backward": array("d", map(add, inputs, weight)), "input": inputs, "weight": weight}
    nothing = array("d", bytes(8 * len(forward)))
    tables = (forward if name == "recompute" else known.get(name, nothing) for name in _C.PASS_NAMES)
    return sum(tables, array("d")) + flat(order, "transfer", _C.PER_PAIR, options.get("transfer", 0.0))


def _parents_of_all(num_microbatches: int, rows: Any, parents: Sequence[Sequence[int] | None]) -> array[int]:
    if isinstance(parents, int) or any(isinstance(own, int | str) for own in parents):
        raise TypeError(f"parents must hold a list for each micro-batch, or None for a chain, got {parents!r:.80}")
    if len(parents) != num_microbatches:
        raise ValueError(
            f"parents hold {len(parents)} lists, must hold one for each of {num_microbatches} micro-batches"
        )
    whole = [range(-1, k - 1) if own is None else own for k, own in zip(rows, parents, strict=False)]
    for m, (k, own) in enumerate(zip(rows, whole, strict=False)):
        if len(own) != k:
            raise ValueError(f"parents of micro-batch {m} are {len(own)}, must be one for each of its {k} segments")
    return numbers("parents", "i", chain.from_iterable(whole))
