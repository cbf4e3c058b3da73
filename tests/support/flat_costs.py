"""Arguments of ``Schedule.simulate`` from one flat dictionary, as tests draw and combine them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from seq1f1b import Costs, Links, Noise


def simulation_of(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of Costs, Links and Noise, and other arguments by their own names, each put where it belongs."""
    rest = dict(flat)

    def take(kind: type[Any]) -> dict[str, Any]:
        return {field.name: rest.pop(field.name) for field in fields(kind) if field.name in rest}

    links, costs, noise = take(Links), take(Costs), take(Noise)
    return {"costs": Costs(**costs, links=Links(**links)), "noise": Noise(**noise), **rest}
