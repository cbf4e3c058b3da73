"""Parameters that several stages hold as copies of one, as an embedding that is also the head."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from seq1f1b.runtime.arguments import Disagreement
from seq1f1b.runtime.equal_parameters import look_at_equal, unlisted
from seq1f1b.runtime.gradients import StepGradients, dense
from seq1f1b.runtime.tied_copies import PAGE, OwnCopies, hooks_refused
from seq1f1b.transport import RankGroup

if TYPE_CHECKING:
    from seq1f1b.runtime.engine import PipelineEngine

__all__: list[str] = []

# Copies come apart with the first step of an optimizer that differs, be it after many steps of the engine.
_COMPARED_IN, _COMPARED_EVERY = (2, 4, 8, 16, 32, 64), 100  # steps
_PIECE = 1 << 22  # values of a copy that are compared at once


def ties_of(engine: PipelineEngine) -> TiedParameters:
    """The ties of an engine's stages, for what saves them."""
    return engine._pipeline.tied


class TiedParameters:
    """Sums the gradients of each parameter's copies over the ranks, so that equal copies stay equal.

    A stage says by its attribute ``tied_parameters``, a dict of parameters by name, which of its parameters have copies
    on other stages: copies have the name in common. Every exchange goes by the sorted names of all ranks. Parameters
    that are bit-equal and not listed are named in a warning where they are likely one parameter of the model.

    Args:
        modules: of this rank, each with its place in words.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]], group: RankGroup) -> None:
        self._group, self._modules = group, modules
        is_alone = group.size == 1 and len(modules) == 1
        # Pairs that are bit-equal and not listed, once the ranks have met.
        self.equal: list[str] | None = [] if is_alone else None
        self._met_in = -1  # the group's epoch in which the ranks told each other what they hold
        self._everyones: list[dict[str, list[list[Any]]]] = []  # descriptions of the ranks' copies
        self._holders: dict[str, list[int]] = {}
        self._own = OwnCopies(modules)
        self._is_news = False  # the copies are others than those that the ranks were told of
        self._steps = self._uncompared = 0  # training steps since the ranks have met, and since copies were compared
        self._has_stepped = self._is_apart = False
        if self._own.problem:
            raise ValueError(self._own.problem)

    # -- the ranks meet ------------------------------------------------------------------------------------------------

    def meet(self, beside: Callable[[], Any] | None = None) -> list[Any]:
        """Finds the copies, and makes them equal; after a failed step compares them. Collective over the pipeline,
        within a step or between two.

        A rank may fail when others have not yet left; so all meet again after a failed step.

        Args:
            beside: makes what is told to the other ranks, too.
        Returns:
            what all ranks told so; nothing where they have met before.
        """
        if self._met_in == self._group.epoch:
            self.refresh()
            return []
        self._own.read()
        others = unlisted(self._modules, {id(copy) for copy in self._own}) if self.equal is None else []
        mine = (self._own.described(), self._own.problem, self._has_stepped, others)
        found = self._group.all_gather_object((*mine, None if beside is None else beside()))
        for rank, (_, problem, *_) in enumerate(found):
            if problem:
                raise Disagreement(f"rank {rank}: {problem}")
        if self.equal is None:
            self.equal = look_at_equal([theirs for *_, theirs, _ in found], self._group.rank)
        self._take([described for described, *_ in found])
        if any(has_stepped for _, _, has_stepped, *_ in found):
            self._compare()
        else:
            self._make_equal()
        self._met_in, self._is_news, self._steps = self._group.epoch, False, 0
        return [told for *_, told in found]

    def _take(self, everyones: Sequence[dict[str, list[list[Any]]]]) -> None:
        """Takes over who holds which copies. Raises on every rank if they are not alike, or have hooks."""
        holders = {
            name: [rank for rank, theirs in enumerate(everyones) if name in theirs]
            for name in sorted(set().union(*everyones))
        }
        for name, ranks in holders.items():
            copies = [(rank, *copy) for rank in ranks for copy in everyones[rank][name]]
            if len({kind for _, _, kind, *_ in copies}) > 1:
                each = "; ".join(f"{text} on rank {rank} is {kind}" for rank, text, kind, *_ in copies)
                raise Disagreement(
                    f"tied parameter {name!r} differs between ranks {ranks}: {each}. Copies of one parameter are alike"
                )
            without = [f"{text} on rank {rank}" for rank, text, *_, is_meta in copies if is_meta]
            if without:
                raise Disagreement(
                    f"tied parameter {name!r} is on the meta device, without memory: {', '.join(without)}. Give the "
                    "stages memory before; to_empty replaces parameters, so fill tied_parameters after it"
                )
            hooks = [(rank, text, num) for rank, text, _, num, _ in copies if num]
            if hooks and len(copies) > 1:
                rank, text, num = hooks[0]
                raise Disagreement(hooks_refused(name, f"{text} on rank {rank} has {num}"))
        self._holders, self._everyones = holders, list(everyones)

    @torch.no_grad()
    def _make_equal(self) -> None:
        """Copies take the values of the first one, as DistributedDataParallel's replicas do."""
        for name, own in self._held():
            first = self._of_first(name, own[0])
            for copy in own:
                if copy is not first:
                    copy.copy_(first)

    def _held(self) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """This rank's copies, by the names that all ranks go through in one order."""
        for name in self._holders:
            if name in self._own.by_name:
                yield name, [copy.parameter for copy in self._own.by_name[name]]

    def _of_first(self, name: str, own: nn.Parameter) -> Tensor:
        """The values of a tie's first copy. Collective over its holders."""
        first, *others = self._holders[name]
        if first == self._group.rank:
            self._group.exchange(own.detach(), others, [], own)
            return own
        return self._group.exchange(None, [], [first], own.detach())[first]

    # -- this rank's copies --------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Looks whether the modules of this rank hold other parameters now."""
        if self._own.refresh():
            self._is_news = True

    def check(self) -> None:
        """In a step, before its units: raises if what this rank holds now cannot be taken. The others hear of it."""
        if not self._is_news:
            return
        if self._own.problem:
            raise ValueError(self._own.problem)
        described = self._own.described()
        for name, copies in described.items():
            elsewhere = sum(len(t.get(name, ())) for rank, t in enumerate(self._everyones) if rank != self._group.rank)
            hooks = [(text, num) for text, _, num, _ in copies if num]
            if hooks and elsewhere + len(copies) > 1:
                raise ValueError(hooks_refused(name, "{} has {}".format(*hooks[0])))
            if name not in self._holders:
                raise ValueError(f"tied parameter {name!r} was listed after the first step: list it before")

    def parameters(self) -> list[nn.Parameter]:
        """This rank's copies."""
        return list(self._own)

    def names(self) -> dict[int, str]:
        """Names that this rank's copies have in the whole model, by their ids."""
        self.refresh()
        by_name = self._own.by_name
        return {id(copy.parameter): name for name in sorted(by_name, reverse=True) for copy in by_name[name]}

    def counted_elsewhere(self) -> set[int]:
        """Ids of the copies on this rank that a norm over all ranks must leave out."""
        return {
            id(copy)
            for name, own in self._held()
            for i, copy in enumerate(own)
            if i > 0 or self._holders[name][0] != self._group.rank
        }

    # -- a step --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def end_step(self, gradients: StepGradients) -> None:
        """Sums what the step added to the copies' gradients, in rank order, so that all get the same bits.

        Now and then the copies are compared, too. Raises on every rank if they have come apart.
        """
        if not self._holders:
            return
        self._steps += 1
        self._uncompared += 1
        is_due = self._is_apart or self._steps in _COMPARED_IN or self._steps % _COMPARED_EVERY == 0
        sums = {name: _sum([gradients.added(copy) for copy in own]) for name, own in self._held()}
        dtypes = {name: str(added.dtype).removeprefix("torch.") for name, added in sums.items() if added is not None}
        news = self._own.described() if self._is_news else None
        lost = "" if self._has_stepped else self._lost(dtypes)
        # Also where the ranks meet: from here on nobody fails the step with a transfer under way.
        found = self._group.all_gather_object((dtypes, news, self._bytes() if is_due else None, lost))
        for rank, (*_, text) in enumerate(found):
            if text:
                raise Disagreement(f"rank {rank}: {text}")
        if any(theirs is not None for _, theirs, *_ in found):
            old = self._everyones
            self._take([old[rank] if theirs is None else theirs for rank, (_, theirs, *_) in enumerate(found)])
            self._is_news = False
            self._compare()
        elif is_due:
            self._compare([sums_of_bytes for *_, sums_of_bytes, _ in found])
        self._has_stepped = True
        for name, own in self._held():
            having = [rank for rank in self._holders[name] if name in found[rank][0]]
            if not having:
                continue
            dtype = reduce(torch.promote_types, (getattr(torch, found[rank][0][name]) for rank in having))
            others = [rank for rank in self._holders[name] if rank != self._group.rank]
            like = own[0].new_empty((), dtype=dtype).expand_as(own[0])
            mine = None if (added := sums[name]) is None else added.to(dtype)
            parts = self._group.exchange(mine, others, [rank for rank in having if rank in others], like)
            total = parts[having[0]].clone()
            for rank in having[1:]:
                total.add_(parts[rank])
            for copy in own:
                gradients.replace(copy, total)

    def _lost(self, having: Container[str]) -> str:
        """Tells of a copy that no module holds, and that has got no gradient; ``having`` are names that have."""
        for name, own in self._own.by_name.items():
            if name not in having and not own[0].homes and own[0].parameter.requires_grad:
                return (
                    f"tied parameter {name!r} of {own[0].place} is none of its parameters, and got no gradient: "
                    "a module holds another one in its place (to_empty, load_state_dict(assign=True) and fully_shard "
                    "do that). Make tied_parameters a property that returns what the module holds, or fill it again"
                )
        return ""

    # -- comparing -----------------------------------------------------------------------------------------------------

    def compare(self, *, always: bool = False) -> None:
        """Raises, on every rank, if copies have come apart in the training steps since they were compared. Collective.

        After a failed step it does nothing: a checkpoint may be loaded then.

        Args:
            always: also where no step has run, or one has failed.
        """
        if not always and (not self._holders or not self._uncompared or self._group.has_failed):
            return
        self.meet()
        if self._holders:
            self._compare()

    def _bytes(self) -> dict[str, list[int]]:
        return {name: self._own.bytes_of(name) for name, _ in self._held()}

    @torch.no_grad()
    def _compare(self, everyones: Sequence[Any] | None = None) -> None:
        """Args:
        everyones: sums over the bytes of all ranks' copies, by rank; None: they are gathered.
        """
        if everyones is None:
            everyones = self._group.all_gather_object(self._bytes())
        self._uncompared = 0
        apart = [n for n, ranks in self._holders.items() if len({s for rank in ranks for s in everyones[rank][n]}) > 1]
        self._is_apart = bool(apart)
        if not apart:
            return
        name, mine = apart[0], list[float]()
        if name in self._own.by_name:
            own = [copy.parameter for copy in self._own.by_name[name]]
            first = self._of_first(name, own[0])
            mine = [_distance(copy, first) for copy in own]
        distances = self._group.all_gather_object(mine)
        copies = [
            (rank, text, sum_of_bytes, distance)
            for rank in self._holders[name]
            for (text, *_), sum_of_bytes, distance in zip(
                self._everyones[rank][name], everyones[rank][name], distances[rank], strict=True
            )
        ]
        rank, text, *_, distance = next(copy for copy in copies if copy[2] != copies[0][2])
        more = f"; {len(apart) - 1} more ties have come apart" if len(apart) > 1 else ""
        raise Disagreement(
            f"the copies of tied parameter {name!r} have come apart: {text} on rank {rank} differs from {copies[0][1]} "
            f"on rank {copies[0][0]} by up to {distance:.1e}{more}. Each copy is stepped by its own rank's optimizer, "
            "with the same gradient: give all copies the same optimizer, learning rate, weight decay and options, and "
            "clip by engine.clip_grad_norm_, since torch's clip_grad_norm_ takes another norm on each rank. "
            f"Groups by name are alike if they are made of engine.named_parameters(), where every copy is {name!r}; "
            f"start again from weights that are equal ({PAGE})"
        )


def _distance(one: Tensor, other: Tensor) -> float:
    pieces = zip(*(torch.split(tensor.detach().flatten(), _PIECE) for tensor in (one, other)), strict=True)
    return max((float((a.double() - b.double()).abs().max()) for a, b in pieces if len(a)), default=0.0)


def _sum(added: Sequence[Tensor | None]) -> Tensor | None:
    """Sum of the gradients of copies on one rank."""
    found = [dense(gradient) for gradient in added if gradient is not None]
    return None if not found else found[0] if len(found) == 1 else torch.stack(found).sum(0)
