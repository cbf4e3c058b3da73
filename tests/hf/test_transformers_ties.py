"""Do stages of transformers whose embedding is also the head keep its attributes, and refuse its hooks?"""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from test_transformers import build  # noqa: E402

from seq1f1b.transformers import pipeline_stage  # noqa: E402


def test_a_stage_of_transformers_has_the_attributes_and_the_names_of_the_model():
    model = build("gpt2")
    model.get_input_embeddings().weight.no_weight_decay = True
    stages = [pipeline_stage(model, rank, 2) for rank in range(2)]
    first, last = ([name for name, _ in stage.named_parameters()] for stage in stages)
    assert {*first, *last} - {"lm_head.weight"} == {name for name, _ in model.named_parameters()}
    copies = [stage.tied_parameters["transformer.wte.weight"] for stage in stages]
    assert torch.equal(*copies) and copies[0] is not copies[1] and copies[1].no_weight_decay


def test_what_stands_beside_a_tied_weight_of_transformers_stays_as_it_is():
    model = build("phi", tie_word_embeddings=True)  # a head with a bias
    model.lm_head.bias.no_weight_decay = True
    bias = model.lm_head.bias
    assert pipeline_stage(copy.copy(model), 1, 2).get_parameter("lm_head.bias") is bias


@pytest.mark.parametrize("vocabulary", ["ends", "ranks"])
def test_a_hook_of_a_tied_weight_of_transformers_is_refused(vocabulary):
    model = build("gpt2")
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient)
    told = "tied parameter 'transformer.wte.weight' has copies on several stages, and hooks"
    with pytest.raises(ValueError, match=told):
        pipeline_stage(model, 1, 2, vocabulary=vocabulary)


def test_a_hook_of_a_spread_vocabulary_is_refused_and_attributes_are_carried():
    model = build("gpt2", tie_word_embeddings=False)
    model.lm_head.weight.no_weight_decay = True
    stage = pipeline_stage(model, 0, 2, vocabulary="ranks")
    assert stage.head.linear.weight.no_weight_decay
    model = build("gpt2", tie_word_embeddings=False)
    model.lm_head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"lm_head\.weight has a hook for its gradient, which shards of a vocabulary"):
        pipeline_stage(model, 0, 2, vocabulary="ranks")
