"""The library of the package's own CUDA kernels, and the launch of attention.

The kernels run on every GPU of Ampere or later, and each is checked at its first use (proofs.py).
``SEQ1F1B_CUDA_KERNELS=own``, for tests and benchmarks, uses them for every possible call, without the check;
``library`` uses none. The environment is read once, at the import of this module.
"""

from __future__ import annotations

import functools
import os
import warnings
from pathlib import Path

import torch
from torch import Tensor

from seq1f1b.device import kernel_tables
from seq1f1b.device.kernel_tables import Operation

__all__: list[str] = []

LIBRARY = Path(__file__).parents[1] / "libseq1f1b_cuda.so"
ATTENTION = ("attention_forward", "attention_backward")
PARTS = "attention_parts"  # merges and sums of results over ranges of keys; see attention_parts.py
USES = {
    **dict.fromkeys(ATTENTION, "for documents and soft caps, heads of 64 and 128"),
    PARTS: "for results over ranges of keys, which are merged and added up, heads of a multiple of 8",
}
OPERATIONS = tuple(USES)
HEADS = (64, 128)  # head sizes of the kernels of attention
CODES = {getattr(torch, name): code for code, name in kernel_tables.DTYPES.items()}


def operations() -> dict[str, Operation]:
    """Returns the library's operations by name; empty if the library was not built.

    Raises:
        OSError, ValueError: the library exists and cannot be used.
    """
    return _operations_of(LIBRARY)


@functools.cache
def _operations_of(path: Path) -> dict[str, Operation]:
    if not path.exists():
        return {}
    return {name: kernel_tables.find(path, name) for name in OPERATIONS}


preferred = os.environ.get("SEQ1F1B_CUDA_KERNELS", "")
"""The preference that was asked for, which tests and benchmarks change; read it by ``preference()``."""


def preference() -> str:
    """Returns 'own', 'library' or ''; with '', the check at the first use decides.

    Raises:
        ValueError: the environment variable has another value.
    """
    if preferred not in ("", "own", "library"):
        raise ValueError(f"SEQ1F1B_CUDA_KERNELS is {preferred!r}, must be 'own', 'library' or unset")
    return preferred


def wanted(name: str, device: torch.device) -> Operation | None:
    """Returns our operation, unchecked; None if it is not built, not for the device, or ruled out by the environment.

    Raises:
        RuntimeError: the environment asks for our kernels, and their library was not built.
        OSError, ValueError: the library exists and cannot be used.
    """
    wish = preference()
    if wish == "library" or not (wish or can_run(device)):
        return None
    found = operations()
    if wish and not found:
        raise RuntimeError(
            f"SEQ1F1B_CUDA_KERNELS=own, but there is no {LIBRARY}: install again with nvcc and SEQ1F1B_CUDA=1"
        )
    return found.get(name)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Returns the compute capability; (0, 0) for a device other than CUDA."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def can_run(device: torch.device) -> bool:
    """Returns whether the device can run our kernels: Ampere or later."""
    return capability(device) >= (8, 0)


def warn_of_products(device: torch.device, dtype: str, head_dim: int, v_head_dim: int) -> None:
    """Warns once if matrix products run a call for lack of a kernel, although the device could run our kernels."""
    if preference() or not can_run(device):
        return
    heads = " and ".join(map(str, sorted({head_dim, v_head_dim})))
    if not operations():
        _warn("which were not built: install seq1f1b again with nvcc and SEQ1F1B_CUDA=1")
    elif head_dim != v_head_dim or head_dim not in HEADS:  # otherwise the kernel failed its check, which said so
        _warn(
            f"which are for heads of 64 or 128 in bfloat16 or float16, not for heads of {heads} in {dtype}: choose such"
        )


@functools.cache
def _warn(why: str) -> None:
    warnings.warn(
        "attention with a soft cap goes by matrix products, up to 200 times slower than by this package's CUDA "
        f"kernels, {why}, or set SEQ1F1B_CUDA_KERNELS=library to do without this warning",
        stacklevel=2,
    )


def stream_of(index: int) -> int:
    """Returns the address of the current stream of a CUDA device; 0 for the CPU's index -1."""
    return int(torch.cuda.current_stream(index).cuda_stream) if index >= 0 else 0


def launch_attention(
    operation: Operation, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, scale: float, window: int,
    softcap: float, docs: Tensor, dout: Tensor | None = None, dq: Tensor | None = None, dk: Tensor | None = None,
    dv: Tensor | None = None, own_dk: Tensor | None = None, own_dv: Tensor | None = None,
    store: bool = False,
) -> None:  # fmt: skip
    """Launches on the current stream of q's device. Rows of the tensors begin at multiples of 16 bytes.

    Args:
        q, out, dout, dq: (batch, heads, tokens, head_dim). The last query is token N - 1.
        k, v, dk, dv: (batch, kv_heads, N, head_dim); k and v have equal strides, and so do dk and dv, in float32.
        own_dk, own_dv: (batch, kv_heads, tokens, head_dim), in q's dtype, with equal strides: the sums of the last rows
            of dk and dv, whose own values are undefined after the launch.
        store: whether to overwrite dk and dv instead of adding to them.
        lse: (batch, heads, tokens), contiguous, float32.
        docs: (batch, N), int32; empty: no documents.
    """
    batch, heads, tokens, head_dim = q.shape
    docs, of_keys = docs if docs.stride(-1) == 1 else docs.contiguous(), _rows(k, v)
    pack = functools.partial(
        kernel_tables.ATTENTION.pack, CODES[q.dtype], batch, heads, k.shape[1], tokens, head_dim, k.shape[2] - tokens,
        q.data_ptr(), *of_keys[:2], *q.stride()[:3], *of_keys[2:], *_rows(out), lse.data_ptr(),
        scale, window, softcap,
        docs.data_ptr() if docs.numel() else 0, docs.stride(0) if docs.numel() else 0,
        *_rows(dout), *_rows(dq), *_rows(dk, dv), store, *_rows(own_dk, own_dv),
    )  # fmt: skip
    index = q.get_device()
    with torch.cuda.device(index):  # which the launcher queries; -1, for the CPU, changes nothing
        size = operation.scratch_bytes(pack(0, 0))
        operation.check(max(0, -size))
        scratch = q.new_empty(size, dtype=torch.uint8)  # returns to the stream's pool after the launch
        operation.launch(pack(scratch.data_ptr(), size), stream_of(index))


def _rows(*tensors: Tensor | None) -> tuple[int, ...]:
    """Returns the addresses of tensors, and the strides of batch, head and row common to all; zeros for None."""
    found = [t for t in tensors if t is not None]
    if not found:
        return (0,) * (len(tensors) + 3)
    assert all(t.stride() == found[0].stride() for t in found)
    return *[t.data_ptr() for t in found], *found[0].stride()[:3]


def describe() -> list[str]:
    """Returns lines for ``seq1f1b doctor``: the kernels, or the effect of their absence."""
    try:
        found = operations()
    except (OSError, ValueError) as error:
        return [f"own CUDA kernels: unusable, torch's ops instead: {error}"]
    if not found:
        return ["own CUDA kernels: not built (no nvcc at installation, or SEQ1F1B_CUDA=0): torch's ops only"]
    return [
        f"own CUDA kernels {operation.name}: {operation.architectures}, nvcc {operation.compiler}; "
        f"{USES[operation.name]}, on each GPU of Ampere or later that passes a check at the first use"
        for operation in found.values()
    ]
