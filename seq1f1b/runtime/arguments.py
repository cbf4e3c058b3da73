"""An engine's arguments: checked once, then the same in every step; and which of them all ranks must agree on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seq1f1b import __version__
from seq1f1b.ops.attention import check_shard
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.plan import Plan
from seq1f1b.runtime.blocks import check_blocks
from seq1f1b.runtime.splitting import Rule, Shard, check_rules
from seq1f1b.runtime.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead, embedding_of, head_of
from seq1f1b.schedule import Schedule, Unit, check_units
from seq1f1b.transport.table import TRANSPORTS

__all__: list[str] = []

Sizes: TypeAlias = "str | Sequence[int] | Mapping[int, Sequence[int]] | None"


@dataclass(frozen=True)
class Options:
    """An engine's keyword arguments, checked; :class:`seq1f1b.PipelineEngine` says what they mean."""

    num_microbatches: int
    num_segments: int
    segment_sizes: Sizes
    model_shape: ModelShape | None
    seq_dim: int
    arg_rules: Mapping[str, Rule]
    loss_fn: Callable[[Any, Any], Tensor] | None
    loss_reduction: str
    loss_weight: str | Callable[[Any], float] | None
    scale_grads: bool
    transport: str
    timeout: float
    first_step_timeout: float
    grad_dtype: torch.dtype | None
    prefetch: int
    spin_us: float | None
    weights: str
    shard: Shard
    recompute: str | Callable[[Unit], bool] = "none"
    check_recompute: bool = False
    recompute_blocks: tuple[str, float | Callable[[Unit], float]] | None = None
    offload: str | os.PathLike[str] | None = None
    offload_units: str | Callable[[Unit], bool] | None = None
    unchecked: bool = False
    embedding: nn.Module | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_microbatches", 1), ("num_segments", 1), ("prefetch", 0), ("seq_dim", 1)):
            check_int(name, getattr(self, name), least)  # seq_dim: dimension 0 is the batch
        check_number("timeout", self.timeout)
        check_number("first_step_timeout", self.first_step_timeout)
        if self.spin_us is not None:
            check_number("spin_us", self.spin_us, may_be_zero=True)
        if isinstance(self.loss_weight, str) and self.loss_weight not in ("targets", "microbatches"):
            raise ValueError(f"loss_weight is {self.loss_weight!r}, must be 'targets', 'microbatches' or a callable")
        for name in ("loss_fn", "loss_weight"):
            value = getattr(self, name)
            is_word = name == "loss_weight" and isinstance(value, str)
            if value is not None and not is_word and not callable(value):
                raise TypeError(f"{name} must be callable, got {type(value).__name__}")
        if self.embedding is not None and self.embedding_shard is None:
            raise TypeError(f"embedding must be a VocabularyParallelEmbedding, got {type(self.embedding).__name__}")
        dtype = self.grad_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"grad_dtype is {dtype!r}, must be a floating dtype or None")
        if self.transport not in tuple(TRANSPORTS):
            raise ValueError(f"transport is {self.transport!r}, must be one of {', '.join(map(repr, TRANSPORTS))}")
        if self.loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction is {self.loss_reduction!r}, must be 'mean' or 'sum'")
        if self.weights not in ("planned", "fill"):
            raise ValueError(f"weights is {self.weights!r}, must be 'planned' or 'fill'")
        check_units("recompute", self.recompute)
        check_blocks(self.recompute_blocks)
        if self.offload is not None and not isinstance(self.offload, (str, os.PathLike)):
            raise TypeError(f"offload must be a directory, got {type(self.offload).__name__}")
        if self.offload_units is not None:
            check_units("offload_units", self.offload_units)
            if self.offload is None:
                raise ValueError("offload_units says which units move; say where by offload=, a directory")
        check_rules({}, self.arg_rules)
        check_shard(self.shard)
        _check_sizes(self.segment_sizes, self.num_segments, self.model_shape)

    @property
    def count(self) -> Callable[[Any], float] | None:
        """Counts the targets of a segment; None: as by default."""
        return self.loss_weight if callable(self.loss_weight) else None

    @property
    def head(self) -> VocabularyParallelHead | None:
        """This rank's shard of the output layer, where the vocabulary is spread over the ranks."""
        return head_of(self.loss_fn)

    @property
    def embedding_shard(self) -> VocabularyParallelEmbedding | None:
        """The same of the input embedding."""
        return embedding_of(self.embedding)

    @property
    def device_transport(self) -> str | None:
        """The transport whose messages stay on GPUs, None for those of host memory."""
        return self.transport if TRANSPORTS[self.transport].between_gpus else None

    def sizes_of(self, length: int, documents: Sequence[int] | None = None) -> list[int]:
        """Segment sizes for a sequence of this many tokens. documents: of packed rows, for ``"balanced"``."""
        if length < self.num_segments:
            raise ValueError(f"a sequence of {length} tokens has fewer than num_segments = {self.num_segments}")
        sizes = self._choose_sizes(length, documents)
        num_shards = self.shard[1]
        for s, size in enumerate(sizes):
            if size % num_shards:
                raise ValueError(
                    f"segment {s} has {size} tokens, which {num_shards} shards do not divide: pad the sequence of "
                    f"{length} tokens to a multiple of {num_shards}, and give segment_sizes of "
                    f"partition_sequence(multiple_of={num_shards})"
                )
        return sizes

    def _choose_sizes(self, length: int, documents: Sequence[int] | None) -> list[int]:
        choice, k, num_shards = self.segment_sizes, self.num_segments, self.shard[1]
        if choice is None:
            return partition_sequence(length, k, strategy="even", multiple_of=num_shards)
        if isinstance(choice, str):
            return partition_sequence(length, k, model=self.model_shape, documents=documents, multiple_of=num_shards)
        if isinstance(choice, Mapping):
            if length not in choice:
                known = ", ".join(map(str, sorted(choice)))
                raise ValueError(f"segment_sizes are for {known} tokens, the sequence has {length}: pad it")
            return list(choice[length])
        if sum(choice) != length:
            raise ValueError(f"segment_sizes sum to {sum(choice)} tokens, the sequence has {length}")
        return list(choice)


