"""The first stage of gpu.py: what this machine is, and whether the package finds what it needs there."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import aten_stand_ins
import torch
from gpu_cases import Case, Machine, Unmeasured

import seq1f1b
from seq1f1b import _C
from seq1f1b.device import kernel_library

aten = torch.ops.aten


def doctor(machine: Machine) -> Iterator[Case]:
    def device() -> dict[str, Any]:
        """The GPU's first work: later stages find the context's files in memory."""
        start = time.perf_counter()
        ones = torch.ones(64, 64, device=machine.device)
        assert float((ones @ ones).sum()) == 64.0**3
        found: dict[str, Any] = {"seconds to the first product": round(time.perf_counter() - start, 1)}
        found["architecture"] = kernel_library.architecture(machine.device)
        if machine.is_cuda:
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "device": properties.name, "devices": torch.cuda.device_count(),
                "multiprocessors": properties.multi_processor_count, "bytes": properties.total_memory,
                "free bytes": torch.cuda.mem_get_info()[0], "cudnn": torch.backends.cudnn.version(),
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            }  # fmt: skip
        return found

    def versions() -> dict[str, Any]:
        found: dict[str, Any] = {
            "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
            "libc": " ".join(platform.libc_ver()), "kernel": platform.release(), "cores": os.cpu_count(),
            "seq1f1b": seq1f1b.__version__, "isa": _C.attention_isa(),
        }  # fmt: skip
        found |= {name: shutil.which(name) or "none" for name in ("gcc", "nvcc", "ncu", "compute-sanitizer")}
        return found | {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset")}

    def own_kernels() -> dict[str, Any]:
        """What the library says of itself; that its hashes are those of the tree's sources is the tests' to say."""
        found: dict[str, Any] = {
            name: {"source": operation.source, "compiler": operation.compiler, "code": operation.architectures}
            for name, operation in kernel_library.operations().items()
        }
        assert sorted(found) == sorted(kernel_library.OPERATIONS), f"{kernel_library.LIBRARY} has {sorted(found)}"
        return found

    def driver() -> dict[str, Any]:
        machine.need_cuda()
        if shutil.which("nvidia-smi") is None:
            raise Unmeasured("there is no nvidia-smi")
        fields = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,compute_mode"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
        values = (
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip().split(", ")
        )
        return dict(zip(fields.split(","), values, strict=True))

    def attributes() -> dict[str, Any]:
        machine.need_cuda()
        wanted = {  # of CUdevice_attribute
            "opt-in shared memory": 97, "64-bit stream memory operations": 122, "IPC events": 125, "tensor maps": 132,
        }  # fmt: skip
        library, value, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), {}
        for name, attribute in wanted.items():
            status = library.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
            found[name] = value.value if status == 0 else f"error {status}"
        return found

    def binding() -> dict[str, Any]:
        """The extension was built without torch: its functions are found in this one, and its ops run."""
        out = seq1f1b.causal_attention(*(torch.ones(1, 1, 3, 8, device=machine.device) for _ in range(3)), layer=0)
        torch.testing.assert_close(out, torch.ones_like(out))
        return {"functions": len(_C.torch_functions()), "file": _C.__file__.rpartition("/")[2]}

    def schemas() -> dict[str, Any]:
        drift = {name: text for name in aten_stand_ins.SCHEMAS if (text := aten_stand_ins.schema_drift(name))}
        assert not drift, drift
        return {"functions": len(aten_stand_ins.SCHEMAS)}

    for case in (device, versions, own_kernels, driver, attributes, binding, schemas):
        yield case.__name__.replace("_", " "), case
