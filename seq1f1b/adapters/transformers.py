"""Hugging Face transformers: this package's attention in its models, and its decoder-only models as pipeline stages.

Importing this module registers the attention function ``"seq1f1b"`` with transformers, which needs no masks. The module
needs the extra ``transformers``.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from seq1f1b.adapters.transformers_look import (
    BORDER,
    ERRORS,
    HIDDEN,
    TOKENS,
    AttentionLook,
    Probe,
    Record,
    compare,
    current_record,
    difference,
    look_at_attention,
    recording,
    shallow,
    twin,
)
from seq1f1b.ops.attention import causal_attention, layer_handle, positions
from seq1f1b.runtime.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead

__all__ = ["CausalLMStage", "attention", "pipeline_stage"]

_NAME = "seq1f1b"
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ADAPTERS = ("LORA", "LOHA", "LOKR", "IA3", "OFT", "LN_TUNING")  # of peft, without anything that layers share
_ROTATIONS = ("dynamic", "longrope")  # whose angles depend on the length of what the model is given


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
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that ``attn_implementation="seq1f1b"`` selects; it calls :func:`seq1f1b.causal_attention`.

    Args:
        module: the layer's attention; its ``layer_idx`` names the entry of the KV cache.
        query: (batch, heads, tokens, head_dim); key, value: (batch, kv_heads, tokens, head_dim). Heads of
            values may have another size.
        attention_mask: None, or doc_ids of packed documents as (batch, 1, 1, tokens), int32. It has four dimensions
            because models hand on such a mask to every layer unchanged.
        scaling, sliding_window, softcap: the scale, window and softcap of ``causal_attention``.
    Returns:
        (batch, tokens, heads, head_dim), and None for the attention weights.
    Raises:
        ValueError: the model needs dropout, a mask, sinks, a position bias, a cache, or attention that is not causal.
    """
    for name, text in (("s_aux", "attention sinks"), ("position_bias", "a position bias"), ("cache", "a paged cache")):
        if others.get(name) is not None:
            _refuse(f"{text} ({name})", _OTHER)
    layer: Any = getattr(module, "seq1f1b_layer", None)
    if isinstance(layer, AttentionLook):
        asked = {"queries": query, "keys": key, "values": value, "scaling": scaling, "softcap": softcap}
        layer.note(asked | {"window": sliding_window}, attention_mask, dropout, others)
        attention_mask, sliding_window, dropout, layer = None, layer.asked["window"], 0.0, layer.index
    elif layer is None:  # not cut: compiled code that reads layer_idx is of one layer only
        layer = _layer_of(module, sliding_window)
    elif sliding_window is None:
        sliding_window = getattr(module, "seq1f1b_window", None)
    _refuse_dropout("attention dropout", dropout)
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        _refuse("attention that is not causal", _OTHER)
    if attention_mask is not None and attention_mask.dtype != torch.int32:
        _refuse("an attention mask", _ABOUT_PADDING)
    if others.get("output_attentions"):
        _refuse("output_attentions: it never forms the weights", "leave it off")
    if key.shape[2] != query.shape[2]:
        _refuse(
            f"a key-value cache of transformers ({key.shape[2]} keys for {query.shape[2]} queries)",
            "set use_cache=False, or generate with another attn_implementation",
        )
    doc_ids = None if attention_mask is None else attention_mask[:, 0, 0]
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim != head_dim:  # as in multi-head latent attention; the rows of the cache are of one size
        scaling = head_dim**-0.5 if scaling is None else scaling
        query, key, value = (F.pad(t, (0, max(head_dim, value_dim) - t.shape[-1])) for t in (query, key, value))
    out = causal_attention(
        query, key, value, layer=layer, scale=scaling, window=sliding_window, softcap=softcap, doc_ids=doc_ids
    )
    return out[..., :value_dim].transpose(1, 2), None


