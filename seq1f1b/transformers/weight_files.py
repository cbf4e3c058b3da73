"""Reads the safetensors files of a checkpoint: each rank reads only the tensors it needs, into existing memory."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from seq1f1b.files import parse_json

__all__: list[str] = []

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
IS_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_IN_FOLDER = re.compile(r"[^/\\\x00]+(/[^/\\\x00]+)*")


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a file."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """The tensors of a folder's safetensors files, by name; the constructor reads the files' headers alone.

    Raises:
        ValueError: the folder holds no safetensors, lacks a file named in the index, or a file is damaged.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.places: dict[str, TensorPlace] = {}
        for path in weight_paths(folder):
            self.places |= places_of(path)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.places[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns a tensor's dtype. Raises ValueError for a dtype found in quantized models only."""
        place = self.places[name]
        if place.dtype not in _DTYPES:
            raise ValueError(f"{name!r} in {place.file} is of dtype {place.dtype}, must be one of {', '.join(_DTYPES)}")
        return _DTYPES[place.dtype]

    def read(self, name: str) -> Tensor:
        out = torch.empty(self.shape(name), dtype=self.dtype(name), device="cpu")
        self.read_into(name, out)
        return out

    @torch.no_grad()
    def read_into(self, name: str, out: Tensor, first_row: int = 0) -> None:
        """Reads rows of a tensor from ``first_row`` on, to fill ``out``, which may have another dtype or device."""
        self.dtype(name)
        with _opened(self.places[name].file) as file:  # a file of its own for each tensor: mapped bytes count as memory
            part = file.get_slice(name)
            out.copy_(part[first_row : first_row + len(out)] if out.dim() else file.get_tensor(name))

    def equal(self, name: str, other: str) -> bool:
        """Returns whether two tensors hold equal bytes."""
        if (self.dtype(name), self.shape(name)) != (self.dtype(other), self.shape(other)):
            return False
        return torch.equal(self.read(name).view(torch.uint8), self.read(other).view(torch.uint8))


def _opened(path: str) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def weight_paths(folder: str) -> list[str]:
    """Returns the paths of a folder's safetensors files with weights. Raises ValueError as :class:`WeightFiles`."""
    index = os.path.join(folder, INDEX)
    if os.path.isfile(os.path.join(folder, SINGLE)) or not os.path.isfile(index):
        names = [name for name in sorted(os.listdir(folder)) if IS_SHARD.fullmatch(name)]
        names = [SINGLE] if SINGLE in names else names
        if not names:
            raise ValueError(
                f"{folder} holds no weights: there is neither {SINGLE} nor {INDEX}. Of other files a rank cannot read "
                f"a part: write safetensors, by AutoModelForCausalLM.from_pretrained({folder!r}).save_pretrained(...)"
            )
    else:
        names = _indexed(index)
    missing = [name for name in names if not os.path.isfile(os.path.join(folder, name))]
    if missing:
        by = index if os.path.isfile(index) else folder
        raise ValueError(f"{by} names {some(missing)}, which {folder} does not hold: copy or download them")
    return [os.path.join(folder, name) for name in names]


def _indexed(index: str) -> list[str]:
    """Returns the file names in an index. For security, names must stay inside the folder; links may lead out."""
    try:
        with open(index, encoding="utf-8") as file:
            read = parse_json(file.read())
        if not isinstance(read, dict) or not isinstance(read.get("weight_map"), dict):
            raise ValueError('it must be an object with a "weight_map", an object of tensors\' names and their files')
        for tensor, name in read["weight_map"].items():
            if not isinstance(name, str) or not _IN_FOLDER.fullmatch(name) or {".", ".."} & set(name.split("/")):
                raise ValueError(f"{tensor!r:.80} lies in {name!r:.80}, must be the name of a file in this folder")
    except ValueError as error:
        raise ValueError(f"{index} is no index of weights: {error}") from error
    return sorted(set(read["weight_map"].values()))


def places_of(path: str) -> dict[str, TensorPlace]:
    """Returns the tensors of a safetensors file, by name. Raises ValueError for a damaged file."""
    from safetensors import SafetensorError

    try:
        with _opened(path) as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, not a dict
            return {n: TensorPlace(path, part.get_dtype(), tuple(part.get_shape())) for n, part in parts.items()}
    except SafetensorError as error:
        size = os.path.getsize(path)
        raise ValueError(f"{path} is no whole safetensors file: {error} (it has {size} bytes)") from error


# -- the names of a model and those of its files -----------------------------------------------------------------------


@dataclass
class Source:
    """The tensors in the files from which one or several parameters or buffers are made.

    Attributes:
        parts: (pattern, name): a name in the files, and the matching pattern of transformers' converter.
        converter: makes the model's tensors from the parts, for example stacks experts; None: no conversion.
    """

    target: str
    converter: Any = None
    parts: list[tuple[str, str]] = field(default_factory=list)

    def convert(self, files: WeightFiles, model: Any) -> dict[str, Tensor]:
        mapping = copy.deepcopy(self.converter)
        for pattern, name in self.parts:
            mapping.add_tensor(self.target, name, pattern, lambda name=name: files.read(name))
        made = mapping.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def find_sources(files: WeightFiles, model: Any, state: Mapping[str, Any]) -> tuple[dict[str, Source], list[str]]:
    """Finds the source of each tensor of a state in the files, with transformers' renaming rules for loading.

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
    for name in sorted(files.places, key=dot_natural_key):
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
    return found, extra


def share_sources(sources: dict[str, Source], parameters: Iterable[tuple[str, Any]]) -> dict[str, Source]:
    """Adds sources for all names of a shared parameter, each the source of the first name found in the files."""
    names: dict[int, list[str]] = {}
    for name, parameter in parameters:
        names.setdefault(id(parameter), []).append(name)
    for several in names.values():
        source = next((sources[name] for name in several if name in sources), None)
        if source is not None:
            sources |= {name: source for name in several if name not in sources}
    return sources


def check_shape(folder: str, name: str, own: Tensor, found: Collection[int] | None) -> None:
    if found is None or tuple(found) != tuple(own.shape):
        has = "lacks it" if found is None else f"has it in shape {tuple(found)}"
        raise ValueError(f"this rank needs {name!r} in shape {tuple(own.shape)}, the checkpoint in {folder} {has}")


def some(names: Collection[str]) -> str:
    shown = sorted(names)[:5]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
