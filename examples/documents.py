"""Training text as documents of their own lengths, in planned steps, beside batches of windows of one length."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import data
import numpy as np
import ranks
import torch
from torch import Tensor

from seq1f1b import Simulation, build_schedule
from seq1f1b.data import DocumentBatches, PlannedStep
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.step_plan import StepPlan, padded_rows


@dataclass(frozen=True)
class Batch:
    """What one replica trains on in a step.

    inputs, target, options: of `PipelineEngine.step`. weights: of the micro-batches' losses in the loss of the step,
    which sums over all replicas. tokens: of all replicas.
    """

    inputs: Any
    target: Any
    weights: list[float]
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)


class Windows:
    """Batches of random windows of one length, as many as `--batch` says."""

    def __init__(self, tokens: data.Tokens, place: ranks.Place, *, batch: int, microbatches: int, seed: int) -> None:
        self.tokens, self.place, self.size, self.seed = tokens, place, batch, seed
        self.weights = [1 / (microbatches * place.num_replicas)] * microbatches

    def batches(self, start: int) -> Iterator[Batch]:
        """Those of the steps from `start` on, without an end."""
        while True:
            inputs, target = self.tokens.batch(start, batch_size=self.size, seed=self.seed)
            yield Batch(self.place.share(inputs), self.place.share(target), self.weights, inputs.numel())
            start += 1

    def state(self) -> dict[str, Any] | None:
        """Nothing: a batch depends on its step alone."""
        return None


class Documents:
    """Planned steps over the documents of the training text, each of its own length.

    A step has as many tokens as `--batch` windows of `--seq-len`; longer documents are cut into pieces of that length.
    """

    def __init__(
        self,
        tokens: data.Tokens,
        place: ranks.Place,
        cost: CostModel,
        *,
        schedule: str,
        batch: int,
        seed: int,
        unit_tokens: int | None,
    ) -> None:
        self.text = tokens.train
        self.begins, self.lengths = pieces_of(self.text, tokens.seq_len)
        self.steps = DocumentBatches(
            self.lengths,
            cost,
            tokens_per_step=batch * tokens.seq_len,
            seed=seed,
            replica=place.replica,
            num_replicas=place.num_replicas,
            drop_last=True,
            schedule=schedule,
            unit_tokens=unit_tokens,
        )

    def batches(self, start: int) -> Iterator[Batch]:
        """Yields the batches after the loaded state, without an end."""
        while True:
            for step in self.steps:
                yield self.batch(step)

    def batch(self, step: PlannedStep) -> Batch:
        plan = step.plan
        spans = [(self.begins[i], self.lengths[i]) for i in step.documents]
        inputs, target = ([self.read(begin + ahead, length) for begin, length in spans] for ahead in (0, 1))
        options = {
            "kwargs": [{"doc_ids": ids} for ids in plan.doc_ids],
            "loss_weight": step.tokens,  # of all replicas: each token has a target
            "plan": plan,
        }
        weights = [sum(sizes) / step.tokens for sizes in plan.segment_sizes]
        return Batch(plan.join(inputs), plan.join(target), weights, step.tokens, options)

    def read(self, begin: int, length: int) -> Tensor:
        return torch.from_numpy(self.text[begin : begin + length].astype(np.int64))

    def state(self) -> dict[str, Any] | None:
        """Position in the documents, for a checkpoint."""
        return self.steps.state_dict()


def pieces_of(text: Any, longest: int) -> tuple[list[int], list[int]]:
    """First token and number of inputs of every document, or of its pieces. The target of an input is the next token.

    Every document, the last one too, ends with the same token, which stands nowhere else.
    """
    ends = np.flatnonzero(text == text[-1]) + 1
    begins, lengths = [], []
    for first, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        for begin in range(first, end - 1, longest):
            begins.append(begin)
            lengths.append(min(longest, end - 1 - begin))
    return begins, lengths


def print_waste(plan: StepPlan, cost: CostModel, segments: int) -> None:
    """One planned step beside the same documents in rows of one length, simulated with the same costs."""
    longest, rows = max(plan.lengths), padded_rows(plan.lengths, segments, cost.model)
    costs = cost.price_rows(rows)
    order = build_schedule(
        "seq1f1b", num_ranks=cost.num_ranks, num_microbatches=len(rows), num_segments=[len(row.sizes) for row in rows]
    )
    equal = order.simulate(costs.costs(order))

    def line(what: str, *values: str) -> None:
        print(f"{what:28}" + "".join(f"{value:>15}" for value in values))

    shown: list[Simulation] = [plan.simulation, equal]
    print(f"\nits {len(plan.lengths)} documents of {min(plan.lengths)} to {longest} tokens, by the plan's costs:")
    line("", "planned rows", f"rows of {longest}")
    line(
        "rows, segments",
        *(f"{len(counts)}, {sum(counts)}" for counts in (plan.schedule.segments_of, order.segments_of)),
    )
    line("padding", "0.0%", f"{1 - sum(plan.lengths) / (longest * len(rows)):.1%}")
    line("longest unit over the mean", f"{plan.imbalance:.1%}", f"{costs.imbalance:.1%}")
    line("bubble, all ranks", *(f"{each.bubble_ratio:.1%}" for each in shown))
    line("seconds", *(f"{each.makespan:.3f}" for each in shown))
