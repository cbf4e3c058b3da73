"""Saves and loads transformers checkpoints: all ranks of a pipeline together, or a single stage from a folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.core_model_loading import build_glob_alternation

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
    places_of,
    share_sources,
    some,
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

    def write(unfinished: str) -> tuple[list[list[str]], int]:
        size, logging = 0, transformers.utils.logging
        for i, stage in enumerate(stages):
            part = os.path.join(unfinished, str(i))
            every = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
            every -= {name for name, p in stage.named_parameters() if id(p) not in elsewhere}
            state = {name: tensor for name, tensor in stage.state_dict().items() if name not in every}
            if i == len(stages) - 1:
                state |= vocabulary
            size += sum(tensor.nbytes for tensor in state.values())
            # transformers writes only on rank 0 of a distributed run, but every rank here has weights to write.
            stage.causal_lm.should_save_on_this_rank = lambda is_main_process: True
            shows_progress = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            try:
                stage.causal_lm.save_pretrained(part, state_dict=state)
            finally:
                del stage.causal_lm.should_save_on_this_rank
                if shows_progress:
                    logging.enable_progress_bar()
            written = [os.path.join(part, name) for name in sorted(os.listdir(part)) if name.endswith(".safetensors")]
            if not written:
                raise OSError(f"transformers {transformers.__version__} wrote no weights to {part}")
            shards.extend(written)
        return [sorted(places_of(shard)) for shard in shards], size

    def names(told: list[tuple[list[list[str]], int]]) -> dict[str, str]:
        held = [tensors for of_rank, _ in told for tensors in of_rank]
        before, total = sum(len(of_rank) for of_rank, _ in told[: engine.rank]), len(held)
        saved[:] = [f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)] if total > 1 else [SINGLE]
        found = dict(zip(shards, saved[before:], strict=False))
        if engine.rank == 0:
            first = os.path.dirname(shards[0])
            found |= {os.path.join(first, name): name for name in os.listdir(first) if name.endswith(".json")}
            index = os.path.join(first, INDEX)
            found.pop(index, None)
            if total > 1:
                where = {tensor: name for name, tensors in zip(saved, held, strict=True) for tensor in tensors}
                with open(index, "w", encoding="utf-8") as out:
                    total_size = {"total_size": sum(size for _, size in told)}
                    json.dump({"metadata": total_size, "weight_map": where}, out, indent=2, sort_keys=True)
                saved.append(INDEX)
                found[index] = INDEX
        return found

    def is_old(name: str) -> bool:
        return name not in saved and (name == INDEX or IS_SHARD.fullmatch(name) is not None)

    save_together(engine, folder, _FAILED.format(folder), write, names, is_old)


def _load_weights(stage: CausalLMStage, folder: str) -> None:
    files, state = WeightFiles(folder), _state(stage)
    parameters = [
        *stage.named_parameters(remove_duplicate=False),
        *(named for shard in stage.shards for named in shard.named_parameters()),
        *stage.tied_parameters.items(),  # the checkpoint may use another stage's name
    ]
    sources, _ = find_sources(files, stage.causal_lm, dict(parameters) | state)
    load_stage(stage, files, share_sources(sources, parameters), state)


@torch.no_grad()
def load_stage(
    stage: CausalLMStage, files: WeightFiles, sources: Mapping[str, Source], needed: Collection[str]
) -> list[Tensor]:
    """Reads the weights and the vocabulary shards of a stage; returns the tensors read.

    Raises:
        ValueError: a shape differs, or a needed tensor has no source; before any read, except for converted tensors.
    """
    state = _state(stage)
    shards = {name: (own, shard.rows.start) for shard in stage.shards for name, own in shard.named_parameters()}
    for name, own in state.items():
        source = sources.get(name)
        if source is None and name in needed:
            check_shape(files.folder, name, own, None)
        elif source is not None and source.converter is None:
            check_shape(files.folder, name, own, files.shape(source.parts[0][1]))
        elif name in shards:
            raise ValueError(f'{name!r} is made of several tensors of {files.folder}: use vocabulary="ends"')
    converted: set[int] = set()
    for name, own in state.items():
        source, (into, first_row) = sources.get(name), shards.get(name, (own, 0))
        if source is None or into.is_meta or id(source) in converted:
            continue
        if source.converter is None:
            files.read_into(source.parts[0][1], into, first_row)
            continue
        converted.add(id(source))
        for target, value in source.convert(files, stage.causal_lm).items():
            if target in state:
                check_shape(files.folder, target, state[target], tuple(value.shape))
                state[target].copy_(value)
    read = [own for name, own in stage.state_dict(keep_vars=True).items() if name in sources]
    return read + [own for own, _ in shards.values()]


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


# -- the stage of a folder ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """A checkpoint that matches a model by names.

    Attributes:
        model: on the meta device.
        sources: name in the model -> tensors in the files.
        may_miss: names that may be missing in all files: transformers initializes such tensors without a warning.
    """

    model: Any
    files: WeightFiles
    sources: dict[str, Source]
    may_miss: frozenset[str]

    def load(self, stage: CausalLMStage, device: torch.device | str) -> None:
        """Gives memory to a stage and reads the stage's weights; transformers computes tensors missing in the files."""
        made = stage.allocate(device)
        needed = stage.state_dict().keys() - self.may_miss
        read = {id(tensor) for tensor in load_stage(stage, self.files, self.sources, needed)}
        stage.initialize([tensor for tensor in made if id(tensor) not in read])


