"""The namespaces in which a process of a test is on a machine of its own: a network, a host name and an /etc/hosts."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from pathlib import Path
from typing import Final

# Of <sched.h>; ``os`` has them, and the calls, from Python 3.12 on.
_NETWORK: Final = 0x40000000
_MOUNTS: Final = 0x00020000
_HOST_NAME: Final = 0x04000000


def enter(network: str, host: str, hosts: str) -> None:
    """Move this process, which has one thread, to the network of that name, with this host name and /etc/hosts."""
    calls = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", network).open() as file:
        _require(calls.setns(file.fileno(), _NETWORK))
    _require(calls.unshare(_MOUNTS | _HOST_NAME))
    for mount in (["--make-rprivate", "/"], ["--bind", hosts, "/etc/hosts"]):
        subprocess.run(["mount", *mount], check=True)
    socket.sethostname(host)


def _require(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
