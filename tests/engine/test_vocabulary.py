"""Does a vocabulary that lies on all ranks give the whole model's losses and gradients, and say what it cannot do?"""

from __future__ import annotations

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F
from order_runs import (
    CONFIG,
    LENGTH,
    embedding_of,
    head_of,
    join_rows,
    last_without_head,
    run_order,
)  # fmt: skip
from processes import run_processes
from tiny_model import Config, batch, cross_entropy, gradient_error, run_whole, whole_model
from torch import nn

from seq1f1b import (
    LoopbackGroup,
    Loss,
    Memory,
    PipelineEngine,
    Schedule,
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
    build_schedule,
)
from seq1f1b.testing import run_ranks


def engine_of(model, group, P, k, *, config=CONFIG, head=None, embedding=None, **options):
    """One stage of P for each rank; micro-batches by the schedule, or two."""
    stage = last_without_head(model, config, group.rank, P)
    if embedding is not None and group.rank == 0:
        stage.embedding = nn.Identity()
    head = head_of(model, group.rank, P) if head is None else head
    options = {"num_microbatches": 2, "num_segments": k} | options
    return PipelineEngine(stage, loss_fn=head, embedding=embedding, group=group, **options)


# -- targets and losses ------------------------------------------------------------------------------------------------


def test_large_logits():
    """Logits of 10^3 overflow no exponential."""
    tokens, target = batch(CONFIG, 2, LENGTH)
    schedule = build_schedule("seq1f1b", num_ranks=3, num_microbatches=2, num_segments=2)
    model = whole_model(CONFIG)
    with torch.no_grad():
        model.head.weight *= 1e3
    truth = run_whole(model, tokens, target, 2)
    losses, gradients, _ = run_order(model, schedule, tokens, target, head={})
    assert gradient_error(gradients, truth[1]) <= 1e-10 and float(losses[0]) > 100


def test_autocast():
    tokens, target = batch(CONFIG, 2, LENGTH)
    model = whole_model(CONFIG, torch.float32)
    schedule = build_schedule("seq1f1b", num_ranks=2, num_microbatches=2, num_segments=2)
    exact = run_whole(model, tokens, target, 2)[1]

    def error(gradients):  # of all together: the worst parameter's is a matter of chance where gradients nearly cancel
        pairs = [(gradients[name].flatten(), truth.flatten()) for name, truth in exact.items()]
        found, truth = map(torch.cat, zip(*pairs, strict=True))
        return float((found - truth).norm() / truth.norm())

    with torch.autocast("cpu", torch.bfloat16):
        whole = error(run_whole(model, tokens, target, 2)[1])
        model.zero_grad()
        _, gradients, _ = run_order(model, schedule, tokens, target, head={})
    assert 1e-4 < error(gradients) < 1.5 * whole, "bf16 products, gradients of float32 parameters"
    assert {g.dtype for g in gradients.values()} == {torch.float32}


def test_outputs_are_hidden_states():
    tokens, _ = batch(CONFIG, 2, LENGTH)
    model = whole_model(CONFIG)

    def run_rank(group):
        return engine_of(model, group, 2, 2).eval(tokens, return_outputs=True)

    losses, outputs = run_ranks(2, run_rank)[1]
    with torch.no_grad():
        logits = torch.cat([head_of(model, rank, 2)(outputs) for rank in range(2)], -1)
        assert torch.allclose(logits, model(tokens), rtol=0, atol=1e-12)
    assert losses == []


# -- the embedding -----------------------------------------------------------------------------------------------------


def test_an_embedding_that_is_the_head():
    """One parameter on each rank: no messages, and the sum of both gradients."""
    tokens, target = batch(CONFIG, 2, LENGTH)
    model = whole_model(CONFIG)
    model.head.weight = model.embedding.weight
    truth = run_whole(model, tokens, target, 2)

    def run_rank(group):
        head, embedding = head_of(model, group.rank, 3), embedding_of(model, group.rank, 3)
        head.linear.weight = embedding.layer.weight
        engine = engine_of(model, group, 3, 3, head=head, embedding=embedding)
        goal = target if engine.has_last else None
        found = engine.verify(tokens, target=goal, show=False)
        assert found.ok, found
        losses = engine.step(tokens, target=goal)
        norm = engine.clip_grad_norm_(1e9)
        return losses, {name: p.grad for name, p in engine.named_parameters()}, float(norm), len(engine.edges)

    results = run_ranks(3, run_rank)
    gradients = join_rows([own for _, own, *_ in results])
    assert "head.weight" not in gradients
    assert gradient_error(gradients, truth[1]) <= 1e-10
    norm = float(torch.stack([g.norm() for g in truth[1].values()]).norm())
    assert all(found == pytest.approx(norm, rel=1e-12) for _, _, found, _ in results)


