"""An engine's arguments: checked once, then equal in every step; and the arguments on which all ranks must agree."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, TypeAlias, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from seq1f1b import __version__
from seq1f1b.engine.replicas import without_wrapper
from seq1f1b.engine.vocabulary import VocabularyParallelEmbedding, VocabularyParallelHead
from seq1f1b.files import check_number, check_part, nearest_name
from seq1f1b.flat import whole
from seq1f1b.partition import ModelShape, partition_sequence
from seq1f1b.plan import Plan, TunedOrder, load_plan
from seq1f1b.schedule import Schedule, Unit, build_schedule, check_units, schedules
from seq1f1b.transport.edges import TRANSPORTS
from seq1f1b.where import HOST, Offload

__all__ = ["Limits", "Loss", "Memory"]

_partition = lru_cache(64)(partition_sequence)

Builder: TypeAlias = "Callable[..., Schedule]"
"""Makes an order of the counts, which it is given by name, as :func:`seq1f1b.build_schedule` takes them."""

Rule: TypeAlias = "str | Callable[[Segment], Any]"


@dataclass(frozen=True, slots=True)
class Segment:
    """Argument of a callable rule: the tokens and the micro-batch of a unit on the rank.

    The offset is the position of the first token, in a tree counted along the segment's path.
    """

    microbatch: int
    segment: int
    offset: int
    length: int


Sizes: TypeAlias = "ModelShape | Sequence[int] | Mapping[int, Sequence[int]] | Callable[[int], Sequence[int]] | None"
"""Sizes of segments, as an engine is given them in ``segment_sizes``."""

TokenPart: TypeAlias = tuple[int, int]
"""(rank, size) among the ranks that each hold an equal part of every segment's tokens; (0, 1): all of them."""


@dataclass(frozen=True)
class Loss:
    """Rules by which losses of segments become a step's loss: the argument ``loss`` of :class:`seq1f1b.PipelineEngine`.

    Args:
        reduction: ``"mean"``: a segment weighs by its share of the micro-batch's counted targets; ``"sum"``: segments
            are added.
        weight: ``"targets"``: the loss is the mean over all counted targets of a step, of all its micro-batches, and of
            all replicas under DDP or FSDP2. ``"microbatches"``, or None: the mean of the M micro-batches' means; None
            warns once if micro-batches count different numbers. Counted targets are elements other than -100 of the
            target, or of its first tensor. Or a callable that counts the targets of a segment, for the mean of means.
        scale_grads: True: gradients of the mean of the M losses; False: of their sum.
    Raises:
        ValueError, TypeError: a field is invalid; the error names the field.
    """

    reduction: str = "mean"
    weight: str | Callable[[Any], float] | None = None
    scale_grads: bool = True

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"Loss.reduction is {self.reduction!r}, must be 'mean' or 'sum'")
        if isinstance(self.weight, str) and self.weight not in ("targets", "microbatches"):
            raise ValueError(f"Loss.weight is {self.weight!r}, must be 'targets', 'microbatches' or a callable")
        if self.weight is not None and not isinstance(self.weight, str):
            _check_callable("Loss.weight", self.weight)
        if not isinstance(self.scale_grads, bool):
            raise TypeError(f"Loss.scale_grads is {self.scale_grads!r}, must be True or False")


@dataclass(frozen=True)
class Limits:
    """Limits of a rank's waiting for other ranks: the argument ``limits`` of :class:`seq1f1b.PipelineEngine`.

    Args:
        step: seconds that a peer may make no progress in a step.
        first_step: the limit in a step of a new length, since a peer may compile for minutes. Construction of the
            engine waits for all ranks up to the longer of both limits.
    Raises:
        ValueError, TypeError: a limit is not a number of seconds above 0; the error names the limit.
    """

    step: float = 300.0
    first_step: float = 1800.0

    def __post_init__(self) -> None:
        check_number("Limits.step", self.step)
        check_number("Limits.first_step", self.first_step)

    @cached_property
    def longest(self) -> float:
        """The limit in seconds while a length is new."""
        return max(self.step, self.first_step)


