"""Shape of a transformers model from a ``config.json``: sizes, and the kinds of layers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeAlias

from seq1f1b.files import is_number
from seq1f1b.partition import MOST_LAYERS, LayerKind

__all__: list[str] = []

Fields: TypeAlias = "dict[str, int]"
"""Fields of a :class:`LayerKind`."""

_SHAPE = {
    "hidden": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "head_dim": ("head_dim",),
    "tied": ("tie_word_embeddings",),
}
_EXPERTS = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
}
_NARROW = {"ffn": ("moe_intermediate_size",)}  # experts have another width than dense layers
_DENSE = {"experts": 1, "experts_per_token": 1}
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"  # types of layers


class _Config:
    """Fields of a config; errors begin with the file's name."""

    def __init__(self, data: Mapping[str, Any], name: str) -> None:
        self.data, self.name = data, name
        self.kind = data.get("model_type")

    def __getitem__(self, key: str) -> int:
        return int(self.get(key, ..., 1))

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        if value is not None and (not is_number(value) or value <= 0):
            raise ValueError(f"{self.name}: {key} is {value!r:.80}, must be a number above 0")
        return default if value is None else float(value)

    def get(self, key: str, default: Any = None, least: int = 0) -> Any:
        """Returns a whole number, true or false; the default for a missing field, unless the default is ``...``."""
        value = self.data.get(key)
        if value is None:
            if default is ...:
                raise ValueError(f"{self.name}: a config of {self.kind!r} without {key}")
            return default
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{self.name}: {key} is {value!r:.80}, must be a whole number of at least {least}")
        return value

    def list(self, key: str, length: int | None = None) -> list[Any] | None:
        value = self.data.get(key)
        if value is not None and (not isinstance(value, list) or (length is not None and len(value) != length)):
            wanted = "" if length is None else f" of {length} entries, one per layer"
            raise ValueError(f"{self.name}: {key} is {value!r:.80}, must be a list{wanted}")
        return value

    @property
    def hidden(self) -> int:
        return self["hidden_size"]

    @property
    def head_dim(self) -> int:
        return self.get("head_dim") or self.hidden // self["num_attention_heads"]

    @property
    def widths(self) -> tuple[int, int]:
        """Width of q over all heads, and of k or v over all heads."""
        heads = self["num_attention_heads"]
        return heads * self.head_dim, (self.get("num_key_value_heads") or heads) * self.head_dim


def _matrices(c: _Config, of_hidden: int, *others: tuple[int, int]) -> Fields:
    """Returns the fields of a mixer's matrices. of_hidden: numbers written by all matrices with hidden states as input;
    others: inputs and outputs of each further matrix, the last of which writes hidden states."""
    return {
        "mixer": c.hidden * of_hidden + sum(reads * writes for reads, writes in others),
        "inner": of_hidden + sum(writes for _, writes in others[:-1]),
        "outer": sum(reads for reads, _ in others),
    }


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(
    c: _Config,
    *,
    bias: str | bool = "attention_bias",
    out_bias: str | bool | None = None,
    head_norms: str = "",
    sinks: bool = False,
    gated: bool = False,
) -> Fields:
    """Returns the fields of grouped-query attention.

    Args:
        bias: whether q, k and v have a bias, or the config's field for it; out_bias: bias of the output, None: as bias.
        head_norms: "head": q and k have a norm over each head; "all": over all heads; else a config field for "head".
        sinks: a learned sink for each head. gated: a gate as wide as the output.
    """
    h, (q, g) = c.hidden, c.widths

    def has(what: str | bool) -> bool:
        return bool(c.get(what, False)) if isinstance(what, str) else what

    of_heads = 2 * c.head_dim
    norms = {"head": of_heads, "all": q + g}.get(head_norms, of_heads * has(head_norms))
    other = has(bias) * (q + 2 * g + gated * q) + has(bias if out_bias is None else out_bias) * h + norms
    found = {"other": other + sinks * c["num_attention_heads"]}
    return found | _matrices(c, 2 * q + 2 * g, (q, h)) | {"kept": 4 * q} if gated else found


