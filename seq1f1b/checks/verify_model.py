"""The model itself as the reference of a verification: rank 0 runs the whole model with the values of the stages.

On rank 0 the model is a pipeline of one stage and one segment, so batch, loss and weighting are the engine's. Rank 0
sends losses and outputs to the last stage's rank, and each gradient to the ranks that hold the parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.above import above
from seq1f1b.checks.verify_runs import (
    Forward,
    NamedTensor,
    Pass,
    Session,
    WholeModelError,
    named_tensors,
    own_modules,
    refuse,
)
from seq1f1b.engine.batch import StepArguments
from seq1f1b.engine.options import Memory
from seq1f1b.engine.replicas import without_wrapper
from seq1f1b.engine.runner import Runner
from seq1f1b.engine.set_up import set_up
from seq1f1b.nested import mapped, tensors_of
from seq1f1b.placement import common_device, free_bytes
from seq1f1b.transport import LoopbackGroup, RankGroup
from seq1f1b.transport.values import sendable

__all__: list[str] = []

_LISTED = 5  # names in an error


class WholeModel:
    """The whole model on rank 0. Every rank has an instance, and every method is collective.

    Args:
        model: the model, on rank 0.
    Raises:
        ValueError: the model cannot be compared with the stages; raised on every rank.
    Attributes:
        fits_wide: whether rank 0 has memory for the model in float64.
        notes: lines for the printed result, set by :meth:`note`.
    """

    def __init__(self, runner: Runner, arguments: StepArguments, model: Any) -> None:
        self._runner, self._group, self._rank = runner, runner.pipeline.group, runner.pipeline.rank
        self._last = runner.pipeline.rank_of_stage[-1]
        refuse(self._group, _refusal(runner, model))
        own = list(named_tensors(own_modules(runner)))
        first = {id(held.tensor): held.name for held in reversed(own)}
        compared = [first[id(p)] for _, p in runner.pipeline.named_parameters() if p.requires_grad]
        described = [[h.name, h.place, h.kind, tuple(h.tensor.shape), h.tensor.requires_grad] for h in own]
        everyones = self._group.all_gather_object([described, compared])
        self._compared: list[list[str]] = [theirs for _, theirs in everyones]
        self._model: Any = _Model(runner, model) if self._rank == 0 else None
        refuse(self._group, "" if self._model is None else self._model.refusal([theirs for theirs, _ in everyones]))
        self._take(arguments, own)
        self.fits_wide: bool = self._group.all_gather_object(self._model is not None and self._model.fits_wide())[0]

    def _take(self, arguments: StepArguments, own: Sequence[NamedTensor]) -> None:
        """Gives rank 0 every rank's values and keyword arguments, and the target of the last stage's rank."""
        rules = {name: rule for name, rule in self._runner.options.arg_rules.items() if isinstance(rule, str)}
        values = {held.name: held.tensor.detach() for held in own if held.kind != "constant"}
        mine = values, arguments.target if self._rank == self._last else None, arguments.kwargs, rules
        given = [_sent(self._group, mine, rank, 0) for rank in range(self._group.size)]
        if self._model is not None:
            kwargs, all_rules = arguments.kwargs, self._runner.options.arg_rules
            for _, _, theirs, of_rank in given[1:]:
                kwargs, all_rules = _joined(kwargs, theirs), {**of_rank, **all_rules}
            whole_batch = replace(arguments, target=given[self._last][1], kwargs=kwargs)
            self._model.open([theirs for theirs, *_ in given], all_rules, whole_batch)

    def note(self, found: Pass) -> None:
        """Takes facts about the stages from a run of the pipeline: the changed buffers and the type of the output."""
        everyones = self._group.all_gather_object([found.changed, found.returns_tensor])
        texts = None
        if self._model is not None:
            self._model.stage.returns_tensor = everyones[self._last][1]
            texts = self._model.choose({name for theirs, _ in everyones for name in theirs})
        self._differences, self.notes = self._group.all_gather_object(texts)[0]

    def run(self, dtype: torch.dtype | None) -> Pass:
        """Runs the model once, and returns this rank's part of the results, as from a run of the stages in a chain.

        Raises:
            WholeModelError: the model raised an error; raised on every rank.
        """
        self._group.set_limits(self._runner.options.limits.longest)  # ranks wait for rank 0
        self._group.all_gather_object(True)  # ranks in threads share tensors: all have restored them now
        found, told = None, None
        if self._model is not None:
            try:
                found = self._model.session.run_whole(dtype, lambda: self._model.fill(dtype))
                own = {n.removeprefix("model."): f for n, f in found.forwards.items() if n.startswith("model.")}
                own = {n: f._replace(place=f.place.replace("stage 0, model.", "the model, ")) for n, f in own.items()}
                told = ["", found.draws, dict(found.drops), own]
            except WholeModelError as error:
                told = [str(error), False, {}, {}]
        text, draws, drops, forwards = self._group.all_gather_object(told)[0]
        if text:
            raise WholeModelError(text)
        parts = []
        for rank, compared in enumerate(self._compared):
            part = None if found is None else self._model.part(found, compared, rank == 0, rank == self._last)
            parts.append(_sent(self._group, part, 0, rank))
        device = self._runner.pipeline.device
        losses, outputs, gradients = mapped(parts[self._rank], lambda tensor: tensor.to(device))
        return Pass(losses, outputs, gradients, draws, Counter(drops), [], forwards)

    # -- beside numbers --------------------------------------------------------------------------------------------

    def compare(self, plain: Pass, found: Pass) -> list[str]:
        """Returns differences of the stages from the model beside those of numbers, in words. Collective."""
        forwards, drops = self._everyones_forwards(found), Counter[float]()
        for theirs in self._group.all_gather_object(dict(found.drops)):
            drops += Counter(theirs)
        differences = list(self._differences)
        differences += [
            f"dropout: with p = {p:g} the stages drop {drops[p]} numbers of the batch, the model {plain.drops[p]}; "
            "compare the dropout and the training mode of their modules"
            for p in sorted(drops.keys() | plain.drops.keys())
            if drops[p] != plain.drops[p]
        ]
        unlike = [
            f"precision: {name} ({truth.kind}) returns {truth.dtype} in the model, {stage.dtype} in its stage"
            for name, truth in plain.forwards.items()
            for stage in forwards.get(name, ())
            if stage.kind == truth.kind and stage.dtype != truth.dtype
        ]
        return differences + unlike[:1]

    def _everyones_forwards(self, run: Pass) -> dict[str, list[Forward]]:
        """Returns the results of modules from all stages by name; a stand-in for a module counts, too."""
        found: dict[str, list[Forward]] = {}
        for theirs in self._group.all_gather_object(run.forwards):
            for name, forward in theirs.items():
                found.setdefault(name, []).append(forward)
        return found

    def first_difference(self, truth: Pass, chain: Pass, tolerance: float) -> str:
        """Returns, in words, the first module in the model's order whose result differs in the stages; "" if all agree.
        Collective."""
        found = self._everyones_forwards(chain)
        for name, wanted in truth.forwards.items():
            stages = found.get(name, [])
            if name and stages and not any(stage.is_like(wanted, tolerance) for stage in stages):
                return f"{name} ({wanted.kind}) is the first module that returns something else"
        return ""


class _Model:
    """Rank 0's model and its pipeline of one stage.

    Attributes:
        session: runs the model, once :meth:`open` was called.
    """

    def __init__(self, runner: Runner, model: Any) -> None:
        self._runner = runner
        first, bare = without_wrapper(next(iter(runner.pipeline.modules.values()))), without_wrapper(model)
        of_whole = getattr(first, "of_whole", None)
        module, call = (bare, bare) if of_whole is None else of_whole(bare)
        self.stage = _WholeStage(module, call)
        owners, loss_fn = [("", "the model", module)], runner.options.loss_fn
        if isinstance(loss_fn, nn.Module):
            owners.append(("loss: ", "the loss", without_wrapper(loss_fn)))
        self._held = {held.name: held for held in named_tensors(owners)}
        self._names: dict[int, list[str]] = {}  # by id of the tensor, without constants
        for name, held in self._held.items():
            if held.kind != "constant":
                self._names.setdefault(id(held.tensor), []).append(name)
        self._chosen: list[tuple[Tensor, Tensor]] = []  # the model's tensors, each with its value in the stages
        self._frozen: list[str] = []

    # -- what is compared ------------------------------------------------------------------------------------------

    def refusal(self, everyones: Sequence[Sequence[Any]]) -> str:
        """Returns the reason why the model cannot be compared with the ranks' stages, or ""."""
        if any(held.tensor.is_meta for held in self._held.values()):
            return "the model lies on the meta device: verify needs one with memory"
        self._device = common_device([self.stage.model])
        needed, free = self._bytes(3, None), free_bytes(self._device)
        if needed > free:
            return (
                f"the model does not fit beside the stages: values and gradients need {needed / 2**30:.2f} GiB, and "
                f"{free / 2**30:.2f} GiB are free; verify a smaller configuration, with fewer layers, or without model="
            )
        lacking, others, found = [], [], set()
        for rank, theirs in enumerate(everyones):
            for name, place, kind, shape, is_trained in theirs:
                own = self._held.get(name)
                if own is None:
                    lacking += [f"{name} ({place}, rank {rank})"] * (kind != "constant")
                    continue
                found.add(id(own.tensor))
                if own.tensor.shape != shape and kind != "constant":
                    others.append(f"{name} is {shape} in {place}, {tuple(own.tensor.shape)} in the model")
                if kind == "parameter" and own.tensor.requires_grad != is_trained:
                    self._frozen.append(name)
        left = [names[0] for key, names in self._names.items() if key not in found]
        problems = [("stages hold what the model lacks", lacking), ("the model has what no stage holds", left)]
        texts = _listed([*problems, ("shapes differ", others)])
        if not texts:
            return ""
        return (
            f"verify(model=) compares by names, and {'; '.join(texts)}. Stages must have the model's names, as those "
            "of seq1f1b.split and pipeline_stage do"
        )

    def _bytes(self, copies: int, itemsize: int | None) -> int:
        tensors = {id(held.tensor): held.tensor for held in self._held.values()}.values()
        return copies * sum(t.numel() * (itemsize or t.element_size()) for t in tensors)

    def fits_wide(self) -> bool:
        """Returns whether free memory holds a float64 copy, its gradients and three runs' gradients on the ranks."""
        return self._bytes(5, 8) < free_bytes(self._device)

    def choose(self, changed: set[str]) -> list[list[str]]:
        """Chooses the values for the model's runs: the values of the stages.

        Args:
            changed: names of buffers that a step changes. If all parameters equal the model's, an unchanged buffer
                must equal the model's, too.
        Returns:
            differences, and notes.
        """
        taken, stale, apart = list[str](), list[str](), list[str]()
        for names in sorted(self._names.values(), key=lambda names: self._held[names[0]].kind != "parameter"):
            own = self._held[names[0]].tensor
            values = [(name, theirs[name]) for name in names for theirs in self._values if name in theirs]
            if not values:
                continue
            (name, value), *others = values
            apart += [other for other, theirs in others if not _are_equal(value, theirs)]
            if not _are_equal(own.to(value.dtype), value):
                if self._held[name].kind == "parameter":
                    taken.append(name)
                elif name not in changed and not taken:
                    stale.append(name)
                    continue
            self._chosen.append((own, value))
        differences = [
            ("frozen parameters: requires_grad differs in the model", self._frozen),
            ("buffers: the model has another value, and no step changes it", stale),
            ("untied parameters: stages have unlike values for one parameter of the model", apart),
        ]
        return [_listed(differences), _listed([("The model had other values, and took the stages'", taken)])]

    # -- a run -----------------------------------------------------------------------------------------------------

    def open(self, values: list[dict[str, Tensor]], rules: Mapping[str, Any], arguments: StepArguments) -> None:
        """Creates the pipeline and its session; ``values``: the tensors of each rank's stages, by name."""
        options = self._runner.options
        given = {field.name: getattr(options, field.name) for field in fields(options)}
        given |= {"num_segments": 1, "segment_sizes": None, "arg_rules": rules, "transport": "auto", "attention": "any"}
        runner = set_up(self.stage, "1f1b", {**given, "memory": Memory()}, LoopbackGroup(1)[0], above, is_whole=False)
        runner.divides = self._runner.divides
        self._trained = [p for _, p in runner.pipeline.named_parameters() if p.requires_grad]
        self._values, self.session = values, Session(runner, arguments)

    def fill(self, dtype: torch.dtype | None) -> None:
        """Copies the chosen values into the model; called within a run."""
        for own, value in self._chosen:
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            own.data = value.to(own.device, wanted, copy=True)

    def part(self, found: Pass, compared: Iterable[str], is_first: bool, is_last: bool) -> list[list[Any]]:
        """Returns the losses, outputs and gradients of a run for one rank; ``compared``: names of its parameters."""
        by_id = {id(p): gradient for p, gradient in zip(self._trained, found.gradients, strict=False)}
        gradients = [by_id.get(id(self._held[name].tensor)) for name in compared]
        of_inputs = found.gradients[len(self._trained) :] if is_first else []
        return [list(found.losses) * is_last, list(found.outputs) * is_last, [*gradients, *of_inputs]]


