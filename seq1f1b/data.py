"""A sampler over documents of any length: every step takes as many documents as a budget of tokens allows."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch.utils.data import Sampler

from seq1f1b.engine.engine import PipelineEngine
from seq1f1b.flat import whole
from seq1f1b.planning.cost import CostModel
from seq1f1b.planning.prefix_trees import PrefixTrees
from seq1f1b.planning.step_plan import StepPlan, plan_step, share_documents
from seq1f1b.planning.step_rows import TreeShape, tokens_of
from seq1f1b.report.report import PipelineReport
from seq1f1b.seconds import Fit, spans_of, terms_of

__all__ = ["DocumentBatches", "PlannedStep", "PrefixTrees", "TreeShape"]

_FORMAT = "seq1f1b documents 1"
_SCALES = (1.0, 1.0, 0.5, 2.0)  # factors on units' lengths in the first steps; all but the first step are measured


@dataclass(frozen=True)
class PlannedStep:
    """One step of one replica.

    Attributes:
        documents: indices of the replica's documents; ``plan.join`` takes tokens or labels in this order.
        plan: rows, segments and order, for ``engine.step(plan=)``.
        tokens: number of tokens on all replicas, for ``engine.step(loss_weight=)`` if every token has a target.
        epoch: number of the epoch, from 0.
        step: number of earlier steps, over all epochs.
    """

    documents: tuple[int, ...]
    plan: StepPlan
    tokens: int
    epoch: int
    step: int


class DocumentBatches(Sampler[PlannedStep]):
    """Planned steps over documents of any length. Iterating gives the remaining steps of an epoch.

    The documents of an epoch are in a random order that depends on seed and epoch alone. A step takes as many of the
    next documents as ``tokens_per_step`` allows, and shares them among the replicas of data parallelism by work. So the
    documents of every step do not depend on the number of ranks and replicas. A thread plans the next step during the
    current step. Give the sampler to a ``DataLoader(sampler=..., batch_size=None)`` or iterate over the sampler; every
    rank makes a sampler.

    Args:
        lengths: tokens of each document of the data; or trees: ``PrefixTrees.shapes``; or both mixed.
        cost: costs of the model on a machine, for the pipeline of one replica.
        tokens_per_step: most tokens of a step, on all replicas together.
        seed: seed of the random order of documents. None: the order of ``lengths``.
        replica, num_replicas: this replica's number, and the number of replicas of data parallelism.
        drop_last: leaves out the last step of every epoch, which may be small.
        engine: the engine that runs the steps, in order. The first steps have units of several lengths and measure
            them, and the measured times plan later steps, so ``cost`` needs no profile. All ranks iterate alike, in the
            training threads; steps may be asked for ahead.
        options: keyword arguments of :func:`seq1f1b.planning.step_plan.plan_step`, such as ``memory``.
    Raises:
        TypeError, ValueError: a document is no whole number, is empty, or is so long that a step of one document per
            replica exceeds ``tokens_per_step``: the error names the document and the least ``tokens_per_step``; there
            are no documents; a number is out of range. While iterating: ``plan_step`` refuses an argument, the last
            step has fewer documents than replicas, or an epoch has no step.

    Attributes:
        cost: costs for planning the next steps: the given costs, or costs of the engine's units once measured.
    """

    def __init__(
        self,
        lengths: Sequence[int | TreeShape],
        cost: CostModel,
        *,
        tokens_per_step: int,
        seed: int | None = 0,
        replica: int = 0,
        num_replicas: int = 1,
        drop_last: bool = False,
        engine: PipelineEngine | None = None,
        **options: Any,
    ) -> None:
        self._documents, self._given, self._tokens, self._seed = tuple(lengths), cost, tokens_per_step, seed
        self.cost = cost
        self._engine, self._looks, self._unit = engine, 0, 0
        self._measured: list[tuple[str, int, float, float, float]] = []  # pass, stage, tokens, pairs, seconds of units
        self._ahead: list[StepPlan] = []  # plans handed out and not measured yet
        self._replica, self._num_replicas, self._options = replica, num_replicas, options
        self._drop_last = drop_last
        whole("replica", replica, 0, num_replicas - 1)
        self._lengths = tokens_of(self._documents)
        longest = max(range(len(self._lengths)), key=self._lengths.__getitem__)
        least = self._lengths[longest] * num_replicas  # a step has at least one document for each replica
        if least > tokens_per_step:
            raise ValueError(
                f"document {longest} has {self._lengths[longest]} tokens; a step of {tokens_per_step} has no room for "
                f"one for each of {num_replicas} replicas: cut it, drop it, or give tokens_per_step of at least {least}"
            )
        self._digest = hashlib.sha256(repr(self._documents).encode()).hexdigest()[:16]
        self.epoch = 0
        """Epoch of the next step."""
        self.steps = 0
        """Number of steps handed out so far, over all epochs."""
        self._begin = 0  # number of this epoch's documents handed out so far

    def __iter__(self) -> Iterator[PlannedStep]:
        """Yields the remaining steps of this epoch; the next iteration begins the next epoch."""
        epoch, order = self.epoch, self._order(self.epoch)
        spans = list(pairwise([self._begin, *self._ends(order, self._begin)]))
        if not spans:
            raise ValueError(
                f"the documents hold {sum(self._lengths)} tokens, which fill no step of {self._tokens}, and drop_last "
                "leaves out steps that are not full: give smaller tokens_per_step, or drop_last=False"
            )
        # The pool's thread ends with this generator, so a loop may break without closing anything.
        planner = ThreadPoolExecutor(1, thread_name_prefix="seq1f1b-plan")
        ahead = planner.submit(*self._ask(order[slice(*spans[0])]))
        for (begin, end), following in zip_longest(spans, spans[1:]):
            documents, plan = ahead.result()
            self._unit = self._unit or max(plan.costs.sizes)
            if following is None:
                self.epoch, self._begin = epoch + 1, 0
            else:
                ahead, self._begin = planner.submit(*self._ask(order[slice(*following)])), end
            self.steps += 1  # before the yield: a state taken by the caller is the next step's
            tokens = sum(self._lengths[i] for i in order[begin:end])
            yield PlannedStep(documents, plan, tokens, epoch, self.steps - 1)
            if self._engine is not None:
                self._ahead = [*self._ahead[-63:], plan]
                self._look(self._engine)

    def __len__(self) -> int:
        """Returns the number of remaining steps of this epoch."""
        return len(self._ends(self._order(self.epoch), self._begin))

    def state_dict(self) -> dict[str, Any]:
        """Returns the sampler's position after the steps handed out: plain numbers and texts.

        The state does not depend on ranks or replicas. A DataLoader with workers takes steps ahead of training: take
        the state without workers, or from a step's own numbers.
        """
        given = {"documents": len(self._lengths), "lengths": self._digest, "seed": self._seed}
        given |= {"tokens_per_step": self._tokens, "drop_last": self._drop_last}
        return {"format": _FORMAT, **given, "epoch": self.epoch, "begin": self._begin, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved position, on any number of ranks and replicas.

        Raises:
            ValueError: the state belongs to other documents, another seed or other ``tokens_per_step``, or is no state.
        """
        own = self.state_dict()
        if not isinstance(state, Mapping) or set(state) != set(own) or state["format"] != _FORMAT:
            raise ValueError(f"this is no state of DocumentBatches of the format {_FORMAT!r}")
        for name in ("documents", "lengths", "seed", "tokens_per_step", "drop_last"):
            if own[name] != state[name]:
                raise ValueError(
                    f"{name} is {own[name]!r}, the state has {state[name]!r}: give the same documents, seed, "
                    "tokens_per_step and drop_last"
                )
        for name in ("epoch", "begin", "steps"):
            if not isinstance(state[name], int) or state[name] < 0:
                raise ValueError(f"{name} of the state is {state[name]!r}, must be a whole number from 0 on")
        if state["begin"] not in (0, *self._ends(self._order(state["epoch"]), 0)[:-1]):
            raise ValueError(f"begin of the state is {state['begin']}, no step begins there")
        self.epoch, self._begin, self.steps = state["epoch"], state["begin"], state["steps"]

    def _order(self, epoch: int) -> list[int]:
        if self._seed is None:
            return list(range(len(self._lengths)))
        mixed = int(hashlib.sha256(f"{self._seed} {epoch}".encode()).hexdigest()[:15], 16)
        generator = torch.Generator("cpu").manual_seed(mixed)
        return list(torch.randperm(len(self._lengths), generator=generator, device="cpu").tolist())

    def _ends(self, order: Sequence[int], begin: int) -> list[int]:
        ends, tokens = [], 0
        for place in range(begin, len(order)):
            length = self._lengths[order[place]]
            if tokens + length > self._tokens:
                ends.append(place)
                tokens = 0
            tokens += length
        return ends if self._drop_last else [*ends, len(order)]

    def _look(self, engine: PipelineEngine) -> None:
        """Measures the units of the last step, until enough steps are measured."""
        if self._looks >= len(_SCALES) or engine._runner.last_step is None:  # asked for ahead: no step has run
            return
        if engine._pipeline.thread != threading.get_ident():
            raise RuntimeError(
                "DocumentBatches(engine=) reads the times of the engine's steps, so its next step must be asked for in "
                "the thread that trains: prefetch the documents of steps, not the steps, or leave out engine="
            )
        report = engine.report(gather=True)
        plan = next((plan for plan in self._ahead if _is_of(report, plan)), None)
        if plan is None:
            return
        del self._ahead[: self._ahead.index(plan) + 1]
        spans = [spans_of(row.sizes, row.documents, (), row.parents, row.parts) for row in plan.costs.rows]
        for rank in report.ranks if self._looks > 0 else ():
            for (kind, stage, microbatch, segment), seconds in rank._shared_seconds.items():
                tokens, pairs, *_ = spans[microbatch]
                self._measured.append((kind, stage, float(tokens[segment]), float(pairs[segment]), seconds))
        self._looks += 1
        if self._looks == len(_SCALES):
            own = [(key, tuple(fit)) for key, fit in terms_of(self._measured).items()]
            terms = engine.all_gather_object(own)[0]  # rank 0's, so that plans are bit-equal on all ranks
            self.cost = self._given.measured({tuple(key): Fit(*each) for key, each in terms})

    def _ask(self, documents: Sequence[int]) -> tuple[Any, ...]:
        """Returns a call of :meth:`_plan` with the current costs, equal on all ranks in every step."""
        options = self._options
        if self._engine is not None and self._looks < len(_SCALES) and self._unit and "unit_tokens" not in options:
            scale = (*_SCALES, 1.0)[self._looks + 1]
            options = {**options, "unit_tokens": max(1, round(scale * self._unit))}
        return self._plan, documents, self.cost, options

    def _plan(
        self, documents: Sequence[int], cost: CostModel, options: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], StepPlan]:
        if len(documents) < self._num_replicas:
            raise ValueError(
                f"the last step of the epoch has {len(documents)} documents, fewer than {self._num_replicas} replicas: "
                "give drop_last=True"
            )
        share = share_documents([self._documents[i] for i in documents], self._num_replicas, self._given)
        own = tuple(documents[i] for i in share[self._replica])
        return own, plan_step([self._documents[i] for i in own], cost, **options)


def _is_of(report: PipelineReport, plan: StepPlan) -> bool:
    """Returns whether a report is of a step of the plan; all ranks run the same step."""
    rank, cells = report.ranks[0], {(m, s) for m, row in enumerate(plan.costs.rows) for s in range(len(row.sizes))}
    is_alike = rank.training and rank.segment_sizes == tuple(plan.costs.sizes)
    return is_alike and {(u.microbatch, u.segment) for u, _, _ in rank.timeline if u.kind == "F"} == cells
