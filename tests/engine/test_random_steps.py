"""Does a random step of any family, shape, loss and features give the losses and gradients of the model run whole?

A draw is an order, of a named family or a random one; micro-batches in segments, rows, trees or packed documents; a
loss; and what the engine does meanwhile. The truth is the model run whole, by torch, on every path and document alone.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from order_runs import LENGTH, SIZES, all_cases, embedding_of, head_of, join_rows
from orders import random_order, with_moves, with_recomputation
from replicas import take_head
from slices import by_family, full_only, whole
from tiny_model import Config, Stage, cross_entropy, gradient_error, stage_of, whole_model
from torch import Tensor, nn
from tree_runs import Trees, along, data_of, paths_of, random_rows, random_trees
from waits import Waits
from wide_products import wide_products

from seq1f1b import (
    Costs,
    Loss,
    Memory,
    PipelineEngine,
    Schedule,
    ScheduleError,
    add_loss,
    build_schedule,
    carry_in,
    carry_out,
)
from seq1f1b.testing import run_ranks

FAMILIES = {cases[0][0]: cases for cases in by_family(all_cases())}
NAMES = [*FAMILIES, *["random"] * 5]
VOCAB = 13
SHAPES = ("even", "uneven", "documents", "rows", "trees")
AUXILIARY = 0.1
# Views of the last row, all of memory that a message came in.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[:, -1:],
    "transposed": lambda x: x.transpose(1, 2)[:, :, -1:].transpose(1, 2),
    "flattened": lambda x: x.flatten(1)[:, -x.shape[2] :].unflatten(1, (1, x.shape[2])),
    "contiguous": lambda x: x.contiguous()[:, -1:],
    "chunk": lambda x: x.split(1, 1)[-1],
    "dropout": lambda x: nn.Dropout(0.5).eval()(x)[:, -1:],
    "unbound": lambda x: x.unbind(1)[-1].unsqueeze(1),
}
WEIGHT = 37.0  # by which a step's sum is divided
OPTIONS = {
    "means": Loss(weight="microbatches"), "targets": Loss(weight="targets"), "tokens": Loss(weight="targets"),
    "sum": Loss(reduction="sum"), "total": Loss(reduction="sum", scale_grads=False),
    "divisor": Loss(), "divisor and more": Loss(), "weight": Loss(), "sum of means": Loss(scale_grads=False),
}  # fmt: skip
LOSSES = {"stage": [*OPTIONS], "loss": ["means", "targets", "weight"]}
LOSSES["spread"] = LOSSES["spread, embedding"] = ["means", "targets", "tokens", "sum", "total"]


@dataclass
class Draw:
    """What a seed draws.

    Attributes:
        schedule: the order, without what options add.
        source: what the engine is given as its schedule.
        counts: micro-batches and segments of the engine; steps of rows and trees have their own.
        shape: "even", "uneven", "documents", "rows" or "trees".
        documents: lengths of the documents of each row.
        head: "stage", "loss": inside the loss; "spread": over the ranks, or "spread, embedding".
        smoothing: of a head over the ranks.
        steps: of which gradients add up.
        adds: whether layers add their products in one call.
        ties: names of parameters, the second of which is the first.
        adds_loss: "segment": the first block adds a mean over its tokens; "sequence": the square of that over the row.
        carries: the view of its input's last row that a block carries to the next segment.
        is_late: whether stages sleep at random in forwards and backwards.
        scales: whether a GradScaler scales gradients, by a power of two, until all steps have added theirs.
    """

    schedule: Schedule
    source: Any
    counts: tuple[int, int]
    shape: str
    trees: Trees
    memory: Memory
    head: str
    loss: str = ""
    config: Config = field(default_factory=Config)
    documents: tuple[int, ...] = ()
    smoothing: dict[str, float] = field(default_factory=dict)
    steps: int = 1
    dtype: torch.dtype = torch.float64
    adds: bool = False
    ties: tuple[tuple[str, str], ...] = ()
    frozen: tuple[int, ...] = ()
    adds_loss: str = ""
    carries: str = ""
    is_late: bool = False
    scales: bool = False

    @property
    def is_spread(self) -> bool:
        return self.head.startswith("spread")

    @property
    def is_of_rows(self) -> bool:
        return self.shape in ("rows", "trees")

    @property
    def carrier(self) -> str:
        """Names the block that carries: the first one of the second stage, whose input comes in a message."""
        return str(self.config.layers // self.schedule.num_stages % self.config.layers)


def draw_order(rng: random.Random, name: str, shape: str, folder: Path) -> Draw | None:
    """Draws an order and its micro-batches; None where the family does not take them."""
    head = rng.choice(("stage", "stage", "loss", "spread", "spread, embedding"))
    memory = draw_memory(rng, folder)
    if name == "random":
        order, shape = random_order(rng), "documents" if shape == "documents" else "uneven"
        if order.kinds.isdisjoint("BI"):
            return None
        order = with_recomputation(order, rng) if rng.random() < 0.5 else order
        moved = with_moves(order, rng) if rng.random() < 0.4 else order
        if moved != order:
            order, memory, head = moved, Memory(offload=folder, units="none"), "stage"
        elif head.startswith("spread"):
            seconds = {each: rng.choice((0.1, 1.0, 4.0)) for each in ("statistics", "loss", "forward", "backward")}
            order = order.spread_vocabulary(rng.randint(0, 3), Costs(**seconds), embedding="embedding" in head)
        M, k = order.num_microbatches, order.num_segments
        return Draw(order, order, (M, k), shape, Trees([SIZES[k]] * M, [None] * M), memory, head)
    cases = FAMILIES[name]
    _, P, M, k, v, _ = rng.choice([case for case in cases if case[1] > 1 and 2 < case[2] * case[3] <= 8] or cases)
    weights, prefetch = rng.choice(("planned", "planned", "fill")), rng.choice((None, None, 0, 3))
    options = {"trees": "numbers"} if name == "seq1f1b" and rng.random() < 0.5 else {}
    build = partial(build_schedule, name, weights=weights, prefetch=prefetch, options=options)
    trees, counts = Trees([SIZES[k]] * M, [None] * M), {"num_ranks": P, "stages_per_rank": v}
    schedule = build(num_microbatches=M, num_segments=k, **counts)
    if shape in ("rows", "trees"):
        trees = random_trees(rng, 4, 6) if shape == "trees" else random_rows(rng)
        counts |= {"parents": [trees.chain(m) for m in range(len(trees.sizes))]} if shape == "trees" else {}
        try:
            schedule = build(num_microbatches=len(trees.sizes), num_segments=list(map(len, trees.sizes)), **counts)
        except ScheduleError:
            return None
    return Draw(schedule, build, (M, k), shape, trees, memory, head)


def draw_memory(rng: random.Random, folder: Path) -> Memory:
    return rng.choice(
        (
            *[Memory()] * 3,
            *(Memory(recompute="all"), Memory(recompute=lambda unit: unit.segment % 2 == 1)),
            Memory(blocks=("blocks", rng.choice((0.3, 1.0, lambda unit: min(1.0, 0.5 * unit.segment))))),
            Memory(recompute=lambda unit: unit.microbatch % 2 == 1, blocks=("blocks", 0.5)),
            *(Memory(offload=folder), Memory(offload=folder, blocks=("blocks", 0.5))),
            Memory(recompute=lambda unit: unit.segment == 1, offload=folder, units=lambda unit: unit.segment != 2),
        )
    )


def draw(seed: int, folder: Path) -> Draw:
    rng, found, tries = random.Random(seed), None, 0
    name, shape = NAMES[seed % len(NAMES)], rng.choice(SHAPES)
    while found is None:
        tries += 1
        found = draw_order(rng, name, shape if tries < 20 else "uneven", folder)
    found.loss = rng.choice([loss for loss in LOSSES[found.head] if loss != "means" or not found.is_of_rows])
    attention = rng.choice(({}, {"softcap": 2.0}, {"window": 4}))
    found.config = Config(
        *(32, 2, rng.choice((1, 2)), 48, VOCAB, max(4, found.schedule.num_stages)),
        checkpoint=found.memory == Memory() and rng.random() < 0.3,
        sinks=rng.random() < 0.5,
        v_head_dim=rng.choice((0, 10)),
        options={} if found.shape == "trees" and "window" in attention else attention,
    )
    found.steps, found.adds = rng.choice((1, 1, 2, 3)), rng.random() < 0.3
    if found.shape == "documents":
        cuts = sorted(rng.sample(range(1, LENGTH), rng.randint(1, 3)))
        found.documents = tuple(b - a for a, b in itertools.pairwise([0, *cuts, LENGTH]))
    if found.is_spread and found.loss != "tokens":
        found.smoothing = rng.choice(({}, {"label_smoothing": 0.1}, {"z_loss": 0.01}))
    if (
        found.shape in ("even", "uneven")
        and found.loss in ("means", "targets")
        and not found.smoothing
        and rng.random() < 0.6
    ):
        found.dtype = rng.choice((torch.float32, torch.bfloat16, torch.bfloat16))
    elif found.head == "stage" and rng.random() < 0.4:
        first, second = sorted(rng.sample(range(found.config.layers), 2))
        found.ties = (("embedding.weight", "head.weight"), (f"blocks.{first}.q.weight", f"blocks.{second}.q.weight"))
    elif found.head == "stage":
        found.frozen = tuple(s for s in range(found.schedule.num_stages) if rng.random() < 0.2)
    has_mean = found.loss in ("means", "targets", "weight", "tokens") and found.shape != "trees"
    if has_mean and found.memory.blocks is None and rng.random() < 0.5:
        found.adds_loss = rng.choice(("segment", "sequence"))
    has_siblings = any(isinstance(size, list) for sizes in found.trees.sizes for size in sizes)
    may_carry = found.shape != "documents" and not has_siblings and found.memory.blocks is None
    found.carries = rng.choice([*VIEWS]) if may_carry and rng.random() < 0.5 else ""
    found.is_late, found.scales = rng.random() < 0.15, rng.random() < 0.2
    return found


def shifted(view: str, block: nn.Module, given: Any) -> Tensor:
    """A hook: adds half of the row before, which a segment before has left."""
    (x,) = given
    before = carry_in(1, torch.zeros_like(x[:, :1]))
    carry_out(1, VIEWS[view](x))
    return x + 0.5 * torch.cat([before, x[:, :-1]], 1)


def add_auxiliary(of: str, block: nn.Module, given: Any, output: Tensor) -> None:
    if of == "segment":
        return add_loss(AUXILIARY * output.square().mean())
    wide = output.double()
    sums = carry_in(2, wide.new_zeros(2)) + torch.stack([wide.square().sum(), wide.new_tensor(wide.numel())])
    carry_out(2, sums)
    return add_loss(AUXILIARY * (sums[0] / sums[1]).square(), of="sequence")


class Late:
    """A hook of a stage: sleeps for a random time, mostly none, in every forward and backward."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def sleep(self, *_: Any) -> None:
        time.sleep(max(0.0, 0.01 * (self.random.random() - 0.7)))

    def __call__(self, stage: nn.Module, given: Any, output: Tensor) -> None:
        self.sleep()
        if output.requires_grad:
            output.register_hook(self.sleep)


