"""Are rows or trees that break a rule told before they do harm, on every rank, and does the next step run?"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from test_tree_steps import squared
from tiny_model import cross_entropy, stage_of, whole_model
from torch import Tensor
from tree_runs import CONFIG, Trees, data_of

import seq1f1b
from seq1f1b import Limits, LoopbackGroup, PipelineEngine, PipelineError, Schedule, ScheduleError, build_schedule
from seq1f1b.testing import run_ranks


def step_alone(sizes: Any, parents: Any = None, lengths: tuple[int, ...] = (9,), **options: Any) -> None:
    model, options = whole_model(CONFIG), {"loss_fn": cross_entropy, **options}
    engine = PipelineEngine(model, num_microbatches=len(lengths), group=LoopbackGroup(1)[0], **options)
    tokens = [torch.zeros(1, length, dtype=torch.long) for length in lengths]
    try:
        engine.step(tokens, target=tokens, segment_sizes=sizes, parents=parents)
    finally:
        engine.close()


def order_of(num_segments: Any) -> Schedule:
    return build_schedule("seq1f1b", num_ranks=1, num_microbatches=2, num_segments=num_segments)


@pytest.mark.parametrize(
    ("sizes", "options", "error", "message"),
    [
        ([], {}, TypeError, "must be a list: for every micro-batch"),
        ("balanced", {}, TypeError, "must be a list: for every micro-batch"),
        ([3, 2], {}, TypeError, r"segment_sizes\[0\] of a step must be a list of token counts, got int"),
        ([[3, 2], []], {}, ValueError, r"segment_sizes\[1\] is empty"),
        ([[3, 0], [4]], {}, ValueError, r"segment_sizes\[0\]\[1\] is 0, must be at least 1"),
        ([[3, -2], [4]], {}, ValueError, r"segment_sizes\[0\]\[1\] is -2"),
        ([[3, 2.0], [4]], {}, TypeError, r"segment_sizes\[0\]\[1\] must be an int, got float"),
        ([[3, 2**62], [4]], {}, ValueError, r"segment_sizes\[0\]\[1\] is 4611686018427387904, must be in 1\.\."),
        ([[3, 2]], {}, ValueError, "is a list of 2 micro-batches, the engine runs 1"),
        ([[3, 2], [4], [1]], {}, ValueError, "is a list of 2 micro-batches, the engine runs 3"),
        ([[3, 3], [4]], {}, ValueError, r"inputs of micro-batch 0 of shape \(1, 5\) has no dimension 1 of 6 tokens"),
        ([[3, 2], [4, 1]], {}, ValueError, r"inputs of micro-batch 1 of shape \(1, 4\) has no dimension 1 of 5 tokens"),
        ([[3, 2], [4]], {"schedule": order_of(1)}, ValueError, "give the engine the name of a schedule"),
        ([[3, 2], [4]], {"schedule": order_of([2, 1])}, ValueError, "is for rows of unequal segments: give its name"),
        ([[3, 2], [4]], {"schedule": "breadth-first"}, ScheduleError, "needs the same k for all micro-batches"),
    ],
)
def test_bad_rows(sizes: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        step_alone(sizes, lengths=(5, 4), **options)


@pytest.mark.parametrize(
    ("sizes", "parents", "error", "message"),
    [
        ([[4, 3, 2]], [[-1, 2, 0]], ValueError, "segment 1 follows segment 2, must follow one of 0..0"),
        ([[4, 3, 2]], [[-1, 0, -1]], ValueError, "segment 2 follows none, so the tree has two roots; make it"),
        ([[4, 3, 2]], [[-1, 0, -2]], ValueError, r"parents\[0\]\[2\] is -2, must be at least -1"),
        ([[4, 3, 2]], [[-1, 0, 1.0]], TypeError, r"parents\[0\]\[2\] must be an int, got float"),
        ([[4, 3, 2]], [[-1, 0]], ValueError, r"parents\[0\] must name one parent for each of its 3 segments, got"),
        ([[4, 3, 2]], [], ValueError, "parents must hold 1 lists: for every micro-batch the parent of each segment"),
        ([[4, 3, 2]], [[-1, 0, 0], [-1]], ValueError, "parents must hold 1 lists"),
        (None, [[-1, 0]], ValueError, "parents need segment_sizes of the step"),
        ("even", [[-1, 0]], TypeError, "segment_sizes of a step must be a list: for every micro-batch"),
        ([[4, [3, 2]]], None, TypeError, r"segment_sizes\[0\]\[1\] is \[3, 2\], siblings .*: they need parents="),
        (
            [[[4, 5]]],
            [[-1]],
            ValueError,
            r"segment_sizes\[0\]\[0\] is \[4, 5\]: siblings follow a segment, and segment 0 is",
        ),
        ([[4, [2, 1], 2]], [[-1, 0, 1]], ValueError, "siblings in one unit, and segment 2 follows it: nothing can"),
        ([[4, [], 5]], [[-1, 0, 0]], ValueError, r"segment_sizes\[0\]\[1\] is an empty list: siblings in one unit are"),
        ([[4, [5, 0]]], [[-1, 0]], ValueError, r"segment_sizes\[0\]\[1\]\[1\] is 0, must be at least 1"),
        ([[4, [4, "1"]]], [[-1, 0]], TypeError, r"segment_sizes\[0\]\[1\]\[1\] must be an int, got str"),
        ([[4, [3, 3]]], [[-1, 0]], ValueError, r"inputs of micro-batch 0 of shape \(1, 9\) has no dimension 1 of 10"),
    ],
)
def test_bad_trees(sizes: Any, parents: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        step_alone(sizes, parents)


def test_engines_that_take_no_trees() -> None:
    with pytest.raises(ValueError, match=r"parents are not for ranks that share .* \(sequence_parallel=\)"):
        step_alone([[5, 4]], [[-1, 0]], sequence_parallel=(0, 1 + 1))
    with pytest.raises(ScheduleError, match="breadth-first needs the same k for all micro-batches"):
        step_alone([[3, 1, 1], [5]], [[-1, 0, 0], None], lengths=(5, 5), schedule="breadth-first")


def test_a_callable_that_loses_the_parents() -> None:
    """It builds what it is asked for, as somebody writes it who knows of no trees."""
    of_chains = lambda parents=None, **counts: build_schedule("seq1f1b", **counts)  # noqa: E731
    with pytest.raises(ValueError, match=r"a callable that built an order with parents None, .* hand parents= to"):
        step_alone([[4, 3, 2]], [[-1, 0, 0]], schedule=of_chains)


class Mixing(torch.nn.Module):
    """Calls something that suits no siblings, or no trees."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.linear, self.call = torch.nn.Linear(4, 4), call

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        self.call(out)
        return out


