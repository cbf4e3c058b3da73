"""A count of where a step asks tensors for their values: on a GPU the host waits for all that runs there, each time."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Waits"]

aten = torch.ops.aten
OPS = {
    aten._local_scalar_dense, aten._unique2, aten.bincount, aten.equal, aten.masked_select, aten.nonzero,
    aten.unique_consecutive, aten.unique_dim,
}  # fmt: skip
METHODS = {getattr(Tensor, name) for name in ("cpu", "numpy", "tolist")}  # of a tensor of the host they call no op


class Waits(TorchDispatchMode):
    """Counts them on this thread: ``before`` the units of a step, ``within`` and ``after`` them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.names: list[str] = []
        self._methods = _Methods(self)

    def __enter__(self) -> Waits:
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._methods.__exit__(*error)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet, kwargs = op.overloadpacket, kwargs or {}
        masks = args[1] if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_) else ()
        is_counted = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in OPS or is_counted or any(mask is not None and not _is_index(mask) for mask in masks):
            self.note(str(op))
        return op(*args, **kwargs)

    def note(self, name: str) -> None:
        place, frame = "after", sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.endswith("seq1f1b/engine/step.py") and code.co_name in ("run", "fill", "prepare"):
                place = "before" if code.co_name == "prepare" else "within"
                break
            frame = frame.f_back  # type: ignore[assignment]  # None above the first call
        self.found[place] += 1
        self.names.append(f"{name} {place} the units")


class _Methods(TorchFunctionMode):
    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in METHODS:
            self._waits.note(function.__name__)
        return function(*args, **(kwargs or {}))


def _is_index(given: Tensor) -> bool:
    return given.dtype not in (torch.bool, torch.uint8)
