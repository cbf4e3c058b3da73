"""One step of an engine on one rank: its arguments, split for the units of this rank's stages, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seq1f1b import _C
from seq1f1b.device.placement import move, through_host
from seq1f1b.ops.packing import document_lengths
from seq1f1b.runtime.arguments import Options, check_number
from seq1f1b.runtime.deferred import deferring
from seq1f1b.runtime.divided import sum_divisors
from seq1f1b.runtime.loss_look import LossLook, choose_microbatch
from seq1f1b.runtime.rows import PlannedRows, Rows
from seq1f1b.runtime.saved_bytes import Activations
from seq1f1b.runtime.shards import EmbeddingStep, HeadStep
from seq1f1b.runtime.splitting import (
    Leaves,
    check_count,
    check_equal_batches,
    check_rules,
    microbatches,
    sequence_length,
    shard_sizes,
    split_inputs,
    split_kwargs,
    split_sequence,
)
from seq1f1b.runtime.stage import Received, Stage, StageArguments, StageStep
from seq1f1b.runtime.weighting import combine, count_default, count_targets, divide, make_seeds, shares

__all__: list[str] = []

_OUTSIDE_AUTOCAST = ("B", "I", "W", "T", "G")


@dataclass(frozen=True)
class StepArguments:
    """A caller's arguments of one step; :meth:`seq1f1b.PipelineEngine.step` says what they mean."""

    training: bool
    inputs: Any
    target: Any
    kwargs: Any
    loss_weight: float | None = None
    gradient_scale: float = 1.0
    gradient_divisor: int = 1  # of what the step adds, after its last backward
    loss_kwargs: Mapping[str, Any] | None = None
    return_outputs: bool = False
    rows: Rows | None = None
    plan: PlannedRows | None = None
    divides: bool | None = None  # whether the loss comes with its divisor; None: not known yet


