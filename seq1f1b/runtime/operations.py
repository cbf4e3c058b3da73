"""Operations that mix tokens, or count them from zero, as a stage's forward calls them: which cause, at which place.

:class:`Operations` is a ``TorchFunctionMode`` around one segment. It sees what the model's Python code calls, with the
arguments in the model's own terms, and tells tokens by their number. In a look by values that number is chosen, so that
it is no size of the stage (``by_values.py``). In a unit of a step it is what it is: if a weight has that size, too,
nothing is told. A module that calls ``carry_in`` or ``carry_out`` is believed there, with all that it calls.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seq1f1b.runtime.findings import ATTENTION, MIXING, POSITIONS, RANDOMNESS, STATE, STATISTICS, Finding
from seq1f1b.runtime.model_state import uncompiled

__all__: list[str] = []

_STAGE = os.path.join(os.path.dirname(__file__), "stage.py")  # whose code calls the stage's modules


@dataclass(frozen=True)
class Noted:
    """One operation.

    Attributes:
        around: ids of the modules whose code was running, from the innermost.
        time: of :attr:`Operations.time`.
        is_sure: it is no mere hint, which explains a difference and is none by itself.
    """

    cause: str
    what: str
    around: tuple[int, ...]
    time: int
    is_sure: bool


class Operations(TorchFunctionMode):
    """Around one segment of one stage.

    Args:
        modules: of the stage.
        given: arguments of the segment, each with whether it has tokens. The first tensor's first dimension is the
            batch.
        offset, length: of the segment, in tokens.
    Attributes:
        noted: what was seen, in order.
        attends: whether the stage has called ``causal_attention``.
        eps: of the narrowest dtype in which anything was computed; 0 if all was in float64.
        time: what new operations are noted with.
    """

    def __init__(
        self, modules: Sequence[nn.Module], given: Iterable[tuple[Any, bool]], offset: int, length: int
    ) -> None:
        super().__init__()
        self._offset, self._length, self._end = offset, length, offset + length
        tensors = [(t, has) for value, has in given for t in _flat([value]) if isinstance(t, Tensor)]
        self._batch = next((t.shape[0] for t, _ in tensors if t.dim()), 1)
        parts = {id(part): part for module in modules for part in module.modules()}
        self._modules = parts.keys()
        own = [t for part in parts.values() for t in (*part._parameters.values(), *part._buffers.values())]
        own += [v for part in parts.values() for v in part.__dict__.values() if isinstance(v, Tensor)]
        self._tables = {id(t) for t in own if t is not None}
        sizes = sizes_of(modules) | {size for t, has in tensors if not has for size in t.shape}
        self._decides = length > 1 and length != self._batch and not {length, self._end} & sizes
        self.noted: list[Noted] = []
        self.attends, self.eps, self.time = False, 0.0, 0
        self.fixed: Noted | None = None  # a table that fits segments of another length alone
        self._believed: set[int] = set()  # modules that carry state
        self._offset_readers: set[int] = set()
        self._counted: dict[int, Tensor] = {}  # by arange or cumsum over the segment's tokens, or made from such
        self._cells: Counter[tuple[int, ...]] = Counter()
        self._others = ExitStack()

    def __enter__(self) -> Operations:
        self._others.enter_context(uncompiled())  # functions that the stage calls
        super().__enter__()  # type: ignore[no-untyped-call] # torch's has no types
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._others.close()
        for around, calls in self._cells.items():
            if calls >= self._length > 1:
                self._add(STATE, "calls a recurrent cell for one token after the other", around=around)

    @property
    def carries(self) -> bool:
        """Whether any module has called ``carry_in`` or ``carry_out``."""
        return bool(self._believed)

    def sure(self) -> list[Noted]:
        """Operations that are wrong by themselves, outside of modules that carry state."""
        return [n for n in self.noted if n.is_sure and not self._believed & set(n.around)]

    # -- what operations of ours tell ------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """One of "attends", "carries", "offset": an operation of ours that the running module has called."""
        if what == "attends":
            self.attends = True
            return
        around = self._around()
        (self._believed if what == "carries" else self._offset_readers).update(around[:1])

    # -- what torch is asked for -----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            self._look_at_fixed_table(args)
            raise
        if isinstance(result, Tensor):
            self.eps = max(self.eps, _EPS.get(result.dtype, 0.0))
        with suppress(Exception):  # of a call in another form, say: a look must not end a right step
            self._look(name, getattr(func, "namespace", ""), args, kwargs, result)
        return result

    def _look(self, name: str, namespace: str, args: Any, kwargs: Any, result: Any) -> None:
        if "input" in kwargs:
            args = (kwargs["input"], *args)
        look = _LOOKS.get(name)
        if look is not None:
            look(self, name, args, kwargs)
        elif ("attention" in name or "flash_attn" in name) and namespace != "seq1f1b":
            _look_at_attention(self, name, args, kwargs)
        if isinstance(result, Tensor):
            self._look_at_shift(name, args, result)
            self._follow_positions(name, args, kwargs, result)

    def _add(self, cause: str, what: str, *, is_sure: bool = True, around: tuple[int, ...] | None = None) -> None:
        around = self._around() if around is None else around
        self.noted.append(Noted(cause, what, around, self.time, is_sure))

    def _around(self) -> tuple[int, ...]:
        """Ids of the modules whose code is running, from the innermost."""
        found: dict[int, None] = {}
        frame = sys._getframe(1)
        # Up to the engine, and no further: a frame whose locals are read keeps those that its code deletes later.
        while frame is not None and frame.f_code.co_filename != _STAGE:
            owner = id(frame.f_locals.get("self"))
            if owner in self._modules:
                found[owner] = None
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(found)

    def _is_tokens(self, tensor: Tensor, dim: int, more: int = 0) -> bool:
        """Whether this dimension is that of the tokens, and of up to ``more`` others beside them."""
        if not self._decides or not -tensor.dim() <= dim < tensor.dim():
            return False
        dim %= tensor.dim()
        if tensor.dim() > 1 and tensor.shape[0] == self._batch * self._length:  # all tokens of all rows
            return dim == 0 or (self._batch == 1 and tensor.shape[dim] == self._length)
        return self._length <= tensor.shape[dim] <= self._length + more

    def _has_tokens(self, tensor: Tensor) -> bool:
        return any(self._is_tokens(tensor, dim) for dim in range(tensor.dim()))

    def _look_at_fixed_table(self, args: Any) -> None:
        """An operation that failed: does it combine tokens with a table that has another number of rows?"""
        tensors = [value for value in _flat(args) if isinstance(value, Tensor)]
        if any(map(self._has_tokens, tensors)) and any(id(t) in self._tables and t.dim() > 1 for t in tensors):
            what = "has a table that fits segments of one length, the same for every segment"
            self.fixed = Noted(POSITIONS, what, self._around(), self.time, True)

    def _look_at_shift(self, name: str, args: Any, result: Tensor) -> None:
        parts = [t for t in _flat(args[:1]) if isinstance(t, Tensor)]
        if not parts or name not in ("cat", "concat", "pad") or parts[0].dim() != result.dim():
            return
        grown = result if name == "cat" or name == "concat" else parts[0]
        others = parts if grown is result else [result]
        for dim in range(result.dim()):
            if self._is_tokens(grown, dim) and any(t.shape[dim] != grown.shape[dim] for t in others):
                self._add(STATE, f"shifts the tokens of a segment by {name}", is_sure=False)
                return

    # -- positions -------------------------------------------------------------------------------------------------

    def _follow_positions(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        tensors = [value for value in _flat(args) if isinstance(value, Tensor)]
        if name in ("arange", "linspace", "tensor") and not tensors:
            around = self._around() if self._is_count(name, args, kwargs, result) else ()
            if around and around[0] not in self._offset_readers:
                self._count(result)
        elif name == "cumsum" and not args[0].is_floating_point():
            dim = _argument(args, kwargs, 1, "dim")
            if isinstance(dim, int) and self._is_tokens(args[0], dim):
                self._count(result)
        elif name in ("getitem", "narrow") and self._is_first_rows(name, args):
            self._add(POSITIONS, "takes the first rows of a table in every segment")
        elif any(map(self._is_counted, tensors)):
            self._pass_on(name, args, tensors, result)

    def _count(self, result: Tensor) -> None:
        self._counted[id(result)] = result
        self._add(POSITIONS, _COUNTS, is_sure=False)

    def _pass_on(self, name: str, args: Any, tensors: list[Tensor], result: Tensor) -> None:
        """An operation on counted positions: are they still that, or used as such?"""
        is_counted = self._is_counted(tensors[0])
        if name in ("getitem", "index_select", "embedding"):
            is_used = name == "embedding" or (id(tensors[0]) in self._tables and not is_counted)
            is_same = is_counted and len(tensors) == 1
        else:
            others = [tensor for tensor in tensors if not self._is_counted(tensor)]
            is_used = name in _USES or (name in _COMBINES and any(map(self._has_tokens, others)))
            is_used &= result.is_floating_point()
            is_same = name in _SHAPES or (name in _SHIFTS and self._keeps_zero(args)) or name in ("mul", "rmul", "imul")
        if is_used:
            self._add(POSITIONS, _COUNTS)
        elif is_same:
            self._counted[id(result)] = result

    def _keeps_zero(self, args: Any) -> bool:
        """Whether what is added is a number other than the segment's offset."""
        others = [value for value in args if not self._is_counted(value)]
        return bool(others) and all(isinstance(v, (int, float)) and v != self._offset for v in others)

    def _is_counted(self, value: Any) -> bool:
        return id(value) in self._counted

    def _is_count(self, name: str, args: Any, kwargs: Any, result: Tensor) -> bool:
        """Whether it has a number for each token, and the first one is not the segment's offset."""
        if not self._decides or result.shape != (self._length,):
            return False
        if name == "tensor":
            is_count = not result.is_floating_point() and result.dtype != torch.bool
            return is_count and bool((result.diff() == 1).all()) and int(result[0]) != self._offset
        start = kwargs.get("start", args[0] if len(args) > 1 else 0)
        step = kwargs.get("step", args[2] if len(args) > 2 and name == "arange" else 1)
        return bool(step == 1 and start != self._offset)

    def _is_first_rows(self, name: str, args: Any) -> bool:
        table = args[0]
        if not self._decides or id(table) not in self._tables:
            return False
        if name == "narrow":
            return len(args) == 4 and args[2:] == (0, self._length) and table.shape[args[1]] > self._length
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        cuts = [i for i in index if isinstance(i, slice) and i.stop == self._length and not i.start]
        return len(cuts) == 1 and max(table.shape) > self._length