# -- the truth ---------------------------------------------------------------------------------------------------------


def of_tokens(output: Tensor, target: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    logits, goal = output.flatten(0, 1), target.flatten()
    each = F.cross_entropy(logits, goal, reduction="none", label_smoothing=label_smoothing)
    return (each + z_loss * logits.logsumexp(-1).square() * (goal != -100)).view(target.shape)


def summed(output: Tensor, target: Tensor) -> Tensor:
    return of_tokens(output, target).sum()


def divided(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return summed(output, target), (target != -100).sum()


def with_z_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A term over all tokens, targets or not."""
    return summed(output, target) + 0.1 * output.logsumexp(-1).square().sum(), (target != -100).sum()


LOSS_FNS = {"divisor": divided, "divisor and more": with_z_loss, "sum": summed, "total": summed, "tokens": of_tokens}


def micro_batches(drawn: Draw, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and targets; in some draws a prompt of every micro-batch, or a whole one, counts nothing."""
    rng = random.Random(seed)
    tokens, targets = data_of(drawn.trees, seed)
    prompt = rng.choice((0, rng.randint(1, LENGTH)))
    for target in targets[: rng.choice((1, len(targets)))]:
        target[:, :prompt] = -100
    targets[-1][-1, -1] = 1
    return tokens, targets


def run_alone(
    drawn: Draw, model: Stage, tokens: list[Tensor], targets: list[Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Returns the losses of a step and the gradients."""
    sums, counts = [], [int((target != -100).sum()) for target in targets]
    divisors = {"means": len(counts), "sum of means": 1, "sum": len(counts), "total": 1, "weight": WEIGHT}
    divisor, added, auxiliary = divisors.get(drawn.loss, sum(counts)), list[Tensor](), list[Tensor]()
    model.blocks["0"].register_forward_hook(lambda block, given, output: added.append(output.square().sum()))
    if drawn.carries:
        model.blocks[drawn.carrier].register_forward_pre_hook(partial(shifted, drawn.carries))
    for m, (inputs, target) in enumerate(zip(tokens, targets, strict=True)):
        ends = list(itertools.accumulate(drawn.documents, initial=0))
        paths = [[span] for span in itertools.pairwise(ends)]
        seen: dict[tuple[int, int], Tensor] = {}
        for path in paths or paths_of(drawn.trees.sizes[m], drawn.trees.chain(m)):
            outputs = model(along(inputs, path)).split([b - a for a, b in path], 1)
            for (a, b), output in zip(path, outputs, strict=True):
                more = 0.1 * output.logsumexp(-1).square() if drawn.loss == "divisor and more" else 0.0
                seen.setdefault((a, b), of_tokens(output, target[:, a:b], **drawn.smoothing) + more)
        sums.append(torch.cat([seen[span] for span in sorted(seen)], 1))
        share = (1 if drawn.loss == "means" else counts[m]) / divisor  # as the micro-batch weighs
        mean = sum(added) / (inputs.numel() * drawn.config.hidden)
        auxiliary.append(share * AUXILIARY * (mean**2 if drawn.adds_loss == "sequence" else mean))
        added.clear()
    means = [each.sum() / count if count else 0.0 * each.sum() for each, count in zip(sums, counts, strict=True)]
    total = sum(each.sum() for each in (means if "means" in drawn.loss else sums)) / divisor
    if drawn.adds_loss:
        total = total + sum(auxiliary)
    total.backward()
    if drawn.loss in ("sum", "total"):
        means = [each.sum() for each in sums]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [loss.detach() for loss in (sums if drawn.loss == "tokens" else means)], gradients


# -- the engine --------------------------------------------------------------------------------------------------------


def tie(module: Stage, ties: tuple[tuple[str, str], ...]) -> None:
    """Makes the ties of two parameters of a module, and lists those of which the module has one."""
    own, module.tied_parameters = dict(module.named_parameters()), {}
    for first, second in ties:
        if first in own and second in own:
            owner, _, name = second.rpartition(".")
            setattr(module.get_submodule(owner), name, own[first])
        if first in own or second in own:
            module.tied_parameters[first] = own.get(first, own.get(second))


def make_engine(
    drawn: Draw, model: Stage, memory: Memory, group: Any, default: torch.device, is_late: bool
) -> PipelineEngine:
    P, last = drawn.schedule.num_ranks, drawn.schedule.num_stages - 1
    own = [s for s, rank in enumerate(drawn.schedule.rank_of_stage) if rank == group.rank]
    stages = {s: stage_of(model, drawn.config, s, last + 1) for s in own}
    loss_fn: Any = LOSS_FNS.get(drawn.loss, cross_entropy)
    for s, stage in stages.items():
        stage.requires_grad_(s not in drawn.frozen)
        tie(stage, drawn.ties)
        if drawn.carries and drawn.carrier in stage.blocks:
            stage.blocks[drawn.carrier].register_forward_pre_hook(partial(shifted, drawn.carries))
        if is_late:
            stage.register_forward_hook(Late(s))
    if drawn.adds_loss and 0 in own:
        stages[0].blocks["0"].register_forward_hook(partial(add_auxiliary, drawn.adds_loss))
    if drawn.head == "loss" and last in own:
        loss_fn = take_head(stages[last])
    if drawn.is_spread:
        if last in own:
            stages[last].head = nn.Identity()
        if 0 in own and "embedding" in drawn.head:
            stages[0].embedding = nn.Identity()
        by_token = {"token_loss": lambda log_probs, _: -log_probs} if drawn.loss == "tokens" else {}
        loss_fn = head_of(model, group.rank, P, **drawn.smoothing, **by_token)
    embedding = embedding_of(model, group.rank, P) if "embedding" in drawn.head else None
    with default:
        return PipelineEngine(
            [*stages.values()], schedule=drawn.source, num_microbatches=drawn.counts[0], num_segments=drawn.counts[1],
            segment_sizes=drawn.trees.sizes[0] if drawn.shape in ("uneven", "documents") else None, loss_fn=loss_fn,
            loss=OPTIONS[drawn.loss], arg_rules={"doc_ids": "slice"}, memory=memory, embedding=embedding, group=group,
        )  # fmt: skip


def train(
    drawn: Draw,
    model: Stage,
    tokens: Any,
    targets: Any,
    memory: Memory,
    *,
    default: str = "cpu",
    is_late: bool = False,
    is_verified: bool = False,
) -> list[tuple[Any, ...]]:
    """Returns, of each rank, losses of an evaluation and of steps, gradients by name and their norm; report and waits.

    All calls of the engine are under this default device.
    """
    step: dict[str, Any] = {"loss_weight": WEIGHT} if drawn.loss == "weight" else {}
    given = {"segment_sizes": drawn.trees.sizes} if drawn.is_of_rows else {}
    given |= {"parents": drawn.trees.parents} if drawn.shape == "trees" and any(drawn.trees.parents) else {}
    if not drawn.is_of_rows:
        tokens, targets = torch.cat(tokens), torch.cat(targets)
    if drawn.documents:
        starts = torch.tensor(list(itertools.accumulate(drawn.documents, initial=0))[:-1])
        ids = starts.repeat_interleave(torch.tensor(drawn.documents)).int()
        given["kwargs"] = {"doc_ids": ids.expand(tokens.shape).contiguous()}

    def run(group: Any) -> tuple[Any, ...]:
        engine = make_engine(drawn, model, memory, group, torch.device(default), is_late)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=drawn.scales)
        with torch.device(default):
            goal = targets if engine.has_last else None
            losses = [engine.eval(tokens, target=goal, **given)]
            for _ in range(drawn.steps):
                with Waits() as waits:
                    losses.append(engine.step(tokens, target=goal, grad_scaler=scaler, **step, **given))
            if drawn.scales:
                scaler.unscale_(torch.optim.SGD(engine.parameters(), lr=0.1))
            gradients = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
            report, norm = engine.report(), engine.clip_grad_norm_(1e9)
            if is_verified:
                verified = engine.verify(tokens, target=goal, show=False, **step, **given)
                assert verified.ok, verified
            engine.close()
        return losses, gradients, norm, report, waits

    with warnings.catch_warnings(action="ignore"):  # of losses and divisors, which have tests of their own
        return run_ranks(drawn.schedule.num_ranks, run)


def expected_order(drawn: Draw) -> Schedule:
    """Returns the order with the units that options add."""
    order = drawn.schedule.recompute(drawn.memory.recompute)
    order = order.defer_weights() if order.fills and "W" not in order.kinds else order
    if drawn.is_spread and "S" not in order.kinds:
        order = order.spread_vocabulary(embedding="embedding" in drawn.head)
    return order if drawn.memory.offload is None else order.offload(drawn.memory.units or "all")


def check_report(drawn: Draw, order: Schedule, rank: int, report: Any) -> None:
    """Units run in their order, and hold as much as is planned."""
    units = order.ranks[rank]
    assert order.fills or tuple(unit for unit, _, _ in report.timeline) == units
    times = [time for _, *span in report.timeline for time in span]
    assert times == sorted(times) and times[0] > 0
    assert report.recomputed_units == sum(unit.kind == "R" for unit in units)
    assert report.kept_units + report.moved_units == sum(unit.kind == "F" for unit in units) - report.recomputed_units
    assert report.kv_bytes == report.planned_kv_bytes
    assert report.grad_bytes == report.planned_grad_bytes or drawn.frozen
    for stage in report.stages:
        assert stage.peak_live_units <= stage.planned_live_units
        assert order.fills or stage.peak_live_units == stage.planned_live_units
        assert order.fills or stage.peak_live_tokens == stage.planned_live_tokens
    if drawn.is_spread and drawn.shape == "uneven" and not order.fills:
        changes = ({"S": 1, "T": -1}.get(unit.kind, 0) * drawn.trees.sizes[0][unit.segment] for unit in units)
        rows = len(range(rank, VOCAB, order.num_ranks))
        assert report.logit_bytes == 2 * max(itertools.accumulate(changes)) * rows * drawn.dtype.itemsize


def check_waits(drawn: Draw, of_ranks: list[Waits]) -> None:
    """In the third step of a shape the host waits once before the units, to count targets and check tokens, and after
    them to read divisors, and once for each tie, whose gradients go over the host."""
    most: Counter[str] = Counter()
    for waits in of_ranks:
        most |= waits.found
    has_divisor = drawn.loss.startswith("divisor")
    before = drawn.is_spread or (OPTIONS[drawn.loss].reduction == "mean" and not has_divisor)
    if drawn.steps == 3 and not drawn.scales:
        names = [waits.names for waits in of_ranks]
        assert (most["before"], most["within"]) == (before, 0) and most["after"] <= has_divisor + len(drawn.ties), names


@pytest.mark.parametrize("seed", [*range(81), *full_only(*((seed,) for seed in whole(range(81, 2000))))])
def test_a_random_step_is_that_of_the_whole_model(seed: int, tmp_path: Path) -> None:
    """In narrow dtypes its error, to float64, is that of the model run whole in the dtype."""
    drawn = draw(seed, tmp_path)
    model = whole_model(drawn.config, drawn.dtype, seed)
    tie(model, drawn.ties)
    tokens, targets = micro_batches(drawn, seed)
    losses, truth = run_alone(drawn, copy.deepcopy(model).double(), tokens, targets)
    own_losses, own = run_alone(drawn, copy.deepcopy(model), tokens, targets)
    plain = Memory(offload=drawn.memory.offload, units="none") if "O" in drawn.schedule.kinds else Memory()
    with wide_products() if drawn.adds else nullcontext():
        ranks = train(drawn, model, tokens, targets, drawn.memory, is_late=drawn.is_late, is_verified=seed % 8 == 1)
        is_again = drawn.memory != plain or drawn.is_late or seed % 3 == 0
        others = train(drawn, model, tokens, targets, plain, default="meta") if is_again else ranks
    assert all(map(torch.equal, tensors_of(ranks), tensors_of(others))), "numbers depend on what is held, where or when"
    order = expected_order(drawn)
    for rank, (*_, report, _) in enumerate(ranks):
        check_report(drawn, order, rank, report)
    check_waits(drawn, [waits for *_, waits in ranks])

    found, is_narrow = join_rows([gradients for _, gradients, *_ in ranks], drawn.is_spread), drawn.dtype.itemsize < 8
    trained = {
        name
        for s in range(order.num_stages)
        for name, _ in stage_of(model, drawn.config, s, order.num_stages).named_parameters()
        if s not in drawn.frozen and name not in dict(drawn.ties).values()
    }
    truth, own = ({name: g for name, g in each.items() if name in trained} for each in (truth, own))
    assert all(gradient.dtype == drawn.dtype for gradient in found.values())
    mean, rounding = {name: gradient.double() / drawn.steps for name, gradient in found.items()}, 1e-6 * is_narrow
    assert gradient_error(mean, truth) <= max(1e-10, 1.5 * gradient_error(own, truth) + rounding)
    for returned in next(returned for returned, *_ in ranks if returned[0]):
        for one, torchs, wanted in zip(returned, own_losses, losses, strict=True):
            limit = 2 * (torchs - wanted).abs() + rounding * wanted.abs()
            assert drawn.dtype == torch.bfloat16 or bool(((one - wanted).abs() <= limit.clamp(min=1e-12)).all())
    norm = torch.stack([gradient.double().norm() for gradient in found.values()] or [torch.zeros(())]).norm()
    for _, _, of_rank, *_ in ranks:
        torch.testing.assert_close(of_rank.double(), norm.double(), rtol=1e-2 if is_narrow else 1e-12, atol=0)


def tensors_of(ranks: list[tuple[Any, ...]]) -> list[Tensor]:
    return [t for losses, gradients, norm, *_ in ranks for t in (*itertools.chain(*losses), *gradients.values(), norm)]