@dataclass(frozen=True)
class Memory:
    """Ways to save memory on a rank: the argument ``memory`` of :class:`seq1f1b.PipelineEngine`.

    Args:
        recompute: units that save only the stage's input, and run the stage again just before the backward:
            ``"none"``, ``"all"``, or a callable of a unit (``.stage .microbatch .segment``). Units with an R in the
            schedule are recomputed in any case. Both runs draw the same random numbers; a loss that holds the head runs
            once. A stage whose two runs differ otherwise gets wrong gradients, as ``engine.verify`` shows.
        blocks: (name, share): the name of a list of blocks in every stage, for example ``"blocks"``, and the share of
            the blocks, in 0..1 or a callable of a unit, to compute again block by block within the backward. The list
            is a ModuleList, ModuleDict or Sequential of modules, each run once in a forward; the first blocks are
            computed again. Units of ``recompute`` run the whole stage again.
        offload: a place for saved tensors of units while other units run. The tensors come back before the unit's
            backward; meanwhile the memory is free. For stages on the CPU a directory on a fast disk, for a nameless
            file that ends with the process; each rank may have a directory of its own. For stages on a GPU
            ``seq1f1b.HOST``, pinned host memory. None: nothing moves.
        units: units that move: ``"all"``, ``"none"`` or a callable of a unit, see :meth:`seq1f1b.Schedule.offload`.
            None: the units with O, A and L in the schedule, or all units if it has no O. Recomputed units stay.
    Raises:
        ValueError, TypeError: a field is invalid, or ``units`` stands without ``offload``; the error names the field.
    """

    recompute: str | Callable[[Unit], bool] = "none"
    blocks: tuple[str, float | Callable[[Unit], float]] | None = None
    offload: Offload = None
    units: str | Callable[[Unit], bool] | None = None

    def __post_init__(self) -> None:
        check_units("Memory.recompute", self.recompute)
        if self.blocks is not None:
            if not isinstance(self.blocks, tuple) or len(self.blocks) != 2 or not isinstance(self.blocks[0], str):
                raise TypeError(
                    f"Memory.blocks is {self.blocks!r}, must be (name of a list of blocks, share to recompute)"
                )
            if not callable(self.blocks[1]):
                check_share(self.blocks[1])
        if self.offload is not None and self.offload is not HOST and not isinstance(self.offload, (str, os.PathLike)):
            raise TypeError(f"Memory.offload must be a directory or seq1f1b.HOST, got {type(self.offload).__name__}")
        if self.units is not None:
            check_units("Memory.units", self.units)
            if self.offload is None:
                raise ValueError(
                    "Memory.units says which units move; say where by offload=, a directory or seq1f1b.HOST"
                )


