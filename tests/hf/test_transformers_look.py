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

from test_transformers import COMMON, GROUPED, Float64, batch, check, doc_ids, run_pipeline, run_whole  # noqa: E402
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask  # noqa: E402
from transformers.modeling_outputs import BaseModelOutputWithPast  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

import seq1f1b  # noqa: E402
from seq1f1b.transformers import pipeline_stage  # noqa: E402

WINDOW = 5


class Odd(modeling_llama.LlamaModel):
    """Llama's decoder, of parts that the kinds below replace."""

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


# -- right -------------------------------------------------------------------------------------------------------------


class OtherTableForOddLayers(Odd):
    def tables(self, i, x, position_ids):
        return self.rotary_emb(x, position_ids * 3 if i % 2 else position_ids)


class WindowInTheMaskOfAll(Odd):
    def mask(self, i, x, mask, position_ids):
        return create_sliding_window_causal_mask(self.config, x, mask, None, position_ids)


class WindowInTheMaskOfSome(Odd):
    def mask(self, i, x, mask, position_ids):
        make = create_sliding_window_causal_mask if i == 1 else create_causal_mask
        return make(self.config, x, mask, None, position_ids)


class WindowOfAnotherConfig(Odd):
    """As models do that have a config for their local layers."""

    def mask(self, i, x, mask, position_ids):
        config = copy.copy(self.config)
        config.sliding_window = WINDOW - i
        return create_sliding_window_causal_mask(config, x, mask, None, position_ids)


class WindowInASliceOfTheMask(WindowInTheMaskOfAll):
    def mask(self, i, x, mask, position_ids):
        made = super().mask(i, x, mask, position_ids)
        return made if made is None else made[:, :, :, : x.shape[1]]


class WindowToldTwice(WindowInTheMaskOfAll):
    def others(self, i, x):
        return {"sliding_window": WINDOW}


class DtypeOfTheEmbedding(Odd):
    def tables(self, i, x, position_ids):
        dtype = self.embed_tokens(torch.zeros(1, 1, dtype=torch.int64, device=x.device)).dtype
        return tuple(table.to(dtype) for table in self.rotary_emb(x, position_ids))


class NumbersOfTheDepth(Odd):
    def others(self, i, x):
        return {"depth": i, "share": i / len(self.layers), "last": i == len(self.layers) - 1}


class PositionsFromTwo(Odd):
    def tables(self, i, x, position_ids):
        return self.rotary_emb(x, position_ids + 2)


class TableOfTheWholeContext(Odd):
    """As models do that keep one table and look its rows up."""

    def tables(self, i, x, position_ids):
        cos, sin = self.rotary_emb(x, torch.arange(64, device=x.device)[None])
        return cos[:, position_ids[0]], sin[:, position_ids[0]]


RIGHT = [
    OtherTableForOddLayers, WindowInTheMaskOfAll, WindowInTheMaskOfSome, WindowOfAnotherConfig,
    WindowInASliceOfTheMask, WindowToldTwice, DtypeOfTheEmbedding, NumbersOfTheDepth, PositionsFromTwo,
    TableOfTheWholeContext,
]  # fmt: skip


# -- refused -----------------------------------------------------------------------------------------------------------


class ScaleOfTheEmbedding(Odd):
    def tables(self, i, x, position_ids):
        return tuple(table * x.norm() for table in self.rotary_emb(x, position_ids))


class TableOfTheLength(Odd):
    def tables(self, i, x, position_ids):
        return tuple(table * (1 + x.shape[1] / 64) for table in self.rotary_emb(x, position_ids))


class PositionsOfItsOwn(Odd):
    def tables(self, i, x, position_ids):
        return self.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])


class PositionsFromTheEnd(Odd):
    def tables(self, i, x, position_ids):
        return self.rotary_emb(x, position_ids.max() - position_ids)


class NumberOfTheLength(Odd):
    def others(self, i, x):
        return {"length": x.shape[1]}


