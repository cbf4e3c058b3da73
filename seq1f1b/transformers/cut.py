"""Hugging Face transformers: cuts a decoder-only model into pipeline stages."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from seq1f1b.ops.attention import layer_handle
from seq1f1b.runtime.tied_copies import carried, carry_attributes, check_hooks, num_hooks
from seq1f1b.runtime.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from seq1f1b.transformers.attention_function import NAME
from seq1f1b.transformers.balance import balanced, layer_work
from seq1f1b.transformers.folder import open_folder
from seq1f1b.transformers.initial import compute_buffers, one_at_a_time
from seq1f1b.transformers.layers import (
    attentions_of,
    cannot,
    check_adapters,
    check_config,
    copy_config,
    find_layers,
)
from seq1f1b.transformers.look import (
    BORDER,
    ERRORS,
    HIDDEN,
    PER_LAYER,
    SHARED,
    TOKENS,
    Call,
    Mask,
    Probe,
    Record,
    compare,
    difference,
    look_at_attention,
    recording,
    shallow,
    stand_for,
    stores_keys,
    takes_keys,
    twin,
)
from seq1f1b.transformers.own import adapt
from seq1f1b.transformers.stage import (
    CausalLMStage,
    Elsewhere,
    Entry,
    Exit,
    Hidden,
    Message,
    NoEmbedding,
    names_of,
)
from seq1f1b.transformers.state import carry_states, look_at_states

__all__ = ["pipeline_stage"]

_Tied = dict[str, tuple[nn.Parameter, list[int]]]  # of a parameter's first name: it, and the stages that hold it


def pipeline_stage(
    model: nn.Module | str | os.PathLike[str],
    rank: int,
    num_ranks: int,
    *,
    balance: Sequence[int] | str = "count",
    seq_len: int = 4096,
    vocabulary: str = "whole",
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> CausalLMStage:
    """Cuts stage ``rank`` of ``num_ranks`` out of a decoder-only language model.

    The stage runs the model's own forward with the other stages' layers left out, so it treats embeddings and logits as
    the model does. The model is switched to the attention ``"seq1f1b"``, in a copy of its config. The stage shares its
    modules, so keep no other reference to the model: then layers of other stages are freed. A model on the meta device,
    made from its config without memory, is cut in the same way; :meth:`CausalLMStage.materialize` gives the stage
    memory. A folder is never loaded whole: each rank reads the safetensors of its own stage alone.

    Args:
        model: ``...ForCausalLM`` of transformers, or a ``peft.PeftModel`` around one. Its adapters are cut with the
            layers; what lies below the first of them gets no gradient and keeps nothing for a backward. Or the folder
            of a checkpoint with config.json and safetensors, or its name on the hub.
        rank, num_ranks: index and number of ranks, or of stages if a rank holds several.
        balance: layers of each stage. ``"count"`` spreads them evenly, and the first stages take the rest.
            ``"time"`` makes the slowest stage as fast as it can be, by operations of forward and backward: products
            with weights (of a token's experts alone), attention, and those of the head, which is the last stage's.
            What is frozen has no products for weights. Embedding, norms and the loss are not priced.
        seq_len: for ``balance="time"``: tokens of a row, which decide what attention costs.
        vocabulary: ``"whole"``: the first stage holds the embedding, the last one the head. ``"parallel"``: every rank
            holds rows of both, as the stage's ``embedding`` and ``head``, which the engine takes as ``embedding`` and
            ``loss_fn``; a rank then holds one stage. The loss is that of :class:`seq1f1b.VocabularyParallelHead`.
        dtype: for a folder: of the weights; by default as ``from_pretrained`` has it, the config's.
        device: for a folder: of the stage; by default the CPU.
    Raises:
        ValueError: the model does not follow the library's conventions, or has something that does not run by segments;
            the message names it. A folder lacks a file or a weight, holds others, or is of a quantized model. All
            ranks raise alike, before they read weights.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}, must be from 0 to num_ranks - 1 = {num_ranks - 1}")
    if vocabulary not in ("whole", "parallel"):
        raise ValueError(f"vocabulary is {vocabulary!r}, must be 'whole' or 'parallel'")
    if isinstance(model, (str, os.PathLike)):
        with one_at_a_time:
            folder = open_folder(model, dtype)
            made = _cut(folder.model, rank, num_ranks, balance, seq_len, vocabulary)
            folder.load(made, "cpu" if device is None else device)
            return made
    if dtype is not None or device is not None:
        raise ValueError("dtype= and device= are for a folder: a model has both already")
    base, adapted = _base_of(model, num_ranks)
    copy_config(base if adapted is None else adapted)
    made = _cut(base, rank, num_ranks, balance, seq_len, vocabulary)
    if adapted is not None:
        made.__dict__["peft_model"] = _adapters_around(adapted, made.causal_lm)
    return made