def attend(x: Tensor, **options: Any) -> None:
    q = x.unflatten(2, (2, 2)).transpose(1, 2)
    seq1f1b.causal_attention(q, q, q, layer=0, **options)


@pytest.mark.parametrize(
    ("call", "sizes", "parents", "message"),
    [
        (
            partial(attend, window=2),
            [4, [3, 2]],
            [-1, 0],
            "has a window or ALiBi slopes, .* 2 siblings share this unit",
        ),
        (partial(attend, alibi_slopes=torch.ones(2)), [4, [3, 2]], [-1, 0], "has a window or ALiBi slopes"),
        (lambda x: seq1f1b.carry_in(0, x), [4, [3, 2]], [-1, 0], "segment 1 holds 2 siblings, and carry_in has one"),
        (lambda x: seq1f1b.add_loss(x.mean(), of="sequence"), [4, 3, 2], [-1, 0, 0], "would count once for each"),
        (lambda x: seq1f1b.add_loss(x.mean(), of="sequence"), [4, [3, 2]], [-1, 0], "would count once for each"),
    ],
)
def test_modules_that_do_not_suit_a_tree(call: Any, sizes: Any, parents: Any, message: str) -> None:
    """Both ranks are told, and go on with rows."""
    x, limits = [torch.randn(1, 9, 4)], Limits(step=20)

    def run(group: Any) -> None:
        engine = PipelineEngine(Mixing(call), num_microbatches=1, loss_fn=squared, group=group, limits=limits)
        with pytest.raises(ValueError if group.rank == 0 else PipelineError, match=message):
            engine.step(x, target=x, segment_sizes=[sizes], parents=[parents])
        if "carry_in" not in message:
            engine.step(x, target=x, segment_sizes=[[4, 5]])
        engine.close()

    run_ranks(2, run)


def test_a_shared_token_counts_once_in_an_auxiliary_loss() -> None:
    trees = Trees([[4, 3, [2, 1]]], [[-1, 0, 0]])
    x, module = torch.randn(1, 10, 4), Mixing(lambda out: seq1f1b.add_loss(out.square().mean()))
    engine = PipelineEngine(module, num_microbatches=1, loss_fn=lambda o, t: 0.0 * o.sum(), group=LoopbackGroup(1)[0])
    engine.step([x], target=[x], segment_sizes=trees.sizes, parents=trees.parents)
    found = module.linear.weight.grad.clone()
    module.zero_grad()
    module.linear(x).square().mean().backward()
    torch.testing.assert_close(found, module.linear.weight.grad)


BRANCHES = {"segment_sizes": [[4, 3, 2]], "parents": [[-1, 0, 0]]}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"parents": [[-1, 0, 1]]}, r"parents .*: \[\[-1, 0, 0\]\] on rank 0; \[\[-1, 0, 1\]\] on rank 1"),
        ({"parents": None}, r"parents .*: \[\[-1, 0, 0\]\] on rank 0; None on rank 1"),
        ({"segment_sizes": [[4, 3, [1, 1]]]}, r"parents .*; \[\[-1, 0, 0\]\], \[1, 1\] in segment 2 of 0 on rank 1"),
        ({"segment_sizes": [[4, 2, 3]]}, r"segment_sizes .*: \[\[4, 3, 2\]\] on rank 0; \[\[4, 2, 3\]\] on rank 1"),
        ({"segment_sizes": None, "parents": None}, r"segment_sizes .*: \[\[4, 3, 2\]\] on rank 0; None on rank 1"),
    ],
)
def test_ranks_that_disagree(other: dict[str, Any], message: str) -> None:
    """Every rank says so at once, with both values, between steps in which they agree."""
    (tokens, targets), model = data_of(Trees([[4, 3, 2]], [None])), whole_model(CONFIG)

    def run(group: Any) -> None:
        stage = stage_of(model, CONFIG, group.rank, 2)
        options: dict[str, Any] = {"loss_fn": cross_entropy, "limits": Limits(step=20)}
        engine = PipelineEngine(stage, num_microbatches=1, group=group, **options)
        engine.step(tokens, target=targets, **BRANCHES)
        with pytest.raises(ValueError, match=f"{message}; give all ranks the same"):
            engine.step(tokens, target=targets, **(BRANCHES | (other if group.rank else {})))
        engine.step(tokens, target=targets, **BRANCHES)

    run_ranks(2, run)
