"""Are layers of several kinds priced as what each of them holds: pairs in a window, state, experts, by hand?"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
from test_cost import SMALL, ideal

from seq1f1b import partition_sequence
from seq1f1b.partition import LayerKind, make_model
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.by_parts import check_profile
from seq1f1b.planning.configs import shape_of
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.decoder import check_decoder
from seq1f1b.planning.hardware import ProfiledHardware, load_hardware, load_model
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.search import search_plans
from seq1f1b.seconds import pairs_of, spans_of

WINDOW = LayerKind(window=5)
STATE = LayerKind(heads=0, mixer=64 * 100, inner=60, outer=40, kept=130, scan=900, state=256, tail=48, other=7)
MIXED = SMALL._replace(kinds=(LayerKind(), WINDOW, STATE), pattern=(0, 1, 2))


def seen(documents: tuple[int, ...], begin: int, end: int, window: int) -> int:
    """Pairs, counted one by one."""
    owner = [d for d, length in enumerate(documents) for _ in range(length)]
    return sum(owner[i] == owner[j] and i - j < (window or i + 1) for i in range(begin, end) for j in range(i + 1))


@pytest.mark.parametrize("documents", [(40,), (5, 1, 22, 12)])
def test_forward_is_the_flops_of_pairs_counted_one_by_one(documents):
    """Two layers of each kind: full attention, a window of 5, a recurrence."""
    sizes, products = [7, 20, 13], 2 * (4 * 64 * 96 + 4 * 64 * 48 + 6 * 64 * 96)
    cost = CostModel(MIXED, ideal(), num_ranks=3, seq_len=40, layout=Layout(documents=documents))
    found = cost.price(sizes).seconds.forward
    for s, (size, end) in enumerate(zip(sizes, itertools.accumulate(sizes), strict=True)):
        begin = end - size
        pairs = [seen(documents, begin, end, window) for window in (0, 5)]
        assert [pairs_of(documents, begin, end, window) for window in (0, 5)] == pairs
        assert spans_of(sizes, documents, (5,))[s].within == (pairs[1],)
        of_state = 2 * size * (2 * 64 * 100 + 6 * 64 * 96 + 900)
        flops = 2 * products * size + 2 * 4 * 96 * sum(pairs) + of_state + 2 * 64 * 50 * size
        assert sum(row[s] for row in found) * 1e9 == pytest.approx(flops, rel=1e-12)
        if documents == (40,):
            assert MIXED.flops(begin, end) == pytest.approx(flops, rel=1e-12)


def test_a_kind_that_says_nothing_changes_nothing():
    layout, machine = Layout(tensor=2, data=2, expert=2, inside="ffn"), load_hardware("h100")
    plain = SMALL._replace(experts=4, experts_per_token=2)
    found = []
    for shape in (
        plain,
        plain._replace(kinds=(LayerKind(),)),
        plain._replace(kinds=(LayerKind(),) * 2, pattern=(0, 1)),
    ):
        cost = CostModel(shape, machine, num_ranks=3, seq_len=96, layout=layout)
        price, order = cost.price(cost.split(4)), [0, 1, 2]
        flops = [shape.flops(17, 90), *partition_sequence(5000, 4, model=shape, documents=[5000, 3000, 2000])]
        parameters = [cost.parts.parameters(stage) for stage in order]
        found.append((price.sizes, price.seconds, price.step_memory(order), price.held_bytes(), flops, parameters))
    assert found[0] == found[1]
    (sizes, seconds, memory, *rest), (other_sizes, other_seconds, other_memory, *others) = found[0], found[2]
    assert (sizes, memory, rest) == (other_sizes, other_memory, others)
    for table, other in zip(seconds, other_seconds, strict=True):
        assert [x for row in table for x in row] == pytest.approx([x for row in other for x in row], rel=1e-13)


def test_segments_are_cut_by_the_sum_of_what_layers_cost():
    """A recurrence costs each token alike, a window each token behind its begin; full attention the late ones more."""
    alone = {kind: MIXED._replace(kinds=(kind,), pattern=()) for kind in MIXED.kinds}
    splits = {kind: CostModel(shape, ideal(), num_ranks=2, seq_len=4096).split(4) for kind, shape in alone.items()}
    assert splits[STATE] == [1024] * 4
    assert max(splits[WINDOW]) - min(splits[WINDOW]) <= 8
    cost = CostModel(MIXED, ideal(), num_ranks=2, seq_len=4096)
    full, mixed = splits[LayerKind()], cost.split(4)
    assert full[0] > mixed[0] > 1024 > mixed[-1] > full[-1]
    seconds = cost.price(mixed).seconds
    units = [sum(column) for column in zip(*seconds.forward, *seconds.backward, strict=True)]
    assert max(units) / min(units) < 1.002
    even = partition_sequence(4096, 4, model=MIXED)
    flops = [MIXED.flops(end - n, end) for n, end in zip(even, itertools.accumulate(even), strict=True)]
    assert max(flops) - min(flops) <= 2 * (MIXED.flops(4095, 4096))  # borders lie between tokens


def test_layers_go_to_stages_by_their_cost():
    """No other cut of seven layers into three stages has a faster slowest stage."""
    shape = MIXED._replace(layers=7, pattern=(2, 2, 1, 0, 2, 2, 0), vocab=500)
    cost = CostModel.balanced(shape, ideal(), num_ranks=3, seq_len=512, layout=Layout())

    def slowest(layers: tuple[int, ...]) -> float:
        seconds = CostModel(shape, ideal(), num_ranks=3, seq_len=512, layout=Layout(layers=layers)).price([512]).seconds
        return max(f[0] + b[0] for f, b in zip(seconds.forward, seconds.backward, strict=True))

    cuts = [(a, b, 7 - a - b) for a in range(1, 6) for b in range(1, 7 - a)]
    assert slowest(cost.layers) == pytest.approx(min(map(slowest, cuts)), rel=1e-9)
    assert slowest(cost.layers) < slowest((3, 2, 2))


def test_bytes_of_cache_state_and_experts_by_hand():
    machine = replace(ideal(), activation_factor=1.0)
    cost = CostModel(MIXED, machine, num_ranks=3, seq_len=40)
    first, last = cost.parts.counts_of(0), cost.parts.counts_of(2)
    assert (first, last) == ((1, 1, 0), (0, 1, 1))
    assert cost.parts.cached(first, 10) == (2 * 10 * 2 * 48 * 2, 2 * 10 * 2 * 48 * 4)  # bf16, gradients in fp32
    assert cost.parts.cached(last, 10) == (10 * 2 * 48 * 2, 10 * 2 * 48 * 4)
    held = [cost.parts.held(tokens)[cost.parts.kinds[2]].saved for tokens in (0, 1, 11)]
    assert held[0] == 4 * 256 + 2 * 48  # the state that a unit of any length hands on
    attention, state = 2 * (4 * 64 + 2 * 96 + 3 * 96) + 4 * 4, 2 * (4 * 64 + 130 + 3 * 96)
    assert held[1] - held[0] == attention + state
    assert held[2] - held[0] == 11 * (held[1] - held[0])
    sparse = LayerKind(ffn=32, experts=4, experts_per_token=2, shared=16)
    shape = SMALL._replace(kinds=(LayerKind(), sparse), pattern=(0, 1))
    for degree in (1, 2, 4):
        cost = CostModel(shape, machine, num_ranks=1, seq_len=8, layout=Layout(expert=degree, data=4))
        mixer = 2 * 64 * 96 + 2 * 64 * 48 + 2 * 64
        assert cost.parts.layer_parameters == [
            mixer + 3 * 64 * 96,
            mixer + 64 * 4 + 3 * 64 * 16 + 3 * 64 * 32 * 4 / degree,
        ]


def test_a_plan_of_kinds_is_read_again_from_its_file():
    found = search_plans(
        MIXED, load_hardware("h100"), seq_len=4096, num_ranks=2, num_microbatches=4, segments=[2], names=["seq1f1b"]
    )
    plan = found.plans[0]
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.model == MIXED
    told = json.loads(json.dumps(MIXED._asdict()))
    told["kinds"] = [{}, {"window": 5}, STATE._asdict()]  # as one writes it by hand
    assert make_model(told, "shape.json") == MIXED


QWEN2 = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50,
    "intermediate_size": 96,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": None,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


def test_a_config_of_transformers_is_a_shape(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert load_model(str(path)) == load_model("llama3-8b")
    experts = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    path.write_text(json.dumps({**LLAMA, "model_type": "qwen3_moe", "head_dim": 128, **experts}))
    shape = load_model(str(path))
    assert (shape.ffn, shape.experts, shape.experts_per_token, shape.head_dim) == (768, 128, 8, 128)


def test_a_config_is_refused_by_the_field_that_is_not_known(tmp_path):
    path = tmp_path / "config.json"
    for changes, message in (
        ({"model_type": "rwkv"}, "model_type is 'rwkv', must be one of llama, .*write the shape into a file"),
        ({"vocab_size": None}, "a config of 'qwen2' without vocab_size"),
        (
            {"layer_types": ["full_attention"] * 3 + ["conv"]},
            r"layer_types\[3\] is 'conv', must be one of full_attention",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types is .*must be a list of 4 entries, one per layer"),
        ({"use_sliding_window": True, "sliding_window": "wide"}, "sliding_window is 'wide', must be a whole number"),
        ({"model_type": "jamba"}, "a config of 'jamba' without attn_layer_period"),
    ):
        path.write_text(json.dumps({**QWEN2, "max_window_layers": 0, **changes}))
        with pytest.raises(ValueError, match=rf"{path}: {message}"):
            load_model(str(path))
    with pytest.raises(ValueError, match=r"model kinds\[1\]: model kv_heads is 3, must divide heads 4"):
        MIXED._replace(kinds=(LayerKind(), LayerKind(kv_heads=3)), pattern=(0, 1)).flops(0, 1)
    with pytest.raises(ValueError, match=r"model pattern is \[0, 3\], must be numbers of kinds, 0..2"):
        MIXED._replace(pattern=(0, 3)).flops(0, 1)
    with pytest.raises(ValueError, match=r"kinds\[0\] window is -1, must be at least 0"):
        SMALL._replace(kinds=(LayerKind(window=-1),)).flops(0, 1)


def test_what_a_kind_does_not_have_is_refused():
    with pytest.raises(ValueError, match="context is 2, must be 1: the model has layers that keep a state"):
        CostModel(MIXED, ideal(), num_ranks=2, seq_len=64, layout=Layout(context=2))
    with pytest.raises(ValueError, match=r"expert is 2, must divide 1 \(experts"):
        CostModel(MIXED, ideal(), num_ranks=2, seq_len=64, layout=Layout(expert=2, data=2))
    with pytest.raises(ValueError, match="the model has layers of kinds for which there is no built-in layer"):
        check_decoder(MIXED, 1024)


def test_biases_alone_make_a_kind_that_a_profile_tells_of():
    shape = make_model(shape_of({**QWEN2, "num_key_value_heads": 2}, "config.json"), "config.json")
    assert shape.kinds == (LayerKind(other=4 * 16 + 2 * 2 * 16),)
    check_decoder(shape, 1024)
    profile = Profile.load("benchmarks/results/lengths-profile.json")
    biased = profile.model._replace(kinds=(LayerKind(other=5),))
    check_profile(profile, biased, Layout())
    machine = ProfiledHardware.of(profile, load_hardware("cpu-zen5"))
    counts = {"num_ranks": 1, "seq_len": 512}
    prices = [CostModel(model, machine, **counts).price([512]).seconds for model in (profile.model, biased)]
    assert prices[0] == prices[1]
    with pytest.raises(ValueError, match="a profile is of equal layers with full attention"):
        check_profile(profile, profile.model._replace(kinds=(WINDOW,)), Layout())
