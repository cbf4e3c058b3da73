"""Notes of what a stage asks for in one segment, of this package and of torch. Values tell whether it is right,
and these notes why not.

A :class:`Watch` tells tokens by their number. In a look by values that number is chosen, so that it is no size of the
stage. In a unit of a step it is what it is: if a weight has that size, too, nothing is told.
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
_TOKENS = {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}  # where they stand; others vary
_SHARED_DROPOUTS = ("feature_dropout", "dropout1d", "dropout2d", "dropout3d")


class Watch(TorchFunctionMode):
    """Notes the operations of one stage in one segment.

    Args:
        rows: of the batch.
        offset, length: of the segment, in tokens.
        sizes: of what has no tokens.
    Attributes:
        noted: what operations of ours tell: "attends" of causal_attention, "carries" of carry_in and carry_out.
        foreign: what attention that is not ours the stage has called on the segment alone; "" if none.
        dropout: which dropout it has called that draws one number for all tokens; "" if none.
        eps: of the narrowest dtype in which anything was computed; 0 if all was in float64.
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
        with suppress(Exception):  # of a call in another form, say: a look must not end a right step
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
        """Whether this dimension is that of the segment's tokens, or of its keys, earlier ones included."""
        if not self._decides or not -tensor.dim() <= dim < tensor.dim():
            return False
        dim %= tensor.dim()
        if tensor.dim() > 1 and tensor.shape[0] == self._rows * self._length:  # all tokens of all rows
            return dim == 0 or (self._rows == 1 and tensor.shape[dim] == self._length)
        return tensor.shape[dim] == self._length or (of_keys and tensor.shape[dim] == self._end)


def sizes_of(modules: Iterable[nn.Module]) -> set[int]:
    """The sizes of a stage's weights."""
    return {size for module in modules for p in module.parameters() for size in p.shape}