def _cut(
    model: Any, rank: int, num_ranks: int, balance: Sequence[int] | str, seq_len: int, vocabulary: str
) -> CausalLMStage:
    """Cuts a stage out of a model of transformers."""
    check_config(model)
    adapt(model)
    path, layers = find_layers(model)
    _check_balance(balance, seq_len, len(layers), num_ranks)
    compute_buffers(model, path)
    has_attention = _switch_attention(model, layers)

    skeleton, owners = _skeleton(model, path)
    before, after, kept, whole = _sides(model, skeleton, path, owners)
    if balance == "time":
        work, of_head = layer_work(model, list(layers), [_limits(call) for call in whole.calls.values()], seq_len)
        balance = balanced(work, of_head if vocabulary == "whole" else 0.0, num_ranks)  # else all ranks share the head
    cuts = _cuts(balance, len(layers), num_ranks)
    stage_of = dict.fromkeys(before, 0) | dict.fromkeys(after, num_ranks - 1)
    for stage in range(num_ranks):
        stage_of |= {f"{path}.{i}": stage for i in range(cuts[stage], cuts[stage + 1])}
    tied = _tied(model, stage_of)
    embedding, head = _shards(model, rank, num_ranks, stage_of) if vocabulary == "parallel" else (None, None)
    if embedding is not None:
        first = model.get_input_embeddings().weight
        tied = {name: found for name, found in tied.items() if found[0] is not first}

    own = range(cuts[rank], cuts[rank + 1])
    entry = Entry(_message(model, layers, own.start, whole)) if rank > 0 else None
    exit = Exit(_message(model, layers, own.stop, whole)) if rank < num_ranks - 1 else None
    instead: dict[str, nn.Module] = {
        name: NoEmbedding(entry) if name in before else Elsewhere() for name, stage in stage_of.items() if stage != rank
    }
    if embedding is not None and stage_of[embedding.name] == rank:
        instead[embedding.name] = NoEmbedding(entry)
    if head is not None and stage_of[head.name] == rank:
        instead[head.name] = Hidden(head.linear.weight.dtype)
    _place(model, skeleton, rank, stage_of, tied, instead)
    for name in kept:
        _set(skeleton, name, copy.deepcopy(model.get_submodule(name)))  # small: rotary embeddings
    if exit is not None:
        _set(skeleton, f"{path}.{own.stop}", exit)
    if entry is not None:
        _set(skeleton, f"{path}.{own.start - 1}", entry)
    for layer, stand_in in zip(layers, skeleton.get_submodule(path), strict=True):
        if isinstance(stand_in, (Elsewhere, Entry, Exit, NoEmbedding)):
            stand_for(layer, stand_in, whole.outputs)

    decoder = _decoder(model, owners)
    takes_positions = has_attention or "position_ids" in signature(model.get_submodule(decoder).forward).parameters
    options = (_copies(model, skeleton, rank, tied), rank == 0, embedding, head, whole.options, takes_positions)
    has_memory = not all(p.is_meta for p in model.parameters())
    elsewhere = {} if has_memory else {name: model.get_submodule(name) for name in instead}
    made = CausalLMStage(skeleton, decoder, entry, exit, *options, elsewhere=elsewhere)
    made.pipeline_place = rank, num_ranks
    records = [whole, *_check_stage(model, made, path, own, whole)]
    carry_states(skeleton)
    for i in own:
        layer = skeleton.get_submodule(f"{path}.{i}")
        made._dropout = max(made._dropout, _look_at_layer(model, layer, i, records))
    made.train(model.training)
    return made


