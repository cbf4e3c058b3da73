"""Is the planned best the best, does it fit, and does the engine run what the file says?"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny_model import Config, batch, cross_entropy, run_whole, stage_of, whole_model

from seq1f1b import LoopbackGroup, Memory, ModelShape, PipelineEngine
from seq1f1b.__main__ import main
from seq1f1b.plan import Layout, Plan
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware, load_model
from seq1f1b.planning.search import search_plans
from seq1f1b.schedule import families
from seq1f1b.table import rounded
from seq1f1b.testing import run_ranks

SHAPE = ModelShape(hidden=256, layers=8, heads=8, kv_heads=8, ffn=704, vocab=1000)
COUNTS = {"seq_len": 8192, "num_ranks": 2, "num_microbatches": 4}
MACHINE = replace(load_hardware("a100"), launch=2e-6)  # segments of a small model pay
SEGMENTED = ["seq1f1b", "seq1f1b-interleaved", "seq-zb-h1", "seq-v-half", "slimpipe"]
SOME = {
    "names": ["gpipe", "1f1b", "interleaved-1f1b", *SEGMENTED, "dualpipev"],
    "segments": [1, 4],
    "stages_per_rank": [1, 2],
    "inside": ["none", "full"],
}


FOUR = {"num_ranks": 4, "num_microbatches": 8}
ONE = {"segments": [4], "stages_per_rank": [1], "inside": ["none"]}


def find(machine=MACHINE, **asked):
    return search_plans(SHAPE, machine, **{**COUNTS, **asked})


def best(machine=MACHINE, **asked):
    return find(machine, **asked, best=1).plans[0]


def price(plan, machine=MACHINE, step=None):
    """Seconds of a plan's step among others, or of one of its lengths, and bytes of ranks, by the public simulator."""
    step, order = step or plan, plan.build()
    counts = {"num_ranks": plan.num_ranks, "stages_per_rank": plan.stages_per_rank, "seq_len": step.seq_len}
    units = CostModel(SHAPE, machine, **counts, layout=plan.layout).price(step.segment_sizes)
    steps = {"steps": 2 if plan.optimizer_sync else 4, "optimizer_sync": plan.optimizer_sync}
    run = order.simulate(units.costs(order, moves="L" in "".join(plan.units)), **steps)
    return run.period, [rank.total for rank in units.rank_bytes(order)]


def check_price(plan, machine=MACHINE):
    """The plan takes the seconds and bytes that the public simulator says, and its file builds the same order."""
    seconds, peak = price(plan, machine)
    assert plan.seconds == pytest.approx(seconds) and list(plan.peak) == peak
    again = Plan.from_json(plan.to_json())
    assert again == plan and again.build() == plan.build()


