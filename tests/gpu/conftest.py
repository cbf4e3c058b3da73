"""Tests of a machine's GPUs. docs/how-to/gpus.md says how to run them, here and over several hosts.

Without a GPU they skip. ``SEQ1F1B_STAND_INS=1 pytest tests/gpu`` rehearses them on a CPU, over stand-ins for the driver
and for NCCL; CI rehearses a slice of them, by ``benchmarks/gpu.py --rehearse``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from gpu_runs import Ranks

IS_TORCHRUNS = "TORCHELASTIC_RUN_ID" in os.environ
IS_REHEARSED = os.environ.get("SEQ1F1B_STAND_INS") == "1"


@pytest.fixture(autouse=True, scope="session")
def _gpu() -> None:
    if not IS_REHEARSED and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    if not IS_REHEARSED:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # CUDA starts before init_process_group here
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())


@pytest.fixture(scope="session")
def ranks(_gpu: None) -> Iterator[Ranks]:
    made = Ranks(IS_TORCHRUNS, IS_REHEARSED)
    with pytest.MonkeyPatch.context() as patch:
        if IS_REHEARSED:
            from stand_in_library import stand_in

            patch.setenv("SEQ1F1B_NCCL", stand_in().path)
        yield made
    made.leave()


@pytest.fixture(autouse=True)
def _fresh_stand_ins() -> Iterator[None]:
    if not IS_REHEARSED:
        yield
        return
    from stand_in_library import stand_in

    gc.collect()  # what an engine of the last test still holds goes before the stand-ins forget it
    stand_in().reset(1)
    yield
    assert stand_in().complaints() == []
