"""Builds one stage's part of a model: the stage's modules, and stand-ins for modules of other stages."""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.engine.ties import carried, carry_attributes, check_hooks, num_hooks
from seq1f1b.engine.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from seq1f1b.transformers.look import HIDDEN, PER_LAYER, TOKENS, RecordedModel, cannot, stores_keys, takes_keys
from seq1f1b.transformers.stage import AbsentLayer, Entry, Exit, Message, NoEmbedding
from seq1f1b.transformers.twins import HiddenStates, put, shallow, stand_for

__all__: list[str] = []

Tied = dict[str, tuple[nn.Parameter, list[int]]]  # first name -> parameter, stages that hold it
Shards = tuple[VocabularyParallelEmbedding | None, VocabularyParallelHead | None]


def make_part(
    whole: RecordedModel,
    rank: int,
    stage_of: Mapping[str, int],
    tied: Tied,
    shards: Shards,
    ends: tuple[Entry | None, Exit | None],
) -> tuple[Any, list[str]]:
    """Returns a copy of the model with this rank's modules, and the names of the modules left to other stages."""
    part, (embedding, head), (entry, exit) = shallow(whole.model), shards, ends
    instead: dict[str, nn.Module] = {
        name: NoEmbedding(entry) if name in whole.before else AbsentLayer()
        for name, at in stage_of.items()
        if at != rank
    }
    if embedding is not None and stage_of[embedding.name] == rank:
        instead[embedding.name] = NoEmbedding(entry)
    if head is not None and stage_of[head.name] == rank:
        instead[head.name] = HiddenStates(head.linear.weight.dtype)
    own = _own_modules(whole.model, rank, [name for name in stage_of if name not in instead], tied)
    own |= {name: copy.deepcopy(whole.model.get_submodule(name)) for name in whole.kept}  # small: rotary embeddings
    places: dict[str, nn.Module] = {}
    if exit is not None:
        places[f"{whole.path}.{exit.message.first}"] = exit
    if entry is not None:
        places[f"{whole.path}.{entry.message.first - 1}"] = entry
    put(part, {**instead, **own, **places}, copied=set())
    for layer, stand_in in zip(whole.layers, part.get_submodule(whole.path), strict=True):
        if isinstance(stand_in, (AbsentLayer, Entry, Exit, NoEmbedding)):
            stand_for(layer, stand_in, whole.outputs)
    return part, list(instead)


def _own_modules(model: nn.Module, rank: int, names: Sequence[str], tied: Tied) -> dict[str, nn.Module]:
    """Returns named modules of the model; a module that shares parameters with an earlier stage is copied."""
    copied = {id(p): p for p, holders in tied.values() if rank in holders[1:]}  # the first keeps the original
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}  # one for all modules, so that ties survive
    memo |= {key: carried(p) for key, p in copied.items()}
    found = {}
    for name in names:
        module = model.get_submodule(name)
        is_copied = any(id(p) in copied for p in module.parameters())
        found[name] = copy.deepcopy(module, memo) if is_copied else module
    return found


# -- what stages hand on -----------------------------------------------------------------------------------------------


def message_before(whole: RecordedModel, first: int) -> Message:
    """Returns the message to the stage that begins with layer ``first``."""
    later = list(whole.layers)[first:]
    hidden = whole.calls[first][HIDDEN]
    dims = [d for d in range(hidden.dim() - 1) if hidden.select(d, 0).shape[:-1] == (1, TOKENS)]
    if hidden.dim() > 3 and len(dims) != 1:
        what = f"hidden states of shape {tuple(hidden.shape)}, which are not streams of (1, {TOKENS}, hidden)"
        raise ValueError(f"{cannot(whole.model)}: layer {first} gets {what}; train it whole")
    given = [whole.calls[i] for i in range(first, len(whole.layers))]
    values = [value for its in given for name, value in its.items() if name != HIDDEN and isinstance(value, Tensor)]
    stored = {kind for layer in list(whole.layers)[:first] for kind in stores_keys(layer)}
    return Message(
        first,
        dims[0] if hidden.dim() > 3 else None,
        any(whole.embedded is not None and torch.equal(value, whole.embedded) for value in values),
        any(isinstance(its.get(PER_LAYER), Tensor) for its in given),
        tuple(sorted(stored & {kind for layer in later for kind in takes_keys(layer)})),
    )


