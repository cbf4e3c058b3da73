"""What torch.distributed.checkpoint (DCP) saves and loads of a pipeline, under the names of the unsplit model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from seq1f1b.runtime.engine import PipelineEngine

__all__ = ["PipelineState"]


class PipelineState:
    """Weights and optimizer state of this rank's stages, by the parameter names of the unsplit model.

    It is a ``Stateful`` of DCP. Every rank calls ``dcp.save({"train": state}, checkpoint_id=folder)``, and ``dcp.load``
    the same way. The number of ranks, stages per rank and replicas may differ between the two, and so may DDP and
    FSDP2: DCP writes once what replicas share, and cuts shards anew. The optimizer's entries have the names that
    torch's ``get_optimizer_state_dict`` gives with ``flatten_optimizer_state_dict=True``, so a script without this
    package can read the checkpoint as well.

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
        self._optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
        self._tensors: dict[str, list[Tensor]] = {}  # one, or copies of one
        self._names: dict[Tensor, str] = {}
        self._shards: dict[Tensor, tuple[int, int]] = {}  # first row, rows of the whole
        own: list[tuple[str, str, tuple[int, ...]]] = []
        for module in engine.modules():
            tied = {p: name for part in module.modules() for name, p in getattr(part, "tied_parameters", {}).items()}
            for part in module.modules():
                self._shards |= getattr(part, "row_shards", {})
            for kind, name, tensor in _tensors_of(module):
                if tensor not in self._names:
                    if tensor in tied:
                        kind, name = "tied", tied[tensor]
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
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in self._names:
                        raise ValueError(
                            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is none of the "
                            "engine's: make it of engine.parameters(), after fully_shard"
                        )
        self._model = json.dumps(shapes, sort_keys=True)

    def state_dict(self) -> dict[str, Any]:
        """The live tensors that DCP reads or fills (``model``, ``optimizer``) and the ``shapes`` of the whole model."""
        model = {name: self._as_saved(tensors[0], tensors[0].detach()) for name, tensors in self._tensors.items()}
        optimizer: dict[str, Any] = {}
        for each in self._optimizers:
            _initialise(each)
            for group in each.param_groups:
                for parameter in group["params"]:
                    name = self._names[parameter]
                    if parameter is self._tensors[name][0]:
                        state = each.state.get(parameter, {})
                        optimizer.update(
                            {f"state.{name}.{key}": self._as_saved(parameter, value) for key, value in state.items()}
                        )
                        options = {key: value for key, value in group.items() if key != "params"}
                        optimizer.update({f"param_groups.{name}.{key}": value for key, value in options.items()})
        return {"model": model, "optimizer": optimizer, "shapes": self._model}

    def _as_saved(self, parameter: Tensor, value: Any) -> Any:
        """A parameter, or a tensor of its optimizer state, as DCP is to see it."""
        if parameter not in self._shards or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        return _RowShard.of(value.detach(), *self._shards[parameter])

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what DCP has read.

        Raises:
            ValueError: the checkpoint belongs to another model, which has this one's parameters and more. (DCP itself
                raises before it reads anything if one is missing or has another shape.)
        """
        theirs, ours = json.loads(state["shapes"]), json.loads(self._model)
        if theirs != ours:
            differing = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
            raise ValueError(
                f"the checkpoint is of another model, of {len(theirs)} parameters and buffers, this one has "
                f"{len(ours)}: {len(differing)} differ, first {differing[0]!r}"
            )
        for name, tensors in self._tensors.items():
            for tensor in tensors:
                tensor.copy_(_local(state["model"][name]))
        for optimizer in self._optimizers:
            _initialise(optimizer)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name, own = self._names[parameter], optimizer.state.get(parameter, {})
                    for key, value in own.items():
                        loaded = state["optimizer"][f"state.{name}.{key}"]
                        own[key] = value.copy_(_local(loaded)) if isinstance(value, Tensor) else loaded
                    for key in group.keys() - {"params"}:
                        group[key] = state["optimizer"][f"param_groups.{name}.{key}"]


class _RowShard(Tensor):
    """Rows of a larger tensor, by DCP's protocol for what is sharded; its shape is that of the whole."""

    _local: Tensor
    _first_row: int

    @staticmethod
    def of(local: Tensor, first_row: int, num_rows: int) -> _RowShard:
        whole = torch.Size((num_rows, *local.shape[1:]))
        shard: _RowShard = Tensor._make_wrapper_subclass(_RowShard, whole, dtype=local.dtype, device=local.device)
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


def _local(value: Tensor) -> Tensor:
    return value._local if isinstance(value, _RowShard) else value


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Kind, name and tensor of what a state dict holds; torch.compile adds to the names."""
    for name, parameter in module.named_parameters():
        yield "parameter", name.replace("_orig_mod.", ""), parameter
    for path, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield "buffer", f"{path}.{name}".removeprefix(".").replace("_orig_mod.", ""), buffer


@torch.no_grad()
def _initialise(optimizer: torch.optim.Optimizer) -> None:
    """Parameters that never had a gradient get the state of a first step, all zero: there is something to fill."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    new = [p for p in parameters if p.requires_grad and p not in optimizer.state]
    if not new:
        return
    gradients = [p.grad for p in parameters]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = None
    for parameter in new:
        parameter.grad = torch.zeros_like(parameter)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
    optimizer.step()
    for parameter in new:
        state = optimizer.state[parameter]
        if "step" in state:
            state["step"] = torch.zeros_like(state["step"]) if isinstance(state["step"], Tensor) else 0
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if rate is not None:
            group["lr"] = rate
