"""Engines whose GPUs are stand-ins: rank r has device r, whose memory is the host's, and computes on the CPU."""

from __future__ import annotations

import ctypes
import weakref
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


class Driver:
    """Calls of the stand-in driver in the context of a device."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal, self._context = ordinal, ctypes.c_void_p()
        if stand_in().library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), ordinal) != 0:
            raise RuntimeError("cuDevicePrimaryCtxRetain")

    def __del__(self) -> None:
        stand_in().library.cuDevicePrimaryCtxRelease_v2(self._ordinal)

    def ask(self, function: str, *arguments: Any) -> int:
        library = stand_in().library
        library.cuCtxPushCurrent_v2(self._context)
        found: int = getattr(library, function)(*arguments)
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
        return found

    def call(self, function: str, *arguments: Any) -> None:
        if (found := self.ask(function, *arguments)) != 0:
            raise RuntimeError(f"{function}: error {found}")


class Handle:
    """What a function of the driver has made, destroyed with the last reference."""

    def __init__(self, driver: Driver, function: str, destroy: str, *arguments: Any) -> None:
        self.driver, self.raw = driver, ctypes.c_void_p()
        driver.call(function, ctypes.byref(self.raw), *arguments)
        weakref.finalize(self, driver.ask, destroy, self.raw)


class StandInCuda:
    """The parts of ``torch.cuda`` that a tier uses, as calls of the stand-in driver."""

    def __init__(self, ordinal: int) -> None:
        self.driver = Driver(ordinal)
        self.computes = StandInStream(self.driver, None)  # the null stream

    def Stream(self, device: torch.device) -> StandInStream:
        return StandInStream(self.driver, Handle(self.driver, "cuStreamCreateWithPriority", "cuStreamDestroy_v2", 1, 0))

    def Event(self, enable_timing: bool) -> StandInEvent:
        return StandInEvent(self.driver)

    def current_stream(self, device: torch.device) -> StandInStream:
        return self.computes


class StandInEvent(Handle):
    def __init__(self, driver: Driver) -> None:
        super().__init__(driver, "cuEventCreate", "cuEventDestroy_v2", 0)
        self.cuda_event = self.raw.value

    def record(self, stream: StandInStream) -> None:
        self.driver.call("cuEventRecord", self.raw, stream.raw)

    def query(self) -> bool:
        return self.driver.ask("cuEventQuery", self.raw) == 0

    def elapsed_time(self, end_event: StandInEvent) -> float:
        found = ctypes.c_float()
        self.driver.call("cuEventElapsedTime", ctypes.byref(found), self.raw, end_event.raw)
        return found.value


class StandInStream:
    def __init__(self, driver: Driver, handle: Handle | None) -> None:
        self._driver, self._handle = driver, handle
        self.raw = None if handle is None else handle.raw

    def wait_event(self, event: StandInEvent) -> None:
        self._driver.call("cuStreamWaitEvent", self.raw, event.raw, 0)

    def wait_stream(self, stream: StandInStream) -> None:
        event = StandInEvent(self._driver)
        event.record(stream)
        self.wait_event(event)

    def query(self) -> bool:
        if (found := self._driver.ask("cuStreamQuery", self.raw)) not in (0, 600):
            raise RuntimeError(f"cuStreamQuery: error {found}")
        return found == 0


class StandInTier(HostTier):
    """What a GPU's allocator gives out again is ordered by the stream that computes, what the host frees is not: the
    host stands for that stream, and waits with it."""

    @staticmethod
    def check(device: torch.device) -> None:
        pass

    def __init__(self, device: torch.device, group: RankGroup) -> None:
        self.ordinal, self.cuda = group.rank, StandInCuda(group.rank)
        super().__init__(device, group)

    def wait(self, number: int) -> None:
        super().wait(number)
        stand_in().synchronise(self.ordinal)

    def _pin(self, size: int) -> torch.Tensor:
        made = Handle(self.cuda.driver, "cuMemHostAlloc", "cuMemFreeHost", ctypes.c_size_t(size), 0)
        memory = (ctypes.c_char * size).from_address(made.raw.value)
        memory.owner = made
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _copy(self, to: torch.Tensor, source: torch.Tensor, stream: StandInStream) -> None:
        function = "cuMemcpyDtoHAsync_v2" if stream is self._out else "cuMemcpyHtoDAsync_v2"
        places = ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(source.data_ptr())
        self.cuda.driver.call(function, *places, ctypes.c_size_t(to.numel()), stream.raw)


class StandInEngine(PipelineEngine):
    """Its kernels are torch's on the CPU, which know nothing of a stream: the host waits for it before each unit, and
    keeps what was sent, whose memory would be free for what the host does next, but not for what the stream does."""

    _gpu_part = staticmethod({"edges": StandInEdges, "host tier": StandInTier}.__getitem__)
