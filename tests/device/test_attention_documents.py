"""Is attention over documents right that goes by torch's flash ops, and what does it ask of the host?

On CPU tensors, over stand-ins of these ops that leave unwritten memory NaN; the truth is the formula in float64.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import test_cuda_attention
import torch
from aten_stand_ins import Call, cuda_kernels_on_the_cpu
from attention_runs import formula, gradients, random_qkv, segmented
from op_counts import launches
from simulated_step import SimulatedStep
from slices import full_only
from torch import Tensor

from seq1f1b import proof
from seq1f1b.attention.causal import causal_attention
from seq1f1b.device import cuda_attention, kernel_library
from seq1f1b.device.attention_ways import Options

pytestmark = pytest.mark.filterwarnings("ignore:Warning only once for all operators")  # that kernels are replaced

FORWARD, BACKWARD = "_flash_attention_forward", "_flash_attention_backward"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    monkeypatch.setattr(cuda_attention, "KEY_RANGE", 5)
    with cuda_kernels_on_the_cpu() as calls:
        yield calls


# The ops multiply dout by out as it is rounded, which shows where a document has two or three tokens.
check = functools.partial(test_cuda_attention.check, factor=2.0)


# -- what comes out --------------------------------------------------------------------------------------------------


def random_ids(choose: random.Random, batch: int, tokens: int) -> Tensor:
    """Documents of every length; ids are first tokens, as document_starts makes them, or any numbers."""
    rows = []
    for _ in range(batch):
        starts = sorted({0, *choose.sample(range(tokens), choose.choice([0, 1, 3, tokens // 3]))})
        names = starts if choose.random() < 0.5 else choose.sample(range(-999, 999), len(starts))
        ends = [*starts[1:], tokens]
        rows.append([name for name, start, end in zip(names, starts, ends, strict=True) for _ in range(end - start)])
    return torch.tensor(rows, dtype=torch.int32)


HEADS = [(4, 4), (4, 2), (4, 1)]
SIZES = [(64, 64), (128, 128), (192, 128), (24, 40)]  # of q and k, and of v


@pytest.mark.parametrize("seed", [*range(8), *full_only(*((seed,) for seed in range(8, 400)))])
def test_random_documents(seed: int, calls: list[Call]) -> None:
    """Documents, segments, batches, heads, sizes and windows; segments end within documents and between them."""
    choose = random.Random(seed)
    tokens, batch = choose.randint(20, 48), choose.randint(1, 3)
    heads, kv_heads = HEADS[seed % 3]
    head_dim, v_head_dim = SIZES[seed % 4]
    ends = sorted(choose.sample(range(1, tokens), choose.randint(0, 4)))
    sizes = [end - begin for begin, end in zip([0, *ends], [*ends, tokens], strict=True)]
    options: dict[str, Any] = {"doc_ids": random_ids(choose, batch, tokens), "scale": choose.choice([None, 0.3])}
    options["window"] = choose.choice([None, 1, 2, choose.randint(3, tokens)])
    if choose.random() < 0.3:
        options["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(seed))
    given = {
        "batch": batch, "tokens": tokens, "head_dim": head_dim, "v_head_dim": v_head_dim,
        "dtype": choose.choice([torch.bfloat16, torch.float16]),
    }  # fmt: skip
    qkv = random_qkv(heads, kv_heads, **given, seed=seed)
    dout = random_qkv(heads, kv_heads, **given | {"head_dim": v_head_dim}, seed=seed + 1)[0]
    check(segmented(sizes, options, [qkv], [dout])[0], options, qkv, dout)
    check(gradients(lambda *t: causal_attention(*t, layer=0, **options), *qkv, dout), options, qkv, dout)
    assert [name for name, *_ in calls].count(FORWARD) == batch * (len(sizes) + 1)  # a call a row, whatever it holds


DOCS = torch.tensor([[0] * 9 + [9] * 6 + [15] * 5, [0] * 20], dtype=torch.int32)


@pytest.mark.parametrize("comes_back", ["in the segment", "before it", "in another row"])
def test_a_document_in_two_pieces_goes_another_way(comes_back: str, calls: list[Call]) -> None:
    """From the segment on in which the second piece begins."""
    docs, at, by_flash = DOCS.clone(), {"in the segment": 16, "before it": 10, "in another row": 12}[comes_back], 1
    docs[1 if comes_back == "in another row" else 0, at:] = 9 if comes_back == "in the segment" else 0
    if comes_back == "in another row":
        docs[1, 8:12] = 7
    options, given = {"doc_ids": docs}, {"tokens": 20, "head_dim": 8, "dtype": torch.bfloat16}
    qkv, dout = (random_qkv(4, 2, **given, seed=seed) for seed in (0, 1))
    check(segmented([8, 6, 6], options, [qkv], [dout[0]])[0], options, qkv, dout[0])
    by_flash += comes_back == "in the segment"
    assert [name for name, *_ in calls].count(FORWARD) == 2 * by_flash


def test_nothing_is_read_while_a_graph_is_captured(calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that are not known go another way then, and by flash again later."""
    options, given = {"doc_ids": DOCS}, {"tokens": 20, "head_dim": 8, "dtype": torch.bfloat16}
    qkv, dout = (random_qkv(4, 2, **given, seed=seed) for seed in (0, 1))
    for is_capturing in (True, False):
        monkeypatch.setattr(proof, "is_capturing", lambda is_capturing=is_capturing: is_capturing)
        check(segmented([8, 12], options, [qkv], [dout[0]])[0], options, qkv, dout[0])
        assert bool(calls) == (not is_capturing)


