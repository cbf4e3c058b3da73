"""Are stages of another number or order than the pipeline's refused by every rank, however they are wrapped?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from processes import run_processes
from split_parts import VOCAB, Plain
from tiny_model import cross_entropy
from torch import nn

import seq1f1b
from seq1f1b.engine.pipeline import places_of
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


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    return nn.Sequential(*parts)


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
    "in another module": (lambda: [joined([stage]) for stage in stages(3)[:2]], {}, "stage 0 of 3 .*, stage 1 of 3"),
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


@pytest.mark.parametrize("place", [3, (1,), (2, 2), (-1, 2), ("0", 2)])
def test_an_attribute_that_is_something_else(place: Any) -> None:
    module = nn.Linear(2, 2)
    module.pipeline_place = place
    with pytest.raises(ValueError, match=r"pipeline_place of Linear is .*, must be \(index, count\)"):
        places_of([(0, module)])


# -- processes meet when the engine is made ----------------------------------------------------------------------------


def _processes(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=r"has 2 stages, and was given stage 0 of 3 .*, stage 1 of 3"):
        engine_of(stages(3)[rank])
    engine_of(stages(2)[rank]).close()


def test_every_rank_says_so_when_the_engine_is_made() -> None:
    run_processes(2, _processes)