def message_of(message: Message, whole: RecordedModel) -> Any:
    """Returns the message's tensors for the sample, from the run of the whole model."""
    exit = Exit(message)
    exit.hidden, exit.embedded, exit.shared = whole.calls[message.first][HIDDEN], whole.embedded, whole.shared
    if message.per_layer:
        exit.per_layer = torch.stack([given[PER_LAYER] for given in whole.calls.values()], 2)
    return exit.take()


# -- parameters of several stages --------------------------------------------------------------------------------------


def find_tied(model: nn.Module, stage_of: Mapping[str, int]) -> Tied:
    """Returns the parameters held by several stages: first name -> parameter and stages."""
    holders: dict[int, set[int]] = {}
    places: dict[Any, tuple[str, int, Tensor]] = {}
    for name, stage in stage_of.items():
        for own, parameter in model.get_submodule(name).named_parameters():
            holders.setdefault(id(parameter), set()).add(stage)
            place = (parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.numel())
            other, its, first = places.setdefault(place, (f"{name}.{own}", stage, parameter))
            if first is not parameter and its != stage and (first.requires_grad or parameter.requires_grad):
                what = f"{other} and {name}.{own} are two parameters in one memory"
                raise ValueError(f"{what}, which stages {its} and {stage} do not share; make them one parameter")
    tied = {name: (p, sorted(holders[id(p)])) for name, p in model.named_parameters() if len(holders[id(p)]) > 1}
    for name, (parameter, _) in tied.items():
        check_hooks(name, parameter)
    return tied


def own_copies(model: nn.Module, part: nn.Module, rank: int, tied: Tied) -> dict[str, list[str]]:
    """Returns the names on this rank of tied parameters, keyed by the first name in the model."""
    own = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    every = list(model.named_parameters(remove_duplicate=False))
    return {
        first: [name for name, p in every if p is tie and name in own]
        for first, (tie, holders) in tied.items()
        if rank in holders
    }


def make_shards(
    model: Any, rank: int, num_ranks: int, sides: Container[str]
) -> tuple[VocabularyParallelEmbedding, VocabularyParallelHead]:
    """Returns this rank's rows of embedding and head. Raises ValueError if a shard could not replace a module."""
    names = {module: name for name, module in model.named_modules()}
    given: Any = model.get_input_embeddings(), model.get_output_embeddings()
    for module, kind in zip(given, (nn.Embedding, nn.Linear), strict=True):
        name = names[module]
        what = ""
        if type(module) is not kind:
            what = f"{name!r} is a {type(module).__name__}, not a plain nn.{kind.__name__}"
        elif any(getattr(module, option, None) for option in ("max_norm", "scale_grad_by_freq", "sparse")):
            what = f"{name!r} has options of nn.Embedding that a shard does not take"
        elif name not in sides:
            what = f"{name!r} is a part of a module that does more"
        if what:
            owner = type(model).__name__
            raise ValueError(f'the vocabulary of {owner} cannot be spread over ranks: {what}; use vocabulary="ends"')
    first, last = given
    vocab, hidden = last.weight.shape
    embedding = VocabularyParallelEmbedding(
        *first.weight.shape, rank=rank, num_ranks=num_ranks, name=names[first], padding_idx=first.padding_idx,
        dtype=first.weight.dtype, device=first.weight.device,
    )  # fmt: skip
    head = VocabularyParallelHead(
        hidden, vocab, rank=rank, num_ranks=num_ranks, name=names[last], bias=last.bias is not None,
        dtype=last.weight.dtype, device=last.weight.device,
    )  # fmt: skip
    if not first.weight.is_meta:
        embedding.load_whole(first.weight)
        head.load_whole(last.weight, last.bias)
    for shard, module in ((embedding, first), (head, last)):
        for name, parameter in shard.layer.named_parameters():
            whole = module.get_parameter(name)
            if num_hooks(whole):
                what = f"{names[module]}.{name} has a hook for its gradient, which shards of a vocabulary do not call"
                raise ValueError(f'{what}: remove it, or use vocabulary="ends"')
            parameter.requires_grad_(whole.requires_grad)
            carry_attributes(whole, parameter)
    if last.weight is first.weight:
        head.linear.weight = embedding.layer.get_parameter("weight")
    return embedding, head
