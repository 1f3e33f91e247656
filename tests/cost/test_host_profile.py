"""A machine with measured figures gives each rank the rates that were measured."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroir.cost.host_profile import with_measured_disk, with_measured_host
from zeroir.cost.machine import Machine, load_machine, machine_names, parse_machine, to_toml
from zeroir.cost.wires import Wire, host_rates
from zeroir.ir.host_rates import MeasuredDisk, MeasuredHost

RATES = st.floats(1e6, 1e12)
HOSTS = st.builds(
    MeasuredHost,
    to_device_bytes_per_s=RATES,
    to_host_bytes_per_s=RATES,
    both_bytes_per_s=RATES,
    copy_s=st.floats(0, 1),
    memory_bytes_per_s=RATES,
    update_bytes_per_s=RATES,
)
DISKS = st.builds(
    MeasuredDisk,
    read_bytes_per_s=RATES,
    write_bytes_per_s=RATES,
    both_bytes_per_s=RATES,
    request_s=st.floats(0, 1),
)


def measured(
    name: str, host: MeasuredHost, disk: MeasuredDisk, world_size: int, memory_bytes: int = 10**9
) -> Machine:
    base = load_machine(name)
    made = with_measured_host(base, host, world_size=world_size, memory_bytes=memory_bytes)
    return with_measured_disk(made, disk, world_size=world_size)


@given(name=st.sampled_from(machine_names()), host=HOSTS, disk=DISKS, world_size=st.integers(1, 20))
def test_each_rank_has_the_rates_that_it_measured(
    name: str, host: MeasuredHost, disk: MeasuredDisk, world_size: int
) -> None:
    rates = host_rates(measured(name, host, disk, world_size), world_size)
    expected = {
        Wire.TO_DEVICE: host.to_device_bytes_per_s,
        Wire.TO_HOST: host.to_host_bytes_per_s,
        Wire.CORES: host.update_bytes_per_s,
        Wire.DISK_READ: disk.read_bytes_per_s,
        Wire.DISK_WRITE: disk.write_bytes_per_s,
    }
    for wire, rate in expected.items():
        assert rates.bytes_per_s[wire] == pytest.approx(rate)
    one_way = max(host.to_device_bytes_per_s, host.to_host_bytes_per_s)
    assert rates.bytes_per_s[Wire.HOST_LINK] == pytest.approx(max(host.both_bytes_per_s, one_way))
    assert rates.latency_s[Wire.TO_DEVICE] == host.copy_s
    assert rates.latency_s[Wire.DISK_READ] == disk.request_s


@given(host=HOSTS, disk=DISKS)
def test_measured_figures_say_so_and_are_read_again(host: MeasuredHost, disk: MeasuredDisk) -> None:
    made = measured("dgx-h100", host, disk, 8, memory_bytes=123)
    assert parse_machine(to_toml(made), "again") == made
    assert made.host.memory.size_bytes.value == 123
    assert made.host.core_bytes_per_s.source == "measured: 8 ranks at once"
    assert made.host.cores == load_machine("dgx-h100").host.cores
