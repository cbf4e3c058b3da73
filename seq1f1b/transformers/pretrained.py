"""Saves and loads transformers checkpoints: all ranks of a pipeline together, or a single stage from a folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
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
    header_of,
    some,
)

__all__ = ["load_pretrained", "save_pretrained"]

_ADAPTER = "adapter_model.safetensors"


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
            (_load_weights if stage.peft_model is None else _load_adapters)(stage, folder)

    together(engine, f"{folder} was not loaded", load, ValueError)


def _stages_of(engine: PipelineEngine, caller: str) -> list[CausalLMStage]:
    stages = [module for module in engine.modules() if isinstance(module, CausalLMStage)]
    shards = [shard for stage in stages for shard in stage.shards]
    if any(module not in (*stages, *shards) for module in engine.modules()):
        raise TypeError(f"{caller} takes an engine whose stages pipeline_stage made")
    return stages


# -- whole weights -----------------------------------------------------------------------------------------------------


def _save_weights(engine: PipelineEngine, stages: list[CausalLMStage], folder: str) -> None:
    """Writes one file for each stage, and the config files of the first stage; rank 0 adds the index."""
    elsewhere, vocabulary = engine._pipeline.tied.counted_elsewhere(), engine.whole_vocabulary()
    _, count = stages[0].pipeline_place
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE]
    kept = {*names, INDEX} if count > 1 else {SINGLE}

    def write(unfinished: str) -> None:
        for stage in stages:
            index, _ = stage.pipeline_place
            every = {name for name, _ in stage.named_parameters(remove_duplicate=False)}
            every -= {name for name, p in stage.named_parameters() if id(p) not in elsewhere}
            state = {name: tensor for name, tensor in stage.state_dict().items() if name not in every}
            part = os.path.join(unfinished, f".{index}")
            _write(stage.causal_lm, part, state | (vocabulary if index == count - 1 else {}))
            os.rename(os.path.join(part, SINGLE), os.path.join(unfinished, names[index]))
            for name in os.listdir(part) if index == 0 else ():
                os.rename(os.path.join(part, name), os.path.join(unfinished, name))

    def join(folders: list[str]) -> None:
        if count == 1:
            return
        parts = [os.path.join(part, name) for part in folders for name in names]
        found = {os.path.basename(part): header_of(part) for part in parts if os.path.isfile(part)}
        if len(found) < count:
            raise OSError(f"rank 0 sees {len(found)} of {count} files in {folders}")
        size = sum(tensor.nbytes for tensors in found.values() for tensor in tensors.values())
        weight_map = {name: file for file, tensors in found.items() for name in tensors}
        with open(os.path.join(folders[0], INDEX), "w", encoding="utf-8") as out:
            json.dump({"metadata": {"total_size": size}, "weight_map": weight_map}, out, indent=2, sort_keys=True)

    def is_old(name: str) -> bool:
        return name not in kept and (name == INDEX or IS_SHARD.fullmatch(name) is not None)

    save_together(engine, folder, "checkpoint", write, join, is_old)


def _write(model: Any, folder: str, state: dict[str, Tensor]) -> None:
    """Lets transformers write a stage's tensors to one file, without a progress bar."""
    # transformers writes only on rank 0 of a distributed run, but every rank here has weights to write.
    model.should_save_on_this_rank = lambda is_main_process: True
    logging = transformers.utils.logging
    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder, state_dict=state, max_shard_size=sys.maxsize)
    finally:
        del model.should_save_on_this_rank
        if shows_progress:
            logging.enable_progress_bar()


def _load_weights(stage: CausalLMStage, folder: str) -> None:
    files, state = WeightFiles(folder), _state(stage)
    parameters = [
        *stage.named_parameters(remove_duplicate=False),
        *(named for shard in stage.shards for named in shard.named_parameters()),
        *stage.tied_parameters.items(),  # the checkpoint may use another stage's name
    ]
    sources, _ = find_sources(files, stage.causal_lm, dict(parameters) | state, parameters)
    for name, (_, _, shape) in state.items():
        if name not in sources:
            check_shape(folder, name, shape, None)
    load_stage(stage, files, sources)


@torch.no_grad()
def load_stage(stage: CausalLMStage, files: WeightFiles, sources: Mapping[str, Source]) -> list[Tensor]:
    """Reads the weights and the vocabulary shards of a stage that have a source; returns the tensors read."""
    state = {name: own for name, own in _state(stage).items() if name in sources}
    for name, (_, _, shape) in state.items():
        sources[name].check_shape(files, shape)
    read = []
    for source in dict.fromkeys(sources[name] for name in state):
        for name, value in source.read(files, stage.causal_lm).items():
            if name in state:
                own, first_row, shape = state[name]
                check_shape(files.folder, name, shape, value.shape)
                own.copy_(value[first_row : first_row + len(own)] if own.dim() else value)
                read.append(own)
    return read


def _state(stage: CausalLMStage) -> dict[str, tuple[Tensor, int, Sequence[int]]]:
    """Returns a stage's tensors by name, each with its first row in the checkpoint's tensor and the shape of that."""
    state = {name: (own, 0, own.shape) for name, own in stage.state_dict(keep_vars=True).items()}
    for shard in stage.shards:
        for name, own in shard.named_parameters():
            state[name] = own, shard.rows.start, torch.Size((shard.vocab, *own.shape[1:]))
    return state


