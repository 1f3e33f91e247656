"""Machines made up for tests."""

from __future__ import annotations

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
    **more: object,
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
                "bytes_per_s": figure(inf),
                "fraction": whole,
                "latency_s": figure(0.0),
            },
            "host": {
                "bytes_per_s": figure(inf),
                "issue_s": figure(issue_s),
                "computes": computes,
            },
            "disk": {
                "read_bytes_per_s": figure(inf),
                "write_bytes_per_s": figure(inf),
                "latency_s": figure(0.0),
            },
            **more,
        }
    )
