"""Shape of a transformers model from a ``config.json``: sizes, and the kinds of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
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
_NARROW = {**_EXPERTS, "ffn": ("moe_intermediate_size",)}  # experts have another width than dense layers
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
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{self.name}: {key} is {value!r:.80}, must be a whole number")
        if value < least:
            raise ValueError(f"{self.name}: {key} is {value}, must be at least {least}")
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

    norms = {"head": 2 * c.head_dim, "all": q + g, "": 0}.get(head_norms)
    if norms is None:
        norms = 2 * c.head_dim * has(head_norms)
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
_SCAN = {
    "state": ("state_size", "mamba_d_state"),
    "conv": ("conv_kernel", "mamba_d_conv"),
    "conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "bias": ("use_bias", "mamba_proj_bias"),
    "expand": ("expand", "mamba_expand"),
    "rank": ("time_step_rank", "mamba_dt_rank"),
    "wide": ("intermediate_size", "mamba_d_ssm"),
    "heads": ("num_heads", "mamba_n_heads"),
    "groups": ("n_groups", "mamba_n_groups"),
    "chunk": ("chunk_size", "mamba_chunk_size"),
}
"""Names of a scan in configs of Mamba alone, and in those of models that have other layers, too."""


def _names_of_scan(c: _Config) -> dict[str, str]:
    is_mixed = any(key.startswith("mamba_") for key in c.data)
    return {key: names[is_mixed] for key, names in _SCAN.items()}


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
    names = _names_of_scan(c)
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


def _mamba(c: _Config, *, norms: bool = False) -> Fields:
    """Returns the fields of a selective scan. [Mamba, arXiv:2312.00752]. norms: the step, B and C have norms."""
    names = _names_of_scan(c)
    h, size, kernel = c.hidden, c[names["state"]], c[names["conv"]]
    wide = c.get(names["wide"]) or int(c.number(names["expand"], 2) * h)
    rank = math.ceil(h / 16) if c.data.get(names["rank"], "auto") == "auto" else c[names["rank"]]
    biases = bool(c.get(names["conv_bias"], True)) * wide + bool(c.get(names["bias"], False)) * (2 * wide + h) + wide
    return {
        "heads": 0,
        **_matrices(c, 2 * wide, (wide, rank + 2 * size), (rank, wide), (wide, h)),
        "kept": 6 * wide + rank + 2 * size,
        "scan": 8 * wide * size,  # per number of the state: a decay's exponent, three products, two sums
        "state": wide * size,
        "tail": wide * kernel,
        "other": wide * kernel + biases + wide * size + wide + norms * (rank + 2 * size),
    }


def _short_convolution(c: _Config) -> Fields:
    """Returns the fields of a gated convolution over a few tokens."""
    h, kernel = c.hidden, c["conv_L_cache"]
    other = h * kernel + bool(c.get("conv_bias", False)) * 5 * h
    return {"heads": 0, **_matrices(c, 3 * h, (h, h)), "kept": 6 * h, "tail": h * kernel, "other": other}


def _lightning(c: _Config) -> Fields:
    """Returns the fields of lightning attention: linear, in blocks, with fixed decay. [MiniMax-01, arXiv:2501.08313]"""
    h, size, (q, _) = c.hidden, c.head_dim, c.widths
    scan = 4 * q * (c["block_size"] + size)
    return {"heads": 0, **_matrices(c, 4 * q, (q, h)), "kept": 9 * q, "scan": scan, "state": q * size, "other": q}


def _both(c: _Config) -> Fields:
    """Returns the fields of attention beside a Mamba-2 mixer."""
    h, (q, g) = c.hidden, c.widths
    of_state = _mamba2(c)
    del of_state["heads"]  # the shape has attention's heads
    attention = {**_matrices(c, q + 2 * g, (q, h)), "kept": 2 * q, **_attention(c)}
    return {name: of_state.get(name, 0) + attention.get(name, 0) for name in of_state}


# -- feed-forwards -----------------------------------------------------------------------------------------------------


def _dense_if(c: _Config, is_dense: bool, **sparse: int) -> Fields:
    """Returns the fields of a plain feed-forward if the layer is dense, else ``sparse``, the fields beside experts."""
    return {**_DENSE, "ffn": c["intermediate_size"]} if is_dense else sparse


def _by_step(c: _Config, layer: int, **beside: int) -> Fields:
    is_left_out = layer in (c.list("mlp_only_layers") or [])
    return _dense_if(c, is_left_out or (layer + 1) % (c.get("decoder_sparse_step", 1) or 1) != 0, **beside)


def _with_gated(c: _Config, layer: int) -> Fields:
    """Returns fields of a layer with experts and a shared feed-forward behind a gate of one number per token."""
    return _by_step(c, layer, other=c.hidden, shared=c.get("shared_expert_intermediate_size", ..., 1))


def _with_shared(c: _Config, layer: int) -> Fields:
    """Returns fields of a layer with experts and shared feed-forwards; the first layers are dense."""
    shared = c["moe_intermediate_size"] * (c.get("n_shared_experts", 1) or 0)
    return _dense_if(c, layer < c.get("first_k_dense_replace", 0), shared=shared)


def _adjusted(c: _Config, layer: int) -> Fields:
    """Returns the feed-forward's width in Liquid's models, adjusted from the width in the config."""
    width = int(c["intermediate_size"])
    if c.get("block_auto_adjust_ff_dim", True):
        width = int(c.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
        multiple = c["block_multiple_of"] if "block_multiple_of" in c.data else 256
        width = multiple * -(-width // multiple)
    return {"ffn": width}


def _granite_experts(c: _Config, layer: int) -> Fields:
    if not c.get("num_local_experts", 0):
        return {**_DENSE, "ffn": c["shared_intermediate_size"]}
    return {"shared": c["shared_intermediate_size"]}


# -- which layer is of which type --------------------------------------------------------------------------------------


def _every(interval: str, default: int, others: str) -> Callable[[_Config, int], str]:
    """Returns a function of a layer's type: every n-th layer has full attention, the rest have type ``others``."""

    def type_of(c: _Config, layer: int) -> str:
        every = c.get(interval, default) or 0
        return others if every and (layer + 1) % every else _FULL

    return type_of