@dataclass(frozen=True, kw_only=True)
class Options:
    """Checked options of an engine; :class:`seq1f1b.PipelineEngine` describes them.

    Fields of ``loss``, ``limits`` and ``memory`` are in :class:`Loss`, :class:`Limits` and :class:`Memory`.
    :func:`agreement_of` lists the options that must be equal on all ranks.
    """

    num_microbatches: int
    num_segments: int
    segment_sizes: Sizes
    seq_dim: int
    arg_rules: Mapping[str, Rule]
    loss_fn: Callable[[Any, Any], Tensor] | None
    loss: Loss
    transport: str
    limits: Limits
    grad_dtype: torch.dtype | None
    memory: Memory
    sequence_parallel: TokenPart
    attention: str
    embedding: nn.Module | None

    def __post_init__(self) -> None:
        for name, least in (("num_microbatches", 1), ("num_segments", 1), ("seq_dim", 1)):
            whole(name, getattr(self, name), least)  # seq_dim: dimension 0 is the batch
        for name, group in (("loss", Loss), ("limits", Limits), ("memory", Memory)):
            value = getattr(self, name)
            if not isinstance(value, group):
                raise TypeError(f"{name} must be a seq1f1b.{group.__name__}, got {type(value).__name__}")
        if self.loss_fn is not None:
            _check_callable("loss_fn", self.loss_fn)
        if self.embedding is not None and self.embedding_shard is None:
            raise TypeError(f"embedding must be a VocabularyParallelEmbedding, got {type(self.embedding).__name__}")
        dtype = self.grad_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"grad_dtype is {dtype!r}, must be a floating dtype or None")
        if self.attention not in ("own", "any", "unchecked"):
            raise ValueError(f"attention is {self.attention!r}, must be 'own', 'any' or 'unchecked'")
        if self.transport not in tuple(TRANSPORTS):
            raise ValueError(f"transport is {self.transport!r}, must be one of {', '.join(map(repr, TRANSPORTS))}")
        check_rules({}, self.arg_rules)
        check_part(self.sequence_parallel)
        _check_sizes(self.segment_sizes, self.num_segments)

    @cached_property
    def head(self) -> VocabularyParallelHead | None:
        """The rank's shard of the output layer, if the vocabulary is spread over the ranks."""
        inner = without_wrapper(self.loss_fn)
        return inner if isinstance(inner, VocabularyParallelHead) else None

    @cached_property
    def embedding_shard(self) -> VocabularyParallelEmbedding | None:
        """The rank's shard of the input embedding, if the vocabulary is spread over the ranks."""
        inner = without_wrapper(self.embedding)
        return inner if isinstance(inner, VocabularyParallelEmbedding) else None

    def sizes_of(self, length: int, documents: tuple[int, ...] | None = None) -> list[int]:
        """Returns the tokens of the segments of a sequence of ``length`` tokens.

        Args:
            documents: lengths of packed documents, for a ``ModelShape``; None: the sequence is one document.
        Raises:
            ValueError: the sequence is too short, or ``segment_sizes`` are for another length.
        """
        choice, num_segments, num_parts = self.segment_sizes, self.num_segments, self.sequence_parallel[1]
        if length < num_segments:
            raise ValueError(f"a sequence of {length} tokens has fewer than num_segments = {num_segments}")
        if choice is None:
            sizes = _partition(length, num_segments, strategy="even", multiple_of=num_parts)
        elif isinstance(choice, ModelShape):
            sizes = _partition(length, num_segments, model=choice, documents=documents, multiple_of=num_parts)
        elif isinstance(choice, Mapping):
            if length not in choice:
                known = ", ".join(map(str, sorted(choice)))
                raise ValueError(f"segment_sizes are for {known} tokens, the sequence has {length}: pad it")
            sizes = list(choice[length])
        elif callable(choice):
            sizes = list(choice(length))
        else:
            sizes = list(choice)
            if sum(choice) != length:
                raise ValueError(f"segment_sizes sum to {sum(choice)} tokens, the sequence has {length}")
        for s, size in enumerate(sizes):
            if size % num_parts:
                raise ValueError(
                    f"segment {s} has {size} tokens, which the {num_parts} ranks of sequence_parallel= do not divide: "
                    f"pad the sequence of {length} tokens to a multiple of {num_parts}, and give segment_sizes of "
                    f"partition_sequence(multiple_of={num_parts})"
                )
        return list(sizes)


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {type(value).__name__}")


