"""What a Trainer over a pipeline keeps for resuming, beside the weights: safetensors and JSON, by parameters' names."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from seq1f1b.adapters.checkpoint import PipelineState, optimized
from seq1f1b.adapters.checkpoint_values import OptimizerEntries, as_kept
from seq1f1b.files import keep_mode
from seq1f1b.runtime.engine import PipelineEngine
from seq1f1b.transformers.pretrained import Ranks, Room, num_bytes, together

__all__: list[str] = []

_SCHEDULER = "scheduler.json"
_OPTIMIZER = re.compile(r"optimizer-\d+-of-(\d+)\.safetensors")


def save_optimizer(engine: PipelineEngine, optimizer: torch.optim.Optimizer, scheduler: Any, folder: str) -> None:
    """Each rank writes the state of its own parameters; rank 0 that of the scheduler, which is the same on all."""
    state = PipelineState(engine, optimizer).state_dict()["optimizer"]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: as_kept(value) for name, value in state.items() if name not in tensors}
    own = _file(folder, "optimizer", engine)

    def write() -> None:
        continuous = {name: value.contiguous() for name, value in tensors.items()}
        files = {own: lambda file: save_file(continuous, file, {"rest": _json(rest)})}
        if engine.rank == 0:
            files[os.path.join(folder, _SCHEDULER)] = lambda file: _write(file, _json(scheduler.state_dict()))
        _write_unfinished(files)

    def finish() -> None:
        _finish([own, *([os.path.join(folder, _SCHEDULER)] if engine.rank == 0 else [])])
        for name in os.listdir(folder) if engine.rank == 0 else ():  # of an earlier save by another number of ranks
            match = _OPTIMIZER.fullmatch(name)
            if match and int(match[1]) != engine.num_ranks:
                os.remove(os.path.join(folder, name))

    failed = f"no optimizer state was written to {folder}"
    together(engine, failed, write, room=Room(folder, num_bytes(tensors.values())))
    together(engine, failed, finish)


def check_resumable(folder: str) -> None:
    """Raises ValueError for a checkpoint without the state of optimizer and schedule, as other trainers write it."""
    names = os.listdir(folder)
    missing = [] if any(map(_OPTIMIZER.fullmatch, names)) else ["optimizer-*-of-*.safetensors"]
    missing += [] if _SCHEDULER in names else [_SCHEDULER]
    if missing:
        plain = [name for name in ("optimizer.pt", "optimizer.bin", "scheduler.pt") if name in names]
        has = f"has {' and '.join(plain)} of the plain Trainer, but not" if plain else "lacks"
        raise ValueError(
            f"{folder} {has} {' and '.join(missing)}, from which seq1f1b.transformers.Trainer resumes: to take its "
            "weights only, with a new optimizer and schedule, call load_pretrained(trainer.engine, folder) of "
            "seq1f1b.transformers and then train() without resume_from_checkpoint"
        )


def load_optimizer(engine: PipelineEngine, optimizer: torch.optim.Optimizer, scheduler: Any, folder: str) -> None:
    """Takes over what any number of ranks wrote."""
    own = PipelineState(engine, optimizer)
    state, is_own = own.state_dict(), optimized(own)
    files = sorted(name for name in os.listdir(folder) if _OPTIMIZER.fullmatch(name))

    def load() -> None:
        counts = {int(match[1]) for match in map(_OPTIMIZER.fullmatch, files) if match}
        if counts != {len(files)}:
            raise ValueError(f"{folder} holds {files}, which is not the state that all ranks wrote")
        found: dict[str, Any] = {}
        for name in files:
            with safe_open(os.path.join(folder, name), framework="pt") as tensors:
                found |= {key: tensors.get_tensor(key) for key in tensors.keys() if is_own(key)}  # noqa: SIM118, not a dict
                rest = json.loads(tensors.metadata()["rest"])
            found |= {key: value for key, value in rest.items() if is_own(key)}
        for key, value in state["optimizer"].items():
            if key not in found and key.startswith("param_groups."):
                raise ValueError(f"the checkpoint lacks {key!r} of this rank's optimizer")
            if isinstance(value, tuple) and key in found:  # JSON has lists only
                found[key] = tuple(found[key])
        own.load_state_dict({**state, "optimizer": OptimizerEntries(found, made={})})
        with open(os.path.join(folder, _SCHEDULER), encoding="utf-8") as file:
            scheduler.load_state_dict(json.load(file))

    together(engine, f"the optimizer state in {folder} was not loaded", load, ValueError)


def save_randomness(ranks: Ranks, states: list[Tensor], folder: str) -> None:
    file = _file(folder, "rng", ranks)

    def write() -> None:
        tensors = {str(i): state for i, state in enumerate(states)}
        _write_unfinished({file: lambda unfinished: save_file(tensors, unfinished)})
        _finish([file])

    failed = f"no random state was written to {folder}"
    together(ranks, failed, write, room=Room(folder, num_bytes(states)))


def load_randomness(ranks: Ranks, folder: str) -> list[Tensor] | None:
    """None if another number of ranks wrote the checkpoint."""
    file = _file(folder, "rng", ranks)
    if not os.path.isfile(file):
        return None
    states = load_file(file)
    return [states[str(i)] for i in range(len(states))]


def _file(folder: str, kind: str, ranks: Ranks) -> str:
    return os.path.join(folder, f"{kind}-{ranks.rank + 1:05d}-of-{ranks.num_ranks:05d}.safetensors")


def _write_unfinished(files: Mapping[str, Callable[[str], Any]]) -> None:
    """Writes files under other names: the old ones stay until all new ones are written."""
    try:
        for file, write in files.items():
            os.makedirs(os.path.dirname(file), exist_ok=True)
            write(f"{file}.unfinished")
            keep_mode(f"{file}.unfinished", file)
    except BaseException:
        for file in files:
            with contextlib.suppress(OSError):
                os.remove(f"{file}.unfinished")
        raise


def _finish(files: Iterable[str]) -> None:
    for file in files:
        os.replace(f"{file}.unfinished", file)


def _write(file: str, text: str) -> None:
    with open(file, "w", encoding="utf-8") as out:
        out.write(text)


def _json(values: dict[str, Any]) -> str:
    """JSON gives floats back bit for bit."""
    for key, value in values.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(f"{key!r} is a {type(value).__name__}, which the checkpoint cannot hold") from error
    return json.dumps(values)