def test_a_frozen_embedding_gets_no_gradient():
    tokens, target = batch(CONFIG, 2, LENGTH)
    model = whole_model(CONFIG)
    truth = run_whole(model, tokens, target, 2)[1]

    def run_rank(group):
        embedding = embedding_of(model, group.rank, 2).requires_grad_(False)
        engine = engine_of(model, group, 2, 2, embedding=embedding)
        engine.step(tokens, target=target if engine.has_last else None)
        assert embedding.layer.weight.grad is None
        return {name: p.grad for name, p in engine.named_parameters() if p.requires_grad}

    gradients = join_rows(run_ranks(2, run_rank))
    del truth["embedding.weight"]
    assert gradient_error(gradients, truth) <= 1e-10


# -- ranks that are processes ------------------------------------------------------------------------------------------


def step_in_process(rank, world, transport):
    """Losses and gradients of a step after one that failed on every rank."""
    model = whole_model(CONFIG)
    tokens, target = batch(CONFIG, 2, LENGTH)
    stage = last_without_head(model, CONFIG, rank, 3)
    if rank == 0:
        stage.embedding = nn.Identity()
    engine = PipelineEngine(
        stage,
        num_microbatches=2,
        num_segments=3,
        loss_fn=head_of(model, rank, 3),
        embedding=embedding_of(model, rank, 3),
        transport=transport,
    )
    goal = target if engine.has_last else None
    wrong = target.clone()
    wrong[3, 5] = CONFIG.vocab
    try:
        engine.step(tokens, target=wrong if engine.has_last else None)
    except (RuntimeError, ValueError) as error:
        message = str(error)
    losses = engine.step(tokens, target=goal)
    gradients = {name: p.grad.numpy() for name, p in engine.named_parameters()}
    edges = {edge.transport for edge in engine.edges}
    engine.close()
    return [float(loss) for loss in losses], gradients, message, edges


@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_processes(transport):
    model = whole_model(CONFIG)
    tokens, target = batch(CONFIG, 2, LENGTH)
    truth = run_whole(model, tokens, target, 2)
    results = run_processes(3, step_in_process, transport)
    gradients = join_rows([{n: torch.from_numpy(g) for n, g in own.items()} for _, own, *_ in results])
    assert gradient_error(gradients, truth[1]) <= 1e-10
    assert results[2][0] == pytest.approx([float(loss) for loss in truth[0]], abs=1e-12)
    for _, _, message, edges in results:
        assert "the target holds 17, must be in 0..16" in message
        assert edges == {transport}


# -- losses of tokens --------------------------------------------------------------------------------------------------


def clipped(log_probs, target):
    """The loss of a policy where old log-probabilities are given, else log-probabilities themselves."""
    if "old" not in target:
        return log_probs
    gains = torch.stack([(log_probs - target["old"]).exp() + x for x in (0, target["pairs"].sum(-1))])
    return -gains.amin(0) * target["weights"]


