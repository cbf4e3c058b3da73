"""Machines and model shapes by name: data files with a source beside every number.

``presets/models`` holds shapes, ``presets/hardware`` machines. An uncertain number has a range; numbers that a machine
does not state come from ``default.json``, or are 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar

from seq1f1b.files import check_names, is_number, nearest_name, parse_json, read
from seq1f1b.partition import ModelShape, make_model
from seq1f1b.plan import INSIDE
from seq1f1b.planning.configs import shape_of
from seq1f1b.planning.profile import Profile
from seq1f1b.planning.tables import ByParts, ByProfile
from seq1f1b.seconds import PassSeconds

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Hardware", "ProfiledHardware", "load_hardware", "load_model", "presets"]


OPTIMIZERS = {"adamw": 8, "adamw8bit": 2, "sgd": 4, "muon": 4}
"""Bytes of an optimizer's state by name, per parameter: moments alone, in float32, or in 8 bits; SGD with momentum."""


@dataclass(frozen=True)
class Hardware:
    """A device and the links to further devices. Rates per second, in FLOP and bytes; times in seconds.

    Attributes:
        memory: bytes of a device.
        peak: rate of matrix products in the training dtype.
        bandwidth: rate of the device's memory.
        node_size: devices of a node; inside_*, between_*: links within a node and between nodes, per device.
        tier_bandwidth: rate of the tier that takes units' saved bytes, each way: pinned host memory for a GPU, a file
            for a CPU; 0: no tier.
        host_memory: bytes of a node's host memory that all devices of the node together may pin for the tier; 0: the
            machine is a CPU, or not described, and the tier is a file.
        move_out, move_in: seconds that a byte takes of the rank's own time, on the way to the tier and on the way back.
        link_efficiency: share of a link's rate that messages and collectives reach.
        release_tokens: least tokens of a sequence whose cache frees pages as backwards end; 0: the cache frees none.
        linear_efficiency, attention_*_efficiency: shares of ``peak``.
        head_tile: step of attention's head sizes; attention pads a head to a multiple.
        attention_*_rows: rows added to a segment in the estimate of attention's time, for the ends of tiles.
        saved_moves: moves of a saved byte by element-wise operations of F; backward has 1.5 times as many.
        launch, *_kernels: seconds to launch a kernel, and kernels per layer: a pass takes at least the product of both.
        unit_overhead: the engine's own time per unit.
        split_backward_extra: share by which I + W take longer than B.
        inside_send, between_send: seconds for which a message occupies the sender.
        *_exposed: share of the communication of tensor, expert or data parallelism that no computation hides.
        collective_latency: seconds of a collective of tensor parallelism, without the transfer of bytes.
        activation_factor: factor from the tensors counted in ``planning/tables.py`` to saved activations.
        allocator_reserve: share of the bytes changing during a step that the allocator loses to fragments.
        length_pools: 1 if freed blocks of segments of one length do not serve another length, else 0.
        collective_buffers: whole hidden states of a segment, per layer of a unit under tensor parallelism, that stay
            allocated until the device has finished the unit.
        context_bytes: memory held beside tensors.
        element_bytes: bytes of a weight or activation; gradient_bytes and optimizer_bytes: per parameter.
        spread: (low, high) of every uncertain field.
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
    link_efficiency: float
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
    context_bytes: float
    element_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    inside_send: float = 0.0
    between_send: float = 0.0
    tier_bandwidth: float = 0.0
    host_memory: float = 0.0
    move_out: float = 0.0
    move_in: float = 0.0
    release_tokens: float = 0.0
    length_pools: float = 0.0
    collective_buffers: float = 0.0
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def device_type(self) -> str:
        """Torch's name for the kind of device, ``"cuda"`` or ``"cpu"``."""
        return "cuda" if self.host_memory else "cpu"

    def with_optimizer(self, name: str) -> Self:
        """Returns the machine with the state's bytes of an optimizer of ``OPTIMIZERS`` in place of Adam's."""
        return replace(self, optimizer_bytes=self.optimizer_bytes - OPTIMIZERS["adamw"] + OPTIMIZERS[name])

    rates: ClassVar[str] = "assumed rates"
    """The origin of the seconds, in words."""
    insides: ClassVar[tuple[str, ...]] = INSIDE
    """The kinds of ``Layout(inside=)`` that it has seconds of."""
    _parts: ClassVar[type[ByParts]] = ByParts
    """The source of the seconds and bytes of a model on such a machine."""


