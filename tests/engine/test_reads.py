"""Does the host wait for a device within units? Never, and at most once before them, whatever the feature.

The first step of a shape looks at the model by values, and may wait more. ``pytest -s`` shows a table.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import tiny_model
from stand_in_engine import StandInEngine
from stand_in_library import stand_in
from torch import Tensor
from waits import Waits

import seq1f1b
from seq1f1b.testing import run_ranks

CONFIG = tiny_model.Config(hidden=32, heads=2, kv_heads=1, ffn=48, vocab=17, layers=4)


def with_auxiliary(output: Tensor, target: Tensor) -> Tensor:
    seq1f1b.add_loss(output.square().mean(), of="segment")
    return tiny_model.cross_entropy(output, target)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "moved to pinned memory": {
        "memory": seq1f1b.Memory(offload=seq1f1b.HOST), "transport": "copy", "schedule": "gpipe",
    },
    "targets counted by a callable": {"loss": seq1f1b.Loss(weight=lambda target: (target != -100).sum())},
    "auxiliary losses": {"loss_fn": with_auxiliary},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:micro-batches count different numbers")
@pytest.mark.parametrize("name", FEATURES)
def test_the_host_waits_once_and_never_within_units(name: str) -> None:
    """In the third step; what test_random_steps.py draws is counted there."""
    stand_in().reset(1)
    tokens, target = tiny_model.batch(CONFIG, 3, 40)
    kind = StandInEngine if "pinned" in name else seq1f1b.PipelineEngine

    def run(group: Any) -> Waits:
        stage = tiny_model.stage_of(tiny_model.whole_model(CONFIG), CONFIG, group.rank, 2)
        options = {"loss_fn": tiny_model.cross_entropy, **FEATURES[name]}
        engine = kind(stage, num_microbatches=3, num_segments=4, group=group, **options)
        for _ in range(3):
            with Waits() as waits:
                engine.step(tokens, target=target if engine.has_last else None)
        engine.close()
        return waits

    first, last = run_ranks(2, run)
    assert first.found | last.found == Counter(before=1), (first.names, last.names)
