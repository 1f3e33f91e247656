"""A machine with measured figures of its host: the rates of one rank, measured on all ranks of a node at once.

The rates of a rank become figures of a node, of which each rank has an equal part (``wires.host_rates``).
"""

from __future__ import annotations

from zeroir.cost.machine import Figure, Machine
from zeroir.ir.host_rates import MeasuredDisk, MeasuredHost


def with_measured_host(
    base: Machine, rates: MeasuredHost, *, world_size: int, memory_bytes: int
) -> Machine:
    """Return the machine ``base`` with measured figures of its host link, and of its host's memory and cores.

    ``memory_bytes`` is the size of the host's memory. The number of cores is that of ``base``.
    """
    ranks, figure = base.sharing_ranks(world_size), _MeasuredFigure(world_size)
    on_link = min(int(base.host_link.accelerators.value), ranks)
    one_way = max(rates.to_device_bytes_per_s, rates.to_host_bytes_per_s)
    link = base.host_link.model_copy(
        update={
            "to_device_bytes_per_s": figure(on_link * rates.to_device_bytes_per_s),
            "to_host_bytes_per_s": figure(on_link * rates.to_host_bytes_per_s),
            # Noise must not make both directions slower than one.
            "both_bytes_per_s": figure(on_link * max(rates.both_bytes_per_s, one_way)),
            "latency_s": figure(rates.copy_s),
        }
    )
    fastest = max(rates.memory_bytes_per_s, rates.update_bytes_per_s)
    memory = base.host.memory.model_copy(
        update={
            "size_bytes": figure(float(memory_bytes)),
            "bytes_per_s": figure(ranks * fastest),
            "fraction": figure(1.0),
        }
    )
    core_bytes_per_s = rates.update_bytes_per_s * ranks / base.host.cores.value
    host = base.host.model_copy(
        update={"memory": memory, "core_bytes_per_s": figure(core_bytes_per_s)}
    )
    return base.model_copy(update={"host_link": link, "host": host})


def with_measured_disk(base: Machine, rates: MeasuredDisk, *, world_size: int) -> Machine:
    """Return the machine ``base`` with measured figures of its disk; the disk's size is kept."""
    ranks, figure = base.sharing_ranks(world_size), _MeasuredFigure(world_size)
    one_way = max(rates.read_bytes_per_s, rates.write_bytes_per_s)
    disk = base.disk.model_copy(
        update={
            "read_bytes_per_s": figure(ranks * rates.read_bytes_per_s),
            "write_bytes_per_s": figure(ranks * rates.write_bytes_per_s),
            "both_bytes_per_s": figure(ranks * max(rates.both_bytes_per_s, one_way)),
            "latency_s": figure(rates.request_s),
        }
    )
    return base.model_copy(update={"disk": disk})


class _MeasuredFigure:
    """Creates figures measured by a given number of ranks."""

    def __init__(self, world_size: int) -> None:
        self._source = f"measured: {world_size} rank{'s' if world_size > 1 else ''} at once"

    def __call__(self, value: float) -> Figure:
        return Figure(value=value, source=self._source)