def test_the_best_is_the_best_of_all():
    """With nothing left out, the order of the plans is that of the public simulator; with a few asked for, what was
    not simulated could not have been among them. Progress is told of candidates, splits and vocabulary."""
    calls = []
    given = {"best": 10_000, "within": 1e9, "progress": lambda done, total: calls.append((done, total))}
    everything = find(**SOME, **given).plans
    ends = [i + 1 for i, (done, total) in enumerate(calls) if done + 1 == total]
    assert len(ends) == 3 and ends[-1] == len(calls)
    for begin, end in zip((0, *ends), ends, strict=False):
        assert calls[begin:end] == [(done, end - begin) for done in range(end - begin)]
    for plan in everything:
        check_price(plan)
    cap = sorted(max(plan.peak) for plan in everything)[len(everything) // 3]
    few = find(**SOME, best=3, within=1e9, memory=cap)
    fitting = [plan.seconds for plan in everything if max(plan.peak) <= cap]
    assert few.num_simulated < len(everything)
    assert few.plans[0].seconds <= min(fitting) * (1 + 1e-3)  # four digits: equal ones are sorted by their bytes
    shown = [(float(f"{plan.seconds:.4g}"), max(plan.peak)) for plan in few.plans]
    assert shown == sorted(shown)
    for plan in few.plans:
        assert max(plan.peak) <= cap and min(plan.margin) >= 0
        assert plan.low <= plan.seconds <= plan.high


def test_every_family_is_shown_or_falls_for_a_reason():
    found = find(segments=[1, 2], stages_per_rank=[1, 2], best=3)
    shown = {plan.schedule for plan in found.plans}
    assert shown.isdisjoint(found.fallen)
    assert shown | set(found.fallen) == {family.name for family in families()}
    sizes = [max(abs(term.change_at_low), abs(term.change_at_high)) for term in found.uncertain]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 0
    few_layers = search_plans(
        SHAPE._replace(layers=4), MACHINE, **{**COUNTS, **FOUR}, segments=[1], stages_per_rank=[1, 2], best=1
    )
    assert few_layers.fallen["zbv"] == "cannot be built: needs v = 2, and P v <= 4 layers"


def test_the_text_says_of_every_plan_what_its_ranks_hold():
    found = find(num_ranks=4, segments=[1, 4], stages_per_rank=[1, 2], inside=["none"], best=3)
    text = found.to_text("small", verbose=True)
    lines = text.splitlines()
    for number, plan in enumerate(found.plans, 1):
        row = lines[3 + number].split()
        assert row[:3] == [str(number), plan.schedule, str(plan.num_segments)]
        assert row[-1] == f"{max(plan.peak) / 2**30:.1f}" and rounded(plan.seconds) in row
    [held] = [line.partition(": ")[2] for line in lines if line.startswith("   GiB of each rank: ")]
    values = [word.partition(" x") for word in held.split(", ")]
    assert [value for value, _, count in values for _ in range(int(count or 1))] == [
        f"{peak / 2**30:.1f}" for peak in found.plans[0].peak
    ]
    call = next(i for i, line in enumerate(lines) if line.startswith("run plan 1: PipelineEngine(stages, schedule="))
    assert call - lines.index("   the least certain numbers, and what their ends add to the step:") == 4
    left_out = lines[lines.index("left out:") + 1 :]
    assert left_out == [f"   {name}: {why}" for name, why in found.fallen.items()] and len(left_out) > 10
    kinds = Counter(why.partition(":")[0] for why in found.fallen.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    assert found.to_text("small").endswith(f"\nleft out: {counts} (--verbose says why)")
    assert max(map(len, lines[4:8])) <= 80


LONG = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256)
LONG_COUNTS = {"seq_len": 2**19, "num_ranks": 8, "num_microbatches": 2, "layout": Layout(tensor=8)}


def test_the_search_goes_on_where_more_segments_help():
    """Half a million tokens and two micro-batches: far more than 16 segments, of hundreds of tokens at least; what is
    asked for by name stays as it is."""
    machine = load_hardware("h100")
    some = {"names": ["seq1f1b"], "stages_per_rank": [1], "inside": ["none"], "vocabulary": "ends", "best": 1}
    free = search_plans(LONG, machine, **LONG_COUNTS, **some)
    named = search_plans(LONG, machine, **LONG_COUNTS, **some, segments=[8, 16])
    assert named.plans[0].num_segments == 16 and free.plans[0].num_segments >= 64
    assert 2**19 // free.plans[0].num_segments >= 256 and free.plans[0].seconds < 0.9 * named.plans[0].seconds


def test_a_vocabulary_over_the_ranks_evens_out_the_head():
    """The last stage no longer keeps the others waiting; the plan file builds the same order."""
    some = {"names": ["seq1f1b-interleaved"], "stages_per_rank": [4], "segments": [32], "inside": ["none"]}
    machine = load_hardware("h100")
    spread, ends = search_plans(LONG, machine, **LONG_COUNTS, **some, best=2).plans
    assert (spread.layout.vocabulary, ends.layout.vocabulary) == ("ranks", "ends")
    assert spread.bubble < ends.bubble - 0.02 and spread.seconds < ends.seconds
    order = spread.build()
    assert {"S", "T", "E", "G"} <= order.kinds and Plan.from_json(spread.to_json()).build() == order
    cost = CostModel(LONG, machine, num_ranks=8, stages_per_rank=4, seq_len=2**19, layout=spread.layout)
    run = order.simulate(cost.price(spread.segment_sizes).costs(order), steps=2, optimizer_sync=True)
    assert run.period == pytest.approx(spread.seconds)
    assert [rank.total for rank in cost.price(spread.segment_sizes).rank_bytes(order)] == list(spread.peak)
    at_ends = replace(spread.layout, vocabulary="ends")
    head = CostModel(LONG, machine, num_ranks=8, stages_per_rank=4, seq_len=2**19, layout=at_ends)
    wholes = [sum(model.parts.stage_parameters) for model in (cost, head)]
    assert wholes[0] == pytest.approx(wholes[1])
    [only] = search_plans(LONG, machine, **LONG_COUNTS, **some, best=2, vocabulary="ends").plans
    assert only.low < ends.seconds < only.high and only == replace(ends, low=only.low, high=only.high)
    [asked] = search_plans(LONG, machine, **LONG_COUNTS, **some, best=2, vocabulary="ranks").plans
    assert asked == spread


def test_an_uncertain_term_moves_the_step_by_what_it_says():
    found = find(names=["seq1f1b"], **ONE, best=1)
    for term in found.uncertain[:3]:
        for end, change in ((term.low, term.change_at_low), (term.high, term.change_at_high)):
            other = price(found.plans[0], replace(MACHINE, **{term.name: end}))[0]
            assert other - found.plans[0].seconds == pytest.approx(change)


def test_steps_that_do_not_wait_for_all_ranks():
    """The period is that of the public simulator; zb-h2, whose ranks are all at it for the same time, gains most."""
    counts = {**FOUR, "memory": 10**15}
    few = {"segments": [1], "stages_per_rank": [1], "inside": ["none"], "within": 1e9}
    fast = dict.fromkeys(("attention_forward_efficiency", "attention_backward_efficiency", "bandwidth"), 1e15)
    machine, gains = replace(MACHINE, **fast, launch=0.0), {}  # F, I and W take the same time
    for name in ("1f1b", "zb-h2"):
        waiting, free = (best(machine, **counts, **few, names=[name], optimizer_sync=sync) for sync in (True, False))
        assert (waiting.optimizer_sync, free.optimizer_sync) == (True, False)
        assert waiting.seconds == pytest.approx(price(waiting, machine)[0])
        priced = price(free, machine)[0]
        assert free.seconds == pytest.approx(priced, rel=1e-2) and free.seconds > priced - 1e-12
        assert Plan.from_json(free.to_json()) == free
        gains[name] = waiting.seconds / free.seconds
    assert gains["zb-h2"] > 1.05 and gains["1f1b"] == pytest.approx(1)


def test_auto_is_made_for_the_cap():
    """Under a cap that its order for no cap breaks it finds another, about as fast as the named one that fits; under
    one that no order keeps, it is no slower than the named one with units recomputed."""
    some = {**FOUR, **ONE, "vocabulary": "ends", "within": 1e9}
    free, named = (best(**some, names=[name], remedies=()) for name in ("auto", "seq1f1b"))
    cap = max(named.peak)
    assert max(free.peak) > cap
    auto = best(**some, names=["auto"], remedies=(), memory=cap)
    assert max(auto.peak) <= cap and "cap_bytes" in auto.options and auto.seconds <= 1.02 * named.seconds
    check_price(auto)
    with pytest.raises(ValueError, match=r"the least possible is .* auto with k 4"):
        find(replace(MACHINE, context_bytes=0.0), **some, names=["auto"], remedies=(), memory=10**8)
    short = cap - 60 * 2**20
    with pytest.raises(ValueError, match="nothing fits"):
        find(**some, names=["seq1f1b"], remedies=(), memory=short)
    auto, named = (best(**some, names=[name], memory=short) for name in ("auto", "seq1f1b"))
    assert max(auto.peak) <= short and auto.seconds <= named.seconds * (1 + 1e-9)
    check_price(auto)


def test_places_are_those_that_messages_need_or_fewer_where_memory_is_short():
    """The plan of auto tells the engine the places that its bytes were counted with. Whole micro-batches in eight
    segments: their gradients come earlier than one place lets them."""
    auto = best(**FOUR, **{**ONE, "stages_per_rank": [2]}, names=["auto"])
    assert auto.prefetch is None
    check_price(auto)
    order = auto.engine_arguments()["schedule"]
    assert order.places == auto.build().places and "by costs" in order._places_text
    assert auto.seconds <= 1.0001 * price(replace(auto, prefetch=1000))[0]
    some = {**FOUR, **ONE, "segments": [8], "remedies": [], "names": ["1f1b"]}
    free = best(**some)
    assert free.prefetch is None and free.build().places != free.build().replace(prefetch=1).places
    least = max(price(replace(free, prefetch=1))[1])
    short = best(**some, memory=least)
    assert max(short.peak) == least < max(free.peak) and short.prefetch == short.build().prefetch == 1
    assert free.seconds < short.seconds
    check_price(short)


def test_units_give_up_what_they_saved_where_an_order_would_not_fit():
    """Below what any order needs, plans recompute some units and still fit; with a tier they move some, and are faster
    than with recomputation alone where that hides."""
    machine = replace(MACHINE, tier_bandwidth=1e12)
    some = {"names": ["1f1b", "seq1f1b"], **ONE, "segments": [1, 4]}
    whole = find(machine, **some, remedies=(), best=10_000, within=1e9).plans
    cap = min(max(plan.peak) for plan in whole) - 100 * 2**20
    with pytest.raises(ValueError, match="nothing fits in"):
        find(machine, **some, remedies=(), memory=cap)
    again, moved = (
        find(machine, **some, memory=cap, remedies=remedies, best=100).plans
        for remedies in (("recompute",), ("recompute", "offload"))
    )
    for plan in (*again, *moved):
        assert max(plan.peak) <= cap and plan.units
        check_price(plan, machine)
    assert set("".join(again[0].units)) == {".", "R", " "}
    assert "L" in "".join(moved[0].units) and moved[0].seconds <= again[0].seconds
    with pytest.raises(ValueError, match=r"nothing fits in .* the least possible is .*recompute by units") as error:
        find(machine, **some, memory=1 << 20)
    assert 0 < least_of(error.value) < cap / 2**30


@pytest.mark.slow
@pytest.mark.parametrize("host, most", [(1e12, 4090), (2e12, 3940), (3e12, 3790), (4e12, 3640)])
def test_as_much_moves_as_the_host_memory_takes(host, most):
    """Seconds on the line between none (4240) and all units (3570 with 5e12 bytes) that move, or less; a rank moves at
    most as many as its share of a node takes, though moves need receive places of their own."""
    machine = replace(load_hardware("h100"), host_memory=host)
    some = {"names": ["seq1f1b-interleaved"], "segments": [256], "stages_per_rank": [2], "inside": ["none"], "best": 1}
    counts = {"seq_len": 1 << 20, "num_ranks": 8, "num_microbatches": 16, "layout": Layout(tensor=8)}
    model, remedies = load_model("llama3-70b"), ("recompute", "offload")
    (plan,) = search_plans(model, machine, **counts, **some, remedies=remedies).plans
    assert plan.seconds < most and max(plan.peak) <= plan.cap
    units = CostModel(model, machine, num_ranks=8, stages_per_rank=2, seq_len=1 << 20, layout=plan.layout)
    order = plan.build()
    held = units.price(plan.segment_sizes).memory(order.rank_of_stage).activations
    for rank, own in enumerate(order.ranks):
        moved, tier, fullest = {unit[1:] for unit in own if unit.kind == "O"}, 0, 0
        for unit in own:
            size = held[unit.stage, unit.segment] * (unit[1:] in moved)
            tier += size * ((unit.kind == "O") - (unit.kind in "BI"))
            fullest = max(fullest, tier)
        assert 0.3 * host / 8 < fullest <= host / 8, rank


def least_of(error):
    """GiB, to two digits, that a refusal names."""
    return float(str(error).split("the least possible is ")[1].split(" GiB")[0])


MIX = {512: 90, 8192: 10}


def test_a_mix_of_lengths_is_weighed_by_its_steps():
    """Seconds, rates and bytes of every length by the public simulator, over the one order of the plan."""
    for sync in (True, False):
        found = find(seq_len=None, lengths=MIX, **SOME, best=20, within=1e9, optimizer_sync=sync)
        for plan in found.plans:
            short, long = plan.lengths
            assert (short.seq_len, short.share, long.seq_len, long.share) == (512, 0.9, 8192, 0.1)
            for step in plan.lengths:
                seconds, peak = price(plan, step=step)
                assert step.seconds == pytest.approx(seconds, rel=1e-9 if sync else 1e-2)
                assert step.tokens_per_second == pytest.approx(4 * step.seq_len / step.seconds)
                assert list(step.peak) == peak
            assert plan.seconds == pytest.approx(0.9 * short.seconds + 0.1 * long.seconds)
            assert plan.tokens_per_second == pytest.approx(4 * (0.9 * 512 + 0.1 * 8192) / plan.seconds)
            assert plan.peak == tuple(map(max, short.peak, long.peak))
            assert (plan.seq_len, plan.segment_sizes) == (8192, long.segment_sizes)


def test_the_best_of_a_mix_is_not_the_best_of_its_longest():
    """Among all candidates of both lengths the mix takes the least mean; short sequences want fewer segments."""
    some = {"names": ["seq1f1b"], **ONE, "segments": [1, 2, 4, 8]}
    mixed, long = best(**some, seq_len=None, lengths=MIX), best(**some)
    assert mixed.num_segments < long.num_segments
    found = find(**some, seq_len=None, lengths=MIX, best=10_000, within=1e9)
    assert mixed.seconds == pytest.approx(min(plan.seconds for plan in found.plans), rel=1e-3)
    cap = max(long.peak) - 1  # the longest length alone breaks it
    tight = best(**some, seq_len=None, lengths=MIX, within=1e9, memory=cap)
    assert max(max(step.peak) for step in tight.lengths) == max(tight.peak) <= cap


def test_many_lengths_are_padded_to_eight():
    """Neighbours share a length, in groups of about as many tokens; padding does not count as tokens."""
    lengths = {length: 1 + length % 3 for length in range(64, 1000, 13)}
    steps = best(seq_len=None, lengths=lengths, names=["1f1b"]).lengths
    assert len(steps) == 8 and steps[-1].seq_len == max(lengths)
    total = sum(length * count for length, count in lengths.items())
    for before, step in zip((0, *(step.seq_len for step in steps)), steps, strict=False):
        members = {length: count for length, count in lengths.items() if before < length <= step.seq_len}
        tokens = sum(length * count for length, count in members.items())
        assert step.share == pytest.approx(sum(members.values()) / sum(lengths.values()))
        assert step.tokens == pytest.approx(tokens / sum(members.values()))
        assert abs(tokens - total / 8) <= max(length * count for length, count in lengths.items())
    assert sum(step.share for step in steps) == pytest.approx(1)


def test_nothing_fits_and_the_least_that_would():
    with pytest.raises(ValueError, match=r"nothing fits in 0\.00 GiB: the least possible is .*inside full"):
        find(**SOME, memory=2**20)
    machine = replace(MACHINE, context_bytes=0.0)
    with pytest.raises(ValueError, match="nothing fits") as error:
        find(machine, **SOME, memory=2**20)
    enough, short = (int((least_of(error.value) + more) * 2**30) for more in (0.006, -0.006))
    plan = best(machine, **SOME, memory=enough)
    assert max(plan.peak) <= enough and plan.mix == 0.0  # equal segments need less than those of equal time
    with pytest.raises(ValueError, match="nothing fits"):
        find(machine, **SOME, memory=short)


MIXED = {"seq_len": None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_ranks": 0}, "num_ranks is 0, must be at least 1"),
        ({"num_ranks": 9}, "there are 9 stages, must be in 1..8"),
        ({"memory": 0}, "memory is 0"),
        ({"segments": [0, 1]}, r"segments are \[0, 1\]"),
        ({"segments": [9000]}, "must be in 1..8192"),
        ({"inside": ["all"]}, "inside is 'all'"),
        ({"layout": Layout(tensor=3)}, "tensor is 3, must divide 8"),
        ({"num_microbatches": 10**12}, "needs 2 P v M k <= 10000000 units"),
        ({"seq_len": 0}, "seq_len is 0, must be at least 1"),
        ({"vocabulary": "all"}, "vocabulary is 'all', must be one of any, ends, ranks"),
        ({"vocabulary": "ranks", "layout": Layout(head_in_loss=False)}, "needs a model with vocab, and head_in_loss"),
        ({"remedies": ("pray",)}, "remedies hold 'pray', must be of recompute, offload"),
        ({"remedies": ("offload",)}, "units cannot move: a100 states no tier"),
        (
            {"num_microbatches": 2, "names": ["zbv"], "stages_per_rank": [2]},
            "no schedule can be built for these counts: zbv needs M >= 2 P - 1",
        ),
        ({"lengths": {8: 1}}, "give seq_len, or lengths where sequences differ: one of the two"),
        (MIXED, "one of the two"),
        ({**MIXED, "lengths": {0: 3, 8: 1}}, "a length is 0, must be at least 1"),
        ({**MIXED, "lengths": {4: 0, 8: 1}}, "the number of sequences of a length is 0, must be at least 1"),
        ({**MIXED, "lengths": {4: 1, 8: 1}, "layout": Layout(documents=(4, 4))}, "documents are packed into sequences"),
        ({**MIXED, "lengths": {4: 1, 64: 1}, "segments": [8]}, r"segments are \[8\], must be in 1..4, the tokens of"),
    ],
)
def test_bad_requests(changes, message):
    machine = replace(MACHINE, tier_bandwidth=0.0)
    with pytest.raises(ValueError, match=message):
        find(machine, **changes)


