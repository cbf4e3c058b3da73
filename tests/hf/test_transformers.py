"""Do models of transformers train in our pipeline as they do whole, with transformers' own eager attention?"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slices import each_value, full_only, one_in
from tiny_model import gradient_error
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

transformers = pytest.importorskip("transformers", reason='needs the extra: pip install "seq1f1b[transformers]"')

import seq1f1b  # noqa: E402
from seq1f1b.testing import run_ranks  # noqa: E402
from seq1f1b.transformers import load_pretrained, pipeline_stage, save_pretrained  # noqa: E402

SIZES = [9, 4, 7, 4]
TOKENS, M = sum(SIZES), 2
COMMON: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2}
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 16},
    "mistral": {**GROUPED, "sliding_window": 6},
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {
        **GROUPED, **SLIDING, "head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 24,
    },
    "phi": GROUPED,
    "gpt_neox": {},
    "granite": {**GROUPED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3_moe": {**GROUPED, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "phimoe": {  # tells its window to its masks alone
        **GROUPED, "num_local_experts": 4, "sliding_window": 6, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
    },
    "deepseek_v3": {  # heads of 12 for queries and keys, of 8 for values
        "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
    "gpt_oss": {**GROUPED, **SLIDING, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {  # of its queries, those of layers without rotation are scaled by their positions
        **GROUPED, "head_dim": 16, "attention_chunk_size": 5, "no_rope_layers": [1, 0, 1], "floor_scale": 8,
        "attn_scale": 0.5, "intermediate_size_mlp": 48, "num_local_experts": 2, "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    },
    "modernbert-decoder": {  # has the dtype of its rotary embedding from its embedding
        "cls_token_id": 1, "sep_token_id": 2, "local_attention": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip


class Float64(TorchFunctionMode):
    """Models round to float32 in places, whatever their dtype: norms and the eager softmax. Here they do not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def build(name: str, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**{**COMMON, **ARCHITECTURES[name], **options})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    return model.to(dtype).train()


