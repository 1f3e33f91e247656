"""The address and the network interface by which this machine reaches another one."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from typing import Final

_SIOCGIFADDR: Final = 0x8915
"""From <linux/sockios.h>: the IPv4 address of an interface."""

_REQUEST: Final = struct.Struct("16s24x")
"""``struct ifreq``: the name, and room for the answer, whose address is at byte 20."""


def own_address_towards(host: str, port: int, family: int = socket.AF_UNSPEC) -> str:
    """Return the address of this machine from which packets go to a host.

    Raises:
        OSError: where the host is unknown, or no network leads to it.
    """
    (found, _, _, _, address), *_ = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)
    with socket.socket(found, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends no packet
        own: str = probe.getsockname()[0]
    return own


def interface_towards(host: str, port: int) -> str | None:
    """Return the interface for packets to a host; None where that is loopback or unknown, as with IPv6."""
    try:
        own = own_address_towards(host, port, socket.AF_INET)
        if ipaddress.ip_address(own).is_loopback:
            return None
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            return next(
                (name for _, name in socket.if_nameindex() if _address_of(name, probe) == own), None
            )
    except OSError:
        return None


def _address_of(interface: str, probe: socket.socket) -> str | None:
    try:
        from fcntl import ioctl
    except ImportError:  # the call does not exist on this system
        return None
    with contextlib.suppress(OSError):  # the interface has no address
        answer = ioctl(probe.fileno(), _SIOCGIFADDR, _REQUEST.pack(interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None
