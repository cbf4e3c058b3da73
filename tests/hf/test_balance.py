"""Does balance="time" price what the layers and the head compute, and cut so that the slowest stage is fastest?"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from seq1f1b.partition import balanced  # noqa: E402
from seq1f1b.transformers import pipeline_stage  # noqa: E402
from seq1f1b.transformers.cut import layer_work  # noqa: E402

COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TOKENS = 64


def build(name: str, **options: Any) -> Any:
    config = transformers.CONFIG_MAPPING[name](**{**COMMON, **options})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def products(model: Any, first_trained: int = 0) -> list[float]:
    """Prices of the layers and the head for a token that attends to itself alone, without this attention."""
    work, head = layer_work(model, list(model.model.layers), [(None, None)] * 4, 1)
    one = [4.0 * 4 * 16 * (1 + 2.5 * (i >= first_trained)) for i in range(4)]  # two products of 4 heads of 16
    return [*(each - own for each, own in zip(work, one, strict=True)), head]


def counted(model: Any) -> list[float]:
    """Matrix products per token in a forward and backward, by torch's own counter; none of them is attention's."""
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
    names = [*(f"model.layers.{i}" for i in range(4)), "lm_head"]
    found = [counter.get_flop_counts()[f"{type(model).__name__}.{name}"] for name in names]
    return [sum(count for op, count in of.items() if str(op) in ("aten.mm", "aten.addmm")) / TOKENS for of in found]


def test_products_are_those_that_torch_counts():
    model = build("llama")
    assert products(model) == pytest.approx(counted(model), rel=1e-12)


def test_what_is_frozen_has_fewer_passes():
    """The first two layers run forward only, the others have no products for their weights."""
    model = build("llama")
    model.requires_grad_(False)
    model.model.layers[2].input_layernorm.weight.requires_grad_(True)
    found, whole = products(model, first_trained=2), products(build("llama"))
    assert found == pytest.approx([whole[0] / 3, whole[0] / 3, whole[0] * 2 / 3, whole[0] * 2 / 3, whole[4] * 2 / 3])


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (5, None), (None, 16), (5, 16), (99, 99)])
def test_attention_is_over_the_tokens_that_a_token_sees(window, chunk):
    model = build("llama")
    work, _ = layer_work(model, list(model.model.layers), [(window, chunk)] * 4, TOKENS)
    at_one, _ = layer_work(model, list(model.model.layers), [(None, None)] * 4, 1)
    pairs = sum(min(t % (chunk or TOKENS) + 1, window or TOKENS) for t in range(TOKENS)) / TOKENS
    assert work[0] - at_one[0] == pytest.approx(4 * 4 * 16 * 3.5 * (pairs - 1))


def test_a_token_meets_its_own_experts_alone():
    two = build("mixtral", num_local_experts=8, num_experts_per_tok=2)
    eight = build("mixtral", num_local_experts=8, num_experts_per_tok=8)
    experts = sum(p.numel() for p in two.model.layers[0].mlp.experts.parameters())
    assert products(eight)[0] - products(two)[0] == pytest.approx(6 * experts * 6 / 8)


def test_layers_with_a_window_are_cheaper():
    kinds = ["sliding_attention"] * 4 + ["full_attention"] * 4
    options = {"sliding_window": 4, "layer_types": kinds, "num_hidden_layers": 8, "num_key_value_heads": 2}
    with torch.device("meta"):
        stage = pipeline_stage(
            build("qwen2", use_sliding_window=True, **options), 0, 2, balance="time", seq_len=1 << 16
        )
    assert {name.split(".")[2] for name, _ in stage.named_parameters() if "layers" in name} == set("012345")


def test_the_slowest_stage_is_as_fast_as_can_be():
    """Against all splits, of random work."""
    chosen = random.Random(0)
    for _ in range(40):
        count = chosen.randint(2, 8)
        stages = chosen.randint(1, min(4, count))
        work, head = [chosen.randint(1, 9) for _ in range(count)], chosen.randint(0, 20)
        found = balanced(work, head, stages)
        assert len(found) == stages and sum(found) == count and min(found) >= 1

        def slowest(counts: Any, work: Any = work, head: float = head) -> float:
            ends = list(itertools.accumulate(counts))
            sums = [sum(work[end - n : end]) for n, end in zip(counts, ends, strict=True)]
            sums[-1] += head
            return float(max(sums))

        splits = [
            [b - a for a, b in itertools.pairwise([0, *cuts, count])]
            for cuts in itertools.combinations(range(1, count), stages - 1)
        ]
        assert slowest(found) == min(map(slowest, splits))


def test_a_large_vocabulary_takes_layers_from_the_last_stage():
    def layers(**options: Any) -> list[int]:
        counts = []
        for rank in range(2):
            with torch.device("meta"):
                model = build("llama", num_hidden_layers=6, vocab_size=1024)  # the head costs about 2 layers
            names = [name.split(".") for name, _ in pipeline_stage(model, rank, 2, **options).named_parameters()]
            counts.append(len({path[2] for path in names if path[1] == "layers"}))
        return counts

    assert layers() == layers(balance="count") == [3, 3]
    assert layers(balance="time", seq_len=16) == [4, 2]
    assert layers(balance="time", seq_len=1 << 20) == [3, 3]  # attention is nearly all
    assert layers(balance="time", seq_len=16, vocabulary="ranks") == [3, 3]
