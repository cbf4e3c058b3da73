"""Looks at a stage's forward for what mixes tokens, or the rows of a batch, without the engine's knowledge.

A :class:`Watch` is a ``TorchFunctionMode`` around one unit, F0.1, of the first step of a shape: it sees what the
model's Python code calls, with the arguments in the model's own terms. No later step has a mode. Segment 1 is watched
because only there does an offset differ from 0, and the length of a kept cache from that of a segment.

What is seen are shapes, so two rules keep right models out. A length that is also a size of the stage's weights decides
nothing but attention, recurrences and batch statistics; and a module that calls ``carry_in`` or ``carry_out`` is
believed, with all that it calls. :func:`seq1f1b.verify_stage` and ``engine.verify`` decide by numbers.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seq1f1b.runtime.steady import uncompiled

__all__ = ["SegmentWarning"]

ATTENTION = "attention not in segments"
POSITIONS = "positions from zero"
STATE = "state across tokens"
STATISTICS = "batch statistics"
RANDOMNESS = "randomness that differs"
WEIGHTING = "loss weighting"

_REMEDIES = {
    ATTENTION: "call seq1f1b.causal_attention, which sees the keys of earlier segments",
    POSITIONS: "use seq1f1b.positions(x), or add seq1f1b.token_offset()",
    STATE: "hand the state from segment to segment by seq1f1b.carry_in and carry_out",
    STATISTICS: "use a norm over each token's own features, as LayerNorm and RMSNorm",
    RANDOMNESS: "use nn.Dropout, which draws a number for every token",
    WEIGHTING: "let loss_fn return its sum and its divisor, (sum, divisor), or count the targets by loss_weight=, or "
    'return a sum with loss_reduction="sum"',
}


class SegmentWarning(UserWarning):
    """A stage does something that comes out otherwise in segments than over the whole sequence."""


@dataclass(frozen=True)
class Finding:
    cause: str
    place: str  # stage and module
    what: str

    def __str__(self) -> str:
        return f"{self.cause}: {self.place} {self.what}; {_REMEDIES[self.cause]}"


class Looks:
    """What was found in one stage, for the life of an engine: each finding is told once."""

    def __init__(self, index: int, modules: Sequence[nn.Module], unchecked: bool, *, tells: bool = True) -> None:
        self.index, self.modules, self.unchecked = index, modules, unchecked
        self.tells = tells
        self.findings: dict[Finding, None] = {}
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """A word on the data: once in an engine's life, though its numbers may differ."""
        if self.tells and (kind := text[:30]) not in self._said:
            self._said.add(kind)
            warnings.warn(text, UserWarning, stacklevel=3)

    def watch(self, inputs: Sequence[Any], offset: int, length: int) -> Watch:
        return Watch(self, inputs, offset, length)

    def judge(self, found: Sequence[Finding], attends: bool) -> None:
        """Tells what is new. Attention of another kind in a stage without any of ours is an error, in every try."""
        foreign = next((finding for finding in found if finding.cause == ATTENTION), None)
        if foreign is not None and not attends and not self.unchecked:
            raise ValueError(
                f"{foreign}. The stage makes no call of causal_attention, so each segment would see itself only; if "
                "that is meant, pass unchecked=True to the engine"
            )
        new = [finding for finding in dict.fromkeys(found) if finding not in self.findings]
        self.findings |= dict.fromkeys(new)
        for finding in new if self.tells else ():
            warnings.warn(f"{finding}. engine.verify compares with the whole model", SegmentWarning, stacklevel=3)


