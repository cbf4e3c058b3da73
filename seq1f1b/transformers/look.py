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

from seq1f1b.attention.causal import layer_handle
from seq1f1b.engine.model_state import generator_states, set_generator_states
from seq1f1b.transformers.twins import HiddenStates, as_layer, stand_for, twin

__all__: list[str] = []

TOKENS, BORDER = 7, 4  # the sample; its segments are tokens 0 to 3 and 4 to 6
HIDDEN, PER_LAYER, SHARED = "hidden states", "per_layer_input", "shared_kv_states"
GOES_ALONG = {SHARED, "prev_topk_indices"}  # in the message between stages; unused by replaced attention
ERRORS = (TypeError, AttributeError, LookupError, RuntimeError)  # errors of library code with unusual arguments
WITHOUT_EFFECT = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}


def cannot(model: nn.Module) -> str:
    return f"{type(model).__name__} cannot be cut into stages that run by segments"


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


# -- the run of the whole model --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RecordedModel(Record):
    """The record of a whole model.

    Attributes:
        path: name of the list of layers.
        decoder: name of the innermost module around the list that takes token ids.
        before, after: names of the modules with parameters that run before and after the layers.
        kept: names of the modules without parameters, for example rotary embeddings.
    """

    model: Any
    path: str
    layers: nn.ModuleList
    decoder: str
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self.model.get_submodule(self.decoder).forward).parameters


def run_sample(model: Any, path: str, layers: nn.ModuleList) -> RecordedModel:
    """Runs a twin of the model without layers on a few tokens. ``path`` is the name of the list of layers.

    Raises:
        ValueError: the model does not run like transformers' decoders.
    """
    names = path.split(".")
    owners = [".".join(names[:i]) for i in range(len(names))]
    embedding, others = model.get_input_embeddings(), _others(model, path, owners)
    decoder = [name for name in owners if any(m is embedding for m in model.get_submodule(name).modules())][-1]
    problems: list[tuple[int, Exception]] = []
    for outputs in range(3):  # layers may return hidden states alone, or a tuple of one or two
        whole = RecordedModel(outputs=outputs, model=model, path=path, layers=layers, decoder=decoder)
        try:
            is_after = _run(whole, others)
            break
        except (ValueError, *ERRORS) as error:
            problems.append((len(whole.calls), error))
    else:
        _, problem = max(problems, key=lambda found: found[0])  # report the attempt that ran the most layers
        text = f"it does not run as transformers' decoders do: {problem}"
        raise ValueError(f"{cannot(model)}: {with_remedy(text)}") from problem
    whole.kept = [name for name in others if next(model.get_submodule(name).parameters(), None) is None]
    idle = [name for name in others if name not in whole.kept and name not in is_after]
    if idle:
        raise ValueError(
            f"{cannot(model)}: a language model over tokens does not run its {', '.join(idle)}; give its language "
            "model alone, a ...ForCausalLM of its text_config"
        )
    for name in others:
        if name not in whole.kept:
            (whole.after if is_after[name] else whole.before).append(name)
    return whole


def _others(model: Any, path: str, owners: list[str]) -> list[str]:
    """Returns the names of the owners' child modules, without the list of layers."""
    others = []
    for owner in owners:
        parent = model.get_submodule(owner)
        if next(parent.parameters(recurse=False), None) is not None:
            names = ", ".join(name for name, _ in parent.named_parameters(recurse=False))
            raise ValueError(
                f"{cannot(model)}: {owner or 'model'} ({type(parent).__name__}) holds {names} itself, beside its "
                "modules, and no stage would own that; train it whole"
            )
        lists = dict(_lists(parent, owner))
        for name, module in {owner: parent, **lists}.items():
            full = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
            others += [each for each in full if each not in lists and not f"{path}.".startswith(f"{each}.")]
    return [name for name in others if not name.startswith(f"{path}.")]


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the module lists and dicts in a module, nested ones too: a list itself is never called."""
    for child, inner in module.named_children():
        if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            path = f"{name}.{child}" if name else child
            yield path, inner
            yield from _lists(inner, path)


def _run(whole: RecordedModel, others: list[str]) -> dict[str, bool]:
    """Records the layers; returns for each name in ``others`` that runs whether the module runs after the layers."""
    is_after: dict[str, bool] = {}
    probes: dict[nn.Module, nn.Module] = {layer: Probe(layer, i, whole) for i, layer in enumerate(whole.layers)}
    looked_at = twin(whole.model, probes | without_head(whole.model))

    def note_options(_: Any, args: Any, given: dict[str, Any]) -> None:
        whole.options = {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}

    def note_embedding(_: Any, args: Any, out: Tensor) -> None:
        whole.embedded = out.clone()

    for name in others:
        looked_at.get_submodule(name).register_forward_pre_hook(
            lambda *_, name=name: is_after.update({name: is_after.get(name, bool(whole.calls))})
        )
    looked_at.get_submodule(whole.decoder).register_forward_pre_hook(note_options, with_kwargs=True)
    looked_at.get_input_embeddings().register_forward_hook(note_embedding)
    with recording(whole):
        whole.logits = looked_at(input_ids=tokens_of(whole.model), use_cache=False, return_dict=True).logits
    if list(whole.calls) != list(range(len(whole.layers))):
        raise ValueError("it does not run its layers once each, in their order")
    return is_after


def tokens_of(model: Any) -> Tensor:
    """Returns the sample's token ids, (1, TOKENS)."""
    weight = model.get_input_embeddings().weight
    return torch.arange(1, TOKENS + 1, device="cpu" if weight.is_meta else weight.device)[None] % len(weight)


def without_head(model: Any) -> dict[nn.Module, nn.Module]:
    """Returns a stand-in for the head of a model without memory, for use in a twin; else an empty dict."""
    head = model.get_output_embeddings()
    weights = list(head.parameters())
    return {head: HiddenStates(weights[0].dtype)} if any(weight.is_meta for weight in weights) else {}


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


def look_at_layer(layer: nn.Module, attentions: Sequence[Any], index: int, record: Record) -> float:
    """Sets handle, window and chunk of a layer's attentions, as requested by a twin that runs in training mode.

    Returns:
        attention dropout in training.
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
        with recording(record), suppress(EndOfRun):
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
        attention.seq1f1b_layer = layer_handle(attention.layer_idx)
        attention.seq1f1b_window, attention.seq1f1b_chunk = look.window, look.chunk
    return max(look.dropout for look in looks)


class EndOfRun(Exception):
    """The exception that ends a run after the last needed record."""


def _stop(looks: Sequence[AttentionLook], *_: Any) -> None:
    if all(look.calls for look in looks):
        raise EndOfRun
