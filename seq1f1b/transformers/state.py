"""Carries the state of transformers' mixers from segment to segment.

Mixers are state space layers, linear attention and short convolutions. In transformers, a mixer reads the state before
the tokens from a ``Cache``, and stores the state after the tokens there. On a stage, :class:`States` replaces the cache
for mixers alone: layers, masks and attention run without a cache.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import count, pairwise
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seq1f1b.attention.carry import carry_in, carry_out
from seq1f1b.attention.unit import current
from seq1f1b.transformers.twins import become

__all__ = ["carry_states", "mixers", "note_documents"]

_NOTHING = torch.empty(0, device="cpu")
_CACHES = ("cache", "past_key_values", "cache_params")  # name of a mixer's parameter: in 5.24, then two in 5.23
_ZEROS, _RECURRENT = "get_linear_cache", "get_recurrent_state"
_ASKED = (_ZEROS, _RECURRENT, "get_conv_state")  # methods of a cache, called by a mixer's forward


def mixers(module: nn.Module) -> dict[str, Any]:
    """Returns the modules that read states from a cache, by name."""
    kinds: dict[str, Any] = {name: type(own) for name, own in module.named_modules()}
    return {name: module.get_submodule(name) for name, kind in kinds.items() if _way_of(kind) is not None}


@functools.cache
def _way_of(kind: Any) -> str | None:
    """Returns how a mixer takes the state before the tokens, by the names in forward; None if the class is no mixer.

    The result is the scan that takes the state, or else the method of a cache: the scan of ``get_linear_cache`` starts
    from zeros, and a convolution takes the state together with the tokens.
    """
    for each in kind.__mro__:
        code = getattr(inspect.unwrap(vars(each).get("forward")), "__code__", None)
        names = () if code is None else code.co_names
        if not set(_ASKED).isdisjoint(names):
            return next(name for name in (*_SCANS, *_ASKED) if name in names)
    return None


# -- the cache ---------------------------------------------------------------------------------------------------------


class States:
    """A cache for one run of a mixer, with the states before the tokens to read and the states after to write.

    The getters return None, since a mixer with a state runs token by token: in place, with kernels without a backward.
    Instead, the convolution gets the state in :meth:`update_conv_state`, and the scan as an argument.

    Args:
        before: returns the state before the tokens for a key, or None.
    """

    def __init__(self, before: Callable[[int], Tensor | None]) -> None:
        self.before = before
        self.after: dict[int, Tensor] = {}
        self.asked: int  # key of the recurrent state last requested by the mixer, which asks before it scans
        self._heads = count()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Tensor:
        key = _key(layer_idx, state_idx, 0)
        state = self.before(key)
        if state is None:
            width = conv_kernel_size or conv_states.shape[-1]
            full = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            width = state.shape[-1]
            full = torch.cat([state, conv_states], -1)
        self.after[key] = full[..., -width:].clone()  # a view would keep the whole tensor alive
        return full

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.asked, self._heads = _key(layer_idx, state_idx, 1), count()

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self.after[_key(layer_idx, state_idx, 1)] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> None:
        self.asked = _key(layer_idx, 0, 1)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.after[_key(layer_idx, 0, 1)] = linear_cache

    def before_scan(self) -> Tensor | None:
        """Returns the initial state of the next scan; a mixer that scans head by head gets the next head's state."""
        state = self.before(self.asked)
        return state[:, next(self._heads)] if state is not None and state.dim() == 4 else state

    def is_recording_past(self, layer_idx: int) -> bool:
        return True

    def has_previous_state(self, layer_idx: int, state_idx: int | None = None) -> bool:
        return False


def _key(layer_idx: int, state_idx: int, kind: int) -> int:
    return (layer_idx << 8) + (state_idx << 1) + kind


# -- packed documents --------------------------------------------------------------------------------------------------


def note_documents(position_ids: Tensor) -> None:
    """Makes mixers of the running unit reset the state at tokens of position 0."""
    unit: Any = current()
    if unit is None:
        raise ValueError("outside a step, layers with state do not know their doc_ids: use a PipelineEngine")
    unit.starts = [row.nonzero().flatten().tolist() for row in position_ids == 0]


def _pieces(length: int) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """Returns slices of the unit's rows, each with slices of documents and whether each document begins there."""
    unit = current()
    starts = [[]] if unit is None else unit.starts  # [[]]: each row continues one document
    alike = all(row == starts[0] for row in starts)
    found = []
    for i, row in enumerate(starts[:1] if alike else starts):
        borders = sorted({0, *row, length})
        slices = [(slice(a, b), a in row) for a, b in pairwise(borders)]
        found.append((slice(None) if alike else slice(i, i + 1), slices))
    return found


