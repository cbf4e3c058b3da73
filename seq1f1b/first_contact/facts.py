"""Facts of this machine, and what of it keeps GPUs from reaching each other."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import seq1f1b
from seq1f1b.first_contact.cases import NO_GPU, Case, Figures, Rank, Unmeasured

__all__: list[str] = []

NAMESPACES = ("ipc", "mnt", "net", "pid", "user", "uts")
VARIABLES = (  # that change what GPUs do, by their beginnings
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_", "NCCL_", "NVIDIA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "SEQ1F1B_NCCL",
    "TORCH_NCCL_", "GLOO_SOCKET_IFNAME",
)  # fmt: skip
OURS = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_HOSTID")  # that a supervisor sets for its ranks
LEAST_SHM = 1 << 30
WARNINGS = "warnings"  # a figure


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    names = sorted(name for name in variables if name.startswith(VARIABLES) and name not in OURS)
    return {name: variables[name] for name in names}


def warnings_of(variables: Mapping[str, str], shm_bytes: int) -> list[str]:
    """Lists what in the environment makes a pipeline slow or breaks it, each with its remedy."""
    found = []
    queues = variables.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    if queues.isdigit() and int(queues) < 8:
        found.append(
            f"CUDA_DEVICE_MAX_CONNECTIONS is {queues}: transfers share hardware queues with units and wait for them; "
            "unset it, or set it to 32"
        )
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in variables.get(name, "").lower():
            found.append(
                f"{name} asks for expandable_segments: such memory cannot be given to other processes by CUDA IPC; "
                "leave it out if a transport by copies fails"
            )
    for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "CUDA_LAUNCH_BLOCKING"):
        if variables.get(name, "0") not in ("", "0"):
            found.append(f"{name} is {variables[name]}: messages, or all units, are slow; unset it")
    if shm_bytes < LEAST_SHM:
        found.append(
            f"/dev/shm has {shm_bytes >> 20} MiB, and NCCL and data loaders put their buffers there; start the "
            "container with --shm-size 8g, or --ipc host"
        )
    return found


def first_line(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.readline().strip()
    except OSError as error:
        return f"? ({error.strerror})"


def shm_bytes() -> int:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return found.f_frsize * found.f_blocks


def output_of(*command: str) -> str:
    """The text that a tool prints; "" where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip() if done.returncode == 0 else ""


def namespaces() -> dict[str, str]:
    found = {}
    for name in NAMESPACES:
        try:
            found[name] = os.readlink(f"/proc/self/ns/{name}").partition("[")[2].strip("]")
        except OSError:
            found[name] = "?"
    return found


def host(rank: Rank) -> Figures:
    """A rank's place: two containers of one machine have one boot id and several namespaces."""
    size = shm_bytes()
    return {
        f"rank {rank.rank}": {
            "host": platform.node(), "boot id": first_line("/proc/sys/kernel/random/boot_id"),
            "namespaces": namespaces(), "/dev/shm": f"{size / (1 << 30):.1f} GiB",
            "cores": len(os.sched_getaffinity(0)), "GPU": gpu_of(rank),
        },
        WARNINGS: warnings_of(os.environ, size),
    }  # fmt: skip


def gpu_of(rank: Rank) -> str:
    if not rank.is_cuda:
        return NO_GPU
    found = torch.cuda.get_device_properties(rank.device)
    return f"{rank.device}, {found.name}, {found.total_memory >> 30} GiB, {getattr(found, 'uuid', '')}"


def versions(rank: Rank) -> Figures:
    """Versions, in text: a difference between ranks is a reason to fail."""
    from seq1f1b.device.edge_ways import found_nccl

    own = {
        "seq1f1b": seq1f1b.__version__, "torch": torch.__version__, "CUDA": str(torch.version.cuda),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0") or "?",
        "NCCL": found_nccl(), "Python": platform.python_version(), "kernel": platform.release(),
    }  # fmt: skip
    everyones = rank.gather(own)
    apart = [name for name in ("seq1f1b", "torch", "CUDA") if len({other[name] for other in everyones}) > 1]
    differing = {name: sorted({other[name] for other in everyones}) for name in apart}
    assert not apart, f"the ranks have different versions, {differing}: install the same on every host"
    return own


def peer_access(rank: Rank) -> Figures:
    """Which GPUs of this rank's host reach each other's memory."""
    if not rank.is_cuda:
        raise Unmeasured(NO_GPU)
    count = torch.cuda.device_count()
    if count == 1:
        raise Unmeasured("one GPU")
    own = rank.device.index
    missing = [i for i in range(count) if i != own and not torch.cuda.can_device_access_peer(own, i)]
    return {f"GPU {own} of {platform.node()}": f"no access to {missing}" if missing else "all"}


def ipc(rank: Rank) -> Figures:
    """Each rank opens memory that its neighbours on its host have given it, and reads what is there."""
    if not rank.is_cuda:
        raise Unmeasured(NO_GPU)
    given = torch.full((1 << 20,), float(rank.rank), device=rank.device)
    rank.sync()
    try:  # as torch.multiprocessing does it
        fields = given.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        mine: Any = [field.hex() if isinstance(field, bytes) else field for field in fields]
    except RuntimeError as error:
        mine = f"rank {rank.rank} cannot give its memory to others: {error}"
    everyones = rank.gather(mine)
    refused, neighbours = [], {(rank.rank + step) % rank.world for step in (-1, 1)} - {rank.rank}
    for other in sorted(neighbours):
        theirs = everyones[other]
        if rank.hosts[other] != rank.hosts[rank.rank]:
            continue
        try:
            if isinstance(theirs, str):
                raise RuntimeError(theirs)
            own = [bytes.fromhex(field) if isinstance(field, str) else field for field in theirs]
            storage = torch.UntypedStorage._new_shared_cuda(*own)
            opened = torch.empty(0, device=storage.device).set_(storage)
            assert bool((opened == other).all()), f"it holds {float(opened[0])}"
            del opened
        except (RuntimeError, AssertionError) as error:
            refused.append(f"memory of rank {other}: {str(error).splitlines()[0]}")
    rank.sync()
    rank.gather(None)  # nobody frees what another one reads
    assert not refused, f"rank {rank.rank} cannot read {'; '.join(refused)}"
    return {"opened": "each rank has read memory of its neighbours on its host"}


def topology(rank: Rank) -> Figures:
    if not rank.is_cuda:
        raise Unmeasured(NO_GPU)
    is_first = rank.hosts.index(rank.hosts[rank.rank]) == rank.rank
    found = output_of("nvidia-smi", "topo", "-m")
    if not found:
        raise Unmeasured("there is no nvidia-smi, or it tells no topology")
    return {f"host {rank.hosts[rank.rank]}": found} if is_first else {}


def machine(rank: Rank) -> Iterator[Case]:
    for case in (versions, host, topology, peer_access, ipc):
        yield case.__name__.replace("_", " "), functools.partial(case, rank)
    yield "environment", lambda: environment() or {"set": "nothing that matters"}
