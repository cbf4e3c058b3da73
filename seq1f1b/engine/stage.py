"""A stage: state for all steps, and F and B of units in one step, called by the executor.

A source brings inputs, a sink takes outputs on: ``loss.py`` has the sink of the last stage, ``vocabulary_step.py``
source and sink of a vocabulary over the ranks. The end of an edge, which sends or receives messages, belongs to
``transport``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from seq1f1b import _C
from seq1f1b.attention.unit import LiveUnit, as_message, enter
from seq1f1b.documents.rows import by_paths
from seq1f1b.engine.features import Feature, Pass, Received
from seq1f1b.engine.findings import DOCUMENTS, Finding, Findings
from seq1f1b.engine.options import Options
from seq1f1b.engine.order import StageOrder
from seq1f1b.nested import mapped, tensors_of

if TYPE_CHECKING:
    from seq1f1b.engine.batch import Batch
    from seq1f1b.engine.pipeline import Pipeline

__all__: list[str] = []


class Stage:
    """A stage of the rank, equal in every step: module, place in the pipeline, wrappers and features.

    Args:
        features: classes of the features, listed in ``runner.py``.
        is_whole: units are whole micro-batches, as outside a step.
    """

    def __init__(
        self,
        index: int,
        pipeline: Pipeline,
        options: Options,
        features: Sequence[type[Feature]],
        *,
        is_whole: bool,
    ) -> None:
        self.module: nn.Module | Callable[..., Any] = pipeline.modules[index]
        self.index, self.device, self.num_stages = index, pipeline.device, pipeline.num_stages
        self.is_first = index == 0
        self.is_last = index == pipeline.num_stages - 1
        # If the vocabulary is spread, the output goes to the shards of all ranks.
        self.loss_fn = options.loss_fn if self.is_last and options.head is None else None
        # A loss that holds parameters is the model's head: its logits live only inside F.
        self.loss_is_head = isinstance(self.loss_fn, nn.Module) and any(True for _ in self.loss_fn.parameters())
        self.group = pipeline.group
        self.tier: Any = pipeline.tier  # for saved tensors; None: no tier
        self.in_threads = pipeline.group.is_thread  # ranks that are threads share random generators
        self.is_whole = is_whole
        self.findings = Findings(options.attention)
        self.parallel = pipeline.parallels.get(id(self.module))
        self.head_parallel = pipeline.parallels.get(id(self.loss_fn))
        # Ddp or Fsdp of the module and of the head, if wrapped.
        self.wrappers: list[Any] = [each for each in (self.parallel, self.head_parallel) if each is not None]
        # Checks of arguments by modules, as by stages of transformers models.
        modules: Any = self.module.modules() if isinstance(self.module, nn.Module) else ()
        self.checks = [part.check_before_step for part in modules if hasattr(type(part), "check_before_step")]
        every = [make(self, options) for make in features]
        self.features = [feature for feature in every if not feature.is_idle]

    @property
    def modules(self) -> list[nn.Module]:
        """The stage's module, and the loss if it is a module."""
        return [module for module in (self.module, self.loss_fn) if isinstance(module, nn.Module)]

    @property
    def trained_weights(self) -> int:
        """Returns the number of elements of all parameters that require grad, each once."""
        parameters = {id(p): p.numel() for module in self.modules for p in module.parameters() if p.requires_grad}
        return sum(parameters.values())


