"""Records the arguments of each layer of a transformers model, and of each layer's attention, on a few tokens.

``pipeline_stage`` records the whole model, and a stage that gets the tokens in two segments, and refuses differences.
Only twins of the modules run, which share tensors with the trained modules.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seq1f1b.engine.model_state import generator_states, set_generator_states
from seq1f1b.transformers.twins import as_layer, stand_for, twin

__all__: list[str] = []

TOKENS, BORDER = 7, 4  # the sample; its segments are tokens 0 to 3 and 4 to 6
HIDDEN, PER_LAYER, SHARED = "hidden states", "per_layer_input", "shared_kv_states"
GOES_ALONG = {SHARED, "prev_topk_indices"}  # in the message between stages; unused by replaced attention
ERRORS = (TypeError, AttributeError, LookupError, RuntimeError)  # errors of library code with unusual arguments
WITHOUT_EFFECT = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}


def with_remedy(text: str) -> str:
    return text if "run the model whole" in text or "use vocabulary=" in text else f"{text}; train it whole"


# -- records -----------------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """One layer's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: dict[str, Any]
    """Hidden states and arguments by name, as they were then."""

    @property
    def hidden(self) -> Tensor:
        return self.given[HIDDEN]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Mask:
    """A causal mask, unchanged by the model."""

    window: int | None
    chunk: int | None


@dataclass
class Record:
    """The arguments of a model's layers, and the model's outputs."""

    calls: dict[int, Call] = field(default_factory=dict)
    embedded: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Flags and numbers that the decoder was told beside its input."""
    logits: Any = None
    outputs: int = 0
    """Length of the tuple that a layer returns; 0 if it returns hidden states alone."""
    masks: list[tuple[Tensor, Mask]] = field(default_factory=list)

    def make_mask(
        self, shape: tuple[int, ...], window: int | None, chunk: int | None, dtype: Any, device: Any
    ) -> Tensor:
        """Returns a placeholder for a mask; :meth:`mask_of` recognizes the tensor in a layer's arguments."""
        mask = torch.zeros(shape, dtype=dtype, device=device)
        self.masks.append((mask, Mask(window, chunk)))
        return mask

    def mask_of(self, tensor: Tensor) -> Mask | None:
        """Returns the mask behind a tensor or view; None if the model has made or changed the tensor."""
        for own, mask in self.masks:
            if tensor.untyped_storage()._cdata == own.untyped_storage()._cdata and own._version == 0:
                return mask
        return None


_recording: ContextVar[Record | None] = ContextVar("_recording", default=None)


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Lets the record make all masks in the ``with`` block, without autograd; restores the random state."""
    token, cpu = _recording.set(record), torch.device("cpu")
    states = generator_states(cpu)
    try:
        with torch.no_grad():
            yield
    finally:
        set_generator_states(cpu, states)
        _recording.reset(token)


def current_record() -> Record | None:
    return _recording.get()


_UNKNOWN = math.nan  # a layer's further outputs: nan != nan, so a layer that gets one of them is refused


class Probe(nn.Module):
    """A stand-in for a layer that records the arguments and returns rotated hidden states."""

    def __init__(self, layer: nn.Module, index: int, record: Record) -> None:
        super().__init__()
        names = list(inspect.signature(type(layer).forward).parameters)[2:]
        self.__dict__["_looked_at"] = (layer, index, record, names)
        stand_for(layer, self, record.outputs)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, index, record, names = self.__dict__["_looked_at"]
        if index in record.calls:
            raise ValueError("it runs a layer more than once")
        if any(hidden_states.shape != call.hidden.shape for call in record.calls.values()):
            raise ValueError("its layers do not simply follow one another")
        given = {**dict(zip_longest(names[: len(args)], args)), **kwargs}
        if stores_keys(layer):
            kwargs[SHARED].update(_keys_and_values(layer, hidden_states, args, kwargs))
        for name in GOES_ALONG & given.keys():
            given[name] = None
        known = pytree.tree_map(lambda x: record.mask_of(x) or x.clone() if isinstance(x, Tensor) else x, given)
        record.calls[index] = Call(args, kwargs, {HIDDEN: hidden_states.clone(), **known})
        return as_layer(self, hidden_states.roll(1, -1), _UNKNOWN)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it reads {name!r} of layer {self.__dict__['_looked_at'][1]}, beside calling it")


def stores_keys(layer: nn.Module) -> list[str]:
    """Returns the kinds of layers that reuse this layer's keys and values."""
    return [m.layer_type for m in layer.modules() if getattr(m, "store_full_length_kv", False)]  # type: ignore[misc]


def takes_keys(layer: nn.Module) -> list[str]:
    """Returns the kinds of layers whose keys and values this layer reuses."""
    return [m.layer_type for m in layer.modules() if getattr(m, "is_kv_shared_layer", False)]  # type: ignore[misc]


