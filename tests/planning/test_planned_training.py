"""Do planned steps train as each document alone: any lengths, ranks, orders, recomputed units?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slices import each_value, whole
from tiny_model import Config, cross_entropy, gradient_error, stage_of, whole_model
from torch import Tensor

from seq1f1b import Memory, ModelShape, PipelineEngine, ScheduleError
from seq1f1b.data import DocumentBatches
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.step_plan import StepPlan, plan_step
from seq1f1b.seconds import Span, arrays_of
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=16, heads=2, kv_heads=1, ffn=16, vocab=13, layers=4)
MANY = [40, 3, 7, 23, 12, 1, 9, 30, 5, 16]  # units of these move
SHAPE = ModelShape(hidden=16, layers=4, heads=2, kv_heads=1, ffn=16, vocab=13)


def random_lengths(rng: random.Random) -> list[int]:
    """Any; one of the whole row; all short; one 100 times the rest; of one token."""
    match rng.randrange(5):
        case 0:
            return [rng.randint(1, 40) for _ in range(rng.randint(1, 12))]
        case 1:
            return [rng.randint(30, 60)]
        case 2:
            return [rng.randint(1, 4) for _ in range(rng.randint(4, 20))]
        case 3:
            return [100, *[1] * rng.randint(1, 6)]
        case _:
            return [1] * rng.randint(1, 5)


def cost_of(num_ranks: int) -> CostModel:
    return CostModel(SHAPE, load_hardware("cpu-zen5"), num_ranks=num_ranks, seq_len=64)


def plan_of(rng: random.Random, lengths: list[int], num_ranks: int, schedule: str, remedy: str | None) -> StepPlan:
    """With units of a random length; where units may give way, the room that is left for activations is short.

    Few rows are too few for some families: then it is ``auto``, which splits the backward too.
    """
    options: dict[str, Any] = {"schedule": schedule, "unit_tokens": rng.randint(2, 24)}
    try:
        plan = plan_step(lengths, cost_of(num_ranks), **options)
    except ScheduleError:
        options["schedule"] = "auto"
        plan = plan_step(lengths, cost_of(num_ranks), **options)
    if remedy is None:
        return plan
    held = max(rank.total for rank in plan.ranks)
    for share in (0.6, 0.3, 0.1):
        try:
            room = held - share * max(rank.activations for rank in plan.ranks)
            return plan_step(lengths, cost_of(num_ranks), memory=room, remedies=(remedy,), **options)
        except (ValueError, ScheduleError):  # no such budget, or none of the smaller units in this family
            continue
    return plan


def texts_of(lengths: list[int], seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and targets of each document; some targets are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(CONFIG.vocab, (n,), generator=generator) for n in lengths]
    targets = [torch.randint(CONFIG.vocab, (n,), generator=generator) for n in lengths]
    for target in targets[1:]:
        target[torch.rand(target.shape, generator=generator) < 0.3] = -100
    return tokens, targets


def alone(tokens: list[Tensor], targets: list[Tensor], total: float) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The summed loss of each document run by itself, and gradients of all of them over so many targets."""
    model, losses = whole_model(CONFIG), []
    for x, y in zip(tokens, targets, strict=True):
        output = model(x[None])[0]
        loss = F.cross_entropy(output, y, reduction="sum")
        (loss / total).backward()
        losses.append(loss.detach())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def step(engine: PipelineEngine, plan: StepPlan, tokens: list[Tensor], targets: list[Tensor], **options: Any) -> Any:
    kwargs = [{"doc_ids": ids} for ids in plan.doc_ids]
    return engine.step(plan.join(tokens), target=plan.join(targets), kwargs=kwargs, plan=plan, **options)


