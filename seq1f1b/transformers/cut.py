"""Cuts a decoder-only model of Hugging Face transformers into pipeline stages of about equal cost."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Container, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seq1f1b.engine.ties import carried, carry_attributes, check_hooks, num_hooks
from seq1f1b.engine.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from seq1f1b.partition import balanced
from seq1f1b.transformers.initial import compute_buffers, one_at_a_time
from seq1f1b.transformers.layers import (
    check_adapters,
    check_config,
    copy_config,
    find_layers,
    switch_attention,
)
from seq1f1b.transformers.look import (
    BORDER,
    ERRORS,
    HIDDEN,
    PER_LAYER,
    TOKENS,
    WITHOUT_EFFECT,
    Mask,
    Probe,
    Record,
    RecordedModel,
    attentions_of,
    cannot,
    difference,
    recording,
    run_sample,
    stores_keys,
    takes_keys,
    tokens_of,
    with_remedy,
    without_head,
)
from seq1f1b.transformers.own import adapt
from seq1f1b.transformers.pretrained import open_folder
from seq1f1b.transformers.stage import AbsentLayer, CausalLMStage, Entry, Exit, Message, NoEmbedding
from seq1f1b.transformers.state import carry_states
from seq1f1b.transformers.twins import HiddenStates, put, shallow, stand_for, twin

__all__ = ["pipeline_stage"]

Tied = dict[str, tuple[nn.Parameter, list[int]]]  # first name -> parameter, stages that hold it
Shards = tuple[VocabularyParallelEmbedding | None, VocabularyParallelHead | None]


def pipeline_stage(
    model: nn.Module | str | os.PathLike[str],
    rank: int,
    num_ranks: int,
    *,
    balance: Sequence[int] | str = "count",
    seq_len: int = 4096,
    vocabulary: str = "ends",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> CausalLMStage:
    """Cuts stage ``rank`` of ``num_ranks`` out of a decoder-only language model.

    The stage runs the model's forward without the other stages' layers, so embeddings and logits are computed as in the
    model. ``pipeline_stage`` switches the model to the attention ``"seq1f1b"``, in a copy of the config. The stage
    shares modules with the model: keep no other reference to the model, and layers of other stages are freed. The model
    may be on the meta device, made from a config without memory; :meth:`CausalLMStage.materialize` then gives the stage
    memory. A folder is never loaded whole: each rank reads only the safetensors of its stage.

    Args:
        model: ``...ForCausalLM`` of transformers, or a ``peft.PeftModel`` around one. Adapters are cut with the layers;
            modules below the first adapter get no gradient and keep nothing for a backward. Or the folder of a
            checkpoint with config.json and safetensors, or a name on the hub.
        rank, num_ranks: index and number of ranks, or of stages if a rank holds several.
        balance: layers of each stage. ``"count"`` spreads layers evenly, and the first stages take the remainder.
            ``"time"`` minimizes the slowest stage's operations in forward and backward: products with weights (only
            the experts that a token visits), attention, and the head on the last stage. Frozen weights have no
            products for weight gradients. Embedding, norms and the loss count nothing.
        seq_len: for ``balance="time"``: tokens of a row, for the cost of attention.
        vocabulary: ``"ends"``: the first stage holds the embedding, the last one the head. ``"ranks"``: every rank
            holds one stage, and rows of both as the stage's ``embedding`` and ``head``: give both to the engine as
            ``embedding`` and ``loss_fn``. :class:`seq1f1b.VocabularyParallelHead` computes the loss.
        dtype: for a folder: dtype of the weights; by default the config's, as in ``from_pretrained``.
        device: for a folder: device of the stage; by default the CPU.
    Raises:
        ValueError: the model, named by the message, cannot run by segments. A folder lacks a file or a weight, or holds
            unknown weights or a quantized model. All ranks raise the error, before reading weights.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}, must be from 0 to num_ranks - 1 = {num_ranks - 1}")
    if vocabulary not in ("ends", "ranks"):
        raise ValueError(f"vocabulary is {vocabulary!r}, must be 'ends' or 'ranks'")
    if isinstance(model, (str, os.PathLike)):
        with one_at_a_time:
            folder = open_folder(model, dtype)
            made = _cut(folder.model, rank, num_ranks, balance, seq_len, vocabulary)
            folder.load(made, "cpu" if device is None else device)
            return made
    if dtype is not None or device is not None:
        raise ValueError("dtype= and device= are for a folder: a model has both already")
    peft, adapted, base = sys.modules.get("peft"), None, model  # a peft model exists only after an import of peft
    if peft is not None and isinstance(model, peft.PeftModel):
        check_adapters(model)
        adapted, base = model, model.get_base_model()
    if not isinstance(base, transformers.PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel, a PeftModel or a folder, got {type(base).__name__}")
    copy_config(model)
    made = _cut(base, rank, num_ranks, balance, seq_len, vocabulary)
    if adapted is not None:  # the adapters' model, around this stage's part of the base model
        around, tuner = shallow(adapted), shallow(adapted.base_model)
        tuner._modules["model"], around._modules["base_model"] = made.causal_lm, tuner
        made.__dict__["peft_model"] = around
    return made


def _cut(
    model: Any, rank: int, num_ranks: int, balance: Sequence[int] | str, seq_len: int, vocabulary: str
) -> CausalLMStage:
    check_config(model)
    adapt(model)
    path, layers = find_layers(model)
    compute_buffers(model, path)
    switch_attention(model, layers)
    whole = run_sample(model, path, layers)
    cuts = [0, *accumulate(_counts(whole, num_ranks, balance, seq_len, vocabulary))]
    own = range(cuts[rank], cuts[rank + 1])

    stage_of = dict.fromkeys(whole.before, 0) | dict.fromkeys(whole.after, num_ranks - 1)
    for stage in range(num_ranks):
        stage_of |= {f"{path}.{i}": stage for i in range(cuts[stage], cuts[stage + 1])}
    tied = find_tied(model, stage_of)
    shards: Shards = (None, None)
    if vocabulary == "ranks":
        shards = make_shards(model, rank, num_ranks, stage_of)
        first = model.get_input_embeddings().weight
        tied = {name: found for name, found in tied.items() if found[0] is not first}
    entry = Entry(message_before(whole, own.start)) if rank > 0 else None
    exit = Exit(message_before(whole, own.stop)) if rank < num_ranks - 1 else None
    part, left_out = make_part(whole, rank, stage_of, tied, shards, (entry, exit))

    has_memory = not all(p.is_meta for p in model.parameters())
    elsewhere = {} if has_memory else {name: model.get_submodule(name) for name in left_out}
    here = {name for name, _ in part.named_parameters(remove_duplicate=False)}
    every = list(model.named_parameters(remove_duplicate=False))
    copies = {  # this rank's names of tied parameters, by the first name in the model
        first: [name for name, p in every if p is tie and name in here]
        for first, (tie, holders) in tied.items()
        if rank in holders
    }
    made = CausalLMStage(part, whole, (rank, num_ranks), (entry, exit), copies, shards, elsewhere)
    try:
        _compare_stage(whole, made, own)
        carry_states(made.causal_lm)
    except (ValueError, *ERRORS) as error:
        raise cannot(model, with_remedy(str(error))) from error
    made.train(model.training)
    return made


def _counts(
    whole: RecordedModel, num_stages: int, balance: Sequence[int] | str, seq_len: int, vocabulary: str
) -> Sequence[int]:
    """Returns the number of layers of each stage."""
    layers = list(whole.layers)
    if len(layers) < num_stages:
        raise ValueError(f"{len(layers)} layers do not fill {num_stages} stages")
    if seq_len < 1:
        raise ValueError(f"seq_len is {seq_len}, must be at least 1")
    if balance == "time":
        masks = [[m for m in pytree.tree_leaves(given) if isinstance(m, Mask)] for given in whole.calls.values()]
        limits = [(own[0].window, own[0].chunk) if own else (None, None) for own in masks]
        work, of_head = layer_work(whole.model, layers, limits, seq_len)
        return balanced(work, of_head if vocabulary == "ends" else 0.0, num_stages)  # or all ranks share it
    if balance == "count":
        return [len(layers) // num_stages + (stage < len(layers) % num_stages) for stage in range(num_stages)]
    if isinstance(balance, str):
        raise ValueError(f"balance is {balance!r}, must be 'count', 'time', or the layers of each stage")
    if len(balance) != num_stages or sum(balance) != len(layers) or min(balance) < 1:
        raise ValueError(f"balance is {list(balance)}, must be {num_stages} counts above 0 with sum {len(layers)}")
    return balance


# -- a stage's part of the model ---------------------------------------------------------------------------------------


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
    own = {name: copy.deepcopy(whole.model.get_submodule(name)) for name in whole.kept}  # small: rotary embeddings
    copied = {id(p): p for p, holders in tied.values() if rank in holders[1:]}  # the first stage keeps the original
    memo: dict[int, Any] = {id(p): p for p in whole.model.parameters()}  # one for all modules, so that ties survive
    memo |= {key: carried(p) for key, p in copied.items()}
    for name in [name for name in stage_of if name not in instead]:
        module = whole.model.get_submodule(name)
        is_copied = any(id(p) in copied for p in module.parameters())
        own[name] = copy.deepcopy(module, memo) if is_copied else module
    places: dict[str, nn.Module] = {}
    if exit is not None:
        places[f"{whole.path}.{exit.message.first}"] = exit
    if entry is not None:
        places[f"{whole.path}.{entry.message.first - 1}"] = entry
    put(part, {**instead, **own, **places}, copies_parents=True)
    for layer, stand_in in zip(whole.layers, part.get_submodule(whole.path), strict=True):
        if isinstance(stand_in, (AbsentLayer, Entry, Exit, NoEmbedding)):
            stand_for(layer, stand_in, whole.outputs)
    return part, list(instead)


# -- what stages hand on -----------------------------------------------------------------------------------------------


def message_before(whole: RecordedModel, first: int) -> Message:
    """Returns the message to the stage that begins with layer ``first``."""
    later = list(whole.layers)[first:]
    hidden = whole.calls[first][HIDDEN]
    dims = [d for d in range(hidden.dim() - 1) if hidden.select(d, 0).shape[:-1] == (1, TOKENS)]
    if hidden.dim() > 3 and len(dims) != 1:
        what = f"hidden states of shape {tuple(hidden.shape)}, which are not streams of (1, {TOKENS}, hidden)"
        raise cannot(whole.model, f"layer {first} gets {what}; train it whole")
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
                what = f"{what}, which stages {its} and {stage} do not share; make them one parameter"
                raise ValueError(f"{what}, or set ensure_weight_tying=False in the config of their adapters")
    tied = {name: (p, sorted(holders[id(p)])) for name, p in model.named_parameters() if len(holders[id(p)]) > 1}
    for name, (parameter, _) in tied.items():
        check_hooks(name, parameter)
    return tied


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


# -- a stage beside the whole model ------------------------------------------------------------------------------------


def _compare_stage(whole: RecordedModel, stage: CausalLMStage, own: range) -> None:
    """Runs a twin of the stage without the layers ``own`` on the segments of the sample, and looks at their attentions.

    Raises:
        ValueError: the stage, or a layer, gets or returns other values than in the whole model.
    """
    every = stage.causal_lm.get_submodule(whole.path)
    layers = {i: every.get_submodule(str(i)) for i in own}
    entry, exit = stage.ends
    first = tokens_of(whole.model) if stage.embedding is None else whole.embedded
    message = Message(0) if entry is None else entry.message
    given: Any = first if entry is None else message_of(message, whole)
    given, parts, outs = given if isinstance(given, tuple) else (given,), [], []
    no_head = without_head(whole.model)
    head = whole.model.get_output_embeddings() if exit is None and stage.head is not None and not no_head else None
    for segment in (slice(0, BORDER), slice(BORDER, TOKENS)):
        record = Record(outputs=whole.outputs)
        instead: dict[nn.Module, nn.Module] = {layer: Probe(layer, i, record, True) for i, layer in layers.items()}
        instead |= {module: module for module in (entry, exit) if module is not None}
        if stage.head is None and exit is None:
            instead |= without_head(stage.causal_lm)
        positions = torch.arange(TOKENS, device=given[0].device)[None, segment]
        with recording(record):
            looked_at: CausalLMStage = shallow(stage)
            causal_lm = twin(stage.causal_lm, instead)
            looked_at.__dict__.update(causal_lm=causal_lm, _modules=dict(causal_lm.named_children()))
            out = looked_at.run([t.clone() for t in message.tokens_of(given, segment)], positions, None)
            outs.append(out if head is None else head(out))
        parts.append(record)
    for i in layers:
        wanted, found = whole.calls[i], [part.calls.get(i, {}) for part in parts]
        for name in dict.fromkeys(name for given in (wanted, *found) for name in given):
            problem = difference(wanted.get(name), [given.get(name) for given in found])
            if problem and not (name in WITHOUT_EFFECT and wanted.get(name) is None):
                hint = "; its embedding numbers tokens itself, or mixes them" if (name, i) == (HIDDEN, 0) else ""
                raise ValueError(f"layer {i} gets other {name!r} than in the whole model: {problem}{hint}")
    kind, want = ("logits", whole.logits) if exit is None else (HIDDEN, message_of(exit.message, whole))
    problem = difference(want, outs)
    if problem:
        raise ValueError(f"the stage's {kind} are not those of the whole model: {problem}")
    stage.dropout = max(part.dropout for part in parts)


_BACKWARD_OF_ATTENTION = 2.5  # products of flash attention's backward over those of its forward: 5 / 2
_VISITED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts", "top_k")


def layer_work(
    model: Any, layers: Sequence[nn.Module], limits: Sequence[tuple[int | None, int | None]], seq_len: int
) -> tuple[list[float], float]:
    """Returns floating-point operations per token and step: a list for the layers, a number for the head.

    Counts products with weight matrices, with as many experts as a token visits, and attention over the earlier tokens
    of ``seq_len``, or of the layer's window or chunk (``limits``). Each product has a forward, a backward for the input
    unless nothing below is trained, and a backward for the weights if trained.
    """
    config = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    trained = any(p.requires_grad for p in embedding.parameters())  # whether any module up to here is trained
    work = []
    for layer, (window, chunk) in zip(layers, limits, strict=True):
        length = min(seq_len, chunk or seq_len)
        trained = trained or any(p.requires_grad for p in layer.parameters())
        of_attention = _attended(layer, config, min(length, window or length), length)
        work.append(of_attention * (1 + _BACKWARD_OF_ATTENTION * trained))
        for name, p in layer.named_parameters():
            if p.dim() >= 2:
                work[-1] += _products(name, p, layer, config) * (1.0 + trained + p.requires_grad)
    return work, 2.0 * head.weight.numel() * (1.0 + trained + head.weight.requires_grad)


def _products(name: str, parameter: Tensor, layer: nn.Module, config: Any) -> float:
    """Returns two operations per element of a parameter, times the share of experts that a token visits."""
    path = name.split(".")
    at = next((i for i, part in enumerate(path) if part.endswith("experts") and not part.startswith("shared")), None)
    share = 1.0
    if at is not None:
        experts = layer.get_submodule(".".join(path[: at + 1]))
        total = len(experts) if isinstance(experts, nn.ModuleList) else parameter.shape[0] if parameter.dim() > 2 else 1
        visited = next((n for n in (getattr(config, key, None) for key in _VISITED) if n), 1)
        share = min(1.0, visited / total)
    return 2.0 * parameter.numel() * share


def _attended(layer: nn.Module, config: Any, window: int, seq_len: int) -> float:
    """Returns the operations of attention in one forward, per token, averaged over a sequence."""
    attention: Any = next(iter(attentions_of(layer)), None)
    if attention is None:
        return 0.0
    heads = getattr(config, "num_attention_heads", 1)
    size = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
    of_keys: int = getattr(attention, "qk_head_dim", None) or size
    of_values: int = getattr(attention, "v_head_dim", None) or size
    pairs = window - window * (window - 1) / 2 / seq_len  # keys per query, mean over seq_len tokens, itself included
    return 2.0 * heads * (of_keys + of_values) * pairs
