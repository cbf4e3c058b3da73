"""Do models train in our pipeline as whole whose layers are more than attention over keys and values of their own?

Linear attention and state spaces, which keep state along the sequence; sinks; several streams of hidden states, inputs
of the embedding, keys and values of other layers.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from decoders import SMALL, get_of  # noqa: E402
from slices import one_in, slice_of  # noqa: E402
from test_transformers import (  # noqa: E402
    COMMON,
    SIZES,
    Float64,
    M,
    batch,
    check,
    check_pipeline,
    doc_ids,
    loss_fn,
    run_documents,
    run_pipeline,
    run_whole,
)
from tiny_model import gradient_error  # noqa: E402

import seq1f1b  # noqa: E402
from seq1f1b import Memory  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402
from seq1f1b.transformers import pipeline_stage  # noqa: E402
from seq1f1b.transformers import state as transformers_state  # noqa: E402

LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"]}
CONV = {"layer_types": ["conv", "full_attention", "conv", "conv"]}
DELTA: dict[str, Any] = {
    **LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA,
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 4},
    "mamba": {"state_size": 4, "time_step_rank": 4},
    "lfm2": CONV,
    "granitemoehybrid": {**MAMBA2, **LINEAR},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"], "mamba_num_heads": 4,
        "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 4,
    },
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "kimi_linear": {
        **LINEAR, "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    },
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "minimax": {**LINEAR, "block_size": 4},
    "lfm2_moe": {**CONV, "num_dense_layers": 1},
    "falcon_mamba": {"state_size": 4, "time_step_rank": 4},
    "bailing_hybrid": {**LINEAR, "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4},
    "lfm3": CONV,
    "lara_mini": DELTA,
    "zamba": {"layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"], "mamba_d_state": 4, "mamba_dt_rank": 4},
    "zamba2": {
        "layers_block_type": ["hybrid", "mamba", "hybrid", "hybrid"], "num_mem_blocks": 1, "mamba_d_state": 8,
        "chunk_size": 4, "adapter_rank": 4,
    },
}  # fmt: skip
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA = {**SLIDING, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},  # has sinks
    "gemma3n_text": {**GEMMA, "laurel_rank": 8},
    "gemma4_text": {**GEMMA, "global_head_dim": 16},
}
SLICE = ["qwen3_next", "mamba", "gpt_oss", "gemma3n_text"]  # of each kind of scan one


def build(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """A small one, without dropout."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind = transformers.CONFIG_MAPPING[name]
    base = kind()
    known = vars(base).keys() | getattr(kind, "attribute_map", {}).keys()
    small = {key: value for key, value in SMALL.items() if key in known and get_of(base, key) is not None}
    small |= {key: COMMON[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        kind(**{**small, **(HYBRIDS | OTHERS)[name], **options}),
        attn_implementation="eager",
        experts_implementation="eager",
    ).to(dtype)
    for module in model.modules():
        if hasattr(module, "decay_factors"):  # its buffers have been rounded in float32
            decays = module.decay_factors(module.slope_rate)
            module.query_decay, module.key_decay, module.diagonal_decay = decays
    return model.train()


def whole(model: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    with Float64():
        losses, gradients = run_whole(copy.deepcopy(model))
    return losses, {name: gradient for name, gradient in gradients.items() if gradient is not None}


@pytest.mark.parametrize("name", one_in(2, HYBRIDS | OTHERS, always=SLICE))
def test_losses_and_gradients_are_those_of_the_whole_model(name):
    model = build(name)
    want_losses, want = whole(model)
    check_pipeline(model, want_losses, want)


@pytest.mark.parametrize("name", one_in(2, HYBRIDS | OTHERS, rest=1))
def test_packed_documents_are_as_each_alone(name):
    model = build(name)
    with Float64():
        want_losses, want = run_documents(copy.deepcopy(model))
    want = {name: gradient for name, gradient in want.items() if gradient is not None}
    check_pipeline(model, want_losses, want, kwargs={"doc_ids": doc_ids()})


SEGMENTS = [[1, 1, 1, 21], [9, 1, 13, 1], [24]]
SHORT = ["mamba2", "lfm2", "kimi_linear", "minimax", "gemma4_text", *SLICE]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(name, sizes, marks=() if (place + other) % 3 == 0 else pytest.mark.full)
        for (place, name), (other, sizes) in itertools.product(enumerate(SHORT), enumerate(SEGMENTS))
    ],
)
def test_segments_may_be_of_one_token(name, sizes):
    model = build(name)
    want_losses, want = whole(model)
    tokens, target = batch()

    def run(group: Any) -> Any:
        with Float64():
            stage = pipeline_stage(model, group.rank, 2)
            engine = seq1f1b.PipelineEngine(
                stage, num_microbatches=M, num_segments=len(sizes), segment_sizes=sizes, loss_fn=loss_fn, group=group
            )
            return engine.step(tokens, target=target), stage

    losses, stages = zip(*run_ranks(2, run), strict=True)
    torch.testing.assert_close(torch.stack(losses[-1]), torch.stack(want_losses), rtol=1e-12, atol=0)
    check(list(stages), want)


