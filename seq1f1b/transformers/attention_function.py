"""The package's attention for Hugging Face transformers, registered as ``"seq1f1b"``; needs no masks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, causal_mask_function

from seq1f1b.attention.causal import causal_attention, positions
from seq1f1b.attention.unit import current
from seq1f1b.transformers.look import Mask, current_record

__all__ = ["NAME", "attention", "no_mask", "refuse_dropout"]

NAME = "seq1f1b"


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Runs :func:`seq1f1b.causal_attention`; ``attn_implementation="seq1f1b"`` selects this function.

    Args:
        module: attention module of a layer; ``module.layer_idx`` names the entry of the KV cache.
        query: (batch, heads, tokens, head_dim); key, value: (batch, kv_heads, tokens, head_dim). The head_dim of
            value may differ.
        attention_mask: None, or doc_ids of packed documents as (batch, 1, 1, tokens), int32: models hand on a mask of
            four dimensions to every layer unchanged.
        scaling, sliding_window, softcap, s_aux, alibi_slopes: the scale, window, softcap, sinks and slopes of
            ``causal_attention``.
    Returns:
        (batch, tokens, heads, head_dim of value), and None for the attention weights.
    Raises:
        ValueError: the model needs dropout, a mask, a position bias, a cache, or attention that is not causal.
    """
    if attention_mask is not None and attention_mask.numel() == 0:
        attention_mask = None
    for name in ("position_bias", "cache"):  # a paged cache
        if others.get(name) is not None:
            _refuse(name, _OTHER)
    if getattr(module, "all_are_chosen", False):
        others.pop("indices", None)
    layer: Any = getattr(module, "seq1f1b_layer", None)
    chunk: Any = None
    record = current_record()
    if record is not None and record.looked_at is not None:
        layer = module.layer_idx
        sliding_window = record.note(layer, sliding_window, attention_mask, dropout, others).window
        attention_mask, dropout = None, 0.0
    elif layer is None:  # uncut; compiled code that reads layer_idx serves one layer only
        layer, chunk = _layer_of(module, sliding_window)
    else:
        chunk = getattr(module, "seq1f1b_chunk", None)
        sliding_window = getattr(module, "seq1f1b_window", None) if sliding_window is None else sliding_window
    refuse_dropout("attention dropout", dropout)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        _refuse("attention that is not causal", _OTHER)
    if attention_mask is not None and attention_mask.dtype != torch.int32:
        _refuse("an attention mask", _ABOUT_PADDING)
    if others.get("output_attentions"):
        _refuse("output_attentions: it never forms the weights", "leave it off")
    if key.shape[2] != query.shape[2]:
        what = f"a key-value cache of transformers ({key.shape[2]} keys for {query.shape[2]} queries)"
        _refuse(what, "set use_cache=False, or generate with another attn_implementation")
    doc_ids = None if attention_mask is None else attention_mask[:, 0, 0]
    query = _with_temperature(module, query, doc_ids)
    if chunk is not None:  # each document is cut into chunks from its first token on: a query sees one chunk only
        first = positions(query, 2) - positions(query, 2, doc_ids=doc_ids) % chunk
        doc_ids = first.expand(query.shape[0], -1)
    out = causal_attention(
        query, key, value, layer=layer, scale=scaling, window=sliding_window, softcap=softcap, doc_ids=doc_ids,
        sinks=s_aux, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return out.transpose(1, 2), None


def no_mask(x: Tensor) -> Tensor:
    """Returns an empty mask for a batch, to replace None: without a mask, the model would take siblings in one unit,
    whose positions restart, for packed documents; and attention that slices the mask cannot slice None.
    """
    return torch.empty(x.shape[0], 1, 1, 0, dtype=torch.int32, device=x.device)


def _with_temperature(module: Any, query: Tensor, doc_ids: Tensor | None) -> Tensor:
    """Returns Llama 4's queries scaled by position in the document.

    In layers without rotation, the model has scaled queries by position counted from 0 in each call, thus per segment.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    unit = None if torch.compiler.is_compiling() else current()
    if unit is not None and unit.watch is not None:
        unit.watch.noted.add("carries")  # the count from 0 is no error of the model: corrected below

    def scale(position: Tensor) -> Tensor:
        steps = torch.floor((position.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * float(module.attn_scale) + 1.0

    wide = torch.promote_types(query.dtype, torch.float32)
    wanted = scale(positions(query, 2, doc_ids=doc_ids)).to(wide)
    found = scale(torch.arange(query.shape[2], device=query.device)).to(wide)
    return (query * (wanted / found).view(-1, 1, query.shape[2], 1)).to(query.dtype)


def _layer_of(module: Any, window: int | None) -> tuple[int, int | None]:
    """Returns the layer index and the chunk length of an attention in an uncut model; refuses a missing window."""
    index: int | None = getattr(module, "layer_idx", None)
    if index is None:
        _refuse(f"{type(module).__name__}, which has no layer_idx", _OTHER)
    config = getattr(module, "config", None)
    types: Any = getattr(config, "layer_types", None)
    slides = types[index] == "sliding_attention" if types else _sliding.get(id(config)) is config is not None
    if slides and window is None:
        _refuse("a sliding window that the model tells its mask only", "cut the model by pipeline_stage")
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    return index, chunk if types is None or types[index] == "chunked_attention" else None


_sliding: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Configs without layer_types whose models asked for a mask with a window, by id: they have no hash."""

_OTHER = "run the model whole, with another attn_implementation"
_ABOUT_PADDING = "pad on the right, with the label -100, and leave attention_mask out"


def _no_mask(
    *,
    batch_size: int = 1,
    q_length: int = 1,
    kv_length: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    local_size: int | None = None,
    config: Any = None,
    **_: Any,
) -> Tensor | None:
    """Answers transformers' call for a mask without building one; raises ValueError if attention would need a mask."""
    if attention_mask is not None and not attention_mask.is_meta and not bool(attention_mask.all()):
        _refuse("an attention_mask with padding", _ABOUT_PADDING)
    if mask_function is bidirectional_mask_function:
        _refuse("a mask that is not causal", _OTHER)
    # The second call also finds functions that run uncompiled after a graph break.
    is_compiled = torch.compiler.is_compiling() or callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())
    if not allow_is_causal_skip and is_compiled:  # transformers then assumes packed documents
        _refuse("torch.compile around a whole model or stage", "compile each of its layers, by layer.compile()")
    if not allow_is_causal_skip and "indexed_attention" not in (getattr(config, "layer_types", None) or ()):
        what = "a mask of the model's own over the causal one, or position_ids of packed documents"
        _refuse(what, "pass the documents' doc_ids to a stage of pipeline_stage")
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if local_size is None and mask_function is not causal_mask_function:
        _refuse("a mask that is not causal", _OTHER)
    if local_size is not None and sizes.count(local_size) != 1:
        _refuse(f"a mask of {local_size} tokens, where the config's window and chunks are of {sizes}", _OTHER)
    window, chunk = (None, local_size) if local_size == sizes[1] else (local_size, None)
    if window is not None and not getattr(config, "layer_types", None) and not torch.compiler.is_compiling():
        _sliding[id(config)] = config
    record = current_record()
    if record is None:
        return None
    placeholder = torch.zeros(batch_size, 1, q_length, kv_length, dtype=dtype, device=device)
    record.masks.append((placeholder, Mask(window, chunk)))
    return placeholder


def _refuse(what: str, remedy: str) -> NoReturn:
    raise ValueError(f'attn_implementation="{NAME}" does not support {what}: {remedy}')


def refuse_dropout(kind: str, rate: float) -> None:
    if rate:
        _refuse(f"{kind} (here {rate})", "set it to 0 in the config before the model is made, or call eval()")


transformers.AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
