"""The table of models that are written to be cut."""

from __future__ import annotations

from functools import partial
from typing import Any

import split_decoders as decoders
import split_forwards as forwards
import torch
from split_forwards import changed
from split_parts import Base, Case


def with_documents() -> dict[str, Any]:
    return {"doc_ids": forwards.document_ids()}


CASES: dict[str, Case] = {
    # ties
    "three ways": Case(changed(forwards.tie_three), cut={"num_stages": 3}, engine=True),
    "a norm run twice": Case(forwards.SharedNorm, engine=True),
    "a norm with statistics": Case(
        changed(forwards.share_statistics, partial(Base, decoders.RunningBlock)),
        says=r"buffer blocks\.[03]\.stats\.running_mean is off by",
    ),
    "parametrized blocks": Case(changed(forwards.parametrize), engine=True),
    "one block in a loop": Case(forwards.OneBlockInARange, cut={"at": ["blocks.1"]}, engine=True),
    # contexts
    "contexts in a block": Case(partial(Base, forwards.ContextBlock), engine=True),
    # hooks
    "hooks on blocks": Case(changed(forwards.hook_blocks), engine=True),
    # patched
    "forward of a block": Case(changed(forwards.patch_block), engine=True),
    # nested
    "Sequential in Sequential": Case(forwards.sequential, cut={"at": ["1.1"]}, engine=True),
    "a list in a submodule": Case(forwards.Decoder, engine=True),
    # arguments and outputs
    "doc_ids": Case(forwards.Documents, kwargs=with_documents),
    "pairs from blocks": Case(forwards.Pairs, engine=True),
    "a dict": Case(forwards.ReturnsDict),
    "a dataclass": Case(forwards.ReturnsDataclass),
    "a list in a dict": Case(forwards.States, engine=True),
    # constants, buffers, dtypes
    "buffers": Case(decoders.Buffers, engine=True),
    "running statistics": Case(partial(Base, decoders.RunningBlock)),
    "frozen": Case(changed(decoders.freeze), engine=True),
    "mixed dtypes": Case(decoders.mixed),
    # control flow
    "carried state": Case(decoders.CarriedSum, engine=True),
    "a value's type": Case(decoders.AsksForType, says="AsksForType do not compute"),
    "sizes behind the cut": Case(decoders.SizesBehind, engine=True),
    # decoders as people write them
    "nanoGPT": Case(decoders.NanoGpt, engine=True),
    "Llama": Case(decoders.Llama, cut={"num_stages": 3}, engine=True),
    "U-Net": Case(decoders.UNet, cut={"num_stages": 3}, engine=True),
}


def build(name: str) -> torch.nn.Module:
    """Makes the model of a case, in float64 unless it says otherwise."""
    torch.manual_seed(0)
    model = CASES[name].make()
    return model if name == "mixed dtypes" else model.double()
