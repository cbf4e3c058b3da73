"""Do a unit's seconds and bytes agree with the model's FLOPs, its published parameters, and counts by hand, for layers
of one kind and of several?"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seq1f1b import ModelShape, Schedule, build_schedule, partition_sequence
from seq1f1b.partition import LayerKind, make_model
from seq1f1b.plan import Layout
from seq1f1b.planning.configs import shape_of
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.decoder import check_decoder
from seq1f1b.planning.hardware import Hardware, ProfiledHardware, load_hardware, load_model, presets
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.tables import check_profile
from seq1f1b.seconds import pairs_of, spans_of

SMALL = ModelShape(hidden=64, layers=6, heads=4, kv_heads=2, ffn=96, vocab=50, head_dim=24)
H, Q, G, F = 64, 96, 48, 96  # its widths: hidden states, q, k, and the feed-forward
SAVED = {"none": 2 * (4 * H + 2 * Q + 3 * F) + 4 * 4, "ffn": 2 * (4 * H + 2 * Q) + 4 * 4, "full": 2 * H}  # by inside
WINDOW = LayerKind(window=5)
STATE = LayerKind(heads=0, mixer=64 * 100, inner=60, outer=40, kept=130, scan=900, state=256, tail=48, other=7)
MIXED = SMALL._replace(kinds=(LayerKind(), WINDOW, STATE), pattern=(0, 1, 2))


def ideal(**changes: float) -> Hardware:
    """A machine whose only cost is the FLOP: its peak, nothing else."""
    machine = load_hardware("a100")
    free = {"launch": 0.0, "overhead": 0.0, "extra": 0.0, "latency": 0.0, "rows": 0.0, "efficiency": 1.0}
    values = {name: free[name.split("_")[-1]] for name in vars(machine) if name.split("_")[-1] in free}
    values |= dict.fromkeys(("bandwidth", "inside_bandwidth", "between_bandwidth"), 1e30)
    return replace(machine, **{**values, "peak": 1e9, "head_tile": 1.0, **changes})


EXACT = ideal(activation_factor=1.0, allocator_reserve=0.0, context_bytes=0.0)


# -- seconds


@pytest.mark.parametrize("sizes", [[40], [7, 20, 13]])
@pytest.mark.parametrize("model", [SMALL, SMALL._replace(experts=8, experts_per_token=3)])
def test_forward_is_the_models_flops(sizes, model):
    """F of all units: ModelShape.flops. I + W: products twice, attention
    2.5 times, where attention is what is left of the FLOPs when no token sees another."""
    cost = CostModel(model, ideal(), num_ranks=3, seq_len=40)
    forward, input_, weight, *_ = (sum(map(sum, part)) * 1e9 for part in cost.price(sizes).seconds)
    alone = sum(CostModel(model, ideal(), num_ranks=1, seq_len=1).price([1]).seconds.forward[0]) * 1e9 * 40
    self_pairs = 4 * 24 * model.heads * model.layers * 40  # each token's attention to itself
    attention = model.flops(0, 40) - alone + self_pairs
    products = model.flops(0, 40) - attention
    assert [forward, input_, weight] == pytest.approx([products + attention, products + 2.5 * attention, products])


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
        assert spans_of(sizes, documents, (5,)).within[0][s] == pairs[1]
        of_state = 2 * size * (2 * 64 * 100 + 6 * 64 * 96 + 900)
        flops = 2 * products * size + 2 * 4 * 96 * sum(pairs) + of_state + 2 * 64 * 50 * size
        assert sum(row[s] for row in found) * 1e9 == pytest.approx(flops, rel=1e-12)
        if documents == (40,):
            assert MIXED.flops(begin, end) == pytest.approx(flops, rel=1e-12)


def test_floors_and_extras():
    slow = ideal(launch=1.0, forward_kernels=3.0, input_kernels=5.0, weight_kernels=2.0, unit_overhead=0.25)
    cost = CostModel(SMALL, replace(slow, split_backward_extra=0.5), num_ranks=3, seq_len=8)
    first = [table[0][0] for table in cost.price([4, 4]).seconds]
    of_two_layers = [2 * 3, 2 * 5 * 1.5, 2 * 2 * 1.5, 2 * 5 + 2 * 2, 2 * 3]  # F, I, W, B, R
    assert first == pytest.approx([seconds + 0.25 for seconds in of_two_layers])


def test_edges_inside_and_between_nodes():
    """Four devices a node: two ranks of two; in a V the turn joins stages of one rank, whose edge nothing crosses."""
    machine = replace(load_hardware("a100"), node_size=4.0)
    cost = CostModel(SMALL, machine, num_ranks=4, seq_len=64, layout=Layout(tensor=2))
    near = (machine.inside_latency, machine.inside_bandwidth * machine.link_efficiency)
    far = (machine.between_latency, machine.between_bandwidth * machine.link_efficiency)
    for placement, edges in (
        ((0, 1, 2, 3), [near, far, near]),
        ((0, 1, 2, 3, 0, 1), [near, far, near, far, near]),
        ((0, 1, 2, 3, 3, 2, 1, 0), [near, far, near, near, near, far, near]),
    ):
        assert list(zip(*cost.links(placement)[:2], strict=True)) == edges
    wide = CostModel(SMALL, machine, num_ranks=3, seq_len=64, layout=Layout(tensor=4, context=2))
    assert list(zip(*wide.links(range(3))[:2], strict=True)) == [far, far]  # a rank fills two nodes


def of_kind(kind):
    return MIXED._replace(kinds=(kind,), pattern=())


DEAR = ideal(attention_forward_efficiency=0.3, attention_backward_efficiency=0.3)


@pytest.mark.parametrize(
    ("shape", "machine", "tokens", "unevenness"),
    [
        (load_model("gpt-7b"), DEAR, 65536, 1.02),
        (MIXED, ideal(), 4096, 1.002),
        (of_kind(WINDOW), ideal(), 4096, 1.002),
        (of_kind(STATE), ideal(), 4096, 1.0001),
    ],
)
def test_segments_take_the_same_time(shape, machine, tokens, unevenness):
    """A recurrence costs each token alike, a window each token behind its begin; full attention the late ones more."""
    cost = CostModel(shape, machine, num_ranks=2, seq_len=tokens)
    sizes = partition_sequence(cost.seq_len, 4, strategy="profiled", profile=cost)
    assert sum(sizes) == tokens and sizes == sorted(sizes, reverse=True)
    assert (sizes[0] > sizes[-1] + 8) == (LayerKind() in (shape.kinds or (LayerKind(),)))
    seconds = cost.price(sizes).seconds
    units = [sum(column) for column in zip(*seconds.forward, *seconds.backward, strict=True)]
    assert max(units) / min(units) < unevenness
    equal = partition_sequence(tokens, 4, strategy="profiled", profile=cost, mix=0.0, multiple_of=128)
    assert equal == [tokens // 4] * 4
    even = partition_sequence(4096, 4, model=MIXED)
    flops = [MIXED.flops(end - n, end) for n, end in zip(even, itertools.accumulate(even), strict=True)]
    assert max(flops) - min(flops) <= 2 * (MIXED.flops(4095, 4096))  # borders lie between tokens


@pytest.mark.parametrize(
    ("shape", "machine", "cuts"),
    [
        (
            load_model("llama3-8b"),
            load_hardware("h100"),
            [(*(rest // 7 + (s < rest % 7) for s in range(7)), 32 - rest) for rest in range(7, 33)],
        ),
        (
            MIXED._replace(layers=7, pattern=(2, 2, 1, 0, 2, 2, 0), vocab=500),
            ideal(),
            [(a, b, 7 - a - b) for a in range(1, 6) for b in range(1, 7 - a)],
        ),
    ],
)
def test_layers_go_to_stages_by_their_cost(shape, machine, cuts):
    """No other cut into stages, of which the last one has the head, has a faster slowest stage."""
    counts = {"num_ranks": len(cuts[0]), "seq_len": 32768 if shape.vocab > 500 else 512}

    def slowest(layers: tuple[int, ...]) -> float:
        seconds = CostModel(shape, machine, layout=Layout(layers=layers), **counts).price([counts["seq_len"]]).seconds
        return max(f[0] + b[0] for f, b in zip(seconds.forward, seconds.backward, strict=True))

    even, found = (
        CostModel(shape, machine, **counts).layers,
        CostModel.balanced(shape, machine, layout=Layout(), **counts),
    )
    assert slowest(found.layers) == pytest.approx(min(map(slowest, cuts)), rel=1e-9)
    assert slowest(found.layers) < slowest(even)


# -- bytes


# Counts that the models' own repositories publish; the final norm and the norms of q and k are not counted here.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_parameters_are_the_published_ones(name, published):
    shape = load_model(name)
    whole = CostModel(shape, ideal(), num_ranks=1, seq_len=8)
    assert whole.parts.stage_parameters == [pytest.approx(published, rel=1e-5)]
    split = CostModel(shape, ideal(), num_ranks=4, seq_len=8)
    twice = shape.hidden * shape.vocab if shape.tied else 0
    assert sum(split.parts.stage_parameters) == pytest.approx(published + twice, rel=1e-5)


def test_adapters_alone_are_trained() -> None:
    """A layer's matrices, one by one: F and I multiply both, W the adapters; frozen ones have 4 bits."""
    matrices = [(H, Q), (H, G), (H, G), (Q, H), (H, F), (H, F), (F, H)]
    adapters = sum(5 * (reads + writes) for reads, writes in matrices)
    order = build_schedule("1f1b", num_ranks=1, num_microbatches=2)
    layouts = (Layout(), Layout(frozen=True), Layout(lora=5), Layout(lora=5, weight_bits=4, data=2))
    costs = [CostModel(SMALL, EXACT, num_ranks=1, seq_len=64, layout=layout) for layout in layouts]
    full, frozen, lora, narrow = (cost.price([64]) for cost in costs)
    widened = 32 / 5 * adapters  # a product of rank 5 takes as long as one of rank 32
    product, of_adapters, head = (2 * 64 * n / 1e9 for n in (6 * sum(a * b for a, b in matrices), 6 * widened, H * 50))
    assert full.seconds.weight[0][0] == pytest.approx(product + head, rel=1e-9)
    assert frozen.seconds.weight[0][0] == 0.0 and np.array_equal(frozen.seconds.input, full.seconds.input)
    assert lora.seconds.weight[0][0] == pytest.approx(of_adapters, rel=1e-9)
    for name in ("forward", "input"):
        before, after = (getattr(price.seconds, name)[0][0] for price in (full, lora))
        assert after - before == pytest.approx(of_adapters, rel=1e-9)
    assert lora.seconds.backward[0][0] == pytest.approx((lora.seconds.input + lora.seconds.weight)[0][0], rel=1e-12)
    count = costs[0].parts.stage_parameters[0]
    static = [price.rank_bytes(order)[0].static for price in (frozen, lora, narrow)]
    assert static == [2 * count, 2 * count + 18 * 6 * adapters, math.ceil(count * 4.5 / 8 + 12 * 6 * adapters)]
    assert lora.held_bytes()[0][0] == full.held_bytes()[0][0] > frozen.held_bytes()[0][0]
    sixteen = CostModel(SMALL, load_hardware("h100"), num_ranks=1, seq_len=64, layout=Layout(lora=5, weight_bits=16))
    plain = CostModel(SMALL, load_hardware("h100"), num_ranks=1, seq_len=64, layout=Layout(lora=5))
    assert np.array_equal(sixteen.price([64]).seconds, plain.price([64]).seconds)
    moments = {name: EXACT.with_optimizer(name).optimizer_bytes for name in ("adamw", "adamw8bit", "sgd", "muon")}
    assert moments == {"adamw": 12, "adamw8bit": 6, "sgd": 8, "muon": 8}


