"""Training steps of one model under torch's schedules and under ours.

Every arm trains the same weights on the same batch; a step leaves out the optimizer and is followed by ``zero_grad``.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import ForeignLoad, Records, agreed, gathered
from decoder import HeadLoss, HeadPart, Stage, cross_entropy, make_head
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import seq1f1b
from seq1f1b import Costs

TORCH = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ONE_STAGE = ("GPipe", "1F1B")  # per rank; the others hold two
V_PLACEMENT = ("ZBVZeroBubble", "DualPipeV")  # the second stage of rank r is 2 P - 1 - r, else P + r
AUTO = "auto"  # the shortest order found for measured costs, backward whole, in no more units than 1F1B holds
AUTO_SPLIT = "auto, split"  # the same with the backward as I and W
TWO_STAGES = ("seq1f1b-interleaved", "seq-zbv", AUTO, AUTO_SPLIT)  # of our families
MEASURED = (AUTO, AUTO_SPLIT, "seq-zbv")  # of our families: the costs of their units are measured first
LARGEST_ERROR = 1e-4  # of the loss, and of the gradients; rounding in float32 is 1e-7 and 1e-6
PIECES = 8  # equal pieces of the sequence whose cost is measured for the profiled split


class Unavailable(Exception):
    """This arm cannot run here, and why."""


@dataclass(frozen=True)
class Case:
    length: int  # tokens of a micro-batch, which is one sequence
    microbatches: int
    ranks: int = 2
    hidden: int = 256
    blocks: int = 4
    vocab: int = 1024
    lora: int = 0  # the rank of adapters, which alone are trained; 0: all weights are

    def __str__(self) -> str:
        return f"S{self.length} M{self.microbatches} P{self.ranks} hidden {self.hidden} blocks {self.blocks}"

    @property
    def tokens(self) -> int:
        return self.length * self.microbatches

    @property
    def shape(self) -> seq1f1b.ModelShape:
        heads = self.hidden // 64
        return seq1f1b.ModelShape(self.hidden, self.blocks, heads, heads, 4 * self.hidden * 2 // 3, self.vocab)

    def stage(self, index: int, num_stages: int, attention: str, *, head: HeadPart = True) -> Stage:
        return Stage(
            index, num_stages, hidden=self.hidden, blocks=self.blocks, vocab=self.vocab, attention=attention, head=head
        )

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens and the next ones, (M, length): every target counts, so that segments of one length weigh the same."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(self.vocab, (self.microbatches, self.length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Spec:
    """An arm. ``schedule``: of ``TORCH``, or a family of ours. ``attention``: "torch" or "ours"."""

    schedule: str
    attention: str
    segments: int = 1
    split: str = "even"
    head_in_loss: bool = False
    weights: str = "planned"  # of ours: where W runs, as Schedule.replace takes it
    spread: bool = False  # of ours: the rows of the head over the ranks
    checkpoint: bool = False  # of torch's: every block is computed again, by torch.utils.checkpoint

    @property
    def is_torchs(self) -> bool:
        return self.schedule in TORCH

    @property
    def splits(self) -> bool:
        """Whether it runs the backward as I and W."""
        return any(name in self.schedule for name in ("zb", "split"))

    @property
    def name(self) -> str:
        if self.is_torchs:
            return f"torch {self.schedule}" + ", blocks checkpointed" * self.checkpoint
        head = ", head in the loss" if self.head_in_loss else ""
        spread = ", head over the ranks" if self.spread else ""
        waits = ", W in waits" if self.weights == "fill" else ""
        return f"{self.schedule} k {self.segments} {self.split}{head}{spread}{waits}"

    @property
    def label(self) -> str:
        return f"{self.name} | {self.attention}"


class Arm(ABC):
    """One rank's part of a training step."""

    modules: list[nn.Module]

    @abstractmethod
    def step(self) -> float | None:
        """Mean of the M losses on the last stage's rank, None elsewhere."""

    def spans(self) -> list[tuple[float, float]]:
        """Start and end of every unit of the last step, on the machine's monotonic clock."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for m in self.modules for name, p in m.named_parameters() if p.grad is not None}

    def zero_grad(self) -> None:
        for module in self.modules:
            module.zero_grad()


def make_arm(case: Case, spec: Spec, rank: int) -> Arm:
    """Raises Unavailable where this torch lacks the schedule, or the schedule refuses the case. Collective."""
    return _TorchArm(case, spec, rank) if spec.is_torchs else OurArm(case, spec, rank)


def _mean(losses: list[Tensor]) -> float | None:
    return sum(float(loss.detach()) for loss in losses) / len(losses) if losses else None


class EngineArm(Arm):
    """An engine over the stages of this rank, and its batch."""

    def __init__(
        self, modules: list[nn.Module], engine: seq1f1b.PipelineEngine, batch: tuple[Any, Any], *,
        dtype: torch.dtype = torch.float32, **options: Any,
    ) -> None:  # fmt: skip
        """dtype: below float32, that of autocast. options: of every step."""
        self.modules, self.engine, self._batch, self._options, self._dtype = modules, engine, batch, options, dtype

    def step(self) -> float | None:
        tokens, target = self._batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            losses = self.engine.step(tokens, target=target, **self._options)
        return _mean(losses)

    def spans(self) -> list[tuple[float, float]]:
        report = self.engine.report()
        return [(start, end) for _, start, end in (*report.timeline, *report.fills)]


class OurArm(EngineArm):
    def __init__(
        self, case: Case, spec: Spec, rank: int, *, sizes: list[int] | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """sizes: in place of the split."""
        k, per_rank = spec.segments, 2 if spec.schedule in TWO_STAGES else 1
        self.sizes = sizes = split_sizes(case, spec, rank) if sizes is None else sizes
        options, unit_costs = None, Costs()
        if spec.schedule in MEASURED:
            backward = "split" if spec.splits else "whole"
            costs, unit_costs = _unit_costs(case, spec, sizes, rank, backward)
        if spec.schedule in (AUTO, AUTO_SPLIT):
            options = {"backward": backward, "costs": costs, "cap": case.ranks * per_rank * k}
        try:
            order = seq1f1b.build_schedule(
                spec.schedule.partition(",")[0], num_ranks=case.ranks, num_microbatches=case.microbatches,
                num_segments=k, stages_per_rank=per_rank, options=options,
            )  # fmt: skip
        except ValueError as error:
            raise Unavailable(str(error)) from error
        own = [stage for stage, at in enumerate(order.rank_of_stage) if at == rank]
        attention = "ours" if spec.attention == "ours" else "two calls"
        head: HeadPart = "norm" if spec.spread else not spec.head_in_loss
        modules = [case.stage(i, order.num_stages, attention, head=head) for i in own]
        loss_fn: Callable[..., Tensor] = cross_entropy
        if spec.head_in_loss and order.num_stages - 1 in own:
            loss_fn = HeadLoss(case.hidden, case.vocab)
        if spec.spread:
            loss_fn, order = _shard_of_head(case, rank), order.spread_vocabulary(costs=unit_costs)
        engine = seq1f1b.PipelineEngine(
            list(modules), schedule=order.replace(weights=spec.weights),
            num_microbatches=case.microbatches, num_segments=k, segment_sizes=sizes, loss_fn=loss_fn,
            attention="own" if spec.attention == "ours" else "any",  # torch's, over keys and values of its own
        )  # fmt: skip
        super().__init__(modules + [loss_fn] * isinstance(loss_fn, nn.Module), engine, case.batch(), dtype=dtype)


def _shard_of_head(case: Case, rank: int) -> seq1f1b.VocabularyParallelHead:
    """This rank's rows of the head that the whole model has, under their names in it."""
    shard = seq1f1b.VocabularyParallelHead(case.hidden, case.vocab, rank=rank, num_ranks=case.ranks, name="head.1")
    shard.load_whole(make_head(case.hidden, case.vocab).get_parameter("1.weight"))
    return shard


