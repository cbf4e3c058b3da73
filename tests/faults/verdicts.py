"""What look, verify and split say of models that are wrong in segments or as stages, and of models that are right.

    python tests/faults/verdicts.py                      # one line for each model
    python tests/faults/verdicts.py --before OTHER.txt   # and a column of what another release's lines say

A line of ``verdicts.txt`` has the model's kind and name; how far the engine's gradients are from the whole model's, in
float64; what the first step, ``engine.verify`` and ``seq1f1b.split`` say of it, and what they said before. A model is
wrong if its gradients differ by more than 1e-3, or if they are not finite.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

sys.path.extend(str(Path(__file__).parents[1] / room) for room in ("support", "adapters", "checks", "hf"))

import torch
import torch.nn.functional as F
from tiny_model import gradient_error
from torch import Tensor, nn

import seq1f1b
from seq1f1b import PipelineEngine
from seq1f1b.nested import tensors_of
from seq1f1b.testing import run_ranks

TABLE = Path(__file__).with_name("verdicts.txt")
WRONG = 1e-3
NOTHING, NOT_ASKED = "-", "."
Stages: TypeAlias = "list[Any]"
Said: TypeAlias = "tuple[str, ...]"


@dataclass
class Model:
    """A model, and what an engine is given for it.

    Attributes:
        make: makes it whole.
        cut: makes its stages; with ``check=False`` without a comparison. None: the model is the only stage.
        change: what its user does after the cut.
        has_whole: whether verify and the comparison are given the model; else gradients are compared with those of the
            stages, run whole.
        is_split: whether ``cut`` asks what the package says of the model.
        dtype: in which it is looked at and verified; None: as it is made.
        rows, length, microbatches, segments: of the batch of tokens, and of the step.
        says: what a refusal says, a regular expression.
    """

    make: Callable[[], Any]
    cut: Callable[..., Stages] | None = None
    change: Callable[[Any], Any] = lambda model: None
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    has_whole: bool = False
    is_split: bool = True
    dtype: torch.dtype | None = torch.float32
    batch: Callable[[], tuple[Any, Tensor]] = tuple
    kwargs: Callable[[], dict[str, Any] | None] = lambda: None
    options: Callable[[], dict[str, Any]] = dict
    microbatches: int = 2
    segments: int = 4
    says: str = ""


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        error: of gradients; None: there are no stages.
        look, verify, split: the cause that each names, NOTHING or NOT_ASKED.
    """

    error: float | None
    look: str = NOT_ASKED
    verify: str = NOT_ASKED
    split: str = NOT_ASKED

    @property
    def truth(self) -> str:
        if self.error is None:
            return "uncut"
        return "right" if self.error <= WRONG else "wrong"

    @property
    def said(self) -> Said:
        return self.look, self.verify, self.split


