"""Measured costs of the units of a stage on a machine: the file that ``seq1f1b profile`` writes and plans use.

Needs no torch; :mod:`seq1f1b.planning.profiler` measures.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from seq1f1b.files import json_fields, load
from seq1f1b.partition import ModelShape, check_model
from seq1f1b.plan import _File
from seq1f1b.seconds import NO_SECONDS, PASSES, Fit, PassSeconds, pairs_of
from seq1f1b.table import table_text

__all__ = ["Fit", "Part", "PassSeconds", "Profile", "Sample"]

_FORMAT = "seq1f1b profile 6"
TIER = ("tier_out", "tier_in", "move_out", "move_in")


class Sample(NamedTuple):
    """A unit that was measured: tokens ``[begin, begin + tokens)``; medians in seconds of the whole stage.

    The passes come in the order of ``PASSES``; ``recompute`` is as in :class:`Part`.
    """

    begin: int
    tokens: int
    forward: float
    backward: float
    input: float
    weight: float
    recompute: float


@dataclass(frozen=True)
class Part:
    """An end of the model, or one of the equal layers of a stage, for which its seconds and bytes are; one micro-batch.

    Attributes:
        layers: of the stage that was measured.
        forward, backward: F and the whole B, as the engine runs them.
        input, weight: I and W, as the engine runs them in an order that splits every backward. W reads no keys or
            values, so it has no cost per pair.
        recompute: R, less what F saves of its own time because it builds no graph then: ``forward`` and this one are
            the seconds of both together, as the engine runs them.
        noise: from run to run, half the interquartile range over the median, median over the samples.
        saved_bytes, saved_token_bytes: kept by the graph of a unit from F to B, or to I: floor, and per token.
        kept_token_bytes: the part of these that W reads and that stays until W, per token.
        gradient_token_bytes: what I adds to it, which are gradients of layers' outputs, per token.
        moved_token_bytes: what goes to the tier when a unit is moved, per token; the rest of what is saved stays. 0
            where no tier was measured.
        forward_workspace_bytes, forward_workspace_token_bytes: most that F of a unit allocates for a while, beside all
            this: floor, and per token of the unit. Its layers run one after the other, so it is once what one layer
            takes.
        workspace_bytes, workspace_token_bytes: the same of B.
        input_bytes, input_token_bytes: most that I of a unit of one layer holds beyond what was there, gradients that
            it leaves included: floor, and per token. Both are 0 where they were not measured.
        kv_bytes, kv_gradient_bytes: of the cache, per token.
        message_bytes: of what the stage returns, per token.
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
    forward_workspace_bytes: float
    forward_workspace_token_bytes: float
    workspace_bytes: float
    workspace_token_bytes: float
    input_bytes: float
    input_token_bytes: float
    kv_bytes: float
    kv_gradient_bytes: float
    message_bytes: float
    samples: tuple[Sample, ...]

    def seconds(self, tokens: float, pairs: float, floor: bool = True) -> PassSeconds:
        """Every pass as it was measured. I + W is not B: a split costs something."""
        return PassSeconds(*(getattr(self, name).seconds(tokens, pairs, floor) for name in PassSeconds._fields))

    def forward_workspace(self, tokens: int) -> float:
        """Bytes that F of a unit allocates for a while."""
        return self.forward_workspace_bytes + self.forward_workspace_token_bytes * tokens

    def workspace(self, tokens: int) -> float:
        """Bytes that B of a unit allocates for a while."""
        return self.workspace_bytes + self.workspace_token_bytes * tokens

    def unit_bytes(self, tokens: int, layers: int = 1) -> tuple[float, float, float]:
        """Bytes that a unit of so many layers saves, what of them stays until W, and what I adds to all that was saved.

        As I goes back through the layers, gradients that it leaves to W take the place of what it frees. They count
        with what stays. Only what exceeds the saved bytes and :meth:`workspace` while I runs counts as added.
        """
        saved = self.saved_bytes + self.saved_token_bytes * tokens
        kept, gradients = np.minimum(saved, self.kept_token_bytes * tokens), self.gradient_token_bytes * tokens
        if not self.input_bytes and not self.input_token_bytes:
            return layers * saved, layers * kept, layers * gradients
        grows = np.maximum(0.0, kept + gradients - saved)  # with each layer
        most = self.input_bytes + self.input_token_bytes * tokens + (layers - 1) * grows
        added = np.minimum(np.maximum(layers * grows, most - self.workspace(tokens)), layers * gradients)
        return layers * saved, layers * (kept + gradients) - added, added


