"""Do a unit's seconds and bytes agree with the model's FLOPs, its published parameters, and counts by hand?"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from seq1f1b import ModelShape, Schedule, build_schedule
from seq1f1b.plan import Layout
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import Hardware, load_hardware, load_model, presets

SMALL = ModelShape(hidden=64, layers=6, heads=4, kv_heads=2, ffn=96, vocab=50, head_dim=24)


def ideal(**changes: float) -> Hardware:
    """A machine whose only cost is the FLOP: its peak, nothing else."""
    names = [name for name in load_hardware("a100").sources if name.endswith("_efficiency")]
    names_of_zeros = ("launch", "unit_overhead", "split_backward_extra", "inside_latency", "between_latency")
    names_of_zeros += ("attention_forward_rows", "attention_backward_rows", "collective_latency")
    zero = dict.fromkeys(names_of_zeros, 0.0)
    far = dict.fromkeys(("bandwidth", "inside_bandwidth", "between_bandwidth"), 1e30)
    ones = dict.fromkeys(names, 1.0)
    return replace(load_hardware("a100"), **{**ones, **zero, **far, "peak": 1e9, "head_tile": 1.0, **changes})


@pytest.mark.parametrize("sizes", [[40], [7, 20, 13]])
@pytest.mark.parametrize("model", [SMALL, SMALL._replace(experts=8, experts_per_token=3)])
def test_forward_is_the_models_flops(sizes, model):
    """F of all units: ModelShape.flops. I + W: products twice, attention
    2.5 times, where attention is what is left of the FLOPs when no token sees another."""
    cost = CostModel(model, ideal(), num_ranks=3, seq_len=40)
    seconds = cost.price(sizes).seconds
    total = [sum(map(sum, part)) * 1e9 for part in seconds]
    flops = model.flops(0, 40)
    alone = sum(CostModel(model, ideal(), num_ranks=1, seq_len=1).price([1]).seconds.forward[0]) * 1e9 * 40
    self_pairs = 4 * 24 * model.heads * model.layers * 40  # each token's attention to itself
    attention = flops - alone + self_pairs
    assert total[0] == pytest.approx(flops)
    assert total[1] == pytest.approx(flops - attention + 2.5 * attention)
    assert total[2] == pytest.approx(flops - attention)


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
    assert CostModel(shape, ideal(), num_ranks=1, seq_len=8).parts.parameters(0) == pytest.approx(published, rel=1e-5)
    split = CostModel(shape, ideal(), num_ranks=4, seq_len=8)
    twice = shape.hidden * shape.vocab if shape.tied else 0
    assert sum(map(split.parts.parameters, range(4))) == pytest.approx(published + twice, rel=1e-5)


def test_every_preset_has_its_source():
    for name in presets("models"):
        load_model(name)
    assert {"gpt-2.7b", "gpt-7b", "gpt-13b", "gpt-30b", "llama3-8b", "llama3-70b"} <= set(presets("models"))
    for name in presets("hardware"):
        machine = load_hardware(name)
        assert all(machine.sources.values()), name
        for term, (low, high) in machine.spread.items():
            assert low <= getattr(machine, term) <= high


def test_degrees_shard_work_and_bytes():
    """Free links: tensor and context degrees divide time and activations; the optimizer's state is shared by data."""
    one = CostModel(SMALL, ideal(), num_ranks=3, seq_len=64)
    order = build_schedule("1f1b", num_ranks=3, num_microbatches=4)
    whole = one.price([64]).rank_bytes(order)[0]
    for layout, work, static in (
        (Layout(tensor=2), 2, 2),
        (Layout(context=4), 4, 1),
        (Layout(tensor=2, context=2), 4, 2),
    ):
        cost = CostModel(SMALL, ideal(), num_ranks=3, seq_len=64, layout=layout)
        assert cost.price([64]).seconds.input[1][0] == pytest.approx(one.price([64]).seconds.input[1][0] / work)
        ranks = cost.price([64]).rank_bytes(order)
        assert ranks[0].kv * work == pytest.approx(whole.kv, abs=work)
        assert ranks[0].activations * work == pytest.approx(whole.activations, rel=1e-3)
        norms = 2 * 2 * SMALL.hidden * 18  # of the two layers, in every state: counted as sharded, too
        assert ranks[0].static * static == pytest.approx(whole.static, abs=norms)
    shared = CostModel(SMALL, ideal(), num_ranks=3, seq_len=64, layout=Layout(data=3)).price([64]).rank_bytes(order)[0]
    assert shared.static / whole.static == pytest.approx((2 + 4 + 12 / 3) / (2 + 4 + 12))


