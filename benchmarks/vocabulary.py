"""What a vocabulary over the ranks saves: memory of the largest rank and the wait for it, beside a head on the last.

    python benchmarks/vocabulary.py [--ranks 4] [--vocab 32768] [--hidden 256] [--tokens 2048] [--steps 4]

Ranks are processes. Two arms have the embedding on the first rank, and the head in the last stage, or in its loss,
where one segment's logits are alive at a time; the third has a shard of both on every rank. Bytes of a rank: weights,
gradients and the state of AdamW, with the most that graphs held at a time, logits included; beside it the growth of the
process's resident memory. Imbalance is the share of their time in which the ranks wait for the busiest: 1 - mean / most
of the seconds in units, each the median over the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import KEPT_HEAP, gathered, header, resident_bytes, spawn
from decoder import HeadLoss, HeadPart, Stage, cross_entropy, make_head
from torch import Tensor, nn

from seq1f1b import PipelineEngine, VocabularyParallelEmbedding, VocabularyParallelHead

MICROBATCHES, SEGMENTS = 4, 4
ARMS = ("head in the last stage", "head in its loss", "vocabulary over the ranks")


def make_engine(arm: str, rank: int, options: argparse.Namespace) -> PipelineEngine:
    P, hidden, vocab = options.ranks, options.hidden, options.vocab
    head: HeadPart = "norm" if arm == ARMS[2] else arm == ARMS[0]
    stage = Stage(rank, P, hidden=hidden, blocks=P, vocab=vocab, head=head)
    loss_fn: Callable[..., Tensor] | None = None
    embedding = None
    if arm == ARMS[0]:
        loss_fn = cross_entropy if rank == P - 1 else None
    elif arm == ARMS[1]:
        loss_fn = HeadLoss(hidden, vocab) if rank == P - 1 else None
    else:
        place = {"rank": rank, "num_ranks": P}
        loss_fn = VocabularyParallelHead(hidden, vocab, **place)
        embedding = VocabularyParallelEmbedding(vocab, hidden, **place)
        loss_fn.load_whole(make_head(hidden, vocab).get_parameter("1.weight"))
        torch.manual_seed(P)  # as `Stage` makes its embedding
        embedding.load_whole(nn.Embedding(vocab, hidden).weight)
        if rank == 0:
            stage.embedding = nn.Identity()
    return PipelineEngine(
        stage,
        num_microbatches=MICROBATCHES,
        num_segments=SEGMENTS,
        loss_fn=loss_fn,
        embedding=embedding,
    )


def run_rank(rank: int, arm: str, options: argparse.Namespace, path: str) -> None:
    before = resident_bytes()
    engine = make_engine(arm, rank, options)
    optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(options.vocab, (MICROBATCHES, options.tokens + 1), generator=generator)
    losses, units = [], []
    for _ in range(options.steps):
        losses.append(sum(map(float, engine.step(tokens[:, :-1], target=tokens[:, 1:] if engine.has_last else None))))
        optimizer.step()
        optimizer.zero_grad()
        report = engine.report(gather=True)
        units.append([[end - start for _, start, end in each.timeline] for each in report.ranks])
    own = report.ranks[rank]
    parameters = list(engine.parameters())
    state = [t for each in optimizer.state.values() for t in each.values() if isinstance(t, Tensor)]
    held = sum(t.nbytes for t in [*parameters, *parameters, *state])  # gradients as large as weights
    graphs = sum(stage.activation_bytes or 0 for stage in own.stages) + own.logit_bytes + own.kv_bytes + own.grad_bytes
    found: dict[str, Any] = {"losses": losses, "held": held, "graphs": graphs}
    found["resident"] = own.process_peak_bytes - before
    if rank == 0:
        of_ranks = zip(*units[1:], strict=True)
        busy = [sum(map(statistics.median, zip(*steps, strict=True))) for steps in of_ranks]
        found["imbalance"] = 1 - statistics.mean(busy) / max(busy)
    everyone = gathered(found)
    if rank == 0:
        Path(path).write_text(json.dumps(everyone), encoding="utf-8")
    engine.close()


def run_arm(arm: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(options.ranks, run_rank, arm, options, f"{folder}/found.json")
        return list(json.loads(Path(folder, "found.json").read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 4), ("vocab", 32768), ("hidden", 256), ("tokens", 2048), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    os.environ.update(KEPT_HEAP)
    print(header("Vocabulary over the ranks"))
    mib = 2**20
    for arm in ARMS:
        found = run_arm(arm, options)
        print(f"\n{arm}\nrank  weights, gradients, AdamW  graphs, logits, KV     all  resident growth  (MiB)")
        for rank, each in enumerate(found):
            parts = each["held"] / mib, each["graphs"] / mib, (each["held"] + each["graphs"]) / mib
            print(f"{rank:4}  {parts[0]:26.1f}  {parts[1]:18.1f}  {parts[2]:6.1f}  {each['resident'] / mib:15.1f}")
        largest = max(each["held"] + each["graphs"] for each in found) / mib
        losses = ", ".join(f"{loss / MICROBATCHES:.4f}" for loss in found[-1]["losses"])
        print(f"largest rank {largest:.1f} MiB; imbalance {found[0]['imbalance']:.1%}; losses {losses}")


if __name__ == "__main__":
    main()
