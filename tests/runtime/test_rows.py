"""Does a step of rows, micro-batches of their own lengths and segments, train as the whole model does row by row?"""

from __future__ import annotations

import copy
import itertools
import os
import random
from functools import partial
from typing import Any

import pytest
import torch
from processes import run_processes
from replicas import wrap
from slices import each_value
from tiny_model import Config, Stage, cross_entropy, gradient_error, stage_of, two_stages_of, whole_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import seq1f1b
from seq1f1b import (
    Limits,
    LoopbackGroup,
    Loss,
    Memory,
    PipelineEngine,
    PipelineError,
    ScheduleError,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    build_schedule,
)
from seq1f1b.testing import run_ranks

Rows = list[list[int]]
ONE_STAGE = ("seq1f1b", "1f1b", "gpipe", "seq-zb-h1", "seq-zb-h2")
CONFIG = Config(hidden=16, heads=2, kv_heads=1, ffn=16, vocab=13, layers=4)


def cut(rng: random.Random, length: int, most: int) -> list[int]:
    """A row of this length, in segments of random sizes."""
    count = rng.randint(1, min(most, length))
    ends = [0, *sorted(rng.sample(range(1, length), count - 1)), length]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def random_rows(rng: random.Random) -> Rows:
    """Lengths of documents: any, one long and many short, of one token, of one length."""
    match rng.randrange(4):
        case 0:
            lengths = [rng.randint(1, 24) for _ in range(rng.randint(1, 6))]
        case 1:
            lengths = [60, *(rng.randint(1, 3) for _ in range(rng.randint(2, 7)))]
            rng.shuffle(lengths)
        case 2:
            lengths = [1] * rng.randint(1, 5)
        case _:
            lengths = [rng.randint(4, 12)] * rng.randint(2, 4)
    return [cut(rng, length, 5) for length in lengths]


def data_of(rows: Rows, seed: int = 0, size: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and targets of every row, (size, length); some targets are ignored, in short rows at times all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(CONFIG.vocab, (size, sum(row)), generator=generator) for row in rows]
    targets = []
    for row in tokens:
        target = torch.randint(CONFIG.vocab, row.shape, generator=generator)
        target[torch.rand(target.shape, generator=generator) < 0.3] = -100
        targets.append(target)
    targets[-1][0, 0] = 1  # at least one counts
    return tokens, targets


