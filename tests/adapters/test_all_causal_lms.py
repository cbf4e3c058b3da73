"""Is every causal language model of transformers either right in our pipeline, or refused by the cut?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from test_transformers import COMMON, Float64, check, run_pipeline, run_whole  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES  # noqa: E402

from seq1f1b.transformers import pipeline_stage  # noqa: E402

SMALL: dict[str, Any] = {  # what a config knows of it is set
    **COMMON, "num_hidden_layers": 4, "n_positions": 128, "n_embd": 32, "n_layer": 4, "n_head": 4, "d_model": 32,
    "num_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "ffn_dim": 48, "ffn_hidden_size": 48, "kv_channels": 8,
    "word_embed_proj_dim": 32, "cls_token_id": 1, "sep_token_id": 2, "sliding_window": 6, "query_pre_attn_scalar": 8,
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "moe_top_k": 2, "moe_k": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "qk_head_dim": 12, "v_head_dim": 8, "decoder_layers": 4, "encoder_layers": 2,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 8, "swa_v_head_dim": 8,
}  # fmt: skip
FULL = ["full_attention"] * 4
RIGHT: dict[str, dict[str, Any]] = {
    "afmoe": {}, "apertus": {}, "arcee": {}, "aria_text": {}, "axk1": {}, "bitnet": {}, "cohere": {}, "cohere2": {},
    "cohere2_moe": {}, "cwm": {}, "deepseek_v2": {"num_experts_per_tok": 2}, "deepseek_v3": {},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}, "ernie4_5": {},
    "ernie4_5_moe": {}, "exaone4": {}, "exaone_moe": {}, "flex_olmo": {}, "gemma": {}, "gemma2": {}, "gemma3_text": {},
    "glm": {}, "glm4": {}, "glm4_moe": {}, "glm4_moe_lite": {}, "gpt2": {}, "gpt_bigcode": {}, "gpt_neox": {},
    "granite": {}, "granitemoe": {},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "mamba_n_heads": 4, "position_embedding_type": "rope"},
    "granitemoeshared": {}, "helium": {}, "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": [2] * 4, "moe_intermediate_size": [16] * 4}, "hy_v3": {},
    "hyperclovax": {}, "internlm3": {}, "iquestcoder": {}, "jais2": {}, "jetmoe": {}, "kolibri1": {}, "laguna": {},
    "lfm2": {"layer_types": FULL}, "lfm2_moe": {"layer_types": FULL, "num_dense_layers": 1}, "llama": {}, "mellum": {},
    "minicpm3": {}, "minimax_m2": {}, "minimax_m3_vl_text": {}, "ministral": {"head_dim": 8}, "ministral3": {},
    "mistral": {}, "mixtral": {}, "modernbert-decoder": {}, "moshi": {}, "nanochat": {},
    "nemotron": {"num_key_value_heads": 2}, "olmo": {}, "olmo2": {}, "olmo3": {}, "olmoe": {}, "opt": {},
    "persimmon": {}, "phi": {}, "phi3": {}, "phimoe": {}, "qwen2": {}, "qwen2_moe": {}, "qwen3": {}, "qwen3_moe": {},
    "seed_oss": {}, "smollm3": {}, "solar_open": {}, "starcoder2": {}, "vaultgemma": {}, "youtu": {},
}  # fmt: skip
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "hugging-face.md"


def build(name: str) -> Any:
    """A small one without dropout; its first four layers are of as many types as there are."""
    kind = transformers.CONFIG_MAPPING[name]
    base = kind()
    known = vars(base).keys() | getattr(kind, "attribute_map", {}).keys()
    options = {key: value for key, value in SMALL.items() if key in known and getattr(base, key, None) is not None}
    options |= {key: COMMON[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    options |= {key: 0.0 for key, value in vars(base).items() if isinstance(value, float) and _is_random(key)}
    types = list(dict.fromkeys(getattr(base, "layer_types", None) or ()))
    options |= {"layer_types": [types[i % len(types)] for i in range(4)]} if types else {}
    options |= {"mlp_layer_types": base.mlp_layer_types[:4]} if getattr(base, "mlp_layer_types", None) else {}
    if "kv_lora_rank" in known:  # every head has keys of its own, of a size of its own
        options["num_key_value_heads"] = 4
        options.pop("head_dim", None)
    config = kind(**{**options, **RIGHT.get(name, {})})
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > 10**7:
        raise ValueError(f"{name} has {size} parameters")
    torch.manual_seed(0)
    how = {"attn_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **how, experts_implementation="eager")
    return model.double().train()


def _is_random(key: str) -> bool:
    return any(word in key for word in ("drop", "jitter", "noise")) and "token" not in key


def is_right(model: Any) -> None:
    with Float64():
        want_losses, want = run_whole(copy.deepcopy(model))
    losses, stages, _ = run_pipeline(model)
    torch.testing.assert_close(torch.stack(losses), torch.stack(want_losses), rtol=1e-12, atol=0)
    check(stages, {name: gradient for name, gradient in want.items() if gradient is not None})


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if i % 10 == 3 else pytest.mark.full) for i, n in enumerate(RIGHT)]
)
def test_a_supported_model_is_right(name):
    is_right(build(name))


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_a_supported_model_without_memory_is_cut(name):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build(name).config)
    assert all(pipeline_stage(model, rank, 2) is not None for rank in range(2))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(set(NAMES) - set(RIGHT)))
def test_any_other_is_refused_by_the_cut_or_right(name):
    try:
        model = build(name)
    except Exception as error:  # configs have rules of their own
        pytest.skip(f"cannot be built small: {error}")
    try:
        for rank in range(2):
            pipeline_stage(copy.deepcopy(model), rank, 2)
    except ValueError as error:
        assert type(model).__name__ in str(error) or "seq1f1b" in str(error)
        return
    is_right(model)


def test_the_page_lists_them():
    listed = PAGE.read_text(encoding="utf-8").partition("| checked families |")[2].partition("\n\n")[0]
    assert {name for name in RIGHT if f"`{name}`" in listed} == set(RIGHT) and listed.count("`") == 2 * len(RIGHT)
