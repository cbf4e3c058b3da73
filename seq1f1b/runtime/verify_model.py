"""The model itself as the reference of a verification: it runs whole on rank 0, with the values that the stages hold.

There it is a pipeline of one stage and one segment, so batch, loss and weighting are the engine's. What it gives goes
to the ranks that hold the same: losses and outputs to the last stage's, each gradient to those with its parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.runtime.batch import StepArguments
from seq1f1b.runtime.nested import mapped, tensors_of
from seq1f1b.runtime.runner import Runner
from seq1f1b.runtime.verify_runs import Forward, Pass, Session, own_tensors, plain_name
from seq1f1b.runtime.verify_whole import Held, Shape, Whole, held_as, named_tensors
from seq1f1b.transport.values import pack, sendable

__all__: list[str] = []

_LISTED = 5  # names in an error


class NotRun(ValueError):
    """The model does not run in some dtype. Raised on every rank, between two exchanges."""


@sendable
@dataclass(frozen=True)
class Given:
    """The part that a rank brings to the comparison.

    Attributes:
        refusal: why it cannot take part, or "".
        compared: first names of the parameters that it trains, in the order of its gradients.
        kwargs: keyword arguments of its stages, tensors as :class:`Shape`; rules: those of them that are plain words.
    """

    refusal: str
    held: list[Held]
    compared: list[str]
    target: Any
    kwargs: Any
    rules: dict[str, Any]


@sendable
@dataclass(frozen=True)
class _Filled:
    """Names whose values were others in the model than in the stages.

    Attributes:
        parameters: took the stages' values.
        stale: buffers that no step changes, although all parameters are as in the model.
        apart: of one parameter of the model of which stages hold unlike copies.
    """

    parameters: list[str]
    stale: list[str]
    apart: list[str]


class WholeModel:
    """Runs the whole model on rank 0. Every rank makes one, and all call the same methods: each is collective.

    Args:
        model: on rank 0.
    Raises:
        ValueError: the model cannot be compared with the stages; on every rank alike.
    Attributes:
        fits_wide: whether rank 0 has memory for the model in float64.
        notes: for whoever reads the result, once the model has run.
    """

    def __init__(self, runner: Runner, arguments: StepArguments, model: Any) -> None:
        self._runner, self._arguments = runner, arguments
        self._group, self._rank = runner.pipeline.group, runner.pipeline.rank
        self._last = runner.pipeline.rank_of_stage[-1]
        self._process = 0 if self._group.is_thread else self._rank
        self._own = {id(tensor): tensor for *_, tensor in named_tensors(own_tensors(runner))}
        self._model: Whole | None = None
        refusal = _refusal(runner)
        if self._rank == 0 and not refusal:
            refusal = _refusal_of(model)
        if self._rank == 0 and not refusal:
            try:
                self._model = Whole(runner, model)
                refusal = self._model.refusal()
            except Exception as error:  # the others hear of it, too
                refusal = f"the model cannot be prepared: {type(error).__name__}: {error}"
        own = self._given(refusal)
        self._everyones: list[Given] = self._group.all_gather_object(own)
        for rank, given in enumerate(self._everyones):
            if given.refusal:
                raise ValueError(f"rank {rank}: {given.refusal}")
        told = self._group.all_gather_object(self._model.told() if self._model is not None else None)[0]
        self.fits_wide: bool = told[0]
        self._wanted: list[list[Held]] = told[1]  # of the model, by tensor: its names
        self._check_names()
        self._changed: set[str] = set()
        self._differences: list[str] = self._frozen()
        self.notes: list[str] = []
        self._forwards: dict[torch.dtype | None, dict[str, Forward]] = {}  # by the dtype of the run
        self._session: Session | None = None
        merged = self._merged_arguments()
        if self._model is not None:
            self._session = Session(self._model.runner(self._rules()), merged)

    # -- what the ranks bring --------------------------------------------------------------------------------------

    def _given(self, refusal: str) -> Given:
        runner, arguments, held, first = self._runner, self._arguments, [], dict[int, str]()
        for owner in own_tensors(runner):
            for prefix, name, kind, tensor in named_tensors([owner]):
                held.append(held_as(prefix + plain_name(name), owner[1], kind, tensor, self._process))
                first.setdefault(id(tensor), prefix + plain_name(name))
        compared = [first[id(p)] for _, p in runner.pipeline.named_parameters() if p.requires_grad]
        rules = {name: rule if isinstance(rule, str) else None for name, rule in runner.options.arg_rules.items()}
        target = arguments.target if self._rank == self._last != 0 else None
        kwargs = arguments.kwargs if self._rank else None
        try:
            given = Given(refusal, held, compared, _described(target), _described(kwargs), rules)
            pack(given)
            return given
        except TypeError as error:
            return Given(refusal or f"target or kwargs cannot go to rank 0: {error}", held, compared, None, None, rules)

    def _check_names(self) -> None:
        """Every rank comes to the same."""
        known = {held.name: held for several in self._wanted for held in several}
        lacking, others, found = [], [], set()
        for rank, given in enumerate(self._everyones):
            for held in given.held:
                theirs = known.get(held.name)
                if theirs is None:
                    if held.kind != "constant":
                        lacking.append(f"{held.name} ({held.place}, rank {rank})")
                elif theirs.value.shape != held.value.shape and held.kind != "constant":
                    others.append(
                        f"{held.name} is {held.value.shape} in {held.place}, {theirs.value.shape} in the model"
                    )
                found.add(held.name)
        left = [s[0].name for s in self._wanted if s[0].kind != "constant" and not any(h.name in found for h in s)]
        problems = [("stages hold what the model lacks", lacking), ("the model has what no stage holds", left)]
        texts = [f"{text}: {_listed(names)}" for text, names in problems if names]
        texts += [_listed(others)] * bool(others)
        if texts:
            raise ValueError(
                f"verify(model=) compares by names, and {'; '.join(texts)}. Stages must have the model's names, as "
                "those of seq1f1b.split and pipeline_stage do"
            )

    def _frozen(self) -> list[str]:
        """Parameters that the model trains and a stage does not, or the reverse."""
        trained = {held.name: held.is_trained for several in self._wanted for held in several}
        unlike = {h.name: h for g in self._everyones for h in g.held if h.kind == "parameter"}
        names = [name for name, held in unlike.items() if trained[name] != held.is_trained]
        return [f"{FROZEN}: requires_grad is another one in the model for {_listed(names)}"] if names else []

    def _rules(self) -> dict[str, Any]:
        rules: dict[str, Any] = {}
        for given in reversed(self._everyones):
            rules |= {name: rule for name, rule in given.rules.items() if rule is not None}
        return rules | dict(self._runner.options.arg_rules)

    def _merged_arguments(self) -> StepArguments:
        """The step's arguments on rank 0: the target of the last stage's rank, and every rank's keyword arguments."""
        arguments, target, kwargs = self._arguments, self._arguments.target, self._arguments.kwargs
        for rank, given in enumerate(self._everyones):
            if rank == self._last != 0:
                target = self._moved(given.target, arguments.target, rank)
            if rank and given.kwargs:
                theirs = self._moved(given.kwargs, arguments.kwargs, rank)
                kwargs = theirs if not kwargs else _joined(kwargs, theirs) if self._rank == 0 else kwargs
        return replace(arguments, target=target, kwargs=kwargs)

    def _moved(self, described: Any, own: Any, source: int) -> Any:
        """On rank 0 the value of another rank."""
        tensors = iter(tensors_of(own) if self._rank == source else ())
        return mapped(described, lambda shape: self._send(next(tensors, None), shape, source, 0), Shape)

    def _send(self, tensor: Tensor | None, shape: Shape, source: int, destination: int) -> Any:
        """A tensor of one rank on another, on the CPU; None elsewhere."""
        if source == destination or self._rank not in (source, destination):
            return tensor if self._rank == source else None
        like = shape.empty_bytes()
        if self._rank == source:
            assert tensor is not None
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            if len(data):
                self._group.exchange(data, [destination], [], like)
            return tensor
        found = self._group.exchange(None, [], [source], like)[source] if len(like) else like
        return found.view(shape.torch_dtype).reshape(shape.shape)

    # -- a run -----------------------------------------------------------------------------------------------------

    def note(self, found: Pass) -> None:
        """Notes what a run of the pipeline tells of the stages: which buffers a step changes, and what comes out."""
        everyones = self._group.all_gather_object([found.changed, found.returns_tensor])
        self._changed = {name for theirs, _ in everyones for name in theirs}
        if self._model is not None:
            self._model.stage.returns_tensor = everyones[self._last][1]

    def run(self, *, dtype: torch.dtype | None) -> Pass:
        """One run of the model.

        Returns:
            what the stages in a chain would give on this rank.
        Raises:
            NotRun: the model raised an error, on every rank.
        """
        self._group.set_limits(self._runner.options.limits.longest)  # the other ranks wait for rank 0
        self._group.all_gather_object(True)  # all have given back what ranks that are threads share
        found, error = self._on_rank_0(dtype) if self._session is not None else self._beside()
        text = "" if error is None else f"{type(error).__name__}: {error}".splitlines()[0]
        if text := self._group.all_gather_object(text)[0]:
            raise NotRun(text) from error
        return self._spread(found, dtype)

    def recover(self, error: Exception) -> str:
        """The text of an error of :meth:`run`, if the ranks can go on after it."""
        if not isinstance(error, NotRun):
            raise error
        return str(error)

    def end(self) -> None:
        if self._session is not None:
            self._session.end()

    def _beside(self) -> tuple[None, None]:
        """Keeps the other ranks at work while rank 0 fills the model."""
        for several, holders in self._transfers():
            for rank, held in holders:
                if rank == self._rank and held.key != several[0].key:
                    self._send(self._own[held.key[1]], held.value, rank, 0)
        return None, None

    def _on_rank_0(self, dtype: torch.dtype | None) -> tuple[Pass | None, Exception | None]:
        assert self._session is not None
        is_filled = False

        def fill() -> None:
            nonlocal is_filled
            self._fill(dtype)
            is_filled = True

        try:
            return self._session.run(whole=True, dtype=dtype, fill=fill), None
        except Exception as error:
            if not is_filled:  # the other ranks stand in another exchange
                raise
            self._session.recover(error)
            return None, error

    def _transfers(self) -> Iterator[tuple[list[Held], list[tuple[int, Held]]]]:
        """Tensors of the model that get values of stages, parameters first: their names there, and their holders."""
        holders: dict[str, list[tuple[int, Held]]] = {}
        for rank, given in enumerate(self._everyones):
            for held in given.held:
                holders.setdefault(held.name, []).append((rank, held))
        for kind in ("parameter", "buffer"):
            for several in self._wanted:
                if several[0].kind == kind:
                    found = {h.key: (rank, h) for held in several for rank, h in holders.get(held.name, ())}
                    yield several, list(found.values())

    @torch.no_grad()
    def _fill(self, dtype: torch.dtype | None) -> None:
        """Gives the model's tensors the values that the stages hold."""
        assert self._model is not None
        filled = self._filled = _Filled([], [], [])
        for several, holders in self._transfers():
            mine, is_own = self._model.tensors[several[0].name], False
            for rank, held in holders:
                if held.key == several[0].key:  # a stage in this process has the model's own
                    is_own = True
                    continue
                value = self._send(self._own[held.key[1]] if rank == 0 else None, held.value, rank, 0)
                value = value.detach().to(mine.device)
                is_other = not torch.equal(mine.data.to(value.dtype), value)
                if is_own:
                    filled.apart.extend([held.name] * is_other)
                    continue
                is_own = True
                if is_other and held.kind == "buffer" and held.name not in self._changed and not filled.parameters:
                    filled.stale.append(f"{held.name} of {held.place}")
                    continue
                if is_other and held.kind == "parameter":
                    filled.parameters.append(held.name)
                mine.data = value.to(dtype if dtype and value.is_floating_point() else value.dtype, copy=True)

    def _spread(self, found: Pass | None, dtype: torch.dtype | None) -> Pass:
        """Spreads what rank 0 found to the ranks that hold the same."""
        told, gradients = None, dict[str, Tensor]()
        if found is not None:
            assert self._model is not None
            gradients = self._model.gradients(found)
            told = [
                [float(loss) for loss in found.losses],
                [Shape.of(output) for output in found.outputs],
                {name: Shape.of(g) for name, g in gradients.items()},
                found.draws,
                dict(found.drops),
                {n.removeprefix("model."): tuple(f) for n, f in found.forwards.items() if n.startswith("model.")},
                self._filled,
            ]
        losses, outputs, shapes, draws, drops, forwards, filled = self._group.all_gather_object(told)[0]
        self._forwards[dtype] = {name: Forward(*each) for name, each in forwards.items()}
        self._note(drops, filled)
        names = {held.name: several[0].name for several in self._wanted for held in several}
        mine = found.outputs if found is not None else [None] * len(outputs)
        arrived = [self._send(t, shape, 0, self._last) for t, shape in zip(mine, outputs, strict=True)]
        result: list[Tensor | None] = []
        for rank, given in enumerate(self._everyones):
            for name in given.compared:
                shape = shapes.get(names[name])
                value = self._send(gradients.get(names[name]), shape, 0, rank) if shape is not None else None
                if rank == self._rank:
                    result.append(value)
        device = self._runner.pipeline.device
        not_finite: list[Any] = []
        if found is not None and self._model is not None:
            result += found.gradients[len(self._model.trained) :]  # of inputs
            if found.not_finite:
                key, text = found.not_finite
                not_finite = [key, text.replace("stage 0, model.", "the model, ")]
        return Pass(
            [torch.tensor(loss, dtype=torch.float64, device=device) for loss in losses if self._rank == self._last],
            [output.to(device) for output in arrived if self._rank == self._last],
            [None if g is None else g.to(device) for g in result],
            draws,
            Counter(drops),
            [],
            [],
            not_finite,
        )

    def _note(self, drops: dict[float, int], filled: _Filled) -> None:
        self._drops, texts = Counter(drops), []
        if filled.stale:
            texts.append(f"{BUFFERS}: the model has another value for {_listed(filled.stale)}, and no step changes it")
        if filled.apart:
            texts.append(f"{UNTIED}: stages have unlike values for one parameter of the model, {_listed(filled.apart)}")
        self._differences += [text for text in texts if text not in self._differences]
        if filled.parameters and not self.notes:
            self.notes.append(f"The model had other values, and took the stages': {_listed(filled.parameters)}.")

    # -- beside numbers --------------------------------------------------------------------------------------------

    def compare_with(self, found: Pass) -> list[str]:
        """Says in words what differs beside numbers. Collective."""
        forwards, drops = self._everyones_forwards(found), Counter[float]()
        for theirs in self._group.all_gather_object(dict(found.drops)):
            drops += Counter(theirs)
        differences = list(self._differences)
        for p in sorted(drops.keys() | self._drops.keys()):
            if drops[p] != self._drops[p]:
                differences.append(
                    f"{DROPOUT}: with p = {p:g} the stages drop {drops[p]} numbers of the batch, the model "
                    f"{self._drops[p]}; compare the dropout and the training mode of their modules"
                )
        both = (
            (name, stage, truth)
            for name, truth in self._forwards[None].items()
            for stage in forwards.get(name, ())
            if stage.kind == truth.kind
        )
        unlike = [(name, stage, truth) for name, stage, truth in both if stage.autocast != truth.autocast]
        if unlike:
            name, stage, truth = unlike[0]
            differences.append(
                f"{PRECISION}: {name} ({truth.kind}) runs {_cast(truth)} in the model, {_cast(stage)} in its stage"
            )
        return differences

    def _everyones_forwards(self, run: Pass) -> dict[str, list[Forward]]:
        """By name, those of all stages that have such a module: its kind, or what stands for it."""
        own = {name: tuple(forward) for name, forward in run.forwards.items()}
        found: dict[str, list[Forward]] = {}
        for theirs in self._group.all_gather_object(own):
            for name, forward in theirs.items():
                found.setdefault(name, []).append(Forward(*forward))
        return found

    def first_difference(self, chain: Pass, dtype: torch.dtype | None, tolerance: float) -> str:
        """The first module, in the model's order, that returns something else in the stages, in words; "" if none does.
        Collective."""
        found = self._everyones_forwards(chain)
        for name, truth in self._forwards[dtype].items():
            stages = found.get(name, [])
            if name and stages and not any(_are_alike(stage, truth, tolerance) for stage in stages):
                stage = next((stage for stage in stages if stage.kind == truth.kind), stages[0])
                mode = {True: "training", False: "evaluation"}
                text = f"{name} ({truth.kind}) is the first module that returns something else"
                if stage.kind != truth.kind:
                    text += f"; its stage has a {stage.kind} there"
                if stage.is_training != truth.is_training:
                    text += f"; it is in {mode[stage.is_training]} mode, in the model in {mode[truth.is_training]} mode"
                return text
        return ""


