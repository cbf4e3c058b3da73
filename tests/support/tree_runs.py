"""Steps of rows and trees of segments, and the model run on every path alone: what such a step must equal."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from tiny_model import Config, cross_entropy, stage_of, whole_model
from torch import Tensor

from seq1f1b import PipelineEngine, build_schedule
from seq1f1b.testing import run_ranks

Sizes = list[int | list[int]]

CONFIG = Config(hidden=16, heads=2, kv_heads=1, ffn=16, vocab=13, layers=4)


@dataclass
class Trees:
    """Tokens of the segments of every micro-batch, lists for siblings in one unit, and their parents."""

    sizes: list[Sizes]
    parents: list[list[int] | None]

    def chain(self, m: int) -> list[int]:
        own = self.parents[m]
        return list(range(-1, len(self.sizes[m]) - 1)) if own is None else own


def random_tree(
    rng: random.Random, most_nodes: int = 12, most_depth: int = 5, *, siblings: bool = True
) -> tuple[Sizes, list[int]]:
    """A tree whose numbers are in any order that has parents first; some nodes have one token."""
    parents, depth = [-1], [0]
    for node in range(1, rng.randint(1, most_nodes)):
        parents.append(rng.choice([p for p in range(node) if depth[p] < most_depth]))
        depth.append(depth[parents[-1]] + 1)
    sizes: Sizes = [rng.choice([1, 2, rng.randint(1, 7), rng.randint(3, 11)]) for _ in parents]
    for node in range(1, len(parents)):
        if siblings and node not in parents and rng.random() < 0.4:
            sizes[node] = [rng.randint(1, 6) for _ in range(rng.randint(2, 4))]
    return sizes, parents


def random_trees(rng: random.Random, most_microbatches: int = 4, most_nodes: int = 12, **options: Any) -> Trees:
    found = Trees([], [])
    for _ in range(rng.randint(1, most_microbatches)):
        sizes, parents = random_tree(rng, most_nodes, **options)
        is_chain = rng.random() < 0.2
        found.sizes.append([s if isinstance(s, int) else sum(s) for s in sizes] if is_chain else sizes)
        found.parents.append(None if is_chain else parents)
    return found


def cut(rng: random.Random, length: int, count: int) -> Sizes:
    """A row of this length, in so many segments of random sizes."""
    ends = [0, *sorted(rng.sample(range(1, length), count - 1)), length]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def random_rows(rng: random.Random) -> Trees:
    """Rows of any length, one long and many short, of one token, or of one length; at times in equally many parts."""
    match rng.randrange(4):
        case 0:
            lengths = [rng.randint(1, 24) for _ in range(rng.randint(1, 6))]
        case 1:
            lengths = [60, *(rng.randint(1, 3) for _ in range(rng.randint(2, 6)))]
            rng.shuffle(lengths)
        case 2:
            lengths = [1] * rng.randint(1, 6)
        case _:
            lengths = [rng.randint(4, 12)] * rng.randint(2, 6)
    most = min(lengths) if rng.random() < 0.5 else 0
    counts = [min(most, 2) or rng.randint(1, min(length, 4)) for length in lengths]
    return Trees([cut(rng, *row) for row in zip(lengths, counts, strict=True)], [None] * len(lengths))


def tokens_of(size: int | list[int]) -> int:
    return size if isinstance(size, int) else sum(size)


def paths_of(sizes: Sizes, parents: list[int]) -> list[list[tuple[int, int]]]:
    """For every leaf, the (begin, end) in the micro-batch's tokens of what lies on its path; a sibling is a leaf."""
    begins, at = [], 0
    for size in sizes:
        begins.append(at)
        at += tokens_of(size)
    found = []
    for leaf in range(len(sizes)):
        if leaf in parents:
            continue
        above, node = [], parents[leaf]
        while node >= 0:
            above.append((begins[node], begins[node] + tokens_of(sizes[node])))
            node = parents[node]
        own = begins[leaf]
        for part in [sizes[leaf]] if isinstance(sizes[leaf], int) else sizes[leaf]:  # type: ignore[union-attr]
            found.append([*reversed(above), (own, own + part)])
            own += part
    return found


