"""The wires of transferred bytes, and the cost of flows over them: collectives, transfers, and updates on the host.

A flow starts after its latency. Alone on its wires it takes ``transfer_s`` seconds, in which it needs a fraction of
each wire's bandwidth; the simulation slows flows down where these fractions exceed a wire. A wire is that of one rank:
each rank has an equal part of what the ranks of a node share, because all of them run the same ops at about the same
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from zeroir.cost.machine import Machine
from zeroir.ir import ops


class Wire(StrEnum):
    """A link, or a common limit of several links.

    ``host_link`` and ``disk`` bound both directions of a link and of a disk together, ``host_memory`` all reads and
    writes of the host's memory, and ``cores`` the work of the host's cores.
    """

    NODE_LINK = "node_link"
    NETWORK = "network"
    TO_DEVICE = "to_device"
    TO_HOST = "to_host"
    HOST_LINK = "host_link"
    HOST_MEMORY = "host_memory"
    DISK_READ = "disk_read"
    DISK_WRITE = "disk_write"
    DISK = "disk"
    CORES = "cores"


HostTransferOp = ops.ToHost | ops.ToDevice | ops.Load | ops.Store
"""The transfers that cross a link of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowCost:
    """The cost of one flow for a rank.

    ``seconds`` = ``latency_s`` + ``transfer_s`` when nothing else uses the wires. ``bytes_by_wire`` are the bytes that
    a rank sends over links, and ``demand_by_wire`` is the fraction of each wire's bandwidth that they need during
    ``transfer_s``, at most 1.
    """

    latency_s: float
    transfer_s: float
    bytes_by_wire: Mapping[Wire, float]
    demand_by_wire: Mapping[Wire, float]
    is_measured: bool = False

    @property
    def seconds(self) -> float:
        """Seconds from the arrival of the last rank."""
        return self.latency_s + self.transfer_s


def flow(
    latency_s: float,
    busy_s: Mapping[Wire, float],
    bytes_by_wire: Mapping[Wire, float],
    *,
    measured: tuple[float, float] | None = None,
) -> FlowCost:
    """Return the cost of a flow that would occupy each wire for ``busy_s`` seconds.

    ``measured`` are the seconds of its latency and of its transfer, which replace the computed ones. It was measured
    together with the other flows of a step, so nothing slows it down again.
    """
    slowest_s = max(busy_s.values(), default=0.0)
    demand = {wire: time / slowest_s for wire, time in busy_s.items() if slowest_s}
    if measured is not None:
        latency_s, slowest_s, demand = *measured, {}
    return FlowCost(
        latency_s=latency_s,
        transfer_s=slowest_s,
        bytes_by_wire=bytes_by_wire,
        demand_by_wire=demand,
        is_measured=measured is not None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRates:
    """A rank's part of its node: bytes per second by wire, and floating-point operations per second on the host."""

    bytes_per_s: Mapping[Wire, float]
    latency_s: Mapping[Wire, float]
    flops_per_s: float

    def transfer(
        self, op: HostTransferOp, size_bytes: int, measured: tuple[float, float] | None = None
    ) -> FlowCost:
        """Return the cost of a transfer: it occupies its link, the limit of both directions, and the host's memory."""
        link, both = _links(op)
        wires = (link, both, Wire.HOST_MEMORY)
        busy_s = {wire: size_bytes / self.bytes_per_s[wire] for wire in wires}
        return flow(self.latency_s[link], busy_s, {link: size_bytes}, measured=measured)

    def work(
        self,
        traffic_bytes: int,
        cached_bytes: int,
        flops: int,
        measured: tuple[float, float] | None = None,
    ) -> FlowCost:
        """Return the cost of work on the host: bytes read and written in memory, and in caches, and products."""
        core_bytes = traffic_bytes + cached_bytes
        busy_s = {
            Wire.HOST_MEMORY: traffic_bytes / self.bytes_per_s[Wire.HOST_MEMORY],
            Wire.CORES: core_bytes / self.bytes_per_s[Wire.CORES] + flops / self.flops_per_s,
        }
        return flow(0.0, busy_s, {}, measured=measured)


def _links(op: HostTransferOp) -> tuple[Wire, Wire]:
    """Return the link of a transfer, and the common limit of both its directions."""
    match op:
        case ops.ToDevice():
            return Wire.TO_DEVICE, Wire.HOST_LINK
        case ops.ToHost():
            return Wire.TO_HOST, Wire.HOST_LINK
        case ops.Load():
            return Wire.DISK_READ, Wire.DISK
        case ops.Store():
            return Wire.DISK_WRITE, Wire.DISK
        case _:
            assert_never(op)


def host_rates(machine: Machine, world_size: int) -> HostRates:
    """Return each rank's part of a node, on a full node where there is one."""
    ranks = machine.sharing_ranks(world_size)
    host, link, disk = machine.host, machine.host_link, machine.disk
    on_link = min(int(link.accelerators.value), ranks)
    cores = host.cores.value / ranks
    return HostRates(
        bytes_per_s={
            Wire.TO_DEVICE: link.to_device_bytes_per_s.value / on_link,
            Wire.TO_HOST: link.to_host_bytes_per_s.value / on_link,
            Wire.HOST_LINK: link.both_bytes_per_s.value / on_link,
            Wire.HOST_MEMORY: host.memory.achieved_bytes_per_s / ranks,
            Wire.DISK_READ: disk.read_bytes_per_s.value / ranks,
            Wire.DISK_WRITE: disk.write_bytes_per_s.value / ranks,
            Wire.DISK: disk.both_bytes_per_s.value / ranks,
            Wire.CORES: cores * host.core_bytes_per_s.value,
        },
        latency_s={
            Wire.TO_DEVICE: link.latency_s.value,
            Wire.TO_HOST: link.latency_s.value,
            Wire.DISK_READ: disk.latency_s.value,
            Wire.DISK_WRITE: disk.latency_s.value,
        },
        flops_per_s=cores * host.core_flops_per_s.value,
    )
