"""Which sizes come from the number of tokens? A size alone cannot tell: 64 tokens, and 64 features.

While a stage is looked at, the shapes of all tensors are followed a second time, as if the segment had another number
of tokens. A size that differs there comes from the tokens. The model's code gets sizes as :class:`Size`, so what it
computes from them differs there, too.

Shapes of views are torch's, from the meta device. For other operations torch's own rules are Python that takes a second
to import, so there are rules here; what none of them covers keeps the places of its dimensions, or is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

__all__: list[str] = []

# Operations that torch runs on the meta device in C++: views, and tensors made of sizes.
_VIEWS = frozenset(
    ("view", "reshape", "view_as", "reshape_as", "transpose", "swapaxes", "swapdims", "permute", "movedim", "unsqueeze",
     "squeeze", "flatten", "ravel", "unflatten", "chunk", "split", "split_with_sizes", "tensor_split", "unbind",
     "expand", "expand_as", "broadcast_to", "narrow", "select", "unfold", "diagonal", "get", "t", "view_as_real",
     "view_as_complex", "as_strided", "pad", "zeros", "ones", "empty", "full", "rand", "randn", "new_zeros", "new_ones",
     "new_empty", "new_full")
)  # fmt: skip
# What they make is shaped as all of their tensors broadcast.
_POINTWISE = frozenset(
    ("add", "sub", "mul", "multiply", "div", "divide", "truediv", "floordiv", "pow", "where", "lerp", "eq", "ne", "lt",
     "le", "gt", "ge", "and", "or", "masked_fill", "maximum", "minimum", "polar", "addcmul", "addcdiv", "logaddexp",
     "atan2")
)  # fmt: skip
_REDUCTIONS = frozenset(
    ("mean", "sum", "var", "std", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all", "prod", "norm",
     "logsumexp", "median", "nansum", "vector_norm")
)  # fmt: skip
_PRODUCTS = frozenset(("matmul", "rmatmul", "bmm", "mm", "addmm", "baddbmm"))
_ELSEWHERE = frozenset(("outer", "ger", "tensordot", "cdist", "kron", "mv", "dot", "cov", "nonzero", "unique", "topk"))

_Shape = tuple[int, ...]


class Size(int):
    """A number that comes from the tokens: its value, and ``other``, its value for the other number of tokens."""

    other: int

    @staticmethod
    def of(value: int, other: int) -> int:
        if value == other:
            return value
        size = Size(value)
        size.other = other
        return size


def _arithmetic(name: str) -> Callable[[Size, Any], Any]:
    compute = getattr(int, name)

    def run(self: Size, value: Any) -> Any:
        result = compute(self, value)
        if type(result) is not int:  # NotImplemented
            return result
        try:
            return Size.of(result, compute(self.other, getattr(value, "other", value)))
        except ZeroDivisionError:
            return result

    return run


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _prefix in ("__", "__r"):
        setattr(Size, f"{_prefix}{_name}__", _arithmetic(f"{_prefix}{_name}__"))


class Lengths:
    """Shapes of the tensors of one forward of a stage, as they would be for another number of tokens.

    Args:
        length: the segment's tokens.
        suspicious: sizes that may come from tokens. A tensor that was not seen before has none, or is unknown.
        constant: ids of tensors whose sizes do not come from tokens: parameters, buffers.
    """

    def __init__(self, length: int, suspicious: Iterable[int], constant: set[int]) -> None:
        self._length, self._suspicious, self._constant = length, frozenset(suspicious), constant
        self._other = length // 2 if length % 2 == 0 else length - 1  # so tables are long enough, blocks still fit
        # By tensor: its shape for the other number of tokens, None if that is not known.
        self._shapes: Any = WeakTensorKeyDictionary()
        self.failed = False  # whether the tensors of the last operation do not broadcast in the other shapes

    def begin(self, tensor: Tensor, seq_dim: int | None) -> None:
        """Takes a tensor that the stage was given.

        Args:
            seq_dim: of its tokens, if it has some; None: no size comes from tokens.
        """
        shape = list(tensor.shape)
        if seq_dim is not None and self._length in shape:
            if not (seq_dim < len(shape) and shape[seq_dim] == self._length):  # a stage may hand on another layout
                if shape.count(self._length) > 1:
                    self._shapes[tensor] = None
                    return
                seq_dim = shape.index(self._length)
            shape[seq_dim] = self._other
        self._shapes[tensor] = tuple(shape)

    def shape_of(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Its shape for the other number of tokens; None if that is not known."""
        if tensor in self._shapes:
            return self._shapes[tensor]  # type: ignore[no-any-return]
        if id(tensor) in self._constant or self._suspicious.isdisjoint(tensor.shape):
            return tuple(tensor.shape)
        return None

    def follow(self, name: str, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        """Notes the other shapes of the result of ``func``. Returns it as the model shall see it."""
        self.failed = False
        if isinstance(result, (int, torch.Size)):
            return self._sizes(name, args, result)
        made = _tensors(result)
        if not made or (len(made) == 1 and not made[0].dim()):
            return result
        given = _leaves((args, tuple(kwargs.values())))
        tensors = [value for value in given if isinstance(value, Tensor)]
        others: list[_Shape | None]
        if Size not in map(type, given) and all(self.shape_of(tensor) == tensor.shape for tensor in tensors):
            others = [tuple(tensor.shape) for tensor in made]
        else:
            try:
                others = self._shapes_of(name, func, args, kwargs, tensors, made)
            except Exception:  # whatever: a call in another form, or one that does not take the other shapes
                others = [None]
        for i, tensor in enumerate(made):
            other = others[min(i, len(others) - 1)] if others else None  # as many pieces as tokens are alike
            self._shapes[tensor] = other if other is not None and len(other) == tensor.dim() else None
        return result

    def _shapes_of(
        self, name: str, func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor], made: list[Tensor]
    ) -> list[_Shape | None]:
        """The shapes of what an operation makes, some of whose arguments differ or are not known."""
        if name in _POINTWISE or (name[:1] in "ri" and name[1:] in _POINTWISE):  # also __radd__ and __iadd__
            return [self._broadcast(tensors, made[0])]
        known = [self.shape_of(tensor) for tensor in tensors]
        if name == "cat" or name == "concat":
            return [self._joined(args, kwargs, known)]
        if name == "stack":
            dim = _argument(args, kwargs, 1, "dim", 0) % made[0].dim()
            return [None if known[0] is None else (*known[0][:dim], len(tensors), *known[0][dim:])]
        first = known[0] if known else None
        if tensors and first is None:
            return [None]
        if name == "einsum":
            return [self._einsum(args, known)]
        if name == "arange":
            bounds = [getattr(value, "other", value) for value in args]
            start, end = (
                (0, *bounds)
                if len(bounds) == 1
                else (kwargs.get("start", 0), kwargs["end"])
                if not bounds
                else bounds[:2]
            )
            step = bounds[2] if len(bounds) > 2 else kwargs.get("step", 1)
            return [(math.ceil((end - start) / step),)]
        if name == "linspace":
            return [(getattr(_argument(args, kwargs, 2, "steps"), "other", made[0].shape[0]),)]
        if name in _VIEWS or (name == "getitem" and len(tensors) == 1):
            return [tuple(tensor.shape) for tensor in _tensors(self._run(func, args, kwargs, bool(tensors)))]
        assert first is not None
        if name == "getitem" or name == "index_select":
            return [self._indexed(args, first, known)]
        if name == "linear":
            return [(*first[:-1], made[0].shape[-1])]
        if name in ("embedding", "one_hot"):
            return [(*first, made[0].shape[-1])]
        if name == "positions":
            return [(*made[0].shape[:-1], first[args[2]])]
        if name in _PRODUCTS:
            left, right = known[-2:] if name != "rmatmul" else known[-2:][::-1]
            return [None if left is None or right is None else (*left[:-2], left[-2], right[-1])]
        if name in ("repeat", "tile"):
            return [(*made[0].shape[: -len(first)], *self._kept(tensors[0], made[0].shape[-len(first) :]))]
        if name in _REDUCTIONS and made[0].dim() < len(first):
            dims = kwargs.get("dim", args[2 if name == "norm" else 1])
            gone = [dim % len(first) for dim in ([dims] if isinstance(dims, int) else dims)]
            return [tuple([size for i, size in enumerate(first) if i not in gone])]
        if name in ("conv1d", "conv2d", "conv3d"):
            sizes = zip(made[0].shape, tensors[0].shape, first, strict=True)
            return [tuple([size + theirs - mine for size, mine, theirs in sizes])]
        if name in _ELSEWHERE or made[0].dim() != len(first):
            return [None]
        return [self._kept(tensors[0], made[0].shape), *[None] * (len(made) - 1)]

    def _kept(self, tensor: Tensor, result: Sequence[int]) -> _Shape:
        """The other shape of a result whose dimensions are where they are in this tensor."""
        other = self.shape_of(tensor)
        assert other is not None
        made = []
        for size, mine, theirs in zip(result, tensor.shape, other, strict=True):
            if mine != theirs and size not in (mine, 1):
                raise ValueError(f"{size} tokens of {mine}")
            made.append(theirs if size == mine else size)
        return tuple(made)

    def _joined(self, args: Any, kwargs: dict[str, Any], known: list[_Shape | None]) -> _Shape | None:
        shapes = [shape for shape in known if shape is not None]
        if len(shapes) < len(known):
            return None
        dim = _argument(args, kwargs, 1, "dim", 0) % len(shapes[0])
        return (*shapes[0][:dim], sum(shape[dim] for shape in shapes), *shapes[0][dim + 1 :])

    def _indexed(self, args: Any, first: _Shape, known: list[_Shape | None]) -> _Shape | None:
        """Shape of ``x[i]`` and ``x[i, j]``, indexed by tensors of integers, and of ``index_select``."""
        index = (args[2],) if len(args) > 2 else args[1] if isinstance(args[1], tuple) else (args[1],)
        others = known[1:]
        if None in others or not all(isinstance(i, Tensor) and i.dtype != torch.bool for i in index):
            return None
        if len(args) > 2:  # index_select
            dim = args[1] % len(first)
            return (*first[:dim], *(others[0] or ()), *first[dim + 1 :])
        made: dict[int, int] = {}  # by place, from the last one
        for shape in others:
            for i, size in enumerate(reversed(shape or ())):
                made[i] = max(size, made.get(i, 1))
        return (*[made[i] for i in reversed(range(len(made)))], *first[len(index) :])

    def _einsum(self, args: Any, known: list[_Shape | None]) -> _Shape | None:
        terms, _, made = args[0].replace(" ", "").partition("->")
        shapes = [shape for shape in known if shape is not None]
        if len(shapes) < len(known) or not made:
            return None
        sizes: dict[str, int] = {}
        dots = ""
        for term, shape in zip(terms.split(","), shapes, strict=True):
            own = "0123456789"[10 - (len(shape) - len(term.replace("...", ""))) :] if "..." in term else ""
            dots = max(dots, own, key=len)
            for letter, size in zip(term.replace("...", own), shape, strict=True):
                sizes[letter] = max(size, sizes.get(letter, 1)) if letter.isdigit() else size
        return tuple([sizes[letter] for letter in made.replace("...", dots)])

    def _sizes(self, name: str, args: Any, result: Any) -> Any:
        other = self.shape_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if other is None or other == tuple(args[0].shape):
            return result
        if isinstance(result, torch.Size):
            return torch.Size([Size.of(*pair) for pair in zip(result, other, strict=True)])
        if name == "size" and len(args) == 2 and isinstance(args[1], int):
            return Size.of(result, other[args[1]])
        if name in ("numel", "nelement"):
            return Size.of(result, torch.Size(other).numel())
        return result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any], has_tensors: bool) -> Any:
        kwargs = {key: self._changed(value) for key, value in kwargs.items()}
        if "device" in kwargs or not has_tensors:
            kwargs["device"] = "meta"
        return func(*self._changed(args), **kwargs)

    def _changed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            shape = self.shape_of(value)
            assert shape is not None
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if type(value) is Size:
            return value.other
        if type(value) in (tuple, list, torch.Size):
            items = [self._changed(item) for item in value]
            return items if type(value) is list else tuple(items)
        if isinstance(value, slice):
            return slice(*map(self._changed, (value.start, value.stop, value.step)))
        return value

    def _broadcast(self, tensors: list[Tensor], result: Tensor) -> tuple[int, ...] | None:
        """The shape that all tensors together tell; an unknown one has the result's shape if another one has it."""
        known = [(t.shape, other) for t in tensors if (other := self.shape_of(t)) is not None]
        if len(known) < len(tensors) and all(shape != result.shape for shape, _ in known):
            return None
        made = list(result.shape)
        for i in range(1, len(made) + 1):
            sizes = {other[-i] for shape, other in known if len(shape) >= i and shape[-i] == made[-i]}
            self.failed |= len(sizes) > 1
            made[-i] = next((size for size in sizes if size != made[-i]), made[-i])
        return tuple(made)


def _argument(args: Any, kwargs: dict[str, Any], position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list)):
        return [leaf for item in value for leaf in _leaves(item)]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    return [value]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
