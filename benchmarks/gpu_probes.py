"""The stages of gpu.py that tell what the machine is: its environment, and what later work needs to know."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import aten_stand_ins
import torch
import torch.nn.functional as F
from gpu_cases import Case, Machine, random

import seq1f1b
from seq1f1b import _C
from seq1f1b.device import kernel_library

aten = torch.ops.aten


# -- environment -----------------------------------------------------------------------------------------------------


def environment(machine: Machine) -> Iterator[Case]:
    def versions() -> dict[str, Any]:
        found: dict[str, Any] = {
            "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "libc": " ".join(platform.libc_ver()), "kernel": platform.release(), "cores": os.cpu_count(),
            "seq1f1b": seq1f1b.__version__, "isa": _C.attention_isa(), "own CUDA kernels": {
                name: {"source": operation.source, "compiler": operation.compiler, "code": operation.architectures}
                for name, operation in kernel_library.operations().items()
            },
        }  # fmt: skip
        found |= {name: shutil.which(name) or "none" for name in ("gcc", "nvcc", "ncu", "compute-sanitizer")}
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")
        if machine.is_cuda:
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "device": properties.name, "sm": f"{properties.major}{properties.minor}",
                "multiprocessors": properties.multi_processor_count, "bytes": properties.total_memory,
                "free bytes": torch.cuda.mem_get_info()[0], "cudnn": torch.backends.cudnn.version(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())), "devices": torch.cuda.device_count(),
            }  # fmt: skip
        return found

    def driver() -> dict[str, Any]:
        machine.need_cuda()
        fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,compute_mode"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        values = (
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip().split(", ")
        )
        return dict(zip(fields.split(","), values, strict=True))

    def binding() -> dict[str, Any]:
        """The extension was built without torch: its functions are found in this one, and its ops run."""
        out = seq1f1b.causal_attention(*(torch.ones(1, 1, 3, 8, device=machine.device) for _ in range(3)), layer=0)
        torch.testing.assert_close(out, torch.ones_like(out))
        return {"functions": len(_C.torch_functions()), "file": _C.__file__.rpartition("/")[2]}

    def schemas() -> dict[str, Any]:
        drift = {name: text for name in aten_stand_ins.SCHEMAS if (text := aten_stand_ins.schema_drift(name))}
        assert not drift, drift
        newer = aten._flash_attention_forward.default._schema.arguments
        return {
            "num_splits": any(argument.name == "num_splits" for argument in newer),
            "inplace flash": hasattr(aten, "_flash_attention_forward_no_dropout_inplace"),
        }

    yield from (("versions", versions), ("driver", driver), ("binding", binding), ("schemas", schemas))


# -- probes: what later work needs to know ---------------------------------------------------------------------------


def ipc_child(handle: Any, done: Any) -> None:
    shared = handle.get()
    shared += 1
    torch.cuda.synchronize()
    done.put(float(shared.sum()))


def nccl_pair(rank: int, store_path: str) -> None:
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1")
    torch.cuda.set_device(0)
    store = torch.distributed.FileStore(store_path, 2)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=2)
    data = torch.full((1 << 20,), float(rank), device="cuda")
    if rank == 0:
        torch.distributed.send(data, 1)
    else:
        torch.distributed.recv(data, 0)
        assert float(data.sum()) == 0.0
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


def driver_attributes(machine: Machine) -> dict[str, Any]:
    machine.need_cuda()
    wanted = {  # of CUdevice_attribute
        "compute mode": 20, "opt-in shared memory": 97, "64-bit stream memory operations": 122,
        "stream wait nor": 123, "file descriptor handles": 103, "IPC events": 125, "tensor maps": 132,
    }  # fmt: skip
    library, value, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), {}
    for name, attribute in wanted.items():
        status = library.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
        found[name] = value.value if status == 0 else f"error {status}"
    return found


def layouts(machine: Machine) -> dict[str, Any]:
    machine.need_cuda()
    q = random(machine, 2, 100, 4, 64)
    bhsd = q.transpose(1, 2)
    flash = aten._flash_attention_forward.default(q, q, q, None, None, 100, 100, 0.0, True, False)
    efficient = aten._efficient_attention_forward.default(q, q, q, None, None, None, None, None, 0.0, 2, True)
    cudnn = aten._scaled_dot_product_cudnn_attention.default(bhsd, bhsd, bhsd, None, True, 0.0, True, False)
    named = {"flash": flash, "efficient": efficient, "cudnn": cudnn}
    return {f"lse of {name}": f"{tuple(r[1].shape)} {r[1].dtype} {r[1].stride()}" for name, r in named.items()}


def alibi(machine: Machine) -> dict[str, Any]:
    machine.need_cuda()
    q = random(machine, 1, 64, 4, 64)
    slopes = torch.ones(4, device=machine.device)
    try:
        aten._flash_attention_forward.default(q, q, q, None, None, 64, 64, 0.0, True, False, alibi_slopes=slopes)
    except RuntimeError as error:
        return {"torch's flash with ALiBi": str(error).splitlines()[0]}
    return {"torch's flash with ALiBi": "runs"}


def ipc(machine: Machine) -> dict[str, Any]:
    machine.need_cuda()
    context = torch.multiprocessing.get_context("spawn")
    handle, done = context.Queue(), context.Queue()
    child = context.Process(target=ipc_child, args=(handle, done))
    child.start()
    data = torch.ones(1 << 20, device=machine.device)
    handle.put(data)
    try:
        assert done.get(timeout=25) == float(2 << 20)
    finally:
        child.join(5)
        if child.is_alive():
            child.kill()
    assert float(data.sum()) == float(2 << 20)
    return {}


def nccl_self(machine: Machine) -> dict[str, Any]:
    """A communicator of one rank sends to itself: loads the library, and orders by the stream."""
    machine.need_cuda()
    library = ctypes.CDLL("libnccl.so.2")

    class UniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_char * 128),)

    def check(status: int) -> None:
        library.ncclGetErrorString.restype = ctypes.c_char_p
        assert status == 0, library.ncclGetErrorString(status).decode()

    identity, communicator, version = UniqueId(), ctypes.c_void_p(), ctypes.c_int()
    torch.zeros(1, device=machine.device)  # makes the context
    check(library.ncclGetVersion(ctypes.byref(version)))
    check(library.ncclGetUniqueId(ctypes.byref(identity)))
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
    check(library.ncclCommInitRank(ctypes.byref(communicator), 1, identity, 0))
    source, target = (random(machine, 1 << 20, dtype=torch.float32) for _ in range(2))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    operand = [
        ctypes.c_size_t(source.numel()),
        ctypes.c_int(7),
        ctypes.c_int(0),
        communicator,
        stream,
    ]  # 7: float32
    check(library.ncclGroupStart())
    check(library.ncclSend(ctypes.c_void_p(source.data_ptr()), *operand))
    check(library.ncclRecv(ctypes.c_void_p(target.data_ptr()), *operand))
    check(library.ncclGroupEnd())
    machine.sync()
    assert torch.equal(source, target)
    check(library.ncclCommDestroy(communicator))
    return {"version": version.value}


def nccl_two_processes(machine: Machine) -> dict[str, Any]:
    """Two ranks on one GPU that take each other for another host's."""
    machine.need_cuda()
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        children = [context.Process(target=nccl_pair, args=(rank, f"{folder}/store")) for rank in range(2)]
        for child in children:
            child.start()
        deadline = time.monotonic() + 25
        for child in children:
            child.join(max(0.1, deadline - time.monotonic()))
        codes = [child.exitcode for child in children]
        for child in children:
            if child.is_alive():
                child.kill()
    return {"works": codes == [0, 0], "exit codes": codes}


def default_attention(machine: Machine) -> dict[str, Any]:
    """Ours gives the same bits as torch's flash op, which torch itself would take for this shape."""
    machine.need_cuda()
    q = random(machine, 1, 8, 1024, 128)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        flash = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return {"equal": torch.equal(flash, seq1f1b.causal_attention(q, q, q, layer=0))}


def probes(machine: Machine) -> Iterator[Case]:
    cases = {
        "driver attributes": driver_attributes,
        "layouts of lse": layouts,
        "ALiBi": alibi,
        "default attention": default_attention,
        "NCCL to itself": nccl_self,
        "CUDA IPC": ipc,
        "NCCL, two processes on one GPU": nccl_two_processes,
    }
    for name, probe in cases.items():
        yield name, functools.partial(probe, machine)