def along(value: Tensor, path: list[tuple[int, int]]) -> Tensor:
    return torch.cat([value[:, a:b] for a, b in path], 1)


def run_paths(
    model: Any,
    trees: Trees,
    tokens: list[Tensor],
    targets: list[Tensor],
    kwargs: list[dict[str, Tensor]] | None = None,
    total: float | None = None,
) -> tuple[list[Tensor], dict[str, Tensor], list[Tensor]]:
    """Losses of the micro-batches, gradients of the mean over all targets of the step, and every token's loss.

    Each path is run alone, outside any step, and a target counts where the first path has it.

    Args:
        kwargs: of each micro-batch, sliced as its tokens are.
        total: by which the sum of all losses is divided in place of the number of targets.
    """
    model.zero_grad()
    total, losses, of_tokens = total or sum(int((t != -100).sum()) for t in targets), [], []
    for m, sizes in enumerate(trees.sizes):
        values = torch.zeros(targets[m].shape, dtype=next(model.parameters()).dtype)
        seen: set[tuple[int, int]] = set()
        loss: Any = 0.0
        for path in paths_of(sizes, trees.chain(m)):
            given = {} if kwargs is None else {n: along(value, path) for n, value in kwargs[m].items()}
            output, at = model(along(tokens[m], path), **given), 0
            for a, b in path:
                if (a, b) not in seen:
                    seen.add((a, b))
                    logits = output[:, at : at + b - a].flatten(0, 1)
                    each = F.cross_entropy(logits, targets[m][:, a:b].flatten(), reduction="none")
                    values[:, a:b] = each.detach().view(-1, b - a)
                    loss = loss + each.sum()
                at += b - a
        counted = int((targets[m] != -100).sum())
        (loss / max(1, total)).backward()
        losses.append(loss.detach() / max(1, counted))
        of_tokens.append(values)
    return losses, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, of_tokens


def data_of(trees: Trees, seed: int = 0, size: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens and targets of every tree, (size, length); some targets are ignored, in short segments at times all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(CONFIG.vocab, (size, sum(map(tokens_of, s))), generator=generator) for s in trees.sizes]
    targets = []
    for row in tokens:
        target = torch.randint(CONFIG.vocab, row.shape, generator=generator)
        target[torch.rand(target.shape, generator=generator) < 0.3] = -100
        targets.append(target)
    targets[-1][0, 0] = 1  # at least one counts
    return tokens, targets


def train(
    num_ranks: int,
    steps: list[tuple[Trees, list[Tensor], list[Tensor]]],
    *,
    order: dict[str, Any] | None = None,
    kwargs: Any = None,
    **options: Any,
) -> tuple[list[list[Tensor]], dict[str, Tensor], list[Any]]:
    """What steps returned, each after an evaluation of the same; the model's gradients; every rank's report."""
    model = whole_model(CONFIG)
    options |= {"schedule": partial(build_schedule, "seq1f1b", **(order or {})), "loss_fn": cross_entropy}

    def run(group: Any) -> Any:
        stage = stage_of(model, CONFIG, group.rank, num_ranks)
        engine = PipelineEngine(stage, num_microbatches=16, num_segments=4, group=group, **options)
        returned = []
        for trees, tokens, targets in steps:
            given: dict[str, Any] = {"target": targets if engine.has_last else None, "kwargs": kwargs}
            given |= {"segment_sizes": trees.sizes, "parents": trees.parents if any(trees.parents) else None}
            inputs = tokens if engine.has_first else None
            returned += [engine.eval(inputs, **given), engine.step(inputs, **given)]
        gradients = {name: p.grad.clone() for name, p in engine.named_parameters() if p.grad is not None}
        report = engine.report(gather=True)
        engine.close()
        return returned, gradients, report

    found = run_ranks(num_ranks, run)
    merged: dict[str, Tensor] = {}
    for _, gradients, _ in found:
        merged |= gradients
    return next(r for r, *_ in found if r[0]), merged, [report for *_, report in found]