class Trial:
    """Runs one model.

    Attributes:
        texts: all that is said of it.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.texts = model, list[str]()

    def made(self, dtype: torch.dtype | None, **options: Any) -> tuple[nn.Module, Stages]:
        """The model whole, and stages of a copy. Raises ValueError where the cut refuses it."""
        torch.manual_seed(0)
        with default_dtype(torch.float32):
            model = self.model.make()
        model = model if dtype is None else model.to(dtype)
        whole = copy.deepcopy(model)
        with self.model.around():
            stages = [model] if self.model.cut is None else self.model.cut(model, **options)
        for each in (model, whole):
            self.model.change(each)
        return whole, stages

    def run(self, stages: Stages, call: Callable[..., Any], segments: int | None = None, **options: Any) -> list[Any]:
        """Calls a function of the engine and of a step's arguments on each rank."""
        tokens, target = self.model.batch()
        segments = self.model.segments if segments is None else segments
        torch.manual_seed(1)
        given = {**self.model.options(), **options}
        if segments == 1:
            given.pop("segment_sizes", None)

        def run(group: Any) -> Any:
            engine = PipelineEngine(
                stages[group.rank],
                num_microbatches=self.model.microbatches,
                num_segments=segments,
                group=group,
                **given,
            )
            try:
                return call(engine, tokens, target=target, kwargs=self.model.kwargs())
            finally:
                engine.close()

        with self.model.around():
            if len(stages) == 1:
                return [run(seq1f1b.LoopbackGroup(1)[0])]
            return run_ranks(len(stages), run)

    def error(self) -> float | None:
        """How far gradients in segments are from those of the whole; None if there are no stages."""
        with default_dtype(torch.float64), warnings.catch_warnings(action="ignore"):
            return self._error()

    def _error(self) -> float | None:
        wide = None if self.model.dtype is None else torch.float64
        try:
            whole, stages = self.made(wide)
        except ValueError:
            if self.model.cut is None:
                raise
            try:
                whole, stages = self.made(wide, check=False)
            except (ValueError, TypeError):
                return None
        chain = [Logits(whole)] if self.model.has_whole else copy.deepcopy(stages)
        drops_nothing = lambda x, *args, **kwargs: x  # noqa: E731
        with mock.patch.multiple(F, dropout=drops_nothing, alpha_dropout=drops_nothing):
            try:
                self.run(stages, PipelineEngine.step, attention="unchecked")
                self.run(chain, PipelineEngine.step, segments=1, attention="unchecked")
            except (ValueError, RuntimeError):
                return math.inf  # nobody trains it
        found, truth = (gradients_of(each, is_numbered=not self.model.has_whole) for each in (stages, chain))
        if not all(gradient.isfinite().all() for gradient in (*truth.values(), *found.values())):
            return math.nan
        zero = torch.zeros(())
        return gradient_error({name: found.get(name, zero * gradient) for name, gradient in truth.items()}, truth)

    def verdict(self) -> Verdict:
        """Asks look, verify and split."""
        split = NOTHING if self.model.cut is not None and self.model.is_split else NOT_ASKED
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                _, stages = self.made(self.model.dtype)
            except ValueError as refusal:
                self.texts.append(str(refusal))
                return Verdict(self.error(), split="refused")
        if any("not compared" in str(warning.message) for warning in caught):
            split = "not compared"
        look = NOT_ASKED if self.model.segments == 1 else self.look(stages)
        return Verdict(self.error(), look, self.verify(), split)

    def look(self, stages: Stages) -> str:
        with warnings.catch_warnings(record=True, action="always") as caught:
            try:
                self.run(stages, PipelineEngine.step)
            except (ValueError, RuntimeError) as error:
                return self._heard("error: ", error)
        for warning in caught:
            if issubclass(warning.category, seq1f1b.SegmentWarning):
                return self._heard("warning: ", warning.message)
        return NOT_ASKED if any("was not compared in" in str(warning.message) for warning in caught) else NOTHING

    def verify(self) -> str:
        whole, stages = self.made(self.model.dtype)
        given = {"show": False, **({"model": whole} if self.model.has_whole else {})}
        call = lambda engine, x, **step: engine.verify(x, **step, **given)  # noqa: E731
        with warnings.catch_warnings(action="ignore"):
            try:
                result = self.run(stages, call, attention="any")[0]
            except (ValueError, RuntimeError) as error:  # a PipelineError is one, too
                return self._heard("error: ", error)
        self.texts.extend((*result.causes, *result.notes))
        return NOTHING if result.ok else self._heard("", result.causes[0])

    def _heard(self, kind: str, text: Any) -> str:
        """The first words, those that name a cause."""
        self.texts.append(str(text))
        return kind + str(text).partition(":")[0][:40].strip()


