"""The order that an engine runs: built for its counts, with what its options add to it.

These add recomputation, weight gradients apart, a spread vocabulary, and moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from seq1f1b.runtime.arguments import Builder, Options
from seq1f1b.schedule import Schedule

__all__: list[str] = []


def build(
    source: Schedule | Builder,
    num_ranks: int,
    num_microbatches: int,
    num_segments: int | Sequence[int],
    stages_per_rank: int,
) -> Schedule:
    """The order that was given, or the one that a callable builds for these counts."""
    if isinstance(source, Schedule):
        return source
    schedule = source(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_segments=num_segments,
        stages_per_rank=stages_per_rank,
    )
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule= is a callable that returned a {type(schedule).__name__}, must be a seq1f1b.Schedule"
        )
    return schedule


def with_options(schedule: Schedule, options: Options) -> Schedule:
    """The order, with the units that an engine's options add to it."""
    schedule = schedule.recompute(options.memory.recompute)
    if schedule.fills and "W" not in schedule.kinds:
        schedule = schedule.defer_weights()
    return _with_moves(_with_shards(schedule, options), options)


def _with_shards(schedule: Schedule, options: Options) -> Schedule:
    """The order, with the passes of a vocabulary that is spread."""
    spreads = {"S": options.head is not None, "E": options.embedding is not None}
    for kind, name in (("S", "loss_fn=VocabularyParallelHead"), ("E", "embedding=VocabularyParallelEmbedding")):
        if kind in schedule.kinds and not spreads[kind]:
            raise ValueError(f"the order spreads the vocabulary over the ranks: give {name}(...)")
    missing = {kind: spreads[kind] and kind not in schedule.kinds for kind in spreads}
    if any(missing.values()):
        schedule = schedule.spread_vocabulary(head=missing["S"], embedding=missing["E"])
    return schedule


def _with_moves(schedule: Schedule, options: Options) -> Schedule:
    """The order, with what ``Memory.units`` moves."""
    moves, memory = "O" in schedule.kinds, options.memory
    if memory.offload is None:
        if moves:
            raise ValueError(
                "the schedule moves units (O, A, L): say by Memory(offload=...) in which directory they lie"
            )
        return schedule
    default = "none" if moves else "all"
    return schedule.offload(default if memory.units is None else memory.units)