# -- the file, and the engine


def small_plan(**wanted):
    """For tests/support/tiny_model.py: 16 tokens, P 2, M 4."""
    shape = ModelShape(hidden=32, layers=4, heads=4, kv_heads=4, ffn=32, vocab=29)
    counts = {"num_ranks": 2, "num_microbatches": 4, "stages_per_rank": [1], "best": 1}
    if "lengths" not in wanted:
        counts["seq_len"] = 16
    return search_plans(shape, MACHINE, **counts, **wanted).plans[0]


def test_bad_plan_files():
    """Beside what test_files.py has of all files: what a plan alone must say."""
    mix = json.loads(small_plan(names=["seq1f1b"], segments=[4], lengths={8: 3, 16: 1}).to_json())["lengths"][1]
    good = json.loads(small_plan(names=["seq1f1b"], segments=[4]).to_json())
    for change, message in (
        ({"format": "x"}, '"format"'),
        ({"layout": {"size": 1}}, r"plan: layout: unknown fields \['size'\]"),
        ({"segment_sizes": [16]}, "4 segments has 1 segment_sizes"),
        ({"segment_sizes": [4, 4, 4, 5]}, "more than the 16 tokens|sum to 17"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"schedule": "fast"}, "no schedule named 'fast'"),
        ({"options": {"extra_warmup": []}}, "a plan has wrong options: "),
        ({"prefetch": -1}, "prefetch of a plan is -1"),
        ({"units": ["...."]}, "units must be 2 texts, one per stage, each of 4 words of 4 letters"),
        ({"units": ["...X .... .... ....", ".... .... .... ...."]}, "must be '.', 'R' or 'L'"),
        ({"model": {"hidden": 1}}, r"plan: model: unknown fields \[\], missing fields \['layers'"),
        ({"lengths": [{**mix, "segment_sizes": [4, 4, 4, 3]}]}, "sum to 15"),
    ):
        with pytest.raises(ValueError, match=message):
            Plan.from_json(json.dumps({**good, **change}))