def run_rows_whole(
    model: Stage, tokens: list[Tensor], targets: list[Tensor], *, total: float | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The loss of every row, and gradients of the mean over all counted targets, outside any step."""
    model.zero_grad()
    losses = []
    total = total or max(1, sum(int((target != -100).sum()) for target in targets))
    for x, y in zip(tokens, targets, strict=True):
        counted = int((y != -100).sum())
        output = model(x)
        loss = cross_entropy(output, y) if counted else 0.0 * output.sum()
        (loss * counted / total).backward()
        losses.append(loss.detach())
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def stages_of(model: Stage, schedule: str, rank: int, num_ranks: int) -> Any:
    if schedule in ONE_STAGE:
        return stage_of(model, CONFIG, rank, num_ranks)
    return two_stages_of(model, CONFIG, schedule, rank, num_ranks)


def train(
    schedule: str,
    num_ranks: int,
    steps: list[tuple[Rows, list[Tensor], list[Tensor]]],
    *,
    eval_first: bool = False,
    plain: tuple[int, int] = (16, 4),
    step_options: dict[str, Any] | None = None,
    order: dict[str, Any] | None = None,
    **options: Any,
) -> list[tuple[list[list[Tensor]], dict[str, Tensor], Any]]:
    """(losses of the steps, gradients, report) of every rank."""
    model = whole_model(CONFIG)

    def run(group: Any) -> Any:
        engine = PipelineEngine(
            stages_of(model, schedule, group.rank, num_ranks),
            schedule=schedule if order is None else partial(build_schedule, schedule, **order),
            num_microbatches=plain[0],
            num_segments=plain[1],
            loss_fn=cross_entropy,
            group=group,
            **options,
        )
        losses = []
        for rows, tokens, targets in steps:
            given = {"target": targets if engine.has_last else None, "segment_sizes": rows}
            inputs = tokens if engine.has_first else None
            if eval_first:
                losses.append(engine.eval(inputs, **given))
            losses.append(engine.step(inputs, **given, **(step_options or {})))
        gradients = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
        report = engine.report(gather=True)
        engine.close()
        return losses, gradients, report

    return run_ranks(num_ranks, run)


def check(found: Any, rows: Rows, tokens: list[Tensor], targets: list[Tensor]) -> None:
    losses, truth = run_rows_whole(whole_model(CONFIG), tokens, targets)
    merged: dict[str, Tensor] = {}
    for _, gradients, _ in found:
        merged |= gradients
    (own,) = next(losses_of for losses_of, *_ in found if losses_of[0])
    for loss, expected in zip(own, losses, strict=True):
        assert abs(float(loss - expected)) <= 1e-10
    assert gradient_error(merged, truth) <= 1e-10


@pytest.mark.parametrize(("schedule", "num_ranks"), each_value(["seq1f1b", "1f1b", "gpipe"], [1, 2, 3, 4]))
def test_rows_of_any_length(schedule: str, num_ranks: int) -> None:
    rng = random.Random(f"{schedule} {num_ranks}")
    for seed in range(5):
        rows = random_rows(rng)
        tokens, targets = data_of(rows, seed)
        check(train(schedule, num_ranks, [(rows, tokens, targets)]), rows, tokens, targets)


CASES = [
    ("seq-zb-h1", 2, {}),
    ("seq-zb-h1", 3, {"memory": Memory(recompute="all")}),
    ("seq1f1b", 3, {"order": {"weights": "fill"}}),
    ("seq1f1b", 2, {"memory": Memory(recompute=lambda unit: unit.segment > 0)}),
    ("seq1f1b", 4, {"memory": Memory(recompute="all"), "order": {"prefetch": 0}}),
    ("seq-zb-h2", 2, {"order": {"weights": "fill"}}),
    ("seq-zbv", 2, {}),
    ("seq-v-half", 2, {}),
    ("seq-v-min", 2, {"order": {"weights": "fill"}}),
]


@pytest.mark.parametrize(("schedule", "num_ranks", "options"), CASES)
def test_backwards_that_are_split_filled_or_recomputed(schedule: str, num_ranks: int, options: dict[str, Any]) -> None:
    rng = random.Random(schedule)
    for seed in range(2):
        rows = [*random_rows(rng), *(cut(rng, 7, 3) for _ in range(6))]  # enough units for every family
        tokens, targets = data_of(rows, seed)
        check(train(schedule, num_ranks, [(rows, tokens, targets)], **options), rows, tokens, targets)


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_three_hundred_lists(num_ranks: int) -> None:
    """75 for each number of ranks: backwards whole, split, filled, and recomputed in all units or all but the first."""
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("seq1f1b", {}),
        ("seq-zb-h1", {}),
        ("seq1f1b", {"order": {"weights": "fill"}}),
        ("seq1f1b", {"memory": Memory(recompute="all")}),
        ("seq1f1b", {"memory": Memory(recompute=lambda unit: unit.segment > 0)}),
    ]
    rng = random.Random(num_ranks)
    for seed in range(75):
        schedule, options = kinds[seed % len(kinds)]
        rows = [*random_rows(rng), *(cut(rng, 7, 3) for _ in range(4))]  # enough units for a split backward
        tokens, targets = data_of(rows, seed)
        check(train(schedule, num_ranks, [(rows, tokens, targets)], **options), rows, tokens, targets)


def test_rows_that_move_away(tmp_path: Any) -> None:
    rows = [[4, 3, 9], [2], [5, 5], [1], [8, 1, 1, 1]]
    tokens, targets = data_of(rows)
    check(train("gpipe", 2, [(rows, tokens, targets)], memory=Memory(offload=tmp_path)), rows, tokens, targets)


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "seq1f1b-interleaved", "hanayo", "dualpipev"])
def test_lengths_alone_may_differ_under_any_family(schedule: str) -> None:
    """A family that needs one k for all takes rows of any length in as many segments each."""
    lengths = (9, 2, 31, 5, 1, 14)[: 2 if schedule == "hanayo" else 6]
    rows = [[n] if "seq" not in schedule else [n, n + 1] for n in lengths]
    tokens, targets = data_of(rows)
    check(train(schedule, 2, [(rows, tokens, targets)], plain=(len(rows), len(rows[0]))), rows, tokens, targets)


@pytest.mark.parametrize("schedule", ["seq-zbv", "seq-v-half"])
def test_two_lengths_that_cross_on_a_v_megatron_lm_5271(schedule: str) -> None:
    """NVIDIA/Megatron-LM#5271: two lengths by turns, two ranks whose stages lie in a V.

    There shapes are sent apart from the activations, without a tag. They are crossed between the two directions, and
    gradients are wrong without an error.
    """
    rows = [[6, 6] if m % 2 == 0 else [3] for m in range(8)]
    tokens, targets = data_of(rows)
    found = train(schedule, 2, [(rows, tokens, targets)])
    check(found, rows, tokens, targets)
    order = found[0][2].simulated.schedule
    assert order.rank_of_stage == (0, 1, 1, 0) and order.segments_of == (2, 1) * 4


def test_steps_change_and_the_engine_goes_on() -> None:
    """Rows of other numbers and lengths in every step, eval between them, plain steps among them; the plan holds."""
    rng = random.Random(5)
    model = whole_model(CONFIG)
    steps = [(rows, *data_of(rows, i)) for i, rows in enumerate(random_rows(rng) for _ in range(24))]
    truth: dict[str, Tensor] = {}
    expected = []
    for _, tokens, targets in steps:
        losses, gradients = run_rows_whole(model, tokens, targets)
        expected.append(losses)
        truth = {name: truth.get(name, 0.0) + gradient for name, gradient in gradients.items()}
    found = train("seq1f1b", 2, steps, eval_first=True)
    merged = found[0][1] | found[1][1]
    assert gradient_error(merged, truth) <= 1e-10
    for i, losses in enumerate(expected):
        for measured in (found[1][0][2 * i], found[1][0][2 * i + 1]):
            assert all(abs(float(a - b)) <= 1e-10 for a, b in zip(measured, losses, strict=True))
    report = found[0][2]
    for rank in report.ranks:
        for stage in rank.stages:
            assert stage.peak_live_units == stage.planned_live_units
            assert stage.peak_live_tokens == stage.planned_live_tokens
    assert report.advice


def test_plain_steps_between_steps_of_rows() -> None:
    model = whole_model(CONFIG)
    rows = [[3, 2], [7]]
    tokens, targets = data_of(rows)
    whole = data_of([[4, 4]] * 2, 1)

    def run(group: Any) -> Any:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2),
            num_microbatches=2,
            num_segments=2,
            loss_fn=cross_entropy,
            group=group,
        )
        for _ in range(2):
            engine.step(torch.cat(whole[0]), target=torch.cat(whole[1]))
            engine.step(tokens, target=targets, segment_sizes=rows)
        return {name: p.grad for name, p in engine.named_parameters()}

    found = run_ranks(2, run)
    truth = run_rows_whole(model, tokens, targets)[1]
    plain: dict[str, Tensor] = {}
    for x, y in zip(*whole, strict=True):
        gradients = run_rows_whole(model, [x], [y])[1]
        plain = {name: plain.get(name, 0.0) + gradient / 2 for name, gradient in gradients.items()}
    assert gradient_error(found[0] | found[1], {name: 2 * (truth[name] + plain[name]) for name in truth}) <= 1e-10


def test_outputs_are_a_list_of_rows() -> None:
    model = whole_model(CONFIG)
    rows = [[3, 2], [7], [1, 1]]
    tokens, _ = data_of(rows)

    def run(group: Any) -> Any:
        engine = PipelineEngine(stage_of(model, CONFIG, group.rank, 2), num_microbatches=1, group=group)
        return engine.eval(tokens, return_outputs=True, segment_sizes=rows)[1]

    first, outputs = run_ranks(2, run)
    assert first is None
    for output, row in zip(outputs, tokens, strict=True):
        assert torch.allclose(output, model(row), atol=1e-12)


@pytest.mark.parametrize("of", ["a number", "sums of means", "sums"])
def test_what_the_gradients_are_of(of: str) -> None:
    """By ``loss_weight`` the sum over that number, else the sum of the rows' losses, of means or of sums."""
    rows = [[3, 2, 6], [1], [4, 4]]
    tokens, targets = data_of(rows)
    targets[1][:] = -100  # a row that counts nothing
    loss = {"a number": Loss(), "sums of means": Loss(scale_grads=False), "sums": Loss(reduction="sum")}[of]
    model = whole_model(CONFIG)

    def summed(output: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")

    def run(group: Any) -> Any:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2),
            num_microbatches=3,
            group=group,
            loss=loss,
            loss_fn=summed if of == "sums" else cross_entropy,
        )
        engine.step(tokens, target=targets, segment_sizes=rows, loss_weight=37.0 if of == "a number" else None)
        return {name: p.grad for name, p in engine.named_parameters()}

    found = run_ranks(2, run)
    model.zero_grad()
    for x, y in zip(tokens, targets, strict=True):
        counted = int((y != -100).sum())
        scale = {"a number": 1 / 37.0, "sums of means": 1 / max(1, counted), "sums": 1 / 3}[of]
        (summed(model(x), y) * scale).backward()
    truth = {name: p.grad for name, p in model.named_parameters()}
    assert gradient_error(found[0] | found[1], truth) <= 1e-10


