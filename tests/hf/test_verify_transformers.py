"""Does verify compare stages of transformers with their model, packed documents and adapters with it?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from slices import full_only  # noqa: E402
from test_transformers import batch, build, engine_of, pipeline_stage  # noqa: E402

import seq1f1b  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402


def verified_with(model: Any, whole: Any, eps: float | None = None, **arguments: Any) -> Any:
    """verify(model=) of two stages of ``model``, the second one with another epsilon if that is given."""
    tokens, target = batch()

    def run(group: Any) -> Any:
        stage = pipeline_stage(model, group.rank, 2)
        if eps is not None and group.rank == 1:
            norm = copy.deepcopy(stage.causal_lm.model.layers[2].input_layernorm)
            norm.variance_epsilon = eps
            stage.causal_lm.model.layers[2].input_layernorm = norm
        engine = engine_of(stage, group, arg_rules={"doc_ids": "slice"})
        is_first = group.rank == 0
        return engine.verify(tokens, target=target, show=False, model=whole if is_first else None, **arguments)

    return run_ranks(2, run)[0]


@pytest.mark.parametrize(
    ("name", "is_packed"),
    [
        *(("llama", False), ("gpt2", True), ("qwen3_moe", False)),
        *full_only(("llama", True), ("gpt2", False), ("qwen3_moe", True)),
    ],
)
def test_the_model_itself_with_its_own_attention_or_ours(name, is_packed):
    """Documents of a packed row are each run by themselves there."""
    model = build(name, torch.float32)
    alone = copy.deepcopy(model)
    documents = torch.tensor([[0] * 9 + [1] * 15, [0] * 3 + [1] * 21])
    kwargs = {"doc_ids": seq1f1b.document_starts(documents)} if is_packed else None
    for whole in (alone, model):  # the second one has been cut: it shares its modules with the stages
        result = verified_with(model, whole, kwargs=kwargs)
        assert result and max(result.exact.values()) < 1e-12, str(result)


def test_what_a_stage_has_lost_of_a_model_is_named():
    model = build("llama", torch.float32)
    assert not model.config.tie_word_embeddings
    result = verified_with(model, copy.deepcopy(model), eps=0.1)
    assert not result
    assert "model.layers.2.input_layernorm (LlamaRMSNorm) is the first module" in result.causes[0], str(result)


def test_adapters_of_peft_are_compared_with_their_model():
    peft = pytest.importorskip("peft", reason='needs the extra: pip install "seq1f1b[peft]"')
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama", torch.float32), config)
    whole = copy.deepcopy(model)
    result = verified_with(model, whole)
    assert result and all("lora_" in name for name in result.parameters), str(result)