def _latent_attention(c: _Config) -> Fields:
    """Returns the fields of multi-head latent attention: narrow products make q, k and v."""
    h, heads, wide = c.hidden, c["num_attention_heads"], c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    of_q, of_kv, value = c.get("q_lora_rank") or 0, c["kv_lora_rank"], c["v_head_dim"]
    first = of_kv + c["qk_rope_head_dim"]
    opened = heads * (c["qk_nope_head_dim"] + value)
    of_queries = [(of_q, heads * wide)] if of_q else []
    biases = bool(c.get("attention_bias", False)) * (of_q + first + h)
    return {
        "heads": heads,
        "kv_heads": heads,
        "head_dim": wide,
        "value_dim": value,
        **_matrices(c, first + (of_q or heads * wide), *of_queries, (of_kv, opened), (heads * value, h)),
        "kept": heads * (wide + value) + 2 * (of_q + of_kv),
        "other": of_q + of_kv + biases,
    }


# -- recurrent layers --------------------------------------------------------------------------------------------------

_CHUNK = 64  # tokens in a chunk of kernels of linear attention
_STATE_SPACE = {
    "state": ("state_size", "mamba_d_state"),
    "conv": ("conv_kernel", "mamba_d_conv"),
    "conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "bias": ("use_bias", "mamba_proj_bias"),
    "expand": ("expand", "mamba_expand"),
    "heads": ("num_heads", "mamba_n_heads"),
    "groups": ("n_groups", "mamba_n_groups"),
    "chunk": ("chunk_size", "mamba_chunk_size"),
}
"""Names of fields in configs of Mamba alone, and in those of models that have other layers, too."""


def _gated_delta(c: _Config) -> Fields:
    """Returns the fields of a gated delta rule. [Gated Delta Networks, arXiv:2412.06464, 3.3]"""
    h, heads, kernel = c.hidden, c["linear_num_value_heads"], c["linear_conv_kernel_dim"]
    wide, value_dim = c["linear_key_head_dim"], c["linear_value_head_dim"]
    keys, values = c["linear_num_key_heads"] * wide, heads * value_dim
    mixed, projected = 2 * keys + values, 2 * keys + 2 * values + 2 * heads
    # Per chunk: products of k and q with k, two triangular solves, products with both; two reads and a write of state.
    scan = heads * (_CHUNK * (5 * wide + 3 * value_dim) + 6 * wide * value_dim)
    return {
        "heads": 0,
        **_matrices(c, projected, (values, h)),
        "kept": 2 * mixed + 3 * values + 2 * heads,
        "scan": scan,
        "state": heads * wide * value_dim,
        "tail": mixed * kernel,
        "other": mixed * kernel + 2 * heads + value_dim,
    }


def _mamba2(c: _Config) -> Fields:
    """Returns the fields of state space duality. [Mamba-2, arXiv:2405.21060, 6]"""
    is_mixed = any(key.startswith("mamba_") for key in c.data)
    names = {key: of_kinds[is_mixed] for key, of_kinds in _STATE_SPACE.items()}
    h, heads, size = c.hidden, c[names["heads"]], c[names["state"]]
    wide = c.get("mamba_d_ssm") or int(c.number(names["expand"], 2) * h)
    groups, kernel, chunk = c[names["groups"]], c[names["conv"]], c[names["chunk"]]
    mixed = wide + 2 * groups * size
    projected = wide + mixed + heads
    biases = bool(c.get(names["conv_bias"], True)) * mixed + bool(c.get(names["bias"], False)) * (projected + h)
    return {
        "heads": 0,
        **_matrices(c, projected, (wide, h)),
        "kept": 2 * mixed + 3 * wide + heads,
        "scan": 2 * chunk * (groups * size + wide) + 4 * wide * size,
        "state": wide * size,
        "tail": mixed * kernel,
        "other": mixed * kernel + biases + 3 * heads + bool(c.get("mamba_rms_norm", True)) * wide,
    }


