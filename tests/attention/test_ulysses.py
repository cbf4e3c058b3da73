"""Do ranks that share each segment's tokens get the gradients of one process? Does a lost rank end the step?"""

from __future__ import annotations

import datetime
import os
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import run_processes, running
from tiny_model import Config, Stage, cross_entropy, full_gradient, gradient_error, whole_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seq1f1b
from seq1f1b import Loss, PipelineEngine, PipelineError
from seq1f1b.testing import run_ranks

HEAD_DIM, VOCAB, LENGTH, M, K, PARTS = 8, 19, 22, 2, 3, 2
SIZES = [10, 2, 10]
SHAPE = seq1f1b.ModelShape(hidden=8, layers=2, heads=1, kv_heads=1, ffn=0, vocab=0)
DOCUMENTS = [[4, 6, 12], [22], [1, 10, 1, 10], [5, 5, 5, 7]]  # of 4 rows


@dataclass(frozen=True)
class Case:
    heads: int = 4
    kv_heads: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    documents: str = ""  # "" | "part": given as the rank's tokens | "segment": as the whole segment's
    wrapper: str = "ddp"
    compiled: bool = False
    checkpointed: bool = False
    sizes: Any = None
    loss_weight: bool = False
    sinks: bool = False
    reduction: str = "mean"
    v_head_dim: int = HEAD_DIM

    @property
    def config(self) -> Config:
        given = {"sinks": self.sinks, "v_head_dim": self.v_head_dim, "options": self.options}
        hidden = self.heads * HEAD_DIM
        return Config(hidden, self.heads, self.kv_heads, hidden, VOCAB, 2, self.checkpointed, **given)


class SharingStage(Stage):
    """A stage, half of the model or all, that shares each segment with the ranks of a group."""

    def __init__(self, index: int, num_stages: int, case: Case, group: Any) -> None:
        super().__init__(case.config, 2 * index // num_stages, 2 * (index + 1) // num_stages)
        self.part = dist.get_rank(group), dist.get_world_size(group)
        for block in self.blocks.values():
            block.attention = partial(seq1f1b.ulysses_attention, group=group)
        state = whole_model(case.config).state_dict()
        self.double().load_state_dict({name: state[name] for name in self.state_dict()})

    def embed(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:
        tokens = x.shape[1]
        if doc_ids is not None and doc_ids.shape[1] > tokens:  # of the whole segment
            doc_ids = doc_ids[:, self.part[0] * tokens : (self.part[0] + 1) * tokens]
        return self.embedding(x) + self.position(seq1f1b.positions(x, doc_ids=doc_ids, sequence_parallel=self.part))


def make_batch() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (2 * M, LENGTH), generator=torch.Generator().manual_seed(1))
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in DOCUMENTS])
    target = seq1f1b.shift_labels(tokens, doc_ids=ids)
    target[:2, 5:10] = -100  # the second part of the first segment has none in the first micro-batch
    target[2, 7:] = -100
    return tokens, target, seq1f1b.document_starts(ids)