def _from_layer(c: _Config, layer: int) -> str:
    is_far = c.get("use_sliding_window", False) and layer >= c.get("max_window_layers", 28)
    return _SLIDING if is_far else _FULL


def _at_indices(key: str, others: str) -> Callable[[_Config, int], str]:
    return lambda c, layer: _FULL if layer in (c.list(key) or []) else others


@dataclass(frozen=True)
class _Model:
    """A type of models.

    Attributes:
        attention: fields of a layer with attention.
        window: the library's default of ``sliding_window``.
        mixers: fields of layers without plain attention, by type of layer.
        feed_forward: fields of a layer by the layer's number; None: feed-forward or experts are as in the shape.
        names: the config's names for fields of the shape, where the names differ from ``_SHAPE``.
        type_of: type of all layers, or of each layer by number, if the config has no ``layer_types``.
        tied: default for whether the head is the embedding.
        norms: number of norms of hidden states in a layer.
        fixed: fields of the shape that are missing in configs.
    """

    attention: Callable[[_Config], Fields] = _attention
    window: int | None = 4096
    mixers: Mapping[str, Callable[[_Config], Fields]] = field(default_factory=dict)
    feed_forward: Callable[[_Config, int], Fields] | None = None
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    type_of: str | Callable[[_Config, int], str] = _FULL
    tied: bool = False
    norms: int = 2
    fixed: Mapping[str, int] = field(default_factory=dict)


_HEADS = partial(_attention, head_norms="head")
_QWEN2 = partial(_attention, bias=True, out_bias=False)
_NO_HEADS = {"heads": 1, "kv_heads": 1, "ffn": 0}
_DELTA = partial(
    _Model,
    partial(_attention, head_norms="head", gated=True),
    mixers={_LINEAR: _gated_delta},
    type_of=_every("full_attention_interval", 4, _LINEAR),
)

_SELECTIVE = _Model(mixers={_LINEAR: _mamba}, type_of=_LINEAR, fixed=_NO_HEADS, tied=True, norms=1)