def test_peak_bytes_by_hand():
    """1F1B, P 3, M 4: rank r holds 3 - r micro-batches; recomputation leaves a layer's input, and one layer's work. The
    loss leaves the gradient of the last stage's output."""
    machine = replace(ideal(), activation_factor=1.0, allocator_reserve=0.0, context_bytes=0.0)
    order = build_schedule("1f1b", num_ranks=3, num_microbatches=4)
    h, q, f, layers, tokens = 64, 96, 96, 2, 10
    saved = {"none": 2 * (4 * h + 2 * q + 3 * f) + 4 * 4, "ffn": 2 * (4 * h + 2 * q) + 4 * 4, "full": 2 * h}
    for recompute, per_token in saved.items():
        layout = Layout(inside=recompute)
        ranks = CostModel(SMALL, machine, num_ranks=3, seq_len=tokens, layout=layout).price([tokens]).rank_bytes(order)
        left = [0, 0, 2 * h * tokens]
        held = [n * layers * per_token * tokens + more for n, more in zip((3, 2, 1), left, strict=True)]
        assert [rank.activations for rank in ranks] == held
        assert [rank.kv for rank in ranks] == [n * layers * 2 * 48 * tokens * 2 for n in (3, 2, 1)]
        assert ranks[0].workspace == (0 if recompute == "none" else saved["none"] * tokens)
        assert ranks[2].workspace >= 50 * tokens * 10  # logits in bf16, fp32, and their gradient


@pytest.mark.parametrize("recompute", ["none", "ffn", "full"])
def test_bytes_between_i_and_w_by_hand(recompute):
    """I leaves what W reads: inputs of the products (two norms, attention's output, gate times up), kept from F or
    computed again, and gradients of the products' outputs (q, k, v, gate, up, two hidden states)."""
    machine = replace(ideal(), activation_factor=1.0, allocator_reserve=0.0, context_bytes=0.0)
    h, q, g, f, layers, tokens = 64, 96, 48, 96, 6, 10
    saved = {"none": 2 * (4 * h + 2 * q + 3 * f) + 4 * 4, "ffn": 2 * (4 * h + 2 * q) + 4 * 4, "full": 2 * h}[recompute]
    kept = {"none": 2 * (2 * h + q + f), "ffn": 2 * (2 * h + q), "full": 0}[recompute]
    read_by_w = 2 * (2 * h + q + f) + 2 * (2 * h + q + 2 * g + 2 * f)
    cost = CostModel(SMALL, machine, num_ranks=1, seq_len=tokens, layout=Layout(inside=recompute))
    left = 2 * h * tokens  # by the loss, until the end of I
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
    held = cost.price([tokens]).held_bytes()
    assert held == [[layers * (max(saved, read_by_w) + 2 * 2 * g) * tokens]]


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
        assert list(zip(*cost.links(placement), strict=True)) == edges
    wide = CostModel(SMALL, machine, num_ranks=3, seq_len=64, layout=Layout(tensor=4, context=2))
    assert list(zip(*wide.links(range(3)), strict=True)) == [far, far]  # a rank fills two nodes


def test_floors_and_extras():
    slow = ideal(launch=1.0, forward_kernels=3.0, input_kernels=5.0, weight_kernels=2.0, unit_overhead=0.25)
    cost = CostModel(SMALL, replace(slow, split_backward_extra=0.5), num_ranks=3, seq_len=8)
    seconds = cost.price([4, 4]).seconds
    assert seconds.forward[0][0] == pytest.approx(2 * 3 + 0.25)
    assert seconds.backward[0][0] == pytest.approx(2 * 5 + 2 * 2 + 0.25)
    assert seconds.input[0][0] == pytest.approx(2 * 5 * 1.5 + 0.25)
    assert seconds.weight[0][0] == pytest.approx(2 * 2 * 1.5 + 0.25)


def test_split_balances_time():
    machine = ideal(attention_forward_efficiency=0.3, attention_backward_efficiency=0.3)
    cost = CostModel(load_model("gpt-7b"), machine, num_ranks=4, seq_len=65536)
    sizes = cost.split(4, multiple_of=128)
    assert sum(sizes) == 65536 and sizes == sorted(sizes, reverse=True)
    seconds = cost.price(sizes).seconds
    passes = (seconds.forward, seconds.backward)
    total = [sum(sum(part[stage][s] for stage in range(4)) for part in passes) for s in range(4)]
    assert max(total) / min(total) < 1.02
    assert cost.split(4, mix=0.0, multiple_of=128) == [16384] * 4