class Logits(nn.Module):
    """A whole model as the only stage."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.causal_lm(*args, **kwargs)
        return getattr(output, "logits", output) if "transformers" in type(output).__module__ else output


def gradients_of(stages: Stages, *, is_numbered: bool) -> dict[str, Tensor]:
    """By the name that a parameter has in the whole model, or by stage and name."""
    named = [
        (f"{i} {name}" if is_numbered else name.removeprefix("causal_lm."), p)
        for i, stage in enumerate(stages)
        for name, p in stage.named_parameters(remove_duplicate=False)
        if p.requires_grad
    ]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- models ------------------------------------------------------------------------------------------------------------


def models() -> dict[str, Model]:
    """All of the tables, by kind and name."""
    found: dict[str, Model] = {}
    for kind, table in TABLES.items():
        found.update({f"{kind}: {name}": model for name, model in table()})
    return found


Named: TypeAlias = "Iterator[tuple[str, Model]]"


def cross_entropy(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def of_the_page() -> Named:
    import mixers

    for i, case in enumerate([*mixers.WRONG, *mixers.RIGHT]):
        around = partial(torch.autocast, "cpu", torch.bfloat16) if case.autocast else nullcontext
        options = lambda case=case: {"loss_fn": mixers.cross_entropy, **case.options()}  # noqa: E731
        model = Model(case.module, batch=mixers.batch, options=options, kwargs=case.kwargs, around=around)
        yield case.name, model
        if i < 4 or case in mixers.RIGHT[:7]:
            dtype = (torch.bfloat16, torch.float16, torch.float64)[i % 3]
            yield f"{case.name}, {dtype}", replace(model, dtype=dtype)


def mixed(mix: Any, *, rows: int, length: int, change: Any = lambda model: None, **others: Any) -> Model:
    import mixers

    def make() -> nn.Module:
        model = mixers.Net(mixers.Mixer(mixers.beside(mix)))
        change(model)
        return model

    batch = partial(tokens_of, 2 * rows, 4 * length, mixers.VOCAB)
    return Model(make, batch=batch, options=lambda: {"loss_fn": mixers.cross_entropy}, **others)


def tokens_of(rows: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    return tokens, seq1f1b.shift_labels(tokens)


def zeroed(*names: str) -> Callable[[Any], Any]:
    return lambda model: [nn.init.zeros_(model.mixer.get_parameter(name)) for name in names]


def beside_attention() -> Named:
    """Each at a length that is no number of the model, or in one other way in turn."""
    import mixers

    ways: list[tuple[str, dict[str, Any]]] = [
        ("as many tokens as features", {"rows": 2, "length": mixers.HIDDEN}),
        ("as many tokens as rows", {"rows": 4, "length": 4}),
        ("one row", {"rows": 1, "length": 10}),
        ("bfloat16", {"rows": 2, "length": 10, "dtype": torch.bfloat16}),
        ("a projection that is zero", {"rows": 2, "length": 10, "change": zeroed("proj.weight", "proj.bias")}),
        ("a gate that is zero", {"rows": 2, "length": 10, "change": zeroed("gate")}),
    ]
    mixes = {name: mix for name, (mix, _) in mixers.ALSO_WRONG.items()} | mixers.ALSO_RIGHT
    for i, (name, mix) in enumerate(mixes.items()):
        way, others = ways[i % len(ways)]
        if i // len(ways) % 2:
            yield name, mixed(mix, rows=2, length=10)
        else:
            yield f"{name}, {way}", mixed(mix, **others)


def leaves_of(value: Any) -> list[Tensor]:
    return tensors_of(vars(value) if is_dataclass(value) else value)


def of_first(output: Any, target: Tensor) -> Tensor:
    return cross_entropy(leaves_of(output)[0], target)


def from_fixed(output: Any, target: Tensor) -> Tensor:
    """Gives every number of every output a gradient of its own."""
    parts = [(t - torch.arange(t.numel(), dtype=t.dtype).view_as(t).sin()).square().mean() for t in leaves_of(output)]
    return torch.stack(parts).sum()


def cut_at(**cut: Any) -> Callable[..., Stages]:
    return lambda model, **options: seq1f1b.split(model, **cut, **options)


def to_be_cut() -> Named:
    """Those that are not trained in segments are compared whole, by every number that they return."""
    import split_models
    import split_parts

    for name, case in split_models.CASES.items():
        options = {
            "loss_fn": of_first if case.engine else from_fixed,
            "arg_rules": dict.fromkeys(case.kwargs(), "slice"),
        }
        yield name, Model(
            partial(split_models.build, name), cut_at(**case.cut), has_whole=True, dtype=None, says=case.says,
            batch=lambda: (split_parts.tokens(), seq1f1b.shift_labels(tokens_of(2, 12, 29)[0])),
            options=lambda options=options: options, kwargs=lambda case=case: case.kwargs() or None,
            segments=3 if case.engine else 1, microbatches=2 if case.engine else 1,
        )  # fmt: skip


def refused_by_split() -> Named:
    import split_told as told

    def made(make: Any, says: str = "", **others: Any) -> Model:
        given: dict[str, Any] = {"cut": cut_at(at=["blocks.2"]), "segments": 3, **others}
        batch = partial(tokens_of, 4, 12, 16)
        return Model(make, has_whole=True, says=says, batch=batch, options=lambda: {"loss_fn": of_first}, **given)

    for name, (make, says) in told.REFUSED.items():
        yield name, made(make, says, **({"cut": cut_at(at=["_orig_mod.blocks.2"])} if name == "compiled" else {}))
    for name, (context, says) in told.CONTEXTS.items():
        yield f"{name} around a block", made(partial(told.under, context), says)
    for name, (make, says) in told.TOLD_BY_VALUES.items():
        sample = {"sample": torch.arange(10).view(2, 5)} if make is told.remembering else {}
        yield name, made(make, says, cut=cut_at(at=["blocks.2"], **sample))
    for name, (*_, change) in told.READS.items():
        yield f"{name}, changed later", made(partial(told.reading, name), change=change)


def lost_by_a_cut() -> Named:
    import test_verify_model as given

    for name, (plant, says) in {"nothing": (lambda *stages: None, ""), **given.PLANTED}.items():

        def cut(model: nn.Module, plant: Any = plant, **_: Any) -> Stages:
            stages = given.stages_of(model)
            plant(*stages)
            return stages

        yield name, Model(
            given.make_model, cut, has_whole=True, is_split=False, batch=given.given,
            options=lambda: {"loss_fn": given.cross_entropy}, segments=given.K, says=says,
        )  # fmt: skip


def of_two_stages() -> Named:
    import test_verify as given

    for name, (make, others, cause, note) in given.FAULTS.items():
        yield name, Model(
            lambda make=make: nn.ModuleList(make()), lambda model, **_: list(model), is_split=False, segments=given.K,
            dtype=None if name in ("one dtype", "in float64 alone", "in float16 alone") else torch.float32,
            batch=lambda others=others: (given.mixers_batch()[0], others.get("target", given.mixers_batch()[1])),
            options=lambda others=others: {"loss_fn": others.get("loss_fn", given.cross_entropy)}, says=cause or note,
        )  # fmt: skip


def of_transformers() -> Named:
    if find_spec("transformers") is None:
        return
    import test_transformers_look as given
    from test_transformers import ARCHITECTURES, SIZES, batch, build, loss_fn

    attentions = {name: attention for name, (attention, _) in given.REFUSED_ATTENTIONS.items()}
    attentions |= {f"{cause}, {i}": attention for i, (cause, attention) in enumerate(given.WARNED)}
    odd = {name: ({}, attention) for name, attention in attentions.items()}
    odd |= {name: (parts, None) for name, parts in given.RIGHT.items()}
    odd |= {name: (parts, None) for name, (parts, _) in given.REFUSED.items()}
    says = {name: text for name, (_, text) in (*given.REFUSED.items(), *given.REFUSED_ATTENTIONS.items())}

    def cut(model: Any) -> Stages:
        return [given.pipeline_stage(model, rank, 2, balance=[2, 1]) for rank in range(2)]

    made = {name: partial(given.odd, parts, attention) for name, (parts, attention) in odd.items()}
    made |= {f"type {name}": partial(build, name) for name in ARCHITECTURES}
    for name, make in made.items():
        yield name, Model(
            make, cut, has_whole=True, batch=batch, says=says.get(name, ""),
            options=lambda: {"loss_fn": loss_fn, "segment_sizes": SIZES}, segments=len(SIZES),
        )  # fmt: skip
    yield "as it comes, with its cache on", Model(
        given.AsItComes, batch=batch, options=lambda: {"loss_fn": loss_fn, "segment_sizes": SIZES}, segments=len(SIZES),
        says=r'attention not in segments: .*Llama.*scaled_dot_product.*attention="any"',
    )  # fmt: skip


TABLES: dict[str, Callable[[], Named]] = {
    "page": of_the_page, "beside": beside_attention, "cut": to_be_cut, "refused": refused_by_split,
    "lost": lost_by_a_cut, "stages": of_two_stages, "transformers": of_transformers,
}  # fmt: skip


def told_of(verdicts: Said) -> list[str]:
    return [verdict for verdict in verdicts if verdict not in (NOTHING, NOT_ASKED)]


def rows_of(path: Path = TABLE) -> dict[str, tuple[str, Said, Said]]:
    """By kind and name: the truth, and what look, verify and split say, now and before. Other lines begin with a #."""
    lines = (line.split(" | ") for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    return {name: (truth.partition(" ")[0], tuple(rest[:3]), tuple(rest[3:])) for name, truth, *rest in lines}


def line_of(name: str, verdict: Verdict, before: Said = ()) -> str:
    truth = verdict.truth if verdict.error is None else f"{verdict.truth} {verdict.error:.0e}"
    return " | ".join([name, truth, *verdict.said, *before])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of models, or their kinds; all if there are none")
    parser.add_argument("--before", type=Path, help="lines of another release, whose verdicts are added to each")
    asked = parser.parse_args()
    before = {} if asked.before is None else rows_of(asked.before)
    for name, model in models().items():
        if not asked.names or name in asked.names or name.partition(":")[0] in asked.names:
            print(line_of(name, Trial(model).verdict(), before[name][1] if before else ()), flush=True)


if __name__ == "__main__":
    main()
