"""The state of a pipeline as torch.distributed.checkpoint (DCP) saves and loads it, by the unsplit model's names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.adapters.checkpoint_values import (
    OptimizerEntries,
    Path,
    RowShard,
    Saved,
    as_entry,
    find_saved,
    is_loading,
    local,
    set_value,
    taken_over,
    value_at,
)
from seq1f1b.runtime.engine import PipelineEngine
from seq1f1b.runtime.tied import ties_of

__all__ = ["PipelineState"]


class PipelineState:
    """Weights and optimizer state of this rank's stages, by the parameter names of the unsplit model.

    It is a ``Stateful`` of DCP. Every rank calls ``dcp.save({"train": state}, checkpoint_id=folder)``, and ``dcp.load``
    the same way. The number of ranks, stages per rank and replicas may differ between the two, and so may DDP and
    FSDP2: DCP writes once what replicas share, and cuts shards anew. The optimizer's entries have the names that
    torch's ``get_optimizer_state_dict`` gives with ``flatten_optimizer_state_dict=True``, so a script without this
    package can read the checkpoint as well.

    Saving reads only: parameters, optimizer and random state stay as they are. What the optimizer has no state for, as
    before its first step, is saved without. Loading replaces the optimizer's state by what the checkpoint holds: a
    parameter that has none there has none afterwards, and no step is taken to make any.

    Parameters listed in ``tied_parameters`` are one entry, under the name that their copies have in common. The shards
    of a :class:`seq1f1b.VocabularyParallelHead` are one entry, too, the whole weight.

    Args:
        engine: the parameters and persistent buffers of its stages are saved, and those of a loss that contains the
            head. All ranks of the pipeline make the object together.
        optimizers: one or several over parameters of this rank; without any, only weights are saved.
    Raises:
        ValueError: two parameters have one name and are not tied, so one would be lost; or an optimizer holds a
            parameter that does not belong to the engine.
    """

    def __init__(
        self, engine: PipelineEngine, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        # What stands in for an engine, as in examples/compare.py, has no ties.
        self._tied = ties_of(engine) if isinstance(engine, PipelineEngine) else None
        self._optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._tensors: dict[str, list[Tensor]] = {}  # one, or copies of one
        self._names: dict[Tensor, str] = {}
        self._shards: dict[Tensor, tuple[int, int]] = {}  # first row, rows of the whole
        own: list[tuple[str, str, tuple[int, ...]]] = []
        tied = self._tied.names() if self._tied is not None else {}
        for module in engine.modules():
            for part in module.modules():
                self._shards |= getattr(part, "row_shards", {})
            for kind, name, tensor in _tensors_of(module):
                if tensor not in self._names:
                    if id(tensor) in tied:
                        kind, name = "tied", tied[id(tensor)]
                    if tensor in self._shards:
                        kind = "shard"
                    self._names[tensor] = name
                    self._tensors.setdefault(name, []).append(tensor)
                    own.append((kind, name, tuple(self._as_saved(tensor, tensor).shape)))
        held: dict[str, tuple[int, str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rank, theirs in enumerate(engine.all_gather_object(own)):
            for kind, name, shape in theirs:
                first, first_kind = held.setdefault(name, (rank, kind))
                is_again = name in shapes
                if shapes.setdefault(name, shape) != shape or (is_again and "parameter" in (kind, first_kind)):
                    raise ValueError(
                        f"{name!r} is a parameter of a stage on rank {first} and of one on rank {rank}: stages keep "
                        "the names of the whole model, and copies of one parameter are listed in tied_parameters"
                    )
        for parameter, _, _ in self._optimized():
            if parameter not in self._names:
                raise ValueError(
                    f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is none of the engine's: "
                    "make it of engine.parameters(), after fully_shard"
                )
        self._shapes = {name: list(shape) for name, shape in shapes.items()}

    def _optimized(self) -> Iterator[tuple[Tensor, dict[str, Any], Any]]:
        """Every parameter of the optimizers, with its group and the state of its optimizer."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, group, optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """The live tensors that DCP reads or fills (``model``, ``optimizer``) and the ``shapes`` of the whole model.

        Changes nothing. While DCP loads, ``optimizer`` has what the checkpoint has, in new tensors where the optimizer
        has none yet. Otherwise all ranks call it: copies of tied parameters are compared where training steps have run
        since the last time.

        Raises:
            ValueError: an optimizer holds state that could not be given back. Or copies of a tied parameter have come
                apart, so the checkpoint would hold one of several; on every rank.
        """
        if self._tied is not None and not is_loading():
            self._tied.compare()
        model = {name: self._as_saved(tensors[0], tensors[0].detach()) for name, tensors in self._tensors.items()}
        has_state = any(state for optimizer in self._optimizers for state in optimizer.state.values())
        shapes = {"shapes": self._shapes, "has_optimizer_state": has_state}
        optimizer = OptimizerEntries(*self._entries(self), self._entries)
        return {"model": model, "optimizer": optimizer, "shapes": json.dumps(shapes, sort_keys=True)}

    def _entries(self, holder: object) -> tuple[dict[str, Any], dict[int, Tensor] | None]:
        """State and options of the optimizers by name; or those of a checkpoint that DCP loads, and the new tensors."""
        live: dict[str, Any] = {}
        named: dict[str, tuple[Tensor, dict[str, Any]]] = {}
        for parameter, group, state in self._optimized():
            name = self._names[parameter]
            if name in named:  # another copy
                continue
            named[name] = parameter, group
            for key, value in state.get(parameter, {}).items():
                live[f"state.{name}.{key}"] = as_entry(self._as_saved(parameter, value), f"{key} of {name!r}")
            for key, value in group.items():
                if key != "params":
                    live[f"param_groups.{name}.{key}"] = as_entry(value, f"{key} of {name!r}")
        saved = find_saved(holder, self._tensors) if self._optimizers else None
        return (live, None) if saved is None else self._to_fill(saved, live, named)

    def _to_fill(
        self, saved: Saved, live: dict[str, Any], named: dict[str, tuple[Tensor, dict[str, Any]]]
    ) -> tuple[dict[str, Any], dict[int, Tensor]]:
        """Entries of the parameters' names that a checkpoint has, in the live tensors where they fit."""
        wanted: list[tuple[Path, str, str]] = []
        for path in saved:
            if path[0] == "optimizer":
                kind, name, key = self._split(str(path[1]))
                if name in named:
                    wanted.append((path, name, key if kind == "state" else ""))
        held = {path[1] for path, _, _ in wanted}
        # DCP tells by name which option of an optimizer the checkpoint lacks.
        entries = {key: value for key, value in live.items() if key.startswith("param_groups.") and key not in held}
        made: dict[int, Tensor] = {}
        for path, name, key in wanted:
            own, tensor = value_at(live, path[1:]), saved[path]
            if tensor is not None and not (isinstance(own, Tensor) and own.shape == tensor[0]):
                weight = saved.get(("model", name))
                own = self._room(*named[name], key, *tensor, None if weight is None else weight[1])
                own = self._as_saved(named[name][0], own)
                made[id(local(own))] = local(own)
            set_value(entries, path[1:], None if tensor is None else own)
        return entries, made

    def _room(
        self,
        parameter: Tensor,
        group: dict[str, Any],
        key: str,
        size: tuple[int, ...],
        dtype: torch.dtype,
        weight: torch.dtype | None,
    ) -> Tensor:
        """A tensor for an optimizer's state, where torch would put it."""
        if dtype == weight and size != ():  # as the parameter that it belongs to
            dtype = parameter.dtype
        if size in (parameter.shape, self._as_saved(parameter, parameter.detach()).shape):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        if size == ():
            stays = not key or (key == "step" and not (group.get("capturable") or group.get("fused")))
            return torch.empty((), dtype=dtype, device="cpu" if stays else parameter.device)
        return parameter.detach().new_empty(size, dtype=dtype)

    def _split(self, key: str) -> tuple[str, str, str]:
        """Kind, parameter and key of an entry's name; a parameter's name has dots, too."""
        kind, _, rest = key.partition(".")
        name = rest
        while name not in self._shapes and name:
            name = name.rpartition(".")[0]
        return kind, name, rest[len(name) + 1 :]

    def _as_saved(self, parameter: Tensor, value: Any) -> Any:
        """A parameter, or a tensor of its optimizer state, as DCP is to see it."""
        if parameter not in self._shards or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        if value.shape != parameter.shape:
            raise ValueError(
                f"the optimizer keeps a tensor of shape {tuple(value.shape)} for rows of {self._names[parameter]!r}, "
                f"of shape {tuple(parameter.shape)}, a shard of the vocabulary: it belongs to these rows alone and "
                "cannot be saved for another number of ranks: give it an optimizer whose state has the rows' shape"
            )
        return RowShard.of(value.detach(), *self._shards[parameter])

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what DCP has read.

        Raises:
            ValueError: the checkpoint belongs to another model, which has this one's parameters and more. (DCP itself
                raises before it reads anything if one is missing or has another shape.) Or it has state of an
                optimizer that DCP was not asked for.
        """
        theirs, has_state = _read_shapes(state["shapes"])
        if theirs != self._shapes:
            differing = sorted(name for name in {*theirs, *self._shapes} if theirs.get(name) != self._shapes.get(name))
            raise ValueError(
                f"the checkpoint is of another model, of {len(theirs)} parameters and buffers, this one has "
                f"{len(self._shapes)}: {len(differing)} differ, first {differing[0]!r}"
            )
        loaded: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
        for entry, value in state["optimizer"].items():
            kind, name, key = self._split(entry)
            loaded[kind].setdefault(name, {})[key] = value
        made: dict[int, Tensor] | None = getattr(state["optimizer"], "made", None)
        if made is None:
            self._check_asked(loaded["state"], has_state)
        for name, tensors in self._tensors.items():
            for tensor in tensors:
                tensor.copy_(local(state["model"][name]))
        for parameter, group, of_optimizer in self._optimized():
            name = self._names[parameter]
            weight = local(state["model"][name]).dtype
            found, own = loaded["state"].get(name, {}), of_optimizer.pop(parameter, {})
            if found:
                room = partial(self._room, parameter, group, weight=weight)
                taken = {key: taken_over(own.get(key), value, partial(room, key), made) for key, value in found.items()}
                own.clear()
                own.update(taken)
                of_optimizer[parameter] = own
            for key, value in loaded["param_groups"].get(name, {}).items():
                group[key] = taken_over(group.get(key), value)

    def _check_asked(self, state: dict[str, Any], has_state: bool | None) -> None:
        """Whether DCP was asked for the optimizer's state; it was not if nobody told what the checkpoint has."""
        trained = {self._names[parameter] for parameter, _, _ in self._optimized() if parameter.requires_grad}
        if not trained or not trained.isdisjoint(state) or has_state is False:
            return
        has = (
            "the checkpoint has state of the optimizer"
            if has_state
            else "no state of the optimizer was read: if any is there"
        )
        raise ValueError(
            f"{has}, which DCP was not asked for: give the PipelineState itself to DCP: "
            'dcp.load({"train": state}, checkpoint_id=folder)'
        )


def optimized(state: PipelineState) -> Callable[[str], bool]:
    """Whether an entry of a checkpoint's optimizer is of a parameter that an optimizer of this rank has."""
    names = {state._names[parameter] for parameter, _, _ in state._optimized()}
    return lambda key: state._split(key)[1] in names


def _read_shapes(text: str) -> tuple[dict[str, list[int]], bool | None]:
    """Shapes of the whole model, and whether the optimizer had state; an older checkpoint does not say."""
    read = json.loads(text)
    return (read["shapes"], read["has_optimizer_state"]) if isinstance(read.get("shapes"), dict) else (read, None)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of what a state dict holds; torch.compile adds to the names."""
    for name, parameter in module.named_parameters():
        yield "parameter", name.replace("_orig_mod.", ""), parameter
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield "buffer", f"{path}.{name}".removeprefix(".").replace("_orig_mod.", ""), buffer
