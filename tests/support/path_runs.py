"""Attention over a tree of segments, unit by unit, and its definition: every path alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from attention_runs import OPTIONS, errors, formula, random_qkv
from simulated_step import SimulatedStep
from torch import Tensor

from seq1f1b.attention.causal import causal_attention, layer_handle

Unit = tuple[str, int]
"""Pass and segment."""


def random_parents(numbers: random.Random, count: int) -> list[int]:
    return [-1, *(numbers.randrange(max(0, s - 3), s) for s in range(1, count))]


def random_order(numbers: random.Random, parents: Sequence[int]) -> list[Unit]:
    """F after the parent's F, B after the children's; each of what may run next as likely."""
    forward: set[int] = set()
    back: set[int] = set()
    order: list[Unit] = []
    segments = range(len(parents))
    while len(back) < len(parents):
        ready = [("F", s) for s in segments if s not in forward and (parents[s] < 0 or parents[s] in forward)]
        ready += [
            ("B", s)
            for s in segments
            if s in forward - back and all(c in back for c in segments if parents[c] == s)
        ]  # fmt: skip
        unit = numbers.choice(ready)
        (forward if unit[0] == "F" else back).add(unit[1])
        order.append(unit)
    return order


def random_rows(numbers: random.Random, order: Sequence[Unit], sizes: Sequence[int]) -> tuple[list[int], int]:
    """Rows of each segment, anywhere that no live one lies, most often where a dead one was; and how many there are."""
    rows, live, end = [0] * len(sizes), set[int](), 0
    for kind, s in order:
        if kind == "B":
            live.remove(s)
            continue
        free = [
            row
            for row in range(end + 2)
            if all(row + sizes[s] <= rows[t] or rows[t] + sizes[t] <= row for t in live)
        ]  # fmt: skip
        rows[s] = numbers.choice(free)
        live.add(s)
        end = max(end, rows[s] + sizes[s])
    return rows, end


def by_paths(
    step: SimulatedStep,
    options: dict[str, Any],
    qkv: Sequence[Tensor],
    dout: Tensor,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """out, dq, dk and dv, by the definition: each part attends at the end of its path, computed for it alone."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in qkv]
    options = dict(options)
    docs = options.pop("doc_ids", None)
    out = dout.new_zeros(dout.shape, dtype=dtype)
    for segment in range(len(step.sizes)):
        before = [t for s in step.path(segment)[:-1] for t in range(*step.slice(s).indices(10**9))]
        for own in step.own_tokens(segment):
            path = [*before, *own]
            mine = {} if docs is None else {"doc_ids": docs[:, path]}
            found = formula(*(t[:, :, path] for t in leaves), **options, **mine)[:, :, len(before) :]
            out[:, :, own] = found.detach()
            found.backward(dout[:, :, own].to(dtype))
    return [out, *(t.grad for t in leaves if t.grad is not None)]


def by_units(
    step: SimulatedStep,
    order: Sequence[Unit],
    options: dict[str, Any],
    qkv: Sequence[Tensor],
    dout: Tensor,
    skipped: Sequence[int] | None = None,
) -> list[Tensor]:
    """out, dq, dk and dv, unit by unit in that order.

    Args:
        skipped: segments that do not go back through a second layer, whose output is added; None: there is none.
    """
    handle, second = layer_handle(0), layer_handle(1)
    options = dict(options)
    docs = options.pop("doc_ids", None)
    leaves: dict[int, list[Tensor]] = {}
    outs: dict[int, Tensor] = {}
    for kind, s in order:
        rows = step.slice(s)
        with step.unit(kind, 0, s):
            if kind == "F":
                leaves[s] = [t[:, :, rows].detach().clone().requires_grad_() for t in qkv]
                mine = {} if docs is None else {"doc_ids": docs[:, rows]}
                outs[s] = causal_attention(*leaves[s], layer=handle, **options, **mine)
                if skipped is not None:
                    again = causal_attention(*leaves[s], layer=second, **options, **mine)
                    outs[s] = outs[s] + (again.detach() if s in skipped else again)
            else:
                outs[s].backward(dout[:, :, rows])
    segments = range(len(step.sizes))
    grads = (torch.cat([leaves[s][i].grad for s in segments], 2) for i in range(3))  # type: ignore[misc] # all have one
    return [torch.cat([outs[s].detach() for s in segments], 2), *grads]


class Case:
    """A random tree of segments of some tokens, with parts in some leaves, in a random order and random rows."""

    def __init__(
        self,
        seed: int,
        *,
        count: int = 7,
        longest: int = 5,
        with_parts: bool = True,
        most_parts: int = 3,
        **options: Any,
    ) -> None:
        numbers = random.Random(seed)
        self.parents = random_parents(numbers, count)
        sizes = [numbers.randint(1, longest) for _ in self.parents]
        parts = {}
        for s in range(count):
            if with_parts and s not in self.parents and numbers.random() < 0.7:
                parts[s] = [numbers.randint(1, longest) for _ in range(numbers.randint(2, most_parts))]
                sizes[s] = sum(parts[s])
        self.order = random_order(numbers, self.parents)
        rows, num_rows = random_rows(numbers, self.order, sizes)
        self.step = SimulatedStep(
            sizes, parents=self.parents, parts=parts, rows=rows, num_rows=num_rows, **options
        )  # fmt: skip
        self.tokens = sum(sizes)


BY_DISTANCE = ("window", "window of 1", "slopes", "slopes per batch", "all")  # siblings refuse them


def errors_of_tree(seed: int, name: str, dtype: torch.dtype, **shape: Any) -> list[float]:
    """Those of a random tree, unit by unit, under options of this name."""
    case, options = Case(seed, with_parts=name not in (*BY_DISTANCE, "documents"), **shape), dict(OPTIONS[name])
    qkv, (dout, *_) = (random_qkv(4, 2, tokens=case.tokens, head_dim=8, dtype=dtype, seed=s) for s in (seed, 9))
    if "doc_ids" in options:
        options["doc_ids"] = torch.arange(2 * case.tokens, dtype=torch.int32).view(2, case.tokens) // 9
    return errors(by_units(case.step, case.order, options, qkv, dout), by_paths(case.step, options, qkv, dout))
