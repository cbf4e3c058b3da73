"""Are an engine's options few, checked in their groups, and its order whatever says one?"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import nn

from seq1f1b import Limits, LoopbackGroup, Loss, Memory, PipelineEngine, Schedule, build_schedule
from seq1f1b.engine.options import Options
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=8, heads=2, kv_heads=1, ffn=8, vocab=11, layers=2)
LENGTH = 9


def test_the_engine_has_sixteen_options() -> None:
    options = [each for each in inspect.signature(PipelineEngine).parameters.values() if each.kind is each.KEYWORD_ONLY]
    assert len(options) <= 16
    assert {each.name for each in dataclasses.fields(Options)} == {each.name for each in options} - {
        "schedule",
        "group",
    }


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: Loss(reduction="max"), ValueError, "Loss.reduction is 'max', must be 'mean' or 'sum'"),
    (lambda: Loss(weight="tokens"), ValueError, "Loss.weight is 'tokens', must be 'targets', 'microbatches' or a call"),
    (lambda: Loss(weight=7), TypeError, "Loss.weight must be callable, got int"),
    (lambda: Loss(scale_grads=0.5), TypeError, "Loss.scale_grads is 0.5, must be True or False"),
    (lambda: Limits(step=0), ValueError, "Limits.step is 0, must be above 0"),
    (lambda: Limits(step="300"), TypeError, "Limits.step must be a number, got str"),
    (lambda: Limits(first_step=float("nan")), ValueError, "Limits.first_step is nan, must be above 0"),
    (lambda: Memory("some"), ValueError, "Memory.recompute is 'some', must be 'none', 'all' or a callable of a unit"),
    (lambda: Memory(blocks="blocks"), TypeError, r"Memory.blocks is 'blocks', must be \(name of a list of blocks"),
    (lambda: Memory(blocks=("blocks", 2)), ValueError, r"Memory.blocks: the share is 2, must be in 0\.\.1"),
    (lambda: Memory(offload=3), TypeError, "Memory.offload must be a directory or seq1f1b.HOST, got int"),
    (lambda: Memory(units="all"), ValueError, "Memory.units says which units move; say where by offload=, a directory"),
    (lambda: Memory(offload=".", units="half"), ValueError, "Memory.units is 'half', must be 'none', 'all' or a call"),
]  # type: ignore[list-item]  # arguments are of wrong types on purpose


@pytest.mark.parametrize(("make", "error", "text"), REFUSED)
def test_the_groups_check_what_they_are_given(make: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_the_groups_do_not_change() -> None:
    for group, field in ((Loss(), "weight"), (Limits(), "step"), (Memory(), "check")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(group, field, None)
    assert Limits(step=5.0, first_step=2.0).longest == 5.0


# -- what says an order ------------------------------------------------------------------------------------------------


def refused(schedule: Any, **options: Any) -> str:
    settings = {"num_microbatches": 2, "group": LoopbackGroup(1)[0]} | options
    with pytest.raises((TypeError, ValueError)) as caught:
        PipelineEngine(nn.Linear(2, 2), schedule=schedule, **settings)
    return f"{caught.type.__name__}: {caught.value}"


def test_what_says_no_order(tmp_path: Path) -> None:
    text = refused("seq1f2b")
    assert text.endswith("no schedule named 'seq1f2b', and no file of a plan with this name; did you mean 'seq1f1b'?")
    assert "no file of a plan with this name; there are " in refused(str(tmp_path))  # a folder
    (tmp_path / "plan").write_text("{}")
    assert refused(str(tmp_path / "plan"), num_microbatches=None).startswith("ValueError: ")
    assert refused(lambda **counts: "F0.0 B0.0") == (
        "TypeError: schedule= is a callable that returned a str, must be a seq1f1b.Schedule"
    )
    assert "must be a name, a seq1f1b.Schedule, a plan or its file, or a callable" in refused(None)


def test_a_name_comes_before_a_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpipe").write_text("no plan")
    engine = PipelineEngine(nn.Linear(2, 2), schedule="gpipe", num_microbatches=2, group=LoopbackGroup(1)[0])
    assert engine.schedule == build_schedule("gpipe", num_ranks=1, num_microbatches=2)


def test_callables_that_build_other_orders_of_rows_are_told_apart() -> None:
    """Equal for the engine's own counts, so that only a step of rows can tell; every rank does, and goes on."""
    rows = [[4, 5], [9]]
    tokens, target = (list(x.chunk(2)) for x in batch(CONFIG, 2, LENGTH))
    model = whole_model(CONFIG)

    def build_as(rank: int, **counts: Any) -> Schedule:
        is_other = rank == 1 and counts["num_segments"] == (2, 1)
        return build_schedule("gpipe" if is_other else "seq1f1b", **counts)

    def run(group: Any) -> None:
        engine = PipelineEngine(
            stage_of(model, CONFIG, group.rank, 2),
            schedule=partial(build_as, group.rank),
            num_microbatches=2,
            loss_fn=cross_entropy,
            group=group,
            limits=Limits(step=20.0),
        )
        text = r"schedule differs between the ranks of the pipeline: order \w+, prefetch None on rank 0; order \w+, "
        with pytest.raises(ValueError, match=text):
            engine.step(tokens, target=target, segment_sizes=rows)
        engine.step(tokens, target=target, segment_sizes=[[3, 6], [4, 5]])

    run_ranks(2, run)
