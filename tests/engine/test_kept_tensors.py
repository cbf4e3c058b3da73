"""Does a tensor that somebody keeps stay as it was, although messages reuse the memory that it came in?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from processes import run_processes
from slices import slice_of
from tiny_model import Attends
from torch import Tensor, nn
from torch.nn import functional as F

import seq1f1b
from seq1f1b import Limits, Memory, PipelineEngine
from seq1f1b.testing import run_ranks
from seq1f1b.transport import edges

HIDDEN, LENGTH, M, K = 4, 24, 4, 6


class Shift(nn.Module):
    """x[t] + x[t - 1], of which the last row of a segment is carried as a view; test_random_steps.py has more views."""

    def forward(self, x: Tensor) -> Tensor:
        before = seq1f1b.carry_in(0, x.new_zeros(x.shape[0], 1, HIDDEN))
        seq1f1b.carry_out(0, x[:, -1:])
        return x + torch.cat([before, x[:, :-1]], 1)


def make_shifts() -> tuple[list[nn.Module], Tensor, Tensor, list[float]]:
    """Two stages, inputs, targets, and the losses of the stages run whole."""
    torch.manual_seed(0)
    stages: list[nn.Module] = [nn.Linear(HIDDEN, HIDDEN).double(), Shift()]
    x, target = torch.randn(2, M, LENGTH, HIDDEN, dtype=torch.float64).unbind()
    with torch.no_grad():
        output = nn.Sequential(*stages)(x)
    return stages, x, target, [float(F.mse_loss(a, b)) for a, b in zip(output, target, strict=True)]


def run_shifts(made: Any, rank: int, **options: Any) -> None:
    """The rank's stage, whose hooks keep what passes, in two steps and evaluations."""
    stages, x, target, whole = made
    kept: list[tuple[Tensor, Tensor]] = []
    stages[rank].register_full_backward_hook(lambda m, inputs, outputs: kept.extend(copies(outputs)))
    stages[rank].register_forward_pre_hook(lambda m, given: kept.extend(copies(given)))
    given = {"num_microbatches": M, "num_segments": K, "loss_fn": F.mse_loss, **options}
    engine = PipelineEngine(stages[rank], attention="unchecked", **given)  # a look would call the hooks, too
    for _ in range(2):
        engine.step(x, target=target)
        losses = engine.eval(x, target=target)
    assert [float(loss) for loss in losses] == (pytest.approx(whole, rel=1e-12) if rank else [])
    assert len(kept) == 6 * M * K
    engine.close()
    assert all(torch.equal(tensor, copy) for tensor, copy in kept)


# -- what hooks, losses and stages keep ------------------------------------------------------------------------------


class Keeps(Attends):
    """A stage with attention that keeps its own input, as a cache of activations does."""

    def __init__(self, index: int) -> None:
        super().__init__(HIDDEN, index)
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.keeps_own = False

    def forward(self, x: Tensor) -> Tensor:
        if self.keeps_own:
            self.kept.append((x, x.detach().clone()))
        return super().forward(x)


def copies(tensors: Any) -> list[tuple[Tensor, Tensor]]:
    return [(t.detach(), t.detach().clone()) for t in tensors if isinstance(t, Tensor)]


def hook_tensors(module: Keeps) -> None:
    def hook(m: nn.Module, given: Any, output: Tensor) -> None:
        for tensor in (output, given[0]):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: module.kept.extend(copies([gradient])))

    module.register_forward_hook(hook)


HOOKS: dict[str, Callable[[Keeps], Any]] = {
    "output": lambda m: m.register_forward_hook(lambda _, given, output: m.kept.extend(copies([output, *given]))),
    "a view of the input": lambda m: m.register_forward_pre_hook(
        lambda _, given: m.kept.extend(copies([given[0][:, 1:].transpose(1, 2)]))
    ),
    "gradients": lambda m: m.register_full_backward_hook(lambda _, given, out: m.kept.extend(copies([*given, *out]))),
    "the gradient itself": lambda m: m.register_full_backward_pre_hook(
        lambda _, given: m.kept.append((given[0], given[0].clone()))
    ),
    "gradients of tensors": hook_tensors,
    "its own input": lambda m: setattr(m, "keeps_own", True),
}
ORDERS: list[tuple[str, int, Any]] = [
    ("seq1f1b", 1, {}), ("seq-zbv", 2, {}), ("seq1f1b-interleaved", 2, {"memory": Memory(recompute="all")}),
]  # fmt: skip
GRID = [(*order, name) for name in HOOKS for order in ORDERS]


