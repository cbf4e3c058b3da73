"""Trains at random what surrounds the engine, against one process: ties, cuts, losses, documents, checkpoints, errors.

A case is a small decoder with random ties, cut by ``split``, a loss, documents or none, an optimizer, and some legs of
training on different numbers of ranks, from checkpoint to checkpoint. In some steps a rank fails, before, in or after
them; the ranks then agree on a step, go back to it, and train on. The truth is the same model, trained in plain torch
without a fault. Ranks are threads.
"""

from __future__ import annotations

import copy
import random
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn

import seq1f1b
from seq1f1b.partition import ModelShape
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware
from seq1f1b.planning.step_plan import plan_step
from seq1f1b.testing import run_ranks

VOCAB, HIDDEN, HEADS, LENGTH = 19, 16, 2, 16
MOST_ERRORS = 20  # of a rank in a leg
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"weight_decay": 0.1},
    "Adam": {"weight_decay": 0.01, "amsgrad": True},
    "SGD": {"momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "NAdam": {"weight_decay": 0.01},
    "RAdam": {},
    "Adagrad": {"eps": 1e-6},  # with torch's 1e-10 the rounding of a tiny gradient is a large step
    "Adamax": {},
    "Adadelta": {},
    "ASGD": {"weight_decay": 0.01},
}
LOSSES = ("mean", "masked", "targets", "divisor", "divisor and more", "sum")
FAULTS = ("argument", "forward", "backward", "loss", "between", "eval")


# -- a case ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leg:
    """Steps under one layout, up to a checkpoint or the end."""

    steps: int
    ranks: int
    stages_per_rank: int
    schedule: str
    segments: int


@dataclass(frozen=True)
class Case:
    seed: int
    blocks: int
    ties: tuple[tuple[str, str], ...]  # names of parameters; the second one is the first
    shared: tuple[tuple[int, int], ...]  # blocks; the norm of the second one is that of the first
    loss: str
    documents: str
    optimizer: str
    by_name: bool  # groups of the optimizer
    clips: bool
    microbatches: int
    rows: int  # of a micro-batch
    legs: tuple[Leg, ...]
    faults: dict[int, tuple[str, int]] = field(default_factory=dict)  # by step: what, and a number that chooses a rank

    @property
    def steps(self) -> int:
        return sum(leg.steps for leg in self.legs)