def check_int(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} is {value}, must be at least {least}")


def check_number(name: str, value: float, *, may_be_zero: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not (value >= 0 if may_be_zero else value > 0):
        raise ValueError(f"{name} is {value}, must be {'at least' if may_be_zero else 'above'} 0")


def _check_sizes(sizes: Sizes, num_segments: int, shape: ModelShape | None) -> None:
    if isinstance(sizes, str):
        if sizes != "balanced":
            raise ValueError(f"segment_sizes is {sizes!r}; it must be None, 'balanced' or a list of token counts")
        if shape is None:
            raise ValueError("segment_sizes='balanced' needs model_shape=seq1f1b.ModelShape(...)")
        partition_sequence(num_segments, num_segments, model=shape)  # raises unless the shape is sound
    elif isinstance(sizes, Mapping):
        for length, of_length in sizes.items():
            if isinstance(of_length, str) or not isinstance(of_length, Sequence):
                raise TypeError(f"segment_sizes[{length}] must be a list, got {type(of_length).__name__}")
            _check_sizes(of_length, num_segments, shape)
            if sum(of_length) != length:
                raise ValueError(f"segment_sizes[{length}] sum to {sum(of_length)}, must sum to {length}")
    elif sizes is not None:
        if not isinstance(sizes, Sequence):
            raise TypeError(f"segment_sizes must be None, 'balanced' or a list, got {type(sizes).__name__}")
        if len(sizes) != num_segments:
            raise ValueError(f"segment_sizes has {len(sizes)} entries, num_segments is {num_segments}")
        for s, size in enumerate(sizes):
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"segment_sizes[{s}] is {size!r}, must be an int")
            if size < 1:
                raise ValueError(f"segment_sizes[{s}] is {size}, must be at least 1")