# -- adapters ----------------------------------------------------------------------------------------------------------


def _save_adapters(engine: PipelineEngine, stages: list[CausalLMStage], folder: str) -> None:
    def write(unfinished: str) -> None:
        for i, stage in enumerate(stages):
            stage.peft_model.save_pretrained(os.path.join(unfinished, f".{i}"))

    def join(folders: list[str]) -> None:
        parts = [os.path.join(own, name) for own in folders for name in sorted(os.listdir(own))]
        shutil.copytree(parts[0], folders[0], dirs_exist_ok=True)
        for path, _, files in os.walk(parts[0]):
            place = os.path.relpath(path, parts[0])  # each adapter but the default one has a subfolder
            if _ADAPTER in files:
                tensors: dict[str, Tensor] = {}
                for part in parts:
                    tensors = load_file(os.path.join(part, place, _ADAPTER)) | tensors
                save_file(tensors, os.path.join(folders[0], place, _ADAPTER), metadata={"format": "pt"})

    save_together(engine, folder, "checkpoint", write, join)


def _load_adapters(stage: CausalLMStage, folder: str) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    for adapter in stage.peft_model.peft_config:
        path = os.path.join(folder, _ADAPTER) if adapter == "default" else os.path.join(folder, adapter, _ADAPTER)
        if not os.path.isfile(path):
            raise ValueError(f"{folder} holds no adapter {adapter!r}: there is no {path}")
        found = load_file(path)
        own = get_peft_model_state_dict(stage.peft_model, adapter_name=adapter)
        for name, tensor in own.items():
            check_shape(folder, name, tensor.shape, found[name].shape if name in found else None)
        if own:
            set_peft_model_state_dict(stage.peft_model, {name: found[name] for name in own}, adapter_name=adapter)


# -- the stage of a folder ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Folder:
    """A checkpoint that matches a model by names.

    Attributes:
        model: on the meta device.
        sources: name in the model -> tensors in the files. transformers initializes a tensor without a source.
    """

    model: Any
    files: WeightFiles
    sources: dict[str, Source]

    def load(self, stage: CausalLMStage, device: torch.device | str) -> None:
        """Gives memory to a stage and reads the stage's weights; transformers computes tensors missing in the files."""
        made = stage.allocate(device)
        read = {id(tensor) for tensor in load_stage(stage, self.files, self.sources)}
        stage.initialize([tensor for tensor in made if id(tensor) not in read])


def open_folder(source: str | os.PathLike[str], dtype: torch.dtype | str | None = None) -> Folder:
    """Opens a checkpoint, given a folder or a name on the hub, and checks it by config and headers alone."""
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
        what = f"{name!r} is no folder, and no model of this name came from the hub or its cache"
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def _read_config(folder: str) -> Any:
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise ValueError(f"{folder} has no config.json; adapters are put around the model that they belong to, by peft")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"{folder}: config.json is not understood: {error}") from error
    for each in (config, config.get_text_config()):
        quantized = getattr(each, "quantization_config", None)
        if quantized:
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
            raise ValueError(
                f"{folder} is quantized ({getattr(method, 'value', method)}), which a stage neither reads nor trains: "
                "load it dequantized by transformers, and save it without its quantization_config"
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
            floating = (tensor.dtype for tensor in files.tensors.values() if tensor.is_floating_point())
            dtype = next(floating, torch.float32)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype!r}, must be None or a floating dtype of torch, as torch.bfloat16")
    return dtype


def _check_names(model: Any, files: WeightFiles) -> Folder:
    state = model.state_dict()
    parameters = list(model.named_parameters(remove_duplicate=False))
    sources, extra = find_sources(files, model, state, parameters)
    _check_tied(parameters, sources, files)
    told = SimpleNamespace(missing_keys=state.keys() - sources.keys(), unexpected_keys=set(extra))
    model._adjust_missing_and_unexpected_keys(told)  # leaves out what transformers initializes or ignores
    if told.missing_keys:
        raise ValueError(
            f"{files.folder} lacks {len(told.missing_keys)} of the {len(state)} weights of {type(model).__name__}: "
            f"{some(told.missing_keys)}; its config.json must be of the model that was saved"
        )
    if told.unexpected_keys:
        raise ValueError(
            f"{files.folder} holds {len(told.unexpected_keys)} tensors that {type(model).__name__} does not have: "
            f"{some(told.unexpected_keys)}. To leave them out, build the model on the meta device from its config, cut "
            "it, and call load_pretrained"
        )
    for name, source in sources.items():
        source.check_shape(files, state[name].shape)
    return Folder(model, files, sources)


def _check_tied(parameters: list[tuple[str, Any]], sources: dict[str, Source], files: WeightFiles) -> None:
    """Raises ValueError if the files hold different values of one tied weight."""
    first: dict[int, str] = {}
    for name, parameter in parameters:
        if name not in sources or sources[name].converter is not None:
            continue
        other = first.setdefault(id(parameter), name)
        if sources[other].parts == sources[name].parts:
            continue
        one, two = (sources[each].read(files, None)[each] for each in (other, name))
        if one.dtype != two.dtype or not torch.equal(one, two):
            what = f"the config of {files.folder} ties {other!r} and {name!r}, its files hold different values of both"
            raise ValueError(f"{what}: if they were trained apart, set tie_word_embeddings to false in config.json")
