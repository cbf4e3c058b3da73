"""Do random sets of ties, over random stages and in random orders of their lists, train as the whole model does?"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from processes import run_processes
from torch import Tensor, nn

import seq1f1b
from seq1f1b.testing import run_ranks

SIZE, TOKENS, M, K, STEPS = 5, 8, 2, 2, 3
LIMIT = 1e-10
OPTIMIZERS = [
    torch.optim.AdamW,
    partial(torch.optim.AdamW, foreach=True),
    partial(torch.optim.AdamW, fused=True),
    partial(torch.optim.SGD, momentum=0.9),
    partial(torch.optim.SGD, momentum=0.9, fused=True),
    partial(torch.optim.RMSprop, foreach=True),
    torch.optim.Adafactor,
]
SLOTS = ("one", "two", "bias", "scale")  # of a layer: two matrices and two vectors


class Layer(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        for name in SLOTS:
            shape = (SIZE, SIZE) if name in SLOTS[:2] else (SIZE,)
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.one + self.bias) @ self.two * self.scale


class Layers(nn.Module):
    """Some layers of the model, by their names in it."""

    def __init__(self, layers: dict[str, Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


@dataclass
class Case:
    """A model, its ties, and how it is trained."""

    seed: int
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        draw = self.draw = random.Random(self.seed)
        self.ranks, self.stages_per_rank = draw.randint(1, 3), draw.randint(1, 2)
        self.num_layers = self.ranks * self.stages_per_rank + draw.randint(0, 3)
        kinds = [SLOTS[:2], SLOTS[2:]]
        free = [[(i, name) for i in range(self.num_layers) for name in kind] for kind in kinds]
        self.ties: list[list[tuple[int, str]]] = []
        for _ in range(draw.randint(0, 6)):
            slots = draw.choice(free)
            if len(slots) > 1:
                tie = draw.sample(slots, draw.randint(2, min(5, len(slots))))
                self.ties.append(sorted(tie))
                for slot in tie:
                    slots.remove(slot)
        self.frozen = [draw.random() < 0.15 for _ in self.ties]
        names = [f"layers.{i}.{name}" for i in range(self.num_layers) for name in SLOTS]
        self.decayed = set(draw.sample(names, len(names) // 2))
        self.optimize, self.max_norm = draw.choice(OPTIMIZERS), draw.choice([0.1, 1e9])
        self.schedule = "seq1f1b-interleaved" if self.stages_per_rank > 1 else draw.choice(["seq1f1b", "seq-zb-h1"])
        self.way = draw.choice(["split", "by hand"])

    def whole(self) -> Layers:
        generator = torch.Generator().manual_seed(self.seed)
        model = Layers({str(i): Layer(generator) for i in range(self.num_layers)})
        for tie, is_frozen in zip(self.ties, self.frozen, strict=True):
            first, name = tie[0]
            parameter = model.layers[str(first)].get_parameter(name).requires_grad_(not is_frozen)
            for i, name in tie[1:]:
                setattr(model.layers[str(i)], name, parameter)
        return model

    def stages(self, ranks: int) -> list[Any]:
        """By hand each stage has copies of its own, of which the first one's values count."""
        model, count = self.whole(), ranks * self.stages_per_rank
        cuts = [self.num_layers * stage // count for stage in range(count + 1)]
        if self.way == "split":
            return list(seq1f1b.split(model, at=[f"layers.{cut}" for cut in cuts[1:-1]], check=False))
        stages: list[Any] = [Layers({str(i): Layer(torch.Generator()) for i in range(a, b)}) for a, b in pairwise(cuts)]
        first_names, seen = {id(p): name for name, p in model.named_parameters()}, set[int]()
        for number in sorted(range(count), key=lambda number: (number % ranks, number)):  # as ranks hold them
            stage, copies = stages[number], dict[int, nn.Parameter]()
            for i in map(int, stage.layers):
                for name in SLOTS:
                    p = model.layers[str(i)].get_parameter(name)
                    values = p.detach() + 1 if id(p) in seen else p.detach().clone()
                    copies.setdefault(id(p), nn.Parameter(values, p.requires_grad))
                    setattr(stage.layers[str(i)], name, copies[id(p)])
            seen |= copies.keys()
            tied = [(first_names[key], copy) for key, copy in copies.items() if self._is_tied(model, key)]
            stage.tied_parameters = dict(self.draw.sample(tied, len(tied)))
        return stages

    def _is_tied(self, model: Layers, key: int) -> bool:
        return any(id(model.layers[str(i)].get_parameter(name)) == key for (i, name), *_ in self.ties)

    def optimizer(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Groups by the names in the whole model."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in named:
            groups[name in self.decayed].append(parameter)
        made = [{"params": groups[True], "weight_decay": 0.3}, {"params": groups[False], "lr": 0.02}]
        return self.optimize(made, lr=0.01)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        x, y = (torch.randn(M, TOKENS, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
        return x, y

    def truth(self) -> Layers:
        model = self.whole()
        optimizer = self.optimizer(model.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = self.batch(step)
            F.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            optimizer.step()
        return model

    def train(self, group: Any, stages: list[Any], **options: Any) -> None:
        """All steps on one rank."""
        num_ranks = group.size if group is not None else torch.distributed.get_world_size()
        rank = group.rank if group is not None else torch.distributed.get_rank()
        engine = seq1f1b.PipelineEngine(
            stages[rank::num_ranks],
            schedule=self.schedule,
            num_microbatches=M,
            num_segments=K,
            loss_fn=F.mse_loss,
            group=group,
            **options,
        )
        optimizer = self.optimizer(engine.named_parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = self.batch(step)
            engine.step(x, target=y)
            engine.clip_grad_norm_(self.max_norm)
            optimizer.step()
        engine.close()


def worst_error(stages: list[Any], truth: Layers) -> float:
    want = dict(truth.named_parameters(remove_duplicate=False))
    found = [(name, p) for stage in stages for name, p in stage.named_parameters(remove_duplicate=False)]
    assert {name for name, _ in found} <= want.keys() and found
    return max(float((p - want[name]).detach().norm() / (1 + want[name].detach().norm())) for name, p in found)


def run_case(seed: int) -> float:
    case = Case(seed)
    stages = case.stages(case.ranks)
    run_ranks(case.ranks, lambda group: case.train(group, stages))
    return worst_error(stages, case.truth())


@pytest.mark.parametrize("part", range(4))
def test_a_slice_trains_as_the_whole_model(part):
    errors = {seed: run_case(seed) for seed in range(5 * part, 5 * part + 5)}
    assert {seed: error for seed, error in errors.items() if not error < LIMIT} == {}


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_train_as_the_whole_model(part):
    errors = {seed: run_case(seed) for seed in range(100 * part, 100 * part + 100)}
    assert {seed: error for seed, error in errors.items() if not error < LIMIT} == {}


def train_processes(rank: int, world: int, transport: str) -> None:
    for seed in range(8):
        case = Case(seed)
        case.num_layers, case.stages_per_rank, case.schedule = max(case.num_layers, world), 1, "seq1f1b"
        stages = case.stages(world)
        case.train(None, stages, transport=transport)
        assert worst_error([stages[rank]], case.truth()) < LIMIT, seed


@pytest.mark.parametrize("transport", ["shm", pytest.param("c10d", marks=pytest.mark.full)])
def test_processes_train_as_the_whole_model(transport):
    run_processes(3, train_processes, transport)