def labels_of(config):
    """Tokens, and what they have as targets: no label counts in the second segment of the first micro-batch."""
    tokens, labels = batch(config, 2, LENGTH)
    rng = torch.Generator().manual_seed(2)
    labels = labels.masked_fill(torch.rand(labels.shape, generator=rng) < 0.3, -100)
    labels[: len(labels) // 2, 5:9] = -100
    old, weights = torch.randn(2, *labels.shape, generator=rng).double()
    pairs = torch.randn(*labels.shape, 2, generator=rng).double()
    return tokens, {"labels": labels, "old": old, "weights": weights * (labels != -100), "pairs": pairs}


@pytest.mark.parametrize(("P", "name", "recompute"), [(2, "seq1f1b", "all"), (3, "seq-zb-h1", "none")])
def test_a_loss_of_tokens(P, name, recompute):
    """Values and gradients are those of the whole model's log-probabilities, whatever ranks hold the words; without a
    target that counts, values are zeros of that shape."""
    config = dataclasses.replace(CONFIG, layers=P)
    (tokens, target), model = labels_of(config), whole_model(config)
    labels, nothing = target["labels"], {"labels": torch.full_like(target["labels"], -100)}
    losses = F.cross_entropy(model(tokens).transpose(1, 2), labels, reduction="none")
    log_probs = -losses.detach()
    truth = clipped(-losses, target)
    total = (labels != -100).view(2, -1).sum(1)
    sum(row.sum() / count / 2 for row, count in zip(truth.chunk(2), total, strict=True)).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()

    def work(group):
        head = head_of(model, group.rank, P, token_loss=clipped, per_token=["old", "weights", "pairs"])
        options = {"segment_sizes": [5, 4, 4], "memory": Memory(recompute=recompute)}
        engine = engine_of(model, group, P, 3, config=config, head=head, schedule=name, **options)
        found = engine.eval(tokens, target={"labels": labels}), engine.step(tokens, target=target)
        gradients = {name: p.grad.clone() for name, p in engine.named_parameters()}
        verified = engine.verify(tokens, target=target, show=False).ok
        return *found, engine.eval(tokens, target=nothing), gradients, verified

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="no target of this step is counted")
        results = run_ranks(P, work)
    *found, _, verified = results[-1]
    for own, values in zip(found, (log_probs, truth.detach(), torch.zeros_like(log_probs)), strict=True):
        torch.testing.assert_close(torch.cat(own), values, rtol=0, atol=1e-12)
    assert gradient_error(join_rows([own for *_, own, _ in results]), wanted) <= 1e-10
    assert verified


# -- what cannot be ----------------------------------------------------------------------------------------------------


def alone(stage=None, x=None, y=None, num_microbatches=1, **options):
    """One rank's engine, and its step where inputs or targets are given."""
    stage = nn.Linear(4, 4) if stage is None else stage
    engine = PipelineEngine(stage, num_microbatches=num_microbatches, group=LoopbackGroup(1)[0], **options)
    return engine if y is None else engine.step(x, target=y)


def spread(x, **options):
    """A step over a spread embedding."""
    embedding, loss_fn = VocabularyParallelEmbedding(9, 4), lambda y, target: y.square().mean()
    return alone(x=x, y=torch.tensor([[1, 2, 9]]), embedding=embedding, loss_fn=loss_fn, **options)


def head(target, num_words=9, hidden=4, **options):
    """A step whose head is spread."""
    return alone(x=torch.zeros(1, 3, 4), y=target, loss_fn=VocabularyParallelHead(hidden, num_words, **options))


