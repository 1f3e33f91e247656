"""Parameters at home in host memory: the same numbers, what travels, and the device memory that visits take."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.passes import happens
from tests.passes.example_programs import LOGICAL
from tests.passes.numbers import assert_same, inputs, run
from tests.passes.strategies import Case, cases
from tests.support.edits import is_of, with_body, without_each
from tests.support.examples import examples
from tests.support.groups import in_groups
from tests.support.lowering import applied, proved
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.subjects import CAPTURED, subject
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.analysis.effects import Effects, effects
from zeroir.ir.bounds import AheadBound, BoundKind
from zeroir.ir.buffers import Role, Space
from zeroir.ir.mesh import COPY_IN
from zeroir.ir.ops import Op
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.memory.footprint import footprint
from zeroir.memory.placement import rounded
from zeroir.passes import manager
from zeroir.passes.base import Pass
from zeroir.passes.common import rewrite
from zeroir.passes.communication.unshard import Unshard
from zeroir.passes.memory.save_state import SaveState
from zeroir.passes.offload import offload_parameters
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.overlap_update import OverlapUpdate
from zeroir.passes.pipelines import for_options, parse_spec
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.verify import verify

STAGES = range(4)


def transfer_bytes(program: Program, section: str, kind: type[Op]) -> int:
    """The bytes that the transfers of one kind move on one rank."""
    moved = 0
    for op in program.section_by_name[section].body:
        if isinstance(op, kind):
            assert isinstance(op, ops.ToDevice | ops.ToHost)
            buffer = program.buffer_by_name[op.source.buffer]
            moved += op.source.local_numel(program.mesh) * buffer.dtype.itemsize_bytes
    return moved


# ------------------------------------------------------------------------------------------------------ the numbers


@pytest.mark.slow
@examples(20)
@given(cases(world_sizes=(1, 4)), st.booleans(), st.booleans(), st.integers(0, 2**16))
def test_no_bit_changes(case: Case, is_overlapped: bool, is_grouped: bool, seed: int) -> None:
    logical = in_groups(case.logical()) if is_grouped else case.logical()
    others: tuple[Pass, ...] = (OverlapUpdate(),) if is_overlapped else ()
    plain = applied(logical, (*case.passes(), *others))
    offloaded = manager.run(plain, [OffloadParameters()], reference=logical)
    assert rewrite.param_buffers(offloaded).keys() == rewrite.param_buffers(plain).keys()
    for name in rewrite.param_buffers(offloaded):
        assert offloaded.buffer_by_name[name].space is Space.HOST
    assert_same(offloaded, plain, case.micro_steps, (seed, seed + 1))


@pytest.mark.parametrize(("stage", "optimizer"), [(0, "lion"), (2, "adafactor"), (3, "adafactor")])
def test_no_bit_changes_with_any_optimizer(stage: int, optimizer: str) -> None:
    """Those that work on whole parameters find these by the places of their elements at home."""
    logical = in_groups(mlp(optimizer=optimizer, clip=0.5))
    plain = applied(logical, for_stage(stage, 3))
    offloaded = manager.run(plain, [OffloadParameters()], reference=logical)
    assert_same(offloaded, plain, seeds=range(2))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_no_bit_changes_in_groups_of_ranks(stage: int) -> None:
    logical = mlp(precision="bf16", micro_steps=2)
    plain = applied(logical, for_stage(stage, 4, replicas=2))
    offloaded = manager.run(plain, [OffloadParameters()], reference=logical)
    assert_same(offloaded, plain, 2, [5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [Unshard(), parse_spec("bucket{bytes=4096}"), parse_spec("prefetch{bytes=4096}")]
)
def test_no_bit_changes_however_parameters_are_gathered(step: Pass) -> None:
    logical = mlp(blocks=3, precision="fp16", clip=1.0)
    gathers = for_stage(3, 3)[: 5 if isinstance(step, Unshard) else 6]
    plain = applied(logical, (*gathers, step))
    offloaded = manager.run(plain, [OffloadParameters()], reference=logical)
    assert_same(offloaded, plain, seeds=[1])


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_what_was_saved_goes_on_with_or_without_it(stage: int, tmp_path: Path) -> None:
    """Section ``save`` copies parameters from their home beside the next step, which changes them there."""
    logical = mlp(precision="fp32", optimizer="adamw")
    passes = for_stage(stage, 3)
    programs = [
        proved(logical, (*passes, SaveState())),
        proved(logical, (*passes, OffloadParameters(), SaveState())),
    ]
    batches = inputs(logical, 3, 1)
    expected = run(programs[0], batches).state
    for first in programs:
        begun = run(first, batches[:1], 3).lockstep
        begun.save(str(tmp_path / f"{len(first.buffers)}"))
        for second in programs:
            resumed = Lockstep(second, schedule_seed=4)
            resumed.load(str(tmp_path / f"{len(first.buffers)}"))
            for step in batches[1:]:
                resumed.step(step)
            state = resumed.full_state()
            assert state.keys() == expected.keys()
            assert all((state[key] == expected[key]).all() for key in state)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_no_bit_of_a_captured_model_changes(name: str) -> None:
    """Tied, frozen, unused and twice-called parts, running statistics, dropout, evaluations and saves between steps."""
    made = subject(name)
    options = make_options(CAPTURED[name])
    passes = list(for_options(options))
    before_saving = next(at for at, step in enumerate(passes) if isinstance(step, SaveState))
    passes.insert(before_saving, OffloadParameters())
    program = manager.run(replace(made.logical, options=options), passes)
    assert not _sizes(program, Role.PARAM, Space.DEVICE)
    for schedule_seed in range(3):
        assert made.difference(program, schedule_seed) is None


# --------------------------------------------------------------------------------------------- an update on the host


@pytest.mark.slow
@examples(15)
@given(cases(world_sizes=(1, 4)), st.booleans(), st.integers(0, 2**16))
def test_an_update_on_the_host_changes_no_bit(case: Case, is_overlapped: bool, seed: int) -> None:
    logical = case.logical()
    others: tuple[Pass, ...] = (OverlapUpdate(),) if is_overlapped else ()
    plain = applied(logical, (*case.passes(), *others))
    program = manager.run(plain, [OffloadOptimizer(), OffloadParameters()], reference=logical)
    assert_same(program, plain, case.micro_steps, [seed])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_update_on_the_host_writes_the_home(stage: int, precision: str) -> None:
    """The host has the parameters once, and nothing goes up that no gather needs."""
    logical = mlp(blocks=2, precision=precision)
    passes = (*for_stage(stage, 4), OffloadOptimizer())
    program = proved(logical, (*passes, OffloadParameters()))
    parameters = [b for b in program.buffers if b.role is Role.PARAM]
    assert len(parameters) == len(program.flats)
    assert all(buffer.space is Space.HOST for buffer in parameters)
    gathered = sum(buffer.size_bytes for buffer in parameters) if stage in (1, 2) else 0
    up, down = (transfer_bytes(program, UPDATE, kind) for kind in (ops.ToDevice, ops.ToHost))
    gradients = transfer_bytes(applied(logical, passes), UPDATE, ops.ToHost)
    assert up == gathered // 4
    assert down == gradients + gathered


def test_parameters_beside_a_home_stay_where_an_op_uses_the_home_before_the_copy() -> None:
    program = applied(mlp(blocks=2), (*for_stage(0, 1), OffloadOptimizer()))
    update = program.section_by_name[UPDATE]
    at, copy = next((i, op) for i, op in enumerate(update.body) if isinstance(op, ops.ToDevice))
    fill = ops.Fill(destination=copy.destination, value=0.0, stream=copy.stream)
    for index, is_kept in ((at, True), (at + 1, False)):
        body = (*update.body[:index], fill, *update.body[index:])
        offloaded = manager.apply(OffloadParameters(), with_body(program, UPDATE, body))
        assert (copy.source.buffer in offloaded.buffer_by_name) is is_kept


def test_it_looks_at_an_op_as_often_in_a_deep_model(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Op] = []

    def counted(op: Op) -> Effects:
        looks.append(op)
        return effects(op)

    monkeypatch.setattr(offload_parameters, "effects", counted)
    looks_per_op: list[float] = []
    for blocks in (2, 8):
        program = applied(mlp(blocks=blocks), (*for_stage(1, 2), OffloadOptimizer()))
        looks.clear()
        manager.apply(OffloadParameters(), program)
        looks_per_op.append(len(looks) / len(list(program.ops())))
    shallow, deep = looks_per_op
    assert 0 < deep < 1.2 * shallow


def test_a_part_of_the_update_on_the_host() -> None:
    logical = mlp(blocks=3, precision="bf16")
    passes = (*for_stage(1, 3), OffloadOptimizer(fraction=0.5))
    program = proved(logical, (*passes, OffloadParameters(units=("blocks.*", "root.post"))))
    assert_same(program, applied(logical, for_stage(1, 3)), seeds=[6])


# ------------------------------------------------------------------------------------------------------ what travels


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_gather_brings_its_shard_and_the_update_takes_it_home(precision: str) -> None:
    program = applied(mlp(blocks=3, precision=precision), (*for_stage(3, 4), OffloadParameters()))
    shards = sum(program.buffer_by_name[name].size_bytes for name in rewrite.param_buffers(program))
    gathered = sum(
        program.buffer_by_name[pair.source.buffer].size_bytes
        for op in program.section_by_name[LAST_MICRO_STEP].body
        if isinstance(op, ops.Gather)
        for pair in op.pairs
    )
    assert transfer_bytes(program, LAST_MICRO_STEP, ops.ToDevice) == gathered > shards
    assert transfer_bytes(program, LAST_MICRO_STEP, ops.ToHost) == 0
    # Master weights are on the device: the parameters are made from them, and nothing reads the old ones.
    arriving = shards if precision == "fp32" else 0
    assert transfer_bytes(program, UPDATE, ops.ToDevice) == arriving
    assert transfer_bytes(program, UPDATE, ops.ToHost) == shards


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_each_run_of_uses_brings_what_it_uses(stage: int) -> None:
    """The first unit's backward does not read its weight, and the last unit's forward and backward are one run."""
    logical = mlp(blocks=2)
    program = applied(logical, (*for_stage(stage, 4), OffloadParameters()))
    used = {flat.unit: flat.numel * 4 for flat in program.flats}
    weight = program.flats[1].slots[0]
    assert weight.name == "blocks.0.weight"
    # Of each block the backward reads only its weight.
    expected = sum(used.values()) + 2 * weight.numel * 4
    assert transfer_bytes(program, LAST_MICRO_STEP, ops.ToDevice) == expected
    whole = sum(program.buffer_by_name[name].size_bytes for name in rewrite.param_buffers(program))
    assert transfer_bytes(program, UPDATE, ops.ToDevice) == (whole if stage == 0 else whole // 4)
    assert transfer_bytes(program, UPDATE, ops.ToHost) == whole


# -------------------------------------------------------------------------------------------- what is live, and when


@examples(25)
@given(cases(), st.booleans())
def test_two_visits_are_live_in_any_order_of_the_streams(case: Case, is_overlapped: bool) -> None:
    """Three at most where some take updated parameters home beside others that bring those for the backward."""
    program = case.scheduled()
    if is_overlapped:
        program = manager.apply(OverlapUpdate(), program)
    program = manager.apply(OffloadParameters(), program)
    (bound,) = (b for b in program.bounds if b.kind is BoundKind.DEVICE_STAGING)
    is_beside = any(isinstance(op, ops.ToHost) for op in _last_body(program))
    assert bound == AheadBound(kind=BoundKind.DEVICE_STAGING, ahead=1 if is_beside else 0)
    for section in program.sections:
        assert max(happens.staging_live(section.body, program)) <= (3 if is_beside else 2)


def _last_body(program: Program) -> Sequence[Op]:
    return program.section_by_name[LAST_MICRO_STEP].body


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_arrive_while_the_unit_before_computes(stage: int) -> None:
    """Neither in the text nor by a wait does an arrival come after the computation before it."""
    program = applied(mlp(blocks=4), (*for_stage(stage, 2), OffloadParameters()))
    body = program.section_by_name[LAST_MICRO_STEP].body
    masks = happens.before(body)
    arrivals = [
        (at, _reader(body, at, op.destination.buffer), op.source.buffer)
        for at, op in enumerate(body)
        if isinstance(op, ops.ToDevice)
    ]
    assert len(arrivals) > 8
    for (_, reader, home), (at, _, next_home) in itertools.pairwise(arrivals):
        if home != next_home:
            assert at < reader
            assert not masks[at] >> reader & 1


def _reader(body: Sequence[Op], at: int, name: str) -> int:
    """The first compute op that reads what arrives in a buffer, from there or from where it is gathered."""
    for index in range(at + 1, len(body)):
        op = body[index]
        if name not in {region.buffer for region in effects(op).reads}:
            continue
        if isinstance(op, ops.Gather):
            return _reader(body, index, op.pairs[0].destination.buffer)
        if isinstance(op, ops.Compute):
            return index
    raise AssertionError(f"nothing reads %{name}")


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_gathers_stay_as_far_ahead_as_they_were(distance: int) -> None:
    plain = applied(mlp(blocks=4), for_stage(3, 2, distance=distance))
    program = applied(mlp(blocks=4), (*for_stage(3, 2, distance=distance), OffloadParameters()))
    for before, after in zip(plain.sections, program.sections, strict=True):
        assert happens.groups_live(after.body, program) == happens.groups_live(before.body, plain)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 70_000, 10**9])
def test_a_gather_that_moves_takes_its_visit_along(budget: int) -> None:
    logical = mlp(blocks=4, dim=64)
    passes = for_stage(3, 4, budget=budget, offload=(OffloadParameters(),))
    program = proved(logical, passes)
    plain = applied(logical, for_stage(3, 4, budget=budget))
    assert [_gathers(each) for each in (program, plain)] == [_gathers(plain)] * 2
    assert max(happens.staging_live(_last_body(program), program)) <= 2
    assert_same(program, plain, seeds=range(2))


def _gathers(program: Program) -> list[str]:
    """The gathers and computations of a step, by name."""
    return [
        op.segment if isinstance(op, ops.Compute) else ops.op_name(type(op))
        for op in _last_body(program)
        if isinstance(op, ops.Compute | ops.Gather)
    ]


def test_a_gather_from_a_visit_that_passes_through_the_host_stays() -> None:
    """What loads the visit's elements from disk stands where it is."""
    logical = mlp(blocks=2)
    steps = (OffloadParameters(), parse_spec("offload-to-disk"))
    program = proved(logical, for_stage(3, 2, budget=10**9, offload=steps))
    assert_same(program, applied(logical, for_stage(3, 2)), seeds=[4])