# -- with other parts of the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize("embeds", [False, True])
def test_a_vocabulary_over_the_ranks(embeds: bool) -> None:
    model = whole_model(CONFIG)
    rows = [[4, 2, 5], [1], [3, 3], [6]]
    tokens, targets = data_of(rows)
    losses, truth = run_rows_whole(model, tokens, targets)

    def run(group: Any) -> Any:
        stage = stage_of(model, CONFIG, group.rank, 2)
        head = VocabularyParallelHead(CONFIG.hidden, CONFIG.vocab, rank=group.rank, num_ranks=2, bias=True).double()
        head.load_whole(model.head.weight, model.head.bias)
        embedding = None
        if group.rank == 1:
            stage.head = torch.nn.Identity()
        if embeds:
            embedding = VocabularyParallelEmbedding(CONFIG.vocab, CONFIG.hidden, rank=group.rank, num_ranks=2).double()
            embedding.load_whole(model.embedding.weight)
            if group.rank == 0:
                stage.embedding = torch.nn.Identity()
                stage.forward = lambda x: without_embedding(stage, x)  # type: ignore[method-assign]
        engine = PipelineEngine(stage, num_microbatches=1, loss_fn=head, embedding=embedding, group=group)
        found = engine.step(tokens, target=targets, segment_sizes=rows)
        return found, {name: p.grad for name, p in engine.named_parameters()}

    def without_embedding(stage: Stage, x: Tensor) -> Tensor:
        x = x + stage.position(seq1f1b.positions(x))
        for block in stage.blocks.values():
            x = block(x)
        return x

    (_, first), (found, last) = run_ranks(2, run)
    for loss, expected in zip(found, losses, strict=True):
        assert abs(float(loss - expected)) <= 1e-10
    shared = [name for name in first if name in last]
    merged = first | last | {name: torch.cat([first[name], last[name]]) for name in shared}
    merged = {name: gradient for name, gradient in merged.items() if gradient is not None}
    assert gradient_error(merged, truth) <= 1e-10


