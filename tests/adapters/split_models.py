"""The table of models that are written to be cut, and what is expected of each.

Verdicts were written down before any of these models was run: CUT, or a word of the refusal. A refusal also names the
line or the attribute of the model. One has changed since: "sizes behind the cut" was to be refused, and is cut.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import split_decoders as decoders
import split_forwards as forwards
import torch
from split_decoders import images
from split_forwards import changed, global_hook
from split_parts import CUT, Base, Case

__all__ = ["CASES", "CUT", "Case"]


def refused(make: Any, expected: str, names: str, **options: Any) -> Case:
    return Case(make, expected=expected, names=names, **options)


def hooked(register: str, hook: Any, on: str = "", **options: Any) -> Any:
    """Makes a model with a hook on itself, or on a module of it."""
    return changed(
        lambda model: getattr(model.get_submodule(on), register)(hook, **options), forwards.Decoder if on else Base
    )


def with_documents() -> dict[str, Any]:
    return {"doc_ids": forwards.document_ids()}


CASES: dict[str, Case] = {
    # ties
    "embedding and head": Case(changed(forwards.tie_head), engine=True),
    "weights of middle blocks": Case(changed(forwards.tie_middle), engine=True),
    "three ways": Case(changed(forwards.tie_three), cut={"num_stages": 3}, engine=True),
    "a submodule": Case(changed(forwards.tie_submodule), engine=True),
    "a norm run twice": Case(forwards.SharedNorm, engine=True),
    "one block four times": Case(forwards.Albert, engine=True),
    "one block in a loop": Case(forwards.OneBlockInARange, cut={"at": ["blocks.1"]}, engine=True),
    # contexts
    "no_grad": refused(forwards.NoGrad, "no_grad", "self.words(tokens) * 2"),
    "no_grad on a method": refused(forwards.NoGradMethod, "no_grad", "self.words(tokens).tanh()"),
    "inference_mode": refused(forwards.InferenceMode, "inference_mode", "x.sigmoid()"),
    "set_grad_enabled": refused(forwards.SetGradEnabled, "grad", "gate = self.norm(x)"),
    "autocast": refused(forwards.Autocast, "autocast", "split_"),
    "autocast on a part": refused(forwards.AutocastOfPart, "autocast", "self.head(self.norm(x))"),
    "checkpoint": refused(forwards.Checkpointed, "checkpoint", "checkpoint(block, x"),
    "checkpoint, reentrant": refused(forwards.CheckpointedAgain, "checkpoint", "checkpoint(block, x"),
    "default dtype": refused(forwards.DefaultDtype, "default dtype", "split_forwards.py"),
    "deterministic": refused(forwards.Deterministic, "deterministic", "split_"),
    "torch.device": refused(forwards.DeviceContext, "device", "split_forwards.py"),
    "contexts in a block": Case(partial(Base, forwards.ContextBlock), engine=True),
    # hooks
    "forward hook": refused(
        hooked("register_forward_hook", forwards.times_two),
        "hooks",
        "Base has hooks, which no stage would run (forward hooks)",
    ),
    "forward hook, always_call": refused(
        hooked("register_forward_hook", forwards.times_two, always_call=True), "hooks", "(forward hooks)"
    ),
    "forward pre-hook of a container": refused(
        hooked("register_forward_pre_hook", forwards.pre_times_two, "inner"), "hooks", "'inner' (Base)"
    ),
    "backward hook": refused(
        hooked("register_full_backward_hook", forwards.grad_times_two),
        "hooks",
        "Base has hooks, which no stage would run (backward hooks)",
    ),
    "backward pre-hook of a container": refused(
        hooked("register_full_backward_pre_hook", forwards.pre_grad_times_two, "inner"), "hooks", "'inner' (Base)"
    ),
    "global hook": refused(Base, "hooks", "global forward hooks", around=global_hook),
    "hooks on blocks": Case(changed(forwards.hook_blocks), engine=True),
    # random numbers
    "random.random": refused(forwards.StochasticDepth, "random", "random.random() > 0.2"),
    "numpy.random": refused(forwards.NumpyNoise, "random", "numpy.random.uniform(0.9, 1.1)"),
    "torch.rand": refused(forwards.TorchNoise, "random", "torch.rand(HIDDEN)"),
    "F.dropout": refused(forwards.FunctionalDropout, "training", "FunctionalDropout"),
    "nn.Dropout": Case(forwards.Dropouts),
    # values of Python
    "a scale": Case(forwards.Scale, change=(lambda model: setattr(model, "scale", 0.7), "scale")),
    "a flag of a config": Case(
        forwards.ConfigFlag, change=(lambda model: setattr(model.config, "normed", False), "normed")
    ),
    "a global": Case(forwards.ModuleGlobal, change=(forwards.set_temperature, "TEMPERATURE")),
    "a closure": Case(forwards.closed_over, change=(lambda model: model.__dict__["change"](), "factor")),
    # patched
    "forward of the instance": refused(changed(forwards.patch_model), "set on the instance", "Base"),
    "forward of a block": Case(changed(forwards.patch_block), engine=True),
    "a method": Case(changed(forwards.patch_method)),
    # nested
    "Sequential in Sequential": Case(forwards.sequential, cut={"at": ["1.1"]}, engine=True),
    "a list in a submodule": Case(forwards.Decoder, engine=True),
    "ModuleDict": Case(forwards.Dictionary, cut={"at": ["blocks.b1", "blocks.b3"]}, engine=True),
    # arguments and outputs
    "doc_ids": Case(forwards.Documents, kwargs=with_documents),
    "doc_ids left out": Case(forwards.Documents),
    "keywords of blocks": Case(forwards.Keywords),
    "pairs from blocks": Case(forwards.Pairs, engine=True),
    "dicts from blocks": Case(forwards.Dicts, engine=True),
    "a dict": Case(forwards.ReturnsDict),
    "nested tuples": Case(forwards.ReturnsTuple),
    "a dataclass": Case(forwards.ReturnsDataclass),
    "a named tuple": Case(forwards.ReturnsNamed),
    "logits and loss": Case(forwards.LogitsAndLoss),
    # constants, buffers, dtypes
    "constants": Case(decoders.Constants, engine=True),
    "constants behind the cut": Case(decoders.ConstantsBehind),
    "arange of the tokens": refused(decoders.Arange, r"positions(x)", "torch.arange(tokens.shape[1])"),
    "positions": Case(decoders.Positions, engine=True),
    "buffers": Case(decoders.Buffers, engine=True),
    "running statistics": Case(partial(Base, decoders.RunningBlock)),
    "a counter in forward": refused(decoders.Counts, "changes 'steps'", "Counts"),
    "a plain tensor of a block": Case(decoders.GainsOfBlocks),
    "a loss left in a block": refused(decoders.LossesOfBlocks, "do not compute", "output[1]"),
    "a buffer that blocks share and change": refused(
        changed(decoders.share_calls, partial(Base, decoders.CountingBlock)), "changes buffer", "calls"
    ),
    "frozen": Case(changed(decoders.freeze), engine=True),
    "mixed dtypes": Case(decoders.mixed),
    # control flow
    "carried state": Case(decoders.CarriedSum, engine=True),
    "early exit": refused(decoders.EarlyExit, "does not use", "blocks.3"),
    "layer drop": refused(decoders.LayerDrop, "training", "LayerDrop"),
    "by index": Case(decoders.ByIndex, engine=True),
    "assert": refused(decoders.Asserts, "assert", "tokens.shape[1] <= 64"),
    "data": refused(decoders.DataDependent, "module of its own", "x.abs().max() > 100"),
    "a value's type": refused(decoders.AsksForType, "do not compute", "AsksForType"),
    "try and except": refused(decoders.Tries, "value that a trace does not have", "float(x.abs().max())"),
    "sizes behind the cut": Case(decoders.SizesBehind, engine=True),
    "sizes before the cut": Case(decoders.SizesBefore, engine=True, needs_sample=True),
    # decoders as people write them
    "nanoGPT": Case(decoders.NanoGpt, engine=True),
    "Llama": Case(decoders.Llama, cut={"num_stages": 3}, engine=True),
    "Llama, tables apart": Case(decoders.LlamaOfTensors, cut={"num_stages": 3}, engine=True),
    "GPT-NeoX": Case(partial(Base, decoders.NeoxBlock), engine=True),
    "Mamba": Case(partial(Base, decoders.MambaBlock), engine=True),
    "OPT": Case(decoders.Opt, engine=True),
    "BLOOM": Case(decoders.Bloom, engine=True),
    "T5's decoder": Case(decoders.T5Decoder),
    "mixture of experts": Case(partial(Base, decoders.MoeBlock), engine=True),
    "DeepNet": Case(decoders.DeepNet, engine=True),
    "U-Net": Case(decoders.UNet, cut={"num_stages": 3}, engine=True),
    "patches and a class token": Case(decoders.Vision, inputs=lambda: (images(),), needs_sample=True),
}


def build(name: str) -> torch.nn.Module:
    """Makes the model of a case, in float64 unless it says otherwise."""
    torch.manual_seed(0)
    model = CASES[name].make()
    return model if name == "mixed dtypes" else model.double()
