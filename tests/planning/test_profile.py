"""Does a profile tell what was measured, and do split and plan follow it?"""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_model import Config, Stage

from seq1f1b import ModelShape, Unit, build_schedule, partition_sequence
from seq1f1b.__main__ import main
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning import decoder
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import ProfiledHardware, load_hardware
from seq1f1b.planning.profile import Part, Profile
from seq1f1b.planning.profiler import StageTimes, _Cut, make_profile, measure_stage
from seq1f1b.seconds import Fit, fit_seconds

FLAT = (1e-6, 0.0, 0.0), (2e-6, 0.0, 0.0)  # F and B of any number of tokens
SHAPE = ModelShape(hidden=32, layers=4, heads=4, kv_heads=4, ffn=32, vocab=29)
MACHINE = load_hardware("cpu-zen5")


def part(forward, backward, weight=(1e-6, 0.0, 0.0), **changes):
    """One whose costs are given, in seconds: (floor, per token, per pair). I is a tenth dearer than B less W, R a tenth
    cheaper than F."""
    values = {
        "layers": 2,
        "forward": Fit(*forward, 0.03),
        "backward": Fit(*backward, 0.04),
        "input": Fit(*(1.1 * (b - w) for b, w in zip(backward, weight, strict=True)), 0.05),
        "weight": Fit(*weight, 0.06),
        "recompute": Fit(*(0.9 * f for f in forward), 0.07),
        "noise": 0.0,
        "saved_bytes": 100.0,
        "saved_token_bytes": 7.5,
        "kept_token_bytes": 2.5,
        "gradient_token_bytes": 1.5,
        "moved_token_bytes": 6.5,
        "kv_bytes": 256.0,
        "kv_gradient_bytes": 512.0,
        "message_bytes": 128.0,
    }
    return Part(**{**values, **changes})


def profile(**changes):
    """Attention dear, as on a machine whose matrix products are fast."""
    values = {
        "machine": "a machine",
        "torch": "2.13.0",
        "threads": 1,
        "processes": 2,
        "dtype": "float32",
        "seconds": 3.5,
        "seq_len": 512,
        "model": SHAPE,
        "unit_overhead": 1e-6,
        "step_overhead": 1e-4,
        "layer": part((1e-4, 1e-6, 2e-8), (3e-4, 2e-6, 5e-8), (1e-4, 9e-7, 0.0)),
        "embedding": part((1e-5, 1e-7, 0.0), (2e-5, 1e-7, 0.0)),
        "head": part((2e-5, 3e-6, 0.0), (5e-5, 6e-6, 0.0), (2e-5, 3e-6, 0.0)),
    }
    return Profile(**{**values, **changes})


def visible_pairs(begin, end):
    """Counted one by one."""
    return float(sum(range(begin + 1, end + 1)))


def test_a_profile_of_another_device_is_refused() -> None:
    of_gpu = replace(profile(), device="cuda", machine="NVIDIA H100")
    assert Profile.from_json(of_gpu.to_json()).device == "cuda"
    with pytest.raises(ValueError, match=r"of NVIDIA H100, measured on 'cuda', and cpu-zen5 is a machine of 'cpu'"):
        ProfiledHardware.of(of_gpu, MACHINE)
    assert ProfiledHardware.of(of_gpu, load_hardware("h100")).profile is of_gpu
    before = json.loads(profile().to_json())
    del before["device"]  # an older file
    assert Profile.from_json(json.dumps(before)).device == "cpu"


# -- the fit


