"""Laws of simulated steps, over the programs of every stage."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cost.support import machine
from tests.passes.strategies import Case, cases
from tests.runtime.timelines import require_program_order
from tests.support.evaluations import with_evaluation
from tests.support.examples import examples
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.cost.machine import Machine, load_machine
from zeroir.cost.simulate import Simulation, simulate, simulate_evaluation
from zeroir.cost.wires import Wire
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.mesh import COMPUTE, HOST
from zeroir.ir.program import LAST_MICRO_STEP, MICRO_STEP, UPDATE, Program

RATES = st.sampled_from([1e4, 1e6, float("inf")])
LATENCIES = st.sampled_from([0.0, 1e-6, 1e-3])
MACHINES = st.builds(
    machine,
    node_ranks=st.integers(1, 4),
    flops_per_s=st.sampled_from([1e6, 1e8]),
    memory_bytes_per_s=RATES,
    launch_s=LATENCIES,
    node_bytes_per_s=RATES,
    node_latency_s=LATENCIES,
    network_bytes_per_s=RATES,
    network_latency_s=LATENCIES,
    issue_s=LATENCIES,
    computes=st.booleans(),
)


def sections_of(program: Program, micro_steps: int) -> list[str]:
    names = [*[MICRO_STEP] * (micro_steps - 1), LAST_MICRO_STEP, UPDATE]
    return [name for name in names if name in program.section_by_name]


def hybrid(world_size: int = 8, **options: object) -> Program:
    return applied(mlp(blocks=3, dim=16, **options), for_stage(3, world_size, replicas=2))


@examples(15)
@given(case=cases(), on=MACHINES, straggler=st.sampled_from([None, 1.0, 2.5]))
def test_a_step_is_as_long_as_its_critical_path(
    case: Case, on: Machine, straggler: float | None
) -> None:
    simulation = simulate(case.scheduled(), on, straggler=straggler)
    assert sum(item.duration_ns for item in simulation.critical_path) == simulation.step_ns
    for rank_class in simulation.classes:
        assert all(busy <= simulation.step_s * (1 + 1e-12) for busy in rank_class.busy_s.values())
        assert 0 <= rank_class.exposed_s <= simulation.step_s - rank_class.busy_s[COMPUTE] + 1e-12
        for wire, sent in rank_class.bytes_by_wire.items():
            rate = {
                Wire.NODE_LINK.value: on.node_link.achieved_bytes_per_s,
                Wire.NETWORK.value: on.network.achieved_bytes_per_s if on.network else 0.0,
            }[wire]
            # Times are whole nanoseconds.
            assert sent / rate <= simulation.step_s + 1e-9 * len(rank_class.spans)


@examples(10)
@given(case=cases(), on=MACHINES, straggler=st.sampled_from([None, 2.5]))
def test_streams_keep_the_programs_order_and_waits_are_respected(
    case: Case, on: Machine, straggler: float | None
) -> None:
    program = replace(case, micro_steps=1).scheduled()
    for rank_class in simulate(program, on, straggler=straggler).classes:
        require_program_order(program, sections_of(program, 1), rank_class.spans)


@examples(10)
@given(case=cases(), on=MACHINES)
def test_a_span_begins_after_all_that_it_depends_on(case: Case, on: Machine) -> None:
    """By the text of the rules: stream, event, communicator, boundary; over several micro-steps."""
    program = case.scheduled()
    count = int(program.options.texts["micro_steps"])
    simulation = simulate(program, on)
    (rank_class,) = simulation.classes
    spans = iter(rank_class.spans)
    stream_end: dict[str, int] = defaultdict(int)
    comm_end: dict[str, int] = defaultdict(int)
    host_end = boundary_end = 0
    for name in sections_of(program, count):
        section = program.section_by_name[name]
        assert not section.exit.pending
        event_end: dict[str, int] = {}
        latest = boundary_end
        for index, op in enumerate(section.body):
            span = next(spans)
            assert (span.section, span.index) == (name, index)
            effect = effects(op)
            before = max(stream_end[effect.stream], comm_end[effect.comm or ""], boundary_end)
            if isinstance(op, ops.Wait):
                assert span.end_ns >= max(event_end.get(op.waited, 0), before, host_end)
            else:
                assert span.start_ns >= max(before, host_end)
            if effect.stream == HOST:
                host_end = span.end_ns
            stream_end[effect.stream] = span.end_ns
            if effect.comm is not None:
                comm_end[effect.comm] = span.end_ns
            event_end.update(dict.fromkeys(effect.signals, span.end_ns))
            latest = max(latest, span.end_ns)
        boundary_end = latest
    assert next(spans, None) is None
    assert simulation.step_ns == boundary_end


@examples(10)
@given(case=cases())
def test_where_all_but_arithmetic_is_free_a_step_takes_its_arithmetic(case: Case) -> None:
    program = case.scheduled()
    simulation = simulate(program, machine(flops_per_s=1e6))
    runs = {
        name: sections_of(program, simulation.micro_steps).count(name)
        for name in program.section_by_name
    }
    flops = sum(
        program.segment_by_name[op.segment].flops * runs[section.name]
        for section in program.sections
        for op in section.body
        if isinstance(op, ops.Compute)
    )
    assert simulation.flops == flops
    assert simulation.step_ns == flops * 1000
    assert simulation.mfu == simulation.hfu == pytest.approx(1.0)
    assert simulation.exposed_s == 0.0


@examples(10)
@given(
    case=cases(world_sizes=(2, 4)),
    node_ranks=st.integers(1, 4),
    memory=RATES,
    latencies=st.tuples(LATENCIES, LATENCIES, LATENCIES, LATENCIES),
    slower=st.tuples(st.floats(1, 4), st.floats(1, 4)),
)
def test_a_slower_straggler_never_helps(
    case: Case,
    node_ranks: int,
    memory: float,
    latencies: tuple[float, float, float, float],
    slower: tuple[float, float],
) -> None:
    """Where wires have latency alone. Where collectives share a wire, a later one may let an urgent one pass."""
    launch_s, node_s, network_s, issue_s = latencies
    on = machine(
        node_ranks=node_ranks,
        memory_bytes_per_s=memory,
        launch_s=launch_s,
        node_latency_s=node_s,
        network_latency_s=network_s,
        issue_s=issue_s,
    )
    program = case.scheduled()
    plain = simulate(program, on).step_ns
    less, more = (simulate(program, on, straggler=factor).step_ns for factor in sorted(slower))
    assert plain <= less <= more
    assert simulate(program, on, straggler=1.0).step_ns == plain


def test_everybody_waits_for_a_straggler() -> None:
    program = hybrid()
    on = machine(node_ranks=4, node_latency_s=1e-6, network_latency_s=1e-6)
    plain, slow = simulate(program, on), simulate(program, on, straggler=2.0)
    assert [len(rank_class.ranks) for rank_class in plain.classes] == [8]
    assert [len(rank_class.ranks) for rank_class in slow.classes] == [1, 3, 1, 3]
    assert slow.classes[0].is_straggler
    assert slow.classes[0].busy_s[COMPUTE] > 1.9 * plain.classes[0].busy_s[COMPUTE]
    assert slow.step_ns > 1.9 * plain.step_ns * 0.9
    ends = [max(span.end_ns for span in rank_class.spans) for rank_class in slow.classes]
    assert len(set(ends)) == 1  # the last op is everybody's
    for rank_class in slow.classes[1:]:
        assert rank_class.busy_s[COMPUTE] == plain.classes[0].busy_s[COMPUTE]
        assert rank_class.exposed_s > plain.exposed_s


def test_a_collective_lasts_from_a_ranks_coming_to_the_common_end() -> None:
    program = hybrid()
    simulation = simulate(program, machine(node_ranks=4, node_latency_s=1e-6), straggler=2.0)
    same = [rank_class.spans for rank_class in simulation.classes]
    waited = 0
    for places in zip(*same, strict=True):
        op = program.section_by_name[places[0].section].body[places[0].index]
        if isinstance(op, ops.Collective):
            # Classes 0 and 1 are rank_class group of `shard`, 0 and 2 rank_class of `replicate`.
            axis = program.comm_by_name[op.comm].axis
            peer = 1 if axis == "shard" else 2
            assert places[0].end_ns == places[peer].end_ns
            waited += places[0].start_ns > places[peer].start_ns
    assert waited


def test_collectives_at_the_same_time_share_their_wire() -> None:
    """Two streams whose collectives begin together: each alone takes 7 ms, both together 14."""
    program = applied(mlp(blocks=2, dim=16), for_stage(3, 8))
    slow, fast = (
        simulate(program, machine(flops_per_s=1e15, node_bytes_per_s=rate)).classes[0]
        for rate in (1e6, 2e6)
    )
    total = slow.bytes_by_wire["node_link"] / 1e6
    gather, reduce = slow.busy_s["gather"], slow.busy_s["reduce"]
    assert gather + reduce > total * (1 + 1e-9)  # else nothing would have shared it
    assert max(span.end_ns for span in slow.spans) / 1e9 >= total - 1e-6
    assert fast.busy_s["gather"] == pytest.approx(gather / 2, rel=1e-6)


def test_prefetching_hides_gathers_behind_arithmetic() -> None:
    """Where gathers have latency alone, they end the earlier the earlier they begin."""
    steps: dict[int, Simulation] = {}
    for distance in (0, 1, 2):
        program = applied(mlp(blocks=4, dim=16), for_stage(3, 4, distance=distance))
        steps[distance] = simulate(program, machine(node_latency_s=1e-3, flops_per_s=1e6))
    assert steps[0].step_ns > steps[1].step_ns >= steps[2].step_ns
    assert steps[0].exposed_s > steps[1].exposed_s
    assert steps[0].flops == steps[1].flops


def test_recomputation_counts_in_hfu_and_not_in_mfu() -> None:
    logical = mlp(blocks=4, dim=16)
    program = applied(logical, for_stage(3, 4, recompute=("*",)))
    on = machine(flops_per_s=1e6)
    simulation, plain = simulate(program, on, logical=logical), simulate(logical, on)
    assert simulation.hfu > simulation.mfu > 0
    assert simulation.mfu * simulation.step_ns == pytest.approx(plain.mfu * plain.step_ns)
    assert simulation.hfu * simulation.step_ns == pytest.approx(1e3 * simulation.flops)
    assert simulation.flops > plain.flops


@pytest.mark.parametrize("computes", [False, True])
def test_the_host_issues_one_op_after_the_other(computes: bool) -> None:
    program = mlp(blocks=1)
    count = sum(len(program.section_by_name[name].body) for name in (LAST_MICRO_STEP, UPDATE))
    simulation = simulate(program, machine(issue_s=1.0, computes=computes, flops_per_s=1e9))
    arithmetic_ns = simulation.flops if computes else 0
    # A device is done with an op before the host has issued the next; the last op does no arithmetic.
    assert simulation.step_ns == count * 10**9 + arithmetic_ns
    assert sum(item.is_issue for item in simulation.critical_path) == count


def test_micro_steps_add_up() -> None:
    program = mlp(blocks=2, micro_steps=2)
    on = machine(launch_s=1e-6)
    two, three, four = (simulate(program, on, micro_steps=count) for count in (2, 3, 4))
    assert simulate(program, on) == two
    assert four.step_ns - three.step_ns == three.step_ns - two.step_ns > 0
    assert four.flops - three.flops == three.flops - two.flops > 0


@pytest.mark.parametrize("straggler", [0.5, float("nan"), float("inf")])
def test_a_straggler_is_no_faster_than_the_others(straggler: float) -> None:
    with pytest.raises(UserError, match="at least 1 times as long"):
        simulate(mlp(blocks=1), machine(), straggler=straggler)


def test_an_endless_step_is_refused() -> None:
    for on, straggler in ((machine(), 1e300), (machine(flops_per_s=1e-300), None)):
        with pytest.raises(UserError, match="check the machine's rates"):
            simulate(mlp(blocks=1), on, straggler=straggler)


def test_a_machine_of_one_node_refuses_more_ranks_than_it_has() -> None:
    with pytest.raises(UserError, match="at most 4 ranks"):
        simulate(hybrid(), machine(node_ranks=4, network=None))


@pytest.mark.slow
def test_eighty_layers_on_1024_ranks_take_three_seconds() -> None:
    program = applied(
        mlp(blocks=80, dim=256, features=64, batch=512, precision="bf16"), for_stage(3, 1024)
    )
    start = time.process_time()
    simulation = simulate(program, load_machine("dgx-h100"))
    assert time.process_time() - start <= 3
    assert [len(rank_class.ranks) for rank_class in simulation.classes] == [1024]


def test_an_evaluation_is_no_part_of_a_step() -> None:
    logical, on = mlp(blocks=3, dim=16), machine(flops_per_s=1e6)
    program = applied(with_evaluation(logical), for_stage(3, 4))
    alone = applied(logical, for_stage(3, 4))
    assert simulate(program, on).step_ns == simulate(alone, on).step_ns
    seconds = simulate_evaluation(program, on)
    assert seconds is not None
    assert 0 < seconds < simulate(program, on).step_s / 2
    assert simulate_evaluation(alone, on) is None