def test_a_visit_that_no_wait_bounds_is_rejected() -> None:
    """Each wait is for data, or it keeps the third visit from beginning (Z302)."""
    logical = mlp(blocks=3)
    program = applied(logical, (*for_stage(1, 2), OffloadParameters()))
    broken: list[str] = []
    for where, mutant in without_each(program, is_of(ops.Wait)):
        findings = verify(mutant, logical).findings
        assert findings, where
        broken.append(findings[0].code)
    assert broken.count("Z302") >= 4


# ------------------------------------------------------------------------------------------------------- the memory


def _sizes(program: Program, role: Role, space: Space) -> Mapping[str, int]:
    return {b.name: b.size_bytes for b in program.buffers if (b.role, b.space) == (role, space)}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_memory_moves_to_the_host(stage: int, precision: str) -> None:
    """At rest exactly the parameters move, and on the device come two visits at most."""
    logical = mlp(blocks=4, dim=64, precision=precision)
    plain = applied(logical, for_stage(stage, 4))
    program = applied(logical, (*for_stage(stage, 4), OffloadParameters()))
    parameters = sum(_sizes(plain, Role.PARAM, Space.DEVICE).values())
    before, after = footprint(plain), footprint(program)
    assert after.resting_bytes == before.resting_bytes - parameters
    hosts = [footprint(each, space=Space.HOST) for each in (plain, program)]
    assert hosts[1].resting_bytes == hosts[0].resting_bytes + parameters
    assert hosts[1].arena_bytes == 0
    # Staging buffers take turns, however many there are.
    staged = {
        name: rounded(size, Space.DEVICE)
        for name, size in _sizes(program, Role.STAGING, Space.DEVICE).items()
        if name not in plain.buffer_by_name
    }
    assert len(staged) >= len(program.flats)
    assert 0 <= after.arena_bytes - before.arena_bytes <= 2 * max(staged.values())
    assert after.total_bytes < before.total_bytes


