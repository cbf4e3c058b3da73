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
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seq1f1b.attention.causal import layer_handle
from seq1f1b.transformers.twins import HiddenStates, as_layer, stand_for, twin

__all__: list[str] = []

TOKENS, BORDER = 7, 4  # the sample; its segments are tokens 0 to 3 and 4 to 6
HIDDEN, PER_LAYER, SHARED = "hidden states", "per_layer_input", "shared_kv_states"
GOES_ALONG = {SHARED, "prev_topk_indices"}  # in the message between stages; unused by replaced attention
ERRORS = (TypeError, AttributeError, LookupError, RuntimeError)  # errors of library code with unusual arguments
WITHOUT_EFFECT = {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}


def cannot(model: nn.Module, why: str) -> ValueError:
    """Returns the error for a model that cannot be cut."""
    return ValueError(f"{type(model).__name__} cannot be cut into stages that run by segments: {why}")


def with_remedy(text: str) -> str:
    return text if "run the model whole" in text or "use vocabulary=" in text else f"{text}; train it whole"


# -- records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mask:
    """A causal mask, unchanged by the model."""

    window: int | None
    chunk: int | None


@dataclass
class Record:
    """The arguments of a model's layers by name, as they were then, and the model's outputs."""

    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    shared: Any = None
    """The keys and values that layers hand on to others."""
    dropout: float = 0.0
    """Attention dropout in training."""
    embedded: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """Flags and numbers that the decoder was told beside its input."""
    logits: Any = None
    outputs: int = 0
    """Length of the tuple that a layer returns; 0 if it returns hidden states alone."""
    masks: list[tuple[Tensor, Mask]] = field(default_factory=list)
    """Placeholders given to the model for its masks."""
    looked_at: dict[str, Any] | None = None
    """The arguments of the layer whose attentions run."""
    attentions: dict[int, Mask] = field(default_factory=dict)
    """The masks of the attentions that have run, by layer_idx."""

    def note(self, layer_idx: int, window: int | None, mask: Any, dropout: float, others: Mapping[str, Any]) -> Mask:
        """Records and returns the mask that an attention is asked for; raises ValueError for an unsupported argument.

        Args:
            window, mask: the window that the attention is told, and the placeholder that the attention is given.
        """
        if layer_idx in self.attentions:
            raise ValueError("it runs attention more than once, whose keys and values need an entry of the cache each")
        for name in others.keys() - (self.looked_at or {}).keys() - WITHOUT_EFFECT:
            if others[name] is not None and others[name] is not False:
                raise ValueError(f"its attention is given {name!r}, which is not known here")
        known = Mask(window, None) if mask is None else self.mask_of(mask)
        if known is None:
            raise ValueError("its attention gets a mask that the model has made or changed itself")
        if window not in (None, known.window):
            raise ValueError(f"its attention is told a window of {window} tokens, its mask one of {known.window}")
        self.attentions[layer_idx], self.dropout = known, max(self.dropout, dropout)
        return known

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
    token = _recording.set(record)
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            yield
    finally:
        _recording.reset(token)


def current_record() -> Record | None:
    return None if torch.compiler.is_compiling() else _recording.get()


_UNKNOWN = math.nan  # a layer's further outputs: nan != nan, so a layer that gets one of them is refused


class Probe(nn.Module):
    """A stand-in for a layer that records the arguments and returns rotated hidden states.

    Args:
        is_own: whether to look at the layer's attentions; they also run if other layers reuse their keys and values.
    """

    def __init__(self, layer: nn.Module, index: int, record: Record, is_own: bool) -> None:
        super().__init__()
        names = signature_of(layer)[2:]
        self.__dict__["_looked_at"] = (layer, index, record, names, is_own or stores_keys(layer))
        stand_for(layer, self, record.outputs)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer, index, record, names, runs_attention = self.__dict__["_looked_at"]
        if index in record.calls:
            raise ValueError("it runs a layer more than once")
        if any(hidden_states.shape != call[HIDDEN].shape for call in record.calls.values()):
            raise ValueError("its layers do not simply follow one another")
        given = {**dict(zip_longest(names[: len(args)], args)), **kwargs}
        record.shared = given.get(SHARED)
        given |= dict.fromkeys(GOES_ALONG & given.keys())
        known = pytree.tree_map(lambda x: record.mask_of(x) or x.clone() if isinstance(x, Tensor) else x, given)
        record.calls[index] = {HIDDEN: hidden_states.clone(), **known}
        if runs_attention:
            _look_at_attentions(layer, index, record, (hidden_states.clone(), *args), kwargs)
        return as_layer(self, hidden_states.roll(1, -1), _UNKNOWN)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it reads {name!r} of layer {self.__dict__['_looked_at'][1]}, beside calling it")


def signature_of(module: nn.Module) -> list[str]:
    """Returns the names of the parameters of a module's class's forward, self included."""
    return list(inspect.signature(type(module).forward).parameters)


def attentions_of(layer: nn.Module) -> list[Any]:
    """Returns a layer's causal attentions. Decoders of encoder-decoders also hold cross-attentions, which never run."""
    return [m for m in layer.modules() if hasattr(m, "layer_idx") and getattr(m, "is_causal", False)]