class TensorOfTheEmbedding(Odd):
    def others(self, i, x):
        return {"first": x[:, :1]}


class Own:
    """An object that nothing here looks into."""


class ObjectOfItsOwn(Odd):
    def others(self, i, x):
        return {"first": Own()}


class IndexOfTheTokens(Odd):
    def others(self, i, x):
        return {"index": torch.arange(x.shape[1], device=x.device)}


class DtypeOfTheCaller(Odd):
    """Only where token ids are given; later stages get hidden states."""

    def forward(self, input_ids=None, **kwargs):
        self.narrow = input_ids is not None
        return super().forward(input_ids, **kwargs)

    def tables(self, i, x, position_ids):
        return tuple(t.bfloat16() if self.narrow else t for t in self.rotary_emb(x, position_ids))


class MixedTokens(Odd):
    def before(self, x, position_ids):
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class ScaledInPlace(Odd):
    """Each stage would do it again, to what it is given."""

    def before(self, x, position_ids):
        return x.mul_(1.5)


class EmbeddingAddedToTheEnd(Odd):
    def after(self, hidden, x):
        return self.norm(hidden + x)


class EmbeddingScalesTheEnd(Odd):
    def after(self, hidden, x):
        return self.norm(hidden) * x.norm()


class BiasOnTheMask(Odd):
    def mask(self, i, x, mask, position_ids):
        made = super().mask(i, x, mask, position_ids)
        return made if made is None else made + position_ids[:, None, None].to(made.dtype)


class BiasInTheMask(Odd):
    def mask(self, i, x, mask, position_ids):
        made = super().mask(i, x, mask, position_ids)
        return made if made is None else made.sub_(1)


class WindowWithoutTheMask(Odd):
    def others(self, i, x):
        return {"sliding_window": WINDOW}


class WindowUnlikeTheMask(WindowInTheMaskOfAll):
    def others(self, i, x):
        return {"sliding_window": WINDOW - 1}


class OddAttention(modeling_llama.LlamaAttention):
    """A layer's attention that makes something of its own of what it is given."""


class ScaleOfTheLength(OddAttention):
    def forward(self, hidden_states, **kwargs):
        self.scaling = self.head_dim**-0.5 * (1 + hidden_states.shape[1] / 64)
        return super().forward(hidden_states, **kwargs)


class RotaryOfItsOwn(OddAttention):
    def forward(self, hidden_states, position_embeddings, **kwargs):
        angles = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None, :, None].expand(1, -1, 8)
        angles = angles.to(hidden_states.dtype)
        return super().forward(hidden_states, position_embeddings=(angles.cos(), angles.sin()), **kwargs)


class KeysOfTwoTokens(OddAttention):
    def forward(self, hidden_states, **kwargs):
        before = nn.functional.pad(hidden_states, (0, 0, 1, 0))[:, :-1]
        return super().forward(hidden_states + before, **kwargs)


class MeanOfTheTokens(OddAttention):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states - hidden_states.mean(1, keepdim=True), **kwargs)


class NotCausal(OddAttention):
    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, is_causal=False, **kwargs)


class TwiceInALayer(OddAttention):
    def forward(self, hidden_states, **kwargs):
        return super().forward(super().forward(hidden_states, **kwargs)[0], **kwargs)


