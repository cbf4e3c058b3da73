"""Do kernels prove themselves where they run, and are they used only then? CPU tensors stand for those of a GPU, and
torch's elementary operations for kernels that are right; test_cuda_own.py has the emulated ones.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from seq1f1b.device import attention_proof, attention_ways, cuda_attention, kernel_library, proofs
from seq1f1b.device.attention_ways import BackwardArguments, Options, chain
from seq1f1b.device.kernel_library import ATTENTION, Operation

FORWARD, BACKWARD = ATTENTION
CPU = torch.device("cpu")


def right(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, docs: Tensor, scale: float,
    window: int, softcap: float, store: bool = False, **of_backward: Tensor,
) -> None:  # fmt: skip
    """In place of kernel_library.launch_attention: by matrix products."""
    none, num_keys = q.new_empty(0), k.shape[2]
    docs_of_queries = docs[:, docs.shape[1] - q.shape[2] :]
    options = Options(docs, none, docs_of_queries, none, scale, window, softcap, chain(num_keys, store), num_keys)
    if not of_backward:
        results, found = (out, lse), attention_ways.forward("plain", q, k, v, options)
    else:
        dout, dq, dk, dv, *own = (of_backward[name] for name in ("dout", "dq", "dk", "dv", "own_dk", "own_dv"))
        given = BackwardArguments(dout, q, k, v, out, lse, options, dk, dv)
        results, found = (dq, *own), attention_ways.backward("plain", given)
    for to, got in zip(results, found, strict=True):
        to.copy_(got)


Change = Callable[[list[Any], dict[str, Any]], object]
OPTIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {  # changes of what a launch is asked for
    "another scale": lambda o: {"scale": o["scale"] * 1.03},
    "a window longer by one": lambda o: {"window": o["window"] and o["window"] + 1},
    "no soft cap": lambda o: {"softcap": 0.0},
    "documents of one row for all": lambda o: {"docs": o["docs"][:1].expand_as(o["docs"])},
    "a document that begins late": lambda o: {"docs": begins_late(o["docs"].clone())},
}
OF_BACKWARD = {
    "sums are not added to": lambda o: {"store": True},
    "sums are read where there are none": lambda o: {"store": False},
}
BOTH: dict[str, Change] = {  # changes of results
    "one element off": lambda t, o: [r[1, 1, -1, 5].add_(3.0) for r in results_of(t, o)],
    "a row behind is written": lambda t, o: [
        r.as_strided((1,), (1,), r.storage_offset() + r.shape[2] * r.stride(2)).zero_() for r in results_of(t, o)
    ],
}
RESULTS: dict[str, dict[str, Change]] = {
    FORWARD: {
        **BOTH,
        "lse of base 2": lambda t, o: t[5].div_(math.log(2)),
        "a row before lse is written": lambda t, o: t[5].as_strided((1,), (1,), t[5].storage_offset() - 1).zero_(),
    },
    BACKWARD: BOTH | {"own rows lack the sums": lambda t, o: o["own_dk"].mul_(0.5)},
}


def begins_late(docs: Tensor) -> Tensor:
    if docs.numel():
        docs[1, 100] = docs[1, 99]
    return docs


def results_of(tensors: list[Any], options: dict[str, Any]) -> list[Tensor]:
    return [options["dq"], options["dk"], options["own_dv"]] if "dq" in options else [tensors[4]]


def nothing_is_written(*tensors: Any, **options: Any) -> None: ...


def a_launch_fails(*tensors: Any, **options: Any) -> None:
    raise RuntimeError("CUDA error 209: no kernel image is available")


def with_options(change: Callable[[dict[str, Any]], dict[str, Any]], *tensors: Any, **options: Any) -> None:
    right(*tensors, **(options | change(options)))


def with_results(change: Change, *tensors: Any, **options: Any) -> None:
    right(*tensors, **options)
    change(list(tensors), options)


def flaws() -> Iterator[Any]:
    """Launches that are not right, by operation."""
    for name in ATTENTION:
        of_options = OPTIONS | (OF_BACKWARD if name == BACKWARD else {})
        wrong = {what: functools.partial(with_options, change) for what, change in of_options.items()}
        wrong |= {what: functools.partial(with_results, change) for what, change in RESULTS[name].items()}
        wrong |= {"nothing is written": nothing_is_written, "a launch fails": a_launch_fails}
        yield from (pytest.param(name, launch, id=f"{name}: {what}") for what, launch in wrong.items())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Operation]:
    """A new process and a built library, the operations of which it gives."""
    found = {name: Operation(name, "13.0.88", "sm_80", len, len, len) for name in ATTENTION}  # nothing calls these
    for name, value in {
        "preferred": "", "LIBRARY": tmp_path / "library.so", "_operations_of": lambda path: found,
        "launch_attention": right, "can_run": lambda device: True,
    }.items():  # fmt: skip
        monkeypatch.setattr(kernel_library, name, value)
    monkeypatch.setattr(proofs, "results", {})
    kernel_library._warn.cache_clear()
    return found


def is_used(name: str = FORWARD, dtype: torch.dtype = torch.bfloat16, head_dim: int = 64) -> bool:
    return cuda_attention._has_own(name, torch.empty(2, 4, 5, head_dim, dtype=dtype, device="cpu"))


@pytest.fixture
def counted(gpu: dict[str, Operation], monkeypatch: pytest.MonkeyPatch) -> list[proofs.Use]:
    """Checks that were made; all pass."""
    uses: list[proofs.Use] = []
    monkeypatch.setattr(attention_proof, "prove", uses.append)
    return uses


# -- the check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float16, 128)], ids=str)
def test_a_kernel_that_is_right_is_used(
    head_dim: int, dtype: torch.dtype, name: str, gpu: dict[str, Operation], recwarn: pytest.WarningsRecorder
) -> None:
    state = torch.get_rng_state()
    assert is_used(name, dtype, head_dim) and is_used(name, dtype, head_dim)
    assert proofs.results == {proofs.Use(name, dtype, head_dim, head_dim, CPU): True}
    assert not recwarn.list and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name, launch", list(flaws()))
def test_a_kernel_that_is_wrong_is_told_once_and_not_used(
    name: str, launch: Callable[..., None], gpu: dict[str, Operation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_library, "launch_attention", launch)
    with pytest.warns(UserWarning, match=f"the CUDA kernel {name} .bfloat16, heads of 64. failed its check on") as said:
        assert [is_used(name), is_used(name)] == [False] * 2
    (text,) = (str(warning.message) for warning in said)
    assert "on cpu, this machine: " in text and "Matrix products, up to 200 times slower" in text
    assert "Install seq1f1b again" in text and "SEQ1F1B_CUDA_KERNELS=library" in text
    monkeypatch.setattr(kernel_library, "launch_attention", right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_used(name)  # never again
        assert is_used(BACKWARD if name == FORWARD else FORWARD) and is_used(name, torch.float16)


@pytest.mark.parametrize("name", ATTENTION)
def test_a_program_of_any_state_can_check(name: str, gpu: dict[str, Operation]) -> None:
    """Under another default dtype and device, autocast and, forward, inference mode; and below autograd, as in ops."""
    below = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView))
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(name == FORWARD), below:
            assert is_used(name)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


# -- when it is made --------------------------------------------------------------------------------------------------


def test_nothing_is_checked_while_a_graph_is_captured(
    counted: list[proofs.Use], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    for is_capturing, wanted in ((True, 0), (False, 1), (True, 1)):
        monkeypatch.setattr(proofs, "is_capturing", lambda now=is_capturing: now)
        assert is_used() == (wanted == 1) and len(counted) == wanted
    assert not recwarn.list


def test_threads_check_once(counted: list[proofs.Use]) -> None:
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: is_used(), range(8))) and len(counted) == 1


# -- calls without a kernel -------------------------------------------------------------------------------------------


def way(head_dim: int = 64, name: str = FORWARD) -> str:
    """The way of a call with a soft cap."""
    none, q = torch.empty(0), torch.empty(2, 4, 5, head_dim, dtype=torch.bfloat16)
    return cuda_attention.way(q, head_dim, cuda_attention.Options(none, none, none, none, 0.1, 0, 20.0), name)


def test_heads_for_which_there_is_no_kernel_are_told_once(counted: list[proofs.Use]) -> None:
    words = "goes by matrix products, .* heads of 64 or 128 in bfloat16 or float16, not for heads of 96 in bfloat16"
    with pytest.warns(UserWarning, match=words) as said:
        assert way(96) == way(96, BACKWARD) == "plain"
    assert len(said) == 1 and not counted


def test_a_library_that_was_not_built_is_told_once(gpu: dict[str, Operation], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_library, "_operations_of", lambda path: {})
    with pytest.warns(UserWarning, match="were not built: install seq1f1b again with nvcc and SEQ1F1B_CUDA=1") as said:
        assert way() == way(name=BACKWARD) == way() == "plain"
    assert len(said) == 1
