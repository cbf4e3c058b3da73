"""Do ranks that were given different arguments all say which one, with both values, before anything runs?"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
from processes import run_processes
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model

from seq1f1b import (
    Costs,
    LoopbackGroup,
    Loss,
    Memory,
    ModelShape,
    PipelineEngine,
    VocabularyParallelHead,
    build_schedule,
)
from seq1f1b.testing import run_ranks
from seq1f1b.transport.agreement import check_agreement

M, K, LENGTH = 2, 2, 8
CONFIG = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=2)
TOKENS, TARGET = batch(CONFIG, 4, LENGTH, size=1)
HEAD = VocabularyParallelHead(8, 11, rank=0, num_ranks=2)
SHAPES = [ModelShape(hidden=8, layers=2, heads=2, kv_heads=1, ffn=ffn, vocab=11) for ffn in (8, 16)]

# options of rank 0 and of rank 1, and what the error of both says
CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"num_microbatches": 4}, {}, "num_microbatches differs .*: 4 on rank 0; 2 on rank 1"),
    ({}, {"num_segments": 4}, "num_segments differs .*: 2 on rank 0; 4 on rank 1"),
    (
        {"schedule": "gpipe"},
        {},
        r"schedule differs .*: 'gpipe' \(order \w+\) on rank 0; 'seq1f1b' \(order \w+\) on rank 1",
    ),
    ({"segment_sizes": [5, 3]}, {"segment_sizes": (4, 4)}, r"segment_sizes .*\[5, 3\] on rank 0; \[4, 4\]"),
    ({"segment_sizes": {8: [5, 3]}}, {}, r"segment_sizes .*\{8: \[5, 3\]\} on rank 0; None"),
    (
        {"segment_sizes": SHAPES[0]},
        {"segment_sizes": SHAPES[1]},
        "segment_sizes differs .*ffn=8.* on rank 0; .*ffn=16.* on rank 1",
    ),
    ({}, {"seq_dim": 2}, "seq_dim differs .*: 1 on rank 0; 2 on rank 1"),
    (
        {},
        {"schedule": partial(build_schedule, "seq1f1b", prefetch=3)},
        "prefetch differs .*: None on rank 0; 3 on rank 1",
    ),
    (
        {},
        {"schedule": lambda **counts: build_schedule("seq1f1b", **counts).replace(costs=Costs(9.0, 1.0))},
        r"prefetch differs .*: None on rank 0; None \(places \w+ by costs\) on rank 1",
    ),
    (
        {"schedule": partial(build_schedule, "seq1f1b", weights="fill")},
        {},
        "weights differs .*: 'fill' on rank 0; 'planned' on rank 1",
    ),
    (
        {"schedule": lambda **counts: build_schedule("gpipe", **counts)},
        {},
        r"schedule differs .*: a callable \(order \w+\) on rank 0; 'seq1f1b' \(order \w+\) on rank 1",
    ),
    ({"loss": Loss(reduction="sum")}, {}, "Loss.reduction differs .*: 'sum' on rank 0; 'mean' on rank 1"),
    ({"loss": Loss(scale_grads=False)}, {}, "Loss.scale_grads differs .*: False on rank 0; True on rank 1"),
    ({}, {"memory": Memory(recompute="all")}, "Memory.recompute differs .*: 'none' on rank 0; 'all' on rank 1"),
    (
        {"loss_fn": HEAD},
        {"loss_fn": VocabularyParallelHead(8, 11, rank=1, num_ranks=2, z_loss=0.5)},
        r"loss_fn differs .*z_loss=0\.0",
    ),
    ({"loss_fn": HEAD}, {}, "loss_fn differs .*no VocabularyParallelHead on rank 1"),
    ({"sequence_parallel": (0, 2)}, {}, r"sequence_parallel differs .*: \(0, 2\) on rank 0; \(0, 1\) on rank 1"),
]


def make_engine(rank: int, world: int, **options: Any) -> tuple[Any, PipelineEngine]:
    """A stage that counts its forwards, and its engine."""
    stage: Any = stage_of(whole_model(CONFIG), CONFIG, rank, world)
    stage.calls = 0  # an attribute: a look puts it back
    stage.register_forward_pre_hook(lambda stage, _: setattr(stage, "calls", stage.calls + 1))
    defaults = {"num_microbatches": M, "num_segments": K, "loss_fn": cross_entropy}
    return stage, PipelineEngine(stage, **(defaults | options))


@pytest.mark.parametrize(("first", "second", "text"), CASES)
def test_threads_that_disagree(first: dict[str, Any], second: dict[str, Any], text: str) -> None:
    options = first, second

    def run(group: Any) -> None:
        stage, engine = make_engine(group.rank, 2, group=group, **options[group.rank])
        for _ in range(2):  # it stands until the engine is made anew
            with pytest.raises(ValueError, match=text):
                engine.step(TOKENS, target=TARGET)
        assert stage.calls == 0

    run_ranks(2, run)


def _processes(rank: int, world: int, transport: str, count: int) -> None:
    for *options, text in CASES[:count]:
        with pytest.raises(ValueError, match=text):
            make_engine(rank, world, transport=transport, **options[rank])
    stage, engine = make_engine(rank, world, transport=transport)
    engine.step(TOKENS[: 2 * M], target=TARGET[: 2 * M])
    assert stage.calls == M * K
    engine.close()


@pytest.mark.parametrize(("transport", "count"), [("shm", len(CASES)), ("c10d", 3)])
def test_processes_that_disagree(transport: str, count: int) -> None:
    """All say so when the engines are made, and can make others that agree."""
    run_processes(2, _processes, transport, count)


def test_one_order_under_two_names_agrees() -> None:
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=M, num_segments=K)

    def run(group: Any) -> int:
        options = {"schedule": order} if group.rank else {}
        return len(make_engine(group.rank, 2, group=group, **options)[1].step(TOKENS[:M], target=TARGET[:M]))

    assert run_ranks(2, run) == [0, M]


def test_the_error_groups_ranks_by_value() -> None:
    ranks = [{"version": ("1", "1"), "seq_dim": (value, value)} for value in ("1", "2", "1", "2", "3")]
    text = "seq_dim differs between the ranks of the pipeline: 1 on ranks 0, 2; 2 on ranks 1, 3; 3 on rank 4; give all"
    with pytest.raises(ValueError, match=re.escape(text)):
        check_agreement(ranks)
    check_agreement(ranks[::2][:2])


def test_a_loopback_rank_can_be_made_alone() -> None:
    """The ranks of one thread are made one after the other: they meet in a step."""
    assert make_engine(1, 2, group=LoopbackGroup(2)[1])[1].stages == [1]


def test_processes_of_a_launcher_do_not_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r'WORLD_SIZE is 2.*call torch.distributed.init_process_group\("gloo"\) first'):
        make_engine(0, 1)
    alone, engine = make_engine(0, 1, group=LoopbackGroup(1)[0])
    engine.step(TOKENS[:M], target=TARGET[:M])
    assert alone.calls == M * K
    monkeypatch.setenv("WORLD_SIZE", "1")
    make_engine(0, 1)
    monkeypatch.delenv("WORLD_SIZE")
    make_engine(0, 1)
