"""Values of a checkpoint as torch.distributed.checkpoint (DCP) sees them, and the index of one that it is loading."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load

__all__: list[str] = []

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
    except Exception:
        return {}  # DCP says what is wrong with it
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
