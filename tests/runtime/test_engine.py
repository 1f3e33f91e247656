"""The engine by itself: initialisation, batches, transfers, profiles, a pretended world."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.runtime.constructors import Mlp
from tests.runtime.support import ROOT, begun, initial_flats, lowered, random_batches
from tests.support.edits import losses_in, with_report_of
from tests.support.evaluations import with_evaluation
from tests.support.pieces import dense, tensor
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import Content, FlatContent, Micro, NamedContent, Zeros
from zeroir.ir.dtypes import DType
from zeroir.ir.program import (
    EVALUATE,
    LAST_MICRO_STEP,
    UPDATE,
    Holding,
    InputBinding,
    Pending,
    Program,
    Section,
    State,
)
from zeroir.ir.reports import Quantity
from zeroir.ir.segments.segment import Node, Ref, Segment
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.torch_ops.batches import Batch, flatten


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_initial_parameters_equal_those_of_a_module_built_at_once(
    stage: int, precision: str
) -> None:
    logical = mlp(dim=96, precision=precision)
    lockstep = Lockstep(lowered(logical, stage, 3))
    lockstep.initialise(lambda: Mlp(dim=96), 11)
    torch.manual_seed(11)
    expected = dict(Mlp(dim=96).named_parameters())
    found = lockstep.full_parameters()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name  # masters are not rounded
    for flat in logical.flats:
        for slot in flat.slots:
            param = lockstep.full_state()[flat.name, "param"]
            rounded = expected[slot.name].detach().to(param.dtype).flatten()
            assert torch.equal(param[slot.offset : slot.offset + slot.numel], rounded)


def test_a_changed_model_is_named() -> None:
    engine = Engine(lowered(mlp(), 3, 1))
    with pytest.raises(UserError, match=r"'pre.weight' has the shape \[16, 6\].*\[8, 6\]"):
        engine.initialise(lambda: Mlp(dim=16), 0)
    with pytest.raises(UserError, match=r"no parameter or buffer 'blocks.2.weight'"):
        engine.initialise(lambda: Mlp(blocks=2), 0)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.zeros(5, 6)}, r"'x' is float32\[5, 6\].*compiled for float32\[4, 6\]"),
        ({"x": torch.zeros(3, 6)}, r"float32\[4, 6\]: the last batch .* pass drop_last=True"),
        ({"x": torch.zeros(4, 6).double()}, r"'x' is float64\[4, 6\].*float32\[4, 6\]"),
        ({"y": torch.zeros(4, 6)}, r"has no 'x'.*float32\[4, 6\]"),
        ((torch.zeros(4, 6),), r"has no 'x'"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: Batch, expected: str) -> None:
    engine = begun(Engine(lowered(mlp(), 3, 1)))
    with pytest.raises(UserError, match=expected):
        engine.step(batch)


def test_an_index_that_the_model_has_no_row_for_is_the_batchs_fault() -> None:
    body = (
        ops.Compute(
            segment="look_up",
            arguments=tuple(ops.Argument(view=dense(name, shape)) for name, shape in _LOOK_UP),
            destinations=(ops.Destination(view=dense("loss", (1, 1))),),
            unit="root.pre",
            stream="compute",
        ),
    )
    program = replace(
        mlp(),
        segments=(
            Segment(
                name="look_up",
                inputs=(tensor(DType.F32, 1, 1), tensor(DType.I64, 1)),
                nodes=(
                    Node(
                        op="aten.embedding.default",
                        args=(Ref(0), Ref(1)),
                        results=(tensor(DType.F32, 1, 1),),
                    ),
                ),
                outputs=(2,),
            ),
        ),
        buffers=(*mlp().buffers, _TOKENS),
        inputs=(InputBinding(path="0", buffer="tokens", dtype=DType.I64, shape=(1,)),),
        sections=(Section(name=LAST_MICRO_STEP, body=body), Section(name=UPDATE, body=())),
    )
    engine = Engine(program)
    engine.step((torch.tensor([0]),))
    with pytest.raises(
        UserError, match=r"batch does not suit the model: index out of range in self, in"
    ):
        engine.step((torch.tensor([7]),))
    # The step was cut off in its middle, so that its successors would compute with anything.
    with pytest.raises(UserError, match=r"An earlier step failed in its middle.*make a new engine"):
        engine.step((torch.tensor([0]),))


_LOOK_UP = (("step", (1, 1)), ("tokens", (1,)))
_TOKENS = Buffer(
    name="tokens",
    dtype=DType.I64,
    numel=1,
    space=Space.DEVICE,
    role=Role.INPUT,
    holds=NamedContent(name="tokens"),
)


def test_paths_name_tensors_of_nested_batches() -> None:
    x = torch.zeros(1)
    leaves = flatten({"a": (x, [x]), "b": {"c": x, "n": 3}})
    assert (list(leaves.tensors), leaves.constants) == (["a.0", "a.1.0", "b.c"], {"b.n": 3})
    assert list(flatten((x, x)).tensors) == ["0", "1"]


def test_one_rank_alone_equals_lockstep() -> None:
    program = lowered(mlp(clip=0.5), 3, 1)
    engine, lockstep = Engine(program), Lockstep(program)
    for one in (engine, lockstep):
        one.initialise_flats(initial_flats(program))
    for ((batch,),) in random_batches(4, 1):
        result, (expected,) = engine.step(batch), lockstep.step([[batch]])
        assert result.loss == float(expected.loss)
        assert result.mean_loss == result.loss
        assert expected.grad_norm is not None
        assert result.grad_norm == float(expected.grad_norm)
    expected_state = lockstep.full_state()
    for key, value in engine.full_state().items():
        assert torch.equal(value, expected_state[key])
    engine.close()


def test_profiles_name_every_op_with_its_line() -> None:
    engine = begun(Engine(lowered(mlp(), 3, 1)))
    batch = random_batches(1, 1)[0][0][0]
    engine.step(batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        engine.step(batch)
    names = {event.key for event in profiler.key_averages()}
    body = engine.program.section_by_name[LAST_MICRO_STEP].body
    index = next(i for i, op in enumerate(body) if isinstance(op, ops.Compute))
    assert f"last_micro_step:{index} compute @pre.forward of root.pre" in names


def test_buffers_travel_between_device_host_and_disk() -> None:
    """x goes out to the disk and comes back as y, each leg on a stream of its own."""

    def buffer(name: str, space: Space, *, is_persistent: bool = True) -> Buffer:
        holds = NamedContent(name=name) if is_persistent else None
        return Buffer(
            name=name, dtype=DType.F32, numel=8, space=space, role=Role.STATE, holds=holds
        )

    def part(name: str) -> Region:
        return Region(buffer=name, offset=2, numel=4)

    body: tuple[ops.Op, ...] = (
        ops.Alloc(buffer="a", stream="copy_out"),
        ops.ToHost(source=part("x"), destination=part("a"), stream="copy_out", event="0"),
        ops.Wait(waited="0", on="io"),
        ops.Store(source=part("a"), destination=part("disk"), stream="io", event="1"),
        ops.Load(source=part("disk"), destination=part("b"), stream="io", event="2"),
        ops.Wait(waited="2", on="copy_in"),
        ops.ToDevice(source=part("b"), destination=part("y"), stream="copy_in", event="3"),
        ops.Wait(waited="1", on="copy_out"),
        ops.Release(buffer="a", stream="copy_out"),
        ops.Wait(waited="3", on="host"),
        ops.Fill(destination=part("x"), value=0.0, stream="compute"),
    )
    logical = mlp()
    program = Program(
        mesh=logical.mesh,
        buffers=(
            buffer("x", Space.DEVICE),
            buffer("a", Space.HOST, is_persistent=False),
            buffer("b", Space.HOST),
            buffer("disk", Space.DISK),
            buffer("y", Space.DEVICE),
            buffer("loss", Space.DEVICE),
        ),
        sections=(Section(name=LAST_MICRO_STEP, body=body), Section(name=UPDATE, body=())),
        reports=losses_in("loss"),
    )
    value = torch.arange(8.0)
    engine = Engine(program)
    engine.initialise_flats({"x": value})
    engine.step({})
    found = [engine.buffer(name) for name in ("x", "y", "disk")]
    engine.close()
    for seed in range(5):
        lockstep = Lockstep(program, schedule_seed=seed)
        lockstep.initialise_flats({"x": value})
        lockstep.step([[{}]])
        found += [lockstep.buffers(0)[name] for name in ("x", "y", "disk")]
    for x, y, disk in zip(*[iter(found)] * 3, strict=True):
        assert x.tolist() == [0, 1, 0, 0, 0, 0, 6, 7]
        assert y.tolist() == disk.tolist() == [0, 0, 2, 3, 4, 5, 0, 0]


def test_a_program_for_several_ranks_asks_for_torchrun() -> None:
    with pytest.raises(UserError, match="torchrun"):
        Engine(lowered(mlp(), 3, 4))


def test_seeds_are_fresh_in_every_step_and_on_every_rank() -> None:
    logical = mlp()
    rng = Buffer(
        name="rng",
        dtype=DType.I64,
        numel=3,
        space=Space.HOST,
        role=Role.RNG,
        holds=NamedContent(name="rng"),
    )
    program = lowered(replace(logical, buffers=(*logical.buffers, rng)), 3, 2)
    seen: list[int] = []
    for _ in range(2):
        lockstep = begun(Lockstep(program, seed=5))
        for batches in random_batches(2, 2):
            lockstep.step(batches)
            for rank in range(2):
                seen += [int(seed) for seed in lockstep.buffers(rank)["rng"]]
    assert seen[:12] == seen[12:]
    assert len(set(seen[:12])) == 12


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_an_evaluation_changes_nothing_about_the_steps_after_it(micro_steps: int) -> None:
    logical = mlp(micro_steps=micro_steps)
    program = with_evaluation(lowered(logical, 0, 2))
    first, second = random_batches(2, 2, micro_steps=micro_steps)
    losses: list[list[float]] = []
    for is_evaluated in (False, True):
        lockstep = begun(Lockstep(program))
        found: list[float] = []
        for batches in (first, second):
            if is_evaluated:
                lockstep.evaluate([of_rank[0] for of_rank in batches])
            found += [float(result.loss) for result in lockstep.step(batches)]
        losses.append(found)
    assert losses[0] == losses[1]


_HANDED_ON = Buffer(
    name="handed_on", dtype=DType.F32, numel=512, space=Space.DEVICE, role=Role.GATHERED
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (Zeros(), 0.0),
        (FlatContent(quantity="grad", flat="blocks.0", micro=Micro.PAST), 0.0),
        (FlatContent(quantity="exp_avg", flat="blocks.0"), 0.0),
        (FlatContent(quantity="param", flat="blocks.0"), None),
    ],
)
def test_a_job_may_begin_with_an_evaluation(content: Content, expected: float | None) -> None:
    """What a step would have handed on to it is brought about as for a first step."""
    logical = mlp()
    program = lowered(logical, 3, 2)
    numel = program.flat_by_name["blocks.0"].padded_numel
    buffer = replace(_HANDED_ON, numel=numel)
    state = State(
        live=(buffer.name,),
        holdings=(Holding(region=whole(buffer), content=content),),
    )
    one = Region(buffer=buffer.name, offset=3, numel=1)
    loss = Region(buffer="loss", offset=0, numel=1)
    body = (ops.Cast(source=one, destination=loss, stream="compute"),)
    sections = (Section(name=EVALUATE, entry=state, body=body, exit=state),)
    program = replace(program, buffers=(*program.buffers, buffer), sections=sections)
    lockstep = Lockstep(with_report_of(program, Quantity.EVAL_LOSS, "loss"))
    values = initial_flats(logical)
    lockstep.initialise_flats(values)
    ((batch,), (other,)) = random_batches(1, 2)[0]
    wanted = float(values["blocks.0.param"][3]) if expected is None else expected
    for _ in range(2):
        assert [float(found.loss) for found in lockstep.evaluate([batch, other])] == [wanted] * 2


def test_what_is_read_back_waits_for_ops_that_cross_the_boundary() -> None:
    logical = mlp()
    crossing = State(pending=(Pending(event="0", stream="gather"),))
    region = whole(logical.buffer_by_name["root.pre.param"])
    body = (ops.Fill(destination=region, value=7.0, stream="gather", event="0"),)
    sections = (
        Section(name=LAST_MICRO_STEP, body=()),
        Section(name=UPDATE, body=body, exit=crossing),
    )
    for seed in range(4):
        lockstep = Lockstep(replace(logical, sections=sections), schedule_seed=seed)
        lockstep.step([random_batches(1, 1)[0][0]])
        assert lockstep.full_parameters()["pre.weight"].eq(7.0).all()


def test_adam_without_eps_leaves_padding_zero() -> None:
    """Between parameters and behind them; an element whose gradient is zero becomes NaN, as in torch."""
    logical = mlp(dim=9, optimizer="adam")
    scalars = tuple(
        replace(s, values=(0.9, 0.999, 0.0, 0.0)) if s.buffer == "hyper" else s
        for s in logical.scalars
    )
    program = lowered(replace(logical, scalars=scalars), 3, 3)
    lockstep = begun(Lockstep(program))
    lockstep.step(random_batches(1, 3)[0])
    for (flat, _), values in lockstep.full_state().items():  # which looks at the padding at the end
        slots = program.flat_by_name[flat].slots
        for slot, following in pairwise(slots):
            assert values[slot.offset + slot.numel : following.offset].eq(0.0).all()


def test_a_device_has_done_everything_before_an_engine_gives_up_what_it_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a failure it may never be done where a peer is lost, so nothing waits for it."""
    for failure, is_alone, expected in (
        (False, False, ["waited", "closed"]),
        (True, True, ["waited", "closed"]),
        (True, False, []),
    ):
        engine = Engine(lowered(mlp(), 3, 1))
        done: list[str] = []
        monkeypatch.setattr(
            engine.rank_program.executor._streams,
            "finish",
            partial(done.append, "waited"),
            raising=True,
        )
        monkeypatch.setattr(engine.job.comm, "close", partial(done.append, "closed"))
        engine.rank_program.memory.device = torch.device("cuda", 0)
        engine.rank_program.job = replace(engine.job, is_alone=is_alone)
        if failure:
            with pytest.raises(ValueError, match="broken"), engine.rank_program.executor.changing():
                raise ValueError("broken")
        engine.close()
        assert done == expected