def _part(arguments: Any, batch: int, length: int, rows: slice, tokens: slice) -> Any:
    """Returns a mixer's arguments for slices of rows and tokens."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2 or leaf.shape[1] != length:
            return leaf
        return leaf[rows, tokens] if leaf.shape[0] == batch else leaf[:, tokens]

    return {name: pytree.tree_map(cut, value) for name, value in arguments.items()}


def _joined(outs: list[Any], dim: int) -> Any:
    first = outs[0]
    if len(outs) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(outs, dim)
    return (torch.cat([out[0] for out in outs], dim), *first[1:])


# -- mixers that carry -------------------------------------------------------------------------------------------------


def carry_states(module: nn.Module) -> None:
    """Makes the mixers in a module carry states. Raises ValueError for an unknown scan."""
    for name, mixer in mixers(module).items():
        kind: Any = type(mixer)
        if _way_of(kind) == _RECURRENT:
            raise ValueError(f"{name} ({kind.__name__}) has a scan that cannot be given a state")
        become(mixer, _Carrying)


class _Carrying(nn.Module):
    """The class in front of a mixer's class: passes :class:`States` as cache, and runs packed documents one by one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        mine: Any = type(self)
        kind, signature, cache = _library_s(mine)
        given = signature.bind(self, *args, **kwargs)
        arguments = dict(given.arguments)
        for name, value in given.arguments.items():
            if isinstance(value, Tensor) and value.dtype == torch.int32 and value.dim() == 4:
                arguments[name] = None  # document ids, which are for attention alone
        if arguments.get(cache) is not None:
            return kind.forward(self, *args, **kwargs)
        batch, length = list(arguments.values())[1].shape[:2]
        way = _way_of(kind)

        def run(rows: slice, tokens: slice, is_new: bool) -> tuple[Any, dict[int, Tensor]]:
            def before(key: int) -> Tensor | None:
                state = _NOTHING if is_new else carry_in(key, _NOTHING)
                return None if state is _NOTHING else state[rows]

            states = States(before)
            given.arguments = {**_part(arguments, batch, length, rows, tokens), cache: states}
            function = _with_scan(kind, way, states) if way in _SCANS or way == _ZEROS else kind.forward
            return function(*given.args, **given.kwargs), states.after

        outs, afters = [], []
        for rows, slices in _pieces(length):
            found = [run(rows, tokens, is_new) for tokens, is_new in slices]
            outs.append(_joined([out for out, _ in found], 1))
            afters.append(found[-1][1])
        for key in afters[0]:
            carry_out(key, _joined([after[key] for after in afters], 0))
        return _joined(outs, 0)


@functools.cache
def _library_s(kind: Any) -> tuple[Any, inspect.Signature, str]:
    """Returns the class behind :class:`_Carrying`, the signature of forward, and the name of the cache parameter."""
    own: Any = kind.__mro__[kind.__mro__.index(_Carrying) + 1]
    signature = inspect.signature(own.forward)
    return own, signature, next(name for name in _CACHES if name in signature.parameters)


def _with_scan(kind: Any, way: str, states: States) -> Any:
    """Returns a mixer's forward, changed so that the scan starts from the state before the tokens."""
    plain: Any = inspect.unwrap(kind.forward)
    own: dict[str, Any] = {"torch": _FirstState(states)}
    if way != _ZEROS:
        own = {way: functools.partial(_SCANS[way], plain.__globals__[way], states)}
    made = FunctionType(
        plain.__code__, {**plain.__globals__, **own}, plain.__name__, plain.__defaults__, plain.__closure__
    )
    made.__kwdefaults__ = plain.__kwdefaults__
    return made


def _given(name: str, scan: Any, states: States, *args: Any, **kwargs: Any) -> Any:
    """Runs a scan with the state before the tokens as argument ``name``."""
    return scan(*args, **{**kwargs, name: states.before(states.asked)})


def _selective_scan(
    scan: Any, states: States, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Runs Mamba's scan, which takes no initial state h, and adds h's part: the scan is linear in the state.

    Also computes the state after the tokens, for which the library's kernel has no gradient. With steps d,
    h_t = exp(A d_t) h_{t-1} + d_t B_t u_t and y_t = C_t h_t. [Mamba, arXiv:2312.00752, eq. 2]

    Args:
        u, dt: (batch, channels, tokens).
        A: (channels, states), not positive.
        B, C: (batch, states, tokens).
    """
    out, _ = scan(u, dt, A, B, C, **{**kwargs, "return_last_state": True})
    if kwargs.get("delta_bias") is not None:
        dt = dt + kwargs["delta_bias"].to(dt.dtype)[..., None]
    step = (F.softplus(dt) if kwargs.get("delta_softplus") else dt).float()
    so_far = step.cumsum(-1)
    to_end = torch.exp(A[:, None] * (so_far[..., -1:] - so_far)[..., None])  # (batch, channels, tokens, states)
    last = torch.einsum("bdsn,bds,bns->bdn", to_end, step * u.float(), B.float())
    state = states.before_scan()
    if state is not None:
        decayed = torch.exp(A[:, None] * so_far[..., None]) * state[:, :, None].float()
        more = torch.einsum("bdsn,bns->bds", decayed, C.float())
        z = kwargs.get("z")
        out = out + (more if z is None else more * F.silu(z.float())).to(out.dtype)
        last = last + decayed[:, :, -1]
    return out, last


class _FirstState:
    """A stand-in for the module torch in MiniMax's lightning attention: ``zeros`` returns the state before the tokens.

    The scan by blocks starts from ``torch.zeros``. Given a state, the library would instead run token by token, in
    Python, and round decays differently.
    """

    def __init__(self, states: States) -> None:
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *shape: int, **options: Any) -> Tensor:
        state = self._states.before(self._states.asked)
        return torch.zeros(*shape, **options) if state is None else state


_SCANS: dict[str, Any] = {  # scans of many tokens, by the names in mixers
    "mamba2_chunk_scan": functools.partial(_given, "initial_states"),
    "torch_chunk_gated_delta_rule": functools.partial(_given, "initial_state"),
    "chunk_kimi_delta_attention": functools.partial(_given, "initial_state"),
    "mamba_selective_scan": _selective_scan,
}
