"""Notes on a stage's calls of torch and of this package in one segment. Values show an error, and the notes its cause.

A :class:`Watch` recognizes tokens by the size of a dimension. A comparison by values chooses a number of tokens unlike
all sizes of the stage. A unit of a step has a given number: if a weight has the same size, nothing is noted.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seq1f1b.nested import tensors_of

__all__: list[str] = []

_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_TOKENS = {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}  # token dimension, where it is fixed
_SHARED_DROPOUTS = ("feature_dropout", "dropout1d", "dropout2d", "dropout3d")


class Watch(TorchFunctionMode):
    """Notes on the operations of one stage in one segment.

    Args:
        rows: rows of the batch.
        offset, length: begin and length of the segment, in tokens.
        sizes: sizes of dimensions without tokens.
    Attributes:
        noted: calls of this package: "attends" for causal_attention, "carries" for carry_in and carry_out.
        foreign: the last attention on the segment alone by code other than this package's, in words; "" if none.
        dropout: name of a called dropout with one random number for all tokens; "" if none.
        eps: eps of the narrowest dtype of a result; 0 if all results are float64.
    """

    def __init__(self, rows: int, offset: int, length: int, sizes: set[int]) -> None:
        super().__init__()
        self._rows, self._length, self._end = rows, length, offset + length
        self._decides = length > 1 and length != rows and not {length, self._end} & sizes
        self.noted: set[str] = set()
        self.foreign = self.dropout = ""
        self.eps = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.eps = max([self.eps, *(_EPS.get(t.dtype, 0.0) for t in tensors_of(result))])
        with suppress(Exception):  # a call may have an unknown form, and a check must not end a correct step
            self._look(func, args, kwargs)
        return result

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        name, given = func.__name__.partition(".")[0].strip("_"), [*args, *kwargs.values()]
        if name in ("softmax", "log_softmax"):
            scores, dim = given[0], args[1] if len(args) > 1 else kwargs.get("dim", -1)
            others = [other for other in range(1, scores.dim()) if other != dim % scores.dim()]
            if self._is_tokens(scores, dim, of_keys=True) and any(self._is_tokens(scores, other) for other in others):
                self.foreign = f"takes a {name} over scores of tokens by tokens"
        elif ("attention" in name or "flash_attn" in name) and getattr(func, "namespace", "") != "seq1f1b":
            query, key = given[:2]
            dims = [_TOKENS[name]] if name in _TOKENS else range(min(query.dim(), key.dim()))
            if any(self._is_tokens(query, dim) and self._is_tokens(key, dim, of_keys=True) for dim in dims):
                self.foreign = f"calls {name}"
        elif name in _SHARED_DROPOUTS and any(self._is_tokens(given[0], dim) for dim in range(2, given[0].dim())):
            self.dropout = name

    def _is_tokens(self, tensor: Tensor, dim: int, *, of_keys: bool = False) -> bool:
        """Returns whether a dimension holds the segment's tokens; with ``of_keys``, also the keys so far."""
        if not self._decides or not -tensor.dim() <= dim < tensor.dim():
            return False
        dim %= tensor.dim()
        if tensor.dim() > 1 and tensor.shape[0] == self._rows * self._length:  # all tokens of all rows
            return dim == 0 or (self._rows == 1 and tensor.shape[dim] == self._length)
        return tensor.shape[dim] == self._length or (of_keys and tensor.shape[dim] == self._end)


def sizes_of(modules: Iterable[nn.Module]) -> set[int]:
    """Returns the sizes of all dimensions of a stage's weights."""
    return {size for module in modules for p in module.parameters() for size in p.shape}
