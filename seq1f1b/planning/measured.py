"""A cost model whose units take what an engine measured of its own."""

from __future__ import annotations

from collections.abc import Sequence

from seq1f1b.planning.cost import CostModel, Span, UnitSeconds
from seq1f1b.planning.row_costs import spans_of
from seq1f1b.planning.step_plan import StepPlan
from seq1f1b.runtime.report import PipelineReport
from seq1f1b.runtime.unit_times import Terms, UnitTimes, unit_seconds

__all__ = ["MeasuredCost", "look_at_step"]


class MeasuredCost(CostModel):
    """Units take what was measured; bytes and messages are those of ``cost``. What was not measured takes as many times
    as long as ``cost`` says as what was.

    Args:
        cost: of the model on a machine.
        terms: of every stage.
    """

    _terms: Terms

    def __init__(self, cost: CostModel, terms: Terms) -> None:
        vars(self).update(vars(cost), _last_seconds=None, _terms=terms)

    def seconds_of(self, spans: Sequence[Span]) -> UnitSeconds:
        known = super().seconds_of(spans)
        found = UnitSeconds([], [], [], [], [])
        for stage, (f, i, w, b, r) in enumerate(zip(*known, strict=True)):
            own = {kind: self._seconds(kind, stage, spans) for kind in "FIWBR"}
            forward = own["F"] or f
            inputs, weights = own["I"] or own["B"], own["W"]
            backward = own["B"] or ([x + y for x, y in zip(own["I"], own["W"], strict=False)] or b)
            if not weights:
                inputs, weights = _like(backward, i, b), _like(backward, w, b)
            rows = (forward, inputs, weights, backward, own["R"] or _like(forward, r, f))
            for table, row in zip(found, rows, strict=True):
                table.append(row)
        return found

    def _seconds(self, kind: str, stage: int, spans: Sequence[Span]) -> list[float]:
        """Seconds of each span; none where no such unit was measured."""
        fit = self._terms.get((kind, stage))
        return [] if fit is None else [fit.seconds(span.tokens, span.pairs) for span in spans]


def _like(measured: Sequence[float], wanted: Sequence[float], known: Sequence[float]) -> list[float]:
    """The wanted seconds, of which the known ones were measured."""
    return [each * x / y if y > 0 else x for each, x, y in zip(measured, wanted, known, strict=True)]


def look_at_step(times: UnitTimes, report: PipelineReport, plan: StepPlan) -> bool:
    """Adds the units of a planned step. False, and nothing is added, where the report is of another step."""
    spans = [spans_of(row) for row in plan.costs.rows]
    cells = {(m, s) for m, row in enumerate(spans) for s in range(len(row))}
    if any(
        not rank.training or {(u.microbatch, u.segment) for u, _, _ in rank.timeline if u.kind == "F"} != cells
        for rank in report.ranks
    ):
        return False
    for rank in report.ranks:
        for (kind, stage, microbatch, segment), seconds in unit_seconds(rank).items():
            span = spans[microbatch][segment]
            times.add(kind, stage, span.tokens, span.pairs, seconds)
    return True