def test_a_cuda_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of an engine have current devices of their own."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    opened: list[torch.device] = []

    def note(rank_program: RankProgram, *_: object) -> None:
        opened.append(rank_program.device)
        raise InterruptedError

    monkeypatch.setattr(RankProgram, "_open", note)
    for given in ("cuda", "cuda:1", "cpu"):
        with pytest.raises(InterruptedError):
            Engine(lowered(mlp(), 3, 1), device=torch.device(given))
    assert [str(device) for device in opened] == ["cuda:3", "cuda:1", "cpu"]


FAKE = """
from tests.runtime.support import initial_flats, lowered, random_batches
from tests.support.pieces import dense, tensor
from tests.support.programs import mlp
from zeroir.runtime.comm.fake import join_fake_world
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine.engine import Engine

join_fake_world(5, 64)
logical = mlp(precision="bf16", clip=1.0, dim=64)
for stage in range(4):
    program = lowered(logical, stage, 64)
    engine = begun(Engine(program, backend=Backend.FAKE))
    engine.step(random_batches(1, 1)[0][0][0])
    for buffer in program.buffers:
        if buffer.is_persistent:
            assert engine.buffer(buffer.name).numel() == buffer.numel
    engine.close()
print("done")
"""


@pytest.mark.slow
@pytest.mark.dist
def test_one_rank_of_a_pretended_world_runs_every_stage() -> None:
    result = subprocess.run(
        [sys.executable, "-c", FAKE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "done\n"
