"""Machines for tests: network namespaces on this one, with host names of their own and a link between each two."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from tests.support.zygote import Forked, Zygote, compiling_zygote, other_compiling_zygote

HAS_NAMESPACES: Final = (
    sys.platform.startswith("linux")
    and os.geteuid() == 0
    and all(map(shutil.which, ("ip", "unshare", "mount")))
    and subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode
    == 0
)
"""Whether this process may make namespaces."""

_numbers = count()
_DEVICE: Final = "link0"
_NOWHERE: Final = "02:00:00:00:00:99"
"""An Ethernet address that no machine of a test has."""


_SOURCES: Final = (compiling_zygote, other_compiling_zygote)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One of two machines; ``hosts`` is its /etc/hosts, and its processes are forked from ``source``."""

    source: Callable[[], Zygote]
    namespace: str
    host: str
    address: str
    hosts: Path

    def start(
        self,
        folder: Path,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> Forked:
        """Run a module with these arguments on this machine, in a folder; its output goes to files there."""
        return Forked(
            self.source(),
            module,
            arguments,
            {"OMP_NUM_THREADS": "1", **(environment or {})},
            folder / self.namespace,
            folder=folder,
            machine=(self.namespace, self.host, str(self.hosts)),
        )

    def printed(self, folder: Path) -> str:
        """What it has printed to stdout."""
        return (folder / f"{self.namespace}.out").read_text()

    def said(self, folder: Path) -> str:
        """What it has printed to stderr."""
        return (folder / f"{self.namespace}.err").read_text()

    def processes(self) -> Sequence[int]:
        """The processes that run on this machine."""
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in listed.stdout.split()]


@contextmanager
def two_machines(
    folder: Path, names: tuple[str, str] = ("alpha", "beta")
) -> Iterator[list[Machine]]:
    """Two machines with a link between them; all that runs there is killed at the end."""
    hosts = folder / "hosts"
    addresses = ("10.77.0.1", "10.77.0.2")
    entries = [f"{at} {name}\n" for at, name in zip(addresses, names, strict=True)]
    hosts.write_text("127.0.0.1 localhost\n" + "".join(entries))
    machines = [
        Machine(
            source=source,
            namespace=f"zeroir{os.getpid()}x{next(_numbers)}",
            host=name,
            address=at,
            hosts=hosts,
        )
        for source, at, name in zip(_SOURCES, addresses, names, strict=True)
    ]
    first, second = (machine.namespace for machine in machines)
    try:
        for machine in machines:
            _ip("netns", "add", machine.namespace)
            _ip("-n", machine.namespace, "link", "set", "lo", "up")
        pair = ("type", "veth", "peer", "name", _DEVICE, "netns", second)
        _ip("link", "add", _DEVICE, "netns", first, *pair)
        for machine in machines:
            of = ("-n", machine.namespace)
            _ip(*of, "addr", "add", f"{machine.address}/24", "dev", _DEVICE)
            _ip(*of, "link", "set", _DEVICE, "up")
        yield machines
    finally:
        for machine in machines:
            if Path("/run/netns", machine.namespace).exists():
                for pid in machine.processes():
                    os.kill(pid, 9)
                _ip("netns", "del", machine.namespace)


def take_link_down(machines: Sequence[Machine]) -> None:
    """Both ends learn that the link is down."""
    _ip("-n", machines[0].namespace, "link", "set", _DEVICE, "down")


def lose_all_packets(machines: Sequence[Machine]) -> None:
    """The link seems up, but what is sent over it goes to a machine that does not exist."""
    for machine, other in zip(machines, reversed(machines), strict=True):
        neighbour = (other.address, "lladdr", _NOWHERE, "nud", "permanent", "dev", _DEVICE)
        _ip("-n", machine.namespace, "neigh", "replace", *neighbour)


def ended(processes: Sequence[Forked], timeout_s: float) -> list[int | None]:
    """The exit codes of processes; None of those that are late."""
    deadline = time.monotonic() + timeout_s
    return [process.wait(deadline) for process in processes]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True)