def check_share(share: Any, whose: str = "") -> float:
    """Returns the share of blocks that a unit computes again; raises ValueError unless in 0..1."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
        raise ValueError(f"Memory.blocks: the share {whose}".rstrip() + f" is {share!r}, must be in 0..1")
    return float(share)


def check_rules(kwargs: Any, rules: Mapping[str, Rule], *, is_split: bool = False) -> None:
    """Raises unless every tensor keyword has a rule: a guess from sizes could be silently wrong.

    Args:
        is_split: each micro-batch is one segment, so a list of micro-batches needs no rule.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(f"arg_rules must be a dict of rules by name, got {type(rules).__name__}")
    for name, rule in rules.items():
        if rule not in ("slice", "replicate") and not callable(rule):
            raise ValueError(f"arg_rules[{name!r}] is {rule!r}; it must be 'slice', 'replicate' or a callable")
    for microbatch in kwargs if isinstance(kwargs, list) else [kwargs or {}]:
        if not isinstance(microbatch, Mapping):
            raise TypeError(f"kwargs must be a dict, or a list of them, got {type(microbatch).__name__}")
        for name, value in microbatch.items():
            if isinstance(value, Tensor) and name not in rules and not (is_split and isinstance(kwargs, list)):
                raise ValueError(
                    f"keyword argument {name!r} is a tensor of shape {tuple(value.shape)} without a rule: say "
                    f"arg_rules={{{name!r}: 'slice'}} (along batch and sequence), 'replicate' or a callable of the unit"
                )


def _check_sizes(sizes: Sizes, num_segments: int) -> None:
    if isinstance(sizes, str):
        raise ValueError(
            f"segment_sizes is {sizes!r}; it must be None, a ModelShape or a list of token counts. For segments of "
            "equal FLOPs give segment_sizes=ModelShape(...)"
        )
    if isinstance(sizes, ModelShape):
        partition_sequence(num_segments, num_segments, model=sizes)  # raises unless the shape is sound
    elif isinstance(sizes, Mapping):
        for length, of_length in sizes.items():
            if isinstance(of_length, str) or not isinstance(of_length, Sequence):
                raise TypeError(f"segment_sizes[{length}] must be a list, got {type(of_length).__name__}")
            _check_sizes(of_length, num_segments)
            if sum(of_length) != length:
                raise ValueError(f"segment_sizes[{length}] sum to {sum(of_length)}, must sum to {length}")
    elif sizes is not None and not callable(sizes):
        if not isinstance(sizes, Sequence):
            raise TypeError(f"segment_sizes must be None, a ModelShape or a list, got {type(sizes).__name__}")
        if len(sizes) != num_segments:
            raise ValueError(f"segment_sizes has {len(sizes)} entries, num_segments is {num_segments}")
        for s, size in enumerate(sizes):
            whole(f"segment_sizes[{s}]", size, 1)


TUNED = "tuned"


def first_order(*, stages_per_rank: int, **counts: Any) -> Schedule:
    """Returns the order with which a tuned engine begins."""
    return build_schedule(first_family(stages_per_rank), stages_per_rank=stages_per_rank, **counts)


def first_family(stages_per_rank: int) -> str:
    """Returns the family of the order with which a tuned engine begins."""
    return "seq1f1b" if stages_per_rank == 1 else "seq1f1b-interleaved"


def is_plan(schedule: object) -> TypeGuard[Plan | TunedOrder | str | os.PathLike[str]]:
    """Returns whether ``schedule`` is a plan or the path of a plan: a string that names no schedule is a path."""
    return isinstance(schedule, (Plan, TunedOrder, os.PathLike)) or (
        isinstance(schedule, str) and schedule not in (TUNED, *schedules())
    )


