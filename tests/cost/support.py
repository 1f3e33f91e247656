"""Machines made up for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from zeroir.cost.machine import Machine


def figure(value: float) -> dict[str, object]:
    return {"value": value, "source": "made up"}


def machine(
    *,
    node_ranks: int = 8,
    flops_per_s: float = 1e6,
    memory_bytes_per_s: float = inf,
    launch_s: float = 0.0,
    node_bytes_per_s: float = inf,
    node_latency_s: float = 0.0,
    network_bytes_per_s: float = inf,
    network_latency_s: float = 0.0,
    issue_s: float = 0.0,
    computes: bool = False,
    more: Mapping[str, object] | None = None,
    **tables: object,
) -> Machine:
    """A machine that takes no time but for arithmetic, unless told."""
    whole = figure(1.0)
    return Machine.model_validate(
        {
            "name": "made-up",
            "accelerator": "none",
            "accelerators_per_node": figure(node_ranks),
            "compute": {
                "fraction": whole,
                "kernel_launch_s": figure(launch_s),
                "dense_flops_per_s": {"f32": figure(flops_per_s)},
            },
            "memory": {
                "size_bytes": figure(1e9),
                "bytes_per_s": figure(memory_bytes_per_s),
                "fraction": whole,
            },
            "node_link": {
                "name": "inside",
                "bytes_per_s": figure(node_bytes_per_s),
                "fraction": whole,
                "latency_s": figure(node_latency_s),
            },
            "network": {
                "name": "between",
                "bytes_per_s": figure(network_bytes_per_s),
                "fraction": whole,
                "latency_s": figure(network_latency_s),
            },
            "host_link": {
                "name": "up",
                "accelerators": figure(1),
                "to_device_bytes_per_s": figure(inf),
                "to_host_bytes_per_s": figure(inf),
                "both_bytes_per_s": figure(inf),
                "latency_s": figure(0.0),
            },
            "host": {
                "memory": {
                    "size_bytes": figure(1e9),
                    "bytes_per_s": figure(inf),
                    "fraction": whole,
                },
                "cores": figure(1),
                "core_bytes_per_s": figure(inf),
                "core_flops_per_s": figure(inf),
                "issue_s": figure(issue_s),
                "computes": computes,
            },
            "disk": {
                "size_bytes": figure(1e9),
                "read_bytes_per_s": figure(inf),
                "write_bytes_per_s": figure(inf),
                "both_bytes_per_s": figure(inf),
                "latency_s": figure(0.0),
            },
            **(more or {}),
            **tables,
        }
    )


def host_machine(
    rates: Mapping[str, float],
    *,
    ranks: int = 1,
    accelerators: int = 1,
    cores: int = 1,
    computes: bool = False,
    node_link: Mapping[str, object] | None = None,
    ops: Sequence[Mapping[str, object]] = (),
) -> Machine:
    """A machine of which only the host, its links and its disk take time.

    ``rates`` are in bytes per second of a node: ``to_device``, ``to_host``, ``both``, ``memory``, ``core``, ``read``,
    ``write`` and ``disk``, and ``link_s`` and ``disk_s`` are latencies. What is absent takes no time.
    """
    free = {"link_s": 0.0, "disk_s": 0.0}
    names = ("to_device", "to_host", "both", "memory", "core", "read", "write", "disk")
    given = {**free, **dict.fromkeys(names, inf), **rates}
    host_link = {
        "name": "up",
        "accelerators": figure(accelerators),
        "to_device_bytes_per_s": figure(given["to_device"]),
        "to_host_bytes_per_s": figure(given["to_host"]),
        "both_bytes_per_s": figure(given["both"]),
        "latency_s": figure(given["link_s"]),
    }
    host = {
        "memory": {
            "size_bytes": figure(1e9),
            "bytes_per_s": figure(given["memory"]),
            "fraction": figure(1.0),
        },
        "cores": figure(cores),
        "core_bytes_per_s": figure(given["core"]),
        "core_flops_per_s": figure(inf),
        "issue_s": figure(0.0),
        "computes": computes,
    }
    disk = {
        "size_bytes": figure(1e9),
        "read_bytes_per_s": figure(given["read"]),
        "write_bytes_per_s": figure(given["write"]),
        "both_bytes_per_s": figure(given["disk"]),
        "latency_s": figure(given["disk_s"]),
    }
    link = {} if node_link is None else {"node_link": node_link}
    return machine(
        node_ranks=ranks,
        flops_per_s=1e15,
        more={"host_link": host_link, "host": host, "disk": disk, "ops": ops, **link},
    )
