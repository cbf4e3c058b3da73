"""A stage beside the whole model: what it gives its layers, and what these ask for, of the sample in two segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from seq1f1b.ops.attention import layer_handle
from seq1f1b.transformers.layers import attentions_of, cannot
from seq1f1b.transformers.look import (
    BORDER,
    ERRORS,
    HIDDEN,
    TOKENS,
    WITHOUT_EFFECT,
    Probe,
    Record,
    difference,
    look_at_attention,
    recording,
    with_remedy,
)
from seq1f1b.transformers.parts import message_of
from seq1f1b.transformers.sample import Whole, tokens_of, without_head
from seq1f1b.transformers.stage import CausalLMStage, Message
from seq1f1b.transformers.state import carry_states, look_at_states, mixers
from seq1f1b.transformers.twins import twin

__all__: list[str] = []


def compare_stage(whole: Whole, stage: CausalLMStage, own: range) -> float:
    """Tells the attentions and mixers of a stage what they are; returns the dropout of its attention in training.

    Args:
        own: the stage's layers.
    Raises:
        ValueError: the stage, or a layer, computes something else in segments than in the whole model.
    """
    model, layers = whole.model, stage.causal_lm.get_submodule(whole.path)
    own_layers = {i: layers.get_submodule(str(i)) for i in own}
    try:
        _compare_segments(whole, stage, own_layers)
    except (ValueError, *ERRORS) as error:
        text = f"on the stage of layers {own.start} to {own.stop - 1}, {error}"
        raise ValueError(f"{cannot(model)}: {with_remedy(text)}") from error
    carry_states(stage.causal_lm)
    return max(_look_at_layer(model, layer, i, whole.record) for i, layer in own_layers.items())


def _compare_segments(whole: Whole, stage: CausalLMStage, layers: Mapping[int, nn.Module]) -> None:
    """Runs a twin of the stage, without its layers, on the segments of the sample."""
    entry, exit = stage.ends
    first = tokens_of(whole.model) if stage.embedding is None else whole.record.embedded
    message = Message(0) if entry is None else entry.message
    given: Any = first if entry is None else message_of(message, whole)
    given, parts, outs = given if isinstance(given, tuple) else (given,), [], []
    no_head = without_head(whole.model)
    head = whole.model.get_output_embeddings() if exit is None and stage.head is not None and not no_head else None
    for segment in (slice(0, BORDER), slice(BORDER, TOKENS)):
        record = Record(outputs=whole.record.outputs)
        instead: dict[nn.Module, nn.Module] = {layer: Probe(layer, i, record) for i, layer in layers.items()}
        instead |= {module: module for module in (entry, exit) if module is not None}
        if stage.head is None and exit is None:
            instead |= without_head(stage.causal_lm)
        positions = torch.arange(TOKENS, device=given[0].device)[None, segment]
        with recording(record):
            looked_at = stage.around(twin(stage.causal_lm, instead))
            out = looked_at.run([t.clone() for t in message.tokens_of(given, segment)], positions, None)
            outs.append(out if head is None else head(out))
        parts.append(record)
    for i in layers:
        found = [part.calls[i].given if i in part.calls else {} for part in parts]
        _compare_layer(i, whole.record.calls[i].given, found)
    kind, want = ("logits", whole.record.logits) if exit is None else (HIDDEN, message_of(exit.message, whole))
    problem = difference(want, outs)
    if problem:
        raise ValueError(f"the {kind} that it returns are not those of the whole model: {problem}")


def _compare_layer(index: int, want: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError if the stage gives a layer something else than the whole model does."""
    for name in dict.fromkeys(name for given in (want, *found) for name in given):
        problem = difference(want.get(name), [given.get(name) for given in found])
        if problem and not (name in WITHOUT_EFFECT and want.get(name) is None):
            hint = "; its embedding numbers tokens itself, or mixes them" if (name, index) == (HIDDEN, 0) else ""
            raise ValueError(f"layer {index} gets other {name!r} than in the whole model: {problem}{hint}")


def _look_at_layer(model: nn.Module, layer: nn.Module, index: int, record: Record) -> float:
    """Tells the layer's attentions what they are. Returns their dropout in training."""
    dropout, attentions = 0.0, attentions_of(layer)
    try:
        with recording(record):
            looks = look_at_attention(layer, attentions, index, record) if attentions else []
            for attention, look in zip(attentions, looks, strict=True):
                attention.seq1f1b_layer = layer_handle(attention.layer_idx)
                attention.seq1f1b_window, attention.seq1f1b_chunk = look.window, look.chunk
                dropout = max(dropout, look.dropout)
            if mixers(layer):
                look_at_states(model, layer, index, record)
    except ValueError as error:
        raise ValueError(f"{cannot(model)}: layer {index}: {with_remedy(str(error))}") from error
    return dropout
