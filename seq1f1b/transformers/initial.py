"""Computes initial values of tensors as transformers does: buffers, and weights before any training.

A model made on the meta device has no values. The ``_init_weights`` method of a module, or of a parent that reaches
down, writes the values. So a stage is filled while the other stages' modules are back in place; modules without memory
are enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.transformers.twins import put
from seq1f1b.transformers.weight_files import some

__all__ = ["compute_buffers", "initialize", "one_at_a_time"]

one_at_a_time = threading.RLock()  # ranks may be threads, and building a model sets torch's default dtype


def compute_buffers(model: Any, layers: str) -> None:
    """Computes the buffers outside of the list ``layers`` of a model without memory; the cut reads these values."""
    olds: dict[Tensor, Tensor] = {}  # new tensor -> the one without memory
    for path, module in model.named_modules():
        for name, old in module._buffers.items():
            if old is not None and old.is_meta and not path.startswith(f"{layers}."):
                module._buffers[name] = new = torch.empty_like(old, device="cpu")
                olds[new] = old
    unknown = set(_fill(model, list(olds)))
    for module in model.modules():
        module._buffers.update({name: olds[new] for name, new in module._buffers.items() if new in unknown})


def initialize(model: Any, elsewhere: Mapping[str, nn.Module], made: Iterable[Tensor]) -> None:
    """Fills tensors of a stage with transformers' initial values.

    Args:
        model: the stage's part of the model.
        elsewhere: modules of other stages, by name; the stage has stand-ins in these places.
        made: tensors of the stage with memory, but without values.
    Raises:
        ValueError: transformers gives a tensor no value.
    """
    own = set(_tensors(model))
    stand_ins = {name: model.get_submodule(name) for name in elsewhere}
    put(model, elsewhere)
    try:
        unknown = {tensor for tensor in _fill(model, [tensor for tensor in made if tensor in own]) if tensor.numel()}
    finally:
        put(model, stand_ins)
    if unknown:
        named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        names = some([name for name, tensor in named if tensor in unknown])
        what = f"{type(model).__name__} on the meta device does not tell the initial values of {names}"
        raise ValueError(f"{what}: cut a model with memory")


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())


def _fill(model: Any, made: list[Tensor]) -> list[Tensor]:
    """Initializes the tensors in ``made``, by transformers, and no others. Returns the tensors left unwritten."""
    if not made:
        return []
    before = [tensor._version for tensor in made]
    with one_at_a_time, torch.device("cpu"):  # the caller's device may be meta
        # Tensors marked as already loaded are skipped by _init_weights; a mark on a module would skip all its tensors.
        marked = [tensor for tensor in set(_tensors(model)) - set(made) if not hasattr(tensor, _MARK)]
        holders = [*marked, *model.modules()]
        for holder in holders:
            holder.__dict__.pop(_MARK, None)
        for tensor in marked:
            tensor.__dict__[_MARK] = True
        try:
            model.initialize_weights()
        finally:
            for holder in holders:
                holder.__dict__.pop(_MARK, None)
    return [tensor for tensor, version in zip(made, before, strict=True) if tensor._version == version]


_MARK = "_is_hf_initialized"