def split_sizes(case: Case, spec: Spec, rank: int) -> list[int]:
    k = spec.segments
    if k == 1 or spec.split == "even":
        return seq1f1b.partition_sequence(case.length, k, strategy="even")
    if spec.split == "flops":
        return seq1f1b.partition_sequence(case.length, k, strategy="flops", model=case.shape)
    costs = _measured_costs(case, spec.attention, rank)
    return seq1f1b.partition_sequence(case.length, k, strategy="profiled", costs=costs, multiple_of=16)


_costs: dict[tuple[Case, str], list[float]] = {}  # of this process, so that arms do not measure them again


def _measured_costs(case: Case, attention: str, rank: int) -> list[float]:
    """Seconds of each eighth of the sequence: F and B, all stages, the median of four steps."""
    if (case, attention) not in _costs:
        arm, tracks = OurArm(case, Spec("seq1f1b", attention, PIECES), rank), []
        for _ in range(5):
            arm.step()
            arm.zero_grad()
            tracks.append(arm.engine.report(gather=True).segment_seconds)
        arm.engine.close()
        _costs[case, attention] = [statistics.median(seconds) for seconds in zip(*tracks[1:], strict=True)]
    return _costs[case, attention]


def _unit_costs(case: Case, spec: Spec, sizes: list[int], rank: int, backward: str) -> tuple[tuple[Any, ...], Costs]:
    """Seconds of F, I and W, [stage][segment], the medians of four steps under another order of these units; where the
    backward is whole, of F and B, and 0. Then the same as ``spread_vocabulary`` takes them, with those of S and T."""
    weights = "fill" if backward == "split" else "planned"
    arm = OurArm(case, replace(spec, schedule="seq1f1b-interleaved", weights=weights), rank, sizes=sizes)
    found: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for n in range(5):
        arm.step()
        arm.zero_grad()
        report, took = arm.engine.report(), defaultdict(float)
        for unit, start, end in (*report.timeline, *report.fills) if n else ():
            took[unit] += end - start
        for unit, duration in took.items():
            found[unit.kind, unit.stage, unit.segment].append(duration)
    seconds = {key: statistics.median(values) for key, values in found.items()}
    everyones = {key: value for each in arm.engine.all_gather_object(seconds) for key, value in each.items()}
    arm.engine.close()

    def of(*kinds: str) -> list[list[float]]:
        """Bytes by stage and segment; for shards, stage r stands for rank r, and the stages above have none."""
        return [
            [sum(everyones.get((kind, i, s), 0.0) for kind in kinds) for s in range(spec.segments)]
            for i in range(2 * case.ranks)
        ]

    by_pass = Costs(forward=of("F"), backward=of("B", "I", "W"), statistics=of("S"), loss=of("T"))
    if backward == "whole":
        return (of("F"), of("B"), 0.0), by_pass
    return (of("F"), of("I"), of("W")), replace(by_pass, weight=of("W"), input=of("I"))


