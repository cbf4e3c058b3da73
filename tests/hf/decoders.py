"""Is every causal language model of transformers right in our pipeline, or refused before anything runs?

    python tests/hf/decoders.py                # examines all and writes this release's column of the page
    python tests/hf/decoders.py llama bloom    # examines some and prints what it found

``docs/reference/models.md`` is the one list: the script writes it, and ``test_decoders.py`` compares with it.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as pytest does

from test_transformers import COMMON, Float64, batch, check, doc_ids_of, engine_of, run_whole

import seq1f1b
from seq1f1b.testing import run_ranks
from seq1f1b.transformers import pipeline_stage

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
RELEASE = ".".join(transformers.__version__.split(".")[:2])
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
RIGHT, WITHOUT_DOCUMENTS, REFUSED, UNBUILT = "right", "right without packed documents", "refused", "cannot be built"
KINDS = (RIGHT, WITHOUT_DOCUMENTS, REFUSED, UNBUILT)
WRONG = "wrong"  # never on the page
NEED_MEMORY = ("apertus", "apertus1p5_text")  # transformers does not initialize their activations

SIZES = [9, 1, 7]  # of segments
DOCUMENTS = [[6, 6, 5], [1, 12, 4]]  # over one border, over two, one token
LAYERS = 4
SMALL: dict[str, Any] = {  # what a config knows of it is set
    **COMMON, "num_hidden_layers": LAYERS, "n_positions": 128, "n_embd": 32, "n_layer": LAYERS, "n_layers": LAYERS,
    "n_head": 4, "n_heads": 4, "d_model": 32, "num_layers": LAYERS, "num_key_value_heads": 2, "head_dim": 8,
    "ffn_dim": 48, "ffn_hidden_size": 48, "kv_channels": 8, "word_embed_proj_dim": 32, "cls_token_id": 1,
    "sep_token_id": 2, "sliding_window": 6, "query_pre_attn_scalar": 8, "num_experts": 4, "n_routed_experts": 4,
    "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "moe_top_k": 2, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "qk_head_dim": 12, "v_head_dim": 8, "decoder_layers": LAYERS, "encoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "swa_v_head_dim": 8, "is_decoder": True, "state_size": 8, "mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_d_state": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "n_groups": 2, "attention_chunk_size": 6, "linear_head_dim": 8, "linear_num_heads": 4, "chunk_size": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "mamba_chunk_size": 4, "block_size": 4,
    "rotary_dim": 4, "index_n_heads": 4, "index_head_dim": 8,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
LINEAR, CONV = ([kind, "full_attention"] * (LAYERS // 2) for kind in ("linear_attention", "conv"))
GEMMA: dict[str, Any] = {  # the last two layers take keys and values of the first two, which are on another stage
    "layer_types": ALTERNATING, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64,
}  # fmt: skip
GEMMA_4 = {**GEMMA, "global_head_dim": 16, "head_dim": 8}
OPTIONS: dict[str, dict[str, Any]] = {  # what a type needs beside SMALL
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_text": {"use_dsa": True, "sliding_window": 6, "num_key_value_heads": 4, **{
        f"swa_{key}": size for key, size in {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 12,
            "qk_nope_head_dim": 8, "v_head_dim": 8}.items()}},
    "gemma3n_text": {**GEMMA, "laurel_rank": 8},
    "gemma4_text": GEMMA_4,
    "gemma4_unified_text": {
        "layer_types": ALTERNATING, "num_kv_shared_layers": 2, "global_head_dim": 16, "head_dim": 8,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 6},
    "granitemoehybrid": {
        "layer_types": LINEAR, "mamba_n_heads": 4, "mamba_d_head": 16, "position_embedding_type": "rope",
    },
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "moe_topk": [2] * LAYERS, "moe_intermediate_size": [16] * LAYERS},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": CONV},
    "lfm2_moe": {"layer_types": CONV, "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "hc_lowrank": 8,
    },
    "reformer": {"axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2), "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2), "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


# -- small models ------------------------------------------------------------------------------------------------------


def build(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A small one without dropout; its first four layers are of as many types as there are."""
    config = small_config(transformers.CONFIG_MAPPING[name], **options)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > 10**7:
        raise ValueError(f"{name} has {size} parameters")
    torch.manual_seed(0)
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **how).double()
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # of MiniMax, whose buffers have been rounded in float32
            decays = module.decay_factors(module.slope_rate)
            module.query_decay, module.key_decay, module.diagonal_decay = decays
    return model.to(dtype).train()