class StageStep:
    """A stage in one step: runs the module on a unit at a time, and holds the units until the step ends.

    Every segment has a graph of its own: inputs are leaves of autograd, keys and values pass between segments through
    the cache, other state through ``carry``. B is ``torch.autograd.backward`` on the graph, so parameters' hooks fire.

    Args:
        auxiliary_seeds: returns the gradients with which the backward of a unit's auxiliary losses starts: of losses of
            the segment, and of losses of the whole sequence.
    """

    _source: Any = None  # set by connect
    _sink: Any = None

    def __init__(
        self,
        stage: Stage,
        order: StageOrder,
        batch: Batch,
        auxiliary_seeds: Callable[[LiveUnit], tuple[float, float]],
    ) -> None:
        self.stage, self.order, self.batch, self._auxiliary_seeds = stage, order, batch, auxiliary_seeds
        self.units: dict[int, LiveUnit] = {}  # by cell
        self.lengths = [size for row in batch.rows for size in row]  # in tokens, by cell
        self.has_auxiliary = False
        self.figures: dict[str, Any] = {}  # of all parts, for the report; set by end
        self._module, self._parallel = stage.module, stage.parallel
        for check in stage.checks:
            check(self)
        self.features: list[Feature] = []
        for feature in stage.features:
            is_served = not feature.serves or not order.kinds.isdisjoint(feature.serves)
            if is_served and (batch.is_new or not feature.is_for_new):
                feature._step = self
                if feature.start(self):
                    self.features.append(feature)
        self.measure: Any = next((each for each in self.features if hasattr(each, "around_head")), None)  # Measuring

    def connect(self, source: Source, sink: Any) -> dict[str, Pass]:
        """Connects the stage to a source of inputs and a sink of outputs; edges to other ranks are open already.

        Returns:
            functions that run units of the stage, by the letter of the pass; ``"fill"`` runs a piece of W.
        """
        self._source, self._sink = source, sink
        # A hook that no feature has costs nothing.
        self._around = [each.around for each in self.features if type(each).around is not Feature.around]
        passes: dict[str, Pass] = {"F": self.forward, "B": self.backward, "I": self.backward}
        for feature in self.features:
            passes |= feature.passes()
        return passes

    def end(self) -> None:
        """Ends the stage's step, also after an error: breaks cycles of references; units and figures stay."""
        self.figures = {name: value for feature in self.features for name, value in feature.figures().items()}
        for feature in self.stage.features:
            feature._step = None
        self.features, self._around, self.measure = [], [], None
        self._source = self._sink = None

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, cell: int, received: Received) -> tuple[Tensor, ...] | None:
        """Runs F(m.s); returns the tensors to send."""
        order, batch, units = self.order, self.batch, self.units
        m, s, is_last = order.places[cell]
        unit = LiveUnit(self.stage.index, m, s, cell, batch.training, units[order.parents[cell]] if s else None)
        unit.is_whole, unit.is_last = self.stage.is_whole, is_last
        if order.num_children is not None:
            unit.of_tree, unit.num_waiting = True, order.num_children[cell]
        if batch.num_parts:  # a unit of several sibling leaves, also at the end of a chain
            unit.num_parts = batch.num_parts[cell]
            unit.of_tree |= unit.num_parts > 1
        inputs = self._source.inputs(unit, received)
        units[cell] = unit
        enter(unit)
        result = self.run(unit, inputs)
        if self._sink.end is not None:
            self._sink.end(unit)
        if not batch.training:  # no backward follows: only the next segment reads carried states
            if unit.previous is not None and not unit.previous.waits_for_others():
                unit.previous.forget()
            carried_out = None if is_last else unit.carried_out
            unit.forget()
            unit.carried_out = carried_out
        return result

    def run(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """Runs the module and gives the output to the sink, in F and in R; returns the tensors to send."""
        with ExitStack() as stack:
            for around in self._around:
                context = around(unit, inputs)
                if context is not None:
                    stack.enter_context(context)
            kwargs = self.kwargs_of(unit)
            if self.batch.has_documents:  # without doc_ids, attention refuses several (``csrc/torch/segment_rows.c``)
                _C.current_unit_set_documents(self.batch.documents[unit.microbatch])
            if self.batch.paths:
                output = self._run_paths(unit, inputs, kwargs)
            else:
                output = self._module(*inputs, **kwargs)
            if self._parallel is not None and self.order.last_gradients == ("B", unit.cell):
                unit.outputs = tuple([o for o in tensors_of(output) if o.requires_grad])
            sent: tuple[Tensor, ...] | None = self._sink.take(unit, output)
        if self.batch.has_documents and not unit.is_again:
            self._look_at_documents(unit)
        return sent

    def _look_at_documents(self, unit: LiveUnit) -> None:
        """Warns if the stage carries state along several documents, and gets no tensor that may tell them apart."""
        carries = unit.carried_in is not None or unit.carried_out is not None
        given: list[Any] = [*self.kwargs_of(unit).values()]
        if self.stage.is_first and self.batch.inputs is not None:
            given += self.batch.inputs[unit.cell][1:]
        if carries and self.batch.documents[unit.microbatch] > 1 and not any(map(tensors_of, given)):
            what = "carries state along packed documents, and is not told where they begin"
            self.stage.findings.judge([Finding(DOCUMENTS, f"stage {self.stage.index}", what)])

    def _run_paths(self, unit: LiveUnit, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the module on each path of a tree alone, for a unit that is a whole micro-batch."""
        paths, rules = self.batch.paths[unit.cell], self.batch.arg_rules
        dim, is_sliced = self.batch.seq_dim, lambda name: rules.get(name) == "slice"
        output = by_paths(self._module, paths, dim, inputs, dict(kwargs), is_sliced)
        if unit.auxiliary and len(paths) > 1:
            raise ValueError(
                "verify over trees cannot compare losses of add_loss, which count shared tokens once: verify rows"
            )
        return output

    def kwargs_of(self, unit: LiveUnit) -> dict[str, Any]:
        """Returns the unit's keyword arguments."""
        return {} if self.batch.kwargs is None else self.batch.kwargs[unit.cell]

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, cell: int, received: Received) -> tuple[Tensor | None, ...] | None:
        """Runs B(m.s), or I(m.s) if W makes the weight gradients; returns the gradients to send."""
        unit = self.units[cell]
        unit.in_backward = True
        roots, seeds = unit.start(self._sink.gradients(unit, received))
        if unit.auxiliary is not None:
            self.has_auxiliary = True
            own = self._auxiliary_seeds(unit)
            roots += tuple([loss for loss, _ in unit.auxiliary])
            seeds += tuple([torch.full_like(loss, own[is_of_all]) for loss, is_of_all in unit.auxiliary])
        enter(unit)
        if unit.away is not None:
            unit.away.back()
        if roots:
            is_last = self.order.last_gradients == ("B", cell)
            around = nullcontext() if self._parallel is None else self._parallel.backward(is_last, unit.outputs)
            with around:
                torch.autograd.backward(roots, seeds)
        if unit.carried_in is not None:
            unit.carry_back()
        if self.measure is not None:
            self.measure.after_backward(unit, received)
        returned = None if self._source.give_back is None else self._source.give_back(unit)
        unit.forget()
        return returned


# -- the two ends of a stage -------------------------------------------------------------------------------------------


Spec: TypeAlias = "list[tuple[Any, ...]]"
"""The shape, dtype, type, device and layout of each output of a unit."""


@dataclass(eq=False)
class Source:
    """Source of a stage's inputs, here the step's arguments by cell."""

    given: Sequence[tuple[Any, ...]] = ()

    def inputs(self, unit: LiveUnit, received: Received) -> tuple[Any, ...]:
        """Returns the module's positional arguments, for F of a unit."""
        return self.given[unit.cell]

    give_back: ClassVar[Any] = None
    """Called with a unit after its backward, for the inputs' gradients that cross to another rank; None: none do."""


class FromStage(Source):
    """Source of all stages but the first: outputs of the previous stage, as leaves of the unit's graph.

    Args:
        previous: :class:`StageStep` of the previous stage if it lies on this rank: no transfer is needed; else None.
    """

    def __init__(self, training: bool, previous: Any) -> None:
        self._training, self._previous = training, previous

    def inputs(self, unit: LiveUnit, received: Received) -> tuple[Any, ...]:
        if received is not None:
            tensors, requires_grad = received[0]
        else:
            tensors = self._previous.units[unit.cell].take_handed()
            requires_grad = [tensor.requires_grad for tensor in tensors]
        pairs = zip(tensors, requires_grad, strict=True)
        unit.leaves = tuple([tensor.detach().requires_grad_(self._training and needs) for tensor, needs in pairs])
        return unit.leaves

    def give_back(self, unit: LiveUnit) -> tuple[Tensor | None, ...] | None:
        gradients = unit.input_gradients()
        if self._previous is None:
            return gradients
        unit.handed = gradients
        return None


@dataclass(eq=False)
class ToStage:
    """Sink of a stage's outputs in one step, here the following stage.

    Args:
        step: :class:`StageStep` of the stage.
        following: :class:`StageStep` of the following stage if it lies on this rank; else None.
    """

    step: Any
    following: Any
    _specs: dict[int, Spec] = field(default_factory=dict)  # of outputs, by segment length

    end: ClassVar[Any] = None
    """Called with the unit at the end of F, outside of all that surrounds it; None: nothing is left to do."""

    def take(self, unit: LiveUnit, output: Any) -> tuple[Tensor, ...] | None:
        """Sets, in F and R, where the unit's backward starts (roots and seeds); returns tensors for other ranks."""
        outputs = output if isinstance(output, tuple) else (output,)
        spec: Spec = [(o.shape, o.dtype, type(o), o.device, o.layout) for o in outputs if isinstance(o, Tensor)]
        if len(spec) < len(outputs) or self._specs.get(self.step.lengths[unit.cell]) != spec:
            self._check(outputs, spec, self.step.lengths[unit.cell])
        outputs = tuple([as_message(o) for o in outputs])
        if unit.kept is not None:
            outputs = tuple([unit.kept.with_gradient(o, unit.carried_in) for o in outputs])
        elif unit.training:
            # A gradient edge in place of the output: the storage is freed once the output is sent.
            unit.roots = tuple([get_gradient_edge(o) if o.requires_grad else None for o in outputs])
        if unit.is_again:  # R: F has handed over the outputs
            return None
        if self.following is None:
            return outputs
        unit.handed = outputs
        return None

    def gradients(self, unit: LiveUnit, received: Received) -> Sequence[Tensor | None]:
        """Returns the gradients of the unit's roots, for B; None for a root without gradient."""
        if received is not None:  # detached: a hook may keep its gradient, and `leave_place` counts holders of views
            return [None if gradient is None else gradient.detach() for gradient in received[0][0]]
        return self.following.units[unit.cell].take_handed()  # type: ignore[no-any-return]

    def _check(self, outputs: tuple[Any, ...], spec: Spec, length: int) -> None:
        device, index = self.step.stage.device, self.step.stage.index
        for o in outputs:
            if not isinstance(o, Tensor):
                raise TypeError(
                    f"a stage must return a tensor or a tuple of tensors, stage {index} returned {type(o).__name__}"
                )
            if hasattr(o, "to_local"):
                raise TypeError(f"stage {index} returned a DTensor; return its to_local() instead")
            if o.device != device or o.layout != torch.strided:
                raise ValueError(
                    f"stage {index} returned a {o.layout} tensor on {o.device}; its outputs must be strided on {device}"
                )
        known = self._specs.setdefault(length, spec)
        if [own[:2] for own in known] != [own[:2] for own in spec]:
            raise ValueError(
                f"stage {index} returned {_spec_text(spec)} for a segment of {length} tokens, and "
                f"{_spec_text(known)} for another of the same length in this step"
            )


def detached(output: Any) -> Any:
    """Returns a copy of an output in memory of its own: the output may alias the receive place of an input."""
    return mapped(output, lambda tensor: tensor.detach().clone())


def _spec_text(spec: Spec) -> str:
    return ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype, *_ in spec)