def test_degrees_shard_work_and_bytes():
    """Free links: tensor and context degrees divide time and activations; the optimizer's state is shared by data."""
    order = build_schedule("1f1b", num_ranks=3, num_microbatches=4)

    def found(layout: Layout):
        price = CostModel(SMALL, ideal(), num_ranks=3, seq_len=64, layout=layout).price([64])
        return price.seconds.input[1][0], price.rank_bytes(order)[0]

    seconds, whole = found(Layout())
    for layout, work, static in (
        (Layout(tensor=2), 2, 2),
        (Layout(context=4), 4, 1),
        (Layout(tensor=2, context=2), 4, 2),
    ):
        share, rank = found(layout)
        assert share == pytest.approx(seconds / work)
        assert rank.kv * work == pytest.approx(whole.kv, abs=work)
        assert rank.activations * work == pytest.approx(whole.activations, rel=1e-3)
        norms = 2 * 2 * SMALL.hidden * 18  # of the two layers, in every state: counted as sharded, too
        assert rank.static * static == pytest.approx(whole.static, abs=norms)
    assert found(Layout(data=3))[1].static / whole.static == pytest.approx((2 + 4 + 12 / 3) / (2 + 4 + 12))


@pytest.mark.parametrize("recompute", SAVED)
def test_peak_bytes_by_hand(recompute):
    """1F1B, P 3, M 4: rank r holds 3 - r micro-batches; recomputation leaves a layer's input, and one layer's work. The
    loss leaves the gradient of the last stage's output."""
    order = build_schedule("1f1b", num_ranks=3, num_microbatches=4)
    layers, tokens = 2, 10
    cost = CostModel(SMALL, EXACT, num_ranks=3, seq_len=tokens, layout=Layout(inside=recompute))
    ranks, left = cost.price([tokens]).rank_bytes(order), [0, 0, 2 * H * tokens]
    held = [n * layers * SAVED[recompute] * tokens + more for n, more in zip((3, 2, 1), left, strict=True)]
    assert [rank.activations for rank in ranks] == held
    assert [rank.kv for rank in ranks] == [n * layers * 2 * G * tokens * 2 for n in (3, 2, 1)]
    assert ranks[0].workspace == (0 if recompute == "none" else SAVED["none"] * tokens)
    assert ranks[2].workspace >= 50 * tokens * 10  # logits in bf16, fp32, and their gradient