def sizes_of(modules: Iterable[nn.Module]) -> set[int]:
    """The sizes of a stage's weights."""
    return {size for module in modules for p in module.parameters() for size in p.shape}


def places_of(stage: int, modules: Iterable[nn.Module]) -> dict[int, str]:
    """The modules of a stage in words, by id."""
    places: dict[int, str] = {}
    for module in modules:
        for name, part in module.named_modules():
            name = name.removeprefix("_orig_mod").lstrip(".") or "itself"
            places.setdefault(id(part), f"stage {stage}, {name} ({type(part).__name__})")
    return places


def findings_of(noted: Iterable[Noted], places: dict[int, str]) -> list[Finding]:
    """The findings from what was noted, with their places in words."""
    return [Finding(n.cause, places[n.around[0]], n.what) for n in noted if n.around]


_EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_COUNTS = "counts the tokens of every segment from zero"

# Operations on positions that leave them what they are; that may shift them; that use them.
_SHAPES = frozenset(
    ("to", "float", "double", "type", "type_as", "int", "long", "half", "bfloat16", "unsqueeze", "squeeze", "view",
     "reshape", "expand", "expand_as", "repeat", "clone", "contiguous", "detach", "flatten", "transpose", "clamp",
     "neg", "permute", "unflatten", "broadcast_to", "tile", "movedim", "stack",
     "where", "masked_fill")
)  # fmt: skip
_SHIFTS = frozenset(("add", "radd", "iadd", "sub", "isub"))
_USES = frozenset(
    ("mul", "rmul", "outer", "ger", "einsum", "matmul", "rmatmul", "mm", "bmm", "sin", "cos", "div", "truediv", "pow",
     "rpow", "exp", "imul", "multiply", "divide", "itruediv", "linear", "log", "log1p", "sqrt", "reciprocal")
)  # fmt: skip
_COMBINES = frozenset(
    ("add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "multiply", "lerp", "where")
)


def _flat(values: Any) -> list[Any]:
    return [item for value in values for item in (_flat(value) if isinstance(value, (tuple, list)) else [value])]


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


# -- the list ----------------------------------------------------------------------------------------------------------


def _look_at_attention(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    query, key = _argument(args, kwargs, 0, "query"), _argument(args, kwargs, 1, "key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or not seen._decides:
        return
    # (..., tokens, features), or (tokens, batch, features); others have them elsewhere.
    places = {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}
    dims = [places[name]] if name in places else range(min(query.dim(), key.dim()))
    is_rows = seen._batch > 1 and query.shape[0] == seen._batch * seen._length  # the rows are tokens
    lengths = {seen._length, seen._end}
    if not is_rows and any(query.shape[dim] == seen._length and key.shape[dim] in lengths for dim in dims):
        seen._add(ATTENTION, f"calls {name} on a segment alone")


def _look_at_softmax(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    scores, dim = args[0], _argument(args, kwargs, 1, "dim", -1)
    if not isinstance(scores, Tensor) or not isinstance(dim, int) or scores.dim() < 2:
        return
    if not seen._is_tokens(scores, dim, more=seen._offset):
        return
    others = [i for i in range(1, scores.dim()) if i != dim % scores.dim()]
    if any(seen._is_tokens(scores, other) for other in others):
        seen._add(ATTENTION, f"takes a {name} over scores of tokens by tokens")
    else:
        seen._add(STATE, f"takes a {name} over the tokens of a segment")


def _look_at_cumulative(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    dim = _argument(args, kwargs, 1, "dim")
    # Integers are counts: of positions, if they are used as such, or of what only masks and indices depend on.
    if args[0].is_floating_point() and isinstance(dim, int) and seen._is_tokens(args[0], dim):
        seen._add(STATE, f"takes a {name} along the tokens")


def _look_at_convolution(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    x, weight = args[0], _argument(args, kwargs, 1, "weight")
    if not isinstance(weight, Tensor):
        return
    dilation = _argument(args, kwargs, 5, "dilation", 1)
    for i, width in enumerate(weight.shape[2:], start=2):
        step = dilation if isinstance(dilation, int) else dilation[min(i - 2, len(dilation) - 1)]
        if width > 1 and seen._is_tokens(x, i - weight.dim(), more=(width - 1) * step):
            seen._add(STATE, f"calls {name} of width {width} along the tokens")
            return


def _look_at_recurrence(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    x, is_batch_first = args[0], bool(args[-1])
    dim = 1 if is_batch_first and x.dim() == 3 else 0
    if isinstance(args[1], Tensor) and not args[1].is_floating_point():  # packed: its rows one after the other
        is_along = x.shape[0] == seen._batch * seen._length
    else:
        is_along = x.shape[dim] == seen._length
    if is_along and seen._decides:
        seen._add(STATE, f"calls {name} along the tokens")


def _look_at_cell(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    seen._cells[seen._around()] += 1


def _look_at_batch_norm(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    if _argument(args, kwargs, 5, "training", False):
        seen._add(STATISTICS, f"calls {name} in training mode, over the tokens and rows of one segment")


def _look_at_norm(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    """Norms over several dimensions: of (batch, channels, ...), or the last ones."""
    x = args[0]
    shape = _argument(args, kwargs, 1, "normalized_shape") if name in ("layer_norm", "rms_norm") else x.shape[2:]
    dims = range(x.dim() - len(shape), x.dim())
    if any(seen._is_tokens(x, dim) for dim in dims):
        seen._add(STATE, f"calls {name} over the tokens of a segment")


def _look_at_roll(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    dims = _argument(args, kwargs, 2 if name == "roll" else 1, "dims")
    for dim in [dims] if isinstance(dims, int) else dims or []:
        if seen._is_tokens(args[0], dim):
            seen._add(STATE, f"calls {name} along the tokens of a segment")


def _look_at_shared_dropout(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
    if any(seen._is_tokens(args[0], dim) for dim in range(2, args[0].dim())):
        seen._add(RANDOMNESS, f"calls {name}, which draws one number for all tokens of a segment")


def _hint(cause: str, what: str, default: Any) -> Callable[[Operations, str, Any, Any], None]:
    """Looks at an operation that takes its dimension first. A step may call it on tokens for what is no output."""

    def look(seen: Operations, name: str, args: Any, kwargs: Any) -> None:
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            return
        position = 2 if name in ("norm", "normalize", "topk", "kthvalue", "fft_fft", "fft_rfft", "fft_ifft") else 1
        dims = _argument(args, kwargs, position, "dim", default)
        dims = range(x.dim()) if dims is None else dims if isinstance(dims, (tuple, list)) else [dims]
        if any(isinstance(dim, int) and seen._is_tokens(x, dim) for dim in dims):
            short = name.removeprefix("linalg_").removeprefix("fft_")
            seen._add(cause, what.format("an" if short[0] == "a" else "a", short), is_sure=False)

    return look


_Look = Callable[[Operations, str, Any, Any], None]
_LOOKS: dict[str, _Look] = {
    **dict.fromkeys(("softmax", "log_softmax"), _look_at_softmax),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), _look_at_cumulative),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _look_at_convolution),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _look_at_recurrence),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _look_at_cell),
    "batch_norm": _look_at_batch_norm,
    **dict.fromkeys(("instance_norm", "group_norm", "layer_norm", "rms_norm"), _look_at_norm),
    **dict.fromkeys(("roll", "flip"), _look_at_roll),
    **dict.fromkeys(("feature_dropout", "dropout1d", "dropout2d", "dropout3d"), _look_at_shared_dropout),
    **dict.fromkeys(
        ("mean", "sum", "var", "std", "var_mean", "std_mean", "amax", "amin", "aminmax", "max", "min", "prod", "norm",
         "linalg_norm", "linalg_vector_norm", "logsumexp", "median", "quantile", "nanmean", "nansum"),
        _hint(STATISTICS, "takes {} {} over the tokens of a segment", None),
    ),
    "normalize": _hint(STATISTICS, "calls {1} over the tokens of a segment", 1),
    **dict.fromkeys(
        ("sort", "argsort", "topk", "kthvalue", "fft_fft", "fft_rfft", "fft_ifft", "argmax", "argmin"),
        _hint(MIXING, "calls {1} along the tokens of a segment", -1),
    ),
}  # fmt: skip
