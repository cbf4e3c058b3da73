"""Looks at a stage's forward for what mixes tokens, or the rows of a batch, without the engine's knowledge.

A :class:`Watch` is a ``TorchFunctionMode`` around one unit, F0.1, of the first step of a shape: it sees what the
model's Python code calls, with the arguments in the model's own terms. No later step has a mode. Segment 1 is watched
because only there does an offset differ from 0, and the length of a kept cache from that of a segment.

What is seen are shapes. Which sizes come from the tokens, :class:`seq1f1b.runtime.lengths.Lengths` tells, by running
each operation for another number of tokens, too. Where it cannot follow, a size decides that is no size of the stage's
weights. A module that calls ``carry_in`` or ``carry_out`` is believed, with all that it calls.
:func:`seq1f1b.verify_stage` and ``engine.verify`` decide by numbers.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from seq1f1b.runtime.findings import ATTENTION, POSITIONS, RANDOMNESS, STATE, STATISTICS, Finding, Findings
from seq1f1b.runtime.lengths import Lengths
from seq1f1b.runtime.measure import is_compiled
from seq1f1b.runtime.model_state import uncompiled
from seq1f1b.runtime.parts import Feature, Part
from seq1f1b.runtime.stage import StageStep
from seq1f1b.runtime.unit import LiveUnit

__all__: list[str] = []


class Watching(Feature):
    """Watches the first unit of a step's first shape that follows another."""

    def begin(self, step: StageStep) -> WatchedUnit | None:
        arguments = step.arguments
        if not arguments.is_new or any(map(is_compiled, step.stage.modules)):
            return None
        # F0.1, or that of the first micro-batch of several segments.
        several = (m for m, row in enumerate(arguments.rows) if len(row) > 1)
        m = next(several, None)
        return None if m is None else WatchedUnit(step, sum(map(len, arguments.rows[:m])) + 1)