@pytest.mark.parametrize("truth", [(2e-4, 3e-6, 4e-9), (0.0, 1e-6, 1e-9), (5e-5, 0.0, 2e-9), (1e-4, 2e-6, 0.0)])
def test_the_fit_recovers_known_costs(truth):
    units = [(512 * s // k, 512 // k) for k in (1, 2, 4, 8) for s in range(k)]
    rows = [(n, visible_pairs(b, b + n)) for b, n in units]
    exact = [(n, p, truth[0] + truth[1] * n + truth[2] * p) for n, p in rows]
    assert fit_seconds(exact) == pytest.approx((*truth, 0.0), rel=1e-6, abs=1e-9)
    draw = random.Random(0)
    found = fit_seconds([(n, p, s * draw.uniform(0.95, 1.05)) for n, p, s in exact])
    assert 0.01 < found.residual < 0.05  # uniform: 0.05 / sqrt(3)
    assert all(found.seconds(n, p) == pytest.approx(s, rel=0.05) for n, p, s in exact)


def test_no_term_is_negative_and_none_is_better():
    """Against a search over a fine grid of the terms, where least squares wants a negative rate."""
    rows = [(16.0, 136.0, 1.0), (32.0, 528.0, 1.5), (64.0, 2080.0, 5.0)]
    found = fit_seconds(rows)
    assert min(found[:3]) >= 0

    def error(floor, per_token, per_pair):
        return math.sqrt(sum(((floor + per_token * n + per_pair * p) / s - 1) ** 2 for n, p, s in rows) / 3)

    grid = [(a / 20, b / 400, c / 20000) for a in range(31) for b in range(31) for c in range(61)]
    assert error(*found[:3]) <= min(error(*point) for point in grid) + 1e-9


def test_moved_units_take_longer_by_byte():
    """By hand: the second of two segments moves 100 bytes; its F and B take 2 s and 4 s where they stay."""

    def unit(kind, begin, end, segment=1, stage=1):
        return Unit(kind, stage, 0, segment), begin, end

    timeline = [unit("F", 0, 9, segment=0), unit("F", 0, 50, stage=0), unit("F", 9, 12), unit("O", 12, 13)]
    timeline += [unit("A", 13, 14), unit("L", 14, 16), unit("B", 16, 21), unit("B", 21, 30, segment=0)]
    report = SimpleNamespace(timeline=timeline, moved_bytes=100, move_out_rate=7.0, move_in_rate=8.0)
    stays = {"F": [1.0, 2.0, 3.0], "B": [4.0]}
    found = StageTimes(1, {(16, 16): stays}, [], [], [], [], [], [])
    assert _Cut([16, 16], 1, [(30.0, report)], None, 0).add_moves(found) == 100 / 16
    assert (found.moving, found.tier) == ([((3 + 1 + 1 - 2) / 100, (2 + 5 - 4) / 100)], [(7.0, 8.0)])


def test_gradients_that_take_the_place_of_what_is_freed_are_no_more_bytes():
    """By hand: bytes live before I of ten tokens, at most in it, and after it, of one layer and of two."""
    wide = {"saved_bytes": 0.0, "saved_token_bytes": 10.0, "kept_token_bytes": 4.0}
    # A layer frees 6 of what it saved and leaves 5; or it leaves 8, 2 more than it frees.
    for gradients, more in ((5.0, 0.0), (8.0, 2.0)):
        found = part(*FLAT, **wide, gradient_token_bytes=gradients)
        machine = ProfiledHardware.of(profile(layer=found, embedding=None, head=None), MACHINE)
        counts = {"num_ranks": 2, "seq_len": 20, "layout": Layout(layers=(1, 2))}
        memory = CostModel(SHAPE._replace(layers=3), machine, **counts).price((10, 10)).memory((0, 1))
        for stage, layers in ((0, 1), (1, 2)):
            saved, kept, left = (
                getattr(memory, name)[stage][0] for name in ("activations", "kept_activations", "output_gradients")
            )
            assert saved == layers * 100
            assert kept + left == layers * (4 + gradients) * 10
            assert left == (gradients + (layers - 1) * more) * 10
    assert part(*FLAT).unit_bytes(10, 0) == (0.0, 0.0, 0.0)


def test_a_real_stage_is_measured_and_its_tier(tmp_path):
    """What moves is all that a unit saves, less the parts that are small or that somebody holds."""
    stage = Stage(Config(), 1, 3).requires_grad_(True)
    arguments = {"seq_len": 256, "segments": (1, 2, 4), "repeats": 3, "layers": 2, "offload": tmp_path}
    measured = measure_stage(stage, lambda tokens: torch.randn(2, tokens, 32), **arguments)
    made = make_profile(SHAPE, [measured, measured], seq_len=256, threads=1, dtype="float32", seconds=1.0)
    found = made.layer
    token = 2 * 4 * 32  # bytes of a token's row in fp32, of two sequences
    assert found.message_bytes == token
    assert found.kv_bytes == found.kv_gradient_bytes == 2 * token  # of one layer
    # Kept at least: both norms' inputs, q and what attention gave, the inputs of four products and of the activation.
    assert found.saved_token_bytes >= 5 * token and all(p.grad is None for p in stage.parameters())
    # W reads inputs and output gradients of the linear layers: at least four outputs as wide as the hidden states.
    assert 0 < found.kept_token_bytes <= found.saved_token_bytes and found.gradient_token_bytes >= 4 * token
    for name in ("forward", "backward", "input", "weight", "recompute"):
        assert getattr(found, name).seconds(256, visible_pairs(0, 256)) > 0
    assert found.weight.per_pair == 0.0
    assert sorted(measured.units) == [(0, 64), (0, 128), (0, 256), (64, 64), (128, 64), (128, 128), (192, 64)]
    for times in measured.units.values():  # of R: the sum of R and its F
        assert {kind: len(seconds) for kind, seconds in times.items()} == {"F": 4, "B": 2, "I": 2, "W": 2, "R": 2}
    assert 0.5 * found.saved_token_bytes < found.moved_token_bytes <= found.saved_token_bytes
    assert len(measured.tier) == len(measured.moving) == 2
    for rate, rates in zip((made.tier_out, made.tier_in), zip(*measured.tier, strict=True), strict=True):
        assert 0 < min(rates) <= rate <= max(rates)
    assert made.move_out >= 0 and made.move_in >= 0 and "GB/s and gives back" in made.to_text()
    assert Profile.from_json(made.to_json()) == made and not any(tmp_path.iterdir())


def test_moving_takes_the_time_that_was_measured():
    tier = {"tier_out": 1e12, "tier_in": 1e12, "move_out": 1e-9, "move_in": 2e-9}
    machine = ProfiledHardware.of(
        profile(layer=part((1e-4, 1e-6, 2e-8), (3e-4, 2e-6, 5e-8), noise=0.01), **tier), MACHINE
    )
    cost = CostModel(SHAPE, machine, num_ranks=1, seq_len=2048)
    order = build_schedule("seq1f1b", num_ranks=1, num_microbatches=1, num_segments=4).offload()
    sizes = [512] * 4
    stayed, moved = (order.simulate(cost.price(sizes).costs(order, moves=moves)).makespan for moves in (False, True))
    units = sum(unit.kind == "L" for unit in order.ranks[0])
    saved = cost.price([512]).memory(order.rank_of_stage).activations[0][0]
    assert units == 2 and moved - stayed == pytest.approx(units * saved * 3e-9, rel=1e-3)
    low, high = machine.spread["move_in"]
    assert low < 2e-9 < high and high - 2e-9 == pytest.approx(
        2 * math.sqrt(2) * 0.01 * (3e-4 + 2e-6 * 512 + 5e-8 * visible_pairs(0, 512)) / (6.5 * 512)
    )
    assert low == 0.0
    with pytest.raises(ValueError, match="has no tier to which units could move"):
        CostModel(SHAPE, replace(machine, tier_bandwidth=0.0), num_ranks=1, seq_len=2048).price(sizes).moving_seconds()


def test_what_never_moves_has_no_rates_and_what_cannot_be_measured_is_refused(tmp_path):
    """An embedding saves its tokens only, and those are the stage's input."""
    arguments = {"seq_len": 64, "segments": (1, 2, 4), "repeats": 1, "offload": tmp_path}
    measured = measure_stage(torch.nn.Embedding(9, 8), lambda tokens: torch.randint(9, (1, tokens)), **arguments)
    assert (measured.moved, measured.tier) == (0.0, [])
    for changes, message in (
        ({"offload": "/proc"}, "no file can be made there"),
        ({"seq_len": 0}, "seq_len is 0, must be at least 1"),
        ({"repeats": 0}, "repeats is 0"),
        ({"layers": 0}, "layers is 0"),
        ({"seq_len": 31}, "must leave each segment at least 16 tokens"),
        ({"loss_fn": lambda output, target: output.sum()}, "given together"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            measure_stage(torch.nn.Linear(4, 4), lambda tokens: torch.zeros(1, tokens, 4), **{**arguments, **changes})


# -- the file


def test_bad_files(tmp_path):
    """Beside what test_files.py has of all files: what a profile alone must say."""
    good = json.loads(profile().to_json())
    tier = {"tier_out": 1e9, "tier_in": 1e9, "move_out": 1e-10, "move_in": 1e-10}
    unused, nothing = {**good["layer"], "layers": 0}, {**good["layer"], "forward": dict.fromkeys(Fit._fields, 0.0)}
    path = tmp_path / "p.json"
    for changes, message in (
        ({"format": "seq1f1b profile 3"}, "has the format 'seq1f1b profile 3'.*: measure again"),
        ({"seconds": -1}, "seconds is -1, must be a finite number of at least 0"),
        ({"tier_out": 1e9}, "tier_in, move_out, move_in is missing: tier_out, .* come together"),
        ({**tier, "tier_in": 0}, "tier_in is 0: measure again"),
        ({"layer": unused}, "layer: layers is 0, must be at least 1"),
        ({"layer": nothing}, "layer: forward costs nothing: measure again"),
    ):
        path.write_text(json.dumps({**good, **changes}))
        with pytest.raises(ValueError, match=message) as error:
            Profile.load(path)
        assert str(error.value).startswith(str(path))
    with pytest.raises(ValueError):
        profile(seconds=math.nan).save(tmp_path / "nan.json")
    assert not (tmp_path / "nan.json").exists()


# -- what follows it


def measured_cost(sizes, shape=SHAPE):
    """Seconds of F and B of each segment over the whole model, by the profile's own terms."""
    end, costs = 0, []
    for size in sizes:
        end += size
        pairs = visible_pairs(end - size, end)
        costs.append(shape.layers * (4e-4 + 3e-6 * size + 7e-8 * pairs) + (3e-5 + 2e-7 * size) + (7e-5 + 9e-6 * size))
    return costs


def test_a_profiled_split_balances_the_measured_cost():
    for length, k in ((512, 4), (4096, 8), (1000, 3)):
        even = measured_cost(partition_sequence(length, k, strategy="even"))
        ours = measured_cost(sizes := partition_sequence(length, k, strategy="profiled", profile=profile()))
        assert sum(sizes) == length and sizes == sorted(sizes, reverse=True)
        assert max(ours) < max(even)
        assert max(ours) / min(ours) < 1.03
    assert partition_sequence(64, 2, strategy="profiled", profile=profile(), mix=0.0) == [32, 32]
    floors = profile(**dict.fromkeys(("layer", "embedding", "head"), part((1e-5, 0.0, 0.0), (2e-5, 0.0, 0.0))))
    assert partition_sequence(64, 2, strategy="profiled", profile=floors) == [32, 32]
    cost = CostModel(SHAPE, ProfiledHardware.of(floors, MACHINE), num_ranks=2, seq_len=64)
    assert partition_sequence(64, 2, strategy="profiled", profile=cost) == [32, 32]
    for arguments in ({"strategy": "even"}, {"strategy": "flops"}, {"strategy": "profiled", "costs": [1.0, 2.0]}):
        with pytest.raises(ValueError, match="profile= is for strategy 'profiled', in place of costs="):
            partition_sequence(64, 2, profile=profile(), **arguments)
    with pytest.raises(ValueError, match="needs costs= or profile="):
        partition_sequence(64, 2, strategy="profiled")
    with pytest.raises(ValueError, match="seq_len is 0"):
        partition_sequence(0, 1, strategy="profiled", profile=profile())


@pytest.mark.parametrize("head_in_loss", [True, False])
def test_units_cost_what_was_measured(head_in_loss):
    sizes, layout = [200, 100], Layout(layers=(2, 2), head_in_loss=head_in_loss)
    machine = ProfiledHardware.of(profile(), MACHINE)
    price = CostModel(SHAPE, machine, num_ranks=2, seq_len=300, layout=layout).price(sizes)
    seconds, step = price.seconds, price.step_memory((0, 1))
    pairs = visible_pairs(200, 300)
    head = (2e-5 + 3e-6 * 100, 5e-5 + 6e-6 * 100)
    ahead, behind = (sum(head), 0.0) if head_in_loss else head
    layer = (1e-4 + 1e-6 * 100 + 2e-8 * pairs, 3e-4 + 2e-6 * 100 + 5e-8 * pairs)
    assert seconds.forward[1][1] == pytest.approx(2 * layer[0] + ahead + 1e-6)
    assert seconds.backward[1][1] == pytest.approx(2 * layer[1] + behind + 1e-6)
    share = 0.0 if head_in_loss else 2e-5 + 3e-6 * 100
    weight = 2 * (1e-4 + 9e-7 * 100) + share
    assert seconds.weight[1][1] == pytest.approx(weight + 1e-6)
    assert seconds.input[1][1] == pytest.approx(1.1 * (2 * layer[1] + behind - weight) + 1e-6)
    assert seconds.forward[0][1] == pytest.approx(2 * layer[0] + 1e-5 + 1e-7 * 100 + 1e-6)
    assert price.message_bytes.tolist() == [200 * 128, 100 * 128]
    saved = [2 * (100 + 7.5 * size) for size in sizes]
    assert step.activations[0].tolist() == [
        math.ceil(s + 100 + 7.5 * size) for s, size in zip(saved, sizes, strict=True)
    ]
    beside = [1.5 * size for size in sizes]  # of each part: the gradients of one layer
    kept = [(2 + 1) * (2.5 + 1.5) * size - 2 * more for size, more in zip(sizes, beside, strict=True)]
    assert step.kept_activations[0].tolist() == kept
    ends = 1 if head_in_loss else 2
    assert step.output_gradients[1].tolist() == [ends * more for more in beside]
    order = build_schedule("seq1f1b", num_ranks=2, num_microbatches=1, num_segments=2)
    rank = price.rank_bytes(order)[1]
    assert (rank.kv, rank.kv_gradients) == (2 * 256 * 300, 2 * 512 * 300)
    logits = 29 * (4 + 4 + 4 * head_in_loss) * 200  # beside what the head saves, if the loss is apart
    layer, embedding = 1.5 * 200, 4 * 32 * 29  # gradients of a layer's outputs; of the whole embedding
    assert [rank.workspace for rank in price.rank_bytes(order)] == [max(layer, embedding), max(layer, logits)]


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (SHAPE._replace(hidden=64, ffn=8), {}, "the profile is of hidden 32, ffn 32, the model has hidden 64, ffn 8"),
        (SHAPE, {"tensor": 2}, "tensor is 2, the profile is of layers with tensor 1: plan without a profile"),
        (SHAPE, {"inside": "full"}, "inside is 'full'"),
        (SHAPE, {"lora": 4}, "lora is 4, the profile is of layers with lora 0: measure with seq1f1b profile --lora 4"),
        (SHAPE, {"frozen": True}, "frozen is True, the profile is of layers with frozen False: plan without a profile"),
    ],
)
def test_what_a_profile_does_not_tell(model, layout, message):
    with pytest.raises(ValueError, match=message):
        CostModel(model, ProfiledHardware.of(profile(), MACHINE), num_ranks=2, seq_len=64, layout=Layout(**layout))


# -- the commands


def test_profile_then_plan_on_the_command_line(tmp_path, capfd):
    model, file, order = tmp_path / "m.json", tmp_path / "p.json", tmp_path / "plan.json"
    model.write_text(json.dumps(SHAPE._asdict()))
    measure = f"profile --model {model} --seq 128 --repeats 1 --dtype bf16 --processes 2 --offload {tmp_path}".split()
    assert main([*measure, "--output", str(file)]) == 0
    text, told = capfd.readouterr()
    assert re.fullmatch(r"(\[rank 0\] measured \d+ of 12 cuts\n){12}", told)
    assert "bfloat16 autocast, 1 threads in 2 processes" in text
    assert re.search(r"\nhead +backward ", text) and re.search(r"\nlayer +recompute ", text)
    assert re.search(r"a token of a layer moves \d+ bytes; a process's tier takes \S+ GB/s and gives back", text)
    found = Profile.load(file)
    assert found.model == SHAPE and found.layer.layers == 2 and found.seconds > 0
    asked = f"plan --model {model} --profile {file} --seq 128 --ranks 2 --microbatches 4".split()
    few = f"--schedules 1f1b,seq-zb-h1 --stages 1 --output {order}".split()
    assert main([*asked, *few]) == 0
    assert "(profile), measured units\ncap" in capfd.readouterr().out
    assert Plan.load(order).hardware.endswith("(profile)")

    assert main([*measure[:7], "--lora", "4", "--output", str(file)]) == 0
    assert Profile.load(file).lora == 4 and Profile.load(file).layer.gradient_token_bytes > 0
    trained = {name for name, p in decoder._Block(SHAPE, 0, 4).named_parameters() if p.requires_grad}
    matrices = ("qkv", "out", "gate_up", "down")
    assert trained == {f"{name}.{part}.weight" for name in matrices for part in ("down", "up")}
    assert main([*asked, "--lora", "4", "--schedules", "1f1b"]) == 0
    assert main([*asked, "--schedules", "1f1b"]) == 2 and "profile --lora 0" in capfd.readouterr().err