@pytest.mark.parametrize("recompute", SAVED)
def test_bytes_between_i_and_w_by_hand(recompute):
    """I leaves what W reads: inputs of the products (two norms, attention's output, gate times up), kept from F or
    computed again, and gradients of the products' outputs (q, k, v, gate, up, two hidden states)."""
    layers, tokens, saved = 6, 10, SAVED[recompute]
    kept = {"none": 2 * (2 * H + Q + F), "ffn": 2 * (2 * H + Q), "full": 0}[recompute]
    read_by_w = 2 * (2 * H + Q + F) + 2 * (2 * H + Q + 2 * G + 2 * F)
    cost = CostModel(SMALL, EXACT, num_ranks=1, seq_len=tokens, layout=Layout(inside=recompute))
    left = 2 * H * tokens  # by the loss, until the end of I
    first, second = 2 * saved + read_by_w - kept, read_by_w + saved + read_by_w - kept  # while I0.0 runs, and I1.0
    for order, held in (
        ("F0.0 I0.0 W0.0", layers * (saved + read_by_w - kept) * tokens + left),
        (
            "F0.0 F1.0 I0.0 I1.0 W0.0 W1.0",
            max(layers * first * tokens + 2 * left, layers * second * tokens + left),
        ),
    ):
        (rank,) = cost.price([tokens]).rank_bytes(Schedule.from_text(order))
        assert rank.activations == held
    assert cost.price([tokens]).held_bytes().tolist() == [[layers * (max(saved, read_by_w) + 2 * 2 * G) * tokens]]