class Routed(torch.nn.Module):
    """Reads an argument of its tokens and one of its place, and leaves an auxiliary loss."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = torch.nn.Linear(4, 4).double()

    def forward(self, x: Tensor, gate: Tensor | None = None, place: float = 0.0) -> Tensor:
        out = self.linear(x) * (1.0 if gate is None else gate[..., None]) + place
        seq1f1b.add_loss(out.square().mean())
        return out


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


def test_arguments_and_auxiliary_losses_of_rows() -> None:
    """An auxiliary loss weighs by its targets, here its tokens: together it is the mean over all of the step."""
    rows = [[3, 2, 4], [1], [2, 2]]
    lengths = [sum(row) for row in rows]
    x = [torch.rand(2, n, 4, dtype=torch.float64) for n in lengths]
    gates = [torch.rand(2, n, dtype=torch.float64) for n in lengths]
    targets = [torch.rand(2, n, 4, dtype=torch.float64) for n in lengths]
    models = [Routed(0), Routed(1)]

    def run(group: Any) -> Any:
        model = copy.deepcopy(models[group.rank])
        engine = PipelineEngine(
            model,
            num_microbatches=1,
            loss_fn=half_square,
            group=group,
            arg_rules={"gate": "slice", "place": lambda unit: 0.5 * unit.microbatch},
        )
        losses = engine.step(x, target=targets, kwargs=[{"gate": gate} for gate in gates], segment_sizes=rows)
        return losses, [p.grad for p in model.parameters()]

    found = run_ranks(2, run)
    for m, n in enumerate(lengths):
        hidden = x[m]
        share = n / sum(lengths)
        for model in models:
            hidden = model.linear(hidden) * gates[m][..., None] + 0.5 * m
            (share * hidden.square().mean()).backward(retain_graph=True)
        loss = half_square(hidden, targets[m])
        (share * loss).backward()
        assert abs(float(found[1][0][m] - loss.detach())) <= 1e-10
    for model, (_, gradients) in zip(models, found, strict=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.allclose(parameter.grad, gradient, atol=1e-12)


def test_many_steps_leave_nothing_behind() -> None:
    """60 steps, no two alike: no descriptor more, at most 16 orders, slabs as large as the longest row needs."""
    rng = random.Random(3)
    longest = [[10, 10, 10, 10], [20, 20], [40], *[[1]] * 6]
    model = whole_model(CONFIG)
    steps = [longest, *([cut(rng, rng.randint(1, 30), 4) for _ in range(rng.randint(1, 7))] for _ in range(60))]

    def run(group: Any) -> Any:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2), num_microbatches=1, loss_fn=cross_entropy, group=group
        )
        seen = []
        for rows in steps:
            tokens, targets = data_of(rows, size=1)
            engine.step(tokens, target=targets, segment_sizes=rows)
            seen.append((engine.report().kv_bytes, len(os.listdir("/proc/self/fd"))))
        assert len(engine._runner.orders._known) == 16
        return seen

    for seen in run_ranks(2, run):
        kv_bytes, descriptors = zip(*seen, strict=True)
        assert kv_bytes[-1] <= 7 / 3 * kv_bytes[0]  # a step of more short rows may hold more slots
        assert max(descriptors[20:]) <= descriptors[20] + 4


def replicas(rank: int, world: int) -> None:
    """Two replicas of two stages, each with rows of its own; the number of targets of both is loss_weight."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    replica, index = divmod(rank, 2)
    all_rows = [[[4, 3], [1], [6]], [[2], [5, 5, 1]]]
    data = [data_of(rows, seed) for seed, rows in enumerate(all_rows)]
    total = float(sum(int((target != -100).sum()) for _, targets in data for target in targets))
    model = whole_model(CONFIG)
    stage = wrap("ddp", stage_of(model, CONFIG, index, 2), mesh.get_group("data"), mesh["data"])
    engine = PipelineEngine(stage, num_microbatches=1, loss_fn=cross_entropy, group=mesh.get_group("pipeline"))
    tokens, targets = data[replica]
    for _ in range(2):
        engine.step(tokens, target=targets, segment_sizes=all_rows[replica], loss_weight=total)
    inputs, goals = ([*data[0][i], *data[1][i]] for i in (0, 1))
    truth = run_rows_whole(model, inputs, goals, total=total)[1]
    own = {name: p.grad for name, p in engine.named_parameters()}
    assert gradient_error(own, {name: 2 * truth[name] for name in own}) <= 1e-10
    engine.close()