def check(rng: random.Random, num_ranks: int, schedule: str, seed: int, folder: Path) -> str:
    """Trains one list of documents; returns what became of its units."""
    lengths = MANY if seed == 5 else random_lengths(rng)
    remedy = (None, "recompute", "offload")[seed % 3]
    plan = plan_of(rng, lengths, num_ranks, schedule, remedy)
    tokens, targets = texts_of(lengths, seed)
    model = whole_model(CONFIG)

    def run(group: Any) -> Any:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, num_ranks),
            num_microbatches=1,
            loss_fn=cross_entropy,
            arg_rules={"doc_ids": "slice"},
            memory=Memory(offload=folder if remedy == "offload" else None),
            group=group,
        )
        losses = step(engine, plan, tokens, targets)
        gradients = {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}
        engine.close()
        return losses, gradients

    total = sum(int((target != -100).sum()) for target in targets)
    losses, truth = alone(tokens, targets, total)
    found: dict[str, Tensor] = {}
    for own, gradients in run_ranks(num_ranks, run):
        found |= gradients
        for loss, row in zip(own, plan.rows, strict=False):
            counted = sum(int((targets[i] != -100).sum()) for i in row)
            assert abs(float(loss) * counted - sum(float(losses[i]) for i in row)) <= 1e-10 * max(1, counted)
    assert gradient_error(found, truth) <= 1e-10
    return "".join(plan.schedule.cell_kinds())


@pytest.mark.parametrize(("num_ranks", "schedule"), each_value([1, 2, 3, 4], ["seq1f1b", "seq-zb-h1", "auto"]))
def test_planned_steps_train_as_each_document_alone(num_ranks: int, schedule: str, tmp_path: Path) -> None:
    """Units are recomputed, or move; orders that are made for their costs may fit without."""
    rng = random.Random(f"{num_ranks} {schedule}")
    kinds = "".join(check(rng, num_ranks, schedule, seed, tmp_path) for seed in [*range(6), *whole(range(6, 30))])
    assert schedule != "seq1f1b" or {"R", "L"} <= set(kinds)


def test_steps_are_planned_by_the_units_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """After four steps costs are those of the units, which the machine's rates know nothing of.
    Units take seconds by their tokens, in place of the seconds of a shared machine."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 60) for _ in range(120)]
    tokens, targets = texts_of(lengths, 0)
    model = whole_model(CONFIG)
    terms = [(4e-3, 1e-4), (2e-3, 2e-4)]

    def seconds_of(report: Any) -> dict[Any, float]:
        cells = sorted({(unit.microbatch, unit.segment) for unit, _, _ in report.timeline})
        sizes, found = dict(zip(cells, report.segment_sizes, strict=True)), {}
        for unit, _, _ in report.timeline:
            floor, per_token = terms[unit.stage]
            forward = floor + per_token * sizes[unit.microbatch, unit.segment]
            found[unit] = forward * (1 if unit.kind == "F" else 2)
        return found

    monkeypatch.setattr("seq1f1b.report.report.Report._shared_seconds", property(seconds_of))

    def run(group: Any) -> tuple[list[str], list[CostModel]]:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2),
            num_microbatches=1,
            loss_fn=cross_entropy,
            arg_rules={"doc_ids": "slice"},
            group=group,
        )
        batches = DocumentBatches(lengths, cost_of(2), tokens_per_step=400, engine=engine)
        digests, costs = [], []
        for planned in batches:
            own = [[texts[i] for i in planned.documents] for texts in (tokens, targets)]
            step(engine, planned.plan, *own)
            digests.append(planned.plan.digest)
            costs.append(batches.cost)
        engine.close()
        return digests, costs

    (digests, costs), (others, _) = run_ranks(2, run)
    assert digests == others
    assert costs[3].source is costs[3].parts and len(costs) > 6
    sizes = (1, 20, 60)
    spans = arrays_of([Span(size, size * (size + 1) / 2, size) for size in sizes])
    assumed, found = (each.source.seconds(spans) for each in (costs[3], costs[-1]))
    for stage, (floor, per_token) in enumerate(terms):
        wanted = [floor + per_token * size for size in sizes]
        assert max(assumed.forward[stage]) < 0.1 * wanted[0]
        assert found.forward[stage].tolist() == pytest.approx(wanted, rel=1e-6)
        assert found.backward[stage].tolist() == pytest.approx([2 * each for each in wanted], rel=1e-6)
