"""Checkpoints of transformers that all ranks of a pipeline write together."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from typing import Any

import transformers
from safetensors import safe_open
from torch import nn

from seq1f1b.adapters.transformers import CausalLMStage
from seq1f1b.runtime.engine import PipelineEngine

__all__ = ["save_pretrained"]


def save_pretrained(engine: PipelineEngine, folder: str | os.PathLike[str]) -> None:
    """Writes one checkpoint of transformers that ``from_pretrained`` loads. All ranks of the pipeline call it.

    Every rank writes its own stages' weights (safetensors) to the folder, which all ranks must see. Rank 0 adds index,
    config and generation config. The folder's old contents stay until all new files are written.

    Raises:
        TypeError: a stage was not made by :func:`pipeline_stage`.
        OSError: a rank could not write; raised on every rank.
    """
    stages = [module for module in engine.modules() if isinstance(module, CausalLMStage)]
    if len(stages) != len(engine.modules()):
        raise TypeError("save_pretrained takes an engine whose stages pipeline_stage made")
    gather = engine.all_gather_object
    folder = os.fspath(folder)
    unfinished = os.path.join(folder, f".unfinished-{engine.rank}")
    shards: list[str] = []

    def write() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        elsewhere = engine.tied_elsewhere()
        for i, stage in enumerate(stages):
            part = os.path.join(unfinished, str(i))
            own = {name: p for name, p in stage.named_parameters() if id(p) not in elsewhere}
            state = {name: t for name, t in stage.state_dict().items() if name in own or not _is_parameter(stage, name)}
            # transformers would write on rank 0 of a distributed run only; here every rank has weights of its own.
            stage.causal_lm.should_save_on_this_rank = lambda is_main_process: True
            try:
                stage.causal_lm.save_pretrained(part, state_dict=state)
            finally:
                del stage.causal_lm.should_save_on_this_rank
            written = [os.path.join(part, name) for name in sorted(os.listdir(part)) if name.endswith(_WEIGHTS)]
            if not written:
                raise OSError(f"transformers {transformers.__version__} wrote no weights to {part}")
            shards.extend(written)

    _together(gather, folder, engine.rank, write)
    contents: list[list[dict[str, int]]] = gather([_tensor_bytes(shard) for shard in shards])
    total = sum(map(len, contents))
    before = sum(map(len, contents[: engine.rank]))
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)] if total > 1 else [_SINGLE]

    def move() -> None:
        for i, shard in enumerate(shards):
            os.replace(shard, os.path.join(folder, names[before + i]))
        if engine.rank == 0:
            for name in os.listdir(os.path.join(unfinished, "0")):
                if name.endswith(".json") and name != _INDEX:
                    os.replace(os.path.join(unfinished, "0", name), os.path.join(folder, name))
            flat = [tensors for rank in contents for tensors in rank]
            _write_index(folder, dict(zip(names, flat, strict=True)), os.path.join(unfinished, _INDEX))

    try:
        _together(gather, folder, engine.rank, move)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


_SINGLE, _INDEX, _WEIGHTS = "model.safetensors", "model.safetensors.index.json", ".safetensors"


def _together(gather: Callable[[Any], list[Any]], folder: str, rank: int, action: Callable[[], None]) -> None:
    """Does this rank's part; an error of any rank is raised on all."""
    problem = None
    try:
        action()
    except Exception as error:
        problem = f"rank {rank}: {type(error).__name__}: {error}"
    problems = [text for text in gather(problem) if text]
    if problems:
        shutil.rmtree(os.path.join(folder, f".unfinished-{rank}"), ignore_errors=True)
        raise OSError(f"no checkpoint was written to {folder}: {'; '.join(problems)}")


def _is_parameter(module: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    return own in module.get_submodule(owner)._parameters


def _tensor_bytes(file: str) -> dict[str, int]:
    with safe_open(file, framework="pt") as tensors:
        found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118, not a dict
    return {name: t.nbytes for name, t in found.items()}


def _write_index(folder: str, shards: dict[str, dict[str, int]], unfinished: str) -> None:
    """The index, if there is more than one shard; removes weights that the folder held before."""
    for name in os.listdir(folder):
        if name not in shards and (name in (_SINGLE, _INDEX) or re.fullmatch(r"model-\d+-of-\d+\.safetensors", name)):
            os.remove(os.path.join(folder, name))
    if len(shards) == 1:
        return
    index = {
        "metadata": {"total_size": sum(sum(tensors.values()) for tensors in shards.values())},
        "weight_map": {tensor: name for name, tensors in shards.items() for tensor in sorted(tensors)},
    }
    with open(unfinished, "w", encoding="utf-8") as out:
        json.dump(index, out, indent=2, sort_keys=True)
    os.replace(unfinished, os.path.join(folder, _INDEX))
