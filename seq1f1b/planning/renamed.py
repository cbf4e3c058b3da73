"""Names of the planner in 1.0.0rc1 that have gone, and what takes their place: rows of ``seq1f1b.renamed``."""

from __future__ import annotations

from seq1f1b.renamed import GONE, WENT, refuse_old_names, renamed, renamed_arguments, watch_old_paths

__all__ = ["refuse_old_names", "renamed", "renamed_arguments"]

GONE |= {
    "CostModel": {
        "unit_seconds": "price(sizes).seconds",
        "shard_seconds": "price(sizes).shard_seconds",
        "moving_seconds": "price(sizes).moving_seconds()",
        "message_bytes": "price(sizes).message_bytes",
        "held_bytes": "price(sizes).held_bytes()",
        "least_bytes": "price(sizes).least_bytes()",
        "unit_memory": "price(sizes).memory(rank_of_stage)",
        "step_memory": "price(sizes).step_memory(rank_of_stage)",
        "rank_bytes": "price(sizes).rank_bytes(schedule)",
        "rank_bytes_of": "price(sizes).rank_bytes(schedule)",
        "costs": "price(sizes).costs(schedule)",
        "seconds_of": "price_rows(rows).seconds",
        "step_seconds": "price(sizes).costs(schedule).optimizer",
        "parameters": "parts.parameters",
        "layer_seconds": "parts.layer(span(begin, end))",
        "pairs": "span(begin, end).pairs",
        "profile": "hardware.profile",
    },
    "search_plans": {"recompute=": "inside="},
    "seq1f1b.planning.cost": {"UnitSeconds": "seq1f1b.seconds.UnitSeconds"},
    "seq1f1b.planning.compare": {"Row": "FamilyRow"},
    "seq1f1b.planning.profile": {"visible_pairs": "seq1f1b.seconds.pairs_of"},
    "seq1f1b.planning.profiler": {"Measured": "StageTimes"},
}
WENT["seq1f1b.planning.row_costs"] = "CostModel.price_rows, with PackedRow of seq1f1b.planning.cost,"
watch_old_paths()
