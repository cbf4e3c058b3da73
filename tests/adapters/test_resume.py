"""Does a run that is saved at any step go on with any number of ranks as the run that nothing interrupted?"""

from __future__ import annotations

import datetime
import itertools
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from processes import PipedProcesses, join_and_run
from torch import Tensor, nn, optim

from seq1f1b import PipelineEngine, PipelineState
from seq1f1b.testing import LoopbackGroup

WORLD, LAYERS, VOCAB, HIDDEN, STEPS, JOINS = 4, 6, 11, 6, 4, 2
MAKERS: dict[str, Any] = {
    "Adam, weight decay": partial(optim.Adam, lr=1e-2, weight_decay=0.1),
    "SGD, dampening": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "NAdam": partial(optim.NAdam, lr=1e-2, weight_decay=0.1),
    "Adafactor": partial(optim.Adafactor, lr=1e-2),
}
SAVED_AT = (0, 1, JOINS + 1)
PLACES = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]  # ranks and stages of each


class Block(nn.Module):
    """Part of its parameters take part in later steps alone, so that for a while only some have state."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.late = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.is_late = False

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x) + (self.late(x) if self.is_late else 0))


class Stage(nn.Module):
    """Layers by number in the whole model: an embedding, blocks, and a head that is its transpose if they are tied."""

    def __init__(self, numbers: range, is_tied: bool) -> None:
        super().__init__()
        for number in numbers:
            generator = torch.Generator().manual_seed(number % (LAYERS - 1) if is_tied else number)
            layer: nn.Module = nn.Embedding(VOCAB, HIDDEN) if number == 0 else Block()
            layer = nn.Linear(HIDDEN, VOCAB, bias=False) if number == LAYERS - 1 else layer
            for parameter in layer.double().parameters():
                nn.init.normal_(parameter, std=0.3, generator=generator)
            self.add_module(f"layer{number}", layer)
        ends = [layer for layer in self.children() if not isinstance(layer, Block)]
        if is_tied and ends:
            ends[-1].weight = ends[0].weight  # two in one stage are one
            self.tied_parameters = {"layer0.weight": ends[0].weight}

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Run:
    def __init__(
        self, name: str, is_tied: bool, ranks: int, stages_per_rank: int, group: Any, rank: int, spoil: bool
    ) -> None:
        count = ranks * stages_per_rank
        cuts = [LAYERS * i // count for i in range(count + 1)]
        self.stages = [Stage(range(cuts[i], cuts[i + 1]), is_tied) for i in range(rank, count, ranks)]
        self.engine = PipelineEngine(
            self.stages,
            schedule="seq1f1b" if stages_per_rank == 1 else "seq1f1b-interleaved",
            num_microbatches=6,
            num_segments=2,
            loss_fn=loss_fn,
            group=group,
        )
        if spoil:
            for parameter in self.engine.parameters():
                nn.init.constant_(parameter, 7.0)
        self.optimizer = MAKERS[name](list(self.engine.parameters()))
        self.schedule = optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.state = PipelineState(self.engine, self.optimizer)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            tokens = step_tokens(step)
            for block in (part for stage in self.stages for part in stage.modules() if isinstance(part, Block)):
                block.is_late = step >= JOINS
            self.engine.step(tokens[:, :-1], target=tokens[:, 1:])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def kept(self) -> dict[str, Tensor]:
        """Weights and optimizer state by name."""
        entries = self.state.state_dict()
        tensors = {**entries["model"], **entries["optimizer"]}
        return {name: value.clone() for name, value in tensors.items() if isinstance(value, Tensor)}


def plain_run(name: str, is_tied: bool) -> dict[str, Tensor]:
    """Weights of one process of plain torch after all steps."""
    model = Stage(range(LAYERS), is_tied)
    optimizer = MAKERS[name](list(model.parameters()))
    schedule = optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(STEPS):
        tokens = step_tokens(step)
        for block in (part for part in model.modules() if isinstance(part, Block)):
            block.is_late = step >= JOINS
        loss_fn(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return dict(model.named_parameters())


def step_tokens(step: int) -> Tensor:
    return torch.randint(VOCAB, (6, 9), generator=torch.Generator().manual_seed(step))


def is_same(value: Tensor, truth: Tensor, is_tied: bool) -> bool:
    """Bit for bit; but for what the gradients of two copies, added before or after the micro-batches', round."""
    return torch.allclose(value, truth, rtol=1e-9, atol=1e-12) if is_tied else torch.equal(value, truth)


def resumes(rank: int, _: Connection, folder: str, saves: int) -> tuple[list[str], int]:
    """Names in which a rank's tensors differ from those of one rank that trained without a stop; and their number.

    Each way is saved at so many of the steps of SAVED_AT.
    """
    groups = {count: dist.new_group(list(range(count))) for count in range(1, WORLD + 1)}
    wrong: list[str] = []
    compared = 0
    for number, (name, is_tied) in enumerate(itertools.product(MAKERS, (False, True))):
        whole = Run(name, is_tied, 1, 1, LoopbackGroup(1)[0], 0, spoil=False)
        whole.train(0, STEPS)
        truth = whole.kept()
        plain = plain_run(name, is_tied)
        assert all(torch.allclose(truth[key], value, rtol=1e-9, atol=1e-12) for key, value in plain.items())
        for case, saved_at in enumerate(SAVED_AT):
            if (case - number) % 3 >= saves:
                continue
            saved, *others = (PLACES[(i + case) % len(PLACES)] for i in range(len(PLACES)))
            checkpoint = f"{folder}/{name}-{saved_at}-{is_tied}"
            for place in (saved, *others):
                if rank < place[0]:
                    group = groups[place[0]]
                    run = Run(name, is_tied, *place, group, rank, spoil=place is not saved)
                    if place is saved:
                        run.train(0, saved_at)
                        dcp.save({"train": run.state}, checkpoint_id=checkpoint, process_group=group)
                    else:
                        dcp.load({"train": run.state}, checkpoint_id=checkpoint, process_group=group)
                        run.schedule.last_epoch = saved_at
                    run.train(saved_at, STEPS)
                    kept = run.kept()
                    compared += len(kept)
                    differ = [key for key, value in kept.items() if not is_same(value, truth[key], is_tied)]
                    wrong += [f"{name}, tied {is_tied}, at {saved_at}, {place}: {key}" for key in differ]
                    run.engine.close()
                dist.barrier()
    return wrong, compared


def join(folder: str, rank: int) -> None:
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=limit)


@pytest.mark.parametrize("saves", [1, pytest.param(3, marks=pytest.mark.full)])
def test_a_run_goes_on_bit_for_bit_on_any_number_of_ranks(saves: int, tmp_path: Path) -> None:
    with PipedProcesses(WORLD, join_and_run, partial(join, str(tmp_path)), resumes, str(tmp_path), saves) as ranks:
        for rank in range(WORLD):
            wrong, compared = ranks.result(rank)
            assert not wrong, (len(wrong), compared, wrong[:10])
            assert compared > 100
