"""Do the calls of all ranks pair by their number, whatever errors end them, and does nobody wait for long?"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import results_of
from torch import Tensor, nn

from seq1f1b import Limits, PipelineEngine, PipelineError
from seq1f1b.testing import run_ranks

P, M, K = 3, 2, 2
CALLS, LIMIT = 24, 60.0
IN_TIME = 4.0  # seconds on a busy machine; the limits are a minute


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: Stage) -> Tensor:
        ctx.stage = stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.stage.reach("backward")
        return grad, None


class Stage(nn.Module):
    """Passes on what it gets, and raises in one of its units."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(()))
        self.at, self.left = "", 0

    def reach(self, what: str) -> None:
        if what == self.at:
            self.left -= 1
            if self.left == 0:
                raise ValueError(f"in {what}")

    def forward(self, x: Tensor) -> Tensor:
        self.reach("forward")
        return Trap.apply(x + self.zero, self)


@dataclass(frozen=True)
class Error:
    """An error of one rank in one turn of its loop. unit: the how-manieth pass it is raised in."""

    kind: str
    rank: int
    unit: int


KINDS = ("argument", "before", "forward", "backward", "loss", "fail", "clip", "gather", "skip")


def draw(seed: int) -> list[list[Error]]:
    """The errors of each turn; none in the last four. Now and then several in a row, or on several ranks at once."""
    rng = random.Random(seed)
    found: list[list[Error]] = []
    for _ in range(CALLS - 4):
        count = rng.choices([0, 1, 2, 3], [5, 5, 2, 1])[0]
        ranks = rng.sample(range(P), count)
        found.append([Error(rng.choice(KINDS), rank, rng.randint(1, M * K)) for rank in ranks])
    return found + [[]] * 4


def interrupt(group: Any) -> None:
    del group.enter
    raise ValueError("before the step has begun")


def run_script(engine: PipelineEngine, stage: Stage, rank: int, plan: list[list[Error]], seed: int) -> list[Any]:
    """A loop that catches every error and goes on. Returns how each turn ended, and how long its calls waited."""
    told, rng = [], random.Random(seed * 100 + rank)
    for turn, errors in enumerate(plan):
        own = next((error for error in errors if error.rank == rank), None)
        kind = "" if own is None else own.kind
        x = torch.full((M, 4, 1), float(turn))
        stage.at, stage.left = (kind, own.unit) if own is not None else ("", 0)
        training = turn % 3 != 2
        time.sleep(rng.choice([0, 0, 0.002, 0.01]))
        began = time.monotonic()
        try:
            inputs, target = (x if rank == 0 else None), (x if rank == P - 1 else None)
            if kind == "fail":
                engine.fail("nothing to give")
                told.append(("own", "fail", time.monotonic() - began))
                continue
            sizes = [[4], [-1]] if kind == "argument" else None
            if kind == "before":  # as an interrupt before the step is counted
                engine._group.enter = partial(interrupt, engine._group)
            call = engine.step if training else engine.eval
            losses = call(inputs, target=target, segment_sizes=sizes)
            if kind == "skip":
                raise ValueError("between two calls, told to nobody")
            engine.clip_grad_norm_(1.0, "no number" if kind == "clip" else 2.0)
            engine.all_gather_object(object() if kind == "gather" else turn)
            worst = max((float(loss.detach().abs()) for loss in losses), default=0.0)
            told.append(("ok" if worst == 0.0 else "mixed", worst, time.monotonic() - began))
        except (ValueError, TypeError, PipelineError) as error:
            name = "heard" if isinstance(error, PipelineError) else "own"
            told.append((name, str(error), time.monotonic() - began))
    return told


def make(stage: Stage, group: Any = None, transport: str = "auto") -> PipelineEngine:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        stage.reach("loss")
        return (output - target).abs().mean()

    limits = Limits(step=LIMIT, first_step=LIMIT)
    options: dict[str, Any] = {"num_microbatches": M, "num_segments": K, "loss_fn": loss, "limits": limits}
    return PipelineEngine(stage, group=group, transport=transport, **options)


def judge(everyones: list[list[Any]], plan: list[list[Error]]) -> None:
    for turn, ends in enumerate(zip(*everyones, strict=True)):
        names = [name for name, *_ in ends]
        assert "mixed" not in names, (turn, ends, plan[max(0, turn - 2) : turn + 1])
        for rank, (_, text, seconds) in enumerate(ends):
            assert seconds < IN_TIME, (turn, rank, text, seconds, plan[max(0, turn - 2) : turn + 1])
        if "ok" in names and set(names) != {"ok"} and turn + 1 < len(plan):
            after = [theirs[turn + 1][0] for theirs in everyones]
            assert "ok" not in after, (turn, ends, after, plan[max(0, turn - 2) : turn + 2])
        if not plan[turn] and (turn == 0 or all(theirs[turn - 1][0] == "ok" for theirs in everyones)):
            assert set(names) == {"ok"}, (turn, ends)
    assert all(theirs[-1][0] == "ok" for theirs in everyones)


@pytest.mark.parametrize("seed", range(6))
def test_random_errors_on_threads(seed: int) -> None:
    plan = draw(seed)

    def run(group: Any) -> list[Any]:
        stage = Stage()
        return run_script(make(stage, group), stage, group.rank, plan, seed)

    judge(run_ranks(P, run), plan)


def serve(rank: int, pipe: Connection, kind: str, seeds: list[int]) -> list[Any]:
    found = []
    for seed in seeds:
        stage = Stage()
        engine = make(stage, transport=kind)
        dist.barrier()
        found.append(run_script(engine, stage, rank, draw(seed), seed))
        dist.barrier()
        engine.close()
    return found


@pytest.mark.parametrize(("kind", "seeds"), [("shm", [10, 11, 12]), ("c10d", [20, 21])])
def test_random_errors_in_processes(tmp_path: Path, kind: str, seeds: list[int]) -> None:
    results = results_of(P, tmp_path, serve, kind, seeds)
    for i, seed in enumerate(seeds):
        judge([theirs[i] for theirs in results], draw(seed))