# -- torch's schedules ---------------------------------------------------------------------------------------------


class TimedStage(PipelineStage):
    """Notes when each unit began and ended."""

    def __init__(self, *arguments: Any, spans: list[tuple[float, float]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spans = spans

        for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
            setattr(self, name, partial(self._run, getattr(self, name)))

    def _run(self, unit: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        found = unit(*arguments, **options)
        self._spans.append((start, time.perf_counter()))
        return found


def torch_schedule(name: str) -> Any:
    """A schedule class of the installed torch."""
    try:
        return get_schedule_class(name)
    except ValueError as error:
        raise Unavailable(f"torch {torch.__version__} has no schedule {name!r}: {error}") from error


class _TorchArm(Arm):
    def __init__(self, case: Case, spec: Spec, rank: int) -> None:
        P = case.ranks
        self._spans: list[tuple[float, float]] = []
        self._tokens, self._targets = case.batch()
        make = torch_schedule(spec.schedule)
        second = 2 * P - 1 - rank if spec.schedule in V_PLACEMENT else P + rank
        own, num_stages = ([rank], P) if spec.schedule in ONE_STAGE else ([rank, second], 2 * P)
        self.modules = [case.stage(i, num_stages, "ours" if spec.attention == "ours" else "two calls") for i in own]
        for module in self.modules:
            module.checkpoints = spec.checkpoint
        stages = [
            TimedStage(module, i, num_stages, torch.device("cpu"), spans=self._spans)
            for i, module in zip(own, self.modules, strict=True)
        ]
        try:
            self._schedule = make(stages[0] if len(stages) == 1 else stages, case.microbatches, loss_fn=self._loss)
        except ValueError as error:
            raise Unavailable(f"torch's {spec.schedule} refuses: {error}") from error
        self.has_first, self.has_last = 0 in own, num_stages - 1 in own

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Torch calls it beside the stage: part of the unit, as in ours."""
        start = time.perf_counter()
        loss = cross_entropy(output, target)
        self._spans.append((start, time.perf_counter()))
        return loss

    def step(self) -> float | None:
        self._spans.clear()
        losses: list[Tensor] = []
        last = {"target": self._targets, "losses": losses} if self.has_last else {}
        self._schedule.step(*([self._tokens] if self.has_first else []), **last, return_outputs=False)
        return _mean(losses)

    def spans(self) -> list[tuple[float, float]]:
        return sorted(self._spans)


# -- truth and timing ----------------------------------------------------------------------------------------------


def whole_model(case: Case) -> tuple[float, dict[str, Tensor]]:
    """Mean loss of the micro-batches and its gradients, in float64, by the model run whole with torch's attention."""
    model = case.stage(0, 1, "whole sequences").double()
    tokens, targets = case.batch()
    losses = []
    for x, y in zip(tokens.split(1), targets.split(1), strict=True):
        loss = cross_entropy(model(x), y)
        (loss / case.microbatches).backward()
        losses.append(loss.detach())
    return _mean(losses) or 0.0, {name: p.grad for name, p in model.named_parameters()}


def check_arm(arm: Arm, name: str, truth: tuple[float, dict[str, Tensor]] | None) -> dict[str, float]:
    """Runs a step. Its loss, the loss's relative error, and ||g - g64|| / ||g64|| over all gradients of all stages, on
    rank 0, which alone needs the truth. Collective. Raises RuntimeError where an error is too large."""
    everyones = gathered((arm.step(), arm.gradients()))
    arm.zero_grad()
    if truth is None:
        return {}
    loss = next(loss for loss, _ in everyones if loss is not None)
    found: dict[str, Tensor] = {}
    for _, gradients in everyones:
        for own, g in gradients.items():  # of a head over the ranks, each has rows, in the order of ranks
            found[own] = torch.cat([found[own], g]) if own in found else g
    if found.keys() != truth[1].keys():
        raise RuntimeError(f"gradients are missing: {sorted(truth[1].keys() ^ found.keys())}")
    difference = sum(float((found[own].double() - g).square().sum()) for own, g in truth[1].items())
    norm = sum(float(g.square().sum()) for g in truth[1].values())
    loss_error, gradient_error = abs(loss - truth[0]) / abs(truth[0]), (difference / norm) ** 0.5
    if not max(loss_error, gradient_error) <= LARGEST_ERROR:
        raise RuntimeError(f"{name}: error of loss {loss_error}, of gradients {gradient_error}")
    return {"loss": loss, "loss_error": loss_error, "gradient_error": gradient_error}


def timed(arm: Arm) -> float:
    dist.barrier()
    start = time.perf_counter()
    arm.step()
    dist.barrier()
    seconds = time.perf_counter() - start
    arm.zero_grad()
    return seconds


def take_rounds(
    arms: dict[str, Arm],
    results: Records,
    rounds: int,
    *,
    base: Callable[[str], str] = lambda arm: arm,
    deadline: float = math.inf,
    also: Callable[[Arm], tuple[float, ...]] = lambda arm: (),
    **fields: Any,
) -> None:
    """Rounds of all arms in turn, forwards and backwards, until each has so many counted steps beside its base's, or
    the time is over; at most twice as many. Rank 0 adds them, with ``also`` of each step, to the results."""
    for arm in arms.values():
        timed(arm)
    load = ForeignLoad(gathered(os.getpid()))
    for turn in range(2 * rounds):
        if not agreed(results.missing(arms, rounds, base, **fields) > 0 and time.time() < deadline):
            break
        steps = {}
        for name, arm in list(arms.items())[:: -1 if turn % 2 else 1]:
            load.start()
            seconds, foreign = timed(arm), load.cores()
            steps[name] = seconds, foreign, *also(arm)
        if dist.get_rank() == 0:
            results.add(what="round", steps=steps, **fields)


def idle_shares(arm: Arm) -> tuple[float, float]:
    """The bubble of the last step, and the least bubble that any order of these units could have. Collective.

    The bubble is the share of the ranks' time, from the first unit's start to the last one's end, in which they run no
    unit. No order has less than the second one, because no step is shorter than the units of its busiest rank.
    """
    spans = arm.spans()
    own = (min(a for a, _ in spans), max(b for _, b in spans), sum(b - a for a, b in spans))
    starts, ends, busy = zip(*gathered(own), strict=True)
    mean = sum(busy) / len(busy)
    return 1.0 - mean / (max(ends) - min(starts)), 1.0 - mean / max(busy)
