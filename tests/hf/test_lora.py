"""Do adapters of peft train in our pipeline as in the whole model, at no cost below the first of them, and can peft
load what is saved?"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

from safetensors.torch import load_file  # noqa: E402
from test_shapes import config_of  # noqa: E402
from test_transformers import SIZES, Float64, M, batch, build, run_pipeline, run_whole  # noqa: E402

from seq1f1b.engine.stage import StageStep  # noqa: E402
from seq1f1b.planning.cost import CostModel  # noqa: E402
from seq1f1b.transformers import load_pretrained, pipeline_stage, save_pretrained  # noqa: E402

PREFIX = "base_model.model."  # of peft's names
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
BOTH_ENDS = ["q_proj", "embed_tokens", "lm_head"]
CONFIGS = {
    "lora": peft.LoraConfig(**LORA),
    "dora": peft.LoraConfig(**{**LORA, "use_dora": True}),
    "embedding": peft.LoraConfig(**{**LORA, "target_modules": ["q_proj", "embed_tokens"]}),
    "whole head": peft.LoraConfig(**{**LORA, "modules_to_save": ["lm_head"]}),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj"], init_weights=False),
    "lokr": peft.LoKrConfig(r=4, target_modules=["q_proj"], init_weights=False),
    "ia3": peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    ),
    "oft": peft.OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"], init_weights=False),
    "replicated layers": peft.LoraConfig(**LORA, layer_replication=[(0, 2), (1, 3)]),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm"]),
}


def adapted(config: Any, base: Any = None, seed: int = 0) -> Any:
    base = build("llama") if base is None else base
    torch.manual_seed(seed)
    return peft.get_peft_model(base, config).double()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad(), Float64():
        return model.eval()(batch()[0]).logits


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_a_plan_counts_the_parameters_of_adapters_as_peft_does(name: str) -> None:
    config, cost = config_of(name)
    layout = replace(cost.layout, lora=4)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = CostModel(cost.model, cost.hardware, num_ranks=1, seq_len=8, layout=layout).parts.trained_parameters
    assert trained == [sum(p.numel() for p in model.parameters() if p.requires_grad)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_train_as_in_the_whole_model_and_peft_loads_what_is_saved(kind, tmp_path):
    model = adapted(CONFIGS[kind])
    whole = copy.deepcopy(model)
    with Float64():
        want_losses, gradients = run_whole(whole)
    losses, stages, _ = run_pipeline(model, then=lambda engine: save_pretrained(engine, tmp_path))
    torch.testing.assert_close(torch.stack(losses), torch.stack(want_losses), rtol=1e-12, atol=0)
    want = {name.removeprefix(PREFIX): g for name, g in gradients.items() if g is not None}
    found = {name: p.grad for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
    assert found.keys() == want.keys() and found
    for name, gradient in want.items():
        assert (found[name] - gradient).norm() <= 1e-10 * gradient.norm(), name
    again = peft.PeftModel.from_pretrained(build("llama"), tmp_path).double()
    assert torch.equal(logits_of(again), logits_of(whole))
    assert not list(tmp_path.glob(".unfinished*")) and not list(tmp_path.glob("model*"))


def test_the_file_is_the_one_that_peft_writes_itself(tmp_path):
    model = adapted(CONFIGS["lora"])
    model.add_adapter("second", peft.LoraConfig(**{**LORA, "r": 2}))
    copy.deepcopy(model).save_pretrained(tmp_path / "plain")
    run_pipeline(model.double(), 3, then=lambda engine: save_pretrained(engine, tmp_path / "ours"))
    for place in (".", "second"):
        plain, ours = (tmp_path / folder / place for folder in ("plain", "ours"))
        want, found = (load_file(folder / "adapter_model.safetensors") for folder in (plain, ours))
        assert found.keys() == want.keys() and all(torch.equal(found[name].to(t.dtype), t) for name, t in want.items())
        want, found = (json.loads((folder / "adapter_config.json").read_text()) for folder in (plain, ours))
        # Sets come in any order.
        assert {**found, "target_modules": None} == {**want, "target_modules": None}


def test_any_number_of_ranks_goes_on_from_a_saved_adapter(tmp_path):
    trained = adapted(CONFIGS["lora"], seed=1)
    trained.save_pretrained(tmp_path)
    model = adapted(CONFIGS["lora"], seed=2)
    _, stages, _ = run_pipeline(model, 3, then=lambda engine: load_pretrained(engine, tmp_path))
    want = dict(trained.named_parameters())
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert torch.equal(parameter, want[PREFIX + name]), name


def test_an_adapter_that_does_not_fit_is_an_error_on_all_ranks(tmp_path):
    adapted(peft.LoraConfig(**{**LORA, "layers_to_transform": [0]})).save_pretrained(tmp_path)

    def load(engine: Any) -> str:
        with pytest.raises(ValueError, match=r"rank 1: .*layers\.2\.\S+ in shape \(4, 32\), .* lacks it") as error:
            load_pretrained(engine, tmp_path)
        return str(error.value)

    texts = run_pipeline(adapted(CONFIGS["lora"]), then=load)[2]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("schedule", ["seq1f1b", "seq-zb-h1"])
@pytest.mark.parametrize("first", [1, 2])  # on the second of three ranks, on the last
def test_what_lies_below_the_first_adapter_costs_nothing(monkeypatch, first, schedule):
    """No graph, no gradients of keys and values, no tensor to send back, no backward."""
    sent: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    backward = StageStep.backward

    def watched(step: StageStep, cell: int, received: Any) -> Any:
        gradients = backward(step, cell, received)
        sent[step.stage.index].append(gradients)
        return gradients

    monkeypatch.setattr(StageStep, "backward", watched)
    model = adapted(peft.LoraConfig(**{**LORA, "layers_to_transform": list(range(first, 3))}))
    _, _, reports = run_pipeline(model, 3, schedule=schedule, then=lambda engine: engine.report())
    for rank, report in enumerate(reports):
        stage = report.stages[0]
        held = (stage.activation_bytes, stage.gradient_bytes, report.grad_bytes, stage.trained_weights)
        assert len(sent[rank]) == M * len(SIZES)
        if rank < first:
            assert held == (0, 0, 0, 0)
        else:
            assert stage.activation_bytes > 0 and report.grad_bytes > 0 and stage.trained_weights > 0
        if rank:
            tensors = [g for gradients in sent[rank] for g in gradients if g is not None]
            assert bool(tensors) == (rank > first)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "type PROMPT_TUNING"),
        (peft.VeraConfig(r=4, target_modules=["q_proj"]), "type VERA"),
        (peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[5], **LORA), "activated by tokens"),
        (peft.LoraConfig(**{**LORA, "target_modules": BOTH_ENDS, "ensure_weight_tying": True}), "one memory.*=False"),
    ],
)
def test_adapters_that_are_more_than_layers_are_refused_by_name(config, text):
    model = peft.get_peft_model(build("llama", torch.float32, tie_word_embeddings=True), config)
    with pytest.raises(ValueError, match=text):
        pipeline_stage(model, 0, 2)


def test_adapters_without_peft_s_model_or_without_memory_are_refused():
    model = peft.inject_adapter_in_model(CONFIGS["lora"], build("llama", torch.float32))
    model._hf_peft_config_loaded = True  # as add_adapter does, which transformers 5.24 refuses to peft 0.21
    with pytest.raises(ValueError, match="get_peft_model"):
        pipeline_stage(model, 0, 2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(build("llama").config)
    stage = pipeline_stage(peft.get_peft_model(model, CONFIGS["lora"]), 0, 2)
    with pytest.raises(ValueError, match="before get_peft_model"):
        stage.materialize()
