"""Engines whose GPUs are stand-ins: rank r has device r, whose memory is the host's, and computes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stand_in_library import stand_in

from seq1f1b import _C, PipelineEngine
from seq1f1b.device.edges import DeviceEdges
from seq1f1b.device.host_tier import HostTier
from seq1f1b.transport import RankGroup
from seq1f1b.transport.edges import place_views


class StandInEdges(DeviceEdges):
    proof_bytes = (1 << 16) - 1

    def __init__(self, *arguments: Any) -> None:
        self.driver = stand_in().path
        super().__init__(*arguments)
        self.kept: list[Any] = []

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        run_unit = super().around(run)

        def after_the_stream(*arguments: Any) -> Any:
            stand_in().synchronise(self.ordinal())
            self.kept.append(run_unit(*arguments))
            return self.kept[-1]

        return after_the_stream

    def ordinal(self) -> int:
        return self.group.rank

    @staticmethod
    def serve(device: torch.device, group: RankGroup) -> bool:
        return True

    def identity(self) -> str:
        return f"stand-in {self.ordinal()}"

    def warm(self) -> None:
        """Nothing: kernels are torch's on the CPU."""

    def gpu_views(self) -> Any:
        return place_views

    def begin_step(self) -> None:
        _C.device_begin_step(self.gpu, 0)


class StandInTier(HostTier):
    """What a GPU's allocator gives out again is ordered by the stream that computes, what the host frees is not: the
    host stands for that stream, and waits with it."""

    @staticmethod
    def check(device: torch.device) -> None:
        pass

    def __init__(self, device: torch.device, group: RankGroup) -> None:
        super().__init__(device, group)
        self.ordinal = group.rank

    def wait(self, number: int) -> None:
        super().wait(number)
        stand_in().synchronise(self.ordinal)


class StandInEngine(PipelineEngine):
    """Its kernels are torch's on the CPU, which know nothing of a stream: the host waits for it before each unit, and
    keeps what was sent, whose memory would be free for what the host does next, but not for what the stream does."""

    _gpu_part = staticmethod({"edges": StandInEdges, "host tier": StandInTier}.__getitem__)
