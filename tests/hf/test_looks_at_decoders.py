"""Does the first step blame no type of docs/reference/models.md that is right, and look at it by values?"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

import decoders  # noqa: E402
from slices import one_in  # noqa: E402
from test_transformers import loss_fn  # noqa: E402

import seq1f1b  # noqa: E402
from seq1f1b.runtime.by_values import Look  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402
from seq1f1b.transformers import pipeline_stage  # noqa: E402

SIZES, ROWS = [12, 8, 4], 4
PAGE = decoders.read_page()
RIGHT = [n for n, row in PAGE.items() if row.what.get(decoders.RELEASE) in (decoders.RIGHT, decoders.WITHOUT_DOCUMENTS)]
DRAWS = {"phimoe": "its router draws random numbers"}  # so that values tell nothing


@pytest.mark.parametrize("name", one_in(24, RIGHT))
def test_a_right_type_is_not_blamed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    findings = Look.findings

    def noted(look: Look) -> Any:
        found.append(findings(look))
        return found[-1]

    monkeypatch.setattr(Look, "findings", noted)
    model = decoders.build(name).float()
    tokens = torch.randint(3, 64, (ROWS, sum(SIZES)), generator=torch.Generator().manual_seed(1))

    def run(group: Any) -> None:
        engine = seq1f1b.PipelineEngine(
            pipeline_stage(copy.deepcopy(model), group.rank, 2), num_microbatches=2, num_segments=len(SIZES),
            segment_sizes=SIZES, loss_fn=loss_fn, group=group,
        )  # fmt: skip
        engine.step(tokens, target=seq1f1b.shift_labels(tokens))

    with warnings.catch_warnings():
        warnings.simplefilter("error", seq1f1b.SegmentWarning)
        run_ranks(2, run)
    assert found == [None if name in DRAWS else []] * 2