# -- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("is_built", [True, False])
def test_the_order_of_ways(is_built: bool, is_right: bool, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels, torch's flash ops, matrix products."""
    monkeypatch.setattr(cuda_attention, "_is_proven", lambda *use: is_right)
    monkeypatch.setattr(kernel_library, "choose", lambda name, q: object() if is_built else None)
    none = torch.empty(0)
    options = Options(DOCS, none, DOCS, none, 0.125, 0, 0.0)
    q = torch.empty(2, 4, 20, 64, dtype=torch.bfloat16)
    assert cuda_attention.way(q, 64, options) == ("own" if is_built else "documents" if is_right else "plain")
    for changed, in_pieces in ((options._replace(softcap=3.0), False), (options, True)):
        assert cuda_attention.way(q, 64, changed, in_pieces=in_pieces) == ("own" if is_built else "plain")
    assert cuda_attention.way(q, 64, options._replace(slopes=torch.ones(4))) == "plain"
    assert cuda_attention.way(q.float(), 64, options) == "plain"


@pytest.mark.parametrize("name", cuda_attention._CHECKED)
def test_a_way_that_fails_its_check_is_not_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each dtype and head size, and with a warning that names it and what takes its place."""
    proved: list[tuple[torch.dtype, int, int]] = []

    def prove(way: str, use: proof.Use) -> None:
        proved.append(use[1:4])
        assert way == name and use.head_dim == 64, "dq of a case is off by 1.0e+00 of its norm"

    what, cases, now = cuda_attention._CHECKED[name]
    fresh = proof.Proofs(now.instead)
    monkeypatch.setitem(cuda_attention._CHECKED, name, (what, cases, fresh))
    monkeypatch.setattr(cuda_attention, "prove", prove)
    monkeypatch.setattr(cuda_attention, "_cudnn_takes", lambda use: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    tensors = [(torch.bfloat16, 64), (torch.float16, 80)]
    uses = [
        SimpleNamespace(dtype=dtype, device=torch.device("cuda", 0), shape=(1, 1, 1, size)) for dtype, size in tensors
    ]
    words = re.escape(f"{what} (float16, heads of 80 and 64) failed its check on cuda:0, a GPU: dq of")
    words += f".*{re.escape(now.instead)}"
    with pytest.warns(UserWarning, match=words) as said:
        found = [[cuda_attention._is_proven(name, q, 64) for q in uses] for _ in range(2)]
    assert found == [[True, False]] * 2 and len(said) == 1
    assert proved == [(*of, 64) for of in tensors]


# -- what is asked of the host ---------------------------------------------------------------------------------------


def test_a_row_of_the_batch_is_a_call(calls: list[Call]) -> None:
    """In a forward; and in a backward one for each range of keys."""
    step, layers, given = SimulatedStep([8, 12]), 3, {"tokens": 20, "head_dim": 8, "dtype": torch.bfloat16}
    qkv = [t.requires_grad_() for t in random_qkv(4, 2, **given)]
    outs: list[Tensor] = []

    def forward(segment: int) -> None:
        docs, rows = DOCS[:, step.slice(segment)], step.slice(segment)
        with step.unit("F", 0, segment):
            outs.extend(
                causal_attention(*(t[:, :, rows] for t in qkv), layer=layer, doc_ids=docs) for layer in range(layers)
            )

    def backward() -> None:
        with step.unit("B", 0, 1):
            torch.autograd.backward(outs[layers:], [out.detach() for out in outs[layers:]])

    forward(0)
    of_forward, of_backward = launches(lambda: forward(1)), launches(backward)
    assert of_forward[FORWARD] == layers * 2
    assert of_backward[BACKWARD] == layers * 2 * (1 + 2)  # 8 keys before the segment, 5 in a call


def test_ids_that_change_are_read_anew(calls: list[Call]) -> None:
    """What was read holds for the elements as they were, not for an address; ``data`` has a version of its own, as have
    tensors that compiled code makes."""
    given = {"tokens": 20, "head_dim": 8, "dtype": torch.bfloat16}
    qkv, dout = (random_qkv(4, 2, **given, seed=seed) for seed in (0, 1))
    docs = DOCS.clone()
    for change in (lambda: None, lambda: docs[:, 5:].add_(100), lambda: docs[1].copy_(torch.arange(20) // 7)):
        change()
        options = {"doc_ids": docs}
        got = gradients(lambda *t: causal_attention(*t, layer=0, doc_ids=docs.data), *qkv, dout[0])
        check(got, options, qkv, dout[0])
    with torch.inference_mode():
        q, k, v, docs = (t.clone() for t in (*qkv, docs))
        for start in (3, 4):
            docs[0, start:] += 50
            out = causal_attention(q, k, v, layer=0, doc_ids=docs)
            truth = formula(q.double(), k.double(), v.double(), doc_ids=docs)
            torch.testing.assert_close(out.double(), truth, rtol=0.02, atol=0.02)


def test_layers_of_a_unit_may_have_documents_of_their_own(calls: list[Call]) -> None:
    """Other ids in the same memory, whether they are changed in place or other tensors have come there."""
    step, given = SimulatedStep([20]), {"tokens": 20, "head_dim": 8, "dtype": torch.bfloat16}
    qkv = random_qkv(4, 2, **given)
    docs = DOCS.clone()
    with step.unit("F", 0, 0):
        for layer in range(8):
            if layer < 3:
                docs[:, 4 * layer + 2 :] += 100
            else:
                del docs
                docs = (torch.arange(40).view(2, 20) // layer).int()  # the allocator gives the same memory again
            out = causal_attention(*qkv, layer=layer, doc_ids=docs)
            truth = formula(*(t.double() for t in qkv), doc_ids=docs)
            torch.testing.assert_close(out.double(), truth, rtol=0.02, atol=0.02)