@pytest.mark.parametrize(("schedule", "per_rank", "options", "name"), slice_of(GRID, GRID[::2]))
def test_what_is_kept_stays(name: str, schedule: str, per_rank: int, options: Any) -> None:
    torch.manual_seed(0)
    stages = [Keeps(i) for i in range(2 * per_rank)]
    x = torch.randn(M, LENGTH, HIDDEN)
    built = seq1f1b.build_schedule(schedule, num_ranks=2, num_microbatches=M, num_segments=K, stages_per_rank=per_rank)

    def work(group: Any) -> None:
        own = [stages[i] for i, rank in enumerate(built.rank_of_stage) if rank == group.rank]
        engine = PipelineEngine(
            own, schedule=built, num_microbatches=M, num_segments=K, loss_fn=F.mse_loss, group=group, **options
        )
        engine.step(x, target=x)
        for stage in own:  # a hook that comes later than the first step, and stays for two steps and evaluations
            HOOKS[name](stage)
        for _ in range(2):
            engine.step(x, target=x)
            engine.eval(x, target=x)

    run_ranks(2, work)
    kept = [pair for stage in stages for pair in stage.kept]
    assert len(kept) >= 2 * M * K
    assert [index for index, (tensor, copy) in enumerate(kept) if not torch.equal(tensor, copy)] == []


def test_what_a_loss_keeps_and_returns_stays() -> None:
    """Views of messages, which the last stage hands on."""
    kept: list[tuple[Tensor, Tensor]] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        kept.append((output.detach(), output.detach().clone()))
        return output[0, 0, 0]

    x, first = torch.randn(M, LENGTH, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def work(group: Any) -> Any:
        stage = first if group.rank == 0 else nn.Identity()
        engine = PipelineEngine(stage, num_microbatches=M, num_segments=1, loss_fn=loss_fn, group=group)
        losses = engine.eval(x, target=x)
        engine.step(x, target=x)
        return losses

    losses = run_ranks(2, work)[-1]
    assert len(kept) >= 2 * M and all(torch.equal(tensor, copy) for tensor, copy in kept)
    torch.testing.assert_close(torch.stack(losses), first(x)[:, 0, 0].detach())


def test_nothing_is_copied_where_nobody_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    leave = edges.leave_place

    def counting(views: Any) -> bool:
        found.append(leave(views))
        return found[-1]

    monkeypatch.setattr("seq1f1b.engine.pipeline.leave_place", counting)
    stages = [Keeps(0), Keeps(1)]
    x = torch.randn(M, LENGTH, HIDDEN)

    def work(group: Any) -> None:
        filled = partial(seq1f1b.build_schedule, "seq1f1b", weights="fill")
        for options in ({}, {"memory": Memory(recompute="all")}, {"schedule": "seq-zb-h1"}, {"schedule": filled}):
            engine = PipelineEngine(
                stages[group.rank], num_microbatches=M, num_segments=K, loss_fn=F.mse_loss, group=group, **options
            )
            for _ in range(2):
                engine.step(x, target=x)
                engine.eval(x, target=x)
            engine.all_gather_object(None)

    run_ranks(2, work)
    assert len(found) > 100
    assert not any(found)


def test_without_swapping_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with torch before 2.12."""
    monkeypatch.setattr(edges, "_SWAPS", False)
    made = make_shifts()
    run_ranks(2, lambda group: run_shifts(made, group.rank, group=group))


def transports(rank: int, world: int, transport: str) -> None:
    run_shifts(make_shifts(), rank, transport=transport, limits=Limits(step=30))


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_between_processes(transport: str) -> None:
    run_processes(2, transports, transport)
