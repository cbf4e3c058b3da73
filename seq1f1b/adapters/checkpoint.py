"""Saves and loads a pipeline's state through torch.distributed.checkpoint (DCP), under the unsplit model's names."""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
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
    """Weights and optimizer state of this rank's stages, under the parameter names of the unsplit model.

    Every rank calls ``dcp.save({"train": state}, checkpoint_id=folder)`` or ``dcp.load`` with equal arguments; DCP
    treats the object as a ``Stateful``. The loading run may have another number of ranks, stages per rank or replicas,
    with or without DDP and FSDP2: DCP writes tensors shared by replicas once, and cuts shards anew. The optimizer's
    entries are named as by torch's ``get_optimizer_state_dict`` with ``flatten_optimizer_state_dict=True``, so a script
    without this package can read the checkpoint.

    Saving changes neither parameters nor optimizer nor random state. A parameter without optimizer state, for example
    before the first step, has no entry. Loading replaces the optimizer's state by the state in the checkpoint: a
    parameter without state there ends up without state. Loading never runs an optimizer step.

    Copies listed in ``tied_parameters`` are one entry, under their common name. The shards of a
    :class:`seq1f1b.VocabularyParallelHead` are also one entry, the whole weight.

    Args:
        engine: owner of the saved parameters and persistent buffers: all stages, and a loss that contains the head.
            All ranks of the pipeline make the object together.
        optimizers: one or several over parameters of this rank; without any, only weights are saved.
    Raises:
        ValueError: two parameters have one name and are not tied, so one would be lost; or an optimizer holds a
            parameter outside of the engine.
    """

    def __init__(
        self, engine: PipelineEngine, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        # A stand-in for an engine, for example in examples/compare.py, has no ties.
        self._tied = engine._pipeline.tied if isinstance(engine, PipelineEngine) else None
        self._optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._tensors: dict[str, list[Tensor]] = {}  # name -> the tensor, or all copies of a tied one
        self._names: dict[Tensor, str] = {}
        self._shards: dict[Tensor, tuple[int, int]] = {}  # shard -> first row, number of rows of the whole
        own: list[tuple[str, list[int], bool]] = []  # name, shape, whether several stages may hold the tensor
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
        """Returns (parameter, group, optimizer state) for each copy of each optimized parameter, by name."""
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
        """Returns the live tensors for DCP (``model``, ``optimizer``) and the ``shapes`` of the whole model.

        Changes nothing. During a load, ``optimizer`` has the checkpoint's entries, with new tensors for state that the
        optimizer does not have yet. To save, all ranks call the method together: if training steps have run since the
        last call, the ranks compare the copies of tied parameters.

        Raises:
            ValueError: an optimizer holds state that loading could not restore. On every rank: copies of a tied
                parameter have different values, and the checkpoint would hold only one.
        """
        optimizer = OptimizerEntries(self)
        if self._tied is not None and not optimizer.is_filled:
            self._tied.compare()
        model = {name: self._as_saved(tensors[0], tensors[0].detach()) for name, tensors in self._tensors.items()}
        return {"model": model, "optimizer": optimizer, "shapes": json.dumps(self._shapes, sort_keys=True)}

    def _live(self) -> dict[str, Any]:
        """Returns the optimizers' own tensors and options by DCP's names; of a tied parameter, the first copy's."""
        live: dict[str, Any] = {}
        for name, ((parameter, group, state), *_) in self._optimized().items():
            for key, value in state.get(parameter, {}).items():
                live[f"state.{name}.{key}"] = self._as_saved(parameter, value)
            for key, value in group.items():
                if key != "params":
                    live[f"param_groups.{name}.{key}"] = self._as_saved(None, value)
        return live

    def _to_fill(self, saved: Saved) -> dict[str, Any]:
        """Returns a checkpoint's entries for this rank's optimizers: live tensors if shapes agree, else new tensors."""
        live, optimized = self._live(), self._optimized()
        entries: dict[str, Any] = {}
        for path, stored in saved.items():
            kind, name, key = self._parse(str(path[1])) if path[0] == "optimizer" else ("", "", "")
            if name not in optimized:
                continue
            value = None
            if isinstance(stored, TensorStorageMetadata):
                value = live.get(str(path[1])) if len(path) == 2 else None
                if not isinstance(value, Tensor) or value.shape != stored.size:
                    parameter, group, _ = optimized[name][0]
                    weight = saved.get(("model", name))
                    dtype = stored.properties.dtype
                    if isinstance(weight, TensorStorageMetadata) and dtype == weight.properties.dtype and stored.size:
                        dtype = parameter.dtype  # state in the weight's dtype follows the live weight
                    value = parameter.detach()
                    if stored.size in (value.shape, self._as_saved(parameter, value).shape):
                        value = torch.empty_like(value, dtype=dtype)
                    else:
                        device = device_of(parameter, group, kind, key) if not stored.size else value.device
                        value = value.new_empty(stored.size, dtype=dtype, device=device)
                    value = self._as_saved(parameter, value)
            set_element(entries, path[1:], value)
        # With live options included, DCP raises an error that names an option missing in the checkpoint.
        return {key: value for key, value in live.items() if key.startswith("param_groups.")} | entries

    def _parse(self, entry: str) -> tuple[str, str, str]:
        """Splits an entry's name into kind, parameter and key; a parameter's name contains dots."""
        kind, _, rest = entry.partition(".")
        name = rest
        while name not in self._shapes and name:
            name = name.rpartition(".")[0]
        return kind, name, rest[len(name) + 1 :]

    def _as_saved(self, parameter: Tensor | None, value: Any) -> Any:
        """Wraps a parameter, or a value of an optimizer, so that DCP saves the value once and loads an equal value."""
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
            return WholeContainer(value)
        if isinstance(value, list):
            return [self._as_saved(parameter, each) for each in value]
        if not all(isinstance(key, str) for key in value):
            raise ValueError(
                f"the optimizer keeps tensors in a dict with keys {list(value)}, and checkpoints hold str keys: use str"
            )
        return {key: self._as_saved(parameter, each) for key, each in value.items()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies the entries read by DCP into the stages and optimizers.

        Raises:
            ValueError: the checkpoint belongs to a larger model that contains all parameters of this one. (For a
                parameter that is missing or has another shape, DCP raises an error before reading.)
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
        optimized, entries = self._optimized(), state["optimizer"]
        for parameter, _, of_optimizer in chain.from_iterable(optimized.values()):
            of_optimizer.pop(parameter, None)
        for entry, value in entries.items():
            kind, name, key = self._parse(entry)
            is_own = getattr(entries, "is_filled", False)  # the first copy keeps the tensors that DCP has filled
            for parameter, group, of_optimizer in optimized.get(name, ()):
                to = of_optimizer.setdefault(parameter, {}) if kind == "state" else group
                if kind != "state" and isinstance(to.get(key), Tensor) and isinstance(value, (Tensor, int, float)):
                    to[key].copy_(torch.as_tensor(value, device=to[key].device))
                else:
                    devices = device_of(parameter, group, kind, key), parameter.device
                    to[key] = as_kept(value, None if is_own else devices)
                is_own = False


def device_of(parameter: Tensor, group: dict[str, Any], kind: str, key: str) -> torch.device:
    """Returns torch's device for a number: the CPU for options and the count of steps, unless kernels read them."""
    stays = kind != "state" or (key == "step" and not (group.get("capturable") or group.get("fused")))
    return torch.device("cpu") if stays else parameter.device


_LOAD = inspect.unwrap(load).__code__
Saved = Mapping[tuple[str | int, ...], STORAGE_TYPES]


def find_saved(state: PipelineState) -> Saved | None:
    """Returns the metadata of a state's entries in the checkpoint that DCP is loading, keyed by path in the state.

    DCP calls ``state_dict()`` without arguments, both to save and to load. To save, the state must list the live
    entries; to load, the checkpoint's entries. So the function searches the callers' frames for ``dcp.load`` and reads
    the checkpoint from the frame's variables.

    Returns:
        None outside of a load.
    Raises:
        ValueError: the checkpoint has several states, and DCP was not given the state itself.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _LOAD:
        frame = frame.f_back
    if frame is None:
        return None
    given = frame.f_locals
    try:
        metadata = given["storage_reader"].read_metadata()
    except Exception:  # DCP reads the file next, and raises an error that explains the problem
        return {}
    paths = metadata.planner_data or {}
    roots: list[Any] = [(key,) for key, value in given["state_dict"].items() if value is state]
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
    """Entries of optimizers by name: live ones, during a load the checkpoint's. A copy or pickle is a plain dict.

    If a script gives DCP the state dict in place of the PipelineState, DCP takes this part for a ``Stateful`` and calls
    ``state_dict`` again. Inside another dict, DCP would fill live entries without a call; filling raises an error then.
    """

    def __init__(self, state: PipelineState) -> None:
        saved = find_saved(state)
        super().__init__(state._live() if saved is None else state._to_fill(saved))
        self._state, self.is_filled = state, saved is not None

    def state_dict(self) -> OptimizerEntries:
        return OptimizerEntries(self._state)

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


class WholeContainer:
    """A container without tensors, saved as one entry; otherwise DCP would split the container and turn keys into text.

    A deep copy, made by DCP before an asynchronous save, stays wrapped; a pickle is the plain container.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeContainer:
        return WholeContainer(copy.deepcopy(self.value, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.value,)


def as_kept(entry: Any, devices: tuple[torch.device, torch.device] | None = None) -> Any:
    """Returns the optimizer's value for an entry.

    Args:
        devices: of numbers and of larger tensors, which are copied; None: the entry's tensors are kept.
    """
    if isinstance(entry, Tensor):
        value: Tensor = local(entry)
        return value if devices is None else value.to(devices[value.dim() > 0], copy=True)
    if isinstance(entry, dict):
        return {key: as_kept(each, devices) for key, each in entry.items()}
    if isinstance(entry, list):
        return [as_kept(each, devices) for each in entry]
    return copy.deepcopy(entry.value if isinstance(entry, WholeContainer) else entry)


class RowShard(Tensor):
    """Rows of a larger tensor, in DCP's protocol for shards; the shape is the whole tensor's."""

    _local: Tensor
    _first_row: int

    @staticmethod
    def of(local: Tensor, first_row: int, num_rows: int) -> RowShard:
        whole = torch.Size((num_rows, *local.shape[1:]))
        shard: RowShard = Tensor._make_wrapper_subclass(RowShard, whole, dtype=local.dtype, device=local.device)
        shard._local, shard._first_row = local, first_row
        return shard

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        offsets = torch.Size((self._first_row, *(0 for _ in self._local.shape[1:])))
        return [ChunkStorageMetadata(offsets, self._local.shape)]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(self._local), self.shape)
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self._local

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func}: a shard is for checkpoints only")


def local(value: Any) -> Any:
    return value._local if isinstance(value, RowShard) else value
