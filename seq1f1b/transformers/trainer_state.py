"""State that a Trainer over a pipeline resumes from, beside the weights: safetensors and JSON, by parameters' names."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from seq1f1b.adapters.checkpoint import PipelineState, optimized
from seq1f1b.adapters.checkpoint_values import as_kept
from seq1f1b.runtime.engine import PipelineEngine
from seq1f1b.transformers.saving import Ranks, num_bytes, save_together, together

__all__: list[str] = []

_SCHEDULER = "scheduler.json"
_OPTIMIZER = re.compile(r"optimizer-\d+-of-(\d+)\.safetensors")


def save_optimizer(engine: PipelineEngine, optimizer: torch.optim.Optimizer, scheduler: Any, folder: str) -> None:
    """Each rank writes the state of its own parameters; rank 0 that of the scheduler, which is the same on all."""
    state = PipelineState(engine, optimizer).state_dict()["optimizer"]
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    rest = {name: as_kept(value) for name, value in state.items() if name not in tensors}

    def write(unfinished: str) -> None:
        continuous = {name: value.contiguous() for name, value in tensors.items()}
        save_file(continuous, _file(unfinished, "optimizer", engine), {"rest": _json(rest)})
        if engine.rank == 0:
            with open(os.path.join(unfinished, _SCHEDULER), "w", encoding="utf-8") as out:
                out.write(_json(scheduler.state_dict()))

    def is_old(name: str) -> bool:  # of an earlier save by another number of ranks
        match = _OPTIMIZER.fullmatch(name)
        return match is not None and int(match[1]) != engine.num_ranks

    failed = f"no optimizer state was written to {folder}"
    save_together(engine, folder, failed, num_bytes(tensors.values()), write, is_old=is_old)


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
        own.load_state_dict({**state, "optimizer": found})
        with open(os.path.join(folder, _SCHEDULER), encoding="utf-8") as file:
            scheduler.load_state_dict(json.load(file))

    together(engine, f"the optimizer state in {folder} was not loaded", load, ValueError)


def save_randomness(ranks: Ranks, states: list[Tensor], folder: str) -> None:
    def write(unfinished: str) -> None:
        save_file({str(i): state for i, state in enumerate(states)}, _file(unfinished, "rng", ranks))

    save_together(ranks, folder, f"no random state was written to {folder}", num_bytes(states), write)


def load_randomness(ranks: Ranks, folder: str) -> list[Tensor] | None:
    """None if another number of ranks wrote the checkpoint."""
    file = _file(folder, "rng", ranks)
    if not os.path.isfile(file):
        return None
    states = load_file(file)
    return [states[str(i)] for i in range(len(states))]


def _file(folder: str, kind: str, ranks: Ranks) -> str:
    return os.path.join(folder, f"{kind}-{ranks.rank + 1:05d}-of-{ranks.num_ranks:05d}.safetensors")


def _json(values: dict[str, Any]) -> str:
    """JSON gives floats back bit for bit."""
    for key, value in values.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise ValueError(f"{key!r} is a {type(value).__name__}, which the checkpoint cannot hold") from error
    return json.dumps(values)