def open_folder(source: str | os.PathLike[str], dtype: torch.dtype | str | None = None) -> Folder:
    """Opens a checkpoint, given a folder or a name on the hub; reads config and headers alone.

    Raises:
        ValueError: config or safetensors are missing, the model is quantized or not a decoder, or weights of model and
            files have different names.
    """
    source = os.fspath(source)
    folder = source if os.path.isdir(source) else _downloaded(source)
    config = _read_config(folder)
    files = WeightFiles(folder)
    dtype = _dtype(dtype, config, files)
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (ValueError, ImportError) as error:
        raise ValueError(f"{folder}: no model is built from its config.json: {error}") from error
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, group_of, _ = build_glob_alternation(list(plan))
        for name, tensor in model.state_dict(keep_vars=True).items():
            found = pattern.search(name)
            if found is not None and found.lastgroup is not None:
                tensor.data = tensor.data.to(plan[group_of[found.lastgroup]])
    model.config.name_or_path = source
    if os.path.isfile(os.path.join(folder, "generation_config.json")):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return _check_names(model.eval(), files)


def _downloaded(name: str) -> str:
    """Returns a folder in the hub's cache, after downloading missing files, once per machine."""
    if os.path.exists(name):
        raise ValueError(f"{name} is a file: give the folder of the model, with its config.json and weights")
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(name, allow_patterns=["*.json", "model*.safetensors"]))
    except Exception as error:  # any error of the hub, the network or the disk
        raise ValueError(
            f"{name!r} is no folder, and no model of this name came from the hub or its cache: "
            f"{type(error).__name__}: {error}"
        ) from error


def _read_config(folder: str) -> Any:
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"{folder} has no config.json; adapters are put around the model that they belong to, by peft")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"{folder}: config.json is not understood: {error}") from error
    quantized = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
        raise ValueError(
            f"{folder} is quantized ({getattr(method, 'value', method)}), which a stage neither reads nor trains: load "
            "it dequantized by transformers, save it without its quantization_config, and give that folder"
        )
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{folder} holds a {config.model_type}, which has no ...ForCausalLM in transformers")
    return config


def _dtype(dtype: Any, config: Any, files: WeightFiles) -> torch.dtype:
    """Returns the given dtype, or from_pretrained's default: the config's, else the first floating weight's."""
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if dtype is None or dtype == "auto":
        dtype = config.dtype or config.get_text_config().dtype
        if dtype is None:
            dtype = next((d for d in map(files.dtype, files.places) if d.is_floating_point), torch.float32)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}, must be None or a floating dtype of torch, as torch.bfloat16")
    return dtype


def _check_names(model: Any, files: WeightFiles) -> Folder:
    state = model.state_dict()
    sources, extra = find_sources(files, model, state)
    parameters = list(model.named_parameters(remove_duplicate=False))
    _check_tied(parameters, sources, files)
    share_sources(sources, parameters)
    may_miss = frozenset(_matching(model._keys_to_ignore_on_load_missing, state))
    missing = [name for name in state if name not in sources and name not in may_miss]
    if missing:
        raise ValueError(
            f"{files.folder} lacks {len(missing)} of the {len(state)} weights of {type(model).__name__}: "
            f"{some(missing)}; its config.json must be of the model that was saved"
        )
    # Ignored as in transformers: buffers saved by older versions.
    known = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    extra = sorted(set(extra) - set(_matching(known, extra)))
    if extra:
        raise ValueError(
            f"{files.folder} holds {len(extra)} tensors that {type(model).__name__} does not have: {some(extra)}. To "
            "leave them out, build the model on the meta device from its config, cut it, and call load_pretrained"
        )
    for name, source in sources.items():
        if source.converter is None:
            check_shape(files.folder, name, state[name], files.shape(source.parts[0][1]))
        for _, part in source.parts:
            files.dtype(part)
    return Folder(model, files, sources, may_miss)


def _check_tied(parameters: list[tuple[str, Any]], sources: dict[str, Source], files: WeightFiles) -> None:
    """Raises ValueError if the files hold different values of one tied weight."""
    first: dict[int, str] = {}
    for name, parameter in parameters:
        if name not in sources or sources[name].converter is not None:
            continue
        other = first.setdefault(id(parameter), name)
        if other != name and not files.equal(sources[other].parts[0][1], sources[name].parts[0][1]):
            raise ValueError(
                f"the config of {files.folder} ties {other!r} and {name!r}, its files hold different values of both: "
                "if they were trained apart, set tie_word_embeddings to false in config.json"
            )


def _matching(patterns: Iterable[str] | None, names: Iterable[str]) -> list[str]:
    compiled = [re.compile(pattern) for pattern in patterns or ()]
    return [name for name in names if any(pattern.search(name) for pattern in compiled)]
