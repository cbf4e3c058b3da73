"""Seconds and bytes of a model's parts as they were measured."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

from seq1f1b.partition import ModelShape, has_equal_layers
from seq1f1b.plan import Layout
from seq1f1b.planning.by_parts import ByParts, UnitBytes
from seq1f1b.planning.profile import Part, Profile
from seq1f1b.seconds import NO_SECONDS, PassSeconds, Span

if TYPE_CHECKING:
    from seq1f1b.planning.hardware import ProfiledHardware

__all__: list[str] = []


class ByProfile(ByParts):
    """The parts of a profile.

    F of the last stage holds the head's backward as well where the layout has it in the loss, as the engine runs it.

    Raises:
        ValueError: the profile is of another model, or of less than the layout asks for.
    """

    def __init__(
        self,
        model: ModelShape,
        hardware: ProfiledHardware,
        layout: Layout,
        layers: tuple[int, ...],
        num_ranks: int,
    ) -> None:
        check_profile(hardware.profile, model, layout)
        super().__init__(model, hardware, layout, layers, num_ranks)
        self._profile, runs, layer = hardware.profile, hardware.measured_runs, hardware.profile.layer
        self.message_bytes, self.cache_bytes = layer.message_bytes, [(layer.kv_bytes, layer.kv_gradient_bytes)]
        self.beyond = PassSeconds(*(runs * seconds for seconds in self._profile.unit))
        names = PassSeconds._fields
        self._of_layer = PassSeconds(*(runs * getattr(hardware, f"measured_{name}") for name in names))
        self._of_ends = PassSeconds(*[runs * hardware.measured_ends] * len(names))

    # -- seconds

    def layer(self, span: Span, kind: int = 0) -> PassSeconds:
        return _scaled(self._profile.layer, self._of_layer, span, True)

    def flow(self, span: Span, kind: int = 0) -> float:
        return _scaled(self._profile.layer, self._of_layer, span, False).total

    def head(self, span: Span, floor: bool = True) -> PassSeconds:
        return _scaled(self._profile.head, self._of_ends, span, floor)

    def embedding(self, span: Span, floor: bool = True) -> PassSeconds:
        return _scaled(self._profile.embedding, self._of_ends, span, floor)

    def ends(self, span: Span, floor: bool = True) -> tuple[PassSeconds, PassSeconds]:
        embedding, head = super().ends(span, floor)
        return embedding, NO_SECONDS._replace(forward=head.total) if self.layout.head_in_loss else head

    # -- bytes

    def held(self, tokens: int) -> list[UnitBytes]:
        profile, found = self._profile, []
        head = None if self.layout.head_in_loss else profile.head
        for (layers,), is_first, is_last in self.stages:
            parts = ((layers, profile.layer), (is_first, profile.embedding), (is_last, head))
            units = [part.unit_bytes(tokens, count) for count, part in parts if part is not None]
            found.append(UnitBytes(*(math.ceil(sum(kind)) for kind in zip(*units, strict=True))))
        return found

    def work(self, tokens: int) -> list[tuple[int, int]]:
        """F of a head in the loss goes back, too: it saves for a while, and no backward is left to the unit's B."""
        profile, found = self._profile, []
        for _, is_first, is_last in self.stages:
            embedding = profile.embedding if is_first and not self.spreads else None
            head = profile.head if is_last and not self.spreads else None
            parts = [part for part in (profile.layer, embedding, head) if part is not None]
            backward = [part.workspace(tokens) for part in parts]
            forward = [part.forward_workspace(tokens) for part in parts]
            if self.layout.head_in_loss and head is not None:
                forward.append(backward.pop() + head.unit_bytes(tokens)[0])
            found.append((math.ceil(max(forward)), math.ceil(max(backward))))
        return found

    def standing_work(self, tokens: int, is_last: bool) -> float:
        return 0.0


def _scaled(part: Part | None, factors: PassSeconds, span: Span, floor: bool) -> PassSeconds:
    """The passes of a part of the profile, times the factors of the machine."""
    if part is None:
        return NO_SECONDS
    found = map(operator.mul, part.seconds(span.tokens, span.pairs, floor), factors)
    return PassSeconds(*((span.tokens > 0) * seconds for seconds in found))


def check_profile(profile: Profile, model: ModelShape, layout: Layout) -> None:
    """Raises ``ValueError`` unless the profile is of this model, and of what the layout asks for."""
    if not has_equal_layers(model):
        raise ValueError(
            "a profile is of equal layers with full attention, and the model's kinds say more: plan without a profile"
        )
    wanted, found = (shape._replace(layers=1, tied=False, kinds=(), pattern=()) for shape in (model, profile.model))
    if wanted != found:
        differing = [name for name in found._fields if getattr(found, name) != getattr(wanted, name)]
        raise ValueError(
            f"the profile is of {', '.join(f'{name} {getattr(found, name)}' for name in differing)}, the model has "
            f"{', '.join(f'{name} {getattr(wanted, name)}' for name in differing)}: profile this model"
        )
    if (layout.tensor, layout.context, layout.expert) != (1, 1, 1):
        raise ValueError("a profile is of whole layers on one device: tensor, context and expert must be 1")
    if layout.inside != "none" or layout.copies_prefix:
        raise ValueError(
            f"a profile is of stages that recompute nothing and share a cache: inside is {layout.inside!r}, "
            f"copies_prefix is {layout.copies_prefix}; they must be 'none' and False"
        )