def test_bytes_of_cache_state_and_experts_by_hand():
    machine = replace(ideal(), activation_factor=1.0)
    cost = CostModel(MIXED, machine, num_ranks=3, seq_len=40)
    first, _, last = cost.parts.counts.tolist()
    assert (first, last) == ([1, 1, 0], [0, 1, 1])
    of_first, _, of_last = (10 * cost.parts.cache_bytes).T.tolist()
    assert of_first == [2 * 10 * 2 * 48 * 2, 2 * 10 * 2 * 48 * 4]  # bf16, gradients in fp32
    assert of_last == [10 * 2 * 48 * 2, 10 * 2 * 48 * 4]
    held = [cost.parts.held(tokens)[0][2, 0] for tokens in (0, 1, 11)]
    assert held[0] == 4 * 256 + 2 * 48  # the state that a unit of any length hands on
    assert held[1] - held[0] == SAVED["none"] + 2 * (4 * 64 + 130 + 3 * 96)
    assert held[2] - held[0] == 11 * (held[1] - held[0])
    sparse = LayerKind(ffn=32, experts=4, experts_per_token=2, shared=16)
    shape = SMALL._replace(kinds=(LayerKind(), sparse), pattern=(0, 1))
    for degree in (1, 2, 4):
        cost = CostModel(shape, machine, num_ranks=1, seq_len=8, layout=Layout(expert=degree, data=4))
        mixer = 2 * 64 * 96 + 2 * 64 * 48 + 2 * 64
        experts = 64 * 4 + 3 * 64 * 16 + 3 * 64 * 32 * 4 / degree
        assert cost.parts.layer_parameters == [mixer + 3 * 64 * 96, mixer + experts]