def modules_of(stage: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules of a rank, from what an engine was given as ``stage``."""
    modules: list[nn.Module] = list(stage) if isinstance(stage, Sequence) else [stage]
    for module in modules:
        if not callable(module):
            raise TypeError(f"stage must be a module or a list of modules, got {type(module).__name__}")
    return modules


def order_of(
    schedule: str | Schedule,
    num_microbatches: int | None,
    num_segments: int,
    segment_sizes: Sizes,
    prefetch: int,
    plan: Plan | str | os.PathLike[str] | None,
) -> tuple[str | Schedule, int, int, Sizes, int]:
    """The same five, the first four of them from the plan where there is one."""
    if plan is not None:
        if (schedule, num_microbatches, num_segments, segment_sizes) != ("seq1f1b", None, 1, None):
            raise ValueError(
                "plan= stands for schedule, num_microbatches, num_segments, segment_sizes: give none of them"
            )
        planned = (plan if isinstance(plan, Plan) else Plan.load(plan)).engine_arguments()
        schedule, num_microbatches = planned["schedule"], planned["num_microbatches"]
        num_segments, segment_sizes = planned["num_segments"], planned["segment_sizes"]
        prefetch = max(prefetch, planned["prefetch"])
    if num_microbatches is None:
        raise TypeError("PipelineEngine needs num_microbatches=, or plan=")
    if not isinstance(schedule, (str, Schedule)):
        raise TypeError(f"schedule must be a name or a seq1f1b.Schedule, got {type(schedule).__name__}")
    return schedule, num_microbatches, num_segments, segment_sizes, prefetch


def check_launch(group: Any) -> None:
    """Raises where a launcher started several processes that would each train alone."""
    world = os.environ.get("WORLD_SIZE", "1")
    if group is None and world.isdigit() and int(world) > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"WORLD_SIZE is {world}, but torch.distributed has no default process group, so every process would train "
            'alone: call torch.distributed.init_process_group("gloo") first, or pass group= '
            "(seq1f1b.LoopbackGroup(1)[0] to train in this process alone)"
        )


# -- agreement ---------------------------------------------------------------------------------------------------------


class Disagreement(ValueError):
    """The ranks of a pipeline were given different arguments. Every rank raises the same."""


def agreement_of(options: Options, schedule: Schedule, asked: str | Schedule) -> dict[str, tuple[str, str]]:
    """Arguments that all ranks of a pipeline must agree on; for each, what is compared and how an error shows it."""
    shown = repr(asked) if isinstance(asked, str) else "a Schedule"
    found = {"version": (__version__,) * 2}
    for name in ("num_microbatches", "num_segments", "weights"):
        found[name] = (repr(getattr(options, name)),) * 2
    asked_again = options.recompute if isinstance(options.recompute, str) else "a callable"
    found["recompute"] = (repr(asked_again),) * 2  # what it says of each unit is part of the order
    moved = options.offload_units if not callable(options.offload_units) else "a callable"
    found["offload_units"] = (repr(moved),) * 2
    found["offload"] = ("a directory" if options.offload is not None else "None",) * 2  # each rank may have its own
    found["loss_fn"] = ("no VocabularyParallelHead" if options.head is None else options.head.settings,) * 2
    spread = options.embedding_shard
    found["embedding"] = ("no VocabularyParallelEmbedding" if spread is None else spread.settings,) * 2
    found["schedule"] = (schedule.digest, f"{shown} (order {schedule.digest})")
    sizes = options.segment_sizes
    if sizes is not None and not isinstance(sizes, str):
        sizes = dict(sizes) if isinstance(sizes, Mapping) else list(sizes)
    found["segment_sizes"] = (repr(sizes),) * 2
    if sizes == "balanced":
        found["model_shape"] = (repr(options.model_shape),) * 2
    for name in ("seq_dim", "prefetch", "transport", "loss_reduction", "scale_grads", "shard"):
        found[name] = (repr(getattr(options, name)),) * 2
    return found


def check_agreement(everyones: Sequence[Mapping[str, tuple[str, str]]]) -> None:
    """Raises :class:`Disagreement`, which names the first argument that differs, unless all ranks gave the same."""
    for name in everyones[0]:
        ranks: dict[str, list[int]] = {}
        for rank, theirs in enumerate(everyones):
            ranks.setdefault(theirs[name][0], []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(
                f"{everyones[own[0]][name][1]} on rank{'s' * (len(own) > 1)} {', '.join(map(str, own))}"
                for own in ranks.values()
            )
            raise Disagreement(f"{name} differs between the ranks of the pipeline: {values}; give all ranks the same")


class Agreement:
    """Compares what the ranks of a pipeline were given: once, but again after a failure.

    Args:
        group: of the ranks.
        own: what this one was given, see :func:`agreement_of`.
    """

    def __init__(self, group: Any, own: Mapping[str, tuple[str, str]]) -> None:
        self._group = group
        self._own: Mapping[str, tuple[str, str]] | None = own

    def check(self) -> None:
        """Raises, on every rank, unless all were given the same. Collective."""
        if self._own is not None:
            check_agreement(self._group.all_gather_object(self._own))
            self._own = None
