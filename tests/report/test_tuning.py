"""Does a tuned engine train as the whole model does, whichever order it tries, and settle on what was fastest?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import Config, Stage, batch, cross_entropy, gradient_error, run_whole, stage_of, whole_model
from torch import Tensor

import seq1f1b
from seq1f1b import Limits, PipelineEngine, PipelineError
from seq1f1b.report import tuning
from seq1f1b.report.tuning import costs_of
from seq1f1b.seconds import Fit, MeasuredUnits
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=16, heads=2, kv_heads=1, ffn=16, vocab=13, layers=4)
STEPS = 60  # more than a search takes


def engine_of(group: Any, model: Stage, stages_per_rank: int = 1, **options: Any) -> tuple[PipelineEngine, list[Stage]]:
    rank, size = (torch.distributed.get_rank(), 2) if group is None else (group.rank, group.size)
    num_stages = size * stages_per_rank
    stages = [stage_of(model, CONFIG, i, num_stages) for i in range(rank, num_stages, size)]
    given = {"num_microbatches": 2, "loss_fn": cross_entropy, "group": group, "schedule": "tuned"} | options
    return PipelineEngine(stages if stages_per_rank > 1 else stages[0], **given), stages


def gradients_of(stages: list[Stage]) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
    for stage in stages:
        stage.zero_grad()
    return found


def told(engine: Any) -> str:
    """What the report tells of tuning, in words and by its field."""
    report = engine.report(gather=True)
    assert report.is_tuned == report.tuning.startswith("tuned for ")
    return str(report.tuning)


@pytest.mark.parametrize(("num_ranks", "stages_per_rank"), [(2, 1), (1, 1), (2, 2)])
def test_every_step_has_the_gradients_of_the_whole_model(num_ranks: int, stages_per_rank: int) -> None:
    model = whole_model(CONFIG)
    tokens, target = batch(CONFIG, 2, 128, size=1)
    losses, truth = run_whole(model, tokens, target, 2)

    def train(group: Any) -> tuple[dict[str, list[Any]], list[str], list[str], str]:
        engine, stages = engine_of(group, model, stages_per_rank)
        gradients: dict[str, list[Any]] = {}
        orders, texts = [], []
        for _ in range(STEPS):
            found = engine.step(tokens, target=target)
            if found:
                assert torch.allclose(torch.stack(found), torch.stack(losses), rtol=1e-12)
            for name, gradient in gradients_of(stages).items():
                gradients.setdefault(name, []).append(gradient)
            orders.append(f"{engine.num_segments} {engine.schedule.digest}")
            texts.append(told(engine))
        kept = engine.eval(tokens, target=target)
        assert "more segments" not in str(engine.report(gather=True)), "the engine looks for them itself"
        assert not kept or torch.allclose(torch.stack(kept), torch.stack(losses), rtol=1e-12)
        engine.close()
        return gradients, orders, texts, orders[-1]

    ranks = run_ranks(num_ranks, train)
    for step in range(STEPS):
        joined = {name: each[step] for gradients, *_ in ranks for name, each in gradients.items()}
        assert gradient_error(joined, truth) < 1e-12, step
    orders, texts = ranks[0][1:3]
    assert all(theirs == orders for _, theirs, *_ in ranks)
    assert len(set(orders)) >= 3, "several orders were tried"
    settled = next(i for i, text in enumerate(texts) if text.startswith("tuned"))
    for step, text in enumerate(texts[:settled]):
        assert text.startswith(f"tuning: {step} of at most ")
    assert len(set(orders[settled:])) == 1 and texts[-1].startswith("tuned for 128 tokens in")


def test_another_length_is_tuned_again_and_what_is_found_can_be_kept(tmp_path: Path) -> None:
    model = whole_model(CONFIG)

    def train(group: Any) -> tuple[list[str], int]:
        engine, stages = engine_of(group, model)
        texts = []
        with pytest.raises(RuntimeError, match="no order has been found yet, after 0 steps"):
            engine.found_order()
        for step in range(2 * STEPS + 20):
            length = 128 if step < STEPS else 64
            if step % 7 == 6:
                length = (40, 1, 200)[step % 3]
            tokens, target = batch(CONFIG, 2, length, size=1, seed=step)
            engine.step(tokens, target=target)
            gradients_of(stages)
            texts.append(told(engine))
        known = max(len(engine._runner.orders), len(engine._runner.tuner._settings))
        found, order = engine.found_order(), engine.schedule
        assert (found.seq_len, found.num_segments) == (64, engine.num_segments)
        engine.close()
        found.save(tmp_path / f"{group.rank}.json")
        again, _ = engine_of(group, model, schedule=tmp_path / f"{group.rank}.json", num_microbatches=None)
        assert again.schedule == order and again._runner.options.sizes_of(64) == engine._runner.options.sizes_of(64)
        again.close()
        return texts, known

    for texts, known in run_ranks(2, train):
        assert texts[STEPS - 1].startswith("tuned for 128 tokens") and texts[-1].startswith("tuned for 64 tokens")
        assert known <= 16


def test_short_sequences_are_evaluated_and_verified_whatever_is_tried() -> None:
    """Fewer tokens than the order of the last step has segments run by the order that the engine began with."""
    model = whole_model(CONFIG)
    tokens, target = batch(CONFIG, 2, 128, size=1)
    target = target.clamp(min=0)
    expected = {n: torch.stack(run_whole(model, tokens[:, :n], target[:, :n], 2)[0]) for n in (1, 3, 128)}

    def train(group: Any) -> tuple[set[int], bool]:
        engine, stages = engine_of(group, model, num_segments=1)
        ran, verified = set(), False
        for step in range(STEPS):
            engine.step(tokens, target=target)
            gradients_of(stages)
            if step % 3:  # a step after an evaluation is not measured
                continue
            ran.add(engine.num_segments)
            found = {n: engine.eval(tokens[:, :n], target=target[:, :n]) for n in (1, 3, 128)}
            for n, losses in found.items():
                assert not losses or torch.allclose(torch.stack(losses), expected[n], rtol=1e-12)
            if engine.num_segments > 3 and not verified:
                verified = engine.verify(tokens[:, :3], target=target[:, :3], show=False).ok
        engine.close()
        return ran, verified

    for ran, verified in run_ranks(2, train):
        assert max(ran) > 3 and verified, ran


def test_a_failure_on_one_rank_does_not_part_the_ranks() -> None:
    model = whole_model(CONFIG)
    tokens, target = batch(CONFIG, 2, 128, size=1)
    _, truth = run_whole(model, tokens, target, 2)

    def train(group: Any) -> tuple[dict[str, Tensor], int, str]:
        engine, stages = engine_of(group, model, limits=Limits(step=20, first_step=20))
        failed = 0
        for step in range(STEPS + 10):
            bad = step in (3, 17, 30, 44) and group.rank == step % 2
            try:
                engine.step(tokens, target=target, kwargs={"no such argument": 1} if bad else None)
            except (ValueError, TypeError, PipelineError):
                failed += 1
            gradients = gradients_of(stages)
        text = told(engine)
        engine.close()
        return gradients, failed, text

    ranks = run_ranks(2, train)
    assert [failed for _, failed, _ in ranks] == [4, 4]
    assert all(text.startswith("tuned for 128") for *_, text in ranks)
    assert gradient_error({n: g for gradients, *_ in ranks for n, g in gradients.items()}, truth) < 1e-12


def test_where_reruns_are_to_be_equal_nothing_is_tuned() -> None:
    model = whole_model(CONFIG)
    tokens, target = batch(CONFIG, 2, 128, size=1)

    def train(group: Any) -> tuple[int, str]:
        engine, _ = engine_of(group, model, num_segments=2)
        for _ in range(8):
            engine.step(tokens, target=target)
        found = len({engine.schedule.digest}), told(engine)
        engine.close()
        return found

    torch.use_deterministic_algorithms(True)
    try:
        ranks = run_ranks(2, train)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ranks == [(1, "torch.use_deterministic_algorithms is on: nothing is tuned")] * 2


def test_what_it_does_not_take() -> None:
    model, group = whole_model(CONFIG), seq1f1b.LoopbackGroup(1)[0]
    with pytest.raises(ValueError, match=r"schedule='tuned' finds the number of segments"):
        engine_of(group, model, num_segments=2, segment_sizes=[64, 64])
    with pytest.raises(ValueError, match=r"there is no schedule named .tunde.*did you mean .tuned"):
        engine_of(group, model, schedule="tunde")


def test_the_best_order_of_measured_units_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that take a known time, in a clock of the test: what is kept is the fastest of all that was tried."""
    monkeypatch.setattr(tuning, "free_bytes", lambda device: 1e12)
    seen: dict[str, list[float]] = {}

    class OneRank:
        rank = 0

        def all_gather_object(self, value: Any) -> list[Any]:
            return [value]

    options = seq1f1b.engine.options.Options(
        num_microbatches=4, num_segments=1, segment_sizes=None, seq_dim=1, arg_rules={}, loss_fn=None,
        loss=seq1f1b.Loss(), transport="auto", limits=Limits(), grad_dtype=None, memory=seq1f1b.Memory(),
        sequence_parallel=(0, 1), attention="own", embedding=None,
    )  # fmt: skip
    order = seq1f1b.build_schedule("seq1f1b", num_ranks=4, num_microbatches=4, num_segments=1)
    first = tuning.Setting(order, options)
    tuner = tuning.Tuner(first, stages_per_rank=1, group=OneRank(), device=torch.device("cpu"), report=lambda: None)
    terms = {"F": (1e-3, 1e-5, 1e-9), "B": (2e-3, 2e-5, 2e-9), "I": (1e-3, 1e-5, 2e-9), "W": (1e-3, 1e-5, 0.0)}
    truth = MeasuredUnits({(kind, stage): Fit(*each, 0.0) for kind, each in terms.items() for stage in range(4)})

    def measure(setting: tuning.Setting) -> tuple[Any, ...]:
        sizes = setting.options.sizes_of(4096)
        costs = costs_of(truth, sizes)
        seconds = setting.schedule.simulate(costs).makespan
        seen.setdefault(str(setting.choice), []).append(seconds)
        tables = {"F": costs.forward, "B": costs.backward, "I": costs.input, "W": costs.weight}
        units = [
            (kind, stage, s, tables[kind][stage][s])
            for kind in sorted(setting.schedule.kinds)
            for stage in range(4)
            for s in range(len(sizes))
        ]
        return (4096, seconds), (4096, units, [0.0], 1e12)

    monkeypatch.setattr(tuner, "_figures", lambda record: own[tuner._reads == "units"])
    for _ in range(STEPS):
        own = measure(tuner.setting)
        tuner.next(object(), 4096)
    best = min(each[0] for each in seen.values())
    assert seen[str(tuner.setting.choice)][0] == best and best < 0.75 * seen["None"][0]
    assert "faster than the engine's own order" in tuner.text
