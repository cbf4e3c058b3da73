"""Checkpoints of transformers that all ranks of a pipeline write together."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from seq1f1b.files import keep_mode, no_room
from seq1f1b.runtime.engine import PipelineEngine
from seq1f1b.runtime.tied import ties_of
from seq1f1b.runtime.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from seq1f1b.transformers.stage import CausalLMStage
from seq1f1b.transformers.weight_files import (
    INDEX,
    IS_SHARD,
    SINGLE,
    Source,
    WeightFiles,
    check_shape,
    find_sources,
    load_state,
    share_sources,
)

__all__ = ["load_pretrained", "save_pretrained"]


def save_pretrained(engine: PipelineEngine, folder: str | os.PathLike[str]) -> None:
    """Writes one checkpoint of transformers that ``from_pretrained`` loads. All ranks of the pipeline call it.

    Every rank writes its own stages' weights (safetensors) to the folder, which all ranks must see. Rank 0 adds index,
    config and generation config. If the model has adapters of peft, only the adapters are written, as peft does: rank 0
    joins them in one file by peft's own names, which ``peft.PeftModel.from_pretrained`` loads. What the folder held
    stays until all new files are written.

    Raises:
        TypeError: a stage was not made by :func:`pipeline_stage`.
        ValueError: copies of a tied parameter have come apart; raised on every rank.
        OSError: a rank could not write; raised on every rank.
    """
    stages = _stages_of(engine, "save_pretrained")
    ties_of(engine).compare()
    folder = os.fspath(folder)
    unfinished = os.path.join(folder, f".unfinished-{engine.rank}")
    try:
        if any(stage.peft_model is not None for stage in stages):
            _save_adapters(engine, stages, folder, unfinished)
        else:
            _save_weights(engine, stages, folder, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_pretrained(engine: PipelineEngine, folder: str | os.PathLike[str]) -> None:
    """Reads what :func:`save_pretrained`, transformers or peft wrote into the stages' weights, or into their adapters.

    All ranks of the pipeline call it; their number may differ from that of the ranks that wrote.

    Raises:
        TypeError: a stage was not made by :func:`pipeline_stage`.
        ValueError: the checkpoint lacks a weight or an adapter of a rank, or has it in another shape; raised on every
            rank.
    """
    folder = os.fspath(folder)
    stages = _stages_of(engine, "load_pretrained")

    def load() -> None:
        for stage in stages:
            if stage.peft_model is not None:
                _load_adapters(stage, folder)
            else:
                _load_weights(stage, folder)

    together(engine, f"{folder} was not loaded", load, ValueError)


def _stages_of(engine: PipelineEngine, caller: str) -> list[CausalLMStage]:
    stages = [module for module in engine.modules() if isinstance(module, CausalLMStage)]
    others = [module for module in engine.modules() if not isinstance(module, CausalLMStage)]
    if any(not any(module in (stage.head, stage.embedding) for stage in stages) for module in others):
        raise TypeError(f"{caller} takes an engine whose stages pipeline_stage made")
    return stages


# -- whole weights -----------------------------------------------------------------------------------------------------


def _save_weights(engine: PipelineEngine, stages: list[CausalLMStage], folder: str, unfinished: str) -> None:
    gather, vocabulary = engine.all_gather_object, engine.whole_vocabulary()
    shards: list[str] = []

    def write() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        elsewhere = engine.tied_elsewhere()
        for i, stage in enumerate(stages):
            part = os.path.join(unfinished, str(i))
            own = {name: p for name, p in stage.named_parameters() if id(p) not in elsewhere}
            state = {name: t for name, t in stage.state_dict().items() if name in own or not _is_parameter(stage, name)}
            if i == len(stages) - 1:
                state |= vocabulary
            # transformers would write on rank 0 of a distributed run only; here every rank has weights of its own.
            stage.causal_lm.should_save_on_this_rank = lambda is_main_process: True
            try:
                with _no_progress_bar():
                    stage.causal_lm.save_pretrained(part, state_dict=state)
            finally:
                del stage.causal_lm.should_save_on_this_rank
            written = [os.path.join(part, name) for name in sorted(os.listdir(part)) if name.endswith(_WEIGHTS)]
            if not written:
                raise OSError(f"transformers {transformers.__version__} wrote no weights to {part}")
            shards.extend(written)

    own = [*(tensor for stage in stages for tensor in stage.state_dict().values()), *vocabulary.values()]
    failed = f"no checkpoint was written to {folder}"
    together(engine, failed, write, room=Room(folder, num_bytes(own)))
    contents: list[list[dict[str, int]]] = gather([_tensor_bytes(shard) for shard in shards])
    total = sum(map(len, contents))
    before = sum(map(len, contents[: engine.rank]))
    names = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)] if total > 1 else [SINGLE]
    index = os.path.join(unfinished, INDEX)
    finished: dict[str, str] = {}

    def write_index() -> None:  # before the first file is replaced
        if engine.rank == 0 and total > 1:
            _write_index(index, dict(zip(names, [tensors for rank in contents for tensors in rank], strict=True)))
            finished[index] = os.path.join(folder, INDEX)
        for i, shard in enumerate(shards):
            finished[shard] = os.path.join(folder, names[before + i])
        for name in os.listdir(os.path.join(unfinished, "0")) if engine.rank == 0 else ():
            if name.endswith(".json") and name != INDEX:
                finished[os.path.join(unfinished, "0", name)] = os.path.join(folder, name)
        for file, target in finished.items():
            keep_mode(file, target)

    def move() -> None:
        for file, target in finished.items():
            os.replace(file, target)
        for name in os.listdir(folder) if engine.rank == 0 else ():  # weights that the folder held before
            if name not in names and (IS_SHARD.fullmatch(name) or (name == INDEX and total == 1)):
                os.remove(os.path.join(folder, name))

    together(engine, failed, write_index, room=Room(folder, 0))
    together(engine, failed, move)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Each rank would draw one of its own."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


def _load_weights(stage: CausalLMStage, folder: str) -> None:
    files, state = WeightFiles(folder), _state(stage)
    parameters = [
        *stage.named_parameters(remove_duplicate=False),
        *(named for shard in _vocabulary(stage) for named in shard.named_parameters()),
        *stage.tied_parameters.items(),  # the name that a checkpoint has may be that of another stage
    ]
    sources, _ = find_sources(files, stage.causal_lm, dict(parameters) | state)
    load_stage(stage, files, share_sources(sources, parameters), state)


def load_stage(
    stage: CausalLMStage, files: WeightFiles, sources: Mapping[str, Source], needed: Iterable[str]
) -> list[Tensor]:
    """Reads a stage's weights, and its rows of a vocabulary that lies on all ranks; returns what was read.

    Raises:
        ValueError: a tensor has another shape, or a needed one has no source.
    """
    shards = [(name, own, shard) for shard in _vocabulary(stage) for name, own in shard.named_parameters()]
    load_state(files, stage.causal_lm, _state(stage), sources, needed)
    for name, own, shard in shards:
        if sources[name].converter is not None:
            raise ValueError(f'{name!r} is made of several tensors of {files.folder}: use vocabulary="whole"')
        files.read_into(sources[name].parts[0][1], own.detach(), shard.rows.start)
    return [
        *(own for name, own in stage.state_dict(keep_vars=True).items() if name in sources),
        *(own for _, own, _ in shards),
    ]


def _state(stage: CausalLMStage) -> dict[str, Tensor]:
    """What a stage has in a checkpoint; of a shard of the vocabulary the whole, without memory."""
    whole = {
        name: torch.empty(shard.vocab, *own.shape[1:], dtype=own.dtype, device="meta")
        for shard in _vocabulary(stage)
        for name, own in shard.named_parameters()
    }
    return stage.state_dict() | whole


def _vocabulary(stage: CausalLMStage) -> list[VocabularyParallelEmbedding | VocabularyParallelHead]:
    return [shard for shard in (stage.embedding, stage.head) if shard is not None]


# -- adapters ----------------------------------------------------------------------------------------------------------


def _save_adapters(engine: PipelineEngine, stages: list[CausalLMStage], folder: str, unfinished: str) -> None:
    parts = [os.path.join(unfinished, str(i)) for i in range(len(stages))]

    def write() -> None:
        shutil.rmtree(unfinished, ignore_errors=True)
        for part, stage in zip(parts, stages, strict=True):
            stage.peft_model.save_pretrained(part)

    failed = f"no checkpoint was written to {folder}"
    needed = num_bytes(p for stage in stages for p in stage.parameters() if p.requires_grad)
    together(engine, failed, write, room=Room(folder, needed))
    everyones: list[list[str]] = engine.all_gather_object(parts)

    finished: list[tuple[str, str]] = []

    def join() -> None:
        for path, _, files in os.walk(parts[0]) if engine.rank == 0 else ():
            place = os.path.relpath(path, parts[0])  # an adapter that is not the default one has a folder of its own
            if _ADAPTER in files:
                tensors: dict[str, Tensor] = {}
                for part in (part for rank in everyones for part in rank):
                    tensors = load_file(os.path.join(part, place, _ADAPTER)) | tensors
                save_file(tensors, os.path.join(path, _ADAPTER), metadata={"format": "pt"})
            os.makedirs(os.path.join(folder, place), exist_ok=True)
            for name in files:
                finished.append((os.path.join(path, name), os.path.join(folder, place, name)))
                keep_mode(*finished[-1])

    def move() -> None:
        for file, target in finished:
            os.replace(file, target)

    together(engine, failed, join, room=Room(folder, needed))
    together(engine, failed, move)


def _load_adapters(stage: CausalLMStage, folder: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    for adapter in stage.peft_model.peft_config:
        path = os.path.join(folder, _ADAPTER) if adapter == "default" else os.path.join(folder, adapter, _ADAPTER)
        if not os.path.isfile(path):
            raise ValueError(f"{folder} holds no adapter {adapter!r}: there is no {path}")
        found = load_file(path)
        own = get_peft_model_state_dict(stage.peft_model, adapter_name=adapter)
        for name, tensor in own.items():
            check_shape(folder, name, tensor, found[name].shape if name in found else None)
        if own:
            set_peft_model_state_dict(stage.peft_model, {name: found[name] for name in own}, adapter_name=adapter)


# -- both --------------------------------------------------------------------------------------------------------------


_WEIGHTS, _ADAPTER = ".safetensors", "adapter_model.safetensors"


class Ranks(Protocol):
    """Processes that act together: those of an engine, or of all replicas of one."""

    rank: int
    num_ranks: int

    def all_gather_object(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Room:
    """What this rank's part of a save takes: bytes in a folder."""

    folder: str
    needed: int


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def together(
    ranks: Ranks,
    failed: str,
    action: Callable[[], None],
    kind: type[Exception] = OSError,
    room: Room | None = None,
) -> None:
    """Does this rank's part; an error of any rank is raised on all, as ``kind``.

    Args:
        room: if a rank has none left, the error says how much all need and how much was free.
    """
    problem, lacks, free = None, "", 0
    try:
        free = _free(room.folder) if room is not None else 0
        action()
    except Exception as error:
        problem = f"rank {ranks.rank}: {type(error).__name__}: {error}"
        lacks = no_room(error) or ""
    everyones = ranks.all_gather_object((problem, lacks, free, room.needed if room is not None else 0))
    full = next(((lacks, free) for _, lacks, free, _ in everyones if lacks), None)
    if full is not None and room is not None:
        needed = sum(theirs for *_, theirs in everyones)
        raise kind(
            f"{failed}: saving to {room.folder} needs about {needed / 2**30:.3g} GiB, {full[1] / 2**30:.3g} GiB were "
            f"free ({full[0]}): make room there or choose another folder"
        )
    problems = [text for text, *_ in everyones if text]
    if problems:
        raise kind(f"{failed}: {'; '.join(problems)}")


def _free(folder: str) -> int:
    """Bytes that may be written to a folder, which need not be there yet."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return shutil.disk_usage(folder).free


def _is_parameter(module: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    return own in module.get_submodule(owner)._parameters


def _tensor_bytes(file: str) -> dict[str, int]:
    with safe_open(file, framework="pt") as tensors:
        found = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118, not a dict
    return {name: t.nbytes for name, t in found.items()}


def _write_index(file: str, shards: dict[str, dict[str, int]]) -> None:
    index = {
        "metadata": {"total_size": sum(sum(tensors.values()) for tensors in shards.values())},
        "weight_map": {tensor: name for name, tensors in shards.items() for tensor in sorted(tensors)},
    }
    with open(file, "w", encoding="utf-8") as out:
        json.dump(index, out, indent=2, sort_keys=True)
