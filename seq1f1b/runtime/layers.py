"""Which layers of a stage run as ``linear.py`` and ``embedding.py`` say, while a training step does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seq1f1b.runtime.compiled import runs_compiled
from seq1f1b.runtime.data_parallel import is_reduced
from seq1f1b.runtime.embedding import Embedding
from seq1f1b.runtime.layer import Layer
from seq1f1b.runtime.linear import Linear

__all__: list[str] = []

_WIDEST = 8  # times as many outputs as inputs: of a wider layer, a head, the output gradients would fill the memory


class Layers:
    """The layers of a stage. They are looked for in each step, for users change modules in between."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Layer, Callable[..., Tensor]]] = {}  # with its forward, by the module's id

    @contextmanager
    def replaced(
        self, stage: Any, losses: Sequence[nn.Module], others: Sequence[nn.Module], *, adds: bool
    ) -> Iterator[None]:
        """Within, the layers run as this file says. Compiled modules stay as they are.

        Args:
            stage, losses: modules whose layers are meant. What losses hold leaves nothing to W, nor does a layer that
                shares its weight with anything but a linear layer of the stage.
            others: further modules of the same rank.
            adds: whether layers may add to gradients themselves; else only those that may leave a product are replaced.
        """
        torch.clear_autocast_cache()  # casts in it hold nodes of weights, as a user who waits for a gradient does
        known, self._known = self._known, {}
        held: dict[int, bool] = {}
        roots = [root for root in (stage, *losses) if isinstance(root, nn.Module)]
        for root in roots:
            for place in _places(root, [m for m in (*roots, *others) if m is not root]):
                waits = place.waits and root is stage
                if not (waits or adds):
                    continue
                found = known.get(id(place.layer))
                if found is None or found[0].module is not place.layer:
                    layer = _KINDS[type(place.layer)](place.name, place.layer)
                    found = layer, layer.forward
                found[0].waits, found[0].adds, found[0].held = waits, place.adds, held
                self._known[id(place.layer)] = found
        for layer, forward in self._known.values():
            layer.module.__dict__["forward"] = forward  # no attribute of torch's: it would be looked at as a submodule
            if layer.module.weight.requires_grad:
                layer.is_hooked(layer.module.weight)  # now, for graphs of units hold nodes as well
        try:
            yield
        finally:
            for layer, _ in self._known.values():
                layer.module.__dict__.pop("forward", None)
                layer.forget()


class Place(NamedTuple):
    """A layer and its name in the stage."""

    name: str
    layer: Any
    waits: bool  # it may leave its product to W
    adds: bool  # it may add to the gradient itself


def deferrable(module: Any) -> list[nn.Linear]:
    """The linear layers that leave their weights' gradients to W where no other module has a part in them."""
    return [place.layer for place in _places(module, ()) if place.waits] if isinstance(module, nn.Module) else []


def _places(module: nn.Module, others: Sequence[nn.Module]) -> Iterator[Place]:
    shared: set[int] = set()  # parameters of other modules than linear layers, and those that a module's hook may read
    reduced: set[int] = set()  # parameters for whose gradients DDP or FSDP wait
    for root in (module, *others):
        for owner in root.modules():
            if not _is_plain(owner, nn.Linear) or root is not module:
                shared.update(map(id, owner._parameters.values()))
            if owner._backward_hooks or nn.modules.module._global_backward_hooks:
                shared.update(map(id, owner.parameters()))
            if is_reduced(owner):
                reduced.update(map(id, owner.parameters()))
    for name, layer in _uncompiled("", module):
        if any(_is_plain(layer, kind) for kind in _KINDS):
            weight: Any = layer._parameters["weight"]
            waits = (
                type(layer) is nn.Linear and id(weight) not in shared and weight.shape[0] <= _WIDEST * weight.shape[1]
            )
            yield Place(name, layer, waits, id(weight) not in reduced)


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """A subclass may compute something else, and so may an instance with a forward or a weight of its own."""
    return type(module) is kind and "forward" not in module.__dict__ and "weight" in module._parameters


def _uncompiled(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module and its parts, each with its name, but for what runs as compiled code."""
    if runs_compiled(module):
        return
    yield name, module
    for own, part in module._modules.items():
        if part is not None:
            yield from _uncompiled(f"{name}.{own}" if name else own, part)


_KINDS: dict[type[nn.Module], type[Layer]] = {nn.Linear: Linear, nn.Embedding: Embedding}
