"""Training steps over prompts with several responses: trees of segments beside rows and a packed tree mask.

    python benchmarks/tree_steps.py --prompt 2048 --responses 8 --response 256
    python benchmarks/tree_steps.py --prompt 512 --responses 4 --response 512

Two processes of one thread each, the decoder of the other benchmarks, fp32. A step has ``--trees`` prompts. Arms, in
one run and in turn:

trees   our engine: the prompt once, in segments; leaves nested, so many in one unit as ``--siblings`` says
rows    our engine: every response with its own prompt, a micro-batch each in segments, Seq1F1B
packed  torch's Schedule1F1B: a tree is a micro-batch, and scaled_dot_product_attention gets its mask (T, T)

All compute the same loss; their gradients are compared first. Each step of each arm is timed from a barrier to the end
of the slower rank.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import KEPT_HEAP, header, spawn
from decoder import Stage, cross_entropy
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import seq1f1b

HIDDEN, BLOCKS, VOCAB = 256, 4, 1024
Step = tuple[list[Tensor], list[Tensor], dict[str, Any]]  # inputs, targets, and the other arguments of a step


class TreeMaskStage(Stage):
    """Attention by torch over one packed row, with the mask of its tree."""

    def __init__(self, mask: Tensor, *args: Any, **options: Any) -> None:
        super().__init__(*args, attention="whole sequences", **options)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        plain = F.scaled_dot_product_attention

        def masked(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
            return plain(q, k, v, attn_mask=self.mask)

        F.scaled_dot_product_attention = masked
        try:
            return super().forward(x)
        finally:
            F.scaled_dot_product_attention = plain


def tree_mask(prompt: int, responses: int, response: int) -> Tensor:
    length = prompt + responses * response
    of = torch.tensor([-1] * prompt + [i for i in range(responses) for _ in range(response)])
    seen = ((of[:, None] == of[None]) | (of[None] < 0)) & torch.ones(length, length, dtype=torch.bool).tril()
    return torch.zeros(length, length).masked_fill_(
        ~seen, -torch.inf
    )  # added as it is; one of bool is made so each call


class Prompts:
    """Prompts with their responses, as trees and as rows. The responses alone are learnt.

    Args:
        count: prompts. device: of the tokens.
    """

    def __init__(
        self, prompt: int, responses: int, response: int, *, count: int, vocab: int, device: torch.device | None = None
    ) -> None:
        self.prompt, self.responses, self.response = prompt, responses, response
        generator = torch.Generator().manual_seed(0)
        length = prompt + responses * response
        self.trees = [torch.randint(vocab, (1, length), generator=generator).to(device) for _ in range(count)]
        self.targets = [torch.full_like(t, -100) for t in self.trees]
        self.rows, self.row_targets = [], []
        for tokens, target in zip(self.trees, self.targets, strict=True):
            for begin in range(prompt, length, response):
                own = slice(begin, begin + response)
                target[:, begin : own.stop - 1] = tokens[:, begin + 1 : own.stop]
                self.rows.append(torch.cat([tokens[:, :prompt], tokens[:, own]], 1))
                self.row_targets.append(torch.cat([target[:, :prompt], target[:, own]], 1))

    def as_trees(self, siblings: int, segments: int) -> Step:
        """siblings: responses in one unit. segments: of a prompt."""
        sizes = even(self.prompt, segments)
        leaves = [[self.response] * siblings] * (self.responses // siblings)
        own = [*sizes, *(leaf if siblings > 1 else leaf[0] for leaf in leaves)]
        parents = [*range(-1, segments - 1), *[segments - 1] * len(leaves)]
        count = len(self.trees)
        return self.trees, self.targets, {"segment_sizes": [own] * count, "parents": [parents] * count}

    def as_rows(self, segments: int) -> Step:
        sizes = [even(self.prompt + self.response, segments)] * len(self.rows)
        return self.rows, self.row_targets, {"segment_sizes": sizes}


class Arms:
    def __init__(self, rank: int, given: argparse.Namespace) -> None:
        self.rank, self.given = rank, given
        prompt, responses, response = given.prompt, given.responses, given.response
        self.prompts = Prompts(prompt, responses, response, count=given.trees, vocab=VOCAB)
        shape: dict[str, Any] = {"hidden": HIDDEN, "blocks": BLOCKS, "vocab": VOCAB}
        self.ours = Stage(rank, 2, **shape)
        self.engine = seq1f1b.PipelineEngine(
            self.ours, schedule="seq1f1b", num_microbatches=2, num_segments=2, loss_fn=cross_entropy
        )
        self.packed = TreeMaskStage(tree_mask(prompt, responses, response), rank, 2, **shape)
        self.torch = Schedule1F1B(
            PipelineStage(self.packed, rank, 2, torch.device("cpu")), n_microbatches=given.trees, loss_fn=cross_entropy
        )

    def run(self, name: str) -> None:
        given, first = self.given, self.rank == 0
        if name == "packed":
            whole, target = torch.cat(self.prompts.trees), torch.cat(self.prompts.targets)
            self.torch.step(whole) if first else self.torch.step(target=target, losses=[])
            return
        if name == "trees":
            inputs, targets, options = self.prompts.as_trees(given.siblings, given.segments)
        else:
            inputs, targets, options = self.prompts.as_rows(given.row_segments)
        self.engine.step(inputs if first else None, target=None if first else targets, **options)

    def gradients(self, name: str) -> list[Tensor]:
        modules = self.packed if name == "packed" else self.ours
        return [p.grad for p in modules.parameters() if p.grad is not None]

    def clear(self) -> None:
        for module in (self.ours, self.packed):
            module.zero_grad()


def even(tokens: int, count: int) -> list[int]:
    ends = [tokens * i // count for i in range(count + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]


def in_turns(names: Sequence[str], rounds: int, run: Callable[[str], float]) -> dict[str, list[float]]:
    """What ``run`` returns of each arm, by round; every second round goes the other way."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names if i % 2 else names[::-1]:
            found[name].append(run(name))
    return found


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """How many times as long as ours theirs took: the median over the rounds, the least and the most."""
    of_rounds = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    return statistics.median(of_rounds), of_rounds[0], of_rounds[-1]


