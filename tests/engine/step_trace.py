"""Counts the files and functions of the package that a step or a plan enters: what a reader who follows it reads.

python tests/engine/step_trace.py            # a table of several kinds of step, and a plan of one family
python tests/engine/step_trace.py --list 0   # functions of a warm plain step of rank 0, in the order of first calls
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as pytest does
from tiny_model import Attends, cross_entropy

import seq1f1b
from seq1f1b.planning.hardware import load_hardware, load_model
from seq1f1b.planning.search import search_plans
from seq1f1b.transport import LoopbackGroup

ROOT = Path(seq1f1b.__file__).parent


class Trace:
    """Counts calls of the package's Python functions on one thread while it is the thread's profiler.

    Attributes:
        calls: of each function, by its code; in the order of the first ones. Comprehensions and lambdas do not count.
        moves: how often a call went to another file than the call before it.
    """

    def __init__(self) -> None:
        self.calls: Counter[CodeType] = Counter()
        self.moves = 0
        self._file = ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/") and not code.co_name.startswith("<"):
            self.calls[code] += 1
            self.moves += code.co_filename != self._file
            self._file = code.co_filename

    @property
    def files(self) -> set[Path]:
        return {Path(code.co_filename) for code in self.calls}

    def figures(self) -> tuple[int, int, int, int]:
        """Files, functions, calls, and moves between files."""
        return len(self.files), len(self.calls), sum(self.calls.values()), self.moves


def lines_of(code: CodeType) -> int:
    """Lines of a function's body, without its docstring."""
    numbers = [line for _, _, line in code.co_lines() if line is not None and line > code.co_firstlineno]
    return max(numbers) - min(numbers) + 1 if numbers else 1


def trace(rank: int = 0, warm: bool = True, given: Callable[[], dict[str, Any]] = dict, **options: Any) -> Trace:
    """Traces one step of a rank of two, with 2 micro-batches and 4 segments each, two ``warm`` steps before it or none.

    Further arguments of the step are ``given``; options are the engine's.
    """
    stages = [nn.Sequential(nn.Embedding(100, 64), Attends(64, 0)), nn.Sequential(Attends(64, 0), nn.Linear(64, 100))]
    tokens, found = torch.randint(0, 100, (4, 128)), Trace()
    target = seq1f1b.shift_labels(tokens)
    if given is not dict:  # steps of rows take lists of micro-batches
        tokens, target = list(tokens.split(2)), list(target.split(2))

    def work(group: Any) -> None:
        chosen = {"num_microbatches": 2, "num_segments": 4, "loss_fn": cross_entropy, "group": group, **options}
        engine = seq1f1b.PipelineEngine(stages[group.rank], **chosen)
        for _ in range(2 * warm):
            engine.step(tokens, target=target, **given())
        if group.rank == rank:
            sys.setprofile(found)
        try:
            engine.step(tokens, target=target, **given())
        finally:
            sys.setprofile(None)
        engine.close()

    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(work, LoopbackGroup(2)))
    return found


def trace_plan() -> Trace:
    """Traces the search for a plan of one family: Llama 3 8B, 131,072 tokens, 8 ranks, 16 micro-batches, H100."""
    model, machine, found = load_model("llama3-8b"), load_hardware("h100"), Trace()
    sys.setprofile(found)
    try:
        search_plans(model, machine, seq_len=131072, num_ranks=8, num_microbatches=16, names=["seq1f1b"])
    finally:
        sys.setprofile(None)
    return found


def kinds(folder: str) -> dict[str, Callable[[], Trace]]:
    """Traces of several kinds of step, by name. Units that move go to a file in the folder."""
    memory, tree = seq1f1b.Memory, {"segment_sizes": [[32] * 4] * 2, "parents": [[-1, 0, 0, 1]] * 2}
    return {
        "a warm plain step, first rank": trace,
        "a warm plain step, last rank": lambda: trace(rank=1),
        "with recomputation": lambda: trace(memory=memory(recompute="all")),
        "with a split backward": lambda: trace(schedule="seq-zb-h1"),
        "with offload": lambda: trace(memory=memory(offload=folder)),
        "of a tree": lambda: trace(given=lambda: tree),
        "a first step": lambda: trace(warm=False),
        "a plan of one family": trace_plan,
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    if "--list" in sys.argv:
        for code, count in trace(rank=int(sys.argv[-1])).calls.items():
            print(f"{count:4} {lines_of(code):4} {Path(code.co_filename).relative_to(ROOT)} {code.co_qualname}")
        sys.exit()
    print(f"{'':34} files  functions  calls  moves")
    with tempfile.TemporaryDirectory() as folder:
        for name, run in kinds(folder).items():
            files, functions, calls, moves = run().figures()
            print(f"{name:34} {files:5}  {functions:9}  {calls:5}  {moves:5}")