def _base_of(model: Any, num_ranks: int) -> tuple[transformers.PreTrainedModel, Any]:
    """The model of transformers, and the peft model around it, if there is one."""
    adapted = model if _is_peft_model(model) else None
    if adapted is not None:
        check_adapters(adapted, num_ranks)
        model = adapted.get_base_model()
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            "model must be a transformers.PreTrainedModel, a peft.PeftModel or the folder of one, "
            f"got {type(model).__name__}"
        )
    return model, adapted


def _switch_attention(model: transformers.PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Has the layers' attentions run by seq1f1b's. Returns whether there are any."""
    attentions = [attention for layer in layers for attention in attentions_of(layer)]
    if attentions:
        model.set_attn_implementation(NAME)
        model.config._attn_implementation = NAME  # the model may have declined
    for attention in attentions:
        config = getattr(attention, "config", None)
        if config is not None:  # it may be a copy of the model's
            config._attn_implementation = NAME
    return bool(attentions)


def _place(
    model: nn.Module, skeleton: nn.Module, rank: int, names: Iterable[str], tied: _Tied, instead: dict[str, nn.Module]
) -> None:
    """Puts the model's modules of these names into the skeleton, or what is there instead of them."""
    copied = {id(p) for p, holders in tied.values() if rank != holders[0]}  # the first may be in this process too
    memo: dict[int, Any] = {}  # what two modules of the stage tie stays one
    for name in names:
        module = instead.get(name)
        if module is None:
            module = model.get_submodule(name)
            own = {id(p): p for p in module.parameters()}
            if not copied.isdisjoint(own):
                memo = {key: carried(p) if key in copied else p for key, p in own.items()} | memo
                module = copy.deepcopy(module, memo)
        _set(skeleton, name, module)


def _copies(model: nn.Module, skeleton: nn.Module, rank: int, tied: _Tied) -> dict[str, nn.Parameter]:
    """Parameters of this rank that other stages hold, too, by the first of their names."""
    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    return {
        name: next(parameters[other] for other in names_of(model, p) if other in parameters)
        for name, (p, holders) in tied.items()
        if rank in holders
    }


def _shards(
    model: transformers.PreTrainedModel, rank: int, num_ranks: int, sides: Container[str]
) -> tuple[VocabularyParallelEmbedding, VocabularyParallelHead]:
    """Rows of the model's embedding and head. Raises ValueError where these cannot be spread over ranks."""
    names = {module: name for name, module in model.named_modules()}
    given: Any = model.get_input_embeddings(), model.get_output_embeddings()
    for module, kind in zip(given, (nn.Embedding, nn.Linear), strict=True):
        name = names[module]
        what = ""
        if type(module) is not kind:
            what = f"{name!r} is a {type(module).__name__}, not a plain nn.{kind.__name__}"
        elif any(getattr(module, option, None) for option in ("max_norm", "scale_grad_by_freq", "sparse")):
            what = f"{name!r} has options of nn.Embedding that a shard has not"
        elif name not in sides:
            what = f"{name!r} is a part of a module that does more"
        if what:
            raise ValueError(
                f'the vocabulary of {type(model).__name__} cannot be spread over ranks: {what}; use vocabulary="whole"'
            )
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
                raise ValueError(
                    f"{names[module]}.{name} has a hook for its gradient, which shards of a vocabulary would not call: "
                    'remove it, or use vocabulary="whole"'
                )
            parameter.requires_grad_(whole.requires_grad)
            carry_attributes(whole, parameter)
    if last.weight is first.weight:
        head.linear.weight = embedding.layer.get_parameter("weight")
    return embedding, head


def _is_peft_model(model: Any) -> bool:
    peft = sys.modules.get("peft")  # whoever made such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def _adapters_around(model: Any, skeleton: nn.Module) -> Any:
    """A shallow copy of a peft model, around one stage's part of what it was around."""
    new, tuner = shallow(model), shallow(model.base_model)
    tuner._modules["model"], new._modules["base_model"] = skeleton, tuner
    return new


def _check_balance(balance: Sequence[int] | str | None, seq_len: int, num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers do not fill {num_stages} stages")
    if seq_len < 1:
        raise ValueError(f"seq_len is {seq_len}, must be at least 1")
    if isinstance(balance, str):
        if balance not in ("count", "time"):
            raise ValueError(f"balance is {balance!r}, must be 'count', 'time', or the layers of each stage")
    elif balance is not None and (len(balance) != num_stages or sum(balance) != num_layers or min(balance) < 1):
        raise ValueError(
            f"balance is {list(balance)}, must be {num_stages} counts of layers that sum to {num_layers}, none below 1"
        )


def _limits(call: Call) -> tuple[int | None, int | None]:
    """Window and chunk of a layer's mask."""
    masks = [value for value in pytree.tree_leaves(call.given) if isinstance(value, Mask)]
    return (masks[0].window, masks[0].chunk) if masks else (None, None)


def _cuts(balance: Sequence[int] | str | None, num_layers: int, num_stages: int) -> list[int]:
    if balance is None or isinstance(balance, str):
        each, rest = divmod(num_layers, num_stages)
        balance = [each + (stage < rest) for stage in range(num_stages)]
    return [sum(balance[:stage]) for stage in range(num_stages + 1)]


def _message(model: nn.Module, layers: nn.ModuleList, first: int, whole: Record) -> Message:
    """What the stage that begins with layer ``first`` is given."""
    hidden, later = whole.calls[first].hidden, list(layers)[first:]
    dims = [d for d in range(hidden.dim() - 1) if hidden.select(d, 0).shape[:-1] == (1, TOKENS)]
    if hidden.dim() > 3 and len(dims) != 1:
        raise ValueError(
            f"{cannot(model)}: layer {first} gets hidden states of shape {tuple(hidden.shape)} for (1, {TOKENS}) "
            "tokens, which are not streams of (batch, tokens, hidden); train it whole"
        )
    given = [whole.calls[i].given for i in range(first, len(layers))]
    stored = {kind for layer in list(layers)[:first] for kind in stores_keys(layer)}
    return Message(
        first,
        dims[0] if hidden.dim() > 3 else None,
        any(_is_embedded(value, whole) for its in given for name, value in its.items() if name != HIDDEN),
        any(isinstance(its.get(PER_LAYER), Tensor) for its in given),
        tuple(sorted(stored & {kind for layer in later for kind in takes_keys(layer)})),
    )


def _is_embedded(value: Any, whole: Record) -> bool:
    return isinstance(value, Tensor) and whole.embedded is not None and torch.equal(value, whole.embedded)


def _message_of(message: Message, whole: Record) -> Any:
    """What a stage would hand on of the sample, run by the whole model."""
    exit, calls = Exit(message), [whole.calls[i] for i in sorted(whole.calls)]
    exit.hidden, exit.embedded = calls[message.first].hidden, whole.embedded
    if message.per_layer:
        exit.per_layer = torch.stack([call.given[PER_LAYER] for call in calls], 2)
    if message.shared:
        exit.shared = calls[-1].kwargs[SHARED]
    return exit.take()


def _skeleton(model: nn.Module, path: str) -> tuple[Any, list[str]]:
    """Copies of the modules that contain the list of layers, and of the list, which share everything below."""
    skeleton = shallow(model)
    names = path.split(".")
    for i in range(len(names)):
        name = ".".join(names[: i + 1])
        _set(skeleton, name, shallow(model.get_submodule(name)))
    owners = [".".join(names[:i]) for i in range(len(names))]
    for owner in owners:
        for name, module in list(_lists(skeleton.get_submodule(owner), owner)):
            if not f"{path}.".startswith(f"{name}."):
                _set(skeleton, name, shallow(module))
    return skeleton, owners


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Lists in a module that are not called themselves, and lists in these."""
    for child, inner in module.named_children():
        if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            path = f"{name}.{child}" if name else child
            yield path, inner
            yield from _lists(inner, path)


def _called(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules of which a module consists, with those of its lists in place of these."""
    lists = dict(_lists(module, name))
    for path, owner in {name: module, **lists}.items():
        for child, inner in owner.named_children():
            full = f"{path}.{child}" if path else child
            if full not in lists:
                yield full, inner


def _decoder(model: Any, owners: list[str]) -> str:
    """The innermost owner that takes token ids."""
    embedding = model.get_input_embeddings()
    return [name for name in owners if any(module is embedding for module in model.get_submodule(name).modules())][-1]


def _set(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    root.get_submodule(parent)._modules[child] = module


def _sides(model: Any, skeleton: Any, path: str, owners: list[str]) -> tuple[list[str], list[str], list[str], Record]:
    """Names of the modules with parameters that the model runs before and after its layers, and of those without any.

    Found by running the model on a few tokens with its layers left out; also returns what the layers would have got.
    """
    layers = model.get_submodule(path)
    others = {}
    for owner in owners:
        parent = model.get_submodule(owner)
        if next(parent.parameters(recurse=False), None) is not None:
            names = ", ".join(name for name, _ in parent.named_parameters(recurse=False))
            raise ValueError(
                f"{cannot(model)}: {owner or 'model'} ({type(parent).__name__}) holds {names} itself, beside its "
                "modules, and no stage would own that; train it whole"
            )
        for name, module in _called(parent, owner):
            if not f"{name}.".startswith(f"{path}.") and not f"{path}.".startswith(f"{name}."):
                others[name] = module

    problems: list[tuple[int, Exception]] = []
    for outputs in range(3):  # the form in which layers return hidden states
        record = Record(outputs=outputs)
        probes: dict[nn.Module, nn.Module] = {layer: Probe(layer, i, record) for i, layer in enumerate(layers)}
        looked_at = twin(skeleton, probes | _no_head(model))
        seen: dict[str, bool] = {}  # whether a module runs after the layers
        for name in others:
            looked_at.get_submodule(name).register_forward_pre_hook(partial(_note, seen, name, record))
        decoder = looked_at.get_submodule(_decoder(model, owners))
        decoder.register_forward_pre_hook(record.note_decoder, with_kwargs=True)
        looked_at.get_input_embeddings().register_forward_hook(record.note_embedding)
        try:
            with recording(record):
                record.logits = looked_at(input_ids=_sample(model), use_cache=False, return_dict=True).logits
            if list(record.calls) != list(range(len(layers))):
                raise ValueError("it does not run its layers once each, in their order")
            break
        except (ValueError, *ERRORS) as error:
            problems.append((len(record.calls), error))
    else:
        _, problem = max(problems, key=lambda found: found[0])  # the one that came further
        text = f"it does not run as transformers' decoders do: {problem}"
        raise ValueError(f"{cannot(model)}: {_with_remedy(text)}") from problem
    kept = [name for name, module in others.items() if next(module.parameters(), None) is None]
    idle = [name for name in others if name not in kept and name not in seen]
    if idle:
        raise ValueError(
            f"{cannot(model)}: a language model over tokens does not run its {', '.join(idle)}; give its language "
            "model alone, a ...ForCausalLM of its text_config"
        )
    sided = [name for name in others if name not in kept]
    return [n for n in sided if not seen[n]], [n for n in sided if seen[n]], kept, record


def _sample(model: Any) -> Tensor:
    weight = model.get_input_embeddings().weight
    return torch.arange(1, TOKENS + 1, device="cpu" if weight.is_meta else weight.device)[None] % len(weight)


def _no_head(model: Any) -> dict[nn.Module, nn.Module]:
    """What a twin has in place of the head of a model without memory, whose logits would need it."""
    head = model.get_output_embeddings()
    weights = list(head.parameters())
    return {head: Hidden(weights[0].dtype)} if any(weight.is_meta for weight in weights) else {}


def _note(seen: dict[str, bool], name: str, record: Record, *_: Any) -> None:
    seen.setdefault(name, bool(record.calls))


def _look_at_layer(model: nn.Module, layer: nn.Module, index: int, records: list[Record]) -> float:
    """Tells the layer's attentions what they are, and looks at its state. Returns their dropout in training."""
    dropout, attentions = 0.0, attentions_of(layer)
    try:
        with recording(records[0]):
            looks = look_at_attention(layer, attentions, index, records) if attentions else []
            for attention, look in zip(attentions, looks, strict=True):
                attention.seq1f1b_layer = layer_handle(attention.layer_idx)
                attention.seq1f1b_window, attention.seq1f1b_chunk = look.asked["window"], look.asked["chunk"]
                dropout = max(dropout, look.dropout)
            look_at_states(model, layer, index, records[0])
    except ValueError as error:
        raise ValueError(f"{cannot(model)}: layer {index}: {_with_remedy(str(error))}") from error
    return dropout


def _check_stage(model: Any, stage: CausalLMStage, path: str, own: range, whole: Record) -> list[Record]:
    """Compares what a stage, given the sample in two segments, gives its layers with what the whole model gave them.

    Returns the records of the segments.
    """
    entry, exit = stage.__dict__["_entry"], stage.__dict__["_exit"]
    first = _sample(model) if stage.embedding is None else whole.embedded
    given: Any = first if entry is None else _message_of(entry.message, whole)
    given, parts, outs = given if isinstance(given, tuple) else (given,), [], []
    message = Message(0) if entry is None else entry.message
    head = model.get_output_embeddings() if exit is None and stage.head is not None and not _no_head(model) else None
    layers = stage.causal_lm.get_submodule(path)
    options = (stage.embedding, stage.head, whole.options, stage._takes_positions)
    try:
        for segment in (slice(0, BORDER), slice(BORDER, TOKENS)):
            record = Record(outputs=whole.outputs)
            own_layers = [layers.get_submodule(str(i)) for i in own]
            instead: dict[nn.Module, nn.Module] = {
                layer: Probe(layer, i, record) for i, layer in zip(own, own_layers, strict=True)
            }
            instead |= {module: module for module in (entry, exit) if module is not None}
            if stage.head is None and exit is None:
                instead |= _no_head(stage.causal_lm)
            looked_at = twin(stage.causal_lm, instead)
            made = CausalLMStage(looked_at, stage._decoder, entry, exit, {}, own.start == 0, *options)
            positions = torch.arange(TOKENS, device=given[0].device)[None, segment]
            with recording(record):
                out = made._run([t.clone() for t in message.tokens_of(given, segment)], positions, None)
                outs.append(out if head is None else head(out))
            parts.append(record)
        compare(whole, parts, own)
        kind, want = ("logits", whole.logits) if exit is None else (HIDDEN, _message_of(exit.message, whole))
        problem = difference(want, outs)
        if problem:
            raise ValueError(f"the {kind} that it returns are not those of the whole model: {problem}")
    except (ValueError, *ERRORS) as error:
        text = f"on the stage of layers {own.start} to {own.stop - 1}, {error}"
        raise ValueError(f"{cannot(model)}: {_with_remedy(text)}") from error
    return parts


def _with_remedy(text: str) -> str:
    return text if "run the model whole" in text or "use vocabulary=" in text else f"{text}; train it whole"


def _tied(model: nn.Module, stage_of: dict[str, int]) -> _Tied:
    """Parameters that several stages hold, by their first name, with these stages."""
    holders: dict[int, set[int]] = {}
    places: dict[Any, tuple[str, int, Tensor]] = {}
    for name, stage in stage_of.items():
        for own, parameter in model.get_submodule(name).named_parameters():
            holders.setdefault(id(parameter), set()).add(stage)
            place = (parameter.untyped_storage()._cdata, parameter.storage_offset(), parameter.numel())
            other, its, first = places.setdefault(place, (f"{name}.{own}", stage, parameter))
            if first is not parameter and its != stage and (first.requires_grad or parameter.requires_grad):
                raise ValueError(
                    f"{other} and {name}.{own} are two parameters in one memory, which stages {its} and {stage} do not "
                    "share; make them one parameter, or give each memory of its own"
                )
    tied = {name: (p, sorted(holders[id(p)])) for name, p in model.named_parameters() if len(holders[id(p)]) > 1}
    for name, (parameter, _) in tied.items():
        check_hooks(name, parameter)
    return tied