FROZEN, BUFFERS, UNTIED = "frozen parameters", "buffers", "untied parameters"
DROPOUT, PRECISION = "dropout", "precision"


def _cast(forward: Forward) -> str:
    return f"under autocast to {forward.autocast}" if forward.autocast else "without autocast"


def _refusal(runner: Runner) -> str:
    if runner.options.head is not None or runner.options.embedding is not None:
        return "verify(model=) compares whole layers, and this engine spreads its vocabulary over the ranks"
    if runner.pipeline.rank == 0 and runner.options.loss_fn is None:
        return "verify(model=) runs the model and its loss here: give this rank's engine loss_fn, too"
    if runner.pipeline.rank_of_stage[0] != 0:
        return "verify(model=) runs the model on rank 0, which must hold the first stage"
    return ""


def _refusal_of(model: Any) -> str:
    if model is None:
        return "model= was given on another rank: give the whole model on rank 0"
    if not isinstance(model, nn.Module):
        return f"model must be a torch.nn.Module, the whole one, got {type(model).__name__}"
    return ""


def _described(value: Any) -> Any:
    return mapped(value, Shape.of)


def _joined(left: Any, right: Any) -> Any:
    """Keyword arguments of two ranks; the left ones count where both have them."""
    if isinstance(left, list) and isinstance(right, list):
        return [{**theirs, **own} for own, theirs in zip(left, right, strict=True)]
    if isinstance(left, list) or isinstance(right, list):
        raise ValueError("kwargs is a list of micro-batches on one rank and a dict on another: give all one form")
    return {**right, **left}


def _are_alike(found: Forward, truth: Forward, tolerance: float) -> bool:
    scale = tolerance * max(abs(truth.norm), 1e-30)
    return abs(found.norm - truth.norm) <= scale and abs(found.total - truth.total) <= 10 * scale


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
