"""Is the idle time of a step split into its causes, does the advice name the right one, and does a file keep it?

Exact durations stand in for the measurement: every step here is one whose causes are known.
"""

from __future__ import annotations

import dataclasses
import re
import time
from dataclasses import astuple

import pytest
import torch
from tiny_model import Config, batch, cross_entropy, stage_of, whole_model
from torch import nn

import seq1f1b
from seq1f1b import Costs, Links
from seq1f1b.__main__ import main
from seq1f1b.report.idle import _REMEDIES, CAUSES, StepTimes, advice, idle_of_ranks, mean_idle
from seq1f1b.report.report import PipelineReport
from seq1f1b.testing import run_ranks

P, M, K = 4, 8, 4
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def step_of(
    name="seq1f1b", *, seconds=None, own=0.0, late=0, transfer=0.0, sizes=(64,) * K, layers=(), num_ranks=P, **options
):
    """A step whose units take ``seconds(unit)``, as it would be measured: simulated with all that delays it.

    Args:
        own: seconds of the engine around each unit.
        late: seconds by which rank 1 enters late.
        transfer: seconds of a message.
    """
    counts = {"num_ranks": num_ranks, "num_microbatches": M, "num_segments": len(sizes)}
    schedule = seq1f1b.build_schedule(name, **counts, **options)
    seconds = seconds or (lambda unit: SECONDS[unit.kind])
    units = [[seconds(unit) for unit in order] for order in schedule.ranks]
    delayed = [[each + own for each in track] for track in units]
    delayed[1][0] += late
    makespan = schedule.simulate(Costs(links=Links(latency=transfer)), durations=delayed).makespan
    owns = [own * len(track) for track in units]
    return StepTimes(schedule, units, owns, [0, late, 0, 0][:num_ranks], makespan, tuple(sizes), layers)


def causes_of(step):
    """The causes of every rank, whose sum must be what the rank is not busy."""
    ranks = idle_of_ranks(step)
    for idle, units in zip(ranks, step.units, strict=True):
        assert idle.total == pytest.approx(step.makespan - sum(units), abs=1e-9)
    return ranks


def test_equal_units_wait_for_the_order_alone():
    """The bubble of Seq1F1B, (P - 1)(F + B): with units of 1 and 2 s the same 9 s on every rank."""
    step = step_of()
    for idle in causes_of(step):
        assert astuple(idle) == pytest.approx((9, 0, 0, 0, 0, 0), abs=1e-9)
    assert advice(step, idle_of_ranks(step)) == (
        "rank 0 waits 9% of the step (9 s) because the order itself fills and drains the pipeline: take more segments "
        '(now 4), more micro-batches (now 8) or an order that splits the backward (schedule="seq-zb-h1")'
    )


def test_a_slow_stage_makes_the_others_wait():
    """The step is as long as stage 2 works, M k 1.5 (F + B), less than a whole bubble more."""
    step = step_of(seconds=lambda unit: SECONDS[unit.kind] * (1.5 if unit.stage == 2 else 1.0))
    ranks = causes_of(step)
    assert 0 < step.makespan - M * K * 4.5 < 9
    mean = 4.5 / 4  # a mean unit of the step, over one of a quick stage
    assert [idle.schedule for idle in ranks] == pytest.approx([9 * mean] * 4)
    own = [M * K * 3 * (1.5 if rank == 2 else 1.0) for rank in range(P)]
    assert [idle.stages for idle in ranks] == pytest.approx([step.makespan - busy - 9 * mean for busy in own])
    for idle in ranks:
        assert astuple(idle)[2:] == pytest.approx((0, 0, 0, 0), abs=1e-9)
    assert ranks[2].stages < 0 < ranks[1].stages
    assert mean_idle(ranks).stages == pytest.approx(step.makespan - (M * K * 3 + 9) * mean)
    found = advice(step, ranks)
    assert "because stage 2 takes 1.33 times the mean stage: move layers from stage 2 to stage 0" in found