def small_config(kind: Any, **given: Any) -> Any:
    """A small config of this class: four layers, of as many types as there are."""
    base = kind()
    known = vars(base).keys() | getattr(kind, "attribute_map", {}).keys()
    options = {key: value for key, value in SMALL.items() if key in known and get_of(base, key) is not None}
    options |= {key: COMMON[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    options |= {key: 0.0 for key, value in vars(base).items() if isinstance(value, float) and _is_random(key)}
    for key in ("layer_types", "mlp_layer_types"):
        types = list(dict.fromkeys(get_of(base, key) or ()))
        if types and key in vars(base):  # else it follows from other options
            options[key] = [types[i % len(types)] for i in range(LAYERS)]
    if "kv_lora_rank" in known:  # every head has keys of its own, of a size of its own
        options["num_key_value_heads"] = 4
        options.pop("head_dim", None)
    for key in getattr(kind, "sub_configs", {}):
        if get_of(base, key) is not None:
            options[key] = small_config(type(get_of(base, key)))
    return kind(**{**options, **OPTIONS.get(kind.model_type, {}), **given})


def get_of(config: Any, key: str) -> Any:
    """A config's value, or None."""
    try:
        return getattr(config, key, None)
    except Exception:  # differs from layer to layer
        return vars(config).get(key)


def _is_random(key: str) -> bool:
    return any(word in key for word in ("drop", "jitter", "noise")) and "token" not in key


# -- one model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    what: str
    why: str = ""


def examine(name: str, is_quick: bool = False) -> Found:
    """Compares losses and gradients of two stages and three segments with those of the model run whole.

    Args:
        is_quick: packed documents alone, unless these are not right.
    """
    try:
        model = build(name)
    except Exception as error:  # configs have rules of their own
        return Found(UNBUILT, _text(error))
    try:
        with Float64():
            stages = [pipeline_stage(copy.deepcopy(model), rank, 2) for rank in range(2)]
    except ValueError as error:
        return Found(REFUSED, _text(error))
    except Exception as error:
        return Found(WRONG, f"{type(error).__name__} of the cut: {_text(error)}")
    doc_ids = doc_ids_of(DOCUMENTS)
    if is_quick and _problem(model, stages, doc_ids).what == RIGHT:
        return Found(RIGHT)
    problem = _problem(model, stages, None)
    if problem.what != RIGHT:
        return problem
    problem = _problem(model, stages, doc_ids)
    if problem.what == WRONG:
        return Found(WRONG, f"packed documents: {problem.why}")
    return problem if problem.what == RIGHT else Found(WITHOUT_DOCUMENTS, problem.why)


def _problem(model: Any, stages: list[Any], doc_ids: Any) -> Found:
    tokens, target = batch(SIZES, first=3)
    for stage in stages:
        stage.zero_grad()
    with Float64():
        losses, gradients = run_whole(copy.deepcopy(model), None if doc_ids is None else DOCUMENTS, (tokens, target))
    want = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    kwargs = None if doc_ids is None else {"doc_ids": doc_ids}

    def run(group: Any) -> Any:
        with Float64():
            rules = dict.fromkeys(kwargs or {}, "slice")
            engine = engine_of(stages[group.rank], group, num_segments=3, segment_sizes=SIZES, arg_rules=rules)
            return engine.step(tokens, target=target, kwargs=kwargs)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", seq1f1b.SegmentWarning)  # the first step blames no type that is right
            found = run_ranks(2, run)[-1]
    except Exception as error:
        text = _text(error)
        ours = isinstance(error, ValueError) and "seq1f1b" in text
        return Found(REFUSED if ours else WRONG, f"{type(error).__name__}: {text}" if not ours else text)
    try:
        torch.testing.assert_close(torch.stack(found), torch.stack(losses), rtol=1e-12, atol=0)
        check(stages, want)
    except AssertionError as error:
        return Found(WRONG, _text(error))
    return Found(RIGHT)


def _text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


# -- the page ----------------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- by tests/hf/decoders.py -->\n", "<!-- end of the table -->\n"
ABSENT = "-"  # a release has no such type


@dataclass
class Row:
    what: dict[str, str]  # by release
    why: str = ""


def read_page() -> dict[str, Row]:
    """The types of the table, of which each row holds all with one verdict and one reason."""
    table = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].partition("| types | ")[2]
    head, _, *lines = table.splitlines() or ["", ""]
    releases = head.split(" | ")[:-1]
    rows = {}
    for line in lines:
        names, *cells, why = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for name in names.split(", "):
            what = {r: cell for r, cell in zip(releases, cells, strict=True) if cell != ABSENT}
            rows[name.strip("`")] = Row(what, why)
    return rows


def write_page(rows: dict[str, Row]) -> None:
    releases = sorted({release for row in rows.values() for release in row.what}, key=Version)
    counts = {
        release: {what: sum(row.what.get(release) == what for row in rows.values()) for what in KINDS}
        for release in releases
    }
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, row in sorted(rows.items()):
        alike.setdefault((*(row.what.get(r, ABSENT) for r in releases), row.why), []).append(name)
    order = sorted(alike.items(), key=lambda item: ([(*KINDS, ABSENT).index(what) for what in item[0][:-1]], item[1]))
    lines = [
        f"| transformers | {' | '.join(KINDS)} |", "|" + " --- |" * (1 + len(KINDS)),
        *(f"| {r} | {' | '.join(str(counts[r][what]) for what in KINDS)} |" for r in releases), "",
        f"| types | {' | '.join(releases)} | why |", "|" + " --- |" * (2 + len(releases)),
        *(f"| {', '.join(f'`{name}`' for name in names)} | {' | '.join(verdict)} |" for verdict, names in order),
    ]  # fmt: skip
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def _cell(why: str) -> str:
    """The reason, without what a row says already and what differs from model to model, as a cell of a table."""
    why = re.sub(r"^\w+ cannot be cut into stages that run by segments: ", "", why)
    why = re.sub(r"^layer \d+ gets", "a layer gets", why)
    why = re.sub(r" \(also if layers were .*?\)", "", why)
    why = re.sub(r": Tensor-likes are not [^;]+", "", why)
    why = re.sub(r"[;:] (train it whole|run the model whole, with another attn_implementation)$", "", why)
    return re.sub(r"([\\`*_<>|\[\]{}$])", r"\\\1", why[:400])


def _with(rows: dict[str, Row], found: dict[str, Found]) -> dict[str, Row]:
    """The rows with this release's column. The newest release says why."""
    for row in rows.values():
        row.what.pop(RELEASE, None)
    for name, its in found.items():
        row = rows.setdefault(name, Row({}))
        if all(Version(RELEASE) > Version(release) for release in row.what):
            row.why = _cell(its.why)
        row.what[RELEASE] = its.what
    return {name: row for name, row in rows.items() if row.what}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="types of model; default: all, which writes the page")
    given = parser.parse_args()
    found, bad = {}, []
    for name in given.names or NAMES:
        found[name] = examine(name)
        print(f"{name}: {found[name].what} {found[name].why}".rstrip(), flush=True)
        if found[name].what == WRONG:
            bad.append(f"{name}: {found[name].why}")
    print("\n".join(bad), file=sys.stderr)
    if not given.names and not bad:
        write_page(_with(read_page(), found))  # another release may have written meanwhile
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
