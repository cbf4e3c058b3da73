"""Writes files of all ranks into one folder: old files stay until every rank has written all new files. Also saves and
loads a Trainer's optimizer and schedule, as safetensors and JSON under the parameters' names."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from seq1f1b.adapters.checkpoint import PipelineState, as_kept
from seq1f1b.engine.engine import PipelineEngine
from seq1f1b.files import keep_mode

__all__: list[str] = []


def save_together(
    ranks: Any,
    folder: str,
    what: str,
    write: Callable[[str], None],
    join: Callable[[list[str]], None] = lambda folders: None,
    is_old: Callable[[str], bool] = lambda name: False,
) -> None:
    """Writes files of all ranks into a folder that all ranks see. An error on any rank is raised on all.

    Args:
        ranks: processes that act together: an engine, or the replicas of a Trainer.
        what: the content of the files, for an error's message.
        write: writes this rank's files to a given temporary folder.
        join: run by rank 0 when all ranks have written: takes their temporary folders, and may add files to the first.
            Folders inside, whose names begin with a dot, are for this function alone.
        is_old: whether to delete a file of this name from the folder at the end.
    Raises:
        OSError: a rank could not write.
    """
    folders = [os.path.join(folder, f".unfinished-{rank}") for rank in range(ranks.num_ranks)]
    unfinished = folders[ranks.rank]
    finished: dict[str, str] = {}

    def begin() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
        write(unfinished)

    def find_places() -> None:
        if ranks.rank == 0:
            join(folders)
        for path, inner, names in os.walk(unfinished):
            inner[:] = [name for name in inner if not name.startswith(".")]
            target = os.path.normpath(os.path.join(folder, os.path.relpath(path, unfinished)))
            os.makedirs(target, exist_ok=True)
            for name in names:
                finished[os.path.join(path, name)] = os.path.join(target, name)
                keep_mode(os.path.join(path, name), os.path.join(target, name))

    def move() -> None:
        for file, target in finished.items():
            os.replace(file, target)
        for name in os.listdir(folder) if ranks.rank == 0 else ():
            if is_old(name):
                os.remove(os.path.join(folder, name))

    try:
        for action in (begin, find_places, move):
            together(ranks, f"no {what} was written to {folder}", action)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def together(ranks: Any, failed: str, action: Callable[[], None], kind: type[Exception] = OSError) -> None:
    """Runs an action on each rank; an error on any rank is raised on all, as ``kind``."""
    problem = None
    try:
        action()
    except Exception as error:
        problem = f"rank {ranks.rank}: {type(error).__name__}: {error}"
    problems = [text for text in ranks.all_gather_object(problem) if text]
    if problems:
        raise kind(f"{failed}: {'; '.join(problems)}")


_SCHEDULER = "scheduler.json"
_OPTIMIZER = re.compile(r"optimizer-\d+-of-(\d+)\.safetensors")


def save_optimizer(engine: PipelineEngine, optimizer: torch.optim.Optimizer, scheduler: Any, folder: str) -> None:
    """Saves the optimizer state of each rank's parameters; rank 0 also saves the scheduler, equal on all ranks."""
    state = PipelineState(engine, optimizer).state_dict()["optimizer"]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: as_kept(value) for name, value in state.items() if name not in tensors}

    def write(unfinished: str) -> None:
        continuous = {name: value.contiguous() for name, value in tensors.items()}
        name = f"optimizer-{engine.rank + 1:05d}-of-{engine.num_ranks:05d}.safetensors"
        save_file(continuous, os.path.join(unfinished, name), {"rest": json.dumps(rest)})
        if engine.rank == 0:
            with open(os.path.join(unfinished, _SCHEDULER), "w", encoding="utf-8") as out:
                out.write(json.dumps(scheduler.state_dict()))

    def is_old(name: str) -> bool:  # an earlier save by another number of ranks
        match = _OPTIMIZER.fullmatch(name)
        return match is not None and int(match[1]) != engine.num_ranks

    save_together(engine, folder, "optimizer state", write, is_old=is_old)


def check_resumable(folder: str) -> None:
    """Raises ValueError for a checkpoint without this Trainer's optimizer and schedule, like the plain Trainer's."""
    names = os.listdir(folder)
    missing = [] if any(map(_OPTIMIZER.fullmatch, names)) else ["optimizer-*-of-*.safetensors"]
    missing += [] if _SCHEDULER in names else [_SCHEDULER]
    if missing:
        raise ValueError(
            f"{folder} lacks {' and '.join(missing)}, from which seq1f1b.transformers.Trainer resumes: to take its "
            "weights only, with a new optimizer and schedule, call load_pretrained(trainer.engine, folder) of "
            "seq1f1b.transformers and then train() without resume_from_checkpoint"
        )


def load_optimizer(engine: PipelineEngine, optimizer: torch.optim.Optimizer, scheduler: Any, folder: str) -> None:
    """Loads optimizer and scheduler from a save by any number of ranks."""
    own = PipelineState(engine, optimizer)
    state, optimized = own.state_dict(), own._optimized()
    files = sorted(name for name in os.listdir(folder) if _OPTIMIZER.fullmatch(name))

    def is_own(entry: str) -> bool:
        return own._parse(entry)[1] in optimized

    def load() -> None:
        counts = {int(match[1]) for match in map(_OPTIMIZER.fullmatch, files) if match}
        if counts != {len(files)}:
            raise ValueError(f"{folder} holds {files}, which is not the state that all ranks wrote")
        found: dict[str, Any] = {}
        for name in files:
            with safe_open(os.path.join(folder, name), framework="pt") as tensors:
                found |= {key: tensors.get_tensor(key) for key in tensors.keys() if is_own(key)}  # noqa: SIM118
                rest = json.loads(tensors.metadata()["rest"])
            found |= {key: value for key, value in rest.items() if is_own(key)}
        for key, value in state["optimizer"].items():
            if key not in found and key.startswith("param_groups."):
                raise ValueError(f"the checkpoint lacks {key!r} of this rank's optimizer")
            if isinstance(value, tuple) and key in found:  # JSON has lists only
                found[key] = tuple(found[key])
        own.load_state_dict({**state, "optimizer": found})
        with open(os.path.join(folder, _SCHEDULER), encoding="utf-8") as file:
            scheduler.load_state_dict(json.load(file))

    together(engine, f"the optimizer state in {folder} was not loaded", load, ValueError)
