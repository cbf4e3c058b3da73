"""Counts the functions of the package that a warm plain step enters: what a reader who follows it reads.

python tests/engine/step_trace.py --list 0   # those of rank 0, in the order of first calls
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as pytest does
from tiny_model import Attends, cross_entropy

import seq1f1b
from seq1f1b.transport import LoopbackGroup

ROOT = Path(seq1f1b.__file__).parent


def lines_of(code: CodeType) -> int:
    """Lines of a function's body, without its docstring."""
    numbers = [line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno]
    return max(numbers) - min(numbers) + 1 if numbers else 1


def trace(rank: int = 0) -> Counter[CodeType]:
    """Counts calls of each function in the third step of a rank of two, with 2 micro-batches and 4 segments each.

    They are in the order of the first calls. Comprehensions and lambdas do not count.
    """
    stages = [nn.Sequential(nn.Embedding(100, 64), Attends(64, 0)), nn.Sequential(Attends(64, 0), nn.Linear(64, 100))]
    tokens, found = torch.randint(0, 100, (4, 128)), Counter[CodeType]()
    target = seq1f1b.shift_labels(tokens)

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/") and not code.co_name.startswith("<"):
            found[code] += 1

    def work(group: Any) -> None:
        options = {"num_microbatches": 2, "num_segments": 4, "loss_fn": cross_entropy, "group": group}
        engine = seq1f1b.PipelineEngine(stages[group.rank], **options)
        for _ in range(2):
            engine.step(tokens, target=target)
        if group.rank == rank:
            sys.setprofile(count)
        try:
            engine.step(tokens, target=target)
        finally:
            sys.setprofile(None)
        engine.close()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(work, LoopbackGroup(2)))
    return found


if __name__ == "__main__":
    torch.manual_seed(0)
    for code, count in trace(rank=int(sys.argv[-1])).items():
        print(f"{count:4} {lines_of(code):4} {Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}")