def batch(sizes: list[int] = SIZES, first: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens of two rows of so many segments, from this one on, and targets."""
    tokens = torch.randint(first, 64, (M, sum(sizes)), generator=torch.Generator().manual_seed(1))
    target = seq1f1b.shift_labels(tokens)
    target[0, : sizes[0]] = -100  # a whole segment without a target
    target[1, 3:6] = -100
    return tokens, target


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


DOCUMENTS = [[6, 7, 11], [1, 20, 3]]  # over one border, to the next, over the last; one token, over three borders


def doc_ids_of(rows: list[list[int]]) -> Tensor:
    ids = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    return seq1f1b.document_starts(torch.stack(ids))


def run_whole(
    model: Any, documents: list[list[int]] | None = None, data: tuple[Tensor, Tensor] | None = None
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of the micro-batches by the library's own forward, gradients of their mean.

    documents: lengths of those of each row, which run one by one.
    """
    tokens, target = batch() if data is None else data
    losses = []
    for row, its, lengths in zip(tokens, target, documents or [[tokens.shape[1]]] * M, strict=True):
        logits = [model(document[None], use_cache=False).logits for document in row.split(lengths)]
        losses.append(loss_fn(torch.cat(logits, 1), its[None]))
    torch.stack(losses).mean().backward()
    return [loss.detach() for loss in losses], {n: p.grad for n, p in model.named_parameters()}


run_documents = partial(run_whole, documents=DOCUMENTS)


def engine_of(stages: Any, group: Any = None, **options: Any) -> Any:
    given = {"num_microbatches": M, "num_segments": len(SIZES), "segment_sizes": SIZES, "loss_fn": loss_fn, **options}
    return seq1f1b.PipelineEngine(stages, group=group, **given)


def run_pipeline(
    model: Any,
    num_ranks: int = 2,
    *,
    steps: int = 1,
    sizes: list[int] = SIZES,
    per_rank: int = 1,
    balance: Any = "count",
    kwargs: dict[str, Tensor] | None = None,
    then: Callable[[Any], Any] = lambda engine: None,
    **options: Any,
) -> tuple[list[Tensor], list[Any], list[Any]]:
    """Losses, the stages with their gradients, and what ``then`` makes of each rank's engine."""
    tokens, target = batch()

    def run(group: Any) -> tuple[list[Tensor], Any, Any]:
        with Float64():
            own = [
                pipeline_stage(model, group.rank + i * num_ranks, num_ranks * per_rank, balance=balance)
                for i in range(per_rank)
            ]
            rules = dict.fromkeys(kwargs or {}, "slice")
            engine = engine_of(own, group, num_segments=len(sizes), segment_sizes=sizes, arg_rules=rules, **options)
            for _ in range(steps):
                losses = engine.step(tokens, target=target, kwargs=kwargs)
            return losses, own, then(engine)

    losses, stages, results = zip(*run_ranks(num_ranks, run), strict=True)
    return losses[-1], [stage for own in stages for stage in own], list(results)


def check(stages: list[Any], want: dict[str, Tensor]) -> None:
    """Every gradient of the whole model is some stage's, under its name; a tied one is that of each copy."""
    seen = set()
    for stage in stages:
        first_names = {id(p): name for name, p in stage.tied_parameters.items()}
        found = {first_names.get(id(p), n): p.grad for n, p in stage.named_parameters() if p.grad is not None}
        assert gradient_error({**want, **found}, want) <= 1e-10
        seen |= found.keys()
    assert seen == set(want)


def check_pipeline(model: Any, num_ranks: int = 2, *, packed: bool = False, **options: Any) -> tuple[Any, Any]:
    """Runs the model in a pipeline and whole. Returns the stages, and what ``then`` makes of each rank's engine."""
    with Float64():
        want_losses, want = (run_documents if packed else run_whole)(copy.deepcopy(model))
    kwargs = {"doc_ids": doc_ids_of(DOCUMENTS)} if packed else None
    losses, stages, results = run_pipeline(model, num_ranks, kwargs=kwargs, **options)
    torch.testing.assert_close(torch.stack(losses), torch.stack(want_losses), rtol=1e-12, atol=0)
    check(stages, {name: gradient for name, gradient in want.items() if gradient is not None})
    return stages, results


@pytest.mark.parametrize("name", one_in(2, ARCHITECTURES, always=["llama", "gpt2", "gemma2", "llama4_text"]))
def test_losses_and_gradients_are_those_of_the_whole_model(name):
    check_pipeline(build(name))


@pytest.mark.parametrize("packed", [False, True])
def test_gradient_checkpointing_recomputes_in_the_backward_and_changes_nothing(packed):
    kwargs = {"doc_ids": doc_ids_of(DOCUMENTS)} if packed else None
    _, plain, _ = run_pipeline(build("gemma2", torch.float32), kwargs=kwargs)
    model = build("gemma2", torch.float32)
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    _, stages, _ = run_pipeline(model, kwargs=kwargs, attention="unchecked")  # a look would call the hook, too
    assert len(calls) == 2 * M * len(SIZES)
    for stage, other in zip(stages, plain, strict=True):
        for (name, p), (_, q) in zip(stage.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(("num_ranks", "balance"), [(1, "count"), (2, [1, 2]), (3, "count")])
def test_stages_may_be_of_any_balance(num_ranks, balance):
    stages, _ = check_pipeline(build("llama"), num_ranks, balance=balance)
    if balance != "count":
        layers = [{n.split(".")[2] for n in stage.state_dict() if ".layers." in n} for stage in stages]
        assert layers == [{"0"}, {"1", "2"}]


# -- tied embeddings ---------------------------------------------------------------------------------------------------


def test_copies_of_a_tied_embedding_stay_equal_over_steps_and_count_once_in_the_norm():
    model = build("llama", tie_word_embeddings=True)
    whole = copy.deepcopy(model)
    with Float64():
        for _ in range(2):  # gradients accumulate over two steps
            _, want = run_whole(whole)
    norm = torch.nn.utils.get_total_norm(list(want.values()))
    _, stages, norms = run_pipeline(model, 3, steps=2, then=lambda engine: engine.clip_grad_norm_(1e9))
    check(stages, want)
    assert [sorted(stage.tied_parameters) for stage in stages] == [
        ["model.embed_tokens.weight"],
        [],
        ["model.embed_tokens.weight"],
    ]
    for found in norms:
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
    first, last = (stages[i].tied_parameters["model.embed_tokens.weight"] for i in (0, 2))
    assert first is not last and torch.equal(first.grad, last.grad)
    assert "lm_head.weight" in stages[2].state_dict() and "model.embed_tokens.weight" not in stages[2].state_dict()


# -- checkpoints and memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tied"),
    [("llama", True), ("phi", False), ("gpt2", True), *full_only(("llama", False), ("gpt_neox", False))],
)
def test_a_vocabulary_that_lies_on_all_ranks(tmp_path, name, tied):
    """Saved as the whole model, loaded by another number of ranks; a tied one, and one with a bias, too."""
    model = build(name, vocab_size=67, tie_word_embeddings=tied)
    with Float64():
        losses, gradients = run_whole(model)
    tokens, target = batch()

    def run(group: Any) -> Any:
        with Float64():
            stage = pipeline_stage(copy.deepcopy(model), group.rank, group.size, vocabulary="ranks")
            engine = engine_of(stage, group, loss_fn=stage.head, embedding=stage.embedding)
            found = engine.step(tokens, target=target)
            own = {n: p.grad.clone() for n, p in engine.named_parameters()}
            if group.size == 3:
                save_pretrained(engine, tmp_path)
                group.barrier()
            else:
                for parameter in engine.parameters():
                    torch.nn.init.zeros_(parameter)
                load_pretrained(engine, tmp_path)
                found = engine.eval(tokens, target=target)
            return found, own

    for num_ranks in (3, 2):
        results = run_ranks(num_ranks, run)
        assert max(abs(float(a - b)) for a, b in zip(results[-1][0], losses, strict=True)) <= 1e-10
        found = {n: g for _, own in results for n, g in own.items()}
        for shared in (n for n in found if sum(n in own for _, own in results) > 1):
            found[shared] = torch.cat([own[shared] for _, own in results])
        assert gradient_error(found, gradients) <= 1e-10
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert again.config.architectures == [type(model).__name__]
    assert all(torch.equal(p, again.get_parameter(n)) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gemma2", "the vocabulary of Gemma2ForCausalLM cannot be spread .*'model.embed_tokens' is a Gemma2Text"),
        ("granite", 'GraniteForCausalLM changes its logits behind the head.* use vocabulary="ends"'),
    ],
)
def test_a_vocabulary_that_cannot_be_spread(name, text):
    model = build(name)
    with pytest.raises(ValueError, match=text):
        stage = pipeline_stage(model, 0, 1, vocabulary="ranks")
        stage(torch.zeros(1, 3, 32, dtype=torch.float64))


