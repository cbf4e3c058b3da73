"""Runs any order in an engine over ranks that are threads, and lists what the families allow of small counts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch
from tiny_model import Config, cross_entropy, stage_of
from torch import nn

from seq1f1b import PipelineEngine, VocabularyParallelEmbedding, VocabularyParallelHead
from seq1f1b.schedule import families
from seq1f1b.testing import run_ranks

LENGTH = 13
CONFIG = Config(hidden=16, heads=2, kv_heads=1, ffn=24, vocab=17, layers=8, sinks=True, v_head_dim=5)
SIZES = {1: [13], 2: [12, 1], 3: [1, 7, 5], 4: [6, 1, 2, 4]}


def last_without_head(model, config, index, num_stages):
    """A stage whose last one returns the hidden state."""
    stage = stage_of(model, config, index, num_stages)
    if index == num_stages - 1:
        stage.head = nn.Identity()
    return stage


def head_of(model, rank, num_ranks, **options):
    vocab, hidden = model.head.weight.shape
    head = VocabularyParallelHead(hidden, vocab, rank=rank, num_ranks=num_ranks, bias=True, **options)
    head = head.to(model.head.weight.dtype)
    head.load_whole(model.head.weight, model.head.bias)
    return head


def embedding_of(model, rank, num_ranks):
    shard = VocabularyParallelEmbedding(*model.embedding.weight.shape, rank=rank, num_ranks=num_ranks)
    shard = shard.to(model.embedding.weight.dtype)
    shard.load_whole(model.embedding.weight)
    return shard


def join_rows(found, is_spread=True):
    """Gradients by name from those of ranks: rows of shards in order, or copies of tied parameters, which are equal."""
    gradients = {name: g for own in found for name, g in own.items()}
    assert is_spread or all(torch.equal(g, gradients[name]) for own in found for name, g in own.items())
    shared = is_spread * [name for name in gradients if sum(name in own for own in found) > 1]
    return gradients | {name: torch.cat([own[name] for own in found]) for name in shared}


def run_order(model, schedule, tokens, target, *, config=CONFIG, head=None, **options):
    """Losses of the last stage, gradients of all stages by name, and reports, after a step.

    Args:
        head: options of a vocabulary's shards, which take the place of the last stage's head; None: there are none.
    """

    def run(group):
        num_ranks, make = schedule.num_ranks, stage_of if head is None else last_without_head
        own = [s for s, rank in enumerate(schedule.rank_of_stage) if rank == group.rank]
        stages = [make(model, config, s, schedule.num_stages) for s in own]
        counts = {"num_microbatches": schedule.num_microbatches, "num_segments": schedule.num_segments}
        loss_fn = cross_entropy if head is None else head_of(model, group.rank, num_ranks, **head)
        engine = PipelineEngine(stages, schedule=schedule, loss_fn=loss_fn, group=group, **counts, **options)
        losses = engine.step(tokens, target=target if engine.has_last else None)
        return losses, {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}, engine.report()

    results = run_ranks(schedule.num_ranks, run)
    gradients = join_rows([found for _, found, _ in results])
    return next(losses for losses, _, _ in results if losses), gradients, [report for _, _, report in results]


Case = tuple[str, int, int, int, int, bool]


def cases() -> Iterator[Case]:
    """(family, P, M, k, v, uneven): all that a family allows of P 1-4, M up to 2P and k up to 4."""
    for family in families():
        for P, k, v in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (family.stages_per_rank, 2)):
            for M in range(1, 2 * P + 1):
                counts = {"num_ranks": P, "num_microbatches": M, "num_segments": k, "stages_per_rank": v}
                if v >= family.stages_per_rank and family.broken_rule(**counts) is None:
                    yield from ((family.name, P, M, k, v, uneven) for uneven in ((False, True) if k > 1 else (False,)))


@functools.cache
def all_cases() -> tuple[Case, ...]:
    return tuple(dict.fromkeys(cases()))
