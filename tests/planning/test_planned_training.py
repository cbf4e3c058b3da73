"""Do planned steps train as each document alone: any lengths, ranks, orders, recomputed units, replicas?"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import run_processes
from replicas import wrap
from slices import each_value, whole
from tiny_model import Config, cross_entropy, gradient_error, stage_of, whole_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from seq1f1b import Loss, Memory, ModelShape, PipelineEngine, ScheduleError, add_loss, carry_in, carry_out, layer_handle
from seq1f1b.data import DocumentBatches
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.step_plan import StepPlan, plan_step, share_documents
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


def engine_of(module: Any, group: Any, **options: Any) -> PipelineEngine:
    options = {"loss_fn": cross_entropy, "arg_rules": {"doc_ids": "slice"}, **options}
    return PipelineEngine(module, num_microbatches=1, group=group, **options)


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
        memory = Memory(offload=folder if remedy == "offload" else None)
        engine = engine_of(stage_of(model, CONFIG, group.rank, num_ranks), group, memory=memory)
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


def replicas(rank: int, world: int) -> None:
    """Two replicas of two stages, which share the documents of each step by their work."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    replica, index = divmod(rank, 2)
    model = whole_model(CONFIG)
    stage = wrap("ddp", stage_of(model, CONFIG, index, 2), mesh.get_group("data"), mesh["data"])
    engine = engine_of(stage, mesh.get_group("pipeline"))
    rng = random.Random(7)
    for seed in range(4):
        lengths = [rng.randint(1, 40) for _ in range(rng.randint(2, 9))]
        tokens, targets = texts_of(lengths, seed)
        total = sum(int((target != -100).sum()) for target in targets)
        own = share_documents(lengths, 2, cost_of(2))[replica]
        plan = plan_step([lengths[i] for i in own], cost_of(2), unit_tokens=8)
        step(engine, plan, [tokens[i] for i in own], [targets[i] for i in own], loss_weight=float(total))
        truth = alone(tokens, targets, total)[1]
        found = {name: p.grad for name, p in engine.named_parameters()}
        assert gradient_error(found, {name: truth[name] for name in found}) <= 1e-10
        for parameter in engine.parameters():
            parameter.grad = None
    engine.close()


def test_replicas_train_as_each_document_alone() -> None:
    run_processes(4, replicas)


class Balanced(torch.nn.Module):
    """A stage whose auxiliary loss is of each document: the square of the mean of what its tokens give.

    Sums of every document of the row are handed on, by the position of its first token; the last segment of the row
    gives the loss, in which a document weighs by its tokens.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear, self.layer = torch.nn.Linear(4, 4).double(), layer_handle(index)

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        out = self.linear(x).tanh()
        first = torch.zeros(x.shape[1], dtype=torch.int64) if doc_ids is None else doc_ids[0].long()
        sums = carry_in(self.layer, out.new_zeros(128, 5)).index_add(0, first, F.pad(out[0], (0, 1), value=1.0))
        carry_out(self.layer, sums)
        counts = sums[:, 4].clamp(min=1.0)
        means = sums[:, :4] / counts[:, None]
        add_loss((means.square().sum(1) * sums[:, 4]).sum() / sums[:, 4].sum(), of="sequence")
        return out


def test_auxiliary_losses_of_each_document() -> None:
    lengths = [40, 3, 7, 23, 12, 1, 9, 30]
    plan = plan_step(lengths, cost_of(2), unit_tokens=10)
    assert any(len(row) > 1 and len(sizes) > 1 for row, sizes in zip(plan.rows, plan.segment_sizes, strict=True))
    generator = torch.Generator().manual_seed(0)
    texts = [torch.rand(n, 4, dtype=torch.float64, generator=generator) for n in lengths]
    models = [Balanced(0), Balanced(1)]

    def mean_square(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()

    def run(group: Any) -> Any:
        model, loss = copy.deepcopy(models[group.rank]), Loss(weight=lambda target: target.shape[1])
        engine = engine_of(model, group, loss_fn=mean_square, loss=loss)
        step(engine, plan, texts, texts)
        assert engine.report(gather=True).simulated.schedule == plan.schedule
        engine.close()
        return [p.grad for p in model.parameters()]

    found = run_ranks(2, run)
    total = sum(lengths)
    for text in texts:
        hidden = text
        for model in models:
            hidden = model.linear(hidden).tanh()
            (hidden.mean(0).square().sum() * len(text) / total).backward(retain_graph=True)
        (mean_square(hidden, text) * len(text) / total).backward()
    for model, gradients in zip(models, found, strict=True):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.allclose(parameter.grad, gradient, rtol=1e-10, atol=1e-13)


def test_steps_are_planned_by_the_units_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """After four steps costs are those of the units, which the machine's rates know nothing of; losses stay right.
    Units take seconds by their tokens, in place of the seconds of a shared machine."""
    rng = random.Random(0)
    lengths = [rng.randint(1, 60) for _ in range(120)]
    tokens, targets = texts_of(lengths, 0)
    model = whole_model(CONFIG)
    truth, _ = alone(tokens, targets, 1.0)
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
        engine = engine_of(stage_of(model, CONFIG, group.rank, 2), group)
        batches = DocumentBatches(lengths, cost_of(2), tokens_per_step=400, engine=engine)
        digests, costs = [], []
        for planned in batches:
            own = [[texts[i] for i in planned.documents] for texts in (tokens, targets)]
            losses = step(engine, planned.plan, *own)
            for loss, row in zip(losses or (), planned.plan.rows, strict=False):
                documents = [planned.documents[i] for i in row]
                counted = sum(int((targets[i] != -100).sum()) for i in documents)
                assert abs(float(loss) * counted - sum(float(truth[i]) for i in documents)) <= 1e-9 * max(1, counted)
            digests.append(planned.plan.digest)
            costs.append(batches.cost)
        engine.close()
        return digests, costs

    (digests, costs), (others, _) = run_ranks(2, run)
    assert digests == others
    assert costs[3].source is costs[3].parts and len(costs) > 6
    sizes = (1, 20, 60)
    spans = arrays_of([Span(size, size * (size + 1) / 2, size) for size in sizes])
    assumed, found = (each.source.seconds(spans)[0] for each in (costs[3], costs[-1]))
    for stage, (floor, per_token) in enumerate(terms):
        wanted = [floor + per_token * size for size in sizes]
        assert max(assumed.forward[stage]) < 0.1 * wanted[0]
        assert found.forward[stage].tolist() == pytest.approx(wanted, rel=1e-6)
        assert found.backward[stage].tolist() == pytest.approx([2 * each for each in wanted], rel=1e-6)