def timed(run: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def measure(rank: int, given: argparse.Namespace) -> None:
    arms = Arms(rank, given)
    names = ["trees", "rows", "packed"]
    found = {}
    for name in names:
        arms.clear()
        arms.run(name)
        found[name] = [g.clone() for g in arms.gradients(name)]
    for name in names[1:]:
        pairs = zip(found["trees"], found[name], strict=True)
        worst = max(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in pairs)
        if not worst < 1e-4:
            raise RuntimeError(f"gradients of {name} differ from those of trees by {worst:.1e}")

    def once(name: str) -> float:
        arms.clear()
        return timed(lambda: arms.run(name))

    seconds = in_turns(names, given.steps, once)
    if rank == 0:
        what = f"prompt {given.prompt}, {given.responses} responses of {given.response}, {given.trees} trees"
        for name in names:
            s = sorted(seconds[name])
            print(f"{what}: {name:7s} {statistics.median(s):.3f} s [{s[0]:.3f}, {s[-1]:.3f}]")
        for name in names[1:]:
            middle, least, most = ratio(seconds[name], seconds["trees"])
            print(f"{what}: {name} takes {middle:.2f} [{least:.2f}, {most:.2f}] times as long as trees")
    arms.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--trees", type=int, default=2)
    parser.add_argument("--segments", type=int, default=4, help="of a prompt in a tree")
    parser.add_argument("--row-segments", type=int, default=3, help="of a row")
    parser.add_argument("--siblings", type=int, default=2, help="in one unit")
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    if given.responses % given.siblings:
        parser.error("--siblings must divide --responses")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(header("Prompts with several responses, two processes of one thread"))
    sys.stdout.flush()
    os.environ |= KEPT_HEAP
    spawn(2, measure, given)


if __name__ == "__main__":
    main()
