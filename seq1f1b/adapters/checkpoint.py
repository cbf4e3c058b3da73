"""The state of a pipeline as torch.distributed.checkpoint (DCP) saves and loads it, by the unsplit model's names."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.utils._pytree import tree_leaves

from seq1f1b.engine.engine import PipelineEngine

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
        self._tied = engine._pipeline.tied if isinstance(engine, PipelineEngine) else None
        self._optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._tensors: dict[str, list[Tensor]] = {}  # one, or copies of one
        self._names: dict[Tensor, str] = {}
        self._shards: dict[Tensor, tuple[int, int]] = {}  # first row, rows of the whole
        own: list[tuple[str, list[int], bool]] = []  # name, shape, and whether several stages may have it
        tied = self._tied.names() if self._tied is not None else {}
        for module in engine.modules():
            for part in module.modules():
                self._shards |= getattr(part, "row_shards", {})
            for name, tensor in module.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor) and tensor not in self._names:
                    name = self._names[tensor] = tied.get(id(tensor), name.replace("_orig_mod.", ""))  # torch.compile's
                    self._tensors.setdefault(name, []).append(tensor)
                    is_shared = id(tensor) in tied or tensor in self._shards or not isinstance(tensor, nn.Parameter)
                    own.append((name, list(self._as_saved(tensor, tensor).shape), is_shared))
        held: dict[str, tuple[int, list[int], bool]] = {}
        for rank, theirs in enumerate(engine.all_gather_object(own)):
            for name, shape, is_shared in theirs:
                if name not in held:
                    held[name] = rank, shape, is_shared
                elif not is_shared or held[name][1:] != (shape, True):
                    raise ValueError(
                        f"{name!r} is a parameter of a stage on rank {held[name][0]} and of one on rank {rank}: stages "
                        "keep the names of the whole model, and copies of one parameter are listed in tied_parameters"
                    )
        self._shapes = {name: shape for name, (_, shape, _) in held.items()}
        self._optimized()

    def _optimized(self) -> dict[str, list[tuple[Tensor, dict[str, Any], Any]]]:
        """Each parameter of the optimizers, and its copies, with their groups and the state of their optimizers."""
        found: dict[str, list[tuple[Tensor, dict[str, Any], Any]]] = {}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in self._names:
                        raise ValueError(
                            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is none of the "
                            "engine's: make it of engine.parameters(), after fully_shard"
                        )
                    found.setdefault(self._names[parameter], []).append((parameter, group, optimizer.state))
        return found

    def state_dict(self) -> dict[str, Any]:
        """The live tensors that DCP reads or fills (``model``, ``optimizer``) and the ``shapes`` of the whole model.

        Changes nothing. While DCP loads, ``optimizer`` has what the checkpoint has, in new tensors where the optimizer
        has none yet. Otherwise all ranks call it: copies of tied parameters are compared where training steps have run
        since the last time.

        Raises:
            ValueError: an optimizer holds state that could not be given back. Or copies of a tied parameter have come
                apart, so the checkpoint would hold one of several; on every rank.
        """
        optimizer = OptimizerEntries(self._live(), self._to_fill).state_dict(self)
        if self._tied is not None and not optimizer.is_filled:
            self._tied.compare()
        model = {name: self._as_saved(tensors[0], tensors[0].detach()) for name, tensors in self._tensors.items()}
        return {"model": model, "optimizer": optimizer, "shapes": json.dumps(self._shapes, sort_keys=True)}

    def _live(self) -> dict[str, Any]:
        """State and options of the optimizers by name."""
        live: dict[str, Any] = {}
        for name, ((parameter, group, state), *_) in self._optimized().items():
            for key, value in state.get(parameter, {}).items():
                live[f"state.{name}.{key}"] = self._as_saved(parameter, value, f"{key} of {name!r}")
            for key, value in group.items():
                if key != "params":
                    live[f"param_groups.{name}.{key}"] = self._as_saved(None, value, f"{key} of {name!r}")
        return live

    def _to_fill(self, saved: Saved) -> dict[str, Any]:
        """Entries of this rank's optimizers that a checkpoint has, in the live tensors where they fit."""
        live, optimized = self._live(), self._optimized()
        entries: dict[str, Any] = {}
        for path, stored in saved.items():
            kind, name, key = self._split(str(path[1])) if path[0] == "optimizer" else ("", "", "")
            if name not in optimized:
                continue
            value = None
            if isinstance(stored, TensorStorageMetadata):
                value = live.get(str(path[1])) if len(path) == 2 else None
                if not isinstance(value, Tensor) or value.shape != stored.size:
                    parameter, group, _ = optimized[name][0]
                    weight = saved.get(("model", name))
                    dtype = weight.properties.dtype if isinstance(weight, TensorStorageMetadata) else None
                    key = key if kind == "state" else ""
                    value = self._room(parameter, group, dtype, key, stored.size, stored.properties.dtype)
                    value = self._as_saved(parameter, value)
            set_element(entries, path[1:], value)
        # DCP tells by name which option of an optimizer the checkpoint lacks.
        options = {key: value for key, value in live.items() if key.startswith("param_groups.")}
        return options | entries

    def _room(
        self,
        parameter: Tensor,
        group: dict[str, Any],
        weight: torch.dtype | None,
        key: str,
        size: Sequence[int],
        dtype: torch.dtype,
    ) -> Tensor:
        """A tensor for an optimizer's state, where torch would put it.

        Args:
            weight: dtype of the parameter in the checkpoint.
        """
        if dtype == weight and size:  # as the parameter that it belongs to
            dtype = parameter.dtype
        if size in (parameter.shape, self._as_saved(parameter, parameter.detach()).shape):
            return torch.empty_like(parameter.detach(), dtype=dtype)
        if not size:
            stays = not key or (key == "step" and not (group.get("capturable") or group.get("fused")))
            return torch.empty((), dtype=dtype, device="cpu" if stays else parameter.device)
        return parameter.detach().new_empty(size, dtype=dtype)

    def _split(self, entry: str) -> tuple[str, str, str]:
        """Kind, parameter and key of an entry's name; a parameter's name has dots, too."""
        kind, _, rest = entry.partition(".")
        name = rest
        while name not in self._shapes and name:
            name = name.rpartition(".")[0]
        return kind, name, rest[len(name) + 1 :]

    def _as_saved(self, parameter: Tensor | None, value: Any, what: str = "") -> Any:
        """A parameter, or a value of its optimizer, so that DCP saves it once and gives it back as it is."""
        if isinstance(value, Tensor):
            if parameter not in self._shards or value.dim() == 0:
                return value
            if value.shape != parameter.shape:
                raise ValueError(
                    f"the optimizer keeps a tensor of shape {tuple(value.shape)} for rows of "
                    f"{self._names[parameter]!r}, of shape {tuple(parameter.shape)}, a shard of the vocabulary: it "
                    "belongs to these rows alone and cannot be saved for another number of ranks: give it an optimizer "
                    "whose state has the rows' shape"
                )
            return RowShard.of(value.detach(), *self._shards[parameter])
        if not isinstance(value, (dict, list)):
            return value
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            return Whole(value)
        if isinstance(value, list):
            return [self._as_saved(parameter, each, what) for each in value]
        if not all(isinstance(key, str) for key in value):
            raise ValueError(
                f"the optimizer keeps tensors under keys that are no texts, in {what}, which a checkpoint cannot hold: "
                "let its keys be str"
            )
        return {key: self._as_saved(parameter, each, what) for key, each in value.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what DCP has read.

        Raises:
            ValueError: the checkpoint belongs to another model, which has this one's parameters and more. (DCP itself
                raises before it reads anything if one is missing or has another shape.)
        """
        theirs = json.loads(state["shapes"])
        if theirs != self._shapes:
            differing = sorted(name for name in {*theirs, *self._shapes} if theirs.get(name) != self._shapes.get(name))
            raise ValueError(
                f"the checkpoint is of another model, of {len(theirs)} parameters and buffers, this one has "
                f"{len(self._shapes)}: {len(differing)} differ, first {differing[0]!r}"
            )
        for name, tensors in self._tensors.items():
            for tensor in tensors:
                tensor.copy_(local(state["model"][name]))
        optimized = self._optimized()
        for parameter, _, of_optimizer in chain.from_iterable(optimized.values()):
            of_optimizer.pop(parameter, None)
        for entry, value in state["optimizer"].items():
            kind, name, key = self._split(entry)
            is_own = getattr(state["optimizer"], "is_filled", False)  # nobody else has the tensors
            for parameter, group, of_optimizer in optimized.get(name, ()):
                weight = local(state["model"][name]).dtype
                room = partial(self._room, parameter, group, weight, key if kind == "state" else "")
                if kind == "state":
                    of_optimizer.setdefault(parameter, {})[key] = as_kept(value, None if is_own else room)
                elif isinstance(group.get(key), Tensor) and isinstance(value, (Tensor, int, float)):
                    group[key].copy_(torch.as_tensor(value, device=group[key].device))
                else:
                    group[key] = as_kept(value, None if is_own else room)
                is_own = False


def optimized(state: PipelineState) -> Callable[[str], bool]:
    """Whether an entry of a checkpoint's optimizer is of a parameter that an optimizer of this rank has."""
    names = state._optimized().keys()
    return lambda key: state._split(key)[1] in names


