"""Two hosts on one machine: network namespaces with a host name each, joined by a virtual link."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_KINDS = ("net", "uts", "mnt")
INTERFACE = "lan"


@dataclass(frozen=True)
class Host:
    name: str
    pid: int  # of a process that holds its namespaces
    own_user: bool
    address: str
    environment: dict[str, str] = field(default_factory=dict)  # of processes that train on it

    @property
    def shell(self) -> list[str]:
        """Start of a command that runs on this host."""
        user = ["--user", "--preserve-credentials"] if self.own_user else []
        return ["nsenter", f"--target={self.pid}", *user, "--net", "--uts", "--mount", f"--wd={os.getcwd()}", "--"]

    def run(self, *command: str) -> None:
        subprocess.run([*self.shell, *command], check=True, capture_output=True, text=True)

    def enter(self) -> None:
        """Moves this process, of one thread, to the host for good."""
        here = os.getcwd()
        libc = ctypes.CDLL(None, use_errno=True)
        for kind in ("user", *_KINDS) if self.own_user else _KINDS:
            with open(f"/proc/{self.pid}/ns/{kind}") as namespace:
                if libc.setns(namespace.fileno(), 0) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {kind}")
        os.chdir(here)
        os.environ.update(self.environment)


def _refusal(command: Sequence[str]) -> str | None:
    """Why a command does not run here, None if it does."""
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip()}"


@contextmanager
def _holder(command: Sequence[str]) -> Iterator[int]:
    """A process that sleeps in new namespaces."""
    process = subprocess.Popen([*command, "sh", "-c", "echo ready; exec sleep infinity"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Each knows itself by a loopback address, as Debian's installer sets it up, and the other by that of the link.

    Skips where namespaces or links are refused.
    """
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"two hosts need namespaces, and {tool} is not installed (Debian: iproute2, util-linux)")
    own_user = False
    new = ["unshare", "--net", "--uts", "--mount"]
    link = ["ip", "link", "add", "name", INTERFACE, "type", "veth", "peer", "name"]
    refusal = _refusal([*new, *link, "other"])
    if refusal is not None:
        own_user = True
        refusal_of_user = _refusal([*new, "--user", "--map-root-user", *link, "other"])
        if refusal_of_user is not None:
            pytest.skip(f"two hosts need namespaces, refused here: {refusal}; and {refusal_of_user}")
    user = ["--user", "--map-root-user"] if own_user else []
    with _holder([*new, *user]) as first_pid:
        first = Host("host-a", first_pid, own_user, "10.77.0.1")
        inside = ["nsenter", f"--target={first_pid}", "--user", "--preserve-credentials", "--"] if own_user else []
        with _holder([*inside, *new]) as second_pid:
            hosts = first, Host("host-b", second_pid, own_user, "10.77.0.2")
            first.run(*link, INTERFACE, "netns", f"{second_pid}")
            for host, other in (hosts, hosts[::-1]):
                names = folder / f"hosts-of-{host.name}"
                names.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host.name}\n{other.address} {other.name}\n")
                host.run("hostname", host.name)
                host.run("mount", "--bind", f"{names}", "/etc/hosts")
                host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
                host.run("ip", "link", "set", "lo", "up")
                host.run("ip", "link", "set", INTERFACE, "up")
                host.environment["GLOO_SOCKET_IFNAME"] = INTERFACE  # by name, gloo would find the loopback
            yield hosts