def run_whole(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses of the micro-batches and gradients, by one process and without segments."""
    model = whole_model(case.config)
    tokens, target, doc_ids = make_batch()
    losses = []
    for x, y, ids in zip(tokens.chunk(M), target.chunk(M), doc_ids.chunk(M), strict=True):
        output = model(x, **({"doc_ids": ids} if case.documents else {}))
        losses.append(F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction=case.reduction))
    if case.loss_weight:
        counts = [(y != -100).sum() for y in target.chunk(M)]
        total = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    else:
        total = torch.stack(losses).mean()
    total.backward()
    return [loss.detach() for loss in losses], {name: p.grad for name, p in model.named_parameters()}


def wrap(case: Case, stage: SharingStage, mesh: Any) -> nn.Module:
    if case.compiled:
        stage.compile(fullgraph=True, backend="aot_eager")
    if case.wrapper == "fsdp":
        return fully_shard(stage, mesh=mesh)
    return DistributedDataParallel(stage, process_group=mesh.get_group(), init_sync=False)


def train(case: Case, mesh: Any) -> None:
    index, num_stages, group = mesh.get_local_rank("pipeline"), mesh["pipeline"].size(), mesh.get_group("sequence")
    is_last = index == num_stages - 1
    part = (mesh.get_local_rank("sequence"), PARTS)
    tokens, target, doc_ids = make_batch()
    want_losses, want = run_whole(case)
    segment_rule = lambda s: doc_ids.chunk(M)[s.microbatch][:, s.offset - part[0] * s.length :][:, : 2 * s.length]  # noqa: E731
    engine = PipelineEngine(
        wrap(case, SharingStage(index, num_stages, case, group), mesh["sequence"]),
        num_microbatches=M,
        num_segments=K,
        segment_sizes=SIZES if case.sizes is None else case.sizes,
        arg_rules={"doc_ids": segment_rule if case.documents == "segment" else "slice"} if case.documents else None,
        loss_fn=lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), reduction=case.reduction),
        loss=Loss(reduction=case.reduction),
        group=mesh.get_group("pipeline"),
        sequence_parallel=part,
    )
    kwargs = {"doc_ids": doc_ids} if case.documents == "part" else None
    for _ in range(2):
        losses = engine.step(
            tokens if index == 0 else None,
            target=target if is_last else None,
            kwargs=kwargs,
            loss_weight=float((target != -100).sum()) if case.loss_weight else None,
        )
        if is_last:
            found = torch.stack(losses)
            dist.all_reduce(found, group=group)
            torch.testing.assert_close(found / PARTS, torch.stack(want_losses), rtol=1e-12, atol=0)
        gradients = {name.replace("module.", ""): full_gradient(p.grad) for name, p in engine.named_parameters()}
        assert gradient_error(gradients, {name: want[name] for name in gradients}) < 1e-10, case
        for parameter in engine.parameters():
            parameter.grad = None
    assert (
        all(size % PARTS == 0 for size in engine._runner.last_step.sizes) and len(engine._runner.last_step.sizes) == K
    )
    evaluated = engine.eval(tokens if index == 0 else None, target=target if is_last else None, kwargs=kwargs)
    assert not is_last or torch.equal(torch.stack(evaluated), torch.stack(losses)), case
    dist.barrier()
    engine.close()


CASES = [
    Case(),
    Case(heads=6, kv_heads=3, options={"window": 4, "softcap": 2.0}),  # 2 ranks do not divide 3
    Case(kv_heads=1, options={"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}, documents="part"),
    Case(kv_heads=4, documents="segment", options={"window": 7}, wrapper="fsdp", sizes=SHAPE),
    Case(documents="part", sizes=SHAPE, loss_weight=True),
    Case(documents="part", sinks=True, v_head_dim=5),
    Case(checkpointed=True, reduction="sum", sizes=None),
]


def train_all(rank: int, world: int, cases: list[Case]) -> None:
    mesh = init_device_mesh("cpu", (world // PARTS, PARTS), mesh_dim_names=("pipeline", "sequence"))
    for case in cases:
        train(case, mesh)


def test_two_stages_of_two_ranks_each():
    run_processes(4, train_all, CASES)


def test_a_compiled_stage_of_two_ranks():
    run_processes(2, train_all, [Case(compiled=True, documents="part", kv_heads=1, v_head_dim=5)])


# -- a rank that is lost -----------------------------------------------------------------------------------------------

GROUP_SECONDS = 6


class Trapped(SharingStage):
    """Does not come to its fourth attention."""

    trap, calls = "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4 and self.trap == "killed":
            os._exit(3)
        if self.calls == 4 and self.trap == "asleep":
            time.sleep(1.5 * GROUP_SECONDS)
        return super().forward(x)


def lose_a_rank(rank: int, pipe: Connection, trap: str) -> None:
    """Sends after how many seconds this rank hears of it, whether by a PipelineError, and its text."""
    limit = datetime.timedelta(seconds=GROUP_SECONDS)
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    shards = [dist.new_group([0, 1], timeout=limit), dist.new_group([2, 3], timeout=limit)]
    index, part = divmod(rank, 2)
    stage = Trapped(index, 2, Case(), shards[index])
    stage.trap = trap if rank == 3 else ""
    engine = PipelineEngine(
        stage, num_microbatches=M, num_segments=K, segment_sizes=SIZES, loss_fn=cross_entropy,
        sequence_parallel=(part, 2), group=pipelines[part],
    )  # fmt: skip
    tokens, target, _ = make_batch()
    dist.barrier()
    start = time.monotonic()
    with pytest.raises(Exception) as caught:
        engine.step(tokens if index == 0 else None, target=target if index == 1 else None)
    found = time.monotonic() - start, isinstance(caught.value, PipelineError), str(caught.value)
    pipe.send(("result", found))  # before the engine goes, whose groups lack a rank


@pytest.mark.parametrize("trap", ["killed", "asleep"])
def test_a_rank_lost_before_its_all_to_all_ends_the_step_on_the_others(trap, tmp_path):
    with running(4, tmp_path, lose_a_rank, trap) as ranks:
        seconds, kinds, texts = zip(*(ranks.result(rank, 100.0) for rank in range(3)), strict=True)
        for process in ranks.processes:
            process.kill()
    assert max(seconds) < 2 * GROUP_SECONDS + 20  # the time-out or the sleep, and a slow machine
    assert texts[2].startswith("[1]F1.0")  # its peer in the group, in the same attention
    assert kinds[0] and "rank 1" in texts[0]  # the peer's neighbour in the pipeline hears of it


# -- the engine's part, in one process ---------------------------------------------------------------------------------


class TokenWise(nn.Module):
    def __init__(self, part: tuple[int, int]) -> None:
        super().__init__()
        self.part = part
        self.linear = nn.Linear(3, 3)
        self.position = nn.Embedding(12, 3)

    def forward(self, x: Tensor, scale: Tensor | None = None, where: Any = None) -> Tensor:
        positions = seq1f1b.positions(x, sequence_parallel=self.part)
        if where is not None:
            assert positions.tolist() == list(range(where.offset, where.offset + where.length))
            assert seq1f1b.token_offset(sequence_parallel=self.part) == where.offset
        seq1f1b.add_loss(x.square().mean() * self.linear.weight.sum())
        return self.linear(x * scale) + self.position(positions)


def test_shards_average_to_the_whole():
    """Inputs, keywords, targets, callable rules, positions, auxiliary losses: of a stage that mixes no tokens."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 12, 3, generator=generator, dtype=torch.float64)
    scale = torch.randn(4, 12, 1, generator=generator, dtype=torch.float64)
    target = torch.randint(3, (4, 12), generator=generator)
    target[torch.rand(target.shape, generator=generator) < 0.3] = -100
    target[:2, 8:] = -100
    losses, gradients = [], []
    for part in [(0, 1), (0, 2), (1, 2)]:
        torch.manual_seed(0)
        module = TokenWise(part).double()
        engine = PipelineEngine(
            module, num_microbatches=2, num_segments=3, segment_sizes=[4, 6, 2], sequence_parallel=part,
            loss_fn=cross_entropy, arg_rules={"scale": "slice", "where": lambda segment: segment},
        )  # fmt: skip
        losses.append(torch.stack(engine.step(x, target=target, kwargs={"scale": scale})))
        gradients.append({name: p.grad for name, p in module.named_parameters()})
    torch.testing.assert_close((losses[1] + losses[2]) / 2, losses[0], rtol=1e-12, atol=0)
    mean = {name: (gradients[1][name] + gradients[2][name]) / 2 for name in gradients[0]}
    assert gradient_error(mean, gradients[0]) < 1e-12


def test_what_shards_cannot_do_is_an_error_that_says_so():
    x = torch.zeros(2, 12, 3)
    for part in [(2, 2), (-1, 2), 2]:
        with pytest.raises(ValueError, match=r"sequence_parallel is .* must be"):
            PipelineEngine(nn.Linear(3, 3), num_microbatches=1, sequence_parallel=part)
    for length, sizes, text in [
        (12, [5, 4, 3], "segment 0 has 5 tokens, which the 2 ranks of sequence_parallel= do not divide"),
        (11, None, "pad the sequence of 11 tokens to a multiple of 2"),
    ]:
        engine = PipelineEngine(
            nn.Linear(3, 3), num_microbatches=1, num_segments=3, segment_sizes=sizes, sequence_parallel=(0, 2),
            loss_fn=cross_entropy,
        )  # fmt: skip
        with pytest.raises(ValueError, match=text):
            engine.step(x[:, :length], target=torch.zeros(2, length, dtype=torch.int64))
    with pytest.raises(ValueError, match="outside a step"):
        seq1f1b.token_offset(sequence_parallel=(1, 2))


def refusals(rank: int, world: int) -> None:
    """Found before the first message, on every rank."""
    q, k, docs = torch.zeros(1, 4, 6, 8), torch.zeros(1, 3, 6, 8), torch.zeros(1, 9, dtype=torch.int32)
    group = dist.group.WORLD
    for arguments, options, text in [
        ((q[:, :3], k, k), {}, "q has 3 heads, which the 2 ranks of the group do not divide"),
        ((q, k, k), {}, "kv_heads must divide heads"),
        ((q, q, q), {"doc_ids": docs}, r"doc_ids is \(1, 9\), must be \(1, 6\), as q, or .* segment, \(1, 12\)"),
    ]:
        with pytest.raises(ValueError, match=text):
            seq1f1b.ulysses_attention(*arguments, group=group, layer=0, **options)

    def without_part(engine_group: Any) -> None:
        engine = PipelineEngine(
            SharingStage(0, 2, Case(), group),
            num_microbatches=1,
            num_segments=2,
            loss_fn=cross_entropy,
            group=engine_group,
        )
        with pytest.raises(ValueError, match=r"give the engine sequence_parallel=\(rank, 2\)|\(parts: 2\)"):
            engine.step(torch.zeros(1, 8, dtype=torch.int64), target=torch.zeros(1, 8, dtype=torch.int64))

    run_ranks(1, without_part)


def test_attention_refuses_before_it_sends():
    run_processes(2, refusals)
