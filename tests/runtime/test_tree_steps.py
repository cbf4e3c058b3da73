"""Does a step of trees train as the whole model does on every path alone, whatever else the engine does meanwhile?"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_model import Config, Stage, cross_entropy, gradient_error, stage_of, whole_model
from torch import Tensor
from tree_runs import Trees, random_trees, run_paths, tokens_of

from seq1f1b import Memory, PipelineEngine, build_schedule
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=16, heads=2, kv_heads=1, ffn=16, vocab=13, layers=4)
TOLERANCE = 1e-12
TWO_STAGES = ("interleaved-1f1b", "seq1f1b-interleaved", "hanayo", "dualpipev", "seq-zbv", "seq-v-half", "seq-v-min")


def data_of(trees: Trees, seed: int = 0, size: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and targets of every tree, (size, length); some targets are ignored, in short segments at times all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(CONFIG.vocab, (size, sum(map(tokens_of, s))), generator=generator) for s in trees.sizes]
    targets = []
    for row in tokens:
        target = torch.randint(CONFIG.vocab, row.shape, generator=generator)
        target[torch.rand(target.shape, generator=generator) < 0.3] = -100
        targets.append(target)
    targets[-1][0, 0] = 1  # at least one counts
    return tokens, targets


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
    return each.view(target.shape)


def stages_of(model: Stage, schedule: str, rank: int, num_ranks: int) -> Any:
    if schedule not in TWO_STAGES:
        return stage_of(model, CONFIG, rank, num_ranks)
    second = num_ranks + rank if "interleaved" in schedule else 2 * num_ranks - 1 - rank
    return [stage_of(model, CONFIG, index, 2 * num_ranks) for index in (rank, second)]


def train(
    schedule: str,
    num_ranks: int,
    steps: list[tuple[Trees, list[Tensor], list[Tensor]]],
    *,
    order: dict[str, Any] | None = None,
    loss_fn: Any = cross_entropy,
    **options: Any,
) -> tuple[list[list[Tensor]], dict[str, Tensor], list[Any]]:
    """What steps returned, each after an evaluation of the same; the model's gradients; every rank's report."""
    model = whole_model(CONFIG)

    def run(group: Any) -> Any:
        engine = PipelineEngine(
            stages_of(model, schedule, group.rank, num_ranks),
            schedule=schedule if order is None else partial(build_schedule, schedule, **order),
            num_microbatches=16,
            num_segments=4,
            loss_fn=loss_fn,
            group=group,
            **options,
        )
        returned = []
        for trees, tokens, targets in steps:
            given: dict[str, Any] = {"target": targets if engine.has_last else None}
            given |= {"segment_sizes": trees.sizes, "parents": trees.parents}
            inputs = tokens if engine.has_first else None
            returned += [engine.eval(inputs, **given), engine.step(inputs, **given)]
        gradients = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
        report = engine.report(gather=True)
        engine.close()
        return returned, gradients, report

    found = run_ranks(num_ranks, run)
    merged: dict[str, Tensor] = {}
    for _, gradients, _ in found:
        merged |= gradients
    return next(r for r, *_ in found if r[0]), merged, [report for *_, report in found]


def check(schedule: str, num_ranks: int, seed: int, most_nodes: int = 8, **options: Any) -> None:
    rng = random.Random(f"{schedule} {num_ranks} {seed}")
    trees = random_trees(rng, 2, most_nodes)
    while schedule.startswith("seq-") and sum(map(len, trees.sizes)) < 4 * num_ranks:  # families that need as many
        more = random_trees(rng, 2, most_nodes)
        trees = Trees(trees.sizes + more.sizes, trees.parents + more.parents)
    tokens, targets = data_of(trees, seed)
    losses, truth, values = run_paths(whole_model(CONFIG), trees, tokens, targets)
    per_token = options.get("loss_fn") is of_tokens
    (evaluated, stepped), gradients, _ = train(schedule, num_ranks, [(trees, tokens, targets)], **options)
    expected = values if per_token else losses
    for found in (evaluated, stepped):
        for own, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(own, wanted, rtol=0, atol=TOLERANCE)
    assert gradient_error(gradients, truth) <= TOLERANCE


SLICE = [
    ("seq1f1b", 1, {}),
    ("1f1b", 2, {}),
    ("seq1f1b", 3, {}),
    ("gpipe", 4, {}),
    ("seq1f1b", 2, {"order": {"options": {"trees": "numbers"}}}),
    ("seq1f1b", 4, {"order": {"prefetch": 0}, "memory": Memory(recompute="all")}),
    ("seq-zb-h1", 2, {"memory": Memory(recompute=lambda unit: unit.segment > 0)}),
    ("seq-zb-h2", 3, {"order": {"weights": "fill"}}),
    ("seq-zbv", 2, {}),
    ("seq-v-min", 2, {"order": {"weights": "fill"}}),
]
"""Segments alone and siblings; backwards whole, split and filled; recomputed in some units or all; two orders."""


@pytest.mark.parametrize(("schedule", "num_ranks", "options"), SLICE)
def test_every_path_alone(schedule: str, num_ranks: int, options: dict[str, Any]) -> None:
    check(schedule, num_ranks, 0, **options)


def test_values_of_tokens() -> None:
    """A loss of one value per token: evaluation and step give each token's, wherever its segment went."""
    check("seq1f1b", 2, 1, loss_fn=of_tokens)
    check("seq-zb-h1", 3, 2, loss_fn=of_tokens, memory=Memory(recompute="all"))


@pytest.mark.parametrize(("schedule", "units"), [("gpipe", None), ("seq1f1b", lambda unit: unit.segment % 2 == 0)])
def test_units_that_move_away(tmp_path: Any, schedule: str, units: Any) -> None:
    check(schedule, 2, 3, memory=Memory(offload=tmp_path, units=units))


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_two_hundred_steps(num_ranks: int, tmp_path: Any) -> None:
    """50 for each number of ranks, of up to 40 nodes."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("seq1f1b", {}),
        ("seq1f1b", {"order": {"options": {"trees": "numbers"}}, "loss_fn": of_tokens}),
        ("seq1f1b", {"order": {"weights": "fill"}}),
        ("seq-zb-h1", {"memory": Memory(recompute="all"), "loss_fn": of_tokens}),
        ("seq-zb-h2", {"order": {"weights": "fill"}}),
        ("1f1b", {"memory": Memory(recompute=lambda unit: unit.segment > 0)}),
        ("gpipe", {"memory": Memory(offload=tmp_path)}),
        ("seq1f1b", {"memory": Memory(offload=tmp_path, recompute="all")}),
        ("seq-zbv", {}),
        ("seq-v-half", {"memory": Memory(recompute="all")}),
    ]
    for seed in range(50):
        schedule, options = kinds[seed % len(kinds)]
        if schedule in TWO_STAGES and num_ranks not in (2, 4):  # the model has four layers
            schedule = "seq1f1b"
        check(schedule, num_ranks, seed, most_nodes=(12, 40)[seed % 4 == 0], **options)