def _layer_of(module: Any, window: int | None) -> int:
    """Index of the layer of an attention that is not cut. Refuses one that must slide and is given no window."""
    index: int | None = getattr(module, "layer_idx", None)
    if index is None:
        _refuse(f"{type(module).__name__}, which has no layer_idx", _OTHER)
    config = getattr(module, "config", None)
    types: Any = getattr(config, "layer_types", None)
    slides = types[index] == "sliding_attention" if types else _sliding.get(id(config)) is config is not None
    if slides and window is None:
        _refuse(
            "a sliding window that the model tells its mask only", "cut the model by pipeline_stage, which finds it"
        )
    return index


_sliding: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Configs without layer_types whose models asked for a mask with a window, by id: they have no hash."""

_OTHER = "run the model whole, with another attn_implementation"
_ABOUT_PADDING = (
    "pad on the right, where causal attention does not see it, give padding the label -100 and leave attention_mask out"
)


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
    """What transformers calls for a mask: none is built, and what one would be needed for is refused."""
    if attention_mask is not None and not attention_mask.is_meta and not bool(attention_mask.all()):
        _refuse("an attention_mask with padding", _ABOUT_PADDING)
    if not allow_is_causal_skip:
        _refuse(
            "a mask of the model's own over the causal one, or position_ids of packed documents",
            "pass the documents' doc_ids to a stage of pipeline_stage",
        )
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        _refuse(f"chunked attention (chunks of {local_size} tokens)", _OTHER)
    if local_size is None and mask_function is not causal_mask_function:
        _refuse("a mask that is not causal", _OTHER)
    if local_size is not None and not getattr(config, "layer_types", None) and not torch.compiler.is_compiling():
        _sliding[id(config)] = config
    record = None if torch.compiler.is_compiling() else current_record()
    if record is None:
        return None
    return record.make_mask((batch_size, 1, q_length, kv_length), local_size, dtype, device)


def _refuse(what: str, remedy: str) -> NoReturn:
    raise ValueError(f'attn_implementation="{_NAME}" does not support {what}: {remedy}')


def _refuse_dropout(kind: str, rate: float) -> None:
    if rate:
        _refuse(f"{kind} (here {rate})", "set it to 0 in the config before the model is made, or call eval()")


transformers.AttentionInterface.register(_NAME, attention)
AttentionMaskInterface.register(_NAME, _no_mask)


def pipeline_stage(
    model: nn.Module,
    rank: int,
    num_ranks: int,
    *,
    balance: Sequence[int] | None = None,
    vocabulary: str = "whole",
) -> CausalLMStage:
    """Cuts stage ``rank`` of ``num_ranks`` out of a decoder-only language model.

    The stage runs the model's own forward with the other stages' layers left out, so it treats embeddings and logits as
    the model does. The model is switched to the attention ``"seq1f1b"``. The stage shares its modules, so keep no other
    reference to the model: then layers of other stages are freed. A model on the meta device, made from its config
    without memory, is cut in the same way; :meth:`CausalLMStage.materialize` gives the stage memory.

    Args:
        model: ``...ForCausalLM`` of transformers, or a ``peft.PeftModel`` around one. Its adapters are cut with the
            layers; what lies below the first of them gets no gradient and keeps nothing for a backward.
        rank, num_ranks: index and number of ranks, or of stages if a rank holds several.
        balance: layers of each stage; by default they are spread evenly, and the first stages take the rest.
        vocabulary: ``"whole"``: the first stage holds the embedding, the last one the head. ``"parallel"``: every rank
            holds rows of both, as the stage's ``embedding`` and ``head``, which the engine takes as ``embedding`` and
            ``loss_fn``; a rank then holds one stage. The loss is that of :class:`seq1f1b.VocabularyParallelHead`.
    Raises:
        ValueError: the model does not follow the library's conventions, or has something that does not run by segments;
            the message names it.
    """
    adapted: Any = model if _is_peft_model(model) else None
    if adapted is not None:
        _check_adapters(adapted, num_ranks)
        model = adapted.get_base_model()
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel or a peft.PeftModel, got {type(model).__name__}")
    if vocabulary not in ("whole", "parallel"):
        raise ValueError(f"vocabulary is {vocabulary!r}, must be 'whole' or 'parallel'")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}, must be from 0 to num_ranks - 1 = {num_ranks - 1}")
    _check_config(model)
    path, layers = _find_layers(model)
    cuts = _cuts(balance, len(layers), num_ranks)
    model.set_attn_implementation(_NAME)
    for layer in layers:
        config = getattr(_attentions(layer)[0], "config", None)
        if config is not None:  # it may be a copy of the model's
            config._attn_implementation = _NAME

    skeleton, owners = _skeleton(model, path)
    before, after, kept, whole = _sides(model, skeleton, path, owners)
    stage_of = dict.fromkeys(before, 0) | dict.fromkeys(after, num_ranks - 1)
    for stage in range(num_ranks):
        stage_of |= {f"{path}.{i}": stage for i in range(cuts[stage], cuts[stage + 1])}
    tied = _tied(model, stage_of)
    embedding, head = _shards(model, rank, num_ranks, stage_of) if vocabulary == "parallel" else (None, None)
    if embedding is not None:
        first: Any = model.get_input_embeddings()
        tied = {name: found for name, found in tied.items() if found[0] is not first.weight}

    start, stop = cuts[rank], cuts[rank + 1]
    entry = _Entry() if rank > 0 else None
    exit = _Exit() if rank < num_ranks - 1 else None
    for name, stage in stage_of.items():
        if stage != rank:
            _set(skeleton, name, _NoEmbedding(entry) if name in before else _Elsewhere())
            continue
        module = model.get_submodule(name)
        if any(rank != holders[0] for p, holders in tied.values() if any(p is q for q in module.parameters())):
            module = copy.deepcopy(module)  # a parameter of its own, though this process may hold the first one too
        if head is not None and name == head.name:
            module = _Hidden()
        if embedding is not None and name == embedding.name:
            module = _NoEmbedding(entry)
        _set(skeleton, name, module)
    for name in kept:
        _set(skeleton, name, copy.deepcopy(model.get_submodule(name)))  # small: rotary embeddings
    if exit is not None:
        _set(skeleton, f"{path}.{stop}", exit)
    if entry is not None:
        _set(skeleton, f"{path}.{start - 1}", entry)

    parameters = dict(skeleton.named_parameters(remove_duplicate=False))
    copies = {
        name: next(parameters[other] for other in _names(model, p) if other in parameters)
        for name, (p, holders) in tied.items()
        if rank in holders
    }
    made = CausalLMStage(skeleton, owners[-1], entry, exit, copies, rank == 0, embedding, head, whole.options)
    records = [whole, *_check_stage(model, made, path, range(start, stop), whole)]
    for i in range(start, stop):
        layer = skeleton.get_submodule(f"{path}.{i}")
        look = _look_at_layer(model, layer, i, records)
        attention = _attentions(layer)[0]
        attention.seq1f1b_layer, attention.seq1f1b_window = layer_handle(i), look.asked["window"]
        made._dropout = max(made._dropout, look.dropout)
    made.train(model.training)
    if adapted is not None:
        made.__dict__["peft_model"] = _adapters_around(adapted, skeleton)
    return made


class CausalLMStage(nn.Module):
    """What :func:`pipeline_stage` makes; parameters and state have the names of the unsplit model.

    The first stage takes token ids (batch, tokens), later ones hidden states (batch, tokens, hidden). The last stage
    returns logits (batch, tokens, vocabulary), the others return hidden states; with ``vocabulary="parallel"`` all do.
    Positions count along the sequence, or within packed documents if every stage is given ``doc_ids`` (batch, tokens)
    of :func:`seq1f1b.document_starts`.

    Attributes:
        causal_lm: this stage's part of the transformers model.
        peft_model: a ``peft.PeftModel`` around that part, by which peft names, saves and loads its adapters; None
            without adapters. It is no way to run the stage.
        embedding, head: with ``vocabulary="parallel"`` this rank's shards, which are no part of the stage: give them to
            the engine as ``embedding`` and ``loss_fn``; else None.
        tied_parameters: parameters of this stage of which other stages hold copies, by their first name in the model.
    """

    causal_lm: Any
    peft_model: Any
    embedding: VocabularyParallelEmbedding | None
    head: VocabularyParallelHead | None
    _dropout = 0.0  # of the attention in training

    def __init__(
        self,
        causal_lm: Any,
        decoder: str,
        entry: _Entry | None,
        exit: _Exit | None,
        tied: dict[str, nn.Parameter],
        is_first: bool,
        embedding: VocabularyParallelEmbedding | None = None,
        head: VocabularyParallelHead | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        # Children and their names are the model's, which is itself not a child.
        self.__dict__.update(causal_lm=causal_lm, peft_model=None, embedding=embedding, head=head)
        for name, child in causal_lm.named_children():
            self.add_module(name, child)
        self.__dict__["_entry"], self.__dict__["_exit"] = entry, exit
        self._decoder, self._is_first, self._options = decoder, is_first, options or {}
        self._tied = {name: _name_of(causal_lm, p) for name, p in tied.items()}
        self.train(causal_lm.training)

    @property
    def tied_parameters(self) -> dict[str, nn.Parameter]:
        return {name: self.get_parameter(own) for name, own in self._tied.items()}

    @property
    def config(self) -> Any:
        """The whole model's."""
        return self.causal_lm.config

    @property
    def generation_config(self) -> Any:
        return self.causal_lm.generation_config

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """Recomputes this stage's layers in the backward; options are those of the model's method of this name."""
        self.causal_lm.activation_checkpointing_enable(**options)

    def materialize(self, device: torch.device | str = "cpu") -> None:
        """Gives memory to a stage cut from a model on the meta device, and initial values as transformers would.

        Raises:
            ValueError: the model has adapters of peft, whose initial values transformers does not know.
        """
        if self.peft_model is not None:
            raise ValueError(
                "materialize would give adapters of peft the initial values of plain layers: give the model memory "
                "before get_peft_model"
            )
        self.to_empty(device=device)
        for thing in (*self.modules(), *self.parameters(), *self.buffers()):
            thing.__dict__.pop("_is_hf_initialized", None)
        self.causal_lm.initialize_weights()
        for shard in (self.head, self.embedding):
            if shard is not None:
                shard.to_empty(device=device)
                self.causal_lm._init_weights(shard.layer)

    def _hidden_in_place_of(self, logits: Tensor) -> Tensor:
        assert self.head is not None
        stand_in: Any = self.get_submodule(self.head.name)
        hidden: Tensor = stand_in.hidden
        stand_in.hidden = None
        if logits is not hidden:
            raise ValueError(
                f"{type(self.causal_lm).__name__} changes its logits behind the head (a scale, a soft cap), which a "
                'shard of the vocabulary does not: use vocabulary="whole"'
            )
        return hidden

    def train(self, mode: bool = True) -> CausalLMStage:
        """Raises ValueError for a model that would drop what a stage does not."""
        if mode:
            _refuse_dropout("attention dropout", self._dropout)
            _refuse_dropout("layerdrop", getattr(self.config, "layerdrop", 0.0))
        return super().train(mode)

    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        if doc_ids is None:
            return self._run(x, positions(x)[None], None)
        return self._run(x, positions(x, doc_ids=doc_ids), doc_ids.to(torch.int32)[:, None, None])

    def _run(self, x: Tensor, position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        arguments: dict[str, Any] = {
            "input_ids" if self._is_first and self.embedding is None else "inputs_embeds": x,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "use_cache": False,
        }
        entry, exit = self.__dict__["_entry"], self.__dict__["_exit"]
        if entry is not None:
            entry.hidden = x
        if exit is None:
            logits: Tensor = self.causal_lm(**arguments, return_dict=True).logits
            out = logits if self.head is None else self._hidden_in_place_of(logits)
        else:
            self.get_submodule(self._decoder)(**{**self._options, **arguments})
            out = exit.hidden
            exit.hidden = None
        if entry is not None:
            entry.hidden = None
        return out


class _Hidden(nn.Module):
    """In the place of a head whose rows lie on all ranks."""

    hidden: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.hidden = hidden
        return hidden


class _Elsewhere(nn.Module):
    """Stands for a layer of another stage, or for what follows the layers. Its result reaches nothing that matters."""

    def forward(self, x: Any = None, *args: Any, hidden_states: Any = None, **kwargs: Any) -> Any:
        return hidden_states if x is None else x


class _NoEmbedding(nn.Module):
    """Stands for an embedding on later stages: zeros of the shape, dtype and device of what the stage is given."""

    def __init__(self, entry: _Entry | None) -> None:
        super().__init__()
        self.__dict__["entry"] = entry  # no child

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = self.__dict__["entry"].hidden
        return hidden.new_zeros(()).expand_as(hidden)


class _Entry(nn.Module):
    """In the place of the layer before a stage's first one: gives the hidden states that came from the stage before."""

    hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.hidden


class _Exit(nn.Module):
    """In the place of the layer after a stage's last one: takes what goes to the next stage."""

    hidden: Any = None

    def forward(self, hidden_states: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.hidden = hidden_states
        return hidden_states


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
            parameter.requires_grad_(module.get_parameter(name).requires_grad)
    if last.weight is first.weight:
        head.linear.weight = embedding.layer.get_parameter("weight")
    return embedding, head


def _is_peft_model(model: Any) -> bool:
    peft = sys.modules.get("peft")  # whoever made such a model has imported it
    return peft is not None and isinstance(model, peft.PeftModel)


def _check_adapters(model: Any, num_ranks: int) -> None:
    """Raises unless each adapter lies in one layer and needs nothing beside it."""
    for name, config in model.peft_config.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind not in _ADAPTERS:
            raise ValueError(
                f"adapter {name!r} is of type {kind}, which pipeline_stage does not cut: it takes those that lie in "
                f"single layers, {', '.join(_ADAPTERS)}"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(f"adapter {name!r} is activated by tokens, which later stages do not see: use plain LoRA")
        if num_ranks > 1 and getattr(config, "target_modules_to_tie", None):
            raise ValueError(
                f"adapter {name!r} has ensure_weight_tying=True: its parts at the embedding and at the head are two "
                "parameters in one memory, which two stages do not share; leave one out of target_modules, "
                "or set ensure_weight_tying=False"
            )


def _adapters_around(model: Any, skeleton: nn.Module) -> Any:
    """A shallow copy of a peft model, around one stage's part of what it was around."""
    new, tuner = shallow(model), shallow(model.base_model)
    tuner._modules["model"], new._modules["base_model"] = skeleton, tuner
    return new


def _check_config(model: transformers.PreTrainedModel) -> None:
    config = model.config
    head: Any = model.get_output_embeddings()

    def refuse(what: str) -> None:
        raise ValueError(f"{_cannot(model)}: {what}")

    if getattr(model, "_hf_peft_config_loaded", False):
        refuse("its adapters were added by transformers (add_adapter); give what peft.get_peft_model returns")
    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    if head is None:
        refuse("it has no language model head; give a ...ForCausalLM")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        refuse("its attention is not causal")
    if not model._supports_attention_backend:
        refuse("its attention is its own and not that of transformers' AttentionInterface")
    if getattr(config, "alibi", False):
        refuse("its attention has ALiBi biases")
    if getattr(config, "output_router_logits", False):
        refuse("its router loss needs the logits of all layers in one place; set output_router_logits=False")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            refuse(f"it has layers of type {kind}, whose state is not carried from segment to segment")
    if getattr(config, "attention_chunk_size", None):
        refuse("it has chunked attention")
    for rotation in _rotations(getattr(config, "rope_parameters", None)):
        if rotation in _ROTATIONS:
            refuse(f"its rotary embeddings are of type {rotation!r}, which depend on the length of the whole sequence")
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            refuse(f"{path} is a convolution, which a segment's border would cut")


def _rotations(parameters: Any) -> Iterator[str]:
    if isinstance(parameters, dict):
        if isinstance(parameters.get("rope_type"), str):
            yield parameters["rope_type"]
        for value in parameters.values():
            yield from _rotations(value)


def _find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The list of decoder layers, and its name: each of its modules holds one attention that says its layer_idx."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and all(len(_attentions(layer)) == 1 and _attentions(layer)[0].layer_idx == i for i, layer in enumerate(module))
    ]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} lists of decoder layers with an attention each that says its "
            "layer_idx and is_causal, must be 1: it does not follow the conventions of transformers' decoders"
        )
    return found[0]