def stores_keys(layer: nn.Module) -> list[str]:
    """Returns the kinds of layers that reuse this layer's keys and values."""
    return [m.layer_type for m in layer.modules() if getattr(m, "store_full_length_kv", False)]  # type: ignore[misc]


def takes_keys(layer: nn.Module) -> list[str]:
    """Returns the kinds of layers whose keys and values this layer reuses."""
    return [m.layer_type for m in layer.modules() if getattr(m, "is_kv_shared_layer", False)]  # type: ignore[misc]


# -- the run of the whole model --------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class RecordedModel(Record):
    """The record of a whole model.

    Attributes:
        path: name of the list of layers.
        decoder: name of the innermost module around the list that takes token ids.
        before, after: names of the modules with parameters beside the layers; the latter run after the layers.
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
        has_attention = any(attentions_of(layer) for layer in self.layers)
        return has_attention or "position_ids" in signature_of(self.model.get_submodule(self.decoder))


def run_sample(model: Any, path: str, layers: nn.ModuleList) -> RecordedModel:
    """Runs a twin of the model without layers on a few tokens. ``path`` is the name of the list of layers."""
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
        raise cannot(model, with_remedy(f"it does not run as transformers' decoders do: {problem}")) from problem
    for name in others:
        if next(model.get_submodule(name).parameters(), None) is None:
            whole.kept.append(name)
        else:  # a module that does not run lies on the first stage
            (whole.after if is_after.get(name) else whole.before).append(name)
    return whole


def _others(model: Any, path: str, owners: list[str]) -> list[str]:
    """Returns the names of the owners' child modules, without the list of layers. Other lists are never called: their
    modules count.
    """
    for owner in owners:
        parent = model.get_submodule(owner)
        names = ", ".join(name for name, _ in parent.named_parameters(recurse=False))
        if names:
            what = f"{owner or 'model'} ({type(parent).__name__}) holds {names} itself, beside its modules"
            raise cannot(model, f"{what}, and no stage would own that; train it whole")
    holders, others = set(owners), []
    for name, module in model.named_modules():  # a parent comes before its children
        if name.rpartition(".")[0] not in holders or name in (*owners, path):
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            holders.add(name)
        else:
            others.append(name)
    return others


def _run(whole: RecordedModel, others: list[str]) -> dict[str, bool]:
    """Records the layers; returns for each name in ``others`` that runs whether the module runs after the layers."""
    is_after: dict[str, bool] = {}
    probes: dict[nn.Module, nn.Module] = {layer: Probe(layer, i, whole, False) for i, layer in enumerate(whole.layers)}
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
    for want, *found in zip(leaves, *(values for values, _ in flat), strict=True):
        if not all(isinstance(value, Tensor) for value in (want, *found)):
            if any(type(part) is not type(want) or part != want for part in found):
                return f"{found!r}, there {want!r}"
            continue
        shapes, lengths = [part.shape for part in found], (BORDER, TOKENS - BORDER)
        of_segments = [[(*want.shape[:d], n, *want.shape[d + 1 :]) for n in lengths] for d in range(want.dim())]
        dims = [d for d, those in enumerate(of_segments) if shapes == those and want.shape[d] == TOKENS]
        # Rounding may depend on the shape; a real error is larger.
        bound = torch.finfo(want.dtype).eps ** 0.5 if want.is_floating_point() or want.is_complex() else 0.0
        scale = float(want.abs().nan_to_num(posinf=0).max()) if bound and want.numel() else 0.0
        try:
            for part in [torch.cat(found, dims[0])] if dims else found:
                torch.testing.assert_close(part, want, rtol=0, atol=bound * scale, equal_nan=True)
        except AssertionError as error:
            return " ".join(str(error).split())
    return ""


# -- the attention of a layer ------------------------------------------------------------------------------------------


def _look_at_attentions(layer: nn.Module, index: int, record: Record, args: Any, kwargs: dict[str, Any]) -> None:
    """Sets handle, window and chunk of a layer's attentions, as requested by a twin that runs in training mode."""
    attentions = attentions_of(layer)
    instead: dict[nn.Module, nn.Module] = {}

    def stop(*_: Any) -> None:
        if all(attention.layer_idx in record.attentions for attention in attentions):
            raise EndOfRun

    for attention in attentions:
        inside = instead[attention] = twin(attention, {})
        inside.training = True
        inside.register_forward_hook(stop)
    record.looked_at = record.calls[index]
    try:
        with suppress(EndOfRun):
            if attentions:
                twin(layer, instead)(*args, **kwargs)
    except (ValueError, *ERRORS) as error:
        why = "" if isinstance(error, ValueError) else f"it does not run alone: {type(error).__name__}: "
        raise ValueError(f"layer {index}: {why}{error}") from error
    finally:
        record.looked_at = None
    for attention in attentions:
        mask = record.attentions.get(attention.layer_idx)
        if mask is None:
            what = f"{type(attention).__name__} does not call the function that attn_implementation names"
            raise ValueError(f"layer {index}: {what}")
        attention.seq1f1b_layer = layer_handle(attention.layer_idx)
        attention.seq1f1b_window, attention.seq1f1b_chunk = mask.window, mask.chunk


class EndOfRun(Exception):
    """The exception that ends a run after the last needed record."""