@pytest.mark.parametrize("name", ["1f1b", "seq1f1b", "seq-zb-h1"])
def test_simulated_memory_is_the_ranks_bytes(name):
    """With one stage per rank the peak of each kind over the simulated step is the part that rank_bytes counts."""
    k = 1 if name == "1f1b" else 3
    order = build_schedule(name, num_ranks=3, num_microbatches=5, num_segments=k)
    for layout in (Layout(), Layout(head_in_loss=False), Layout(copies_prefix=True, data=2)):
        cost = CostModel.balanced(SMALL, ideal(), num_ranks=3, seq_len=60, layout=layout)
        price = cost.price(partition_sequence(cost.seq_len, k, strategy="profiled", profile=cost))
        memory = order.simulate(price.costs(order), memory=price.step_memory(order.rank_of_stage)).memory
        for rank, parts in enumerate(price.rank_bytes(order)):
            assert max(memory.activations[rank], memory.output_gradients[rank]) <= parts.activations
            assert name == "seq-zb-h1" or memory.activations[rank] <= parts.activations
            assert name != "1f1b" or memory.activations[rank] + memory.inputs[rank] == parts.activations
            assert (memory.inputs[rank] > 0) == (layout.head_in_loss and rank == 2)
            assert (memory.kv[rank], memory.kv_gradients[rank]) == (parts.kv, parts.kv_gradients)
            assert (memory.receive[rank], memory.logits[rank]) == (parts.receive, parts.workspace)
            assert memory.weights[rank] + memory.optimizer[rank] == pytest.approx(parts.static, abs=1)