def _mamba(c: _Config) -> Fields:
    """Returns the fields of a selective scan, in a model that has other layers, too. [Mamba, arXiv:2312.00752]"""
    h, size, kernel = c.hidden, c["mamba_d_state"], c["mamba_d_conv"]
    wide = int(c.number("mamba_expand", 2) * h)
    rank = math.ceil(h / 16) if c.data.get("mamba_dt_rank", "auto") == "auto" else c["mamba_dt_rank"]
    biases = bool(c.get("mamba_conv_bias", True)) * wide + bool(c.get("mamba_proj_bias", False)) * (2 * wide + h) + wide
    return {
        "heads": 0,
        **_matrices(c, 2 * wide, (wide, rank + 2 * size), (rank, wide), (wide, h)),
        "kept": 6 * wide + rank + 2 * size,
        "scan": 8 * wide * size,  # per number of the state: a decay's exponent, three products, two sums
        "state": wide * size,
        "tail": wide * kernel,
        "other": wide * kernel + biases + wide * size + wide + rank + 2 * size,  # the last two: norms
    }


def _short_convolution(c: _Config) -> Fields:
    """Returns the fields of a gated convolution over a few tokens."""
    h, kernel = c.hidden, c["conv_L_cache"]
    other = h * kernel + bool(c.get("conv_bias", False)) * 5 * h
    return {"heads": 0, **_matrices(c, 3 * h, (h, h)), "kept": 6 * h, "tail": h * kernel, "other": other}


def _both(c: _Config) -> Fields:
    """Returns the fields of attention beside a Mamba-2 mixer."""
    h, (q, g) = c.hidden, c.widths
    of_state = _mamba2(c)
    del of_state["heads"]  # the shape has attention's heads
    attention = {**_matrices(c, q + 2 * g, (q, h)), "kept": 2 * q, **_attention(c)}
    return {name: of_state.get(name, 0) + attention.get(name, 0) for name in of_state}


# -- feed-forwards -----------------------------------------------------------------------------------------------------


