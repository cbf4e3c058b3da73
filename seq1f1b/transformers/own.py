"""Adapts decoders with a built-in attention: classes put in front of the modules' classes call seq1f1b's attention."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from seq1f1b.attention.causal import token_offset
from seq1f1b.transformers.attention_function import attention, no_mask
from seq1f1b.transformers.look import cannot, current_record
from seq1f1b.transformers.twins import become

__all__ = ["adapt"]


def adapt(model: nn.Module) -> None:
    """Makes modules with a built-in attention call seq1f1b's attention; refuses what seq1f1b's attention lacks."""
    for path, module in model.named_modules():
        own = _OWN.get(type(module).__name__)
        if own is _Core and not hasattr(module, "_attn"):
            continue  # later releases call attn_implementation's function
        if own is not None and not isinstance(module, _Own):
            own.check(module, path)
            become(module, own)


class _Own(nn.Module):
    """The base of classes put in front of a class of transformers."""

    is_causal = True

    @staticmethod
    def check(module: Any, path: str) -> None:
        """Raises ValueError for an unsupported option of a module."""


# -- attention ---------------------------------------------------------------------------------------------------------


class _Core(_Own):
    """The class for modules that compute attention in a method ``_attn``."""

    def _attn(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None) -> tuple[Tensor, None]:
        dropout = self.attn_dropout if hasattr(self, "attn_dropout") else self.attention_dropout
        divisor = self.scale_attn if hasattr(self, "scale_attn") else getattr(self, "norm_factor", 1.0)
        window = self.config.window_size if getattr(self, "attention_type", None) == "local" else None
        if window is not None and current_record() is not None:
            attention_mask = None  # the recorded mask has no window
        out: Any = attention(
            self, query.to(value.dtype), key.to(value.dtype), value, attention_mask, scaling=1 / divisor,
            dropout=dropout.p if self.training else 0.0, sliding_window=window,
        )[0]  # fmt: skip
        return out.transpose(1, 2), None


class _GPTNeo(_Core):
    @property
    def layer_idx(self: Any) -> int:
        return int(self.layer_id)


class _Bloom(_Own):
    def forward(
        self: Any, hidden_states: Tensor, residual: Tensor, attention_mask: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        out: Any = attention(
            self, query, key, value, attention_mask, scaling=self.inv_norm_factor,
            dropout=self.attention_dropout.p if self.training else 0.0,
            alibi_slopes=_bloom_slopes(self.num_heads).to(query.device),
        )[0]  # fmt: skip
        out = self.dense(out.flatten(2))
        return nn.functional.dropout(out, self.hidden_dropout, self.training) + residual, None


class _Mpt(_Own):
    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> tuple[Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = (part.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for part in mixed.chunk(3, 2))
        out: Any = attention(
            self, query, key, value, attention_mask, scaling=self.softmax_scale,
            dropout=self.attn_dropout_p if self.training else 0.0,
            alibi_slopes=_mpt_slopes(self.n_heads).to(query.device),
        )[0]  # fmt: skip
        return self.out_proj(out.flatten(2)), None


class _Falcon(_Own):
    def forward(
        self: Any, hidden_states: Tensor, attention_mask: Any = None, position_embeddings: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        query, key, value = (x.transpose(1, 2) for x in self._split_heads(self.query_key_value(hidden_states)))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        out: Any = attention(self, query, key, value, attention_mask, scaling=self.inv_norm_factor)[0]
        return self.dense(out.flatten(2)), None


class _IndexedAttention(_Own):
    """An attention over keys chosen by an indexer, run without: up to ``index_topk`` tokens an indexer chooses all."""

    all_are_chosen = True

    def forward(self: Any, hidden_states: Tensor, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        mask = no_mask(hidden_states) if attention_mask is None else attention_mask
        if "prev_topk_indices" in kwargs:  # the layer before may be on another stage, and the indices are unused
            kwargs["prev_topk_indices"] = hidden_states.new_empty(0)
        return super().forward(hidden_states, *args, attention_mask=mask, **kwargs)


class _Indexer(_Own):
    is_causal = False  # an indexer is no attention

    def forward(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        tokens = token_offset() + hidden_states.shape[1]
        if tokens > self.index_topk:
            what = f"{self.index_topk} keys (index_topk) of a row of {tokens} tokens or more, and stages attend to all"
            raise ValueError(f"{type(self).__name__} chooses {what}: give shorter rows, or train the model whole")
        return hidden_states.new_empty(0)


@cache
def _bloom_slopes(num_heads: int) -> Any:
    return build_alibi_tensor(torch.ones(1, 2, device="cpu"), num_heads, torch.float32)[:, 0, 1]


@cache
def _mpt_slopes(num_heads: int) -> Any:
    return -build_mpt_alibi_tensor(num_heads, 2, device="cpu")[:, 0, 0]


# -- decoders, whose masks and biases are part of the attention above --------------------------------------------------


class _Decoder(_Own):
    @staticmethod
    def check(module: Any, path: str) -> None:
        if getattr(module, "use_alibi", False):  # Falcon's
            raise cannot(module, f"{path} rounds its ALiBi biases to bfloat16, which no other attention does")

    def forward(
        self: Any,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        inputs_embeds: Any = None,
        **_: Any,
    ) -> Any:
        hidden = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        layers = self._modules["blocks" if "blocks" in self._modules else "h"]
        more: dict[str, Any] = {}
        if "word_embeddings_layernorm" in self._modules:
            hidden = self.word_embeddings_layernorm(hidden)
        if "rotary_emb" in self._modules:
            if position_ids is None:
                position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]
            more["position_embeddings"] = self.rotary_emb(hidden, position_ids=position_ids)
        more["position_bias" if "blocks" in self._modules else "alibi"] = None
        for layer in layers:
            hidden = layer(hidden, attention_mask=attention_mask, **more)[0]
        norm = self._modules["norm_f" if "norm_f" in self._modules else "ln_f"]
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=norm(hidden))


class _SharedTransformer(_Own):
    """A layer whose attention shares weights with other layers, and gets a layer index here."""

    @staticmethod
    def check(module: Any, path: str) -> None:
        shared = getattr(module, "shared_transf", None) or module.shared_transformer
        shared.self_attn.layer_idx = module.mamba_decoder.layer_idx


class _PerLayer(_Own):
    """A decoder with an input per layer, made on the first stage and handed on from stage to stage."""

    def get_per_layer_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry, _ = self.__dict__.get("seq1f1b_ends", (None, None))
        model: Any = super()
        return model.get_per_layer_inputs(*args, **kwargs) if entry is None else None

    def project_per_layer_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry, exit = self.__dict__.get("seq1f1b_ends", (None, None))
        model: Any = super()
        made = model.project_per_layer_inputs(*args, **kwargs) if entry is None else entry.per_layer
        if exit is not None:
            exit.per_layer = made
        return made


_WITH_INDEXERS = ("AXK2", "DeepseekV32", "Dots3NoteText", "GlmMoeDsa", "HYV4")
_OWN: dict[str, type[_Own]] = {
    "GPTNeoSelfAttention": _GPTNeo,
    "GPTNeoXJapaneseAttention": _Core,
    "GPTJAttention": _Core,
    "CodeGenAttention": _Core,
    "BloomAttention": _Bloom,
    "BloomModel": _Decoder,
    "MptAttention": _Mpt,
    "MptModel": _Decoder,
    "FalconAttention": _Falcon,
    "FalconModel": _Decoder,
    "ZambaHybridLayer": _SharedTransformer,
    "Zamba2HybridLayer": _SharedTransformer,
    "Gemma3nTextModel": _PerLayer,
    "Gemma4TextModel": _PerLayer,
    **dict.fromkeys([f"{name}Attention" for name in _WITH_INDEXERS], _IndexedAttention),
    **dict.fromkeys([f"{name}Indexer" for name in _WITH_INDEXERS], _Indexer),
}
