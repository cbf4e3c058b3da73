"""Does a cut find what a stage would do otherwise than the whole model, before anything runs?

Odd models are made of Llama's: each treats its layers in a way of its own. A stage computes what the whole model does,
or the cut is refused by a name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from test_transformers import (  # noqa: E402
    COMMON,
    GROUPED,
    build,
    check_pipeline,
)
from transformers.masking_utils import create_causal_mask  # noqa: E402
from transformers.masking_utils import create_sliding_window_causal_mask as windowed  # noqa: E402
from transformers.modeling_outputs import BaseModelOutputWithPast  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from seq1f1b.transformers import pipeline_stage  # noqa: E402

WINDOW = 5
Parts = dict[str, Any]  # methods of the class below, by name


class Odd(modeling_llama.LlamaModel):
    """Llama's decoder, of parts that the tables below replace."""

    layers: Any

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        x = self.before(x, position_ids)
        hidden = x
        for i, layer in enumerate(self.layers):
            given = {"attention_mask": self.mask(i, x, attention_mask, position_ids), "position_ids": position_ids}
            given |= {"position_embeddings": self.tables(i, x, position_ids), **self.others(i, x), **kwargs}
            hidden = layer(hidden, **given)
        return BaseModelOutputWithPast(last_hidden_state=self.after(hidden, x))

    def before(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x

    def mask(self, i: int, x: Tensor, mask: Tensor | None, position_ids: Tensor) -> Any:
        return create_causal_mask(self.config, x, mask, None, position_ids)

    def tables(self, i: int, x: Tensor, position_ids: Tensor) -> Any:
        return self.rotary_emb(x, position_ids)

    def others(self, i: int, x: Tensor) -> dict[str, Any]:
        return {}

    def after(self, hidden: Tensor, x: Tensor) -> Tensor:
        return self.norm(hidden)


def a_slice_of_the_mask(self, i, x, mask, at):
    made = windowed(self.config, x, mask, None, at)
    return made if made is None else made[:, :, :, : x.shape[1]]


def a_window_of_another_config(self, i, x, mask, at):
    """As models do that have a config for their local layers."""
    config = copy.copy(self.config)
    config.sliding_window = WINDOW - i
    return windowed(config, x, mask, None, at)


def in_the_dtype_of_the_embedding(self, i, x, at):
    dtype = self.embed_tokens(torch.zeros(1, 1, dtype=torch.int64, device=x.device)).dtype
    return tuple(table.to(dtype) for table in self.rotary_emb(x, at))


def of_the_whole_context(self, i, x, at):
    """As models do that keep one table and look its rows up."""
    cos, sin = self.rotary_emb(x, torch.arange(64, device=x.device)[None])
    return cos[:, at[0]], sin[:, at[0]]


WINDOWED = {"mask": lambda self, i, x, mask, at: windowed(self.config, x, mask, None, at)}
RIGHT: dict[str, Parts] = {
    "another table for odd layers": {"tables": lambda self, i, x, at: self.rotary_emb(x, at * 3 if i % 2 else at)},
    "a window in the mask of all": WINDOWED,
    "a window in the mask of some": {
        "mask": lambda self, i, x, mask, at: (windowed if i == 1 else create_causal_mask)(
            self.config, x, mask, None, at
        )
    },
    "a window of another config": {"mask": a_window_of_another_config},
    "a window in a slice of the mask": {"mask": a_slice_of_the_mask},
    "a window told twice": {**WINDOWED, "others": lambda self, i, x: {"sliding_window": WINDOW}},
    "the dtype of the embedding": {"tables": in_the_dtype_of_the_embedding},
    "numbers of the depth": {"others": lambda self, i, x: {"depth": i, "share": i / 3, "last": i == 2}},
    "positions from two": {"tables": lambda self, i, x, at: self.rotary_emb(x, at + 2)},
    "a table of the whole context": {"tables": of_the_whole_context},
}


def changed_mask(change: Any) -> Parts:
    def mask(self: Any, i: int, x: Tensor, mask: Tensor | None, at: Tensor) -> Any:
        made = create_causal_mask(self.config, x, mask, None, at)
        return made if made is None else change(made, at)

    return {"mask": mask}


def narrow_for_the_caller(self, input_ids=None, **kwargs):
    """Only where token ids are given; later stages get hidden states."""
    self.narrow = input_ids is not None
    return Odd.forward(self, input_ids, **kwargs)


def scaled_tables(scale: Any) -> Parts:
    return {"tables": lambda self, i, x, at: tuple(table * scale(x) for table in self.rotary_emb(x, at))}


def one_back(x: Tensor) -> Tensor:
    return nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


VALUES = "Tensor-likes are not close! "
OF_THE_TABLES = "layer 0 gets other 'position_embeddings' than in the whole model: " + VALUES
OF_THE_LOGITS = "the stage's logits are not those of the whole model: " + VALUES
OF_THE_MASK = "layer 0: its attention gets a mask that the model has made or changed itself"
REFUSED: dict[str, tuple[Parts, str]] = {
    "a scale of the embedding": (scaled_tables(lambda x: x.norm()), OF_THE_TABLES),
    "positions of its own": (
        {"tables": lambda self, i, x, at: self.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])},
        OF_THE_TABLES,
    ),
    "a number of the length": (
        {"others": lambda self, i, x: {"length": x.shape[1]}},
        r"layer 0 gets other 'length' than in the whole model: \[4, 3\], there 7",
    ),
    "an index of the tokens": (
        {"others": lambda self, i, x: {"index": torch.arange(x.shape[1], device=x.device)}},
        "layer 0 gets other 'index' than in the whole model: Tensor-likes are not equal! ",
    ),
    "a dtype of the caller": (
        {
            "forward": narrow_for_the_caller,
            "tables": lambda self, i, x, at: tuple(
                table.bfloat16() if self.narrow else table for table in self.rotary_emb(x, at)
            ),
        },
        r"layer 2 gets other 'position_embeddings' than in .*: .*torch.float(32|64) != torch.bfloat16",
    ),
    "mixed tokens": (
        {"before": lambda self, x, at: x + one_back(x)},
        "layer 0 gets other 'hidden states' than in the whole model: " + VALUES,
    ),
    "scaled in place, by each stage again": (
        {"before": lambda self, x, at: x.mul_(1.5)},
        "layer 2 gets other 'hidden states' than in the whole model: " + VALUES,
    ),
    "the embedding added to the end": ({"after": lambda self, hidden, x: self.norm(hidden + x)}, OF_THE_LOGITS),
    "a bias on the mask": (changed_mask(lambda made, at: made + at[:, None, None].to(made.dtype)), OF_THE_MASK),
    "a bias in the mask": (changed_mask(lambda made, at: made.sub_(1)), OF_THE_MASK),
    "a window without the mask": (
        {"others": lambda self, i, x: {"sliding_window": WINDOW}},
        "layer 0: its attention is told a window of 5 tokens, its mask one of None",
    ),
    "a window unlike the mask": (
        {**WINDOWED, "others": lambda self, i, x: {"sliding_window": WINDOW - 1}},
        "layer 0: its attention is told a window of 4 tokens, its mask one of 5",
    ),
}

