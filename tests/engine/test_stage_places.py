"""Are stages of another number or order than the pipeline's refused by every rank, however they are wrapped?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from split_parts import HIDDEN, VOCAB, Plain
from tiny_model import cross_entropy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

import seq1f1b
from seq1f1b.engine.pipeline import check_places, places_of
from seq1f1b.testing import run_ranks

TOKENS = torch.arange(32).view(4, 8) % VOCAB
TARGET = TOKENS.flip(1)


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return list(seq1f1b.split(Plain(), count, check=False))


def engine_of(modules: Any, group: Any = None, **options: Any) -> seq1f1b.PipelineEngine:
    return seq1f1b.PipelineEngine(
        modules, num_microbatches=2, num_segments=2, loss_fn=cross_entropy, group=group, **options
    )


# -- ranks as threads meet in their first step -------------------------------------------------------------------------


GIVEN: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], str]] = {  # the modules of each rank
    "too many": (lambda: stages(3)[:2], {}, "has 2 stages, and was given stage 0 of 3 .* on rank 0, stage 1 of 3"),
    "too many, the last ones": (
        lambda: stages(4)[2:],
        {},
        "stage 2 of 4 as stage 0 on rank 0, stage 3 of 4 as stage 1",
    ),
    "swapped": (lambda: stages(2)[::-1], {}, "stage 1 of 2 as stage 0 on rank 0, stage 0 of 2 as stage 1 on rank 1"),
    "twice": (lambda: [stages(2)[0]] * 2, {}, "stage 0 of 2 as stage 0 on rank 0, stage 0 of 2 as stage 1 on rank 1"),
    "of two cuts": (lambda: [stages(2)[0], stages(3)[2]], {}, "stage 0 of 2 .*, stage 2 of 3"),
    "compiled": (lambda: [torch.compile(stage) for stage in stages(3)[:2]], {}, "stage 0 of 3 .*, stage 1 of 3"),
    "in another module": (lambda: [*map(nn.Sequential, stages(3)[:2])], {}, "stage 0 of 3 .*, stage 1 of 3"),
    "two stages per rank, in the order of ranks": (
        lambda: [stages(4)[:2], stages(4)[2:]],
        {"schedule": "seq1f1b-interleaved"},
        "stage 0 of 4 as stage 0 on rank 0, stage 2 of 4 as stage 1 on rank 1, stage 1 of 4 as stage 2 on rank 0",
    ),
    "interleaved for a V": (
        lambda: [stages(4)[::2], stages(4)[1::2]],
        {"schedule": "seq-zbv"},
        "stage 3 of 4 as stage 2 on rank 1, stage 2 of 4 as stage 3 on rank 0",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_stages_that_are_no_whole_model(name: str) -> None:
    make, options, text = GIVEN[name]
    given = make()

    def run(group: Any) -> None:
        engine = engine_of(given[group.rank], group, **options)
        for call in (engine.step, engine.eval, engine.verify):
            with pytest.raises(ValueError, match=text):
                call(TOKENS, target=TARGET)

    run_ranks(2, run)


SOUND: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "one each": (lambda: stages(2), {}),
    "two in one module": (lambda: [nn.Sequential(*stages(4)[:2]), nn.Sequential(*stages(4)[2:])], {}),
    "beside others": (lambda: [nn.Sequential(stages(1)[0], nn.Identity()), nn.Identity()], {}),
    "interleaved": (lambda: [stages(4)[::2], stages(4)[1::2]], {"schedule": "seq1f1b-interleaved"}),
    "V": (lambda: [[stages(4)[0], stages(4)[3]], stages(4)[1:3]], {"schedule": "seq-zbv"}),
    "say nothing": (lambda: [nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)], {}),
}


@pytest.mark.parametrize("name", SOUND)
def test_stages_that_are_a_whole_model(name: str) -> None:
    make, options = SOUND[name]
    given = make()
    losses = run_ranks(2, lambda group: engine_of(given[group.rank], group, **options).step(TOKENS, target=TARGET))
    assert len(losses[0] + losses[1]) == 2


@pytest.mark.parametrize("place", [3, (1,), (2, 2), (-1, 2), ("0", 2)])
def test_an_attribute_that_is_something_else(place: Any) -> None:
    module = nn.Linear(2, 2)
    module.pipeline_place = place
    with pytest.raises(ValueError, match=r"pipeline_place of Linear is .*, must be \(index, count\)"):
        places_of([(0, module)])


def test_a_user_may_say_it() -> None:
    first, last = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB)
    first.pipeline_place, last.pipeline_place = (0, 2), (1, 2)
    places = places_of([(0, nn.Sequential(first)), (1, last)])
    check_places([places[:1], places[1:]], [0, 1])
    with pytest.raises(ValueError, match=r"stage 1 of 2 as stage 0"):
        check_places([[(0, 1, 2)], [(1, 0, 2)]], [0, 1])


# -- processes meet when the engine is made ----------------------------------------------------------------------------


def _processes(rank: int, world: int, wrap: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica")) if world == 4 else None
    group = None if mesh is None else mesh.get_group("stage")
    index = rank if mesh is None else mesh.get_local_rank("stage")
    for count in (3, 2):
        stage: Any = stages(count)[index]
        if wrap == "ddp":
            assert mesh is not None
            stage = DistributedDataParallel(stage, process_group=mesh.get_group("replica"))
        elif wrap == "fsdp":
            assert mesh is not None
            fully_shard(stage, mesh=mesh["replica"])
        elif wrap == "torch":
            stage = PipelineStage(stage, index, 2, torch.device("cpu"))

        def make() -> Any:
            if wrap == "torch":
                schedule = seq1f1b.ScheduleSeq1F1B(stage, 2, cross_entropy, n_segments=2)  # noqa: B023
                return schedule.engine
            return engine_of(stage, group)  # noqa: B023

        if count == 3:
            with pytest.raises(ValueError, match=r"has 2 stages, and was given stage 0 of 3 .*, stage 1 of 3"):
                make()
        else:
            make().close()
        dist.barrier()


@pytest.mark.parametrize(("world", "wrap"), [(2, ""), (2, "torch"), (4, "ddp"), (4, "fsdp")])
def test_every_rank_says_so_when_the_engine_is_made(world: int, wrap: str) -> None:
    run_processes(world, _processes, wrap)