def test_replicas_with_rows_of_their_own() -> None:
    run_processes(4, replicas)


# -- bad input ---------------------------------------------------------------------------------------------------------


def step_alone(rows: Any, tokens: Any = None, targets: Any = None, **options: Any) -> None:
    engine = PipelineEngine(
        whole_model(CONFIG), num_microbatches=2, loss_fn=cross_entropy, group=LoopbackGroup(1)[0], **options
    )
    known = data_of([[3, 2], [4]])
    try:
        engine.step(tokens or known[0], target=targets or known[1], segment_sizes=rows)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], TypeError, "must be a list: for every micro-batch"),
        ("balanced", TypeError, "must be a list: for every micro-batch"),
        ([3, 2], TypeError, r"segment_sizes\[0\] of a step must be a list of token counts, got int"),
        ([[3, 2], []], ValueError, r"segment_sizes\[1\] is empty"),
        ([[3, 0], [4]], ValueError, r"segment_sizes\[0\]\[1\] is 0, must be at least 1"),
        ([[3, -2], [4]], ValueError, r"segment_sizes\[0\]\[1\] is -2"),
        ([[3, 2.0], [4]], TypeError, r"segment_sizes\[0\]\[1\] must be an int, got float"),
        ([[3, 2**62], [4]], ValueError, r"segment_sizes\[0\]\[1\] is 4611686018427387904, must be at most"),
        ([[3, 2]], ValueError, "is a list of 2 micro-batches, the engine runs 1"),
        ([[3, 2], [4], [1]], ValueError, "is a list of 2 micro-batches, the engine runs 3"),
        ([[3, 3], [4]], ValueError, r"inputs of micro-batch 0 of shape \(2, 5\) has no dimension 1 of 6 tokens"),
        ([[3, 2], [4, 1]], ValueError, r"inputs of micro-batch 1 of shape \(2, 4\) has no dimension 1 of 5 tokens"),
    ],
)
def test_bad_rows(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        step_alone(rows)


def test_an_order_of_its_own() -> None:
    order = build_schedule("seq1f1b", num_ranks=1, num_microbatches=2, num_segments=1)
    with pytest.raises(ValueError, match="give the engine the name of a schedule"):
        step_alone([[3, 2], [4]], schedule=order)
    with pytest.raises(ValueError, match="the schedule is one of rows: give its name"):
        rows = build_schedule("seq1f1b", num_ranks=1, num_microbatches=2, num_segments=[2, 1])
        step_alone([[3, 2], [4]], schedule=rows)
    with pytest.raises(ScheduleError, match="breadth-first needs the same k for all micro-batches"):
        step_alone([[3, 2], [4]], schedule="breadth-first")


@pytest.mark.parametrize("other", [[[2, 3], [4]], [[5], [4]], [[3, 2]], [[3, 2], [9]]])
def test_ranks_that_disagree(other: Rows) -> None:
    """Every rank says so at once, with both values; and goes on to a step in which they agree."""
    rows = [[3, 2], [4]]
    tokens, targets = data_of(rows)
    model = whole_model(CONFIG)

    def run(group: Any) -> str:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2),
            num_microbatches=2,
            loss_fn=cross_entropy,
            group=group,
            limits=Limits(step=20),
        )
        mine = rows if group.rank == 0 else other
        with pytest.raises(ValueError, match="segment_sizes differs between the ranks of the pipeline") as error:
            engine.step(tokens, target=data_of(mine)[1], segment_sizes=mine)
        engine.step(tokens, target=targets, segment_sizes=rows)
        return str(error.value)

    for message in run_ranks(2, run):
        assert f"{rows} on rank 0; {other} on rank 1" in message


