"""Bytes that autograd keeps for a backward, measured while a forward runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []


@dataclass(frozen=True)
class Activations:
    """Bytes that the units of one stage held in a step: for each token, and at the peak of each kind.

    Attributes:
        saved: by graphs, from F to the end of B, or of I.
        kept: of these, the inputs of layers that W reads, where the backward is split.
        gradients: what else I leaves to W: gradients of layers' outputs, and inputs that a recomputation made.
        head: by the graph of a head within the loss, which is gone at the end of its F.
        peak_saved: most of ``saved``, of ``kept`` after I, and of ``head``, at once.
    """

    saved: float
    kept: float
    gradients: float
    head: float
    peak_saved: int
    peak_gradients: int


class SavedBytes:
    """Counts the storages that the graph built inside saves, each once; parameters and given tensors do not count.

    A compiled module keeps its own account of what it saves and traces again under hooks: do not measure those.
    """

    def __init__(self, modules: Iterable[nn.Module], excluded: Iterable[Any]) -> None:
        known = [t for t in excluded if isinstance(t, Tensor)]
        for module in modules:
            known += [*module.parameters(), *module.buffers()]
        self._seen = {_storage(t).data_ptr() for t in known}
        self.bytes = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def count(self, tensor: Tensor) -> Tensor:
        """Counts its storage. Returns what the graph may keep: an output, kept as it is, would keep its own graph."""
        storage = _storage(tensor)
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor.detach()

    def pack(self, tensor: Tensor) -> Any:
        """What the graph keeps in place of the tensor."""
        return self.count(tensor), tensor._version

    def unpack(self, kept: Any) -> Tensor:
        """The tensor, for a backward. Under hooks torch does not look whether it has been changed in place."""
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}"
            )
        return tensor  # type: ignore[no-any-return]

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """The tensor's storage; for a DTensor, that of its own shard."""
    local = getattr(tensor, "_local_tensor", tensor)
    storage: torch.UntypedStorage = local.untyped_storage()
    return storage


def is_compiled(module: nn.Module) -> bool:
    """Whether the module or a part of it runs as compiled code: as a module, or by a method that was compiled."""
    return any(
        hasattr(part, "_orig_mod")
        or part._compiled_call_impl is not None
        or any(hasattr(value, "_torchdynamo_orig_callable") for value in (type(part).forward, *vars(part).values()))
        for part in module.modules()
    )