_LOAD = inspect.unwrap(load).__code__


Saved = Mapping[tuple[str | int, ...], STORAGE_TYPES]


def find_saved(holder: object) -> Saved | None:
    """Finds what the checkpoint that DCP is loading has of a state, by its path in that state.

    DCP asks for a state to save and to fill by one call, ``state_dict()``, and tells it nothing. To save, a state must
    hold what there is; to load, what the checkpoint has. So the frames of the callers are searched for ``dcp.load``,
    whose parameters name the checkpoint.

    Args:
        holder: what DCP calls; it tells two states of one checkpoint apart.
    Returns:
        None: DCP is not loading.
    Raises:
        ValueError: the checkpoint has several states, and none of them is the holder's own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _LOAD:
        frame = frame.f_back
    if frame is None:
        return None
    given = frame.f_locals
    try:
        metadata = given["storage_reader"].read_metadata()
    except Exception:  # DCP reads the same file next, and says what is wrong with it
        return {}
    paths = metadata.planner_data or {}
    is_part = isinstance(holder, OptimizerEntries)  # of a state dict that is given in whole
    roots = [() if is_part else (key,) for key, value in given["state_dict"].items() if value is holder]
    roots = roots or [path[:-1] for path in paths.values() if path[-1] == "shapes"]
    if len(roots) > 1:
        raise ValueError(f"the checkpoint has {len(roots)} states of pipelines, {roots}: {_REMEDY}")
    return {
        path[len(root) :]: metadata.state_dict_metadata[name]
        for root in roots
        for name, path in paths.items()
        if path[: len(root)] == root
    }


_REMEDY = 'give each PipelineState itself to DCP: dcp.load({"train": state}, checkpoint_id=folder)'


class OptimizerEntries(dict[str, Any]):
    """Entries of optimizers by name: a plain dict to whoever copies or pickles it.

    It is a ``Stateful`` of DCP. If a script gives DCP the state dict in place of the PipelineState, DCP asks this part
    of it again. Inside another dict DCP asks nothing and would fill what there is, which is an error.

    Args:
        to_fill: makes the entries that a checkpoint has, while DCP loads; None: these are such entries.
    """

    def __init__(self, entries: Mapping[str, Any], to_fill: Callable[[Saved], dict[str, Any]] | None = None) -> None:
        super().__init__(entries)
        self._to_fill = to_fill
        self.is_filled = to_fill is None

    def state_dict(self, holder: object = None) -> OptimizerEntries:
        """holder: what DCP calls, if not these entries."""
        saved = None if self._to_fill is None else find_saved(holder or self)
        return self if saved is None or self._to_fill is None else OptimizerEntries(self._to_fill(saved))

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        self.clear()
        self.update(entries)
        self.is_filled = True

    def __setitem__(self, key: str, value: Any) -> None:
        if not self.is_filled:
            raise ValueError(f"DCP would fill {key!r} without the state that only the checkpoint has: {_REMEDY}")
        super().__setitem__(key, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class Whole:
    """A container without tensors, which DCP would cut into entries and give back with texts for keys.

    A copy, as DCP makes one before it saves asynchronously, stays whole; a pickle is the plain container.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Whole:
        return Whole(copy.deepcopy(self.value, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.value,)


def as_kept(entry: Any, room: Callable[[torch.Size, torch.dtype], Tensor] | None = None) -> Any:
    """The value that the optimizer keeps for an entry.

    Args:
        room: makes the tensors into which those of the entry are copied; None: they are the optimizer's.
    """
    if isinstance(entry, Tensor):
        value: Tensor = local(entry)
        return value if room is None else room(value.shape, value.dtype).copy_(value)
    if isinstance(entry, dict):
        return {key: as_kept(each, room) for key, each in entry.items()}
    if isinstance(entry, list):
        return [as_kept(each, room) for each in entry]
    return copy.deepcopy(entry.value if isinstance(entry, Whole) else entry)


class RowShard(Tensor):
    """Rows of a larger tensor, by DCP's protocol for what is sharded; its shape is that of the whole."""

    _local: Tensor
    _first_row: int

    @staticmethod
    def of(local: Tensor, first_row: int, num_rows: int) -> RowShard:
        whole = torch.Size((num_rows, *local.shape[1:]))
        shard: RowShard = Tensor._make_wrapper_subclass(RowShard, whole, dtype=local.dtype, device=local.device)
        shard._local, shard._first_row = local, first_row
        return shard

    def _chunk(self) -> ChunkStorageMetadata:
        offsets = torch.Size((self._first_row, *(0 for _ in self._local.shape[1:])))
        return ChunkStorageMetadata(offsets, self._local.shape)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        chunk = self._chunk()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self._local), self.shape)
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._local

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a shard is for checkpoints only")


def local(value: Any) -> Any:
    return value._local if isinstance(value, RowShard) else value
