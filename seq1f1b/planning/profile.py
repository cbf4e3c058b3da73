"""Measured costs of the units of a stage on a machine: the file that ``seq1f1b profile`` writes and plans read.

Imports no torch; :mod:`seq1f1b.planning.profiler` measures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from seq1f1b.partition import ModelShape, check_model
from seq1f1b.plan import _File
from seq1f1b.seconds import PASSES, Fit, PassSeconds, pairs_of, spans_of
from seq1f1b.table import table_text

__all__ = ["Fit", "Part", "PassSeconds", "Profile"]

TIER = ("tier_out", "tier_in", "move_out", "move_in")


@dataclass(frozen=True)
class Part:
    """Seconds and bytes of the embedding, of the head, or of one of a stage's equal layers, for one micro-batch.

    Attributes:
        layers: number of layers of the measured stage.
        forward, backward: F and the whole B in the engine.
        input, weight: I and W in the engine, in an order that splits every backward. W reads no keys or values, and has
            no cost per pair of tokens.
        recompute: R, less the time saved by an F that builds no graph: ``forward`` + ``recompute`` are the engine's
            seconds of F and R together.
        noise: spread from run to run: half the interquartile range over the median, median over the samples.
        saved_bytes, saved_token_bytes: bytes in the graph of a unit from F to B, or to I: floor, and per token.
        kept_token_bytes: the part of the saved bytes that W reads, kept until W, per token.
        gradient_token_bytes: gradients of layers' outputs, added by I for W, per token.
        moved_token_bytes: bytes that go to the tier with a moved unit, per token; the rest of the saved bytes stays. 0
            if no tier was measured.
        kv_bytes, kv_gradient_bytes: bytes of the cache, per token.
        message_bytes: bytes of the stage's output, per token.
    """

    layers: int
    forward: Fit
    backward: Fit
    input: Fit
    weight: Fit
    recompute: Fit
    noise: float
    saved_bytes: float
    saved_token_bytes: float
    kept_token_bytes: float
    gradient_token_bytes: float
    moved_token_bytes: float
    kv_bytes: float
    kv_gradient_bytes: float
    message_bytes: float

    def seconds(self, tokens: float, pairs: float, floor: bool = True) -> PassSeconds:
        """Returns the measured seconds of every pass. I + W exceeds B, since a split has a price."""
        return PassSeconds(*(getattr(self, name).seconds(tokens, pairs, floor) for name in PassSeconds._fields))

    def unit_bytes(self, tokens: int, layers: int = 1) -> tuple[float, float, float]:
        """Returns the bytes that a unit of some layers saves, keeps until W, and adds in I to the saved bytes.

        As I goes back through the layers, gradients for W take the place of freed tensors, and count as kept. Added are
        the gradients of one layer, which frees its tensors at its end, and the excess of each further layer.
        """
        saved = self.saved_bytes + self.saved_token_bytes * tokens
        kept, gradients = np.minimum(saved, self.kept_token_bytes * tokens), self.gradient_token_bytes * tokens
        excess = np.maximum(0.0, kept + gradients - saved)
        added = np.minimum(gradients + (layers - 1) * excess, layers * gradients)
        return layers * saved, layers * (kept + gradients) - added, added


@dataclass(frozen=True)
class Profile(_File):
    """Costs of a model's parts on a machine.

    Attributes:
        machine, torch, threads, dtype: setting of the measurement; dtype of products, where "bfloat16 autocast" has
            float32 weights.
        device: "cpu", or "cuda": times of the GPU, not of the host.
        processes: number of processes that measured at once.
        seconds: duration of the measurement.
        seq_len: longest measured sequence.
        lora: rank of the adapters of the measured layers, whose other weights were frozen; 0: all were trained.
        model: the shape; ``layers`` of the shape may differ from the measured stage.
        unit_overhead: the engine's own seconds between two units.
        step_overhead: seconds of a step outside of the order.
        layer, embedding, head: the parts; None: the model has no such end, or the stage of layers contained the end.
            The head's backward is a B here; the engine runs the backward of a head in the loss at the end of F.
        tier_out, tier_in: bytes per second of a process to the tier and back, while all processes compute and move.
            None: no tier was measured.
        move_out, move_in: seconds by which a process's units slow down per byte moved out, and back: to start a move,
            and to compute beside the move. None: no tier was measured.
    """

    _kind, _format, _again, _least = "profile", "seq1f1b profile 7", "measure again with seq1f1b profile", 0

    machine: str
    torch: str
    threads: int
    processes: int
    dtype: str
    seconds: float
    seq_len: int
    model: ModelShape
    unit_overhead: float
    step_overhead: float
    layer: Part
    embedding: Part | None = None
    head: Part | None = None
    tier_out: float | None = None
    tier_in: float | None = None
    move_out: float | None = None
    move_in: float | None = None
    device: str = "cpu"
    lora: int = 0

    def parts(self) -> dict[str, Part]:
        """Returns the measured parts, by name."""
        named = {"layer": self.layer, "embedding": self.embedding, "head": self.head}
        return {name: part for name, part in named.items() if part is not None}

    def spread(self, passes: str) -> float:
        """Returns a relative spread: residual of the fit of a layer's pass (``"forward"``), mean residual of embedding
        and head, weighted by time (``"ends"``), or noise between runs (``"runs"``)."""
        if passes == "runs":
            return self.layer.noise
        if passes != "ends":
            return float(getattr(self.layer, passes).residual)
        ends = [part for part in (self.embedding, self.head) if part is not None]
        fits = [fit for part in ends for fit in (part.forward, part.backward)]
        seconds = [fit.seconds(self.seq_len, 0.0) for fit in fits]
        spread = sum(each * fit.residual for each, fit in zip(seconds, fits, strict=True))
        return spread / sum(seconds) if sum(seconds) > 0 else 0.0

    def move_spread(self, name: str) -> float:
        """Returns the spread of ``move_out`` or ``move_in`` in seconds per byte: twice the noise between runs of a
        difference of two times of F, or of B."""
        fit = self.layer.forward if name == "move_out" else self.layer.backward
        moved = self.layer.moved_token_bytes * self.seq_len
        seconds = fit.seconds(self.seq_len, pairs_of((self.seq_len,), 0, self.seq_len))
        return 2 * math.sqrt(2) * self.layer.noise * seconds / moved if moved else 0.0

    def piece_costs(self, seq_len: int, num_pieces: int) -> list[float]:
        """Returns the seconds of F and B of the whole model for each of ``num_pieces`` equal pieces of a sequence,
        without floors, so that pieces add up to segments."""
        spans = spans_of([seq_len * (i + 1) // num_pieces - seq_len * i // num_pieces for i in range(num_pieces)])
        counts = {"layer": self.model.layers, "embedding": 1, "head": 1}
        costs: Any = sum(
            counts[name] * part.seconds(spans.tokens, spans.pairs, floor=False).total
            for name, part in self.parts().items()
        )
        return list(costs.tolist())

    def to_text(self) -> str:
        """Returns a table of the fits, and lines about bytes."""
        rows = [("part", "pass", "floor us", "us/token", "ns/pair", "fit +-", "runs +-")]
        for name, part in self.parts().items():
            for kind in PASSES.values():
                floor, token, pair, residual = getattr(part, kind)
                numbers = (f"{floor * 1e6:.1f}", f"{token * 1e6:.3f}", f"{pair * 1e9:.3f}")
                rows.append((name, kind, *numbers, f"{residual:.1%}", f"{part.noise:.1%}"))
        lines = [
            f"{self.machine}, torch {self.torch}, {self.dtype}, {self.threads} threads in {self.processes} processes; "
            f"up to {self.seq_len} tokens, measured in {self.seconds:.0f} s",
            *table_text(rows).splitlines(),
        ]
        layer = self.layer
        lines.append(
            f"a token of a layer keeps {layer.saved_token_bytes:.0f} bytes for B, or for I, which leaves "
            f"{layer.kept_token_bytes + layer.gradient_token_bytes:.0f} to W; {layer.kv_bytes:.0f} in the cache "
            f"and {layer.kv_gradient_bytes:.0f} in its gradients; its message has {layer.message_bytes:.0f}"
        )
        if self.tier_out is not None and self.tier_in is not None:
            lines.append(
                f"a token of a layer moves {layer.moved_token_bytes:.0f} bytes; a process's tier takes "
                f"{self.tier_out / 1e9:.3g} GB/s and gives back {self.tier_in / 1e9:.3g} GB/s; its units take "
                f"{(self.move_out or 0.0) * 1e9:.2g} + {(self.move_in or 0.0) * 1e9:.2g} s longer for each GB"
            )
        return "\n".join(lines)

    def _check(self) -> None:
        check_model(self.model, "profile: model")
        for name, part in self.parts().items():
            if part.layers < 1:
                raise ValueError(f"profile: {name}: layers is {part.layers}, must be at least 1")
            for kind in PASSES.values():
                if not any(getattr(part, kind)[:3]):
                    raise ValueError(f"profile: {name}: {kind} costs nothing: measure again")
        absent = [name for name in TIER if getattr(self, name) is None]
        if absent and len(absent) < len(TIER):
            raise ValueError(f"profile: {', '.join(absent)} is missing: {', '.join(TIER)} come together")
        for name in ("tier_out", "tier_in"):
            if getattr(self, name) == 0:
                raise ValueError(f"profile: {name} is 0: measure again")