class Watch(TorchFunctionMode):
    """Around one forward of one stage.

    Args:
        inputs: positional arguments of the unit; the first tensor's first dimension is the batch.
        offset, length: of the segment, in tokens.
    """

    def __init__(self, looks: Looks, inputs: Sequence[Any], offset: int, length: int) -> None:
        super().__init__()
        self._looks, self._length, self._end = looks, length, offset + length
        self._offset = offset
        first = next((value for value in inputs if isinstance(value, Tensor) and value.dim()), None)
        self._batch = 1 if first is None else first.shape[0]
        self._names = {
            id(part): f"{name or 'itself'} ({type(part).__name__})"
            for module in looks.modules
            for name, part in module.named_modules()
        }
        parts = [part for module in looks.modules for part in module.modules()]
        self._tables = {
            id(t) for part in parts for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        }
        self._tables |= {id(v) for part in parts for v in part.__dict__.values() if isinstance(v, Tensor)}
        sizes = {size for module in looks.modules for p in module.parameters() for size in p.shape}
        self._decides = length > 1 and length != self._batch and not {length, self._end} & sizes
        self._found: list[tuple[Finding, tuple[int, ...]]] = []  # with the modules around it, from the innermost
        self._believed: set[int] = set()  # modules that carry state
        self._offset_readers: set[int] = set()
        self._counted: dict[int, Tensor] = {}  # by arange or cumsum over the segment's tokens, or made from such
        self._cells: Counter[tuple[int, ...]] = Counter()
        self._attends = False
        self._others = ExitStack()

    def __enter__(self) -> Watch:
        self._others.enter_context(uncompiled())  # functions that the stage calls: compiled modules are not watched
        super().__enter__()  # type: ignore[no-untyped-call] # torch's has no types
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._others.close()
        if kind is not None:
            return
        for around, calls in self._cells.items():
            if calls >= self._length > 1:
                self._find(STATE, f"calls a recurrent cell {calls} times", around)
        kept = [finding for finding, around in self._found if not self._believed & set(around)]
        self._looks.judge(kept, self._attends)

    # -- what operations of ours tell ------------------------------------------------------------------------------

    def note(self, what: str) -> None:
        """One of "attends", "carries", "offset": an operation of ours that the running module has called."""
        if what == "attends":
            self._attends = True
            return
        around = self._around()
        (self._believed if what == "carries" else self._offset_readers).update(around[:1])

    # -- what torch is asked for -----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        look = _LOOKS.get(name)
        if look is not None:
            look(self, name, args, kwargs)
        elif ("attention" in name or "flash_attn" in name) and getattr(func, "namespace", "") != "seq1f1b":
            _look_at_attention(self, name, args, kwargs)
        if self._decides:
            self._follow_positions(name, args, kwargs, result)
        return result

    def _find(self, cause: str, what: str, around: tuple[int, ...] | None = None) -> None:
        around = self._around() if around is None else around
        place = self._names[around[0]] if around else "the loss"
        self._found.append((Finding(cause, f"stage {self._looks.index}, {place}", what), around))

    def _around(self) -> tuple[int, ...]:
        """Ids of the modules whose code is running, from the innermost."""
        found: dict[int, None] = {}
        frame = sys._getframe(1)
        while frame is not None:
            owner = id(frame.f_locals.get("self"))
            if owner in self._names:
                found[owner] = None
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(found)

    def _is_tokens(self, tensor: Tensor, dim: int) -> bool:
        """Whether this dimension is that of the tokens, as far as shapes can tell."""
        if not self._decides or not -tensor.dim() <= dim < tensor.dim():
            return False
        size = tensor.shape[dim]
        if dim % tensor.dim() == 0 and tensor.dim() > 1 and size == self._batch * self._length:
            return True
        return size == self._length

    def _is_within_tokens(self, tensor: Tensor) -> bool:
        """Whether the first dimension is that of all tokens of all rows, so that the others are one token's own."""
        return self._batch > 1 and tensor.dim() > 1 and tensor.shape[0] == self._batch * self._length

    # -- positions -------------------------------------------------------------------------------------------------

    def _follow_positions(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if not isinstance(result, Tensor):
            return
        if name == "arange":
            around = self._around()
            if self._starts_at_zero(args, kwargs) and around[:1] and around[0] not in self._offset_readers:
                self._counted[id(result)] = result
            return
        if name == "cumsum" and not args[0].is_floating_point():
            dim = _argument(args, kwargs, 1, "dim")
            if isinstance(dim, int) and self._is_tokens(args[0], dim):
                self._counted[id(result)] = result
            return
        if name in ("getitem", "narrow") and args and id(args[0]) in self._tables and self._is_first_rows(name, args):
            self._find(POSITIONS, f"takes the first {self._length} rows of a table in every segment")
        elif name in ("getitem", "index_select", "embedding") and any(self._is_counted(a) for a in _flat(args)):
            if name == "embedding" or (id(args[0]) in self._tables and not self._is_counted(args[0])):
                self._find(POSITIONS, f"counts the {self._length} tokens of every segment")
            elif self._is_counted(args[0]) and not any(isinstance(a, Tensor) for a in _flat(args[1:])):
                self._counted[id(result)] = result
        elif any(self._is_counted(a) for a in args):
            self._pass_on(name, args, result)

    def _pass_on(self, name: str, args: Any, result: Tensor) -> None:
        """An operation on counted positions: are they still that, or used as such?"""
        if name in _SHAPES or (name in _SHIFTS and self._keeps_zero(args)):
            self._counted[id(result)] = result
        elif name in _USES and result.is_floating_point():
            self._find(POSITIONS, f"counts the {self._length} tokens of every segment")

    def _keeps_zero(self, args: Any) -> bool:
        """Whether what is added is a number other than the segment's offset."""
        others = [value for value in args if not self._is_counted(value)]
        return bool(others) and all(isinstance(v, (int, float)) and v != self._offset for v in others)

    def _is_counted(self, value: Any) -> bool:
        return id(value) in self._counted

    def _starts_at_zero(self, args: Any, kwargs: Any) -> bool:
        bounds = [value for value in args if not isinstance(value, Tensor)]
        start = kwargs.get("start", bounds[0] if len(bounds) > 1 else 0)
        end = kwargs.get("end", bounds[0] if len(bounds) == 1 else bounds[1] if len(bounds) > 1 else None)
        step = kwargs.get("step", bounds[2] if len(bounds) > 2 else 1)
        return (start, end, step) == (0, self._length, 1)

    def _is_first_rows(self, name: str, args: Any) -> bool:
        table = args[0]
        if name == "narrow":
            return len(args) == 4 and args[2:] == (0, self._length) and table.shape[args[1]] > self._length
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        cuts = [i for i in index if isinstance(i, slice) and i.stop == self._length and not i.start]
        return len(cuts) == 1 and max(table.shape) > self._length


# Operations on positions that leave them what they are; that may shift them; that use them.
_SHAPES = frozenset(
    ("to", "float", "double", "type", "type_as", "int", "long", "half", "bfloat16", "unsqueeze", "squeeze", "view",
     "reshape", "expand", "expand_as", "repeat", "clone", "contiguous", "detach", "flatten", "transpose")
)  # fmt: skip
_SHIFTS = frozenset(("add", "radd", "sub"))
_USES = frozenset(
    ("mul", "rmul", "outer", "ger", "einsum", "matmul", "rmatmul", "mm", "bmm", "sin", "cos", "div", "truediv", "pow",
     "rpow", "exp")
)  # fmt: skip


def _flat(values: Any) -> list[Any]:
    return [item for value in values for item in (_flat(value) if isinstance(value, (tuple, list)) else [value])]


def _argument(args: Any, kwargs: Any, position: int, name: str, default: Any = None) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


# -- operations --------------------------------------------------------------------------------------------------------


def _look_at_attention(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    query, key = _argument(args, kwargs, 0, "query"), _argument(args, kwargs, 1, "key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return
    is_torchs = name == "scaled_dot_product_attention"  # others take (tokens, batch, ...), too
    if is_torchs and watch._is_within_tokens(query):
        return
    dims = slice(-2, -1) if is_torchs else slice(None)
    lengths = {watch._length, watch._end}
    if watch._length > 1 and watch._length in query.shape[dims] and lengths & set(key.shape[dims]):
        watch._find(ATTENTION, f"calls {name} on a segment alone")


def _look_at_softmax(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    scores, dim = args[0], _argument(args, kwargs, 1, "dim", -1)
    if not isinstance(scores, Tensor) or not isinstance(dim, int) or not watch._decides or scores.dim() < 2:
        return
    if watch._is_within_tokens(scores) and dim % scores.dim():
        return
    others = [size for i, size in enumerate(scores.shape) if i and i != dim % scores.dim()]
    if watch._length in others and scores.shape[dim] in (watch._length, watch._end):
        watch._find(ATTENTION, f"takes a {name} over scores of shape {tuple(scores.shape)}")
    elif watch._is_tokens(scores, dim):
        watch._find(STATE, f"takes a {name} over the tokens of a segment")


def _look_at_cumulative(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    dim = _argument(args, kwargs, 1, "dim")
    # Integers are counts: of positions, if they are used as such, or of what only masks and indices depend on.
    if args[0].is_floating_point() and isinstance(dim, int) and watch._is_tokens(args[0], dim):
        watch._find(STATE, f"takes a {name} along the tokens")


def _look_at_convolution(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    x, weight = args[0], _argument(args, kwargs, 1, "weight")
    if not watch._decides or not isinstance(weight, Tensor) or watch._is_within_tokens(x):
        return
    dilation = _argument(args, kwargs, 5, "dilation", 1)
    for i, width in enumerate(weight.shape[2:], start=2):
        step = dilation if isinstance(dilation, int) else dilation[min(i - 2, len(dilation) - 1)]
        if width > 1 and watch._length <= x.shape[i - weight.dim()] <= watch._length + (width - 1) * step:
            watch._find(STATE, f"calls {name} of width {width} along the tokens")
            return


def _look_at_recurrence(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    x, is_batch_first = args[0], bool(args[-1])
    if isinstance(args[1], Tensor) and not args[1].is_floating_point():  # packed: its rows one after the other
        is_along = x.shape[0] == watch._batch * watch._length
    else:
        is_along = x.shape[1 if is_batch_first and x.dim() == 3 else 0] == watch._length > 1
    if is_along:
        watch._find(STATE, f"calls {name} along the tokens")


def _look_at_cell(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    watch._cells[watch._around()] += 1


def _look_at_batch_norm(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    if _argument(args, kwargs, 5, "training", False):
        watch._find(STATISTICS, f"calls {name} in training mode, over the tokens and rows of one segment")


def _look_at_norm(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    """Norms over several dimensions: of (batch, channels, ...), or the last ones."""
    x = args[0]
    shape = _argument(args, kwargs, 1, "normalized_shape") if name in ("layer_norm", "rms_norm") else x.shape[2:]
    dims = range(x.dim() - len(shape), x.dim())
    if not watch._is_within_tokens(x) and any(watch._is_tokens(x, dim) for dim in dims):
        watch._find(STATE, f"calls {name} over the tokens of a segment")


def _look_at_shift(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    dims = _argument(args, kwargs, 2 if name == "roll" else 1, "dims")
    for dim in [dims] if isinstance(dims, int) else dims or []:
        if watch._is_tokens(args[0], dim):
            watch._find(STATE, f"calls {name} along the tokens of a segment")


def _look_at_shared_dropout(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    if any(watch._is_tokens(args[0], dim) for dim in range(2, args[0].dim())):
        watch._find(RANDOMNESS, f"calls {name}, which draws one number for all tokens of a segment")


_Look = Callable[[Watch, str, Any, Any], None]
_LOOKS: dict[str, _Look] = {
    **dict.fromkeys(("softmax", "log_softmax"), _look_at_softmax),
    **dict.fromkeys(("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), _look_at_cumulative),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _look_at_convolution),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _look_at_recurrence),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), _look_at_cell),
    "batch_norm": _look_at_batch_norm,
    **dict.fromkeys(("instance_norm", "group_norm", "layer_norm", "rms_norm"), _look_at_norm),
    **dict.fromkeys(("roll", "flip"), _look_at_shift),
    **dict.fromkeys(("feature_dropout", "dropout1d", "dropout2d", "dropout3d"), _look_at_shared_dropout),
}
