"""Reads the safetensors files of a checkpoint: each rank reads only the tensors it needs, into existing memory."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from seq1f1b.files import parse_json

__all__: list[str] = []

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IS_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_IN_FOLDER = re.compile(r"[^/\\\x00]+(/[^/\\\x00]+)*")


class WeightFiles:
    """The tensors of a folder's safetensors files; the constructor reads the files' headers alone.

    Attributes:
        tensors: name -> a tensor on the meta device, with the shape and dtype of the file's.
        paths: name -> the file.
    Raises:
        ValueError: the folder holds no safetensors, lacks a file named in the index, or a file is damaged or quantized.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.tensors: dict[str, Tensor] = {}
        self.paths: dict[str, str] = {}
        for path in weight_paths(folder):
            found = header_of(path)
            self.tensors |= found
            self.paths |= dict.fromkeys(found, path)

    def read(self, name: str) -> Tensor:
        """Returns a view of the mapped file, whose rows are read when they are used."""
        from safetensors import safe_open

        with safe_open(self.paths[name], framework="pt") as file:  # one per tensor: mapped bytes count as memory
            return file.get_tensor(name)  # type: ignore[no-any-return]


def weight_paths(folder: str) -> list[str]:
    """Returns the paths of a folder's safetensors files with weights. Raises ValueError as :class:`WeightFiles`."""
    index = os.path.join(folder, INDEX)
    if os.path.isfile(os.path.join(folder, SINGLE)):
        names = [SINGLE]
    elif os.path.isfile(index):
        names = _indexed(index)
    else:
        raise ValueError(
            f"{folder} holds no weights: there is neither {SINGLE} nor {INDEX}. Each rank reads a part of the weights, "
            "and only safetensors can be read in part: write safetensors by "
            f"AutoModelForCausalLM.from_pretrained({folder!r}).save_pretrained(...)"
        )
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        raise ValueError(f"{index} names {some(missing)}, which {folder} does not hold: copy or download them")
    return [os.path.join(folder, name) for name in names]


def _indexed(index: str) -> list[str]:
    """Returns the file names in an index. For security, names must stay inside the folder; links may lead out."""
    try:
        with open(index, encoding="utf-8") as file:
            read = parse_json(file.read())
        if not isinstance(read, dict) or not isinstance(read.get("weight_map"), dict):
            raise ValueError('it must be an object with a "weight_map", an object')
        for tensor, name in read["weight_map"].items():
            if not isinstance(name, str) or not _IN_FOLDER.fullmatch(name) or {".", ".."} & set(name.split("/")):
                raise ValueError(f"{tensor!r:.80} lies in {name!r:.80}, must be a file in this folder")
    except ValueError as error:
        raise ValueError(f"{index} is no index of weights: {error}") from error
    return sorted(set(read["weight_map"].values()))


def header_of(path: str) -> dict[str, Tensor]:
    """Returns a safetensors file's tensors by name, on the meta device; refuses damaged and quantized ones."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_tensor(name).to("meta") for name in file.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({os.path.getsize(path)} bytes): {error}") from error
    for name, tensor in found.items():
        if tensor.is_floating_point() and tensor.itemsize < 2:
            raise ValueError(f"{name!r} in {path} is of dtype {tensor.dtype}, as of a quantized model: dequantize it")
    return found


# -- the names of a model and those of its files -----------------------------------------------------------------------


@dataclass(eq=False)
class Source:
    """The tensors in the files from which one or several parameters or buffers are made.

    Attributes:
        parts: (pattern, name): a name in the files, and the matching pattern of transformers' converter.
        converter: makes the model's tensors from the parts, for example stacks experts; None: no conversion.
    """

    target: str
    converter: Any = None
    parts: list[tuple[str, str]] = field(default_factory=list)

    def read(self, files: WeightFiles, model: Any) -> dict[str, Tensor]:
        """Returns the model's tensors by name."""
        if self.converter is None:
            return {self.target: files.read(self.parts[0][1])}
        mapping = copy.deepcopy(self.converter)
        for pattern, name in self.parts:
            mapping.add_tensor(self.target, name, pattern, partial(files.read, name))
        made = mapping.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def check_shape(self, files: WeightFiles, shape: Collection[int]) -> None:
        """Raises ValueError if the files have another shape; tensors to be converted are checked when they are read."""
        if self.converter is None:
            check_shape(files.folder, self.target, shape, files.tensors[self.parts[0][1]].shape)


def find_sources(
    files: WeightFiles, model: Any, state: Mapping[str, Any], parameters: Iterable[tuple[str, Any]]
) -> tuple[dict[str, Source], list[str]]:
    """Finds the source of each tensor of a state in the files, with transformers' renaming rules for loading.

    All names of a shared parameter have a source if the files hold one of them.

    Args:
        parameters: those of the state by all their names.
    Returns:
        the sources by name, and the names in the files that belong to no tensor of the state.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix: str = model.base_model_prefix
    found: dict[str, Source] = {}
    extra = []
    for name in sorted(files.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        converter = None if pattern is None else by_pattern[pattern]
        targets = [target]
        if converter is not None:
            targets = [target.replace(converter.target_patterns[0], other) for other in converter.target_patterns]
        if not any(each in state for each in targets):
            extra.append(name)
            continue
        source = found.get(target)
        if source is None or converter is None:
            source = Source(target, converter)
        source.parts.append((pattern or name, name))
        found |= dict.fromkeys(targets, source)
    names: dict[int, list[str]] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), []).append(name)
    for several in names.values():
        source = next((found[name] for name in several if name in found), None)
        if source is not None and source.converter is None:
            found |= {name: replace(source, target=name) for name in several if name not in found}
    return found, extra


def check_shape(folder: str, name: str, own: Collection[int], found: Collection[int] | None) -> None:
    if found is None or tuple(found) != tuple(own):
        has = "lacks it" if found is None else f"has it in shape {tuple(found)}"
        raise ValueError(f"this rank needs {name!r} in shape {tuple(own)}, the checkpoint in {folder} {has}")


def some(names: Collection[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