def test_a_stage_that_is_compiled_as_a_whole_is_told_so():
    compiled = torch.compile(pipeline_stage(build("llama").float(), 0, 1), backend="eager")
    tokens, target = batch()
    with pytest.raises(ValueError, match=r"does not support torch.compile around a whole model or stage: compile each"):
        engine_of(compiled).step(tokens, target=target)


# -- attributes and hooks of tied weights ------------------------------------------------------------------------------


def test_a_stage_of_transformers_has_the_attributes_and_the_names_of_the_model():
    model = build("gpt2")
    model.get_input_embeddings().weight.no_weight_decay = True
    stages = [pipeline_stage(model, rank, 2) for rank in range(2)]
    first, last = ([name for name, _ in stage.named_parameters()] for stage in stages)
    assert {*first, *last} - {"lm_head.weight"} == {name for name, _ in model.named_parameters()}
    copies = [stage.tied_parameters["transformer.wte.weight"] for stage in stages]
    assert torch.equal(*copies) and copies[0] is not copies[1] and copies[1].no_weight_decay
    model = build("gpt2", tie_word_embeddings=False)
    model.lm_head.weight.no_weight_decay = True
    assert pipeline_stage(model, 0, 2, vocabulary="ranks").head.linear.weight.no_weight_decay


TIED = r"tied parameter 'transformer\.wte\.weight' has copies on several stages, and hooks"
SPREAD = r"lm_head\.weight has a hook for its gradient, which shards of a vocabulary"


