"""Measures the bytes that autograd keeps for a backward, while a forward runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.attention.unit import LiveUnit
from seq1f1b.engine.features import Feature, Received
from seq1f1b.engine.model_state import runs_compiled
from seq1f1b.engine.replicas import Fsdp
from seq1f1b.engine.stage import StageStep

__all__: list[str] = []


@dataclass(frozen=True)
class Activations:
    """Bytes that the units of one stage held in a step: per token, and at the peak of each kind."""

    saved: float  # of graphs, from F to the end of B, or of I
    kept: float  # of `saved`, inputs of layers that W reads, if the backward is split
    gradients: float  # also left by I to W: gradients of layers' outputs, and inputs made by a recomputation
    head: float  # of the graph of a head within the loss, freed at the end of F
    peak_saved: int  # most at once of `saved`, of `kept` after I, and of `head`
    peak_gradients: int


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counter of the storages that a graph saves within the context, each once, except parameters and given tensors.

    Do not measure a compiled module: compiled code hides saved tensors, and is traced again under hooks. Tensors saved
    by torch.func's transforms are not counted.
    """

    is_partial = False  # True: some storages could not be counted

    def __init__(self, modules: Iterable[nn.Module], excluded: Iterable[Any]) -> None:
        super().__init__(self.pack, self.unpack)
        known = [t for t in excluded if isinstance(t, Tensor)]
        for module in modules:
            known += [*module.parameters(), *module.buffers()]
        self._seen = {address for t in known for address in storages_of(t)}
        self.bytes = 0

    def count(self, tensor: Tensor) -> Tensor:
        """Counts a tensor's storages. Returns the tensor detached: an output in its own graph would be a cycle."""
        storages = storages_of(tensor)
        self.is_partial |= not storages
        self.bytes += sum(size for address, size in storages.items() if address not in self._seen)
        self._seen |= storages.keys()
        return tensor.detach()

    def pack(self, tensor: Tensor) -> Any:
        """Packs a tensor for the graph, and counts its bytes."""
        return self.count(tensor), tensor._version

    def unpack(self, kept: Any) -> Tensor:
        """Returns the tensor to a backward. Checks for changes in place, because torch does not under hooks."""
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {version}"
            )
        return tensor  # type: ignore[no-any-return]

    def __enter__(self) -> None:
        _replace_refusal(1)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _replace_refusal(-1)


_refuse_hooks = torch.autograd.graph.disable_saved_tensors_hooks
_num_counting, _lock = 0, threading.Lock()


def _replace_refusal(more: int) -> None:
    """Replaces torch.func's refusal of hooks while any thread counts, so that a counter's hooks pass."""
    global _num_counting
    with _lock:
        _num_counting += more
        chosen: Any = _without_counter if _num_counting else _refuse_hooks
        torch.autograd.graph.disable_saved_tensors_hooks = chosen


@contextmanager
def _without_counter(message: str) -> Iterator[None]:
    """Takes the counter's hooks off while a transform runs, so that measuring changes nothing in training."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    counter = getattr(top and top[0], "__self__", None)
    with ExitStack() as around:
        if isinstance(counter, SavedBytes):
            counter.is_partial = True
            counter.__exit__()
            around.callback(counter.__enter__)
        around.enter_context(_refuse_hooks(message))
        yield


def storages_of(tensor: Any) -> dict[int, int]:
    """Returns the bytes of each storage with the tensor's values, by address; empty if torch does not tell.

    A wrapper tensor (a DTensor, a quantized weight) has its values in inner tensors; a sparse tensor has no storage.
    """
    try:
        if hasattr(tensor, "__tensor_flatten__"):
            inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
            return {address: size for t in inner for address, size in storages_of(t).items()}
        storage = tensor.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    except Exception:  # of any kind: measuring must not fail a step
        return {}


class Measuring(Feature):
    """The feature that measures units in the first step of a shape: bytes in graphs, and bytes left by I to W."""

    is_for_new = True

    def start(self, step: StageStep) -> bool:
        stage = step.stage
        self._modules = stage.modules
        self._saved = self._peak_saved = 0  # of all units
        self._kept = self._gradients = self._peak_gradients = 0  # left by I to W
        self._head = self._head_tokens = 0
        self._head_now = 0  # bytes in the graph of the running unit's head, freed at the end of F
        self._is_partial = False  # some storages could not be counted
        if not step.batch.training:
            return False
        # Graphs under FSDP2 hold parameters, too, and compiled graphs hide saved tensors.
        is_compiled = any(runs_compiled(part) for module in stage.modules for part in module.modules())
        return not (is_compiled or any(isinstance(p, Fsdp) for p in stage.wrappers))

    @contextmanager
    def around(self, unit: LiveUnit, inputs: tuple[Any, ...]) -> Iterator[None]:
        self._head_now = 0
        saved = SavedBytes(self._modules, inputs) if unit.away is None else unit.away
        with saved if unit.away is None else nullcontext():
            yield
        self._is_partial |= saved.is_partial
        if unit.kept is None:  # else F runs without a graph, and R saves
            unit.saved_bytes = saved.bytes
            self._saved += saved.bytes
        if self._head_now:
            self._head += self._head_now
            self._head_tokens += self._step.lengths[unit.cell]
        self.note(self._head_now)

    @contextmanager
    def around_head(self, hidden: Tensor) -> Iterator[None]:
        """Counts the bytes of a head within the loss, around the head's forward; ``around`` is the hook of F and R."""
        saved = SavedBytes(self._modules, (hidden,))
        with saved:
            yield
        self._head_now = saved.bytes
        self._is_partial |= saved.is_partial

    def after_backward(self, unit: LiveUnit, received: Received) -> None:
        """Counts what I has left on the tape, for W; the unit still has its inputs."""
        if unit.tape is None:
            return
        # Tensors in receive places do not count.
        given = [*unit.leaves, *(received[0][0] if received is not None else ())]
        places = {address for t in given if isinstance(t, Tensor) for address in storages_of(t)}
        kept, gradients = unit.tape.held_bytes(places)
        unit.kept_bytes = min(kept, unit.saved_bytes)  # F has not saved what a recomputation made
        unit.gradient_bytes = gradients + kept - unit.kept_bytes
        self._kept += unit.kept_bytes
        self._gradients += unit.gradient_bytes
        pending = sum(other.gradient_bytes for other in self._step.units.values() if other.tape is not None)
        self._peak_gradients = max(self._peak_gradients, pending)

    def note(self, more: int = 0) -> None:
        """Raises the peak of saved bytes to the present sum over units; ``more``: bytes on top."""
        live = more
        for unit in self._step.units.values():
            live += unit.saved_bytes - (0 if unit.away is None else unit.away.away_bytes)
            live += unit.kept_bytes if unit.tape is not None else 0
        self._peak_saved = max(self._peak_saved, live)

    def figures(self) -> dict[str, Any]:
        if self._is_partial:
            return {}
        lengths = self._step.lengths
        tokens = max(1, sum(lengths[cell] for cell in self._step.order.split))
        return {
            "activations": Activations(
                saved=self._saved / sum(lengths),
                kept=self._kept / tokens,
                gradients=self._gradients / tokens,
                head=self._head / max(1, self._head_tokens),
                peak_saved=self._peak_saved,
                peak_gradients=self._peak_gradients,
            )
        }
