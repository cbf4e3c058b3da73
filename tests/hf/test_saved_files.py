"""Have saved files the mode of any other file, and does a save without room keep what was there and say why?"""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')
peft = pytest.importorskip("peft", reason="needs peft")

from test_transformers import build  # noqa: E402

import seq1f1b  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402
from seq1f1b.transformers import load_pretrained, pipeline_stage, save_pretrained  # noqa: E402
from seq1f1b.transformers.saving import load_optimizer, save_optimizer  # noqa: E402


def model_of(lora: bool = False) -> Any:
    model = build("llama", torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4)) if lora else model


class Saver:
    """One rank of a model that saves all that is saved of it."""

    def __init__(self, group: Any = None, lora: bool = False) -> None:
        model = model_of(lora)
        stage = pipeline_stage(model, *((0, 1) if group is None else (group.rank, group.size)))
        self.engine = seq1f1b.PipelineEngine(stage, num_microbatches=1, group=group)
        self.optimizer = torch.optim.AdamW([p for p in self.engine.parameters() if p.requires_grad])
        for parameter in self.engine.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def save(self, folder: Path) -> None:
        save_pretrained(self.engine, folder)
        self.save_state(folder)

    def save_state(self, folder: Path) -> None:
        save_optimizer(self.engine, self.optimizer, self.scheduler, str(folder))


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writes fail beyond it, as they do on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("mask", [0o022, 0o007])
def test_new_files_have_the_mode_that_open_gives_and_others_keep_theirs(tmp_path, mask, lora):
    with umask(mask):
        saver = Saver(lora=lora)
        saver.step()
        saver.save(tmp_path)
        found = modes(tmp_path)
        assert len(found) >= 4 and set(found.values()) == {0o666 & ~mask}
        for i, path in enumerate(sorted(tmp_path.iterdir())):
            path.chmod((0o640, 0o600, 0o664)[i % 3])
        changed = modes(tmp_path)
        saver.save(tmp_path)
        assert modes(tmp_path) == changed


FULL = r"was written to \S+: rank 0: .*File too large"


@pytest.mark.parametrize("lora", [False, True])
def test_a_save_without_room_says_so_and_keeps_the_one_before(tmp_path, lora):
    saver = Saver(lora=lora)
    saver.step()
    saver.save(tmp_path)
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    weights = [parameter.clone() for parameter in saver.engine.parameters()]
    saver.step()
    for save in (lambda: save_pretrained(saver.engine, tmp_path), lambda: saver.save_state(tmp_path)):
        with files_of_at_most(1000), pytest.raises(OSError, match=FULL) as caught:
            save()
        assert len(str(caught.value).splitlines()) == 1
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    load_pretrained(saver.engine, tmp_path)
    load_optimizer(saver.engine, saver.optimizer, saver.scheduler, str(tmp_path))
    assert all(map(torch.equal, saver.engine.parameters(), weights))
    assert saver.scheduler.last_epoch == 1


def test_all_ranks_hear_of_a_full_disk(tmp_path):
    def save(group: Any) -> str:
        saver = Saver(group)
        saver.step()
        if group.rank == 0:
            saved.enter_context(files_of_at_most(1000))
        saver.engine.all_gather_object(None)  # messages have their files by now
        with pytest.raises(OSError, match=FULL) as caught:
            saver.save(tmp_path)
        return str(caught.value)

    with ExitStack() as saved:
        first, second = run_ranks(2, save)
    assert first == second and not any(path.suffix == ".safetensors" for path in tmp_path.iterdir())
