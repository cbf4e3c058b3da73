"""Checks whether a transformers model can be cut, and finds the list of layers."""

from __future__ import annotations

import copy
from typing import Any

import transformers
from torch import nn
from torch.utils import _pytree as pytree

from seq1f1b.transformers.attention_function import NAME
from seq1f1b.transformers.look import attentions_of, cannot
from seq1f1b.transformers.state import mixers

__all__: list[str] = []

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention")
_STATE_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp")  # in models that carry states
_ADAPTERS = ("LORA", "LOHA", "LOKR", "IA3", "OFT", "LN_TUNING")  # peft types without state shared by layers
_ROTATIONS = ("dynamic", "longrope")  # types whose angles depend on the length of the input


def check_adapters(model: Any) -> None:
    """Raises ValueError unless each adapter lies inside one layer and depends on nothing outside."""
    for name, config in model.peft_config.items():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind not in _ADAPTERS:
            raise ValueError(f"adapter {name!r} is of type {kind}, must lie in single layers: {', '.join(_ADAPTERS)}")
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(f"adapter {name!r} is activated by tokens, which later stages do not see: use plain LoRA")


def check_config(model: transformers.PreTrainedModel) -> None:
    config: Any = model.config
    head: Any = model.get_output_embeddings()

    def refuse(what: str) -> None:
        raise cannot(model, what)

    if getattr(model, "_hf_peft_config_loaded", False):
        refuse("its adapters were added by transformers (add_adapter); give what peft.get_peft_model returns")
    text = config.get_text_config(decoder=True)
    language = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None) if text is not config else None
    if language is not None and not isinstance(model, language):
        refuse(f"it holds more than a language model; give {language.__name__}, which holds its text_config alone")
    if head is None:
        refuse("it has no language model head; give a ...ForCausalLM")
    carrying = mixers(model)
    if getattr(config, "output_router_logits", False):
        refuse(
            "output_router_logits=True adds a loss over all layers, not known when the first backward runs; set it to "
            "False, and balance each layer by seq1f1b.add_loss (docs/how-to/hugging-face.md, Experts)"
        )
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES and not (carrying and kind in _STATE_TYPES):
            what = "such a layer keeps a state along the sequence, which is not handed from segment to segment"
            refuse(f"config.layer_types[{i}] is {kind!r}: {what}; train it whole")
    for rotation in pytree.tree_leaves(getattr(config, "rope_parameters", None)):
        if rotation in _ROTATIONS:
            refuse(f"its rotary embeddings are of type {rotation!r}, which depend on the length of the whole sequence")
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d) and not any(f"{path}.".startswith(f"{name}.") for name in carrying):
            refuse(f"{path} is a convolution, which a segment's border would cut")


def switch_attention(model: transformers.PreTrainedModel, layers: nn.ModuleList) -> None:
    """Switches the layers' attentions to seq1f1b's."""
    attentions = [attention for layer in layers for attention in attentions_of(layer)]
    if attentions:
        model.set_attn_implementation(NAME)
        model.config._attn_implementation = NAME  # set_attn_implementation may have declined
    for attention in attentions:
        config = getattr(attention, "config", None)
        if config is not None:  # the attention may hold a copy of the model's config
            config._attn_implementation = NAME


def copy_config(model: Any) -> None:
    """Replaces a model's config by a copy, so that later writes do not change the caller's config."""
    copies: dict[int, Any] = {}  # id of the original -> copy, for nested configs too
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, transformers.PreTrainedConfig):
                module.__dict__[name] = copies.get(id(value), value)


def find_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns name and list of the decoder layers, whose attentions or mixers are numbered by ``layer_idx``."""
    types = list(getattr(model.config, "layer_types", None) or ())
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and module}
    found = {name: module for name, module in lists.items() if _is_numbered(module, types)}
    found = {n: module for n, module in found.items() if not any(n.startswith(f"{other}.") for other in found)}
    if len(found) == 1:
        return next(iter(found.items()))
    what = (
        f"it has {len(found)} stacks of layers, {', '.join(found)}, and a pipeline is of one"
        if found
        else "it has no list of layers whose attentions are causal (is_causal), call what attn_implementation names, "
        "and have a layer_idx that counts from 0 (also if layers were dropped or repeated); train it whole"
    )
    raise cannot(model, what)


def _is_numbered(layers: nn.ModuleList, types: list[str]) -> bool:
    if not any(attentions_of(layer) or mixers(layer) for layer in layers):
        return False
    if all(_is_layer(layer, i, types[i : i + 1]) for i, layer in enumerate(layers)):
        return True
    attentions = [attentions_of(layer) for layer in layers]
    numbers = [attention.layer_idx for each in attentions for attention in each]
    return len({len(each) for each in attentions}) == 1 and numbers == list(range(len(numbers))) and numbers != []


def _is_layer(layer: nn.Module, index: int, kind: list[str]) -> bool:
    attentions, carrying = attentions_of(layer), mixers(layer).values()
    if len(attentions) != 1 and (attentions or not (carrying or kind in (["moe"], ["mlp"]))):
        return False
    return all(module.layer_idx == index for module in (*attentions, *carrying))
