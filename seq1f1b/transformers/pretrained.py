"""Saves and loads transformers checkpoints, written by all ranks of a pipeline together."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from seq1f1b.engine.engine import PipelineEngine
from seq1f1b.transformers.saving import save_together, together
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

_ADAPTER = "adapter_model.safetensors"
_FAILED = "no checkpoint was written to {}"


def save_pretrained(engine: PipelineEngine, folder: str | os.PathLike[str]) -> None:
    """Writes a transformers checkpoint for ``from_pretrained``; all ranks of the pipeline call the function.

    Every rank writes the weights of its stages (safetensors) to the folder, which all ranks must see. Rank 0 adds
    index, config and generation config. If the model has adapters of peft, only the adapters are written, as by peft:
    rank 0 joins all adapters in one file under peft's names, for ``peft.PeftModel.from_pretrained``. Old files in the
    folder stay until all new files are written.

    Raises:
        TypeError: a stage was not made by :func:`pipeline_stage`.
        ValueError: copies of a tied parameter have different values; raised on every rank.
        OSError: a rank could not write; raised on every rank.
    """
    stages = _stages_of(engine, "save_pretrained")
    engine._pipeline.tied.compare()
    has_adapters = any(stage.peft_model is not None for stage in stages)
    (_save_adapters if has_adapters else _save_weights)(engine, stages, os.fspath(folder))


def load_pretrained(engine: PipelineEngine, folder: str | os.PathLike[str]) -> None:
    """Loads the weights or adapters of all stages from a checkpoint of :func:`save_pretrained`, transformers or peft.

    All ranks of the pipeline call the function; the number of ranks that wrote the checkpoint does not matter.

    Raises:
        TypeError: a stage was not made by :func:`pipeline_stage`.
        ValueError: the checkpoint lacks a weight or an adapter of a rank, or the shapes differ; raised on every rank.
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


def _save_weights(engine: PipelineEngine, stages: list[CausalLMStage], folder: str) -> None:
    elsewhere, vocabulary = engine._pipeline.tied.counted_elsewhere(), engine.whole_vocabulary()
    shards: list[str] = []
    saved: list[str] = []

    def write(unfinished: str) -> list[dict[str, int]]:
        for i, stage in enumerate(stages):
            part = os.path.join(unfinished, str(i))
            every = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
            every -= {name for name, p in stage.named_parameters() if id(p) not in elsewhere}
            state = {name: tensor for name, tensor in stage.state_dict().items() if name not in every}
            if i == len(stages) - 1:
                state |= vocabulary
            # transformers writes only on rank 0 of a distributed run, but every rank here has weights to write.
            stage.causal_lm.should_save_on_this_rank = lambda is_main_process: True
            try:
                with _no_progress_bar():
                    stage.causal_lm.save_pretrained(part, state_dict=state)
            finally:
                del stage.causal_lm.should_save_on_this_rank
            written = [os.path.join(part, name) for name in sorted(os.listdir(part)) if name.endswith(".safetensors")]
            if not written:
                raise OSError(f"transformers {transformers.__version__} wrote no weights to {part}")
            shards.extend(written)
        return [{name: tensor.nbytes for name, tensor in load_file(shard).items()} for shard in shards]

    def names(contents: list[list[dict[str, int]]]) -> dict[str, str]:
        total, before = sum(map(len, contents)), sum(map(len, contents[: engine.rank]))
        saved[:] = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)] if total > 1 else [SINGLE]
        found = dict(zip(shards, saved[before:], strict=False))
        if engine.rank == 0:
            first = os.path.dirname(shards[0])
            found |= {os.path.join(first, name): name for name in os.listdir(first) if name.endswith(".json")}
            index = os.path.join(first, INDEX)
            found.pop(index, None)
            if total > 1:
                saved.append(INDEX)
                _write_index(index, dict(zip(saved, [tensors for rank in contents for tensors in rank], strict=False)))
                found[index] = INDEX
        return found

    def is_old(name: str) -> bool:
        return name not in saved and (name == INDEX or IS_SHARD.fullmatch(name) is not None)

    save_together(engine, folder, _FAILED.format(folder), write, names, is_old)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hides transformers' progress bar, which each rank would draw, inside the ``with`` block."""
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
        *(named for shard in stage.shards for named in shard.named_parameters()),
        *stage.tied_parameters.items(),  # the checkpoint may use another stage's name
    ]
    sources, _ = find_sources(files, stage.causal_lm, dict(parameters) | state)
    load_stage(stage, files, share_sources(sources, parameters), state)


def load_stage(
    stage: CausalLMStage, files: WeightFiles, sources: Mapping[str, Source], needed: Iterable[str]
) -> list[Tensor]:
    """Reads the weights and the vocabulary shards of a stage; returns the tensors read.

    Raises:
        ValueError: a shape differs, or a needed tensor has no source.
    """
    shards = [(name, own, shard) for shard in stage.shards for name, own in shard.named_parameters()]
    load_state(files, stage.causal_lm, _state(stage), sources, needed)
    for name, own, shard in shards:
        if sources[name].converter is not None:
            raise ValueError(f'{name!r} is made of several tensors of {files.folder}: use vocabulary="ends"')
        files.read_into(sources[name].parts[0][1], own.detach(), shard.rows.start)
    return [
        *(own for name, own in stage.state_dict(keep_vars=True).items() if name in sources),
        *(own for _, own, _ in shards),
    ]


def _state(stage: CausalLMStage) -> dict[str, Tensor]:
    """Returns a stage's tensors in a checkpoint; a vocabulary shard appears as the whole weight, without memory."""
    whole = {
        name: torch.empty(shard.vocab, *own.shape[1:], dtype=own.dtype, device="meta")
        for shard in stage.shards
        for name, own in shard.named_parameters()
    }
    return stage.state_dict() | whole


# -- adapters ----------------------------------------------------------------------------------------------------------


def _save_adapters(engine: PipelineEngine, stages: list[CausalLMStage], folder: str) -> None:
    def write(unfinished: str) -> list[str]:
        parts = [os.path.join(unfinished, str(i)) for i in range(len(stages))]
        for part, stage in zip(parts, stages, strict=True):
            stage.peft_model.save_pretrained(part)
        return parts

    def join(everyones: list[list[str]]) -> dict[str, str]:
        found: dict[str, str] = {}
        first = everyones[0][0]
        for path, _, files in os.walk(first) if engine.rank == 0 else ():
            place = os.path.relpath(path, first)  # each adapter but the default one has a subfolder
            if _ADAPTER in files:
                tensors: dict[str, Tensor] = {}
                for part in (part for rank in everyones for part in rank):
                    tensors = load_file(os.path.join(part, place, _ADAPTER)) | tensors
                save_file(tensors, os.path.join(path, _ADAPTER), metadata={"format": "pt"})
            found |= {os.path.join(path, name): os.path.normpath(os.path.join(place, name)) for name in files}
        return found

    save_together(engine, folder, _FAILED.format(folder), write, join)


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


def _write_index(file: str, shards: dict[str, dict[str, int]]) -> None:
    index = {
        "metadata": {"total_size": sum(sum(tensors.values()) for tensors in shards.values())},
        "weight_map": {tensor: name for name, tensors in shards.items() for tensor in sorted(tensors)},
    }
    with open(file, "w", encoding="utf-8") as out:
        json.dump(index, out, indent=2, sort_keys=True)