def make_case(seed: int) -> Case:
    rng = random.Random(seed)
    blocks = rng.randint(2, 5)
    ties = [("embedding.weight", "head.weight")] if rng.random() < 0.5 else []
    square = [f"blocks.{i}.{name}.weight" for i in range(blocks) for name in ("q", "out")]
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        first, second = rng.sample(square, 2)
        if all(second not in tie for tie in ties) and all(first != tie[1] for tie in ties):
            ties.append((first, second))
    shared = []
    if rng.random() < 0.3:
        shared.append((0, rng.randint(1, blocks - 1)))
    documents = rng.choice(("none", "none", "packed", "planned"))
    loss = "mean" if documents == "planned" else rng.choice(LOSSES)
    microbatches = rng.randint(1, 4)
    legs = []
    for _ in range(rng.randint(1, 3)):
        v = 2 if documents != "planned" and blocks >= 4 and rng.random() < 0.3 else 1
        ranks = rng.randint(1, min(4, blocks // v))
        names = ["seq1f1b"] if v == 1 else ["seq1f1b-interleaved"]
        if v == 1 and microbatches >= ranks and documents != "planned":
            names += ["seq-zb-h1"]
        if v == 2 and microbatches % ranks:
            v, names = 1, ["seq1f1b"]
        legs.append(Leg(rng.randint(0, 3), ranks, v, rng.choice(names), rng.randint(1, 4)))
    faults = {}
    for step in range(sum(leg.steps for leg in legs)):
        if rng.random() < 0.3:
            kind = rng.choice(FAULTS)
            faults[step] = ("argument" if kind == "eval" and documents == "planned" else kind, rng.randrange(12))
    return Case(
        seed=seed,
        blocks=blocks,
        ties=tuple(ties),
        shared=tuple(shared),
        loss=loss,
        documents=documents,
        optimizer=rng.choice(list(OPTIMIZERS)),
        by_name=rng.random() < 0.5,
        clips=rng.random() < 0.4,
        microbatches=microbatches,
        rows=rng.randint(1, 2),
        legs=tuple(legs),
        faults=faults,
    )


# -- the model ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer = seq1f1b.layer_handle(index)
        self.norm = nn.LayerNorm(HIDDEN)
        self.q, self.out = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.kv, self.up, self.down = (
            nn.Linear(HIDDEN, 2 * HIDDEN),
            nn.Linear(HIDDEN, 2 * HIDDEN),
            nn.Linear(2 * HIDDEN, HIDDEN),
        )
        self.fault = ""

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        if self.fault == "forward" and torch.is_grad_enabled():
            raise Injected("forward")
        normed = self.norm(x)
        q, k, v = (
            t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (self.q(normed), *self.kv(normed).chunk(2, dim=2))
        )
        attended = seq1f1b.causal_attention(q, k, v, layer=self.layer, doc_ids=doc_ids)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        if self.fault == "backward" and x.requires_grad:
            x.register_hook(_fail_in_backward)
        return x


class Decoder(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(i) for i in range(case.blocks))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        for first, second in case.shared:
            self.blocks[second].norm = self.blocks[first].norm
        for first, second in case.ties:
            owner, _, name = second.rpartition(".")
            setattr(self.get_submodule(owner), name, self.get_parameter(first))

    def forward(self, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, doc_ids=doc_ids)
        return self.head(self.norm(x))


def make_model(case: Case) -> Decoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(case.seed)
        return Decoder(case).double()


# -- its data and its loss ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """
    Attributes:
        documents: lengths, in a row after another; of "planned" all that there are.
        texts: tokens of each document and one more; of "planned" alone.
    """

    tokens: Tensor
    target: Tensor
    documents: tuple[int, ...] = ()
    texts: tuple[Tensor, ...] = ()


def make_batch(case: Case, step: int) -> Batch:
    rng = random.Random(f"{case.seed} {step}")
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    size = case.microbatches * case.rows
    tokens = torch.randint(VOCAB, (size, LENGTH), generator=generator)
    target = torch.randint(VOCAB, (size, LENGTH), generator=generator)
    if case.loss in ("masked", "targets", "divisor", "divisor and more"):
        begin = rng.randrange(LENGTH)  # so that some segments have no target
        keep = torch.rand(size, LENGTH, generator=generator) < rng.choice((0.1, 0.5))
        keep[:, :begin] = False
        if case.loss == "divisor" and rng.random() < 0.2:
            keep[:] = False
        elif case.loss.startswith("divisor"):
            keep[rng.randrange(size), -1] = True  # and some micro-batches
        else:
            keep[:, -1] = True
        target = target.masked_fill(~keep, -100)
    documents: tuple[int, ...] = ()
    texts: tuple[Tensor, ...] = ()
    if case.documents == "packed":
        cuts = sorted(rng.sample(range(1, LENGTH), rng.randint(1, 3)))
        documents = tuple(b - a for a, b in zip([0, *cuts], [*cuts, LENGTH], strict=True))
    elif case.documents == "planned":
        documents = tuple(rng.randint(1, 3 * LENGTH) for _ in range(rng.randint(2, 8)))
        texts = tuple(torch.randint(VOCAB, (length + 1,), generator=generator) for length in documents)
    return Batch(tokens, target, documents, texts)


def sums(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")


def more(output: Tensor) -> Tensor:
    return 0.01 * output.logsumexp(-1).square().sum()


def loss_fn_of(case: Case, rank_faults: dict[str, str]) -> Any:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        if rank_faults.pop("loss", None):
            raise Injected("loss")
        if case.loss == "sum":
            return sums(output, target)
        if case.loss == "divisor":
            return sums(output, target), (target != -100).sum()
        if case.loss == "divisor and more":
            return sums(output, target) + more(output), (target != -100).sum()
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return loss_fn


def loss_option(case: Case) -> seq1f1b.Loss:
    if case.loss == "sum":
        return seq1f1b.Loss(reduction="sum")
    weights = {"targets": "targets", "masked": "microbatches", "mean": "microbatches"}
    return seq1f1b.Loss(weight=weights[case.loss]) if case.loss in weights else seq1f1b.Loss()


def whole_loss(case: Case, model: Decoder, batch: Batch) -> Tensor:
    """The loss of a step in one process, each document alone."""
    if case.documents == "planned":
        total = sum(batch.documents)
        return sum(sums(model(t[None, :-1]), t[None, 1:]) for t in batch.texts) / total
    pieces = batch.tokens.split(batch.documents or LENGTH, dim=1)
    output = torch.cat([model(piece) for piece in pieces], dim=1)
    each = [
        (sums(o, t), more(o), (t != -100).sum())
        for o, t in zip(output.chunk(case.microbatches), batch.target.chunk(case.microbatches), strict=True)
    ]
    if case.loss == "sum":
        return sum(s for s, *_ in each) / len(each)
    if case.loss in ("mean", "masked"):
        return sum(s / n for s, _, n in each) / len(each)
    extra = sum(m for _, m, _ in each) if case.loss == "divisor and more" else 0.0
    return (sum(s for s, *_ in each) + extra) / max(1, sum(int(n) for *_, n in each))


# -- training ----------------------------------------------------------------------------------------------------------


def make_optimizer(case: Case, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    options, kind = dict(OPTIMIZERS[case.optimizer]), getattr(torch.optim, case.optimizer)
    named = list(named)
    plain = [p for name, p in named if case.by_name and ("norm" in name or "embedding" in name)]
    chosen = {id(p) for p in plain}
    groups: list[dict[str, Any]] = [{"params": [p for _, p in named if id(p) not in chosen]}]
    groups += [{"params": plain, "lr": 0.002, **({"weight_decay": 0.0} if "weight_decay" in options else {})}]
    return kind([group for group in groups if group["params"]] or [{"params": []}], lr=0.01, **options)


def truth(case: Case) -> dict[str, Tensor]:
    model = make_model(case)
    optimizer = make_optimizer(case, model.named_parameters())
    for step in range(case.steps):
        whole_loss(case, model, make_batch(case, step)).backward()
        if case.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Injected(RuntimeError):
    """A fault of the driver."""


def _fail_in_backward(_: Tensor) -> None:
    raise Injected("backward")


class Rank:
    """One rank's training in one leg."""

    def __init__(self, case: Case, leg: Leg, group: Any, stages: Sequence[nn.Module], outcomes: list[bool]) -> None:
        self.case, self.leg, self.group = case, leg, group
        self.outcomes = outcomes
        self.faults: dict[str, str] = {}
        schedule = seq1f1b.build_schedule(
            leg.schedule,
            num_ranks=leg.ranks,
            num_microbatches=case.microbatches,
            num_segments=leg.segments,
            stages_per_rank=leg.stages_per_rank,
        )
        self.own = [stages[i] for i, rank in enumerate(schedule.rank_of_stage) if rank == group.rank]
        planned = case.documents == "planned"
        self.engine = seq1f1b.PipelineEngine(
            self.own,
            schedule=leg.schedule,
            num_microbatches=1 if planned else case.microbatches,
            num_segments=1 if planned else leg.segments,
            arg_rules={"doc_ids": "slice"},
            loss_fn=loss_fn_of(case, self.faults),
            loss=loss_option(case),
            group=group,
        )
        self.optimizer = make_optimizer(case, self.engine.named_parameters())
        self.state = seq1f1b.PipelineState(self.engine, self.optimizer)

    def snapshot(self) -> Any:
        weights = [p.detach().clone() for p in self.engine.parameters()]
        return weights, copy.deepcopy(self.optimizer.state_dict())

    def restore(self, snapshot: Any) -> None:
        weights, state = snapshot
        with torch.no_grad():
            for parameter, value in zip(self.engine.parameters(), weights, strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(copy.deepcopy(state))
        self.optimizer.zero_grad()

    def train(self, first: int, meeting: threading.Barrier) -> None:
        """From one step on to the leg's last.

        Ranks meet after every call, as scripts do that reduce something over all of them: who failed in it? Where one
        did, all go back. A rank that left the failed call well hears of it in its next one, which fails, too.
        """
        step, spent, heard = first, set[int](), list[str]()
        while step < first + self.leg.steps:
            before, fault = self.snapshot(), self.case.faults.get(step, ("", 0))
            if step in spent:
                fault = ("", 0)
            is_eval = fault[0] == "eval"
            spent.add(step)
            self.outcomes[self.group.rank] = True
            try:
                self.step(step, *fault)
            except Exception as error:
                self.outcomes[self.group.rank] = False
                heard.append(f"{type(error).__name__}: {error}")
                for block in self.blocks():
                    block.fault = ""
                self.faults.clear()
            meeting.wait(60)
            went_well = all(self.outcomes)
            meeting.wait(60)
            if went_well and not is_eval:
                step += 1
            else:
                self.restore(before)
                if len(heard) > MOST_ERRORS:  # each of few faults is heard twice at most: its own call, and the next
                    raise AssertionError(f"step {step} fails in every call; the last errors: {heard[-3:]}")

    def blocks(self) -> list[Block]:
        return [block for module in self.own for block in module.modules() if isinstance(block, Block)]

    def step(self, step: int, kind: str, number: int) -> None:
        """One call of the engine, in which the rank of that number may fail."""
        case, engine = self.case, self.engine
        rank = engine_rank_of_last(engine) if kind == "loss" else number % self.leg.ranks
        is_mine = kind != "" and rank == self.group.rank
        batch = make_batch(case, step)
        arguments = self.arguments(batch)
        inputs = arguments.pop("inputs", batch.tokens)
        if is_mine and kind == "between":
            engine.fail("stopped by hand")
            raise Injected("between")
        if is_mine and kind in ("forward", "backward"):
            self.blocks()[number % len(self.blocks())].fault = kind
        elif is_mine and kind == "loss":
            self.faults["loss"] = "now"
        elif is_mine and kind in ("argument", "eval"):
            inputs = batch.tokens[:, :0]
        try:
            if kind == "eval":
                given = {name: value for name, value in arguments.items() if name not in ("loss_weight", "plan")}
                engine.eval(inputs, **given)
            else:
                engine.step(inputs, **arguments)
        except Exception as error:
            if is_mine and not isinstance(error, seq1f1b.PipelineError):
                raise Injected(kind) from error
            raise
        if kind == "eval":
            return
        if case.clips:
            engine.clip_grad_norm_(0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def arguments(self, batch: Batch) -> dict[str, Any]:
        if self.case.documents == "planned":
            shape = ModelShape(hidden=HIDDEN, layers=self.case.blocks, heads=HEADS, kv_heads=HEADS, ffn=32, vocab=VOCAB)
            cost = CostModel(shape, load_hardware("cpu-zen5"), num_ranks=self.leg.ranks, seq_len=3 * LENGTH)
            plan = plan_step(batch.documents, cost, unit_tokens=LENGTH, schedule="seq1f1b")
            return {
                "inputs": plan.join([text[:-1] for text in batch.texts]),
                "target": plan.join([text[1:] for text in batch.texts]),
                "kwargs": [{"doc_ids": ids} for ids in plan.doc_ids],
                "loss_weight": sum(batch.documents),
                "plan": plan,
            }
        kwargs = {}
        if batch.documents:
            ids = torch.arange(len(batch.documents)).repeat_interleave(torch.tensor(batch.documents))
            kwargs = {"kwargs": {"doc_ids": ids.expand(batch.tokens.shape)}}
        return {"target": batch.target, **kwargs}


def engine_rank_of_last(engine: seq1f1b.PipelineEngine) -> int:
    return int(engine.schedule.rank_of_stage[-1])


def _bits(rank: Rank) -> list[Tensor]:
    state = rank.optimizer.state_dict()
    values = [v for each in state["state"].values() for v in each.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*rank.engine.parameters(), *values)] + [
        torch.tensor(hash(repr(state["param_groups"])) % 2**31),
        torch.get_rng_state(),
    ]


def run_leg(case: Case, number: int, first: int, folder: str) -> dict[str, Tensor]:
    """Trains a leg from the checkpoint in the folder on, leaves one there, and returns all weights by name."""
    leg = case.legs[number]
    stages = seq1f1b.split(make_model(case), leg.ranks * leg.stages_per_rank)
    meeting, outcomes = threading.Barrier(leg.ranks), [True] * leg.ranks

    def work(group: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        rank = Rank(case, leg, group, stages, outcomes)
        if number:
            dcp.load({"train": rank.state}, checkpoint_id=f"{folder}/{number - 1}", no_dist=True)
        rank.train(first, meeting)
        before = _bits(rank)
        saved = copy.deepcopy(rank.state.state_dict())
        after = _bits(rank)
        assert len(before) == len(after) and all(map(torch.equal, before, after)), "saving has changed the training"
        weights = {name: p.detach().clone() for name, p in rank.engine.named_parameters()}
        rank.engine.close()
        return weights, saved

    results = run_ranks(leg.ranks, work)
    weights: dict[str, Tensor] = {}
    merged: dict[str, Any] = {"model": {}, "optimizer": {}}
    for own, saved in results:
        for name, value in own.items():
            assert name not in weights or torch.equal(weights[name], value), f"copies of {name} differ"
        weights |= own
        merged["model"] |= saved["model"]
        merged["optimizer"] |= saved["optimizer"]
        merged |= {name: value for name, value in saved.items() if name not in merged}
    dcp.save({"train": merged}, checkpoint_id=f"{folder}/{number}", no_dist=True)
    return weights


def run(seed: int) -> float:
    """The largest error of a case's weights."""
    case = make_case(seed)
    want = truth(case)
    weights: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = 0
        for number, leg in enumerate(case.legs):
            weights = run_leg(case, number, first, folder)
            first += leg.steps
    assert set(want) == set(weights), sorted(set(want) ^ set(weights))
    return max(float((weights[name] - value).abs().max() / (1 + value.abs().max())) for name, value in want.items())
