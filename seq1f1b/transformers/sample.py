"""Runs a transformers model without layers on a few tokens; records the order of modules and the layers' arguments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from seq1f1b.transformers.layers import cannot
from seq1f1b.transformers.look import ERRORS, TOKENS, Probe, Record, recording, with_remedy
from seq1f1b.transformers.stage import HiddenStates
from seq1f1b.transformers.twins import twin

__all__: list[str] = []


@dataclass(frozen=True)
class RecordedModel:
    """A model, and the record of a run on a sample.

    Attributes:
        path: name of the list of layers.
        decoder: name of the innermost module around the list that takes token ids.
        before, after: names of the modules with parameters that run before and after the layers.
        kept: names of the modules without parameters, for example rotary embeddings.
        record: arguments of the layers.
    """

    model: Any
    path: str
    layers: nn.ModuleList
    decoder: str
    before: list[str]
    after: list[str]
    kept: list[str]
    record: Record

    @property
    def takes_positions(self) -> bool:
        return "position_ids" in signature(self.model.get_submodule(self.decoder).forward).parameters


def run_sample(model: Any, path: str, layers: nn.ModuleList) -> RecordedModel:
    """Runs a twin of the model. ``path`` is the name of the list of layers.

    Raises:
        ValueError: the model does not run like transformers' decoders.
    """
    names = path.split(".")
    owners = [".".join(names[:i]) for i in range(len(names))]
    embedding = model.get_input_embeddings()
    decoder = [name for name in owners if any(m is embedding for m in model.get_submodule(name).modules())][-1]
    others = _others(model, path, owners)
    record, is_after = _run(model, path, layers, decoder, others)
    kept = [name for name in others if next(model.get_submodule(name).parameters(), None) is None]
    idle = [name for name in others if name not in kept and name not in is_after]
    if idle:
        raise ValueError(
            f"{cannot(model)}: a language model over tokens does not run its {', '.join(idle)}; give its language "
            "model alone, a ...ForCausalLM of its text_config"
        )
    sides: tuple[list[str], list[str]] = ([], [])
    for name in others:
        if name not in kept:
            sides[is_after[name]].append(name)
    return RecordedModel(model, path, layers, decoder, *sides, kept, record)


def _others(model: Any, path: str, owners: list[str]) -> list[str]:
    """Returns the names of the owners' child modules, without the list of layers."""
    others = []
    for owner in owners:
        parent = model.get_submodule(owner)
        if next(parent.parameters(recurse=False), None) is not None:
            names = ", ".join(name for name, _ in parent.named_parameters(recurse=False))
            raise ValueError(
                f"{cannot(model)}: {owner or 'model'} ({type(parent).__name__}) holds {names} itself, beside its "
                "modules, and no stage would own that; train it whole"
            )
        lists = dict(_lists(parent, owner))
        for name, module in {owner: parent, **lists}.items():
            full = [f"{name}.{child}" if name else child for child, _ in module.named_children()]
            others += [each for each in full if each not in lists and not f"{path}.".startswith(f"{each}.")]
    return [name for name in others if not name.startswith(f"{path}.")]


def _lists(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the module lists and dicts in a module, nested ones too: a list itself is never called."""
    for child, inner in module.named_children():
        if isinstance(inner, (nn.ModuleList, nn.ModuleDict)):
            path = f"{name}.{child}" if name else child
            yield path, inner
            yield from _lists(inner, path)


def _run(
    model: Any, path: str, layers: nn.ModuleList, decoder: str, others: list[str]
) -> tuple[Record, dict[str, bool]]:
    """Returns the record of the layers, and for each name in ``others`` whether the module runs after the layers."""
    problems: list[tuple[int, Exception]] = []

    def run(record: Record, is_after: dict[str, bool]) -> None:
        probes: dict[nn.Module, nn.Module] = {layer: Probe(layer, i, record) for i, layer in enumerate(layers)}
        looked_at = twin(model, probes | without_head(model))

        def note_options(_: Any, args: Any, given: dict[str, Any]) -> None:
            record.options = {
                name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))
            }

        def note_embedding(_: Any, args: Any, out: Tensor) -> None:
            record.embedded = out.clone()

        for name in others:
            looked_at.get_submodule(name).register_forward_pre_hook(
                lambda *_, name=name: is_after.update({name: is_after.get(name, bool(record.calls))})
            )
        looked_at.get_submodule(decoder).register_forward_pre_hook(note_options, with_kwargs=True)
        looked_at.get_input_embeddings().register_forward_hook(note_embedding)
        with recording(record):
            record.logits = looked_at(input_ids=tokens_of(model), use_cache=False, return_dict=True).logits
        if list(record.calls) != list(range(len(layers))):
            raise ValueError("it does not run its layers once each, in their order")

    for outputs in range(3):  # layers may return hidden states alone, or a tuple of one or two
        record, is_after = Record(outputs=outputs), dict[str, bool]()
        try:
            run(record, is_after)
            return record, is_after
        except (ValueError, *ERRORS) as error:
            problems.append((len(record.calls), error))
    _, problem = max(problems, key=lambda found: found[0])  # report the attempt that ran the most layers
    text = f"it does not run as transformers' decoders do: {problem}"
    raise ValueError(f"{cannot(model)}: {with_remedy(text)}") from problem


def tokens_of(model: Any) -> Tensor:
    """Returns the sample's token ids, (1, TOKENS)."""
    weight = model.get_input_embeddings().weight
    return torch.arange(1, TOKENS + 1, device="cpu" if weight.is_meta else weight.device)[None] % len(weight)


def without_head(model: Any) -> dict[nn.Module, nn.Module]:
    """Returns a stand-in for the head of a model without memory, for use in a twin; else an empty dict."""
    head = model.get_output_embeddings()
    weights = list(head.parameters())
    return {head: HiddenStates(weights[0].dtype)} if any(weight.is_meta for weight in weights) else {}