def test_a_plain_step_on_one_rank_between_steps_of_rows() -> None:
    rows = [[3, 2], [5]]
    tokens, targets = data_of(rows)
    model = whole_model(CONFIG)

    def run(group: Any) -> None:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2),
            num_microbatches=2,
            loss_fn=cross_entropy,
            group=group,
            limits=Limits(step=20),
        )
        engine.step(tokens, target=targets, segment_sizes=rows)
        mine = {"segment_sizes": rows} if group.rank else {}
        with pytest.raises(ValueError, match=r"segment_sizes differs .*: None on rank 0; \[\[3, 2\]"):
            engine.step(tokens, target=targets, **mine)
        engine.step(tokens, target=targets)

    run_ranks(2, run)


def test_a_bad_row_on_one_rank_ends_the_step_on_all() -> None:
    rows = [[3, 2], [4]]
    tokens, targets = data_of(rows)
    model = whole_model(CONFIG)

    def run(group: Any) -> None:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2),
            num_microbatches=2,
            loss_fn=cross_entropy,
            group=group,
            limits=Limits(step=20),
        )
        mine, error = (rows, PipelineError) if group.rank == 0 else ([[3, 0], [4]], ValueError)
        with pytest.raises(error, match=r"segment_sizes\[0\]\[1\] is 0"):
            engine.step(tokens, target=targets, segment_sizes=mine)
        engine.step(tokens, target=targets, segment_sizes=rows)

    run_ranks(2, run)


def test_positions_and_carried_state_are_each_rows_own() -> None:
    """A row's tokens count from 0, and its first segment is given the default state."""

    class Carrying(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = seq1f1b.layer_handle(0)
            self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            state = seq1f1b.carry_in(self.layer, x.new_zeros(x.shape[0], 1))
            sums = state + (self.weight * x).cumsum(1)
            seq1f1b.carry_out(self.layer, sums[:, -1:])
            return sums + seq1f1b.positions(x)

    rows = [[3, 2, 4], [1], [2, 2]]
    tokens = [torch.rand(2, sum(row), dtype=torch.float64) for row in rows]
    engine = PipelineEngine(Carrying(), num_microbatches=3, group=LoopbackGroup(1)[0])
    _, outputs = engine.eval(tokens, return_outputs=True, segment_sizes=rows)
    for output, x in zip(outputs, tokens, strict=True):
        assert torch.allclose(output, x.cumsum(1) + torch.arange(x.shape[1]), atol=1e-12)
    engine.close()