def _attentions(layer: nn.Module) -> list[Any]:
    return [m for m in layer.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]


def _cuts(balance: Sequence[int] | None, num_layers: int, num_stages: int) -> list[int]:
    if balance is None:
        each, rest = divmod(num_layers, num_stages)
        if each == 0:
            raise ValueError(f"{num_layers} layers do not fill {num_stages} stages")
        balance = [each + (stage < rest) for stage in range(num_stages)]
    elif len(balance) != num_stages or sum(balance) != num_layers or min(balance) < 1:
        raise ValueError(
            f"balance is {list(balance)}, must be {num_stages} counts of layers that sum to {num_layers}, none below 1"
        )
    return [sum(balance[:stage]) for stage in range(num_stages + 1)]


def _skeleton(model: nn.Module, path: str) -> tuple[Any, list[str]]:
    """Copies of the modules that contain the list of layers, and of the list, which share everything below."""
    skeleton = shallow(model)
    names = path.split(".")
    for i in range(len(names)):
        name = ".".join(names[: i + 1])
        _set(skeleton, name, shallow(model.get_submodule(name)))
    return skeleton, [".".join(names[:i]) for i in range(len(names))]


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
            raise ValueError(f"{type(parent).__name__} holds parameters beside its modules, which no stage would own")
        for child, module in parent.named_children():
            name = f"{owner}.{child}" if owner else child
            if not f"{path}.".startswith(f"{name}."):
                others[name] = module

    record = Record()
    looked_at = twin(skeleton, {layer: Probe(i, record) for i, layer in enumerate(layers)} | _no_head(model))
    seen: dict[str, bool] = {}  # whether a module runs after the layers
    for name in others:
        looked_at.get_submodule(name).register_forward_pre_hook(partial(_note, seen, name, record))
    looked_at.get_submodule(owners[-1]).register_forward_pre_hook(record.note_decoder, with_kwargs=True)
    looked_at.get_input_embeddings().register_forward_hook(record.note_embedding)
    try:
        with recording(record):
            record.logits = looked_at(input_ids=_sample(model), use_cache=False, return_dict=True).logits
        if list(record.calls) != list(range(len(layers))):
            raise ValueError("it does not run its layers once each, in their order")
    except (ValueError, *ERRORS) as error:
        raise ValueError(f"{type(model).__name__} does not run as transformers' decoders do: {error}") from error
    kept = [name for name, module in others.items() if next(module.parameters(), None) is None]
    idle = [name for name in others if name not in kept and name not in seen]
    if idle:
        raise ValueError(
            f"{type(model).__name__} holds modules that a language model over tokens does not run: {idle}; give its "
            "language model alone, a ...ForCausalLM of its text_config"
        )
    sided = [name for name in others if name not in kept]
    return [n for n in sided if not seen[n]], [n for n in sided if seen[n]], kept, record