def step_of_layers(layers, *, head=0.0, embedding=0.0, stages_per_rank=1, **options):
    """Stages of so many layers of 1 s forward, and a head and an embedding of so many layers' time."""
    cost = [float(n) for n in layers]
    cost[0] += embedding
    cost[-1] += head
    options |= {"num_ranks": len(layers) // stages_per_rank, "stages_per_rank": stages_per_rank, "sizes": (64, 64)}
    return step_of(seconds=lambda unit: SECONDS[unit.kind] * cost[unit.stage], layers=tuple(layers), **options)


of_stages = _REMEDIES["stages"]  # what is said about stages, whatever the main cause is
INTERLEAVED = {"name": "seq1f1b-interleaved", "stages_per_rank": 2}
MOVES = {
    # layers: (options, what is said)
    "one from the head's stage": ([4, 4], {"head": 2.0}, "move 1 layer of 4 from stage 1 to stage 0"),
    "from the first": ([5, 3, 4, 4], {}, "move 1 layer of 5 from stage 0 to stage 1"),
    "from the embedding's": ([8, 8], {"embedding": 2.5}, "move 1 layer of 8 from stage 0 to stage 1"),
    "three at once": ([9, 3], {}, "move 3 layers of 9 from stage 0 to stage 1"),
    "of a split backward": ([5, 3, 4, 4], {"name": "seq-zb-h1"}, "move 1 layer of 5 from stage 0 to stage 1"),
    "of interleaved stages": ([4, 2, 4, 2], INTERLEAVED, "from stage 0 to stage 1"),
    "one more": ([3, 2, 2, 2], {}, "no split of whole layers is better, as one layer is 33% of that stage"),
    "the head's of four": ([2, 2, 2, 2], {"head": 0.8}, "takes as long as 0.8 of them: spread the output head"),
    "the head's of a split backward": ([2, 2], {"head": 0.8, "name": "seq-zb-h1"}, "spread the output head"),
}  # fmt: skip


@pytest.mark.parametrize(("layers", "options", "said"), MOVES.values(), ids=MOVES)
def test_a_move_of_layers_is_named_only_if_it_helps(layers, options, said):
    """What is named helps: the step after the move is shorter, and nobody moves a layer back."""
    before = step_of_layers(layers, **options)
    found = of_stages(before)
    assert said in found
    moved = re.search(r"move (\d+) layers? of \d+ from stage (\d) to stage (\d)$", found)
    assert (moved is None) == ("move" not in found)
    if moved is None:
        return
    number, source, destination = map(int, moved.groups())
    layers = list(layers)
    layers[source] -= number
    layers[destination] += number
    after = step_of_layers(layers, **options)
    assert after.makespan < before.makespan
    assert f"from stage {destination} to stage {source}" not in of_stages(after)


@pytest.mark.parametrize("layers", [(), (0, 0), (0, 3)])
def test_a_move_of_layers_of_unknown_number_has_a_condition(layers):
    step = dataclasses.replace(step_of_layers([3, 2]), layers=layers)
    assert of_stages(step).endswith("move layers from stage 0 to stage 1, if one takes less than 33% of its time")


def test_a_head_that_is_spread_is_not_named():
    schedule = seq1f1b.build_schedule("seq1f1b", num_ranks=2, num_microbatches=4, num_segments=2).spread_vocabulary()
    units = [[1.0 + (unit.stage == 1) for unit in order] for order in schedule.ranks]
    makespan = schedule.simulate(durations=units).makespan
    for layers in ((), (2, 2)):
        step = StepTimes(schedule, units, [0, 0], [0, 0], makespan, (64, 64), layers)
        assert "vocabulary" not in of_stages(step)


def test_a_slow_segment():
    """Alike on all stages: nothing is left for stages, the rest of the causes is free."""
    step = step_of(seconds=lambda unit: SECONDS[unit.kind] * (3.0 if unit.segment == K - 1 else 1.0))
    ranks = causes_of(step)
    for idle in ranks:
        assert idle.schedule == pytest.approx(9 * 1.5)
        assert idle.segments == pytest.approx(step.makespan - M * K * 3 * 1.5 - 9 * 1.5)
        assert idle.segments > idle.schedule
        assert (idle.stages, *astuple(idle)[3:]) == pytest.approx((0, 0, 0, 0), abs=1e-9)
    found = advice(step, ranks)
    assert (
        "because segment 3 takes 3.00 times as long as segment 0" in found and "costs=report.segment_seconds" in found
    )
    uneven = step_of(seconds=lambda unit: SECONDS[unit.kind] * (3.0 if unit.segment == 3 else 1.0), sizes=(9, 6, 5, 4))
    assert "make segment 3 shorter and segment 0 longer" in advice(uneven, causes_of(uneven))


CAUSES_ALONE = {
    "microbatches": (
        {"seconds": lambda unit: SECONDS[unit.kind] * (9.0 if unit.microbatch == unit.stage else 1.0)},
        r"[FB] of stage \d, segment \d from \de\+03 to [.\d]+e\+0\d ms",
    ),  # slow on one stage at a time, so that no other rank works meanwhile
    "transfer": ({"transfer": 2.0}, "because messages take time"),
    "host": ({"own": 0.5}, r"needs 5e\+02 ms around each unit, and a unit takes only 1.5e\+03 ms.*segments \(now 4\)"),
    "host of a rank that enters late": ({"late": 50.0}, r"rank 1 enters the step 5e\+04 ms after its first unit began"),
}
EXACT = {"transfer": lambda step: step.makespan - M * K * 3 - 9, "host": lambda step: 0.5 * 2 * (M * K + P - 1)}
"""0.5 s around each unit lengthen the step as units of 1.5 and 2.5 s would: 2 M k and 2 (P - 1) times."""


@pytest.mark.parametrize("name", CAUSES_ALONE)
def test_one_cause(name):
    options, said = CAUSES_ALONE[name]
    step = step_of(**options)
    ranks, cause = causes_of(step), name.split()[0]
    assert getattr(mean_idle(ranks), cause) > mean_idle(ranks).schedule
    for idle in ranks:
        others = set(CAUSES) - {cause, "schedule"}
        assert [getattr(idle, other) for other in others] == pytest.approx([0.0] * len(others), abs=1e-9)
        if name in EXACT:
            assert (idle.schedule, getattr(idle, cause)) == pytest.approx((9, EXACT[name](step)), abs=1e-9)
    assert re.search(said, advice(step, ranks))


def test_all_causes_at_once_and_weights_in_waits():
    """With fill, W that runs in waits is busy time there and in the simulations."""
    for name, weights in (("seq1f1b", "planned"), ("seq-zb-h1", "planned"), ("seq-zb-h1", "fill")):
        ranks = causes_of(step_of(
            name, seconds=lambda unit: SECONDS[unit.kind] * (1 + 0.3 * unit.stage + 0.2 * unit.segment),
            own=0.25, transfer=1.0, weights=weights,
        ))  # fmt: skip
        mean = mean_idle(ranks)
        assert mean.total == pytest.approx(sum(idle.total for idle in ranks) / P)
        assert mean.stages > 0 and mean.host > 0 and mean.transfer > 0


def test_a_busy_step_has_nothing_to_gain():
    schedule = seq1f1b.build_schedule("seq1f1b", num_ranks=2, num_microbatches=64)
    units = [[SECONDS[unit.kind] for unit in order] for order in schedule.ranks]
    step = StepTimes(schedule, units, [0, 0], [0, 0], schedule.simulate(durations=units).makespan, (1,))
    assert advice(step, idle_of_ranks(step)) == "the ranks are busy 98% of the step: there is little to gain"


class Sleeper(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(2)), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x * self.weight


@pytest.fixture(scope="module")
def report():
    """A step in which stage 1 sleeps twenty times as long as stage 0, and its evaluation."""

    def run(group):
        engine = seq1f1b.PipelineEngine(
            Sleeper(0.04 if group.rank else 0.002),
            num_microbatches=3,
            num_segments=2,
            loss_fn=lambda y, t: y.sum(),
            group=group,
        )
        x = torch.ones(3, 8, 2)
        engine.step(x, target=x)
        trained = engine.report(gather=True)
        engine.eval(x, target=x)
        return trained, engine.report(gather=True)

    return run_ranks(2, run)[0]


def test_the_report_of_an_engine(report):
    for each in report:
        for rank, idle in zip(each.ranks, each.idle, strict=True):
            assert idle.total == pytest.approx(each.makespan - rank.busy, abs=1e-6)
        assert each.idle[0].stages > 0.2 * each.makespan
        assert "stage 1, which also runs the loss, takes 1." in each.advice
        scalars = each.scalars()
        assert sum(scalars[f"idle/{cause}"] for cause in CAUSES) == pytest.approx(scalars["bubble"], abs=1e-6)
        assert scalars["seconds"] == each.makespan and scalars["process_peak_bytes"] > 1e6
        assert each.tokens_per_second == pytest.approx(3 * 8 / each.makespan)
        shape = seq1f1b.ModelShape(hidden=4, layers=3, heads=2, kv_heads=1, ffn=6, vocab=5)
        products = 3 * (2 * (4 * 4 + 2 * 4 * 2 + 4 * 4) + 6 * 4 * 6) + 2 * 4 * 5  # of a token: weights, twice
        attention = 3 * 4 * 4 * 36  # of a sequence: scores and sums over 36 pairs
        forward = 3 * (8 * products + attention)
        assert each.flops_utilization(shape, 1e6) == pytest.approx(3 * forward / (each.makespan * 2 * 1e6))
        lines = str(each).splitlines()
        assert lines[1].split() == ["rank", "busy", "s", "busy", *CAUSES]
        assert [line.split()[0] for line in lines[2:5]] == ["0", "1", "mean"] and lines[5:] == [each.advice]
        assert lines[4].split()[1] == f"{sum(rank.busy for rank in each.ranks) / 2:.4g}", "all work, evenly shared"


def test_the_report_counts_the_layers_of_a_stage():
    config = Config(layers=5)
    tokens, target = batch(config, 2, 12)

    def run(group):
        stage = stage_of(whole_model(config), config, group.rank, 3)
        engine = seq1f1b.PipelineEngine(stage, num_microbatches=2, num_segments=3, loss_fn=cross_entropy, group=group)
        engine.step(tokens, target=target)
        return len(stage.blocks), engine.report(gather=True)

    results = run_ranks(3, run)
    assert results[0][1]._times.layers == tuple(layers for layers, _ in results)
    assert sum(results[0][1]._times.layers) == config.layers


def test_a_file_of_reports(report, tmp_path, capsys, monkeypatch):
    file = tmp_path / "steps.jsonl"
    for each in report:
        each.save(file)
    assert list(map(repr, PipelineReport.load_all(file))) == list(map(repr, report))
    last = PipelineReport.load(file)
    assert last.ranks == report[1].ranks and last.idle == report[1].idle and last.makespan == report[1].makespan
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["report", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.split() == str(report[1]).split() and max(map(len, out.splitlines())) <= 80
    assert main(["report", str(file), "--all"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["step", "seconds", "busy"] and len(rows) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda line: b"",
        lambda line: b"\xff\xfe",
        lambda line: b"[" * 100_000,
        lambda line: line[: len(line) // 2],
        lambda line: b"[]\n" + line,
        lambda line: line.replace(b"report 1", b"report 2"),
        lambda line: line.replace(b"F0.0 F0.1", b"F0.1 F0.0"),
        lambda line: line.replace(b'"F",0,0,0', b'"F",0,0,1'),
        lambda line: line.replace(b'["Report",[0,1,', b'["Report",[0,'),
        lambda line: line.replace(b'"ranks":', b'"ranks":3,"other":'),
        lambda line: line.replace(b'"ranks":', b'"ranks":[],"other":'),
    ],
)
def test_what_is_no_report_is_refused_by_name(report, tmp_path, capsys, change):
    file = tmp_path / "steps.jsonl"
    report[0].save(file)
    line = file.read_bytes()
    assert change(line) != line
    file.write_bytes(change(line))
    for arguments in ([], ["--all"]):
        assert main(["report", str(file), *arguments]) == 2
        error = capsys.readouterr().err
        assert str(file) in error and "report" in error and len(error.splitlines()) == 1
