"""Do steps of documents come in one order whatever the ranks and replicas, and go on where a state was taken?"""

from __future__ import annotations

import copy
import json
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from seq1f1b import Loss, ModelShape, PipelineEngine
from seq1f1b.data import DocumentBatches, PlannedStep, PrefixTrees, TreeShape
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.hardware import load_hardware

MODEL = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocab=1000)
RANDOM = random.Random(0)
LENGTHS = [max(1, min(2000, int(RANDOM.lognormvariate(5.0, 1.3)))) for _ in range(300)]


def batches(num_ranks: int = 2, lengths: Any = LENGTHS, **options: Any) -> DocumentBatches:
    cost = CostModel(MODEL, load_hardware("cpu-zen5"), num_ranks=num_ranks, seq_len=64)
    return DocumentBatches(lengths, cost, **({"tokens_per_step": 8000, "seed": 3} | options))


def several(steps: DocumentBatches, count: int) -> list[PlannedStep]:
    """The next steps, over epochs."""
    found: list[PlannedStep] = []
    while len(found) < count:
        found += islice(steps, count - len(found))
    return found


def test_every_document_comes_once_in_an_epoch() -> None:
    steps = batches()
    for epoch in range(3):
        length = len(steps)
        found = list(steps)
        assert len(found) == length and {step.epoch for step in found} == {epoch}
        assert sorted(index for step in found for index in step.documents) == list(range(len(LENGTHS)))
        for step in found:
            assert step.plan.lengths == tuple(LENGTHS[i] for i in step.documents)
            assert step.tokens == sum(step.plan.lengths) <= 8000
        for step, following in pairwise(found):  # none could have taken one more
            assert step.tokens + LENGTHS[following.documents[0]] > 8000
    assert [step.step for step in several(steps, 3)] == [3 * length, 3 * length + 1, 3 * length + 2]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    orders = [[step.documents for step in batches(**options)] for options in ({}, {}, {"num_ranks": 4}, {"seed": 4})]
    assert orders[0] == orders[1] == orders[2] != orders[3]
    steps = batches()
    assert [step.documents for step in steps] != [step.documents for step in steps]  # two epochs
    unmixed = [index for step in batches(seed=None) for index in step.documents]
    assert unmixed == list(range(len(LENGTHS)))


def test_replicas_share_the_documents_of_a_step() -> None:
    alone = list(batches())
    for replicas in (2, 4):
        shares = [list(batches(replica=replica, num_replicas=replicas)) for replica in range(replicas)]
        for whole, parts in zip(alone, zip(*shares, strict=True), strict=True):
            assert sorted(index for part in parts for index in part.documents) == sorted(whole.documents)
            assert {part.tokens for part in parts} == {whole.tokens}
            work = [sum(MODEL.flops(0, LENGTHS[i]) for i in part.documents) for part in parts]
            longest = max(MODEL.flops(0, LENGTHS[i]) for i in whole.documents)
            assert max(work) <= 4 / 3 * max(longest, sum(work) / replicas)  # Graham's bound for the longest first


