"""What flows to and from the host: its time alone, and beside what flows at the same time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.support import figure, host_machine
from tests.passes.test_gates import gate, gate_logical
from tests.support.examples import examples
from zeroir.cost.collectives import ring_of, transfer
from zeroir.cost.durations import Durations
from zeroir.cost.machine import Machine, load_machine, machine_names
from zeroir.cost.simulate import ClassResult, simulate
from zeroir.cost.wires import Wire, host_rates
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import COMPUTE, COPY_IN, COPY_OUT, IO, OPTIMIZER, Axis, Mesh
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, Program, Section
from zeroir.memory.footprint import footprint

SIZE_BYTES = 1000
REGION = Region(buffer="x", offset=0, numel=SIZE_BYTES // 4)
GATES = ("offload", "paged")


def program_of(*body: Op, ranks: int = 1) -> Program:
    buffer = Buffer(
        name="x", dtype=DType.F32, numel=REGION.numel, space=Space.HOST, role=Role.STAGING
    )
    return Program(
        mesh=Mesh(axes=(Axis(name="dp", size=ranks),)),
        buffers=(buffer,),
        sections=(Section(name=LAST_MICRO_STEP, body=body),),
    )


def copy(kind: type[ops.TransferOp], stream: str) -> ops.TransferOp:
    return kind(source=REGION, destination=REGION, stream=stream)


def seconds(*body: Op, on: Machine, ranks: int = 1) -> float:
    """The seconds of a step of these ops, without waits between them."""
    return simulate(program_of(*body, ranks=ranks), on).step_s


def fill(stream: str) -> Op:
    return ops.Fill(destination=REGION, value=0.0, stream=stream)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ops.ToDevice, 1.0 + SIZE_BYTES / 1e3),
        (ops.ToHost, 1.0 + SIZE_BYTES / 500),
        (ops.Load, 2.0 + SIZE_BYTES / 250),
        (ops.Store, 2.0 + SIZE_BYTES / 100),
    ],
)
def test_a_transfer_takes_its_own_direction(kind: type[ops.TransferOp], expected: float) -> None:
    on = host_machine(
        {"to_device": 1e3, "to_host": 500, "link_s": 1.0, "read": 250, "write": 100, "disk_s": 2.0}
    )
    op = copy(kind, COPY_IN)
    assert Durations(program_of(op), on).seconds(op) == pytest.approx(expected)
    assert seconds(op, on=on) == pytest.approx(expected)


def test_the_slowest_of_link_and_memory_decides() -> None:
    op = copy(ops.ToDevice, COPY_IN)
    assert seconds(op, on=host_machine({"to_device": 1e3, "memory": 500})) == pytest.approx(2.0)
    assert seconds(op, on=host_machine({"to_device": 1e3, "both": 250})) == pytest.approx(4.0)


def test_both_directions_at_once_share_what_bounds_them() -> None:
    both = (copy(ops.ToDevice, COPY_IN), copy(ops.ToHost, COPY_OUT))
    assert seconds(*both, on=host_machine({"to_device": 1e3, "to_host": 1e3})) == pytest.approx(1.0)
    on = host_machine({"to_device": 1e3, "to_host": 1e3, "both": 1500})
    assert seconds(*both, on=on) == pytest.approx(2 * SIZE_BYTES / 1500, rel=1e-6)
    # The same direction twice, on two streams, is no faster than one after the other.
    twice = (copy(ops.ToDevice, COPY_IN), copy(ops.ToDevice, COPY_OUT))
    assert seconds(*twice, on=host_machine({"to_device": 1e3})) == pytest.approx(2.0)


def test_an_update_on_the_host_and_copies_share_its_memory() -> None:
    on = host_machine({"to_device": 1e3, "memory": 1500, "core": 1e3})
    # A fill writes 1,000 bytes: at the rate of one core.
    assert seconds(fill(OPTIMIZER), on=on) == pytest.approx(1.0)
    together = seconds(fill(OPTIMIZER), copy(ops.ToDevice, COPY_IN), on=on)
    assert together == pytest.approx(2 * SIZE_BYTES / 1500, rel=1e-6)
    four = host_machine({"memory": 1e9, "core": 1e3}, cores=4)
    assert seconds(fill(OPTIMIZER), on=four) == pytest.approx(0.25)


def test_work_in_a_cache_takes_the_cores_and_not_the_memory() -> None:
    rates = host_rates(host_machine({"memory": 1e3, "core": 2e3}), 1)
    plain, cached = rates.work(1000, 0, 0), rates.work(1000, 3000, 0)
    assert (plain.seconds, cached.seconds) == (1.0, 2.0)
    assert cached.demand_by_wire == {Wire.HOST_MEMORY: 0.5, Wire.CORES: 1.0}


def test_ranks_of_a_node_share_its_host_and_its_disk() -> None:
    on = host_machine(
        {"to_device": 1e3, "memory": 8e3, "read": 8e3, "core": 1e3},
        ranks=8,
        accelerators=2,
        cores=8,
    )
    for ranks, link_s, disk_s, update_s in ((1, 1.0, 0.125, 0.125), (2, 2.0, 0.25, 0.25)):
        assert seconds(copy(ops.ToDevice, COPY_IN), on=on, ranks=ranks) == pytest.approx(link_s)
        assert seconds(copy(ops.Load, IO), on=on, ranks=ranks) == pytest.approx(disk_s)
        assert seconds(fill(OPTIMIZER), on=on, ranks=ranks) == pytest.approx(update_s)
    # A second node has a host of its own.
    for ranks in (8, 16, 64):
        assert seconds(copy(ops.ToDevice, COPY_IN), on=on, ranks=ranks) == pytest.approx(2.0)
        assert seconds(copy(ops.Load, IO), on=on, ranks=ranks) == pytest.approx(1.0)


def test_an_accelerator_that_is_a_share_of_the_host_has_no_more_when_it_is_alone() -> None:
    on = host_machine({"memory": 4e3, "core": 1e3}, ranks=4, cores=4, computes=True)
    for ranks in (1, 4):
        assert seconds(fill(OPTIMIZER), on=on, ranks=ranks) == pytest.approx(1.0)


def test_collectives_through_the_host_share_its_link() -> None:
    on = host_machine(
        {"to_device": 2e3, "to_host": 2e3},
        ranks=2,
        node_link={
            "name": "through the host",
            "bytes_per_s": figure(1e3),
            "fraction": figure(1.0),
            "latency_s": figure(0.0),
            "through_host": True,
        },
    )
    cost = transfer(on, "all_gather", ring_of((0, 1), 2), 2000)
    assert cost.seconds == pytest.approx(1.0)
    assert cost.demand_by_wire[Wire.TO_DEVICE] == pytest.approx(0.5)
    assert cost.demand_by_wire[Wire.NODE_LINK] == 1.0
    assert set(cost.bytes_by_wire) == {Wire.NODE_LINK}


def test_measured_times_replace_computed_ones_and_share_nothing() -> None:
    """They were measured beside what else flows in a step."""
    measured = [
        {
            "name": name,
            "stream": stream,
            "alpha_s": 0.5,
            "beta_s_per_byte": 1e-3,
            "source": "made up",
        }
        for name, stream in (("to_device", COPY_IN), ("fill", OPTIMIZER))
    ]
    on = host_machine({"to_device": 1e6, "memory": 1e6}, ops=measured)
    # A transfer reads and writes its bytes.
    assert seconds(copy(ops.ToDevice, COPY_IN), on=on) == pytest.approx(0.5 + 2.0)
    assert seconds(fill(OPTIMIZER), on=on) == pytest.approx(0.5 + 1.0)
    together = seconds(copy(ops.ToDevice, COPY_IN), fill(OPTIMIZER), on=on)
    assert together == pytest.approx(0.5 + 2.0, rel=1e-6)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("machine_name", [n for n in machine_names() if not n.startswith("1x")])
def test_schedules_with_transfers_are_simulated(name: str, machine_name: str) -> None:
    program = gate(name)
    simulation = simulate(program, load_machine(machine_name))
    (result,) = simulation.classes
    moved = {Wire.TO_HOST: 0, Wire.TO_DEVICE: 0}
    for op in program.step_ops():
        match op:
            case ops.ToHost():
                moved[Wire.TO_HOST] += bytes_of(program, op)
            case ops.ToDevice():
                moved[Wire.TO_DEVICE] += bytes_of(program, op)
            case _:
                pass
    assert all(moved.values())
    assert {wire: result.bytes_by_wire[wire] for wire in moved} == moved
    assert sum(item.duration_ns for item in simulation.critical_path) == simulation.step_ns
    assert 0 < result.exposed_transfers_s <= simulation.step_s - result.busy_s[COMPUTE] + 1e-12
    assert simulate(gate_logical(name), load_machine(machine_name)).exposed_transfers_s == 0.0


def bytes_of(program: Program, op: ops.TransferOp) -> int:
    item = program.buffer_by_name[op.source.buffer].dtype.itemsize_bytes
    return op.source.local_numel(program.mesh) * item


RATES = st.fixed_dictionaries(
    {
        name: st.sampled_from([1e3, 1e4, 1e6])
        for name in ("to_device", "to_host", "both", "memory", "core", "read", "write", "disk")
    }
)


@examples(30)
@given(name=st.sampled_from(GATES), rates=RATES)
def test_no_link_carries_more_than_its_rate(name: str, rates: dict[str, float]) -> None:
    """And where nothing else takes time, a host that does everything twice as fast takes half the time."""
    program = gate(name)
    on = host_machine(rates, ranks=4, accelerators=2)
    (result,) = simulate(program, on).classes
    step_s = end_s(result)
    limits = host_rates(on, program.mesh.world_size).bytes_per_s
    for wire in (Wire.TO_DEVICE, Wire.TO_HOST, Wire.DISK_READ, Wire.DISK_WRITE):
        sent = result.bytes_by_wire.get(wire, 0.0)
        assert sent / limits[wire] <= step_s + 1e-6
    twice = host_machine({key: 2 * rate for key, rate in rates.items()}, ranks=4, accelerators=2)
    assert end_s(simulate(program, twice).classes[0]) == pytest.approx(step_s / 2, rel=1e-3)


def end_s(result: ClassResult) -> float:
    return max(span.end_ns for span in result.spans) / 1e9


@examples(30)
@given(
    rates=RATES, ranks=st.lists(st.integers(1, 64), min_size=2, max_size=2), computes=st.booleans()
)
def test_more_ranks_never_have_more_of_a_node(
    rates: dict[str, float], ranks: list[int], computes: bool
) -> None:
    on = host_machine(rates, ranks=8, accelerators=4, cores=8, computes=computes)
    few, many = (host_rates(on, count).bytes_per_s for count in sorted(ranks))
    assert all(many[wire] <= few[wire] for wire in few)
    if computes:
        assert few == many


@examples(30)
@given(
    name=st.sampled_from(GATES),
    latencies=st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 1.0]), min_size=2, max_size=2),
)
def test_a_longer_latency_never_makes_a_step_shorter(name: str, latencies: list[float]) -> None:
    """Where nothing shares a wire; where flows do, a later one may let an urgent one pass."""
    program = gate(name)
    shorter, longer = sorted(latencies)
    for kind in ("link_s", "disk_s"):
        less, more = (
            end_s(simulate(program, host_machine({kind: value}, ranks=4)).classes[0])
            for value in (shorter, longer)
        )
        assert less <= more


def test_a_copy_that_waits_for_the_host_does_not_stop_the_issuing_thread() -> None:
    """A thread of its own issues it. A device that computes with what it brings does: CUDA cannot wait for a thread."""
    update = ops.Fill(destination=REGION, value=0.0, stream=OPTIMIZER, event="updated")
    arrival = copy(ops.ToDevice, COPY_IN)
    assert isinstance(arrival, ops.ToDevice)
    body = (
        update,
        ops.Wait(waited="updated", on=COPY_IN),
        replace(arrival, event="arrived"),
        copy(ops.ToHost, COPY_OUT),
    )
    waiting = (*body[:3], ops.Wait(waited="arrived", on=COMPUTE), body[3])
    rates = {"core": 1e3, "to_device": 1e3, "to_host": 1e3}
    for ops_of_body, expected in ((body, 0.0), (waiting, 1.0)):
        spans = simulate(program_of(*ops_of_body), host_machine(rates)).classes[0].spans
        starts = [span.start_ns / 1e9 for span in spans]
        assert starts[2] == pytest.approx(1.0)
        assert starts[-1] == pytest.approx(expected)


def test_the_host_is_counted_apart_from_the_device() -> None:
    program = gate("offload")
    sizes = {space: footprint(program, space=space).total_bytes for space in Space}
    by_space = {
        space: sum(b.size_bytes for b in program.buffers if b.space is space and b.is_persistent)
        for space in Space
    }
    assert all(sizes[space] >= by_space[space] for space in Space)
    assert sizes[Space.HOST] > 0 == sizes[Space.DISK]


def test_the_rates_of_the_described_machines_are_in_order() -> None:
    """Both directions at once are no slower than one of them, and no faster than both."""
    for name in machine_names():
        described = load_machine(name)
        link, disk = described.host_link, described.disk
        for one, other, both in (
            (link.to_device_bytes_per_s, link.to_host_bytes_per_s, link.both_bytes_per_s),
            (disk.read_bytes_per_s, disk.write_bytes_per_s, disk.both_bytes_per_s),
        ):
            assert max(one.value, other.value) <= both.value <= one.value + other.value
        cores = described.host.cores.value
        assert cores * described.host.core_bytes_per_s.value > link.to_device_bytes_per_s.value