# -- attentions, each of which makes something of its own of what it is given ------------------------------------------

plain = modeling_llama.LlamaAttention.forward


def with_a_scale_of_the_length(self, x, **given):
    self.scaling = self.head_dim**-0.5 * (1 + x.shape[1] / 64)
    return plain(self, x, **given)


def with_a_rotation_of_its_own(self, x, position_embeddings, **given):
    angles = torch.arange(x.shape[1], device=x.device)[None, :, None].expand(1, -1, 8).to(x.dtype)
    return plain(self, x, position_embeddings=(angles.cos(), angles.sin()), **given)


REFUSED_ATTENTIONS = {
    "not causal": (
        lambda self, x, **given: plain(self, x, is_causal=False, **given),
        "layer 0: .* does not support attention that is not causal",
    ),
    "twice in a layer": (
        lambda self, x, **given: plain(self, plain(self, x, **given)[0], **given),
        "layer 0: it runs attention more than once",
    ),
}
WARNED = [  # by the first step: the cut does not look at what an attention makes of that which it is given
    ("later tokens", with_a_scale_of_the_length),
    ("state across tokens", with_a_rotation_of_its_own),
    ("state across tokens", lambda self, x, **given: plain(self, x + one_back(x), **given)),
    ("later tokens", lambda self, x, **given: plain(self, x - x.mean(1, keepdim=True), **given)),
]


def odd(parts: Parts, attention: Any = None) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**COMMON, **GROUPED}, attn_implementation="eager")
    config.sliding_window = WINDOW
    model = transformers.LlamaForCausalLM(config).double().train()
    model.model.__class__ = type("OddModel", (Odd,), parts)
    for layer in model.model.layers if attention is not None else ():
        own = {"forward": lambda self, hidden_states, **given: attention(self, hidden_states, **given)}
        layer.self_attn.__class__ = type("OddAttention", (modeling_llama.LlamaAttention,), own)
    return model


class AsItComes(nn.Module):
    """A model with torch's attention, whose cache is on, as transformers makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama", torch.float32)
        self.model.set_attn_implementation("sdpa")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=True).logits


@pytest.mark.parametrize("kind", ["a window in the mask of all", "a window in the mask of some"])
def test_a_window_in_the_mask_alone_is_found_with_packed_documents(kind):
    check_pipeline(odd(RIGHT[kind]), packed=True)


ALL_REFUSED = [
    *(pytest.param(lambda parts=parts: odd(parts), text, id=kind) for kind, (parts, text) in REFUSED.items()),
    *(pytest.param(lambda at=at: odd({}, at), text, id=kind) for kind, (at, text) in REFUSED_ATTENTIONS.items()),
]


@pytest.mark.parametrize(("make", "text"), ALL_REFUSED)
def test_an_odd_model_that_a_stage_cannot_follow_is_refused_on_the_meta_device(make, text):
    model = make().to("meta")
    with pytest.raises(ValueError, match=text):
        for rank in range(2):
            pipeline_stage(model, rank, 2, balance=[2, 1])
