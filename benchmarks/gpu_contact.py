"""The stage of gpu.py that runs ``seq1f1b doctor --gpus``, a case for each of its parts."""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu
from gpu_cases import Case, Machine, Unmeasured

from seq1f1b.first_contact.page import failures, verdict
from seq1f1b.first_contact.parts import PARTS
from seq1f1b.first_contact.run import SECONDS_OF_ONE_GPU, first_contact

# A rehearsal takes every part's way once, by two ranks.
REHEARSED = "^(machine|messages: (auto|copy)|drills: 2 ranks: (Seq1F1B|V), auto|killed: auto|training: P 2|blocks: 2 )"


def contact(machine: Machine) -> Iterator[Case]:
    begin = time.monotonic()

    def part(name: str) -> dict[str, Any]:
        left = SECONDS_OF_ONE_GPU - (time.monotonic() - begin)
        if left < 5:
            raise Unmeasured("the time of the stage was up")
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {} if machine.is_cuda else {"rehearse": True, "num_ranks": 2, "cases": REHEARSED}
            outcome = first_contact(Path(folder) / "page.md", only=[name], seconds=left, **options)
        records = outcome.records[name]
        assert not (failed := list(failures(outcome))), "; ".join(failed)
        if not any(record["state"] == "passed" for record in records):
            why = records[0]["why"]
            raise Unmeasured(why if machine.is_cuda else gpu.NEEDS_CUDA)
        figures = {f"{r['group']}: {r['case']}": r["figures"] for r in records if r["state"] == "passed"}
        return {"verdict": verdict(records), "figures": figures}

    for name in PARTS:
        yield name, functools.partial(part, name)
