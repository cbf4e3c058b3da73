"""Opens a transformers model in a folder: builds the model without memory, and reads single stages from the files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.core_model_loading import build_glob_alternation

from seq1f1b.transformers.pretrained import load_stage
from seq1f1b.transformers.stage import CausalLMStage
from seq1f1b.transformers.weight_files import Source, WeightFiles, check_shape, find_sources, share_sources, some

__all__: list[str] = []


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
        has = "no config.json"
        if os.path.isfile(os.path.join(folder, "adapter_config.json")):
            has += ", it holds adapters: load the model that they belong to, and put them around it by peft"
        raise ValueError(f"{folder} has {has}")
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
    if config.is_encoder_decoder:
        raise ValueError(f"{folder} holds a {config.model_type}, an encoder-decoder; stages are cut from decoders only")
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