def test_only_the_named_units_move() -> None:
    logical = mlp(blocks=4)
    plain = applied(logical, for_stage(1, 2))
    program = proved(logical, (*for_stage(1, 2), OffloadParameters(units=("blocks.[12]",))))
    spaces = {name: program.buffer_by_name[name].space for name in rewrite.param_buffers(program)}
    on_host = {name for name, space in spaces.items() if space is Space.HOST}
    assert on_host == {"blocks.1.param", "blocks.2.param"}
    assert_same(program, plain, seeds=[2])
    # A visit begins one computation ahead of its use, however far back the visit before it was.
    body = program.section_by_name[LAST_MICRO_STEP].body
    for at, op in enumerate(body):
        if isinstance(op, ops.ToDevice):
            computes = [i for i, other in enumerate(body) if isinstance(other, ops.Compute)]
            arrived = op.destination.buffer
            user = next(i for i in computes if i > at and arrived in rewrite.used_buffers(body[i]))
            assert sum(at < i < user for i in computes) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_tied_parameters_and_those_kept_in_fp32_move_too(stage: int) -> None:
    logical = mlp(blocks=3, tied=True, keep_fp32=True, precision="bf16")
    program = proved(logical, (*for_stage(stage, 3), OffloadParameters()))
    assert not _sizes(program, Role.PARAM, Space.DEVICE)
    assert_same(program, applied(logical, for_stage(stage, 3)), seeds=[3])


# ----------------------------------------------------------------------------------------------------- the contract


def test_it_leaves_alone_what_is_at_home_there() -> None:
    once = applied(LOGICAL, (*for_stage(3, 2), OffloadParameters()))
    twice = manager.apply(OffloadParameters(), once)
    assert replace(twice, passes=()) == replace(once, passes=())


def test_it_comes_before_the_state_is_saved() -> None:
    with pytest.raises(UserError, match="put `offload-parameters` before it"):
        manager.check_contracts(LOGICAL, (*for_stage(1, 2), SaveState(), OffloadParameters()))


def test_patterns_must_name_units() -> None:
    with pytest.raises(UserError, match="names no unit with `layers"):
        applied(LOGICAL, (*for_stage(1, 2), OffloadParameters(units=("layers.*",))))
    with pytest.raises(UserError, match="The option `units` of `offload-parameters`"):
        OffloadParameters(units=())


def test_transfers_run_on_their_own_streams() -> None:
    program = applied(LOGICAL, (*for_stage(3, 2), OffloadParameters()))
    for op in program.ops():
        if isinstance(op, ops.ToDevice):
            assert op.stream == COPY_IN