def order_of(
    schedule: str | os.PathLike[str] | Schedule | Plan | TunedOrder | Builder,
    num_microbatches: int | None,
    num_segments: int,
    segment_sizes: Sizes,
) -> tuple[Schedule | Builder, dict[str, Any]]:
    """Returns an engine's argument ``schedule`` as an order or a builder of orders, and the three further arguments.

    A plan replaces the three.
    """
    if is_plan(schedule):
        if isinstance(schedule, str) and not os.path.isfile(schedule):
            near = nearest_name(schedule, (TUNED, *schedules()))
            raise ValueError(f"there is no schedule named {schedule!r}, and no file of a plan with this name{near}")
        if (num_microbatches, num_segments, segment_sizes) != (None, 1, None):
            raise ValueError("a plan stands for num_microbatches, num_segments and segment_sizes: leave these out")
        plan = schedule if isinstance(schedule, (Plan, TunedOrder)) else load_plan(schedule)
        planned = plan.engine_arguments()
        return planned.pop("schedule"), planned
    if num_microbatches is None:
        raise TypeError("PipelineEngine needs num_microbatches=, or a plan as schedule=")
    if schedule == TUNED:
        if isinstance(segment_sizes, Sequence) and not isinstance(segment_sizes, ModelShape):
            raise ValueError(
                f"schedule={TUNED!r} finds the number of segments: give segment_sizes=None, a ModelShape or a callable"
            )
        schedule = first_order
    elif isinstance(schedule, str):
        schedule = partial(build_schedule, schedule)
    if not isinstance(schedule, Schedule) and not callable(schedule):
        raise TypeError(
            "schedule must be a name, a seq1f1b.Schedule, a plan or its file, or a callable, got "
            f"{type(schedule).__name__}"
        )
    return schedule, {
        "num_microbatches": num_microbatches,
        "num_segments": num_segments,
        "segment_sizes": segment_sizes,
    }


def check_launch(group: Any) -> None:
    """Raises if a launcher started several processes that would each train alone."""
    world = os.environ.get("WORLD_SIZE", "1")
    if group is None and world.isdigit() and int(world) > 1 and not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"WORLD_SIZE is {world}, but torch.distributed has no default process group, so every process would train "
            'alone: call torch.distributed.init_process_group("gloo") first, or pass group= '
            "(seq1f1b.LoopbackGroup(1)[0] to train in this process alone)"
        )


def agreement_of(
    options: Options, schedule: Schedule, source: Schedule | Builder, device: torch.device
) -> dict[str, tuple[str, str]]:
    """Returns the arguments on which all ranks of a pipeline must agree: for each a value to compare, and a text for
    errors.

    Args:
        device: device of the stages: messages between GPUs need a GPU on every rank.
    """
    loss, memory, sizes = options.loss, options.memory, options.segment_sizes
    if sizes is not None and not isinstance(sizes, ModelShape) and not callable(sizes):
        sizes = dict(sizes) if isinstance(sizes, Mapping) else list(sizes)
    place = memory.offload if memory.offload is None or memory.offload is HOST else "a directory"
    alike = ("num_microbatches", "num_segments", "seq_dim", "transport", "sequence_parallel")
    values: dict[str, Any] = {name: getattr(options, name) for name in alike} | {
        "segment_sizes": sizes,
        "Loss.reduction": loss.reduction,
        "Loss.scale_grads": loss.scale_grads,
        "Memory.recompute": memory.recompute,
        "Memory.offload": place,  # each rank may have a directory of its own
        "Memory.units": memory.units,
        "weights": "fill" if schedule.fills else "planned",
    }
    head, embedding = options.head, options.embedding_shard
    # A callable's answers for units are part of the order, and so of its digest.
    found = {"version": __version__}
    found |= {name: "a callable" if callable(value) else repr(value) for name, value in values.items()}
    found |= {
        "loss_fn": "no VocabularyParallelHead" if head is None else head.settings,
        "embedding": "no VocabularyParallelEmbedding" if embedding is None else embedding.settings,
        "prefetch": schedule._places_text,
    }
    if isinstance(source, partial) and source.func is build_schedule and source.args:
        shown = repr(source.args[0])
    else:
        shown = "a Schedule" if isinstance(source, Schedule) else "a callable"
    shown_device = "cuda" if device.type == "cuda" else 'cpu (which transport="shm" or "c10d" joins with GPUs)'
    compares_devices = options.transport == "auto" or TRANSPORTS[options.transport].between_gpus
    return {name: (text, text) for name, text in found.items()} | {
        "schedule": (schedule.digest, f"{shown} (order {schedule.digest})"),
        "the device of the stages": (device.type if compares_devices else "", shown_device),
    }
