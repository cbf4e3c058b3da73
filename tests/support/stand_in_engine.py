"""Engines whose GPUs are stand-ins: rank r has device r, whose memory is the host's, and computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stand_in_library import stand_in

from seq1f1b import PipelineEngine
from seq1f1b.device.edges import DeviceEdges
from seq1f1b.runtime.step import Step


class StandInEdges(DeviceEdges):
    def __init__(self, *arguments: Any) -> None:
        self.driver = stand_in().path
        super().__init__(*arguments)

    def ordinal(self) -> int:
        return self._group.rank

    def stream(self) -> int:
        return 0

    def place_views(self) -> Any:
        return self._group.place_views

    def begin_step(self, timeout_s: float) -> None:
        stand_in().enter(self.ordinal())
        super().begin_step(timeout_s)


class StandInStep(Step):
    """The host waits for the stream before each unit, and keeps what was sent: it would be free for what the host does
    next, but not for what the stream does."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.kept: list[Any] = []

    def choose_run(self, *, host_messages: bool) -> Callable[..., Any]:
        run = super().choose_run(host_messages=host_messages)

        def after_the_stream(*arguments: Any) -> Any:
            stand_in().synchronise()
            self.kept.append(run(*arguments))
            return self.kept[-1]

        return after_the_stream


class StandInEngine(PipelineEngine):
    """Its kernels are torch's on the CPU, which know nothing of a stream."""

    _device_edges_class = StandInEdges

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._stand_in_steps: list[StandInStep] = []

    def _step_class(self, *arguments: Any) -> StandInStep:
        self._stand_in_steps.append(StandInStep(*arguments))
        return self._stand_in_steps[-1]

    @property
    def num_waits(self) -> int:
        return sum(len(step.kept) for step in self._stand_in_steps)
