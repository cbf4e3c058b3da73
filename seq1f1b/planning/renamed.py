"""Names of the planner in 1.0.0rc1 that have gone, and what takes their place: rows of ``seq1f1b.renamed``."""

from __future__ import annotations

from seq1f1b.renamed import GONE, WENT, refuse_old_names, renamed, renamed_arguments, watch_old_paths

__all__ = ["refuse_old_names", "renamed", "renamed_arguments"]

_OF_SIZES = "seconds shard_seconds moving_seconds() message_bytes held_bytes() least_bytes()"
_OF_ORDERS = {"memory": "rank_of_stage", "step_memory": "rank_of_stage", "rank_bytes": "schedule", "costs": "schedule"}
_COST = {name.removesuffix("()"): f"price(sizes).{name}" for name in _OF_SIZES.split()}
_COST |= {name: f"price(sizes).{name}({given})" for name, given in _OF_ORDERS.items()}
_COST |= {"unit_seconds": _COST.pop("seconds"), "unit_memory": _COST.pop("memory")}
_COST |= {"parameters": "parts.parameters", "layer_seconds": "parts.layer(span(begin, end))"}
_COST |= {"seconds_of": "price_rows(rows).seconds", "step_seconds": "price(sizes).costs(schedule).optimizer"}
GONE |= {
    "CostModel": _COST | {"profile": "hardware.profile", "pairs": "span(begin, end).pairs"},
    "search_plans": {"recompute=": "inside="},
    "seq1f1b.planning.cost": {"UnitSeconds": "seq1f1b.seconds.UnitSeconds"},
    "seq1f1b.planning.compare": {"Row": "FamilyRow"},
    "seq1f1b.planning.profile": {"visible_pairs": "seq1f1b.seconds.pairs_of"},
    "seq1f1b.planning.profiler": {"Measured": "StageTimes"},
}
WENT["seq1f1b.planning.row_costs"] = "CostModel.price_rows, with PackedRow of seq1f1b.planning.cost,"
watch_old_paths()