def _sample(model: Any) -> Tensor:
    weight = model.get_input_embeddings().weight
    return torch.arange(1, TOKENS + 1, device="cpu" if weight.is_meta else weight.device)[None] % len(weight)


def _no_head(model: Any) -> dict[nn.Module, nn.Module]:
    """What a twin has in place of the head of a model without memory, whose logits would need it."""
    head = model.get_output_embeddings()
    return {head: _Hidden()} if any(parameter.is_meta for parameter in head.parameters()) else {}


def _note(seen: dict[str, bool], name: str, record: Record, *_: Any) -> None:
    seen.setdefault(name, bool(record.calls))


def _look_at_layer(model: nn.Module, layer: nn.Module, index: int, records: list[Record]) -> AttentionLook:
    try:
        with recording(records[0]):
            return look_at_attention(layer, _attentions(layer)[0], index, records)
    except ValueError as error:
        raise ValueError(f"{_cannot(model)}: layer {index}: {error}") from error


def _check_stage(model: Any, stage: CausalLMStage, path: str, own: range, whole: Record) -> list[Record]:
    """Compares what a stage, given the sample in two segments, gives its layers with what the whole model gave them.

    Returns the records of the segments.
    """
    entry, exit = stage.__dict__["_entry"], stage.__dict__["_exit"]
    first = _sample(model) if stage.embedding is None else whole.embedded
    given, parts, outs = first if own.start == 0 else whole.calls[own.start].hidden, [], []
    head = model.get_output_embeddings() if exit is None and stage.head is not None and not _no_head(model) else None
    layers, options = stage.causal_lm.get_submodule(path), (stage.embedding, stage.head, whole.options)
    assert given is not None
    try:
        for segment in (slice(0, BORDER), slice(BORDER, TOKENS)):
            record = Record()
            instead: dict[nn.Module, nn.Module] = {layers.get_submodule(str(i)): Probe(i, record) for i in own}
            instead |= {module: module for module in (entry, exit) if module is not None}
            if stage.head is None and exit is None:
                instead |= _no_head(stage.causal_lm)
            looked_at = twin(stage.causal_lm, instead)
            made = CausalLMStage(looked_at, stage._decoder, entry, exit, {}, own.start == 0, *options)
            positions = torch.arange(TOKENS, device=given.device)[None, segment]
            with recording(record):
                out = made._run(given[:, segment].clone(), positions, None)
                outs.append(out if head is None else head(out))
            parts.append(record)
        compare(whole, parts, own)
        kind, want = ("logits", whole.logits) if exit is None else (HIDDEN, whole.calls[own.stop].hidden)
        problem = difference(want, outs)
        if problem:
            raise ValueError(f"the {kind} that it returns are not those of the whole model: {problem}")
    except (ValueError, *ERRORS) as error:
        raise ValueError(f"{_cannot(model)}: on the stage of layers {own.start} to {own.stop - 1}, {error}") from error
    return parts


def _cannot(model: nn.Module) -> str:
    return f"{type(model).__name__} cannot be cut into stages that run by segments"


def _tied(model: nn.Module, stage_of: dict[str, int]) -> dict[str, tuple[nn.Parameter, list[int]]]:
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
    return {name: (p, sorted(holders[id(p)])) for name, p in model.named_parameters() if len(holders[id(p)]) > 1}


def _names(model: nn.Module, parameter: nn.Parameter) -> list[str]:
    return [name for name, p in model.named_parameters(remove_duplicate=False) if p is parameter]


def _name_of(model: nn.Module, parameter: nn.Parameter) -> str:
    return _names(model, parameter)[0]