def test_the_head_takes_layers_from_its_stage():
    """Found among all numbers of layers for the last stage."""
    shape = load_model("llama3-8b")
    machine = load_hardware("h100")

    def slowest(layers):
        cost = CostModel(shape, machine, num_ranks=8, seq_len=32768, layout=Layout(layers=layers))
        seconds = cost.price([32768]).seconds
        return max(seconds.forward[s][0] + seconds.backward[s][0] for s in range(8))

    found = CostModel(shape, machine, num_ranks=8, seq_len=32768).balanced_layers()
    choices = [(*(rest // 7 + (s < rest % 7) for s in range(7)), 32 - rest) for rest in range(7, 33)]
    assert sum(found) == 32 and found[-1] < 4
    assert slowest(found) == pytest.approx(min(map(slowest, choices)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 0}, "tensor is 0, must be at least 1"),
        ({"tensor": 3}, "tensor is 3, must divide 4"),
        ({"expert": 2}, "expert is 2, must divide 1"),
        ({"inside": "some"}, "inside is 'some', must be one of none, ffn, full"),
        ({"layers": (3, 3)}, "must be 3 numbers, one per stage, that sum to the model's 6"),
        ({"layers": (3, 3, 1)}, "sum to the model's 6"),
        ({"documents": (4, 5)}, "documents hold 9 tokens"),
        ({"documents": (9, -1)}, "each must be at least 1"),
    ],
)
def test_bad_layouts(changes, message):
    with pytest.raises(ValueError, match=message):
        CostModel(SMALL, ideal(), num_ranks=3, seq_len=8, layout=Layout(**changes))


def test_bad_files(tmp_path):
    path = tmp_path / "m.json"
    shape = {"hidden": 8, "layers": 1, "heads": 2, "kv_heads": 1, "ffn": 4, "vocab": 3}
    machine = {name: {"value": 1.0} for name in ("memory", "peak", "bandwidth", "node_size")}
    machine |= {name: {"value": 1.0} for name in ("inside_bandwidth", "between_bandwidth")}
    for load, content, message in (
        (load_model, "{", "not JSON"),
        (load_model, [], "must hold an object"),
        (load_model, {**shape, "size": 1}, r"unknown fields \['size'\]"),
        (load_model, {**shape, "heads": 3}, "heads is 3, must divide hidden 8"),
        (load_model, {**shape, "experts_per_token": 2}, "experts_per_token is 2, must be in 1..experts = 1"),
        (load_hardware, {"peak": {"value": 1.0}}, "missing fields"),
        (load_hardware, {**machine, "peak": 1.0}, "must be {"),
        (load_hardware, {**machine, "peak": {"value": "fast"}}, "must be finite numbers"),
        (load_hardware, {**machine, "peak": {"value": float("nan")}}, "must be finite numbers"),
        (load_hardware, {**machine, "peak": {"value": 0}}, "must be 0 < low"),
        (load_hardware, {**machine, "peak": {"value": 2, "low": 3}}, "must be 0 < low"),
    ):
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ValueError, match=message):
            load(str(path))
    with pytest.raises(ValueError, match="there is no preset 'b100' among hardware; did you mean 'h100'"):
        load_hardware("b100")
    with pytest.raises(OSError):
        load_model(str(tmp_path / "none.json"))


@pytest.mark.parametrize("name", ["1f1b", "seq1f1b", "seq-zb-h1"])
def test_simulated_memory_is_the_ranks_bytes(name):
    """With one stage per rank the peak of each kind over the simulated step is the part that rank_bytes counts."""
    k = 1 if name == "1f1b" else 3
    order = build_schedule(name, num_ranks=3, num_microbatches=5, num_segments=k)
    for layout in (Layout(), Layout(head_in_loss=False), Layout(copies_prefix=True, data=2)):
        cost = CostModel.balanced(SMALL, ideal(), num_ranks=3, seq_len=60, layout=layout)
        sizes = cost.split(k)
        given = cost.price(sizes).step_memory(order.rank_of_stage)
        memory = order.simulate(cost.price(sizes).costs(order), memory=given).memory
        for rank, parts in enumerate(cost.price(sizes).rank_bytes(order)):
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
    for tokens in (4096, 8192):
        cost = CostModel(model, load_hardware("cpu-zen5"), num_ranks=2, seq_len=tokens)
        order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=4)
        sizes = [tokens // 4] * 4
        row = 2 * 2 * 2 * 64 * 4  # bytes of a token on two layers: K and V, two heads of 64 in fp32
        slots = [rank.kv for rank in cost.price(sizes).rank_bytes(order)]
        live = (5, 4)  # segments that hold rows at most: P - 1 + k
        assert slots == ([2 * tokens * row] * 2 if tokens < 8192 else [n * tokens // 4 * row for n in live])
        gradients = cost.price(sizes).memory(order.rank_of_stage).kv_gradient_rows
        assert gradients == (0 if tokens < 8192 else [[tokens // 4 * row] * 4] * 2)
        assert [rank.kv_gradients for rank in cost.price(sizes).rank_bytes(order)] == [tokens * row] * 2
    text = (Path(__file__).parents[2] / "csrc/run/kv_cache.c").read_text()
    assert re.findall(r"RELEASE_TOKENS = (\d+)", text) == [f"{load_hardware('cpu-zen5').release_tokens:.0f}"]
    assert load_hardware("h100").release_tokens == 0