def test_a_cache_that_gives_pages_back() -> None:
    """On a CPU long sequences hold the rows that live units wrote, not whole slots: an order of one micro-batch."""
    model = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocab=0)
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=4)
    for tokens in (4096, 8192):
        price = CostModel(model, load_hardware("cpu-zen5"), num_ranks=2, seq_len=tokens).price([tokens // 4] * 4)
        row = 2 * 2 * 2 * 64 * 4  # bytes of a token on two layers: K and V, two heads of 64 in fp32
        slots = [rank.kv for rank in price.rank_bytes(order)]
        live = (5, 4)  # segments that hold rows at most: P - 1 + k
        assert slots == ([2 * tokens * row] * 2 if tokens < 8192 else [n * tokens // 4 * row for n in live])
        gradients = price.memory(order.rank_of_stage).kv_gradient_rows
        assert np.array_equal(gradients, 0 if tokens < 8192 else [[tokens // 4 * row] * 4] * 2)
        assert [rank.kv_gradients for rank in price.rank_bytes(order)] == [tokens * row] * 2
    text = (Path(__file__).parents[2] / "csrc/run/kv_cache.c").read_text()
    assert re.findall(r"RELEASE_TOKENS = (\d+)", text) == [f"{load_hardware('cpu-zen5').release_tokens:.0f}"]
    assert load_hardware("h100").release_tokens == 0


# -- shapes and machines


def test_every_preset_has_its_source():
    assert {"gpt-2.7b", "gpt-7b", "gpt-13b", "gpt-30b", "llama3-8b", "llama3-70b"} <= set(presets("models"))
    assert all(load_model(name).layers for name in presets("models"))
    for machine in map(load_hardware, presets("hardware")):
        file = Path(__file__).parents[2] / f"seq1f1b/presets/hardware/{machine.name}.json"
        assert all(entry["source"] for name, entry in json.loads(file.read_text()).items() if name != "like")
        assert all(low <= getattr(machine, term) <= high for term, (low, high) in machine.spread.items())


def test_kinds_are_read_again_from_a_file():
    told = json.loads(json.dumps(MIXED._asdict()))
    assert make_model(told, "shape.json") == MIXED
    told["kinds"] = [{}, {"window": 5}, STATE._asdict()]  # as one writes it by hand
    assert make_model(told, "shape.json") == MIXED


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (SMALL, {"tensor": 0}, "tensor is 0, must be at least 1"),
        (SMALL, {"tensor": 3}, "tensor is 3, must divide 4"),
        (SMALL, {"expert": 2}, "expert is 2, must divide 1"),
        (SMALL, {"inside": "some"}, "inside is 'some', must be one of none, ffn, full"),
        (SMALL, {"layers": (3, 3)}, "must be 3 numbers, one per stage, that sum to the model's 6"),
        (SMALL, {"layers": (3, 3, 1)}, "sum to the model's 6"),
        (SMALL, {"documents": (4, 5)}, "documents hold 9 tokens"),
        (SMALL, {"documents": (9, -1)}, "each must be at least 1"),
        (MIXED, {"context": 2}, "context is 2, must be 1: the model has layers that keep a state"),
        (MIXED, {"expert": 2, "data": 2}, r"expert is 2, must divide 1 \(experts"),
    ],
)
def test_bad_layouts(model, changes, message):
    with pytest.raises(ValueError, match=message):
        CostModel(model, ideal(), num_ranks=3, seq_len=8, layout=Layout(**changes))


QWEN2 = {
    "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50,
    "intermediate_size": 96, "max_window_layers": 0,
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


SHAPE = {"hidden": 8, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 4, "vocab": 3}
RATES = ("memory", "peak", "bandwidth", "node_size", "inside_bandwidth", "between_bandwidth")
MACHINE = {name: {"value": 1.0} for name in RATES}
WIDE = {"use_sliding_window": True, "sliding_window": "wide"}


@pytest.mark.parametrize(
    ("load", "content", "message"),
    [
        (load_model, "{", "not JSON"),
        (load_model, [], "must hold an object"),
        (load_model, {**SHAPE, "size": 1}, r"unknown fields \['size'\]"),
        (load_model, {**SHAPE, "heads": 3}, "model heads is 3, must divide hidden 8"),
        (load_model, {**SHAPE, "experts_per_token": 2}, "model experts_per_token is 2, must be in 1..experts = 1"),
        (load_hardware, {"peak": {"value": 1.0}}, ".*missing fields"),
        (load_hardware, {**MACHINE, "peak": 1.0}, "peak is 1.0, must be {"),
        (load_hardware, {**MACHINE, "peak": {"value": "fast"}}, "peak .*must be finite numbers"),
        (load_hardware, {**MACHINE, "peak": {"value": float("nan")}}, "peak .*must be finite numbers"),
        (load_hardware, {**MACHINE, "peak": {"value": 0}}, "peak .*must be 0 < low"),
        (load_hardware, {**MACHINE, "peak": {"value": 2, "low": 3}}, "peak .*must be 0 < low"),
        (load_model, {**QWEN2, "model_type": "rwkv"}, "model_type is 'rwkv', must be one of llama, .*write the shape"),
        (load_model, {**QWEN2, "vocab_size": None}, "a config of 'qwen2' without vocab_size"),
        (load_model, {**QWEN2, "layer_types": ["full_attention"] * 3 + ["conv"]}, r"layer_types\[3\] is 'conv', must"),
        (load_model, {**QWEN2, "layer_types": ["full_attention"]}, "layer_types is .*a list of 4 entries, one per"),
        (load_model, {**QWEN2, **WIDE}, "sliding_window is 'wide', must be a whole number"),
        (load_model, {**QWEN2, "model_type": "jamba"}, "a config of 'jamba' without attn_layer_period"),
    ],
)
def test_bad_files(load, content, message, tmp_path):
    path = tmp_path / "m.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        load(str(path))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MIXED._replace(kinds=(LayerKind(), LayerKind(kv_heads=3)), pattern=(0, 1)), r"kinds\[1\]: .*kv_heads is 3"),
        (MIXED._replace(pattern=(0, 3)), r"model pattern is \[0, 3\], must be numbers of kinds, 0..2"),
        (SMALL._replace(kinds=(LayerKind(window=-1),)), r"kinds\[0\] window is -1, must be at least 0"),
    ],
)
def test_bad_kinds(shape, message):
    with pytest.raises(ValueError, match=message):
        shape.flops(0, 1)


def test_biases_alone_make_a_kind_that_a_profile_tells_of():
    shape = make_model(shape_of({**QWEN2, "num_key_value_heads": 2}, "config.json"), "config.json")
    assert shape.kinds == (LayerKind(other=4 * 16 + 2 * 2 * 16),)
    check_decoder(shape, 1024)
    with pytest.raises(ValueError, match="the model has layers of kinds for which there is no built-in layer"):
        check_decoder(MIXED, 1024)
    profile = Profile.load("benchmarks/results/lengths-profile.json")
    biased = profile.model._replace(kinds=(LayerKind(other=5),))
    machine = ProfiledHardware.of(profile, load_hardware("cpu-zen5"))
    prices = [
        CostModel(model, machine, num_ranks=1, seq_len=512).price([512]).seconds for model in (profile.model, biased)
    ]
    assert prices[0] == prices[1]
    with pytest.raises(ValueError, match="a profile is of equal layers with full attention"):
        check_profile(profile, profile.model._replace(kinds=(WINDOW,)), Layout())