OTHER_ORDERS = [
    (name, options, packed)
    for name in SLICE
    for options in ({"memory": Memory(recompute="all")}, {"schedule": "seq-zb-h1"})
    for packed in (False, True)
]


# Each name once; each option with documents and without.
FEW = [OTHER_ORDERS[4 * i + at] for i, at in enumerate((0, 1, 3, 2))]


@pytest.mark.parametrize(("name", "options", "packed"), slice_of(OTHER_ORDERS, FEW))
def test_other_orders_and_recomputation(name, options, packed):
    model = build(name)
    with Float64():
        want_losses, want = (run_documents if packed else run_whole)(copy.deepcopy(model))
    losses, stages, _ = run_pipeline(model, kwargs={"doc_ids": doc_ids()} if packed else None, **options)
    torch.testing.assert_close(torch.stack(losses), torch.stack(want_losses), rtol=1e-12, atol=0)
    check(stages, want)


@pytest.mark.parametrize("name", one_in(1, SLICE, rest=1, always=["qwen3_next", "gemma3n_text"]))
def test_two_stages_per_rank(name):
    model = build(name)
    want_losses, want = whole(model)
    tokens, target = batch()

    def run(group: Any) -> Any:
        with Float64():
            stages = [pipeline_stage(model, group.rank + 2 * i, 4) for i in range(2)]
            engine = seq1f1b.PipelineEngine(
                stages, schedule="seq1f1b-interleaved", num_microbatches=M, num_segments=len(SIZES),
                segment_sizes=SIZES, loss_fn=loss_fn, group=group,
            )  # fmt: skip
            return engine.step(tokens, target=target), stages

    losses, stages = zip(*run_ranks(2, run), strict=True)
    torch.testing.assert_close(torch.stack(losses[-1]), torch.stack(want_losses), rtol=1e-12, atol=0)
    check([stage for of_rank in stages for stage in of_rank], want)


@pytest.mark.parametrize(
    ("name", "packed"),
    slice_of(itertools.product(SLICE, [False, True]), [("qwen3_next", True), ("gemma3n_text", False)]),
)
def test_gradient_checkpointing_changes_nothing(name, packed):
    kwargs = {"doc_ids": doc_ids()} if packed else None
    _, plain, _ = run_pipeline(build(name, torch.float32), kwargs=kwargs)
    model = build(name, torch.float32)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    _, stages, _ = run_pipeline(model, kwargs=kwargs)
    for stage, other in zip(stages, plain, strict=True):
        for (at, p), (_, q) in zip(stage.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), at


def test_documents_that_a_layer_would_not_know_in_its_backward_are_refused():
    model = build("mamba", torch.float32)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    stage = pipeline_stage(model, 0, 1)
    with pytest.raises(ValueError, match="would not know their doc_ids; run the stage by a PipelineEngine"):
        stage(batch()[0], doc_ids=doc_ids())
    with torch.no_grad():
        assert stage(batch()[0], doc_ids=doc_ids()).isfinite().all()


# Single roundings decide in float32 where a router's bias of gpt_oss has a gradient that sums to 0, and where the norms
# of qwen3_next do.
ROUNDED = [("gpt_oss", "float32"), ("qwen3_next", "float32")]
NARROW = [case for case in itertools.product(SLICE, ("autocast", "bfloat16", "float32")) if case not in ROUNDED]
FEW_NARROW = [("qwen3_next", "autocast"), ("gpt_oss", "bfloat16"), ("mamba", "float32"), ("gemma3n_text", "float32")]