@pytest.mark.parametrize(
    ("tied", "vocabulary", "text"), [(True, "ends", TIED), (True, "ranks", TIED), (False, "ranks", SPREAD)]
)
def test_a_hook_of_what_lies_on_several_stages_is_refused(tied, vocabulary, text):
    model = build("gpt2", tie_word_embeddings=tied)
    model.get_output_embeddings().weight.register_hook(lambda gradient: gradient)
    with pytest.raises(ValueError, match=text):
        pipeline_stage(model, int(tied), 2, vocabulary=vocabulary)


# -- verify ------------------------------------------------------------------------------------------------------------


def verified_with(model: Any, whole: Any, **arguments: Any) -> Any:
    """verify(model=) of two stages of ``model``."""
    tokens, target = batch()

    def run(group: Any) -> Any:
        stage = pipeline_stage(model, group.rank, 2)
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


# -- what cannot work --------------------------------------------------------------------------------------------------


def other_family(name: str, **options: Any) -> Any:
    """Without memory: it is refused before there are weights."""
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[name](**options)
        return transformers.AutoModelForCausalLM.from_config(config)


def given_more(model: Any) -> Any:
    """The attention function gets an argument that nobody knows."""
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **kwargs, temperature=0.5)
    return model


def with_torch_s_own(model: Any) -> Any:
    """One layer attends by itself."""
    attention = model.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **_: (hidden_states.cumsum(1), None)
    return model


def in_one_memory(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach())
    return model


def with_layers(model: Any, path: str, order: list[int]) -> Any:
    owner, _, name = path.rpartition(".")
    layers = model.get_submodule(path)
    setattr(model.get_submodule(owner), name, nn.ModuleList(layers[i] for i in order))
    return model


