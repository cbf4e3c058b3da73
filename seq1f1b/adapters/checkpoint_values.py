"""Values of a checkpoint as torch.distributed.checkpoint (DCP) sees them, and the index of one that it is loading."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load

__all__: list[str] = []

Path = tuple[str | int, ...]
Saved = Mapping[Path, tuple[tuple[int, ...], torch.dtype] | None]
"""Shape and dtype of each tensor of a checkpoint, by its path in the state; None for what is no tensor."""

_LOAD = inspect.unwrap(load).__code__


class OptimizerEntries(dict[str, Any]):
    """Entries of optimizers by name: a plain dict to whoever copies or pickles it.

    It is a ``Stateful`` of DCP, which therefore asks it again if a script gives DCP the state dict instead of the
    PipelineState.

    Args:
        made: the entries are those that a checkpoint has, and these tensors, by id, were made for them; None: they
            are those of the optimizers.
        make: entries and ``made`` for DCP's call that is going on; None: those that are here.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        made: dict[int, Tensor] | None,
        make: Callable[[object], tuple[dict[str, Any], dict[int, Tensor] | None]] | None = None,
    ) -> None:
        super().__init__(entries)
        self.made = made
        self._make = make

    def state_dict(self) -> dict[str, Any]:
        if self._make is None:
            return self
        entries, self.made = self._make(self)
        return entries

    def load_state_dict(self, entries: dict[str, Any]) -> None:
        self.clear()
        self.update(entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _frame_of_load() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _LOAD:
        frame = frame.f_back
    return frame


def is_loading() -> bool:
    """Whether DCP calls to load."""
    return _frame_of_load() is not None


def find_saved(holder: object, names: Iterable[str]) -> Saved | None:
    """Finds what the checkpoint that DCP is loading has below the state of a model with these names.

    DCP asks for a state to save and to fill by one call, ``state_dict()``, and tells it nothing. To save, a state must
    hold what there is; to load, what the checkpoint has. So the frames of the callers are searched for ``dcp.load``,
    whose parameters name the checkpoint.

    Args:
        holder: what DCP calls; it tells two states of one checkpoint apart.
    Returns:
        None: DCP is not loading, or nothing of this model.
    """
    frame = _frame_of_load()
    if frame is None:
        return None
    given = frame.f_locals
    try:
        metadata = (given["storage_reader"] or FileSystemReader(given["checkpoint_id"])).read_metadata()
    except Exception:
        return None  # DCP says what is wrong with it
    paths: dict[Path, str] = {path: name for name, path in (metadata.planner_data or {}).items()}
    roots = [
        path[:-1]
        for path in paths
        if path[-1] == "shapes" and all((*path[:-1], "model", name) in paths for name in names)
    ]
    own = [(key,) for key, value in given["state_dict"].items() if value is holder]
    root = next((root for root in roots if root in own), roots[0] if len(roots) == 1 else None)
    if root is None:
        return None
    found = {
        path[len(root) :]: metadata.state_dict_metadata[paths[path]] for path in paths if path[: len(root)] == root
    }
    return {
        path: (tuple(entry.size), entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        for path, entry in found.items()
    }


def value_at(entries: Any, path: Path) -> Any:
    """None where a path leads nowhere."""
    for key in path:
        if isinstance(entries, list) and isinstance(key, int) and key < len(entries):
            entries = entries[key]
        elif isinstance(entries, dict):
            entries = entries.get(key)
        else:
            return None
    return entries


def set_value(entries: Any, path: Path, value: Any) -> None:
    """Dicts and lists on the way are made."""
    for key, following in zip(path, (*path[1:], None), strict=True):
        made: Any = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(entries, list):
            assert isinstance(key, int)
            entries.extend([None] * (key + 1 - len(entries)))
        elif key not in entries:
            entries[key] = None
        if following is None or entries[key] is None:
            entries[key] = made
        entries = entries[key]


# -- what an optimizer may keep ----------------------------------------------------------------------------------------


class _Whole:
    """A container without tensors, which DCP would cut into entries and give back with texts for keys.

    A copy, as DCP makes one before it saves asynchronously, stays whole; a pickle is the plain container.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> _Whole:
        return _Whole(copy.deepcopy(self.value, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.value,)


def as_entry(value: Any, what: str) -> Any:
    """A value of an optimizer so that DCP gives it back as it is.

    Raises:
        ValueError: it holds tensors by keys that are no texts.
    """
    if not isinstance(value, (dict, list)):
        return value
    if not _has_tensor(value):
        return _Whole(value)
    if isinstance(value, list):
        return [as_entry(each, what) for each in value]
    if not all(isinstance(key, str) for key in value):
        raise ValueError(
            f"the optimizer keeps tensors under keys that are no texts, in {what}, which a checkpoint cannot hold: let "
            "its keys be str"
        )
    return {key: as_entry(each, what) for key, each in value.items()}


def as_kept(entry: Any) -> Any:
    """The value that the optimizer has for an entry that is no tensor."""
    return entry.value if isinstance(entry, _Whole) else entry


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, Tensor) or (isinstance(value, (list, tuple)) and any(map(_has_tensor, value)))


def taken_over(
    own: Any,
    value: Any,
    room: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    made: dict[int, Tensor] | None = None,
) -> Any:
    """A loaded value as the optimizer keeps it: in its own tensor, or apart from everybody else's.

    Args:
        room: makes a tensor for a value that has none yet; None: one as it came.
        made: tensors that nobody else has, by id; one that is taken is removed.
    """
    value = local(value)
    if isinstance(own, Tensor):
        if own.dim() == 0 and isinstance(value, (int, float)):
            return own.fill_(value)
        if isinstance(value, Tensor) and own.shape == value.shape:
            return own if value is own else own.copy_(value)
    if isinstance(value, Tensor):
        if made is not None and made.pop(id(value), None) is not None:
            return value
        return value.detach().clone() if room is None else room(tuple(value.shape), value.dtype).copy_(value)
    if isinstance(value, dict):
        return {key: taken_over(value_at(own, (key,)), each, room, made) for key, each in value.items()}
    if isinstance(value, list):
        return [taken_over(value_at(own, (i,)), each, room, made) for i, each in enumerate(value)]
    return copy.deepcopy(as_kept(value))


# -- rows of a larger tensor -------------------------------------------------------------------------------------------


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
