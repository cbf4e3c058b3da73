"""Machines and model shapes by name: data files with the source of every number beside it.

``presets/models`` holds shapes, ``presets/hardware`` machines. A number that is not certain has a range; what a machine
does not state comes from ``default.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any, ClassVar

from seq1f1b.files import check_names, is_number, nearest_name, parse_json, read
from seq1f1b.partition import ModelShape, make_model
from seq1f1b.plan import INSIDE, Layout
from seq1f1b.planning.by_parts import ByParts, ByProfile
from seq1f1b.planning.configs import shape_of
from seq1f1b.planning.profile import Profile
from seq1f1b.seconds import PassSeconds

__all__ = ["Hardware", "ProfiledHardware", "load_hardware", "load_model", "presets"]


@dataclass(frozen=True)
class Hardware:
    """One device and what joins it to others. Rates per second, in FLOP and bytes; times in seconds.

    Attributes:
        memory: bytes of a device.
        peak: rate of matrix products in the training dtype.
        bandwidth: of its memory.
        node_size: devices of a node; inside_*, between_*: links within a node and between nodes, per device.
        tier_bandwidth: to where what units save may move, and back, each way: pinned host memory of a GPU, a file of a
            CPU; 0: none.
        host_memory: bytes of a node's host memory that its devices may pin for such a tier, all together; 0: the
            machine is a CPU, or not described, and its tier is a file.
        move_out, move_in: seconds of a rank's own for a byte that it sends there, and that it brings back.
        link_efficiency: share of a link's rate that messages and collectives reach.
        release_tokens: sequences of so many tokens or more give pages of the cache back as backwards end; 0: none do.
        linear_efficiency, attention_*_efficiency: shares of ``peak``.
        head_tile: attention works on heads of multiples of it; others are padded.
        attention_*_rows: attention over a segment takes as long as over so many rows more.
        saved_moves: times that element-wise operations of F move a byte that is saved; 1.5 times as often backward.
        launch, *_kernels: floor of a layer's pass: kernels times seconds to launch one.
        unit_overhead: the engine's own time per unit.
        split_backward_extra: share by which I + W take longer than B.
        inside_send, between_send: seconds of a rank's own for a message, where it waits for it.
        *_exposed: share of that parallelism's communication that no computation hides.
        collective_latency: seconds of a collective of tensor parallelism beyond its bytes.
        activation_factor: saved activations over the tensors counted here.
        allocator_reserve: share of what changes during a step that fragments lose.
        length_pools: 1 where freed blocks of segments of one length do not serve another length, 0 where they do.
        collective_buffers: whole hidden states of a segment, per layer of a unit under tensor parallelism, that stay
            allocated until the device is through with the unit.
        context_bytes: held beside tensors.
        element_bytes: of weights and activations; gradient_bytes and optimizer_bytes: per parameter.
        spread: (low, high) of every field that is not certain.
        sources: where each field comes from.
    """

    name: str
    memory: float
    peak: float
    bandwidth: float
    node_size: float
    inside_bandwidth: float
    between_bandwidth: float
    inside_latency: float
    between_latency: float
    inside_send: float
    between_send: float
    tier_bandwidth: float
    host_memory: float
    move_out: float
    move_in: float
    link_efficiency: float
    release_tokens: float
    linear_efficiency: float
    attention_forward_efficiency: float
    attention_backward_efficiency: float
    head_tile: float
    attention_forward_rows: float
    attention_backward_rows: float
    saved_moves: float
    launch: float
    forward_kernels: float
    input_kernels: float
    weight_kernels: float
    unit_overhead: float
    split_backward_extra: float
    collective_latency: float
    tensor_exposed: float
    expert_exposed: float
    data_exposed: float
    activation_factor: float
    allocator_reserve: float
    length_pools: float
    collective_buffers: float
    context_bytes: float
    element_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def host_share(self) -> float:
        """Bytes of pinned host memory for each device of a full node, 0 if its tier is none of host memory."""
        return self.host_memory / self.node_size

    @property
    def device_type(self) -> str:
        """The kind of devices as torch calls it, ``"cuda"`` or ``"cpu"``."""
        return "cuda" if self.host_memory else "cpu"

    rates: ClassVar[str] = "assumed rates"
    """The origin of the seconds, in words."""
    insides: ClassVar[tuple[str, ...]] = INSIDE
    """The kinds of ``Layout(inside=)`` that it has seconds of."""

    def link(self, devices: float) -> float:
        """Bytes per second among so many neighbouring devices."""
        return (self.inside_bandwidth if devices <= self.node_size else self.between_bandwidth) * self.link_efficiency

    def parts(self, model: ModelShape, layout: Layout, layers: tuple[int, ...], num_ranks: int) -> ByParts:
        """Seconds and bytes of a model in stages of so many layers on this machine."""
        return ByParts(model, self, layout, layers, num_ranks)


@dataclass(frozen=True)
class ProfiledHardware(Hardware):
    """A machine on which the units of a model were measured: ``profile`` stands for rates, launches and efficiencies.

    Memory, links and the optimizer stay those of the machine; activations, cache and messages are measured bytes.

    Attributes:
        measured_forward, measured_input, measured_weight, measured_backward, measured_recompute, measured_ends: factors
            on the measured seconds of a layer's F, I, W, B and R, and of embedding and head; 1, within twice the spread
            of the fit.
        measured_runs: a factor on all of them; 1, within twice the spread from run to run.
    """

    profile: Profile = field(kw_only=True)
    measured_forward: float = 1.0
    measured_input: float = 1.0
    measured_weight: float = 1.0
    measured_backward: float = 1.0
    measured_recompute: float = 1.0
    measured_ends: float = 1.0
    measured_runs: float = 1.0

    rates: ClassVar[str] = "measured units"
    insides: ClassVar[tuple[str, ...]] = ("none",)  # stages were measured as they are

    def parts(self, model: ModelShape, layout: Layout, layers: tuple[int, ...], num_ranks: int) -> ByParts:
        """Seconds and bytes of a model in stages of so many layers, as they were measured."""
        return ByProfile(model, self, layout, layers, num_ranks)

    @classmethod
    def of(cls, profile: Profile, machine: Hardware) -> ProfiledHardware:
        """The profile, and of the machine what no profile measures, or this one did not: a tier.

        Raises:
            ValueError: the profile is of another kind of device than the machine.
        """
        if profile.device != machine.device_type:
            raise ValueError(
                f"the profile is of {profile.machine}, measured on {profile.device!r}, and {machine.name} is a machine "
                f"of {machine.device_type!r}: name one of the same kind, or measure with seq1f1b profile --device "
                f"{machine.device_type}"
            )
        spread = dict(machine.spread)
        for passes in (*PassSeconds._fields, "ends", "runs"):
            share = min(2 * profile.spread(passes), 0.99)
            if share > 0:
                spread[f"measured_{passes}"] = (1 - share, 1 + share)
        for name in ("unit_overhead", "split_backward_extra", "activation_factor"):
            spread.pop(name, None)
        values = {f.name: getattr(machine, f.name) for f in fields(Hardware)}
        values |= {"name": f"{profile.machine} (profile)", "spread": spread, "unit_overhead": profile.unit_overhead}
        values["split_backward_extra"] = 0.0  # I and W are measured
        if profile.tier_out is not None and profile.tier_in is not None:
            values["tier_bandwidth"] = 2 / (1 / profile.tier_out + 1 / profile.tier_in)
            spread.pop("tier_bandwidth", None)
            for name in ("move_out", "move_in"):
                values[name], within = getattr(profile, name), profile.move_spread(name)
                spread[name] = (max(0.0, values[name] - within), values[name] + within)
        return cls(**values, profile=profile)


_PRESETS = resources.files("seq1f1b") / "presets"


def presets(kind: str) -> tuple[str, ...]:
    """Names that :func:`load_model` (kind ``"models"``) or :func:`load_hardware` (``"hardware"``) takes."""
    names = (entry.name.rpartition(".")[::2] for entry in (_PRESETS / kind).iterdir())
    return tuple(sorted(name for name, suffix in names if suffix == "json" and name != "default"))


def _read(kind: str, name: str) -> dict[str, Any]:
    """A preset by its name, or any file whose path ends in .json."""

    def fields_in(text: str) -> dict[str, Any]:
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError("must hold an object of named fields")
        return data

    if name.endswith(".json"):
        return read(name, fields_in)
    if name != "default" and name not in presets(kind):
        raise ValueError(
            f"there is no preset {name!r} among {kind}{nearest_name(name, presets(kind))}; or give a path to a .json"
        )
    return fields_in((_PRESETS / kind / f"{name}.json").read_text(encoding="utf-8"))


def load_model(name: str) -> ModelShape:
    """A shape of ``presets/models``, of a file of the same form, or of a model of transformers by its ``config.json``.

    Raises:
        ValueError: no such preset, a field that is unknown, missing or no whole number; names file and field. A
            ``config.json`` of another architecture than those in ``seq1f1b.planning.configs.MODELS``.
        OSError: the file cannot be read.
    """
    data = _read("models", name)
    if "model_type" in data or "hidden_size" in data:
        data = shape_of(data, name)
    data.pop("source", None)
    return make_model(data, name)


def load_hardware(name: str) -> Hardware:
    """A machine of ``presets/hardware``, or of a file of the same form, over the defaults.

    A field is ``{"value": number, "source": text}``, with ``"low"`` and ``"high"`` where it is not certain.

    Raises:
        ValueError: no such preset; a field that is unknown, missing, not a number, or outside its range.
        OSError: the file cannot be read.
    """
    data = {**_read("hardware", "default"), **_read("hardware", name)}
    numbers = [f.name for f in fields(Hardware) if f.name not in ("name", "spread", "sources")]
    check_names(data, numbers, name)
    values, spread, sources = {}, {}, {}
    for key, entry in data.items():
        if not isinstance(entry, dict) or not set(entry) <= {"value", "low", "high", "source"} or "value" not in entry:
            raise ValueError(f'{name}: {key} is {entry!r}, must be {{"value": number, "source": text}}')
        ends: tuple[Any, ...] = tuple(entry.get(part, entry["value"]) for part in ("low", "value", "high"))
        low, value, high = ends
        if not all(map(is_number, ends)):
            raise ValueError(f"{name}: {key} is {entry!r}, must be finite numbers")
        if not 0 <= low <= value <= high or (value == 0 and key in _ABOVE_ZERO):
            raise ValueError(f"{name}: {key} is {value} in [{low}, {high}], must be 0 < low <= value <= high")
        values[key], sources[key] = float(value), str(entry.get("source", ""))
        if low < high:
            spread[key] = (float(low), float(high))
    return Hardware(name=name, spread=spread, sources=sources, **values)


_ABOVE_ZERO = frozenset(
    {
        *("memory", "peak", "bandwidth", "node_size", "inside_bandwidth", "between_bandwidth", "link_efficiency"),
        *("linear_efficiency", "attention_forward_efficiency", "attention_backward_efficiency", "head_tile"),
        *("saved_moves", "activation_factor", "element_bytes", "gradient_bytes"),
    }
)