LABELS = torch.zeros(1, 3, dtype=torch.long)
OLD = {"token_loss": clipped, "per_token": ["old"]}
CANNOT = [
    (lambda: VocabularyParallelHead(8, 3, rank=0, num_ranks=4), "a vocabulary of 3 rows of 8 has none for each of 4"),
    (lambda: VocabularyParallelHead(8, 30, rank=4, num_ranks=4), r"rank is 4, must be in 0\.\.3"),
    (lambda: VocabularyParallelHead(8, 30, label_smoothing=2), r"label_smoothing is 2, must be in 0\.\.1"),
    (lambda: VocabularyParallelHead(8, 30, z_loss=-1), "z_loss is -1, must be at least 0"),
    (lambda: VocabularyParallelHead(4, 9, token_loss=clipped, z_loss=0.1), "label_smoothing and z_loss must be 0"),
    (
        lambda: VocabularyParallelHead(4, 9, per_token=["old"]),
        r"per_token is \['old'\], must be a list of names for token_loss",
    ),
    (lambda: VocabularyParallelHead(8, 30).load_whole(torch.zeros(29, 8)), r"weight is \(29, 8\), must be \(30, 8\)"),
    (
        lambda: head(LABELS, rank=1, num_ranks=2),
        r"holds shard 1 of 2, on rank 0 of 1 .*: make it with rank=0, num_ranks=1",
    ),
    (
        lambda: alone(schedule=Schedule.from_text("F0.0 S0.0 T0.0 B0.0"), loss_fn=cross_entropy),
        r"the order spreads the vocabulary .*: give loss_fn=VocabularyParallelHead",
    ),
    (
        lambda: alone(schedule=Schedule.from_text("E0.0 F0.0 B0.0 G0.0")),
        "the order spreads the vocabulary over the ranks: give embedding=Vocabulary",
    ),
    (lambda: head(LABELS, hidden=5), r"must return the hidden state, \(\.\.\., 5\), .*; it returned \(1, 3, 4\)"),
    (lambda: head(LABELS[:, :2]), r"the target is \(1, 2\), must be whole numbers of the shape \(1, 3\)"),
    (
        lambda: head({"labels": LABELS}),
        r"a dict of \['labels'\], and cross entropy takes labels alone: give .* token_loss=",
    ),
    (
        lambda: head({"labels": LABELS, "new": LABELS}, **OLD),
        r"a dict of \['labels', 'new'\], must hold 'labels', and no other names .* per_token=\('old',\)",
    ),
    (
        lambda: head({"labels": LABELS, "old": LABELS[:, 0]}, **OLD),
        r"'old' of the target must have a value for each label, \(1, 3\)",
    ),
    (lambda: head(LABELS, token_loss=lambda x, _: x.sum()), r"must return one value per token, \(1, 3\), got \(\)"),
    (lambda: head(LABELS, token_loss=lambda x, _: x.detach()), "returned values that do not require grad"),
    (lambda: spread(torch.tensor([[1, 2, 9]])), r"inputs hold 9, must be in 0\.\.8"),
    (lambda: spread(torch.zeros(1, 3)), "inputs must be one tensor of token numbers"),
    (lambda: spread(None), "inputs are needed on every rank: the embedding is spread"),
    (lambda: alone(embedding=nn.Embedding(4, 4)), "embedding must be a VocabularyParallelEmbedding, got Embedding"),
]


@pytest.mark.parametrize(("call", "words"), CANNOT)
def test_what_cannot_be(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_a_shard_has_its_rows_and_no_loss_of_its_own():
    shard = VocabularyParallelHead(8, 30, rank=1, num_ranks=4)
    assert (shard.rows, shard.linear.out_features) == (slice(8, 16), 8)
    with pytest.raises(RuntimeError, match="a shard of the vocabulary has no loss of its own: give it to Pipeline"):
        shard(torch.zeros(2, 3, 8), torch.zeros(2, 3, dtype=torch.long))


def test_the_engine_runs_a_plan_with_its_vocabulary_over_the_ranks(tmp_path):
    """The plan's file places S, T, E and G; losses are those of the whole model."""
    from seq1f1b import ModelShape
    from seq1f1b.planning.hardware import load_hardware
    from seq1f1b.planning.search import search_plans

    config = Config()
    shape = ModelShape(hidden=32, layers=4, heads=4, kv_heads=4, ffn=32, vocab=29)
    counts = {"seq_len": 16, "num_ranks": 2, "num_microbatches": 4, "within": 1e9, "best": 100}
    some = {"names": ["seq1f1b"], "segments": [4], "stages_per_rank": [1], "inside": ["none"]}
    machine = dataclasses.replace(load_hardware("a100"), unit_overhead=0.0, launch=1e-9)  # the head is what takes long
    plans = search_plans(shape, machine, **counts, **some).plans
    plan = next(plan for plan in plans if plan.layout.vocabulary == "ranks")
    plan.save(tmp_path / "plan.json")
    model = whole_model(config)
    tokens, target = batch(config, 4, 16, size=1)

    def run(group):
        options = {"num_microbatches": None, "schedule": tmp_path / "plan.json", "loss": Loss(weight="microbatches")}
        engine = engine_of(model, group, 2, 1, config=config, embedding=embedding_of(model, group.rank, 2), **options)
        assert engine.schedule == plan.build() and {"S", "T", "E", "G"} <= engine.schedule.kinds
        return engine.step(tokens, target=target)

    _, losses = run_ranks(2, run)
    torch.testing.assert_close(torch.stack(losses), torch.stack(run_whole(model, tokens, target, 4)[0]))