@dataclass(frozen=True)
class Profile(_File):
    """The costs of a model's parts on a machine.

    Attributes:
        machine, torch, threads, dtype: where, and of the products ("bfloat16 autocast": weights are float32).
        device: "cpu", or "cuda": times are those of the GPU, not of its host.
        processes: that measured the same at the same time.
        seconds: that measuring took.
        seq_len: longest sequence that was measured.
        model: the shape; its ``layers`` say nothing of the measured stage.
        unit: seconds of a unit beyond those of its layers, by pass; zeros where stages of one number of layers were
            measured.
        unit_overhead: the engine's own seconds between two units.
        step_overhead: around a step.
        layer, embedding, head: None: the model has no such end, or it is part of the others. The head's backward is
            its own B; where it is in the loss the engine runs it at the end of F.
        tier_out, tier_in: bytes per second of a process on their way to its tier and back, while all processes compute
            and move. None: no tier was measured.
        move_out, move_in: seconds by which a process's own units take longer for each byte that goes out, and that
            comes back: to begin it, and what of it they feel beside them. None: no tier was measured.
    """

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
    unit: PassSeconds = NO_SECONDS
    device: str = "cpu"

    def parts(self) -> dict[str, Part]:
        """The parts that there are, by name."""
        named = {"layer": self.layer, "embedding": self.embedding, "head": self.head}
        return {name: part for name, part in named.items() if part is not None}

    def spread(self, passes: str) -> float:
        """Relative: of the fit of one of the layer's passes (``"forward"``), or of the ends (``"ends"``) by their
        shares of the time; or from run to run (``"runs"``)."""
        if passes == "runs":
            return self.layer.noise
        if passes != "ends":
            return float(getattr(self.layer, passes).residual)
        whole = spread = 0.0
        for part in (self.embedding, self.head):
            for fit in (part.forward, part.backward) if part is not None else ():
                seconds = fit.seconds(self.seq_len, 0.0)
                whole += seconds
                spread += seconds * fit.residual
        return spread / whole if whole > 0 else 0.0

    def move_spread(self, name: str) -> float:
        """Spread of ``move_out`` or ``move_in`` in seconds per byte: twice the noise between runs, for it is the
        difference of two times of F, or of B."""
        fit = self.layer.forward if name == "move_out" else self.layer.backward
        moved = self.layer.moved_token_bytes * self.seq_len
        seconds = fit.seconds(self.seq_len, pairs_of((self.seq_len,), 0, self.seq_len))
        return 2 * math.sqrt(2) * self.layer.noise * seconds / moved if moved else 0.0

    def piece_costs(self, seq_len: int, num_pieces: int) -> list[float]:
        """Seconds of F and B of the whole model over each of so many equal pieces of a sequence, floors left out:
        segments share them alike."""
        bounds = [seq_len * i // num_pieces for i in range(num_pieces + 1)]
        counts = {"layer": self.model.layers, "embedding": 1, "head": 1}

        def cost(begin: int, end: int) -> float:
            span = end - begin, pairs_of((seq_len,), begin, end)
            return sum(counts[name] * part.seconds(*span, floor=False).total for name, part in self.parts().items())

        return list(itertools.starmap(cost, itertools.pairwise(bounds)))

    def to_text(self) -> str:
        """A table of the fits."""
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
        beyond = ", ".join(f"{kind} {getattr(self.unit, name) * 1e6:.0f}" for kind, name in PASSES.items())
        lines.append(f"a unit takes us beyond its layers: {beyond}")
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

    def to_json(self) -> str:
        """The text of a profile file."""
        data = {"format": _FORMAT, **asdict(self), "model": self.model._asdict(), "unit": self.unit._asdict()}
        for part in self.parts():
            for name in PASSES.values():
                data[part][name] = getattr(self.parts()[part], name)._asdict()
        return json.dumps(data, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Reads what :meth:`to_json` writes.

        Raises:
            ValueError: not such a text; a field that is unknown, missing, of another type, negative or not finite.
        """
        fields = json_fields(text, "profile", _FORMAT, again="measure again with seq1f1b profile")
        profile = load(cls, fields, "profile", least=0)
        check_model(profile.model, "profile: model")
        for name, part in profile.parts().items():
            if part.layers < 1:
                raise ValueError(f"profile: {name}: layers is {part.layers}, must be at least 1")
            for kind in PASSES.values():
                if not any(getattr(part, kind)[:3]):
                    raise ValueError(f"profile: {name}: {kind} costs nothing: measure again")
        absent = [name for name in TIER if getattr(profile, name) is None]
        if absent and len(absent) < len(TIER):
            raise ValueError(f"profile: {', '.join(absent)} is missing: {', '.join(TIER)} come together")
        for name in ("tier_out", "tier_in"):
            if getattr(profile, name) == 0:
                raise ValueError(f"profile: {name} is 0: measure again")
        return profile
