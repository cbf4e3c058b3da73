"""Does an error of a GPU (stand-in) end the step on every rank; is nothing freed under work that does not end?"""

from __future__ import annotations

import gc
import random
import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from slices import slice_of
from stand_in_engine import StandInEngine
from stand_in_library import FAILS, LOST, STALLED, stand_in
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model

from seq1f1b import Limits
from seq1f1b.testing import run_ranks

CONFIG = Config()
GRID = [(transport, seed) for seed in range(20) for transport in ("copy", "nccl")]
SEEDS = slice_of(GRID, GRID[:6])


@pytest.fixture(autouse=True)
def _nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQ1F1B_NCCL", stand_in().path)
    gc.collect()  # what an engine of the last test still holds goes before the stand-ins forget it


def lose(
    transport: str, limit: float, harm: Callable[[], None], mend: Callable[[], None] | None = None
) -> list[tuple[RuntimeError, float, float]]:
    """Two ranks step until the harm done to a GPU ends a step, and close; where it is mended, copies go on before.

    Returns by rank the error, the seconds of its step, and those of close.
    """
    model, both = whole_model(CONFIG), threading.Barrier(2)
    tokens, target = batch(CONFIG, 4, 16)

    def run(group: Any) -> tuple[RuntimeError, float, float]:
        stage = stage_of(model, CONFIG, group.rank, 2)
        options: dict[str, Any] = {"num_microbatches": 4, "num_segments": 2, "loss_fn": cross_entropy}
        engine = StandInEngine(stage, group=group, transport=transport, limits=Limits(step=limit), **options)
        engine.step(tokens, target=target)
        if both.wait() == 0:
            harm()
        both.wait()
        for _ in range(20):
            began = time.monotonic()
            try:
                engine.step(tokens, target=target)
            except RuntimeError as error:
                failed, ended = error, time.monotonic()
                break
        if both.wait() == 0 and mend is not None:
            mend()
        both.wait()
        if transport == "nccl":
            with pytest.raises(RuntimeError, match="build the engine again"):
                engine.step(tokens, target=target)
        elif mend is not None:
            engine.step(tokens, target=target)
        closing = time.monotonic()
        engine.close()
        return failed, ended - began, time.monotonic() - closing

    return run_ranks(2, run)


@pytest.mark.parametrize(("transport", "seed"), SEEDS)
def test_an_error_of_a_gpu_ends_the_step_on_every_rank_long_before_a_limit(transport: str, seed: int) -> None:
    """At any question to the driver, on either rank: all hear CUDA's word, and whose it was."""
    drawn = random.Random(seed)
    rank, query = drawn.randrange(2), drawn.randrange(60)
    stand_in().reset(seed)
    harmed = lose(transport, 60.0, lambda: stand_in().assert_on(rank, query), lambda: stand_in().assert_on(rank, -1))
    for own, (error, seconds, _) in enumerate(harmed):
        assert "CUDA_ERROR_ASSERT (710), device-side assert triggered" in str(error)
        assert seconds < 10  # of 60; less than one on cores that nobody shares
        assert own == rank or (getattr(error, "rank", None) == rank and getattr(error, "unit", None))
    assert stand_in().complaints() == []


@pytest.mark.parametrize(("transport", "seed"), SEEDS)
def test_close_returns_within_its_limit_and_frees_nothing_that_is_in_use(transport: str, seed: int) -> None:
    """Copies cannot be ended: they keep what they use, and each rank says so once. NCCL's transfers are aborted, those
    of a message that is lost or whose other process has failed."""
    stand_in().reset(seed)
    is_lost = transport == "copy" or seed % 3 > 0

    def harm() -> None:
        if transport == "copy":
            stand_in().damage("cuMemcpyAsync", -1, STALLED)
        else:
            stand_in().fault(seed % 2 == 0, 0, 1, seed % 5, LOST if is_lost else FAILS)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        harmed = lose(transport, 0.5, harm)
    told = [str(w.message) for w in caught if "stays until this process ends" in str(w.message)]
    assert len(told) == (2 if transport == "copy" else 0), told
    assert all("of stage 0 to stage 1" in text and "of stage 1 to stage 0" in text for text in told)
    why = "for 0." if is_lost else "activations of stage 0 to stage 1.*: remote process exited"
    assert all(re.search(why, str(error)) and closing < 2 for error, _, closing in harmed), harmed
    del harmed
    gc.collect()
    assert (stand_in().count("live_allocations") > 0) == (transport == "copy")
    assert stand_in().complaints() == []