@pytest.mark.parametrize(("name", "how"), slice_of(NARROW, FEW_NARROW))
def test_narrow_dtypes_are_as_near_to_float64_as_the_whole_model(name, how):
    """Twice the error of the whole model at most, and an ulp of each gradient's norm for every unit that adds to it."""
    dtype = torch.bfloat16 if how == "bfloat16" else torch.float32
    exact = build(name)
    exact.load_state_dict(build(name, dtype).state_dict())
    _, want = whole(exact)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        _, plain = run_whole(build(name, dtype))

    class Cast(torch.nn.Module):
        def __init__(self, stage: Any) -> None:
            super().__init__()
            self.stage = stage

        def forward(self, *given: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                return self.stage(*given)

    tokens, target = batch()

    def run(group: Any) -> Any:
        stage = pipeline_stage(model, group.rank, 2)
        engine = seq1f1b.PipelineEngine(
            Cast(stage), num_microbatches=M, num_segments=len(SIZES), segment_sizes=SIZES, loss_fn=loss_fn, group=group
        )
        engine.step(tokens, target=target)
        return {n: p.grad for n, p in stage.named_parameters()}

    model = build(name, dtype)
    found = {n: g for gradients in run_ranks(2, run) for n, g in gradients.items()}
    floor = 1e-3 * torch.stack([g.norm() for g in want.values()]).square().mean().sqrt()
    narrow = torch.float32 if how == "float32" else torch.bfloat16

    def error(gradient: Tensor, n: str) -> float:
        return float((gradient.double() - want[n]).norm() / torch.maximum(want[n].norm(), floor))

    for n in want:
        assert error(found[n], n) <= 2 * error(plain[n], n) + M * len(SIZES) * torch.finfo(narrow).eps, n


@pytest.mark.parametrize("name", one_in(1, SLICE, rest=1, always=["qwen3_next", "mamba"]))
def test_lora(name):
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    config = peft.LoraConfig(r=4, target_modules=["in_proj_ba", "in_proj", "x_proj", "q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build(name), config).double()
    with Float64():
        _, want = run_whole(copy.deepcopy(model))
    _, stages, _ = run_pipeline(model)
    found = {n: p.grad for stage in stages for n, p in stage.peft_model.named_parameters() if p.grad is not None}
    assert found and gradient_error(found, {n: g for n, g in want.items() if g is not None}) <= 1e-10


@pytest.mark.parametrize("name", [*SLICE, "minimax"])
def test_a_model_without_memory_is_cut_and_a_stage_is_copied_and_pickled(name, tmp_path):
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build(name).config)
    assert all(pipeline_stage(model, rank, 2) is not None for rank in range(2))
    stage = pipeline_stage(build(name, torch.float32), 0, 2)
    x = torch.arange(12)[None]
    torch.save(stage, tmp_path / "stage.pt")
    for other in (copy.deepcopy(stage), torch.load(tmp_path / "stage.pt", weights_only=False)):
        torch.testing.assert_close(other(x), stage(x), rtol=0, atol=0)


def ignores_its_state(scan: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
    return scan(*args, **kwargs)


def without_gradient(scan: Any, states: Any, *args: Any, **kwargs: Any) -> Any:
    out, last = scan(*args, **{**kwargs, "initial_states": states.before(states.asked)})
    return out, last.detach()


@pytest.mark.parametrize(
    ("scan", "text"),
    [
        (ignores_its_state, "(computes|passes gradients) otherwise in segments, given its state"),
        (without_gradient, "passes gradients otherwise in segments"),
        (None, "does not run by segments: .* inplace operation"),  # one of another name, and the path for one token
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixer_whose_state_would_be_lost_is_refused(dtype, scan, text, monkeypatch):
    if scan is None:
        monkeypatch.delitem(transformers_state._SCANS, "mamba2_chunk_scan")
    else:
        monkeypatch.setitem(transformers_state._SCANS, "mamba2_chunk_scan", scan)
    with pytest.raises(ValueError, match=rf"layer 0: mixer \(Mamba2Mixer\) {text}"):
        pipeline_stage(build("mamba2", dtype), 0, 2)