@pytest.mark.parametrize("at", [0, 1, 6, 20])
def test_a_state_goes_on_on_other_ranks_and_replicas(at: int) -> None:
    """A step of documents and trees."""
    lengths = [n if n % 2 else TreeShape.of_prompt(n, [9, n // 2]) for n in LENGTHS]
    steps = batches(lengths=lengths)
    planned = several(batches(lengths=lengths), at + 9)
    truth = [sorted(step.documents) for step in planned]
    assert any(step.plan.parents for step in planned)
    several(steps, at)
    state = json.loads(json.dumps(steps.state_dict()))
    for ranks, replicas in ((1, 1), (2, 1), (4, 2)):
        found: list[list[int]] = [[] for _ in range(9)]
        for replica in range(replicas):
            resumed = batches(ranks, lengths, replica=replica, num_replicas=replicas)
            resumed.load_state_dict(state)
            for place, step in enumerate(several(resumed, 9)):
                assert step.step == at + place
                found[place] = sorted([*found[place], *step.documents])
        assert found == truth[at:]


def test_a_state_does_not_run_ahead_of_what_was_handed_out() -> None:
    """The next step is planned already while this one trains; a state is that of the next, all the same."""
    steps = iter(made := batches())
    first = next(steps)
    time.sleep(0.1)
    state = made.state_dict()
    assert state["steps"] == 1 and state["begin"] == len(first.documents)
    steps.close()  # type: ignore[attr-defined] # of a generator, which iter() does not promise


class Documents(torch.utils.data.Dataset[Any]):
    """Gives back the step that it was handed, and its documents in rows."""

    def __getitem__(self, step: PlannedStep) -> Any:  # type: ignore[override] # its index is a step
        return step.plan.join(
            [torch.full((n,), i) for i, n in zip(step.documents, step.plan.lengths, strict=True)]
        ), step


def as_it_is(step: Any) -> Any:
    return step


@pytest.mark.parametrize("context", [None, "fork", "spawn", "forkserver"])
def test_steps_go_through_a_loader_and_its_workers(context: str | None) -> None:
    """Steps of documents and of trees come back equal, with what was planned."""
    rows = [torch.tensor([7] * 40 + [i] * 9) for i in range(5)]
    lengths = [*LENGTHS[:30], *copy.deepcopy(PrefixTrees(rows)).shapes]
    workers = {"num_workers": 2, "multiprocessing_context": context, "timeout": 120} if context else {}
    loader: Any = torch.utils.data.DataLoader(
        Documents(), sampler=batches(lengths=lengths), batch_size=None, collate_fn=as_it_is, **workers
    )
    for (joined, step), planned in zip(loader, batches(lengths=lengths), strict=True):
        assert step == copy.deepcopy(step) == planned
        assert sorted(set(torch.cat(joined, 1)[0].tolist())) == sorted(step.documents)
        assert step.plan.digest == planned.plan.digest and step.plan.seconds == planned.plan.seconds
        assert step.plan.costs.imbalance == planned.plan.costs.imbalance
        assert step.plan.simulation.timeline == planned.plan.simulation.timeline


def summed(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return out.sum()


@pytest.mark.parametrize("ahead", [0, 2, 5])
def test_an_engine_is_asked_for_what_steps_took_however_far_a_loader_is_ahead(ahead: int) -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    engine = PipelineEngine(model, num_microbatches=1, loss_fn=summed, loss=Loss(reduction="sum"))
    steps = batches(1, [20, 30, 10, 60] * 20, tokens_per_step=150, engine=engine)
    waiting: list[PlannedStep] = []
    took = []
    for step in chain(steps, [None] * ahead):
        waiting += [step] if step is not None else []
        if step is None or len(waiting) > ahead:
            first = waiting.pop(0)
            own = first.plan.join([torch.zeros(n, dtype=torch.int64) for n in first.plan.lengths])
            engine.step(own, target=own, plan=first.plan)
            took.append(engine.report().segment_sizes)
            assert took[-1] == tuple(first.plan.costs.sizes)
    known = {tokens for _, _, tokens, _, _ in steps._measured}
    assert steps.cost.source is not steps.cost.parts
    assert known <= set(chain(*took[1:])) and len(took) > 6  # the first step's units warm up


def test_a_thread_that_asks_an_engine_for_steps_is_refused() -> None:
    engine = PipelineEngine(nn.Embedding(8, 4), num_microbatches=1, loss_fn=summed, loss=Loss(reduction="sum"))
    steps = iter(batches(1, [20, 30] * 20, tokens_per_step=100, engine=engine))
    plan = next(steps).plan
    own = plan.join([torch.zeros(n, dtype=torch.int64) for n in plan.lengths])
    engine.step(own, target=own, plan=plan)
    with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="asked for in the thread that trains"):
        other.submit(next, steps).result()


@pytest.mark.parametrize(
    ("lengths", "change", "message"),
    [
        ([], {}, "there are no documents"),
        ([5, 0], {}, "document 1 has 0 tokens, must have 1 to"),
        ([5, 2.5], {}, "document 1 has 2.5 tokens"),
        ([5, 9000], {}, "document 1 has 9000 tokens; a step of 8000 has no room .* at least 9000"),
        ([5, 6000], {"num_replicas": 2}, "for each of 2 replicas: .* at least 12000"),
        ([5], {"replica": 2, "num_replicas": 2}, r"replica is 2, must be in 0\.\.1"),
        ([4000] * 3, {"num_replicas": 2}, "the last step .* has 1 documents, fewer than 2 replicas: give drop_last"),
        ([4, 5], {"drop_last": True}, "the documents hold 9 tokens, which fill no step of 8000, and drop_last leaves"),
        ([5], {"memory": 1}, "the smallest budget that does is"),
    ],
)
def test_bad_documents(lengths: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        list(batches(lengths=lengths, **change))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("seq1f1b-plan") and thread.daemon]


def test_a_last_step_that_is_too_small_can_be_left_out() -> None:
    assert [step.tokens for step in batches(lengths=[4000] * 3, num_replicas=2, drop_last=True)] == [8000]


def test_states_that_do_not_fit_are_refused() -> None:
    steps = batches()
    several(steps, 2)
    state = steps.state_dict()
    for change, options, message in (
        ({}, {"lengths": LENGTHS[:-1]}, "documents is 299, the state has 300"),
        ({}, {"lengths": [*LENGTHS[:-1], 7]}, "lengths is .*, the state has"),
        ({}, {"seed": 5}, "seed is 5, the state has 3"),
        ({}, {"tokens_per_step": 9000}, "tokens_per_step is 9000, the state has 8000"),
        ({}, {"drop_last": True}, "drop_last is True, the state has False"),
        ({"begin": 1}, {}, "begin of the state is 1, no step begins there"),
        ({"begin": 300}, {}, "begin of the state is 300, no step begins there"),
        ({"epoch": -1}, {}, "epoch of the state is -1, must be a whole number from 0 on"),
        ({"steps": "2"}, {}, "steps of the state is '2', must be a whole number"),
        ({"format": "other"}, {}, "this is no state of DocumentBatches"),
        ({"more": 1}, {}, "this is no state of DocumentBatches"),
    ):
        fresh = batches(**options)
        before = fresh.state_dict()
        with pytest.raises(ValueError, match=message):
            fresh.load_state_dict(state | change)
        assert fresh.state_dict() == before


def test_an_interrupt_while_a_plan_is_made_is_clean() -> None:
    """Ctrl-C while the first step is planned: KeyboardInterrupt at once, no thread is left behind, the process ends."""
    program = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(__import__("os").path.dirname(__file__))!r})
import seq1f1b.data as documents
import test_documents
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored from birth where the tests run behind a shell
slow = documents.plan_step
def plan_step(*args, **options):
    print("planning", flush=True)
    time.sleep(1.0)
    return slow(*args, **options)
documents.plan_step = plan_step
steps = test_documents.batches()
try:
    for step in steps:
        print("step", flush=True)
except KeyboardInterrupt:
    print("interrupted", steps.state_dict()["steps"], flush=True)
"""
    for steps_before in (0, 1):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(1 + 2 * steps_before):
            process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=30)
        assert f"interrupted {steps_before}" in rest and process.returncode == 0