class Step:
    """Made for one step and dropped at its end, with everything that units left behind.

    Args:
        options, stages, num_stages, device: the engine's own.
        enter_shape: told (training, tokens) once the length is known; returns whether such a step has run before.
        rank: this one, for texts of errors.
        shards, embedding: of the output layer and of the input embedding, where the vocabulary is spread.
    """

    def __init__(
        self,
        arguments: StepArguments,
        options: Options,
        stages: Mapping[int, Stage],
        num_stages: int,
        device: torch.device,
        enter_shape: Callable[[tuple[bool, int]], bool],
        rank: int,
        shards: HeadStep | None = None,
        embedding: EmbeddingStep | None = None,
    ) -> None:
        self.training = arguments.training
        self._arguments, self._options, self._stages = arguments, options, stages
        self._first, self._last = stages.get(0), stages.get(num_stages - 1)
        self._device, self._enter_shape, self._rank = device, enter_shape, rank
        self._autocast = torch.is_autocast_enabled(device.type)
        self._inputs, self._target, self._kwargs = arguments.inputs, arguments.target, arguments.kwargs
        if device.type != "cpu":
            self._inputs, self._target, self._kwargs = (
                move(value, device) for value in (self._inputs, self._target, self._kwargs)
            )
        self._shards, self._embedding = shards, embedding
        self._leaves = Leaves()
        self.rows: Rows = arguments.rows or ()  # tokens of the segments of every micro-batch, once they are known
        self._num_microbatches = len(self.rows) or options.num_microbatches
        self.length = 0  # tokens of the longest micro-batch
        self.sizes = [0] * options.num_segments  # as the executor takes them: alike for all, or in a row
        self._weights: list[list[float]] = []
        self._counts: list[float] = []  # targets of the micro-batches, where losses are means over them
        self._parts: dict[int, StageStep] = {}
        self._passes: dict[int, tuple[Callable[..., Any], ...]] = {}

    def prepare(self) -> None:
        """Checks the arguments. The first stage's rank knows all then; others :meth:`learn` from the first message."""
        options, target = self._options, self._target
        if self.training and not torch.is_grad_enabled():
            raise RuntimeError("step needs gradients; use eval, or leave torch.no_grad()")
        if self._last is not None and self.training and (options.loss_fn is None or target is None):
            missing = {"loss_fn of the engine": options.loss_fn, "target": target}
            names = " and ".join(name for name, value in missing.items() if value is None)
            raise ValueError(
                f"{names} missing on rank {self._rank}, which holds the last stage: training needs both there"
            )
        if self._last is not None and target is not None and options.loss_fn is None:
            raise ValueError("target was given, but the engine has no loss_fn")
        if self._arguments.loss_weight is not None:
            check_number("loss_weight", self._arguments.loss_weight)
        is_split = all(len(row) == 1 for row in self.rows) if self.rows else options.num_segments == 1
        check_rules(self._kwargs, options.arg_rules, is_split=is_split)
        if self._last is not None and target is not None:
            self._target = microbatches(target, self._num_microbatches, "target")
        if self._first is not None or self._embedding is not None:
            if self._inputs is None:
                where = (
                    "the rank of the first stage" if self._embedding is None else "every rank: the embedding is spread"
                )
                raise ValueError(f"inputs are needed on {where}")
            check_count(self._inputs, self._num_microbatches, "inputs")
            if isinstance(self._inputs, list) and self._first is not self._last:
                check_equal_batches(self._inputs)
            self._inputs = self._leaves.replace(self._inputs)
            length = sequence_length(self._inputs, options.seq_dim)
            if not self.rows:
                self.learn(length)
        if self.rows:  # every rank was given them
            self.learn(max(map(sum, self.rows)))

    # -- the executor's ----------------------------------------------------------------------------------------------

    def choose_run(self, *, host_messages: bool) -> Callable[..., Any]:
        """Returns what the executor calls for every unit.

        Args:
            host_messages: messages of stages on a device come from and go to host memory.
        """
        passes = self._passes

        def run(kind: int, stage: int, m: int, s: int, received: Received) -> Any:
            return passes[stage][kind](m, s, received)

        return through_host(run, self._device) if host_messages and self._device.type != "cpu" else run

    def fill(self, stage: int, m: int, s: int) -> bool:
        """What the executor calls while it waits: runs a part of W, and returns whether any is left."""
        with torch.autocast(self._device.type, enabled=False) if self._autocast else nullcontext():
            return self._parts[stage].fill(m, s)

    def learn(self, length: int) -> list[int]:
        """Splits what this rank was given; returns the segment sizes. The executor calls it with the first message."""
        options, arguments = self._options, self._arguments
        dim, shard, self.length = options.seq_dim, options.shard, length
        if self._arguments.rows is None:
            self.sizes = options.sizes_of(length, self._documents())
            self.rows = (self.sizes,) * self._num_microbatches
        else:
            self.sizes = [size for row in self.rows for size in row]
        is_known = self._enter_shape((self.training, length))
        inputs = None
        if self._first is not None or self._embedding is not None:
            inputs = split_inputs(self._inputs, self.rows, dim, shard)
        if self._embedding is not None:
            assert inputs is not None
            self._embedding.inputs = inputs
        kwargs = None
        if self._kwargs or options.arg_rules:
            kwargs = split_kwargs(self._leaves.replace(self._kwargs), options.arg_rules, self.rows, dim, shard)
        targets = seeds = segment_shares = look = None
        if self._last is not None and self._target is not None:
            targets = self._split_targets()
            segment_shares, seeds = self._weigh(self._last)
            look = None if is_known else self._look_at_loss(segment_shares)
        auxiliary_seeds = self._weigh_auxiliary()
        for index, stage in self._stages.items():
            part = stage.begin(
                StageArguments(
                    training=self.training,
                    rows=self.rows,
                    inputs=inputs if stage.is_first else None,
                    kwargs=kwargs,
                    targets=targets if stage.is_last else None,
                    seeds=seeds if stage.is_last else None,
                    shares=segment_shares if stage.is_last else None,
                    sum_seed=self._sum_seed(stage) if stage.is_last else 1.0,
                    divides=arguments.divides,
                    loss_look=look if stage.is_last else None,
                    loss_kwargs=arguments.loss_kwargs or {},
                    auxiliary_seeds=auxiliary_seeds,
                    keep_outputs=arguments.return_outputs and stage.is_last,
                    measures=self.training and not is_known,
                    looks=not is_known,
                    compares=options.check_recompute and not is_known,
                    seq_dim=dim,
                    arg_rules=options.arg_rules,
                ),
            )
            self._parts[index] = part
            part.shards = self._shards if stage.is_last else None
            part.embedding = self._embedding if stage.is_first else None
            of_head = (None, None) if self._shards is None else (self._shards.statistics, self._shards.loss)
            of_embedding = (
                (None, None) if self._embedding is None else (self._embedding.embed, self._embedding.gradient)
            )
            # Autocast is for forwards: a backward runs in the dtypes of its forward.
            forward, input, whole, weight, recompute, *moves = part.passes
            methods = (forward, input, whole, weight, recompute, *of_head, *of_embedding, *moves)
            self._passes[index] = tuple(
                self._outside_autocast(run) if self._autocast and kind in _OUTSIDE_AUTOCAST else run
                for kind, run in zip(_C.PASSES, methods, strict=True)
            )
        for index, part in self._parts.items():
            part.previous, part.following = self._parts.get(index - 1), self._parts.get(index + 1)
        return self.sizes

    def _outside_autocast(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def outside(m: int, s: int, received: Received) -> Any:
            with torch.autocast(self._device.type, enabled=False):
                return run(m, s, received)

        return outside

    def _documents(self) -> list[int] | None:
        """Lengths of the packed documents of all rows, where segments are balanced by them."""
        options = self._options
        if options.segment_sizes != "balanced" or options.arg_rules.get("doc_ids") != "slice":
            return None
        kwargs = self._kwargs if isinstance(self._kwargs, list) else [self._kwargs or {}]
        rows = [microbatch["doc_ids"] for microbatch in kwargs if isinstance(microbatch.get("doc_ids"), Tensor)]
        return [length for doc_ids in rows for length in document_lengths(doc_ids)] or None

    def _split_targets(self) -> list[list[Any]]:
        options = self._options
        if options.shard[1] == 1 and all(len(row) == 1 for row in self.rows):
            return [[target] for target in self._target]
        return [
            split_sequence(target, self.rows[m], options.seq_dim, f"target of micro-batch {m}", options.shard)
            for m, target in enumerate(self._target)
        ]

    def _weigh_auxiliary(self) -> list[list[tuple[float, float]]]:
        """Gradients of an auxiliary loss of each segment, and of one of its micro-batch's whole sequence."""
        options, arguments = self._options, self._arguments
        averages = options.scale_grads and arguments.loss_weight is None
        if options.loss_reduction == "sum":
            scale = arguments.gradient_scale / (self._num_microbatches if averages else 1.0) * options.shard[1]
            return [[(scale, scale)] * len(row) for row in self.rows]
        num_tokens = sum(map(sum, self.rows))
        seeds = []
        for row in self.rows:
            parts = self._num_microbatches if arguments.rows is None else num_tokens / sum(row)
            scale = arguments.gradient_scale / (parts if averages else 1.0)
            seeds.append([(scale * size / sum(row), scale) for size in row])
        return seeds

    def _weigh(self, last: Stage) -> tuple[list[list[float]], list[list[Tensor]]]:
        """Shares of this rank's segments in their micro-batch's loss, and the seeds of their backwards.

        Where segments are cut into shards, each rank's share counts as many times as there are shards: the mean over
        the shards is to be the loss.
        """
        options, arguments = self._options, self._arguments
        M, (rank, num_shards) = self._num_microbatches, options.shard
        if options.loss_reduction == "sum":
            counts = segment_shares = all_counts = [[1.0] * len(row) for row in self.rows]
        else:
            pieces = [shard_sizes(row, options.shard) for row in self.rows]
            all_counts = count_targets(self._target, pieces, options.seq_dim, options.count)
            counts, segment_shares = (
                [row[rank::num_shards] for row in rows] for rows in (all_counts, shares(all_counts))
            )
            self._counts = [sum(row) for row in all_counts]
        self._weights = [[num_shards * share for share in row] for row in segment_shares]
        divisor = last.gradient_divisor
        if arguments.loss_weight is not None:
            scale = arguments.gradient_scale * (num_shards if divisor is None else divisor)
            seeds = [[scale * count / arguments.loss_weight for count in row] for row in counts]
        elif self._weighs_by_targets():
            total = sum(map(sum, all_counts))
            scale = arguments.gradient_scale * num_shards
            if options.loss_weight == "targets" and self.training and last.wrappers:
                # Every shard counts all shards' targets, and so do the replicas of each.
                scale *= last.wrappers[0].divisor
                total = last.wrappers[0].sum(total, self._device)
            seeds = [[scale * count / (total or 1.0) for count in row] for row in counts]
        else:
            scale = arguments.gradient_scale / (M if options.scale_grads else 1.0)
            seeds = [[weight * scale for weight in row] for row in self._weights]
        return self._weights, make_seeds(seeds, self._device)

    def _weighs_by_targets(self) -> bool:
        """Whether a segment weighs by its share of all micro-batches' targets, not of its own micro-batch's."""
        options = self._options
        is_asked = options.loss_weight == "targets" or self._arguments.rows is not None
        return is_asked and options.scale_grads and options.loss_reduction == "mean"

    def _tell_of_counts(self, part: StageStep) -> None:
        """Once it is known that the loss comes without a divisor: a word on means over unlike numbers of targets."""
        options, arguments, counts = self._options, self._arguments, self._counts
        says_nothing = options.loss_weight is None and arguments.loss_weight is None and options.scale_grads
        if part.divides or not counts:
            return
        if not sum(counts):
            part.stage.looks.say(
                "no target of this step is counted, all are -100 or have the weight 0: its losses are 0, and it adds "
                "nothing to gradients"
            )
        elif self.training and len(set(counts)) > 1 and says_nothing and not self._weighs_by_targets():
            part.stage.looks.say(
                f"micro-batches count different numbers of targets, {_short_list(counts)}, and the loss is the mean of "
                'their means, in which a target among few weighs more. Pass loss_weight="targets" to the engine for '
                'the mean over all targets of a step, or "microbatches" if this is meant'
            )

    def _sum_seed(self, last: Stage) -> float:
        """The gradient of a segment's loss that comes with its divisor; :meth:`divide` does the rest."""
        arguments, divisor = self._arguments, last.gradient_divisor
        if arguments.loss_weight is None:
            return arguments.gradient_scale
        return (
            arguments.gradient_scale * (self._options.shard[1] if divisor is None else divisor) / arguments.loss_weight
        )

    def _look_at_loss(self, segment_shares: list[list[float]]) -> LossLook | None:
        options = self._options
        if options.head is not None:
            return None
        m = choose_microbatch(self._target, segment_shares, least=1 if self._weighs_by_targets() else 2)
        if m < 0:
            return None
        count = None if options.loss_reduction == "sum" else options.count or count_default
        num_parts = sum(share > 0.0 for share in segment_shares[m])
        return LossLook(m, count, options.seq_dim, num_parts, options.shard[1])

    @contextmanager
    def changed_layers(self) -> Iterator[None]:
        """Around the units of a training step: linear layers leave to W what the order splits, and blocks are computed
        again where their unit says so."""
        with ExitStack() as stack:
            modules = [module for stage in self._stages.values() for module in stage.modules]
            for stage in self._stages.values():
                if self.training and stage.split:
                    stack.enter_context(deferring(stage.module, [m for m in modules if m is not stage.module]))
                if self.training and stage.blocks is not None:
                    stack.enter_context(stage.blocks.in_step())
            yield

    # -- its end -----------------------------------------------------------------------------------------------------

    def divides(self) -> tuple[bool | None, float, bool]:
        """After the last unit: whether the loss came with its divisor (None: none was called), by what gradients are
        multiplied then, and whether a stage of this rank has given auxiliary losses."""
        has_auxiliary = any(part.has_auxiliary for part in self._parts.values())
        part = self._last_part()
        if part is None or not part.divides:
            return None if part is None else part.divides, 1.0, has_auxiliary
        options, stage = self._options, part.stage
        if self._arguments.loss_weight is not None:
            return True, 1.0, has_auxiliary
        total, divisor = sum_divisors(part.divisors.values()), stage.gradient_divisor
        if divisor is not None:
            total = stage.wrappers[0].sum(total, self._device)
        elif options.shard[1] > 1:
            raise ValueError(
                "loss_fn returned its sum and its divisor; with shard= they are added up over the ranks of DDP or "
                "FSDP2: put the stage under one of them"
            )
        if not total:
            stage.looks.say("the divisors that loss_fn returned in this step are all 0: it adds nothing to gradients")
        return True, (divisor or 1.0) / total if total else 0.0, has_auxiliary

    def propagate(self, factor: float) -> None:
        """After the last unit: carries the summed gradients of arguments that require grad to where they come from.

        factor: by which gradients of the step are multiplied.
        """
        for part in self._parts.values():
            part.check_finished()
        self._leaves.propagate(factor)
        if (last := self._last_part()) is not None:
            self._tell_of_counts(last)

    def end(self) -> None:
        """After the last unit, or an error."""
        for part in self._parts.values():
            part.end()
        for shard in (self._shards, self._embedding):
            if shard is not None:
                shard.end()

    def losses(self) -> list[Tensor]:
        part = self._last_part()
        if part is None or self._target is None:
            return []
        if part.divides:
            return divide(part.losses, part.divisors, self.rows)
        return combine(part.losses, self._weights, self._device)

    def outputs(self) -> list[Any] | None:
        """Outputs of the M micro-batches on the rank of the last stage, None elsewhere."""
        part = self._last_part()
        if part is None:
            return None
        first, dim = part.stage.first_cells, self._options.seq_dim
        return [
            merge([part.units[first[m] + s].output for s in range(len(row))], dim) for m, row in enumerate(self.rows)
        ]

    def activations(self) -> dict[int, Activations]:
        """Bytes that units held, for each stage where they were measured."""
        return {index: part.activations() for index, part in self._parts.items() if part.saved_tokens}

    def deferred_weights(self) -> dict[int, int]:
        """Elements of the weights whose gradients W made, by stage."""
        return {index: sum(part.deferred_weights.values()) for index, part in self._parts.items()}

    def moved_bytes(self) -> int:
        """Bytes that units have sent to the tier."""
        return sum(part.moved_bytes for part in self._parts.values())

    def blocks_again(self) -> int:
        """Blocks that all units together computed again."""
        return sum(part.blocks_again for part in self._parts.values())

    def logit_bytes(self) -> int:
        """Most bytes of logits that this rank's shard of the vocabulary held at once."""
        return 0 if self._shards is None else self._shards.peak_bytes

    def _last_part(self) -> StageStep | None:
        return None if self._last is None else self._parts.get(self._last.index)


def _short_list(counts: list[float]) -> str:
    shown = [f"{count:g}" for count in counts[:8]]
    return ", ".join([*shown, *(["..."] if len(counts) > 8 else [])])


def merge(parts: list[Any], dim: int) -> Any:
    """One output from those of segments or micro-batches; tensors in nested tuples and dicts are joined.

    Scalars become a vector.
    """
    if isinstance(parts[0], (tuple, list)):
        return tuple(merge([part[i] for part in parts], dim) for i in range(len(parts[0])))
    if isinstance(parts[0], dict):
        return {key: merge([part[key] for part in parts], dim) for key in parts[0]}
    if not isinstance(parts[0], Tensor) or len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts[0].dim() else torch.stack(parts)