def _keys_and_values(layer: nn.Module, hidden: Tensor, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    stored = _Stored()
    with suppress(EndOfRun):
        twin(layer, {})(hidden, *args, **{**kwargs, SHARED: stored})
    return stored


class _Stored(dict[str, Any]):
    def __setitem__(self, kind: str, pair: Any) -> None:
        super().__setitem__(kind, pair)
        raise EndOfRun


# -- values of the whole sample and of its segments --------------------------------------------------------------------


def difference(whole: Any, parts: Sequence[Any]) -> str:
    """Returns how a value of the whole sample differs from the segments' values; "" if equal."""
    leaves, spec = pytree.tree_flatten(whole)
    flat = [pytree.tree_flatten(part) for part in parts]
    if any(other != spec for _, other in flat):
        return f"of the form {flat[0][1]}, there {spec}"
    found = (_difference_of_leaves(want, [values[i] for values, _ in flat]) for i, want in enumerate(leaves))
    return next(filter(None, found), "")


def _difference_of_leaves(want: Any, parts: Sequence[Any]) -> str:
    if not isinstance(want, Tensor) or not all(isinstance(part, Tensor) for part in parts):
        is_same = all(type(part) is type(want) and part == want for part in parts)
        return "" if is_same else f"{list(parts)!r}, there {want!r}"
    shapes, lengths = [part.shape for part in parts], (BORDER, TOKENS - BORDER)
    of_segments = [[(*want.shape[:d], n, *want.shape[d + 1 :]) for n in lengths] for d in range(want.dim())]
    dims = [d for d, those in enumerate(of_segments) if shapes == those and want.shape[d] == TOKENS]
    for found in [torch.cat(list(parts), dims[0])] if dims else parts:
        # Rounding may depend on the shape; a real error is larger.
        bound = torch.finfo(want.dtype).eps ** 0.5 if want.is_floating_point() or want.is_complex() else 0.0
        scale = float(want.abs().nan_to_num(posinf=0).max()) if bound and want.numel() else 0.0
        try:
            torch.testing.assert_close(found, want, rtol=0, atol=bound * scale, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).split())
    return ""


# -- the attention of a layer ------------------------------------------------------------------------------------------


@dataclass
class AttentionLook:
    """A stand-in for an attention's layer index that records the kind of attention requested by a layer."""

    index: int
    record: Record
    calls: int = 0
    window: int | None = None
    chunk: int | None = None
    dropout: float = 0.0

    def note(self, window: int | None, mask: Any, dropout: float, others: Mapping[str, Any]) -> None:
        """Records window and chunk of the mask, and raises ValueError for any unsupported argument."""
        self.calls += 1
        self.window, self.dropout = window, dropout
        if self.calls > 1:
            raise ValueError("it runs attention more than once, whose keys and values need an entry of the cache each")
        for name in others.keys() - self.record.calls[self.index].given.keys() - WITHOUT_EFFECT:
            if others[name] is not None and others[name] is not False:
                raise ValueError(f"its attention is given {name!r}, which is not known here")
        if mask is None:
            return
        known = self.record.mask_of(mask)
        if known is None:
            raise ValueError("its attention gets a mask that the model has made or changed itself")
        if window not in (None, known.window):
            raise ValueError(f"its attention is told a window of {window} tokens, its mask one of {known.window}")
        self.window, self.chunk = known.window, known.chunk


def look_at_attention(layer: nn.Module, attentions: Sequence[Any], index: int, record: Record) -> list[AttentionLook]:
    """Returns the requests of a layer's attentions, from a twin in training mode that runs until all have returned.

    Raises:
        ValueError: ``attn_implementation="seq1f1b"`` does not support a request.
    """
    looks = [AttentionLook(index, record) for _ in attentions]
    call = record.calls[index]
    before = [attention.__dict__.get("seq1f1b_layer") for attention in attentions]
    instead: dict[nn.Module, nn.Module] = {}
    try:
        for attention, look in zip(attentions, looks, strict=True):
            attention.seq1f1b_layer = look  # set on the original module: a replaced forward may be bound to it
            inside = instead[attention] = twin(attention, {})
            inside.training = True
            inside.register_forward_hook(partial(_stop, looks))
        with suppress(EndOfRun):
            twin(layer, instead)(call.hidden, *call.args, **call.kwargs)
    except ERRORS as error:
        raise ValueError(f"it does not run alone: {type(error).__name__}: {error}") from error
    finally:
        for attention, own in zip(attentions, before, strict=True):
            attention.seq1f1b_layer = own
    for attention, look in zip(attentions, looks, strict=True):
        if not look.calls:
            raise ValueError(
                f"{type(attention).__name__} does not call the function of its config's attn_implementation, but has "
                "an attention of its own"
            )
    return looks


class EndOfRun(Exception):
    """The exception that ends a run after the last needed record."""


def _stop(looks: Sequence[AttentionLook], *_: Any) -> None:
    if all(look.calls for look in looks):
        raise EndOfRun