def of(name: str, **options: Any) -> Callable[[], Any]:
    return lambda: build(name, **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (of("llama", attention_dropout=0.1), "attention dropout"),
        (of("gpt2", attn_pdrop=0.1), "attention dropout"),
        (of("modernbert-decoder", attention_dropout=0.1), "attention dropout"),
        (of("opt", layerdrop=0.1), "layerdrop"),
        (of("deepseek_v3", v_head_dim=260), "layer 0: head_dim of v is 260, must be at most 256"),
        (lambda: other_family("diffllama"), "layer 0: it runs attention more than once"),
        (lambda: other_family("bert"), "BertLMHeadModel .* no list of layers whose attentions are causal"),
        (lambda: other_family("falcon", alibi=True), "transformer rounds its ALiBi biases"),
        (lambda: other_family("gemma3"), "give Gemma3ForCausalLM, which holds its text_config"),
        (lambda: other_family("hrm_text"), "2 stacks of layers, model.L_module.layers, model.H"),
        (lambda: other_family("xglm"), "no list of layers whose attentions"),
        (lambda: given_more(build("llama")), "layer 0: its attention is given 'temperature'"),
        (lambda: with_torch_s_own(build("llama")), "layer 1: LlamaAttention does not call"),
        (lambda: in_one_memory(build("llama")), r"embed_tokens.weight and lm_head.weight are two"),
        (lambda: with_layers(build("qwen3"), "model.layers", [2, 1, 0]), r"layer_idx that counts from 0 \(also if"),
        (lambda: with_layers(build("gpt2"), "transformer.h", [0, 1, 1, 2]), "layers were dropped or repeated"),
        (of("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "'dynamic'"),
        (of("gemma2", use_bidirectional_attention=True), r"whose attentions are causal \(is_causal\)"),
        (of("mixtral", output_router_logits=True), "router"),
        (lambda: build("llama").model, "ForCausalLM"),
        (lambda: nn.Linear(2, 2), "must be a PreTrainedModel"),
    ],
)
def test_what_cannot_be_cut_or_run_says_so(make, text):
    with pytest.raises((ValueError, TypeError), match=text):
        pipeline_stage(make(), 0, 2)


SAID: dict[str, tuple[Any, bool]] = {  # and whether it is taken
    "attention_mask": (torch.ones(M, TOKENS), True),
    "output_attentions": (False, True),
    "past_key_values": (None, True),
    "a mask of padding": (torch.arange(TOKENS).expand(M, -1) >= 3, False),
    "position_ids": (torch.arange(TOKENS).expand(M, -1), False),
    "output_hidden_states": (True, False),
}


@pytest.mark.parametrize("said", SAID)
def test_what_a_tokenizer_or_a_collator_adds_is_taken_where_it_says_nothing(said):
    value, is_taken = SAID[said]
    name = {"a mask of padding": "attention_mask"}.get(said, said)
    stage = pipeline_stage(build("llama"), 0, 1)
    engine = engine_of(stage, arg_rules={name: "slice"} if isinstance(value, Tensor) else None)
    tokens, target = batch()
    if is_taken:
        losses = engine.step(tokens, target=target, kwargs={name: value})
        plain = engine.eval(tokens, target=target)
        assert torch.allclose(torch.stack(losses), torch.stack(plain))
        return
    ran = []
    stage.register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(ValueError, match=f"^a stage of a transformers model does not take {name}"):
        engine.step(tokens, target=target, kwargs={name: value})
    assert not ran
    with pytest.raises(ValueError, match=name):
        stage(tokens, **{name: value})


def test_attention_dropout_is_none_in_evaluation_and_refused_before_a_step():
    model = build("gpt2", attn_pdrop=0.1).eval()
    want = copy.deepcopy(model)(batch()[0]).logits
    stage = pipeline_stage(model, 0, 1)
    with Float64():
        torch.testing.assert_close(stage.eval()(batch()[0]), want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match=r"attention dropout \(here 0.1\): set it to 0"):
        stage.train()


@pytest.mark.parametrize("name", ["llama", "gpt2", "modernbert-decoder", "deepseek_v3", "mixtral"])
def test_another_default_device_changes_nothing(name):
    """ "meta" stands for a GPU beside stages on the CPU."""
    model = build(name)
    x, (tokens, _) = torch.randn(M, TOKENS, 32, dtype=torch.float64), batch()
    want = pipeline_stage(copy.deepcopy(model), 1, 2)(x)
    with torch.device("meta"):
        found = pipeline_stage(copy.deepcopy(model), 1, 2)(x)
        first = pipeline_stage(copy.deepcopy(model), 0, 2)(tokens)
    assert torch.equal(found, want) and first.device.type == "cpu"


def test_a_cut_leaves_no_trace_in_the_model_and_takes_no_number():
    model = build("phimoe")
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    hooks = [(m, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    before, state, modes = torch.get_rng_state(), model.config.to_dict(), [m.training for m in model.modules()]
    pipeline_stage(model, 1, 2)
    assert torch.equal(torch.get_rng_state(), before) and not calls
    assert model.config.to_dict() == state and modes == [m.training for m in model.modules()]
    assert all((m._forward_hooks, m._forward_pre_hooks) == (hook, pre) for m, hook, pre in hooks)


SHARING: dict[str, Any] = {  # layers 3 and 4 take the keys and values of layers 1 and 2
    **COMMON, **GROUPED, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "head_dim": 8, "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
}  # fmt: skip
STREAMS = {"gemma3n_text": {"laurel_rank": 8}, "gemma4_text": {"global_head_dim": 16}}


def sharing(name: str) -> Any:
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[name](**{**SHARING, **STREAMS[name]})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().train()


@pytest.mark.parametrize(("name", "balance"), each_value(list(STREAMS), [[5], [2, 3], [1, 1, 2, 1]]))
def test_layers_take_inputs_of_the_embedding_and_keys_and_values_of_others_over_any_stages(name, balance):
    """Each stage hands on what later ones take."""
    stages, _ = check_pipeline(sharing(name), len(balance), packed=True, balance=balance)
    held = ["model.embed_tokens_per_layer.weight" in stage.state_dict() for stage in stages]
    assert held == [True, *[False] * (len(balance) - 1)]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stage_hands_on_what_later_ones_take_and_no_more(name):
    """Streams; inputs of the layers that follow; keys and values of the two layers that later ones share."""
    stages = [pipeline_stage(sharing(name), rank, 3, balance=[1, 2, 2]) for rank in range(3)]
    first = stages[0](batch()[0])
    second = stages[1](*first)
    streams = 4 if name == "gemma3n_text" else 1
    assert [tuple(t.shape) for t in first] == [(M, TOKENS, 32)] * streams + [(M, TOKENS, 4, 8)]
    sizes = [16, 16, 8, 8] if name == "gemma4_text" else [8] * 4  # full attention has heads of its own size
    keys = [(M, 2, TOKENS, size) for size in sizes]
    assert [tuple(t.shape) for t in second] == [(M, TOKENS, 32)] * streams + [(M, TOKENS, 2, 8), *keys]
    for stage, given in [(stages[0], first), (stages[1], first[-1:]), (stages[2], first)]:
        with pytest.raises(ValueError, match=rf"the stage takes .* as the stage before returns them, got {len(given)}"):
            stage(*given)


def test_an_indexer_that_would_not_choose_all_keys_is_refused():
    config = transformers.CONFIG_MAPPING["deepseek_v32"](
        **{**COMMON, **ARCHITECTURES["deepseek_v3"], "index_topk": TOKENS - 1, "index_n_heads": 2, "index_head_dim": 8}
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().train()
    with pytest.raises(ValueError, match=r"chooses 23 keys \(index_topk\) of a row of 24 tokens or more"):
        run_pipeline(model, 1)


def test_masks_that_could_mean_two_things_are_refused():
    model = build("llama4_text", sliding_window=5)
    model.set_attn_implementation("seq1f1b")
    with pytest.raises(ValueError, match=r"a mask of 5 tokens, where the config's window and chunks are of \[5, 5\]"):
        model(batch()[0], use_cache=False)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "llama4_text"])
def test_the_attention_alone(name):
    model = build(name)
    tokens, _ = batch()
    with Float64():
        eager = model(tokens, use_cache=False).logits
        model.set_attn_implementation("seq1f1b")
        torch.testing.assert_close(model(tokens, use_cache=False).logits, eager, rtol=1e-12, atol=1e-12)


def test_the_attention_alone_refuses_what_it_would_get_wrong():
    model = build("llama")
    model.set_attn_implementation("seq1f1b")
    tokens, _ = batch()
    with Float64():
        eager = build("llama")(tokens).logits
        full = torch.ones_like(tokens)
        torch.testing.assert_close(model(tokens, attention_mask=full).logits, eager, rtol=1e-12, atol=1e-12)
    padded = full.clone()
    padded[0, :3] = 0
    packed = torch.arange(TOKENS)[None] % 7
    for arguments, text in [({"attention_mask": padded}, "padding"), ({"position_ids": packed}, "packed")]:
        with pytest.raises(ValueError, match=text):
            model(tokens, use_cache=False, **arguments)
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="cache"):
        model(tokens[:, :1], past_key_values=cache)
    windowed = build("phimoe")
    windowed.set_attn_implementation("seq1f1b")
    with pytest.raises(ValueError, match="tells its mask only: cut the model by pipeline_stage"):
        windowed(tokens, use_cache=False)
