"""Is attention over documents right that goes by torch's flash op for each document?

On CPU tensors, over stand-ins of the op; the truth is the formula in float64.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import test_cuda_attention
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import formula, gradients, random_qkv, segmented
from simulated_step import SimulatedStep
from slices import full_only
from torch import Tensor

from seq1f1b.attention.causal import causal_attention
from seq1f1b.device import cuda_attention, proofs

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

FORWARD = "_flash_attention_forward"
DOCS = torch.tensor([[0] * 9 + [9] * 6 + [15] * 5, [0] * 20], dtype=torch.int32)
SMALL: dict[str, Any] = {"tokens": 20, "head_dim": 8, "dtype": torch.bfloat16}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 5)
    with cuda_kernels_on_the_cpu() as calls:
        yield calls


# The op multiplies dout by out as it is rounded, which shows where a document has two or three tokens.
check = functools.partial(test_cuda_attention.check, factor=2.0)


def random_ids(choose: random.Random, batch: int, tokens: int) -> Tensor:
    """Documents of every length; ids are first tokens, as document_starts makes them, or any numbers."""
    rows = []
    for _ in range(batch):
        starts = sorted({0, *choose.sample(range(tokens), choose.choice([0, 1, 3, tokens // 3]))})
        names = starts if choose.random() < 0.5 else choose.sample(range(-999, 999), len(starts))
        ends = [*starts[1:], tokens]
        rows.append([name for name, start, end in zip(names, starts, ends, strict=True) for _ in range(end - start)])
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("seed", [*range(8), *full_only(*((seed,) for seed in range(8, 400)))])
def test_random_documents(seed: int, calls: list[Call]) -> None:
    """Documents, segments, batches, heads, sizes and windows; segments end within documents and between them."""
    choose = random.Random(seed)
    tokens, batch, kv_heads = choose.randint(20, 48), choose.randint(1, 3), (4, 2, 1)[seed % 3]
    head_dim, v_head_dim = [(64, 64), (128, 128), (192, 128), (24, 40)][seed % 4]
    ends = sorted(choose.sample(range(1, tokens), choose.randint(0, 4)))
    sizes = [end - begin for begin, end in zip([0, *ends], [*ends, tokens], strict=True)]
    options: dict[str, Any] = {"doc_ids": random_ids(choose, batch, tokens), "scale": choose.choice([None, 0.3])}
    options["window"] = choose.choice([None, 1, 2, choose.randint(3, tokens)])
    if choose.random() < 0.3:
        options["sinks"] = torch.randn(4, generator=torch.Generator().manual_seed(seed))
    given: dict[str, Any] = {"batch": batch, "tokens": tokens, "dtype": choose.choice([torch.bfloat16, torch.float16])}
    qkv = random_qkv(4, kv_heads, **given, head_dim=head_dim, v_head_dim=v_head_dim, seed=seed)
    dout = random_qkv(4, kv_heads, **given, head_dim=v_head_dim, seed=seed + 1)[0]
    check(segmented(sizes, options, [qkv], [dout])[0], options, qkv, dout)
    assert FORWARD in [name for name, *_ in calls]
    check(gradients(lambda *t: causal_attention(*t, layer=0, **options), *qkv, dout), options, qkv, dout)


@pytest.mark.parametrize("is_captured", [False, True])
def test_documents_in_pieces_and_captured_graphs_go_by_products(
    is_captured: bool, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first segment goes by flash where its documents are whole; a captured graph reads nothing."""
    docs = DOCS.clone()
    docs[0, 16:] = docs[0, 16:] if is_captured else 9
    monkeypatch.setattr(proofs, "is_capturing", lambda: is_captured)
    qkv, dout = (random_qkv(4, 2, **SMALL, seed=seed) for seed in (0, 1))
    check(segmented([8, 12], {"doc_ids": docs}, [qkv], [dout[0]])[0], {"doc_ids": docs}, qkv, dout[0])
    assert [name for name, *_ in calls].count(FORWARD) == (0 if is_captured else 2)


def test_ids_that_change_are_read_anew(calls: list[Call]) -> None:
    """Within a unit and outside, changed in place or other tensors in the same memory; inference has no versions."""
    qkv = random_qkv(4, 2, **SMALL)
    truth_of = functools.partial(formula, *(t.double() for t in qkv))
    near: Any = functools.partial(torch.testing.assert_close, rtol=0.02, atol=0.02)
    docs, step = DOCS.clone(), SimulatedStep([20])
    with step.unit("F", 0, 0):
        for layer in range(8):
            if layer < 3:
                docs[:, 4 * layer + 2 :] += 100
            else:
                del docs
                docs = (torch.arange(40).view(2, 20) // layer).int()  # the allocator gives the same memory again
            near(causal_attention(*qkv, layer=layer, doc_ids=docs).double(), truth_of(doc_ids=docs))
    with torch.inference_mode():
        docs = docs.clone()
        for start in (3, 4):
            docs[0, start:] += 50
            near(causal_attention(*qkv, layer=0, doc_ids=docs).double(), truth_of(doc_ids=docs))
