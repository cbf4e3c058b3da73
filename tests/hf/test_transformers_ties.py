"""Do stages of transformers whose embedding is also the head train as the model does, with its names and attributes?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seq1f1b
from seq1f1b.testing import run_ranks

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from seq1f1b.transformers import pipeline_stage  # noqa: E402

VOCAB, HIDDEN, TOKENS = 16, 8, 12


def batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return tokens, seq1f1b.shift_labels(tokens)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def gpt2(**options: Any) -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def test_a_stage_of_transformers_has_the_attributes_and_the_names_of_the_model():
    model = gpt2()
    model.get_input_embeddings().weight.no_weight_decay = True
    stages = [pipeline_stage(model, rank, 2) for rank in range(2)]
    tokens, target = batch()

    def run(group: Any) -> list[str]:
        engine = seq1f1b.PipelineEngine(
            stages[group.rank], num_microbatches=2, num_segments=3, loss_fn=loss_fn, group=group
        )
        optimizer = torch.optim.AdamW(
            [
                {"params": [p], "weight_decay": 0.0 if hasattr(p, "no_weight_decay") or "wte" in name else 0.5}
                for name, p in engine.named_parameters()
            ],
            lr=0.1,
        )
        for _ in range(3):
            optimizer.zero_grad()
            engine.step(tokens, target=target)
            optimizer.step()
        return [name for name, _ in engine.named_parameters()]

    first, last = run_ranks(2, run)
    assert {*first} & {*last} == {"transformer.wte.weight"}
    assert {*first, *last} == {name for name, _ in gpt2().named_parameters()}
    copies = [stage.tied_parameters["transformer.wte.weight"] for stage in stages]
    assert torch.equal(*copies) and copies[0] is not copies[1] and copies[1].no_weight_decay


def test_what_stands_beside_a_tied_weight_of_transformers_stays_as_it_is():
    config = transformers.PhiConfig(  # a head with a bias
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.lm_head.bias.no_weight_decay = True
    bias = model.lm_head.bias
    assert pipeline_stage(copy.copy(model), 1, 2).get_parameter("lm_head.bias") is bias


@pytest.mark.parametrize("vocabulary", ["ends", "ranks"])
def test_a_hook_of_a_tied_weight_of_transformers_is_refused(vocabulary):
    model = gpt2()
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient)
    told = "tied parameter 'transformer.wte.weight' has copies on several stages, and hooks"
    with pytest.raises(ValueError, match=told):
        pipeline_stage(model, 1, 2, vocabulary=vocabulary)


def test_a_hook_of_a_spread_vocabulary_is_refused_and_attributes_are_carried():
    model = gpt2(tie_word_embeddings=False)
    model.lm_head.weight.no_weight_decay = True
    stage = pipeline_stage(model, 0, 2, vocabulary="ranks")
    assert stage.head.linear.weight.no_weight_decay
    model = gpt2(tie_word_embeddings=False)
    model.lm_head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=r"lm_head\.weight has a hook for its gradient, which shards of a vocabulary"):
        pipeline_stage(model, 0, 2, vocabulary="ranks")