def run_plan(plan, batches, **options):
    """For each batch the losses of the last rank's engine, the segments that it ran, and the units of all."""
    config = Config()
    model = whole_model(config)
    given = {length: batch(config, 4, length, size=1) for length in batches}

    def run(group):
        stage = stage_of(model, config, group.rank, 2)
        engine = PipelineEngine(stage, schedule=plan, loss_fn=cross_entropy, group=group, **options)
        found = []
        for tokens, target in given.values():
            losses = engine.step(tokens, target=target)
            report = engine.report()
            found.append((losses, report.segment_sizes, [unit for unit, *_ in report.timeline], report.receive_places))
        if len(batches) > 1:
            with pytest.raises(ValueError, match="segment_sizes are for 9, 16 tokens, the sequence has 12: pad it"):
                engine._runner.options.sizes_of(12)
        return engine.schedule, found

    (order, first), (other, last) = run_ranks(2, run)
    assert order == other
    for (losses, *_), (tokens, target) in zip(last, given.values(), strict=True):
        torch.testing.assert_close(torch.stack(losses), torch.stack(run_whole(model, tokens, target, 4)[0]))
    return order, first, last


@pytest.mark.parametrize(
    ("name", "remedy", "lengths"),
    [
        *((name, None, None) for name in ("seq1f1b", "seq-zb-h1", "auto")),
        *(("gpipe", remedy, None) for remedy in ("recompute", "offload")),
        ("seq1f1b", None, {9: 3, 16: 1}),
    ],
)
def test_the_engine_runs_a_plan(name, remedy, lengths, tmp_path):
    """Also one that gives up units, and one for a mix: each step is split as the plan says of its length."""
    some = {"names": [name], "segments": [4], "inside": ["none"], **({"lengths": lengths} if lengths else {})}
    plan = small_plan(**some)
    if remedy is not None:
        most = max(plan.peak)
        plan = small_plan(**some, memory=most - 1, remedies=(remedy,))
        assert max(plan.peak) < most
    file, steps = tmp_path / "plan.json", plan.lengths[::-1] or (plan,)
    plan.save(file)
    options = {"memory": Memory(offload=tmp_path / "tier")} if remedy == "offload" else {}
    (tmp_path / "tier").mkdir()
    order, first, last = run_plan(file, [step.seq_len for step in steps], **options)
    assert Plan.load(file) == plan and order == plan.build()
    assert [sizes for _, sizes, *_ in last] == [step.segment_sizes for step in steps]
    assert first[0][3] == order.places[-1]  # of the edge into rank 0
    if name != "auto":  # which takes the faster of both
        assert ("W" in order.kinds) == (name == "seq-zb-h1")
    letter = {"recompute": "R", "offload": "L", None: ""}[remedy]
    assert set("".join(plan.units)) == ({".", " ", letter} if remedy else set())
    for kind in letter:
        assert sum(unit.kind == kind for unit in first[0][2] + last[0][2]) == "".join(plan.units).count(kind) > 0