@dataclass(frozen=True)
class ProfiledHardware(Hardware):
    """A machine with measured units of a model: ``profile`` replaces rates, launches and efficiencies.

    Memory, links and optimizer come from the machine; bytes of activations, cache and messages are measured.

    Attributes:
        measured_forward, measured_input, measured_weight, measured_backward, measured_recompute, measured_ends: factors
            on the measured seconds of a layer's F, I, W, B and R, and of embedding and head; 1, with a range of twice
            the spread of the fit.
        measured_runs: factor on all measured seconds; 1, with a range of twice the spread from run to run.
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
    insides: ClassVar[tuple[str, ...]] = ("none",)  # a profile measures stages without recomputation
    _parts: ClassVar[type[ByParts]] = ByProfile

    @classmethod
    def of(cls, profile: Profile, machine: Hardware) -> ProfiledHardware:
        """Makes a machine from a profile; unmeasured fields, and the tier if unmeasured, come from ``machine``.

        Raises:
            ValueError: profile and machine have different kinds of device.
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
    """Returns the names for :func:`load_model` (kind ``"models"``) or :func:`load_hardware` (``"hardware"``)."""
    names = (entry.name.rpartition(".")[::2] for entry in (_PRESETS / kind).iterdir())
    return tuple(sorted(name for name, suffix in names if suffix == "json" and name != "default"))


def _read(kind: str, name: str) -> dict[str, Any]:
    """Reads a preset by name, or a file whose path ends in .json."""

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
    """Loads a shape: a name in ``presets/models``, a file of equal form, or a transformers model's ``config.json``.

    Raises:
        ValueError: an unknown preset; a field that is unknown, missing or no whole number, with file and field in the
            message; a ``config.json`` of an architecture that is not in ``seq1f1b.planning.configs.MODELS``.
        OSError: the file cannot be read.
    """
    data = _read("models", name)
    if "model_type" in data or "hidden_size" in data:
        data = shape_of(data, name)
    data.pop("source", None)
    return make_model(data, name)


def load_hardware(name: str) -> Hardware:
    """Loads a machine: a name in ``presets/hardware``, or a file of equal form. Missing fields come from the defaults.

    A field is ``{"value": number, "source": text}``; an uncertain field also has ``"low"`` and ``"high"``. Fields of a
    preset that ``"like"`` names go before the defaults.

    Raises:
        ValueError: an unknown preset; a field that is unknown, missing, not a number, or outside the field's range.
        OSError: the file cannot be read.
    """
    own = _read("hardware", name)
    if (like := own.pop("like", "default")) not in ("default", *presets("hardware")):
        raise ValueError(f"{name}: like is {like!r}, must be one of {', '.join(presets('hardware'))}")
    data = _read("hardware", "default") | _read("hardware", like) | own
    numbers = {f.name: f.default for f in fields(Hardware) if f.name not in ("name", "spread")}
    check_names(data, numbers, name, [key for key, value in numbers.items() if value == 0.0])
    values, spread = {}, {}
    for key, entry in data.items():
        if not isinstance(entry, dict) or not set(entry) <= {"value", "low", "high", "source"} or "value" not in entry:
            raise ValueError(f'{name}: {key} is {entry!r}, must be {{"value": number, "source": text}}')
        ends: tuple[Any, ...] = tuple(entry.get(part, entry["value"]) for part in ("low", "value", "high"))
        low, value, high = ends
        if not all(map(is_number, ends)):
            raise ValueError(f"{name}: {key} is {entry!r}, must be finite numbers")
        if not 0 <= low <= value <= high or (value == 0 and key in _ABOVE_ZERO):
            raise ValueError(f"{name}: {key} is {value} in [{low}, {high}], must be 0 < low <= value <= high")
        values[key] = float(value)
        if low < high:
            spread[key] = (float(low), float(high))
    return Hardware(name=name, spread=spread, **values)


_ABOVE_ZERO = frozenset(
    {
        *("memory", "peak", "bandwidth", "node_size", "inside_bandwidth", "between_bandwidth", "link_efficiency"),
        *("linear_efficiency", "attention_forward_efficiency", "attention_backward_efficiency", "head_tile"),
        *("saved_moves", "activation_factor", "element_bytes", "gradient_bytes"),
    }
)