VALUES = "Tensor-likes are not close! "
OF_THE_TABLES = "layer 0 gets other 'position_embeddings' than in the whole model: " + VALUES
OF_THE_LOGITS = "the logits that it returns are not those of the whole model: " + VALUES
REFUSED = [
    *(
        (kind, OF_THE_TABLES)
        for kind in (ScaleOfTheEmbedding, TableOfTheLength, PositionsOfItsOwn, PositionsFromTheEnd)
    ),
    (NumberOfTheLength, r"layer 0 gets other 'length' than in the whole model: \[4, 3\], there 7"),
    (TensorOfTheEmbedding, "layer 0 gets other 'first' than in the whole model: " + VALUES),
    (IndexOfTheTokens, "layer 0 gets other 'index' than in the whole model: Tensor-likes are not equal! "),
    (ObjectOfItsOwn, "'first', which no stage sends on"),
    (DtypeOfTheCaller, "layer 2 gets other 'position_embeddings' than in .*: .*torch.float64 != torch.bfloat16"),
    (MixedTokens, "layer 0 gets other 'hidden states' than in the whole model: " + VALUES),
    (ScaledInPlace, "layer 2 gets other 'hidden states' than in the whole model: " + VALUES),
    *((kind, OF_THE_LOGITS) for kind in (EmbeddingAddedToTheEnd, EmbeddingScalesTheEnd)),
    *(
        (kind, "layer 0 gets other 'attention_mask' than in the whole model: ")
        for kind in (BiasOnTheMask, BiasInTheMask)
    ),
    (WindowWithoutTheMask, "layer 0: its attention is told a window of 5 tokens, its mask one of None"),
    (WindowUnlikeTheMask, "layer 0: its attention is told a window of 4 tokens, its mask one of 5"),
    (NotCausal, "layer 0: .* does not support attention that is not causal"),
    (TwiceInALayer, "layer 0: it runs attention more than once"),
]
WARNED = [  # by the first step: the cut does not look at what an attention makes of that which it is given
    (ScaleOfTheLength, "tokens mixed"),
    (RotaryOfItsOwn, "positions from zero"),
    (KeysOfTwoTokens, "state across tokens"),
    (MeanOfTheTokens, "batch statistics"),
]


def odd(kind: type[Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**COMMON, **GROUPED}, attn_implementation="eager")
    config.sliding_window = WINDOW
    model = transformers.LlamaForCausalLM(config).double().train()
    model.model.__class__ = Odd if issubclass(kind, OddAttention) else kind
    for layer in model.model.layers if issubclass(kind, OddAttention) else ():
        layer.self_attn.__class__ = kind
    return model


@pytest.mark.parametrize("kind", RIGHT)
def test_an_odd_model_that_a_stage_can_follow_is_right(kind):
    model = odd(kind)
    with Float64():
        want_losses, want = run_whole(copy.deepcopy(model))
    losses, stages, _ = run_pipeline(model, balance=[1, 2])
    torch.testing.assert_close(torch.stack(losses), torch.stack(want_losses), rtol=1e-12, atol=0)
    check(stages, want)


def test_windows_in_masks_count():
    """The test above would not see it if they did nothing."""
    with Float64():
        plain, windowed = (run_whole(odd(kind))[0] for kind in (Odd, WindowInTheMaskOfSome))
    assert all(abs(a - b) > 1e-3 for a, b in zip(plain, windowed, strict=True))


@pytest.mark.parametrize("kind", [WindowInTheMaskOfAll, WindowInTheMaskOfSome])
def test_a_window_in_the_mask_alone_is_found_with_packed_documents(kind):
    tokens, _ = batch()
    model = odd(kind)
    rows = doc_ids()
    with Float64(), torch.no_grad():
        stage = pipeline_stage(copy.deepcopy(model), 0, 1)
        packed = stage(tokens, rows)
        for row in range(len(tokens)):
            for start in rows[row].unique():
                at = rows[row] == start
                alone = model(tokens[row : row + 1, at]).logits
                torch.testing.assert_close(packed[row : row + 1, at], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("kind", "text"), REFUSED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_odd_model_that_a_stage_cannot_follow_is_refused(device, kind, text):
    model = odd(kind).to(device)
    with pytest.raises(ValueError, match=text):
        for rank in range(2):
            pipeline_stage(model, rank, 2, balance=[2, 1])


@pytest.mark.parametrize(("kind", "text"), WARNED)
def test_an_odd_attention_is_found_by_the_first_step(kind, text):
    with pytest.warns(
        seq1f1b.SegmentWarning, match=rf"{text}: stage \d, model.layers.\d.self_attn \({kind.__name__}\)"
    ):
        run_pipeline(odd(kind).float())
