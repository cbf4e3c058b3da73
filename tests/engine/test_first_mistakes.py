"""Are two mistakes of a first pipeline named: targets that were not shifted, and the whole model on every rank?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_model import Config, cross_entropy, stage_of, whole_model
from torch import Tensor, nn

import seq1f1b
from seq1f1b import PipelineEngine
from seq1f1b.testing import run_ranks

CONFIG = Config(hidden=8, heads=2, kv_heads=2, ffn=8, vocab=11, layers=2)
TOKENS = torch.randint(CONFIG.vocab, (4, 16), generator=torch.Generator().manual_seed(0))


def told(tokens: Any, target: Any, *, ranks: int = 2, everywhere: bool = False, **options: Any) -> list[str]:
    """What two steps tell. everywhere: each rank is given both, else those that need them."""
    model = whole_model(CONFIG)
    options = {"num_microbatches": 2, "num_segments": 2, "loss_fn": cross_entropy, **options}
    sizes = options.pop("segment_sizes", None)

    def run(group: Any) -> None:
        engine = PipelineEngine(stage_of(model, CONFIG, group.rank, ranks), group=group, **options)
        has_first, has_last = (everywhere or rank == group.rank for rank in (0, ranks - 1))
        for _ in range(2):
            engine.step(tokens if has_first else None, target=target if has_last else None, segment_sizes=sizes)

    with warnings.catch_warnings(record=True, action="always") as caught:
        run_ranks(ranks, run)
    return [str(warning.message) for warning in caught if "targets" in str(warning.message)]


def masked(tokens: Tensor) -> Tensor:
    """A prompt in front, and padding behind, without targets."""
    return tokens.index_fill(1, torch.tensor([0, 1, 2, 3, 14, 15]), -100)


# (tokens, targets, options)
COPIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "one object": (TOKENS, TOKENS, {}),
    "a copy": (TOKENS, TOKENS.clone(), {}),
    "masked": (TOKENS, masked(TOKENS), {}),
    "lists": (list(TOKENS.chunk(2)), list(TOKENS.chunk(2)), {}),
    "another dtype": (TOKENS, TOKENS.int(), {"loss_fn": lambda logits, target: cross_entropy(logits, target.long())}),
    "arguments in a tuple": ((TOKENS,), TOKENS, {}),
    "given everywhere": (TOKENS, TOKENS, {"everywhere": True}),
    "one rank": (TOKENS, TOKENS, {"ranks": 1}),
    "rows": (list(TOKENS.chunk(2)), list(TOKENS.chunk(2)), {"segment_sizes": [[8, 8], [9, 7]]}),
    "a loss that shifts": (
        TOKENS, TOKENS, {"loss_fn": lambda logits, target: cross_entropy(logits[:, :-1], target[:, 1:])},
    ),
    "a large batch": (TOKENS.repeat(8, 10), TOKENS.repeat(8, 10), {"num_segments": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_targets_that_are_the_tokens_are_named_once(name):
    tokens, target, options = COPIES[name]
    # A loss that shifts inside its segments drops targets at the borders, which is told as well.
    (text,) = [text for text in told(tokens, target, **options) if not text.startswith("loss weighting")]
    assert text.startswith("the targets are the tokens themselves") and "seq1f1b.shift_labels" in text


IS_GUESSED = torch.arange(16) % 3 == 0
RIGHT: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "shifted": (TOKENS, seq1f1b.shift_labels(TOKENS), {}),
    "shifted and masked": (TOKENS, masked(seq1f1b.shift_labels(TOKENS)), {}),
    "shifted by hand": (TOKENS[:, :-1], TOKENS[:, 1:], {}),
    "words to guess": (TOKENS.masked_fill(IS_GUESSED, 0), TOKENS.masked_fill(~IS_GUESSED, -100), {}),
    "rows of one word": (TOKENS[:, :1].expand(-1, 16), TOKENS[:, :1].expand(-1, 16), {}),
    "nothing counts": (TOKENS, torch.full_like(TOKENS, -100), {}),
    "whole sequences, and a loss that shifts": (
        TOKENS, TOKENS,
        {"num_segments": 1, "loss_fn": lambda logits, target: cross_entropy(logits[:, :-1], target[:, 1:])},
    ),
}  # fmt: skip


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("name", RIGHT)
def test_other_targets_are_not_named(name, everywhere):
    tokens, target, options = RIGHT[name]
    assert told(tokens, target, everywhere=everywhere, **options) == []


# -- the whole model on every rank -------------------------------------------------------------------------------------


class Words(nn.Module):
    """A model that finds its words in one of several ways, and fails on hidden states."""

    def __init__(self, find: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
        super().__init__()
        self.words, self.find = nn.Embedding(11, 8), find
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mix(self.find(self.words, tokens)))


def unpacked(words: nn.Embedding, tokens: Tensor) -> Tensor:
    rows, length = tokens.shape
    return words(tokens).view(rows, length, 8)


WAYS: dict[str, Callable[[nn.Embedding, Tensor], Tensor]] = {
    "module": lambda words, tokens: words(tokens),
    "function": lambda words, tokens: F.embedding(tokens, words.weight),
    "rows": lambda words, tokens: words.weight[tokens],
    "sizes": unpacked,
    "one_hot": lambda words, tokens: F.one_hot(tokens, 11).float() @ words.weight,
}


SHIFTED = seq1f1b.shift_labels(TOKENS)


def told_by_a_step(stages: list[Any], tokens: Tensor = TOKENS, target: Tensor = SHIFTED) -> list[str]:
    """What each of two ranks is told where a step fails."""

    def run(group: Any) -> str:
        engine = PipelineEngine(
            stages[group.rank], num_microbatches=2, num_segments=2, loss_fn=cross_entropy, group=group
        )
        with pytest.raises(Exception) as caught:  # of torch's or Python's kinds, or a PipelineError
            engine.step(tokens, target=target)
        return str(caught.value)

    return run_ranks(2, run)


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_model_on_every_rank_is_named(way):
    for text in told_by_a_step([Words(WAYS[way]), Words(WAYS[way])]):
        assert "[1]F0.0" in text and "did every rank build the whole model?" in text


class Documents(nn.Linear):
    def forward(self, x: Tensor, doc_ids: Tensor | None = None) -> Tensor:  # type: ignore[override]  # takes more
        return super().forward(x)


@pytest.mark.parametrize("name", ["inputs", "target", "doc_ids", ""])
def test_batches_that_do_not_belong_together_are_told(name: str) -> None:
    """On every rank, in the first step; nothing is where they agree, or where a rank gives only what it needs."""
    x, docs = torch.randn(4, 16, 8), torch.arange(64).view(4, 16) // 5

    def run(group: Any) -> None:
        given: dict[str, Any] = {"inputs": x, "target": (TOKENS, docs), "doc_ids": docs}
        if group.rank == 2 and name:
            given[name] = (TOKENS.flip(0), docs) if name == "target" else given[name].flip(0)
        if not name:
            given = {key: given[key] for key in (("inputs", "doc_ids"), ("doc_ids",), ("target",))[group.rank]}
        engine = PipelineEngine(
            Documents(8, 8), num_microbatches=2, loss_fn=lambda y, t: y.square().mean(), group=group,
            arg_rules={"doc_ids": "slice"},
        )  # fmt: skip
        kwargs = {"doc_ids": given["doc_ids"]} if "doc_ids" in given else {}
        for _ in range(2):
            engine.step(given.get("inputs"), target=given.get("target"), kwargs=kwargs)

    with warnings.catch_warnings(record=True, action="always") as caught:
        run_ranks(3, run)
    found = [str(warning.message) for warning in caught if issubclass(warning.category, seq1f1b.SegmentWarning)]
    assert all(text.startswith(f"ranks 0 and 2 are given {name} of different batches") for text in found)
    assert len(found) == (3 if name else 0)


def beyond(tokens: Tensor) -> Tensor:
    return tokens.index_put((torch.tensor(3), torch.tensor(12)), torch.tensor(CONFIG.vocab + 5))


OTHER_ERRORS: dict[str, tuple[Tensor, Tensor, str]] = {
    "a later stage's": (TOKENS, SHIFTED, r"\[1\]F0\.0"),
    "a token": (beyond(TOKENS), SHIFTED, r"\[0\]F1\.1.*no row of its embedding: in stage 0, embedding has 11 rows"),
    "a target": (TOKENS, beyond(SHIFTED), r"\[1\]F1\.1.*A target of this segment is no class of the loss"),
}


@pytest.mark.parametrize("name", OTHER_ERRORS)
def test_other_errors_have_no_such_hint(name):
    """A token that the embedding lacks, or a target that the loss lacks, is told with its rule."""
    tokens, target, match = OTHER_ERRORS[name]
    stages: list[Any] = [stage_of(whole_model(CONFIG), CONFIG, i, 2) for i in range(2)]
    if name == "a later stage's":
        stages[1].norm.forward = lambda x: x[torch.tensor([99])]
    for text in told_by_a_step(stages, tokens, target):
        assert re.search(match, text, re.DOTALL) and "whole model" not in text, text


def test_a_failure_of_onednn_is_told_with_its_usual_cause():
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("could not create a primitive")

    engine = PipelineEngine(Fails(4, 4), num_microbatches=1, loss_fn=F.mse_loss)
    with pytest.raises(
        RuntimeError, match=r"\[0\]F0.0: could not create a primitive. .* no memory is left: see ulimit"
    ):
        engine.step(torch.ones(1, 4, 4), target=torch.ones(1, 4, 4))
