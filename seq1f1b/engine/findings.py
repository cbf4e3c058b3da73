"""Warns of a model, a loss or targets that are likely wrong, once per finding, and explains errors; with remedies.

``checks/first_look.py`` hands over findings in a stage's forward, ``checks/loss_look.py`` findings in a loss.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from seq1f1b import _C
from seq1f1b.nested import tensors_of
from seq1f1b.unit import Unit, unit_of

__all__ = ["SegmentWarning"]

ATTENTION = "attention not in segments"  # in a stage without causal_attention
STATE = "state across tokens"
STATISTICS = "later tokens"
RANDOMNESS = "randomness that differs"
WEIGHTING = "loss weighting"
COUPLING = "a loss of several tokens"
DOCUMENTS = "documents that run into each other"

_REMEDIES = {
    ATTENTION: "call seq1f1b.causal_attention, which sees the keys of earlier segments",
    STATE: "use seq1f1b.positions, causal_attention, or carry_in and carry_out",
    STATISTICS: "let a token depend on itself and on earlier ones: use norms over its own features, as LayerNorm and "
    "RMSNorm, and nothing that depends on a segment's length",
    RANDOMNESS: "use nn.Dropout, which draws a number for every token",
    WEIGHTING: "let loss_fn return its sum and its divisor, (sum, divisor), or count the targets by Loss(weight=...), "
    'or return a sum with Loss(reduction="sum")',
    COUPLING: "give each sequence one segment (num_segments=1, or segment_sizes of the step), and siblings one each",
    DOCUMENTS: "give the stage doc_ids, those of plan.doc_ids, and begin the state anew at each document, as "
    "docs/how-to/documents.md shows",
}


class SegmentWarning(UserWarning):
    """Warning of a stage whose results over segments differ from results over the whole sequence."""


@dataclass(frozen=True)
class Finding:
    cause: str
    place: str  # stage and module
    what: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.cause}: {self.place} {self.what}; {_REMEDIES[self.cause]}"


class Findings:
    """Findings in one stage over an engine's life; warns of each finding once.

    Args:
        attention: the engine's option; ``"own"``: other attention is an error in a stage without causal_attention.
    """

    tells = True  # False: collects findings without warnings

    def __init__(self, attention: str) -> None:
        self.attention = attention
        self.found: dict[Finding, None] = {}
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Warns of the data; of texts with equal first 30 characters, an engine shows the first."""
        if self.tells and (kind := text[:30]) not in self._said:
            self._said.add(kind)
            warnings.warn(text, UserWarning, stacklevel=3)

    def judge(self, found: Sequence[Finding]) -> None:
        """Warns of new findings. Raises ValueError, every time, for attention that the engine refuses."""
        foreign = next((finding for finding in found if finding.cause == ATTENTION), None)
        if foreign is not None and self.attention == "own":
            raise ValueError(
                f"{foreign}. The stage makes no call of causal_attention, so each segment would see itself only; if "
                'that is meant, pass attention="any" to the engine'
            )
        new = [finding for finding in dict.fromkeys(found) if finding not in self.found]
        self.found |= dict.fromkeys(new)
        for finding in new if self.tells else ():
            warnings.warn(f"{finding}. engine.verify compares with the whole model", SegmentWarning, stacklevel=3)


# -- batches -----------------------------------------------------------------------------------------------------------

_SAMPLE, _FEWEST = 512, 8  # elements in a sample, and the fewest counted targets to judge by


