"""Models of transformers under looks and verify: none of the supported ones is blamed, one as it comes is found."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from test_transformers import ARCHITECTURES, SIZES, M, batch, build, loss_fn, pipeline_stage  # noqa: E402

import seq1f1b  # noqa: E402


def engine_of(stage: nn.Module, **options: Any) -> seq1f1b.PipelineEngine:
    return seq1f1b.PipelineEngine(
        stage,
        num_microbatches=M,
        num_segments=len(SIZES),
        segment_sizes=SIZES,
        loss_fn=loss_fn,
        group=seq1f1b.LoopbackGroup(1)[0],
        **options,
    )


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_supported_model_is_not_blamed(name):
    engine = engine_of(pipeline_stage(build(name, torch.float32), 0, 1))
    tokens, target = batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", seq1f1b.SegmentWarning)
        engine.step(tokens, target=target)
    result = engine.verify(tokens, target=target, show=False)
    assert result.ok, str(result)
    assert result.exact  # compared in float64, whatever the model casts to float32


class AsItComes(nn.Module):
    """A model with torch's attention, whose cache is on, as transformers makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build("llama", torch.float32)
        self.model.set_attn_implementation("sdpa")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=True).logits


def test_a_model_as_it_comes_with_its_cache_on_is_found():
    tokens, target = batch()
    with pytest.raises(ValueError, match=r"attention not in segments: .*LlamaAttention.*unchecked=True"):
        engine_of(AsItComes()).step(tokens, target=target)
    result = engine_of(AsItComes()).verify(tokens, target=target, show=False)
    assert not result.ok
    assert any(cause.startswith("attention not in segments") for cause in result.causes)