def test_what_the_engine_does_not_do_is_refused_by_name():
    def start(**arguments):
        PipelineEngine(torch.nn.Linear(2, 2), loss_fn=cross_entropy, group=LoopbackGroup(1)[0], **arguments)

    plan = small_plan(names=["seq1f1b"], segments=[4], inside=["none"])
    text = r"the plan recomputes inside of blocks \('full'\), which the engine leaves to the module"
    with pytest.raises(ValueError, match=text):
        start(schedule=small_plan(names=["seq1f1b"], segments=[4], inside=["full"]))
    with pytest.raises(ValueError, match="a plan stands for num_microbatches, num_segments and segment_sizes"):
        start(schedule=plan, num_microbatches=4)
    with pytest.raises(TypeError, match="needs num_microbatches=, or a plan as schedule="):
        start()


# -- the command


ASKED = ["plan", "--model", "gpt-2.7b", "--hardware", "a100", "--ranks", "8", "--microbatches", "16"]
SEQ = ["--seq", "16384"]


def test_the_command_prints_the_best_and_why_others_fall(capsys, tmp_path):
    few = ["--segments", "1,4", "--stages", "1", "--schedules", "1f1b,seq1f1b,hanayo", "--memory", "40GiB"]
    few += ["--vocabulary", "ends", "--inside", "none"]
    file = tmp_path / "plan.json"
    assert main([*ASKED, *SEQ, *few, "--best", "1", "--output", str(file), "--verbose"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("gpt-2.7b, 16384 tokens, P 8, M 16 on a100, assumed rates\ncap 40.0 of 80.0 GiB")
    assert "GiB in the worst case of the estimate: " in text
    assert f'PipelineEngine(stages, schedule="{file}", ...), with the file of --output {file}' in " ".join(text.split())
    assert text.count("PipelineEngine(") == 1
    assert "\n   hanayo: cannot be built: needs v = 2 w" in text
    assert main([*ASKED, *SEQ, *few, "--best", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    plan = Plan.load(file)
    assert data["plans"][0]["segment_sizes"] == list(plan.segment_sizes)
    assert max(plan.peak) <= 40 << 30
    assert data["plans"][0]["margin"] == list(plan.margin)
    assert main([*ASKED, *SEQ, *few, "--best", "1", "--json", "--no-optimizer-sync"]) == 0
    free = json.loads(capsys.readouterr().out)["plans"][0]
    assert plan.optimizer_sync and not free["optimizer_sync"] and free["seconds"] < plan.seconds
    assert main([*ASKED, "--seq", "16k", *few[:6], "--best", "1"]) == 0  # unless told: 85 % of the device
    assert "gpt-2.7b, 16384 tokens" in (text := capsys.readouterr().out) and "cap 68.0 of 80.0 GiB" in text


def test_the_command_takes_a_mix_of_lengths(capsys, tmp_path):
    few = ["--ranks", "4", "--microbatches", "4", "--segments", "1,4", "--schedules", "seq1f1b", "--best", "1"]
    (tmp_path / "lengths.txt").write_text("# tokens of each sequence\n8192\n2048 2\n2048\n\n")
    for given in ("2048:3,8192:1", str(tmp_path / "lengths.txt")):
        assert main([*ASKED, *few, "--inside", "full", "--lengths", given]) == 0
        text = capsys.readouterr().out
        assert text.startswith("gpt-2.7b, 2048, 8192 tokens, P 4, M 4 on a100")
        assert "\n   steps of 2048 tokens, 75.0%: " in text and "\n   steps of 8192 tokens, 25.0%: " in text
