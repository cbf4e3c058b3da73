"""What an engine's options add to an order: recomputation, weight gradients apart, a spread vocabulary, moves."""

from __future__ import annotations

from seq1f1b.runtime.arguments import Options
from seq1f1b.schedule import Schedule

__all__: list[str] = []


def with_options(schedule: Schedule, options: Options) -> Schedule:
    """The order, with the units that an engine's options add to it."""
    schedule = schedule.recompute(options.recompute)
    if "W" not in schedule.kinds and options.weights == "fill":
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
    """The order, with what ``offload_units`` moves."""
    moves = "O" in schedule.kinds
    if options.offload is None:
        if moves:
            raise ValueError("the schedule moves units (O, A, L): say by offload= in which directory they lie")
        return schedule
    default = "none" if moves else "all"
    return schedule.offload(default if options.offload_units is None else options.offload_units)