def samples_of(arguments: Any, rules: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """Returns samples of a step's arguments, by name, to compare batches between ranks.

    A sample is the shape of the first tensor, whether it holds tokens or targets that change along the sequence, and
    some elements; None without a tensor. ``rules`` are the engine's ``arg_rules``.
    """
    kwargs = arguments.kwargs or {}
    kwargs = kwargs[0] if isinstance(kwargs, list) else kwargs
    values = {name: value for name, value in kwargs.items() if rules.get(name) == "slice"}
    values |= {"inputs": arguments.inputs, "target": arguments.target}
    found: dict[str, Any] = dict.fromkeys(values)
    for name, value in values.items():
        given = next(iter(tensors_of(value)), None)
        if given is None or given.is_meta:
            continue
        changes = not given.is_floating_point() and given.dim() > dim and not isinstance(value, dict)
        if changes:
            length = given.shape[dim] - 1
            changes = bool((given.narrow(dim, 1, length) != given.narrow(dim, 0, length)).any())
        elements = given.detach().reshape(-1)[:: given.numel() // _SAMPLE | 1]  # an odd stride, to meet all columns
        found[name] = tuple(given.shape), changes, elements.tolist()
    return found


def look_at_batches(samples: Sequence[Mapping[str, Any]]) -> None:
    """Warns if ranks were given different batches. Samples are by rank and argument."""
    for name in dict.fromkeys(name for theirs in samples for name in theirs):
        given = [(rank, str(theirs[name])) for rank, theirs in enumerate(samples) if theirs.get(name) is not None]
        unlike = [(rank, sample) for rank, sample in given if sample != given[0][1]]
        if unlike and samples[unlike[0][0]][name][0] == samples[given[0][0]][name][0]:
            warnings.warn(
                f"ranks {given[0][0]} and {unlike[0][0]} are given {name} of different batches, so tokens of one may "
                "train with targets of another: let the loaders of all ranks shuffle by one seed, or give None where a "
                "rank needs none",
                SegmentWarning,
                stacklevel=3,
            )


def look_at_targets(samples: Sequence[Mapping[str, Any]]) -> None:
    """Warns if the targets equal the tokens, unshifted. Samples are by rank and argument."""
    tokens, targets = (
        next((own for each in samples if (own := each[n]) is not None), None) for n in ("inputs", "target")
    )
    if tokens is None or targets is None or tokens[0] != targets[0] or not tokens[1]:
        return
    counted = [pair for pair in zip(tokens[2], targets[2], strict=True) if pair[1] != -100]
    if len(counted) >= _FEWEST and all(a == b for a, b in counted) and len({b for _, b in counted}) > 1:
        warnings.warn(
            "the targets are the tokens themselves, so the model learns to copy: shift them with seq1f1b.shift_labels "
            "before the step. If each token's own label is what it shall learn, ignore this",
            stacklevel=3,
        )


# -- errors of a step --------------------------------------------------------------------------------------------------

_HINTS = {
    "leaf Variable that requires grad is being used in an in-place operation": " If it is an input of the stage, the "
    "stage must work on a copy: x = x * 2 in place of x *= 2",
    "could not create a primitive": ". oneDNN often says so where no memory is left: see ulimit -v, or the limit of "
    "the job",
    "support saved tensor hooks": " A checkpoint has such hooks, and so has each block of Memory.blocks: use "
    "Memory(recompute=...) for a stage that calls torch.func",
    "does not require grad and does not have a grad_fn": ". Under Memory.recompute F runs without a graph: take the "
    "gradient by torch.func.grad, or leave the stage's units out of Memory.recompute",
    "^Target -?[0-9]+ is out of bounds": ". A target of this segment is no class of the loss: targets lie below the "
    "size of the output's last dimension, and those of -100 are not counted",
    "index out of range in self": ". An id of this segment is no row of its embedding: in stage {stage}, {rows}",
    # Errors of torch and Python if a module for tokens, (batch, tokens), gets hidden states.
    "for argument #1 'indices'|used as indices must be|values to unpack|one_hot is only applicable": ". Stage {stage} "
    "received hidden states from stage {before} and treats them as tokens: did every rank build the whole model? Give "
    "each rank the layers of its own stages",
}
"""Patterns of error texts of torch, Python and oneDNN, and the hint that is added to each."""


def explained(error: BaseException, executor: Any, stages: Mapping[int, Any]) -> tuple[BaseException, str]:
    """Returns the error, with the unit before its text and a hint behind the text; and the text for other ranks.

    torch turns each failure of our ops into a RuntimeError: the returned error has the original type.

    Args:
        executor: runs the units, and the last unit that it began has failed; None: no unit has.
    """
    unit, failure = None if executor is None else unit_of(_C.executor_last_unit(executor)), _C.take_op_failure()
    place = "" if unit is None else f"[{unit.stage}]{unit}: "
    if failure is not None and isinstance(error, RuntimeError) and str(failure) in str(error):
        error = failure
    if type(error) in (ValueError, TypeError, RuntimeError, IndexError):
        before = "" if place.removesuffix(": ") in str(error) else place
        error.args = (f"{before}{error}{_hint(str(error), unit, stages)}",)
    return error, f"{place}{type(error).__name__}: {str(error).removeprefix(place)}"


def _hint(text: str, unit: Unit | None, stages: Mapping[int, Any]) -> str:
    hint = next((hint for pattern, hint in _HINTS.items() if re.search(pattern, text)), "")
    if "{stage}" not in hint:
        return hint
    if unit is None or unit.kind != "F" or ("{before}" in hint and unit.stage == 0):
        return ""
    parts = [named for module in stages[unit.stage].modules for named in module.named_modules()]
    rows = [f"{n or 'the embedding'} has {m.num_embeddings} rows" for n, m in parts if isinstance(m, nn.Embedding)]
    return hint.format(stage=unit.stage, before=unit.stage - 1, rows=", ".join(rows)) if rows else ""