class _WholeStage(nn.Module):
    """The model as one stage. If the stages return a tensor, the model's tensor is unwrapped, as from transformers."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.returns_tensor = False
        self.__dict__["call"] = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.__dict__["call"](*args, **kwargs)
        tensors = tensors_of(output)
        return tensors[0] if self.returns_tensor and len(tensors) == 1 else output


def _refusal(runner: Runner, model: Any) -> str:
    if runner.options.head is not None or runner.options.embedding is not None:
        return "verify(model=) compares whole layers, and this engine spreads its vocabulary over the ranks"
    if runner.pipeline.rank_of_stage[0] != 0:
        return "verify(model=) runs the model on rank 0, which must hold the first stage"
    if runner.pipeline.rank != 0:
        return ""
    if runner.options.loss_fn is None:
        return "verify(model=) runs the model and its loss here: give this rank's engine loss_fn, too"
    if not isinstance(model, nn.Module):
        return f"model must be a torch.nn.Module, the whole one, given on rank 0, got {type(model).__name__}"
    return ""


@sendable
@dataclass(frozen=True)
class _TensorForm:
    """Shape and dtype of a tensor in a sent value. One message for each tensor follows the value."""

    shape: tuple[int, ...]
    dtype: str


def _sent(group: RankGroup, value: Any, source: int, destination: int) -> Any:
    """Sends a value with tensors between two ranks. Returns it at the destination, on the CPU, else None. Collective.

    Raises:
        TypeError: besides tensors, the value holds an object that ranks cannot exchange.
    """
    if source == destination:
        return value if group.rank == source else None

    def form_of(tensor: Tensor) -> _TensorForm:
        return _TensorForm(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def taken(form: _TensorForm) -> Tensor:
        like = torch.empty(form.shape, dtype=getattr(torch, form.dtype), device="cpu")
        return group.exchange(None, [], [source], like)[source]

    forms = group.all_gather_object(mapped(value, form_of) if group.rank == source else None)[source]
    for tensor in tensors_of(value) if group.rank == source else ():
        group.exchange(tensor.detach(), [destination], [], tensor.detach())
    return mapped(forms, taken, _TensorForm) if group.rank == destination else None


def _joined(own: Any, theirs: Any) -> Any:
    """Merges the keyword arguments of two ranks; the first rank's value counts if both have a name."""
    if not own or not theirs:
        return own or theirs
    if isinstance(own, list):
        return [{**b, **a} for a, b in zip(own, theirs, strict=True)]
    return {**theirs, **own}


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.detach().cpu().to_dense(), other.detach().cpu().to_dense())


def _listed(found: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Returns each text with its names; texts without names are left out."""
    texts = []
    for text, names in found:
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        texts += [f"{text}: {', '.join(names[:_LISTED])}{more}"] * bool(names)
    return texts
