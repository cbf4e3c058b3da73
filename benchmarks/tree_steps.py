"""Training steps over prompts with several responses: trees of segments beside rows and a packed tree mask.

    python benchmarks/tree_steps.py --prompt 2048 --responses 8 --response 256
    python benchmarks/tree_steps.py --prompt 512 --responses 4 --response 512

Two processes of one thread each, the decoder of the other benchmarks, fp32. A step has two prompts. Arms, in one
run and in turn:

trees   our engine: the prompt once, in segments; leaves nested, two in one unit
rows    our engine: every response with its own prompt, a micro-batch each in segments, Seq1F1B
packed  torch's Schedule1F1B: a tree is a micro-batch, and scaled_dot_product_attention gets its mask (T, T)

All compute the same loss; their gradients are compared first. A step counts while other processes use less than 8 % of
a core.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from arms import Arm, EngineArm, take_rounds
from common import KEPT_HEAP, Records, header, parser_of, spawn
from decoder import Stage, cross_entropy
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import seq1f1b

HIDDEN, BLOCKS, VOCAB = 256, 4, 1024
TREES, SEGMENTS, SIBLINGS = 2, 4, 2  # segments of a prompt, and responses in one unit
ROW_SEGMENTS = 3
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
    return torch.zeros(length, length).masked_fill_(~seen, -torch.inf)  # a mask of bool is made so in each call


class Prompts:
    """Prompts with their responses, as trees and as rows. The responses alone are learnt."""

    def __init__(self, prompt: int, responses: int, response: int) -> None:
        self.prompt, self.responses, self.response = prompt, responses, response
        generator = torch.Generator().manual_seed(0)
        length = prompt + responses * response
        self.trees = [torch.randint(VOCAB, (1, length), generator=generator) for _ in range(TREES)]
        self.targets = [torch.full_like(t, -100) for t in self.trees]
        self.rows, self.row_targets = [], []
        for tokens, target in zip(self.trees, self.targets, strict=True):
            for begin in range(prompt, length, response):
                own = slice(begin, begin + response)
                target[:, begin : own.stop - 1] = tokens[:, begin + 1 : own.stop]
                self.rows.append(torch.cat([tokens[:, :prompt], tokens[:, own]], 1))
                self.row_targets.append(torch.cat([target[:, :prompt], target[:, own]], 1))

    def as_trees(self) -> Step:
        leaves = [[self.response] * SIBLINGS] * (self.responses // SIBLINGS)
        own = [*even(self.prompt, SEGMENTS), *leaves]
        parents = [*range(-1, SEGMENTS - 1), *[SEGMENTS - 1] * len(leaves)]
        return self.trees, self.targets, {"segment_sizes": [own] * TREES, "parents": [parents] * TREES}

    def as_rows(self) -> Step:
        sizes = [even(self.prompt + self.response, ROW_SEGMENTS)] * len(self.rows)
        return self.rows, self.row_targets, {"segment_sizes": sizes}


class Packed(Arm):
    def __init__(self, rank: int, prompts: Prompts, shape: dict[str, int]) -> None:
        mask = tree_mask(prompts.prompt, prompts.responses, prompts.response)
        self.modules = [TreeMaskStage(mask, rank, 2, **shape)]
        stage = PipelineStage(self.modules[0], rank, 2, torch.device("cpu"))
        self.torch = Schedule1F1B(stage, n_microbatches=len(prompts.trees), loss_fn=cross_entropy)
        self._tokens = torch.cat(prompts.trees) if rank == 0 else None
        self._target = torch.cat(prompts.targets)

    def step(self) -> None:
        if self._tokens is None:
            self.torch.step(target=self._target, losses=[])
        else:
            self.torch.step(self._tokens)


def even(tokens: int, count: int) -> list[int]:
    ends = [tokens * i // count for i in range(count + 1)]
    return [b - a for a, b in itertools.pairwise(ends)]


def measure(rank: int, given: argparse.Namespace, path: str) -> None:
    prompts = Prompts(given.prompt, given.responses, given.response)
    shape = {"hidden": HIDDEN, "blocks": BLOCKS, "vocab": VOCAB}
    stage = Stage(rank, 2, **shape)
    engine = seq1f1b.PipelineEngine(
        stage, schedule="seq1f1b", num_microbatches=2, num_segments=2, loss_fn=cross_entropy
    )
    steps = {"trees": prompts.as_trees(), "rows": prompts.as_rows()}
    arms: dict[str, Arm] = {
        name: EngineArm([stage], engine, (inputs, targets), **options)
        for name, (inputs, targets, options) in steps.items()
    }
    arms["packed"] = Packed(rank, prompts, shape)
    truth: dict[str, Tensor] = {}
    for name, arm in arms.items():
        arm.step()
        found = {own: gradient.clone() for own, gradient in arm.gradients().items()}
        truth = truth or found
        worst = max(float((found[own] - g).norm() / g.norm().clamp(min=1e-6)) for own, g in truth.items())
        if not worst < 1e-4:
            raise RuntimeError(f"gradients of {name} differ from those of trees by {worst:.1e}")
        arm.zero_grad()
    results = Records(path, given.foreign)
    take_rounds(arms, results, given.steps)
    if rank == 0:
        what = f"prompt {given.prompt}, {given.responses} responses of {given.response}, {TREES} trees"
        for name in arms:
            seconds = sorted(step[0] for step in results.counted(name)[0])
            print(f"{what}: {name:7s} {statistics.median(seconds):.3f} s [{seconds[0]:.3f}, {seconds[-1]:.3f}]")
        for name in ("rows", "packed"):
            print(f"{what}: {results.pairs(name, 'trees').describe(f'{name} over trees')}")
    engine.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--steps", type=int, default=15)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(header("Prompts with several responses, two processes of one thread"))
    sys.stdout.flush()
    os.environ |= KEPT_HEAP
    with tempfile.TemporaryDirectory() as folder:
        spawn(2, measure, given, f"{folder}/results")


if __name__ == "__main__":
    main()