def _feed_forward(c: _Config, kind: str) -> Fields:
    """Returns the fields by which a feed-forward of a kind differs from a plain one."""
    if kind == "gated_shared":  # a shared feed-forward beside experts, behind a gate of one number per token
        return {"other": c.hidden, "shared": c.get("shared_expert_intermediate_size", ..., 1)}
    if kind == "shared":
        return {"shared": c["moe_intermediate_size"] * (c.get("n_shared_experts", 1) or 0)}
    if kind == "biased":  # experts have biases
        return {"other": c["num_local_experts"] * (1 + 2 * c["intermediate_size"] + c.hidden)}
    if kind != "adjusted":
        return {}
    width = int(c["intermediate_size"])
    if c.get("block_auto_adjust_ff_dim", True):  # Liquid's models adjust the width in the config
        width = int(c.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = c["block_multiple_of"] if "block_multiple_of" in c.data else 256
        width = multiple * -(-width // multiple)
    return {"ffn": width}


# -- types of models ---------------------------------------------------------------------------------------------------

_MIXERS = {
    "latent_attention": _latent_attention,
    "gated_delta": _gated_delta,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "short_convolution": _short_convolution,
    "attention_and_mamba2": _both,
}


@dataclass(frozen=True)
class _Model:
    """A type of models: a row of ``presets/configs/types.json``."""

    attention: Mapping[str, Any] = field(default_factory=dict)  # arguments of _attention
    window: int | None = 4096  # the library's default of sliding_window
    mixers: Mapping[str, str] = field(default_factory=dict)  # names in _MIXERS, by type of layer
    type_of: Any = _FULL  # type of all layers, or a rule of _type_of, for a config without layer_types
    feed_forward: str = ""  # a kind of _feed_forward
    experts: str = ""  # "narrow": of another width than dense layers; "as wide"; "": no experts
    tied: bool = False  # default for whether the head is the embedding
    norms: int = 2  # number of norms of hidden states in a layer
    is_mixer_alone: bool = False  # layers have one norm, and neither heads nor feed-forwards


_FILE = resources.files("seq1f1b") / "presets" / "configs" / "types.json"
MODELS = {name: _Model(**row) for name, row in json.loads(_FILE.read_text(encoding="utf-8")).items()}
"""Decoders whose feed-forwards are gated, by their ``model_type``."""


def _type_of(c: _Config, rule: Any, layer: int) -> str:
    if isinstance(rule, str):
        return rule
    kind, others, *keys = rule
    if kind == "far":
        is_full = not c.get("use_sliding_window", False) or layer < c.get("max_window_layers", 28)
    elif kind == "at":  # the layers in a list
        is_full = layer in (c.list(keys[0]) or [])
    elif kind == "period":
        is_full = layer % c[keys[0]] == c.get(keys[1], ...)
    else:  # every n-th layer
        every = c.get(*keys) or 0
        is_full = not every or (layer + 1) % every == 0
    return _FULL if is_full else str(others)


def shape_of(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Returns the fields of a shape from the fields of a ``config.json``; errors begin with ``name``.

    Raises:
        ValueError: a ``model_type`` that is not in ``MODELS``, a layer of an unknown type, a missing field.
    """
    c = _Config(data, name)
    if not isinstance(c.kind, str) or c.kind not in MODELS:
        raise ValueError(
            f"{name}: model_type is {c.kind!r}, must be one of {', '.join(MODELS)}; of other models write the shape "
            "into a file: hidden, layers, heads, kv_heads, ffn, vocab"
        )
    model = MODELS[c.kind]
    names = _SHAPE | (_EXPERTS if model.experts else {}) | (_NARROW if model.experts == "narrow" else {})
    said = {key: next((data[name] for name in keys if data.get(name) is not None), None) for key, keys in names.items()}
    found: dict[str, Any] = {key: value for key, value in said.items() if value is not None}
    found.setdefault("tied", model.tied)
    if model.is_mixer_alone:
        found |= {"heads": 1, "kv_heads": 1, "ffn": 0}
    elif "heads" in found:
        found.setdefault("kv_heads", found["heads"])
        if c.hidden % c["num_attention_heads"]:
            found.setdefault("head_dim", c.head_dim)  # rounded down, as in the library
    missing = [names[key][0] for key in ("hidden", "layers", "heads", "ffn", "vocab") if key not in found]
    if missing:
        raise ValueError(f"{name}: a config of {c.kind!r} without {', '.join(missing)}")
    if c["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(f"{name}: num_hidden_layers is {c['num_hidden_layers']}, must be at most {MOST_LAYERS}")
    kinds = [_layer_kind(c, model, layer) for layer in range(c["num_hidden_layers"])]
    different = list(dict.fromkeys(kinds))
    if different != [LayerKind()]:
        found["kinds"] = [kind._asdict() for kind in different]
        found["pattern"] = [different.index(kind) for kind in kinds] if len(different) > 1 else []
    return found


def _layer_kind(c: _Config, model: _Model, layer: int) -> LayerKind:
    types = c.list("layer_types", c["num_hidden_layers"])
    kind = types[layer] if types else _type_of(c, model.type_of, layer)
    known = dict.fromkeys((_FULL, _SLIDING, *model.mixers))
    if kind not in known:
        raise ValueError(
            f"{c.name}: layer_types[{layer}] is {kind!r}, must be one of {', '.join(known)}, whose cost is known"
        )
    mixer = _MIXERS[model.mixers[kind]](c) if kind in model.mixers else _attention(c, **model.attention)
    if kind == _SLIDING:
        mixer["window"] = (c.get("sliding_window") if "sliding_window" in c.data else model.window) or 0  # null: none
    is_dense = bool(model.experts) and (  # a layer without experts; each type of models has one of these rules
        layer in (c.list("mlp_only_layers") or [])
        or (layer + 1) % (c.get("decoder_sparse_step") or 1) != 0
        or layer < c.get("first_k_dense_replace", 0)
        or (layer - c.get("expert_layer_offset", 0)) % (c.get("expert_layer_period") or 1) != 0
    )
    ffn = {**_DENSE, "ffn": c["intermediate_size"]} if is_dense else _feed_forward(c, model.feed_forward)
    other = mixer.pop("other", 0) + ffn.pop("other", 0)
    return LayerKind(**mixer, **ffn, norms=1 if model.is_mixer_alone else model.norms, other=other)