MODELS: dict[str, _Model] = {
    **dict.fromkeys(("llama", "granite"), _Model()),
    "smollm3": _Model(window=None),
    "mistral": _Model(type_of=_SLIDING),
    "ministral": _Model(type_of=_SLIDING),
    "phi3": _Model(window=None, type_of=_SLIDING),
    "qwen2": _Model(_QWEN2, type_of=_from_layer),
    "qwen3": _Model(_HEADS, type_of=_from_layer),
    "seed_oss": _Model(partial(_attention, out_bias="attention_out_bias")),
    "olmo2": _Model(partial(_attention, head_norms="all")),
    "olmo3": _Model(partial(_attention, head_norms="all"), type_of=_every("", 4, _SLIDING)),
    "exaone4": _Model(_HEADS, type_of=_every("sliding_window_pattern", 4, _SLIDING)),
    "cohere2": _Model(type_of=_every("sliding_window_pattern", 4, _SLIDING), tied=True, norms=1),
    "gemma2": _Model(type_of=_every("", 2, _SLIDING), tied=True, norms=4),
    "gemma3_text": _Model(_HEADS, type_of=_every("sliding_window_pattern", 6, _SLIDING), tied=True, norms=4),
    "mixtral": _Model(window=None, type_of=_SLIDING, names=_EXPERTS),
    "olmoe": _Model(partial(_attention, head_norms="all"), names=_EXPERTS),
    "gpt_oss": _Model(
        partial(_attention, bias=True, sinks=True),
        window=128,
        type_of=_every("", 2, _SLIDING),
        names=_EXPERTS,
        feed_forward=lambda c, layer: {
            "other": c["num_local_experts"] * (1 + 2 * c["intermediate_size"] + c.hidden)  # biases
        },
    ),
    "qwen2_moe": _Model(
        partial(_attention, bias="qkv_bias", out_bias=False),
        type_of=_from_layer,
        names=_NARROW,
        feed_forward=_with_gated,
    ),
    "qwen3_moe": _Model(_HEADS, type_of=_from_layer, names=_NARROW, feed_forward=_by_step),
    "glm4_moe": _Model(
        partial(_attention, out_bias=False, head_norms="use_qk_norm"), names=_NARROW, feed_forward=_with_shared
    ),
    "dots1": _Model(_HEADS, window=None, names=_NARROW, feed_forward=_with_shared),
    "deepseek_v3": _Model(_latent_attention, names=_NARROW, feed_forward=_with_shared),
    "qwen3_next": _DELTA(names=_NARROW, feed_forward=_with_gated),
    "qwen3_5_text": _DELTA(),
    "qwen3_5_moe_text": _DELTA(names=_NARROW, feed_forward=_with_gated),
    "minimax": _Model(
        mixers={_LINEAR: _lightning}, type_of=lambda c, layer: _LINEAR if layer % 2 == 0 else _FULL, names=_EXPERTS
    ),
    "lfm2": _Model(
        _HEADS,
        mixers={"conv": _short_convolution},
        feed_forward=_adjusted,
        type_of=_at_indices("full_attn_idxs", "conv"),
        tied=True,
    ),
    "lfm2_moe": _Model(
        _HEADS,
        mixers={"conv": _short_convolution},
        names=_NARROW,
        feed_forward=lambda c, layer: _dense_if(c, layer < c.get("num_dense_layers", ...)),
        tied=True,
    ),
    "bamba": _Model(mixers={_LINEAR: _mamba2}, type_of=_at_indices("attn_layer_indices", _LINEAR)),
    "falcon_h1": _Model(mixers={"hybrid": _both}, type_of="hybrid"),
    "granitemoehybrid": _Model(
        mixers={_LINEAR: _mamba2}, type_of=_LINEAR, names=_EXPERTS, feed_forward=_granite_experts
    ),
    "jamba": _Model(
        mixers={_LINEAR: partial(_mamba, norms=True)},
        type_of=lambda c, layer: (
            _FULL if layer % c["attn_layer_period"] == c.get("attn_layer_offset", ...) else _LINEAR
        ),
        names=_EXPERTS,
        feed_forward=lambda c, layer: _dense_if(
            c, (layer - c.get("expert_layer_offset", ...)) % c["expert_layer_period"] != 0
        ),
    ),
    **dict.fromkeys(("mamba", "falcon_mamba"), _SELECTIVE),
    "mamba2": _Model(mixers={_LINEAR: _mamba2}, type_of=_LINEAR, fixed=_NO_HEADS, norms=1),
}
"""Decoders whose feed-forwards are gated, by their ``model_type``."""


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
    names = {**_SHAPE, **model.names}
    said = {key: next((data[name] for name in keys if data.get(name) is not None), None) for key, keys in names.items()}
    found: dict[str, Any] = {key: value for key, value in {**said, **model.fixed}.items() if value is not None}
    found.setdefault("tied", model.tied)
    if "heads" in found and "heads" not in model.fixed:
        found.setdefault("kv_heads", found["heads"])
        if c.hidden % c["num_attention_heads"]:
            found.setdefault("head_dim", c.head_dim)  # rounded down, as in the library
    missing = [names[key][0] for key in ("hidden", "layers", "heads", "ffn", "vocab") if key not in found]
    if missing:
        raise ValueError(f"{name}: a config of {c.kind!r} without {', '.join(missing)}")
    if c["num_hidden_layers"] > MOST_LAYERS:
        raise ValueError(f"{name}: num_hidden_layers is {c['num_hidden_layers']}, must be at most {MOST_LAYERS}")
    kinds = [_layer_kind(c, model, layer, _type_of(c, model, layer)) for layer in range(c["num_hidden_layers"])]
    different = list(dict.fromkeys(kinds))
    if different != [LayerKind()]:
        found["kinds"] = [kind._asdict() for kind in different]
        found["pattern"] = [different.index(kind) for kind in kinds] if len(different) > 1 else []
    return found


def _type_of(c: _Config, model: _Model, layer: int) -> str:
    types = c.list("layer_types", c["num_hidden_layers"])
    of_model = model.type_of
    kind = types[layer] if types else of_model if isinstance(of_model, str) else of_model(c, layer)
    known = (_FULL, _SLIDING, *model.mixers)
    if kind not in known:
        raise ValueError(
            f"{c.name}: layer_types[{layer}] is {kind!r}, must be one of {', '.join(known)}, whose cost is known"
        )
    return str(kind)


def _layer_kind(c: _Config, model: _Model, layer: int, kind: str) -> LayerKind:
    mixer = model.mixers.get(kind, model.attention)(c)
    if kind == _SLIDING:
        mixer["window"] = (c.get("sliding_window") if "sliding_window" in c.data else model.window) or 0  # null: none
    ffn = model.feed_forward(c, layer) if model.feed_forward else {}
    other = mixer.pop("other", 0) + ffn.pop("other", 0)
    return LayerKind(**mixer, **ffn, norms=model.norms, other=other)