class WatchedUnit(Part):
    """Looks at one unit's forward for what mixes tokens without the engine's knowledge."""

    def __init__(self, step: StageStep, cell: int) -> None:
        self._step, self._cell = step, cell

    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> AbstractContextManager[Any] | None:
        return self._watch(unit, inputs) if unit.cell == self._cell and not unit.is_again else None

    @contextmanager
    def _watch(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> Iterator[None]:
        stage, arguments = self._step.stage, self._step.arguments
        sizes, dim = arguments.rows[unit.microbatch], arguments.seq_dim
        given: list[tuple[Any, int | None]] = [(value, dim) for value in inputs]
        kwargs = self._step.kwargs_of(unit)
        given += [(v, dim if arguments.arg_rules.get(k) == "slice" else None) for k, v in kwargs.items()]
        given += [(arguments.targets[unit.cell], dim)] if arguments.targets is not None else []
        with Watch(stage.index, stage.modules, stage.findings, given, sizes[0], sizes[1]) as unit.watch:
            yield
        unit.watch = None


class Watch(TorchFunctionMode):
    """Around one forward of one stage.

    Args:
        index, modules: of the stage.
        findings: gets what was found.
        given: arguments of the unit, each with the dimension of its tokens, None if it has none. The first tensor's
            first dimension is the batch.
        offset, length: of the segment, in tokens.
    """

    def __init__(
        self,
        index: int,
        modules: Sequence[nn.Module],
        findings: Findings,
        given: Iterable[tuple[Any, int | None]],
        offset: int,
        length: int,
    ) -> None:
        super().__init__()
        self._index, self._findings = index, findings
        self._length, self._end = length, offset + length
        self._offset = offset
        tensors = [(tensor, dim) for value, dim in given for tensor in _flat([value]) if isinstance(tensor, Tensor)]
        self._batch = next((tensor.shape[0] for tensor, _ in tensors if tensor.dim()), 1)
        self._names = {
            id(part): f"{name or 'itself'} ({type(part).__name__})"
            for module in modules
            for name, part in module.named_modules()
        }
        parts = [part for module in modules for part in module.modules()]
        self._tables = {
            id(t) for part in parts for t in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        }
        self._tables |= {id(v) for part in parts for v in part.__dict__.values() if isinstance(v, Tensor)}
        sizes = {size for module in modules for p in module.parameters() for size in p.shape}
        # Whether a size tells by itself that it is one of tokens.
        self._decides = length > 1 and length != self._batch and not {length, self._end} & sizes
        self._lengths = Lengths(length, {length, self._end, self._batch * length}, self._tables)
        for tensor, dim in tensors:
            self._lengths.begin(tensor, dim)
        self._is_lost = False  # what came in had its tokens elsewhere
        self._found: list[tuple[Finding, tuple[int, ...]]] = []  # with the modules around it, from the innermost
        self._believed: set[int] = set()  # modules that carry state
        self._offset_readers: set[int] = set()
        self._counted: dict[int, Tensor] = {}  # by arange or cumsum over the segment's tokens, or made from such
        # By arange over what may be the number of tokens, or another one; with the modules around the place.
        self._guessed: dict[int, tuple[Tensor, tuple[int, ...]]] = {}
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
        found = () if self._is_lost else self._found
        kept = [finding for finding, around in found if not self._believed & set(around)]
        self._findings.judge(kept, self._attends)

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
        if self._length < 2 and name != "batch_norm":
            return result
        result = self._lengths.follow(name, func, args, kwargs, result)
        if "input" in kwargs:
            args = (kwargs["input"], *args)
        look = _LOOKS.get(name)
        if look is not None:
            look(self, name, args, kwargs)
        elif "attention" in name or "flash_attn" in name:
            if getattr(func, "namespace", "") != "seq1f1b":
                _look_at_attention(self, name, args, kwargs)
            else:  # queries are (batch, heads, tokens, head_dim)
                self._is_lost |= self._varying(args[0]) not in (None, [2])
        if isinstance(result, Tensor):
            self._follow_positions(name, args, kwargs, result)
        return result

    def _find(self, cause: str, what: str, around: tuple[int, ...] | None = None) -> None:
        around = self._around() if around is None else around
        place = self._names[around[0]] if around else "the loss"
        self._found.append((Finding(cause, f"stage {self._index}, {place}", what), around))

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

    def _varying(self, tensor: Tensor) -> list[int] | None:
        """The dimensions whose size comes from the tokens; None if that is not known."""
        other = self._lengths.shape_of(tensor)
        return None if other is None else [i for i, size in enumerate(other) if size != tensor.shape[i]]

    def _is_tokens(self, tensor: Tensor, dim: int, more: int = 0) -> bool:
        """Whether this dimension is that of the tokens, and of up to ``more`` others beside them."""
        if not -tensor.dim() <= dim < tensor.dim():
            return False
        varying, dim = self._varying(tensor), dim % tensor.dim()
        if varying is not None:
            return dim in varying
        if not self._decides:
            return False
        if tensor.dim() > 1 and tensor.shape[0] == self._batch * self._length:  # all tokens of all rows
            return dim == 0 or (self._batch == 1 and tensor.shape[dim] == self._length)
        return self._length <= tensor.shape[dim] <= self._length + more

    def _is_constant(self, tensor: Tensor) -> bool:
        return self._varying(tensor) == []

    # -- positions -------------------------------------------------------------------------------------------------

    def _follow_positions(self, name: str, args: Any, kwargs: Any, result: Tensor) -> None:
        tensors = [value for value in _flat(args) if isinstance(value, Tensor)]
        is_of_table = bool(tensors) and id(tensors[0]) in self._tables
        is_sure = bool(self._varying(result))
        if name in ("arange", "linspace", "tensor") and not tensors:
            around = self._around() if self._is_count(name, args, kwargs, result) else ()
            if around and around[0] not in self._offset_readers:
                if is_sure:
                    self._counted[id(result)] = result
                else:
                    self._guessed[id(result)] = (result, around)
        elif name == "cumsum" and not args[0].is_floating_point():
            dim = _argument(args, kwargs, 1, "dim")
            if isinstance(dim, int) and self._is_tokens(args[0], dim):
                self._counted[id(result)] = result
        elif name in ("getitem", "narrow") and is_of_table and self._is_first_rows(name, args):
            if is_sure:
                self._find(POSITIONS, f"takes the first {self._length} rows of a table in every segment")
            else:
                self._guessed[id(result)] = (result, self._around())
        elif any(map(self._is_counted, tensors)):
            self._pass_on(name, args, tensors, result)
        elif any(id(tensor) in self._guessed for tensor in tensors):
            self._pass_guess_on(name, tensors, result)
        elif self._lengths.failed and name in _COMBINES and any(map(self._is_table, tensors)):
            self._find(POSITIONS, f"has a table of {self._length} rows, the same for every segment")

    def _pass_on(self, name: str, args: Any, tensors: list[Tensor], result: Tensor) -> None:
        """An operation on counted positions: are they still that, or used as such?"""
        is_counted = self._is_counted(tensors[0])
        if name in ("getitem", "index_select", "embedding"):
            is_used = name == "embedding" or (id(tensors[0]) in self._tables and not is_counted)
            is_same = is_counted and len(tensors) == 1
        else:
            others = [tensor for tensor in tensors if not self._is_counted(tensor)]
            is_used = name in _USES or (name in _COMBINES and any(map(self._varying, others)))
            is_used &= result.is_floating_point()
            is_same = name in _SHAPES or (name in _SHIFTS and self._keeps_zero(args)) or name in ("mul", "rmul", "imul")
        if is_used:
            self._find(POSITIONS, f"counts the {self._length} tokens of every segment")
        elif is_same:
            self._counted[id(result)] = result

    def _pass_guess_on(self, name: str, tensors: list[Tensor], result: Tensor) -> None:
        """An operation on what counts to a number that need not be that of the tokens, as ``arange(len(x[0]))``.

        It counts the tokens if what was computed from it fits only a segment as long as this one.
        """
        guess, around = next(self._guessed[id(t)] for t in tensors if id(t) in self._guessed)
        if all(map(self._is_constant, tensors)):
            self._guessed[id(result)] = (result, around)
        elif self._lengths.failed and name in _COMBINES and guess.is_floating_point():
            self._find(POSITIONS, f"counts the {self._length} tokens of every segment", around)

    def _keeps_zero(self, args: Any) -> bool:
        """Whether what is added is a number other than the segment's offset."""
        others = [value for value in args if not self._is_counted(value)]
        return bool(others) and all(isinstance(v, (int, float)) and v != self._offset for v in others)

    def _is_table(self, tensor: Tensor) -> bool:
        return id(tensor) in self._tables and tensor.is_floating_point()

    def _is_counted(self, value: Any) -> bool:
        return id(value) in self._counted

    def _is_count(self, name: str, args: Any, kwargs: Any, result: Tensor) -> bool:
        """Whether it has a number for each token, and the first one is not the segment's offset."""
        if result.shape != (self._length,):
            return False
        if name == "tensor":
            is_count = not result.is_floating_point() and result.dtype != torch.bool
            return is_count and bool((result.diff() == 1).all()) and int(result[0]) != self._offset
        start = kwargs.get("start", args[0] if len(args) > 1 else 0)
        step = kwargs.get("step", args[2] if len(args) > 2 and name == "arange" else 1)
        return bool(step == 1 and start != self._offset)

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


# -- operations --------------------------------------------------------------------------------------------------------


def _look_at_attention(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    query, key = _argument(args, kwargs, 0, "query"), _argument(args, kwargs, 1, "key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return
    lengths = {watch._length, watch._end}
    # (..., tokens, features), or (tokens, batch, features); others have them elsewhere.
    places = {"scaled_dot_product_attention": -2, "multi_head_attention_forward": 0}
    dims = [places[name]] if name in places else range(query.dim())
    mixed = False
    for dim in dims:
        if watch._varying(query) is not None and watch._varying(key) is not None:
            mixed |= watch._is_tokens(query, dim) and dim < key.dim() and watch._is_tokens(key, dim)
        elif watch._batch == 1 or query.shape[0] != watch._batch * watch._length:  # else the rows are tokens
            mixed |= query.shape[dim] == watch._length and key.shape[dim] in lengths
    if mixed:
        watch._find(ATTENTION, f"calls {name} on a segment alone")


def _look_at_softmax(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    scores, dim = args[0], _argument(args, kwargs, 1, "dim", -1)
    if not isinstance(scores, Tensor) or not isinstance(dim, int) or scores.dim() < 2:
        return
    others = [i for i in range(scores.dim()) if i != dim % scores.dim()]
    if watch._varying(scores) is None:
        others = [i for i in others if i]
    is_along = watch._is_tokens(scores, dim, more=watch._offset)
    if is_along and any(watch._is_tokens(scores, other) for other in others):
        watch._find(ATTENTION, f"takes a {name} over scores of shape {tuple(map(int, scores.shape))}")
    elif is_along:
        watch._find(STATE, f"takes a {name} over the tokens of a segment")


def _look_at_cumulative(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    dim = _argument(args, kwargs, 1, "dim")
    # Integers are counts: of positions, if they are used as such, or of what only masks and indices depend on.
    if args[0].is_floating_point() and isinstance(dim, int) and watch._is_tokens(args[0], dim):
        watch._find(STATE, f"takes a {name} along the tokens")


def _look_at_convolution(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    x, weight = args[0], _argument(args, kwargs, 1, "weight")
    if not isinstance(weight, Tensor):
        return
    dilation = _argument(args, kwargs, 5, "dilation", 1)
    for i, width in enumerate(weight.shape[2:], start=2):
        step = dilation if isinstance(dilation, int) else dilation[min(i - 2, len(dilation) - 1)]
        if width > 1 and watch._is_tokens(x, i - weight.dim(), more=(width - 1) * step):
            watch._find(STATE, f"calls {name} of width {width} along the tokens")
            return


def _look_at_recurrence(watch: Watch, name: str, args: Any, kwargs: Any) -> None:
    x, is_batch_first = args[0], bool(args[-1])
    dim = 1 if is_batch_first and x.dim() == 3 else 0
    if isinstance(args[1], Tensor) and not args[1].is_floating_point():  # packed: its rows one after the other
        is_along = x.shape[0] == watch._batch * watch._length
    else:
        is_along = watch._is_tokens(x, dim) if watch._varying(x) is not None else x.shape[dim] == watch._length
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
    if any(watch._is_tokens(x, dim) for dim in dims):
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
