"""The engine by itself: initialisation, batches, transfers, profiles, a pretended world."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from tests.runtime.constructors import Mlp
from tests.runtime.support import ROOT, begun, initial_flats, lowered, random_batches, require_same
from tests.support.evaluations import evaluating_what_is_handed_on
from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Role, Space, whole
from zeroir.ir.contents import Content, FlatContent, Micro, NamedContent, Zeros
from zeroir.ir.dtypes import DType
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Pending, Section, State
from zeroir.ir.text import parse
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.rank_program import RankProgram
from zeroir.runtime.engine.results import Evaluation, RankEvaluation, RankResult, StepResult
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.eager import EagerKernel
from zeroir.torch_ops.batches import Batch, flatten


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


def test_results_print_the_values_that_the_program_reports() -> None:
    one, three = torch.tensor(1.0), torch.tensor(3.0)
    few = RankResult(loss=three, weight=2, mean_loss=None, is_skipped=None, grad_norm=None)
    assert repr(StepResult(rank=few)) == "StepResult(loss=3.0, weight=2.0)"
    all_values = RankResult(
        loss=three, weight=one, mean_loss=one, is_skipped=0 * one, grad_norm=three, is_redone=one
    )
    assert repr(StepResult(rank=all_values)) == (
        "StepResult(loss=3.0, mean_loss=1.0, weight=1.0, grad_norm=3.0, is_skipped=False, is_redone=True)"
    )
    assert repr(Evaluation(rank=RankEvaluation(loss=one, outputs=None))) == "Evaluation(loss=1.0)"
    outputs = Evaluation(rank=RankEvaluation(loss=one, outputs={"x": 2}))
    assert repr(outputs) == "Evaluation(loss=1.0, outputs={'x': 2})"


LOOK_UP = """zeroir 1
mesh dp=1
streams compute:device
report loss %loss
report batch_loss %loss
buffer %table : f32[1] device state = value table
buffer %tokens : i64[1] device input = value tokens
buffer %loss : f32[1] device scalar = value loss
input 0 : i64[1] -> %tokens
segment @look_up($0: f32[1,1], $1: i64[1]) {
  $2 = aten.embedding.default($0, $1) : f32[1,1]
  return ($2)
}
section last_micro_step {
  0: compute @look_up(%table, %tokens) -> (%loss) unit=root.pre stream=compute
}
section update {
}
"""


def test_an_index_that_the_model_has_no_row_for_is_the_batchs_fault() -> None:
    engine = Engine(parse(LOOK_UP))
    engine.step((torch.tensor([0]),))
    with pytest.raises(UserError, match="batch does not suit the model: index out of range"):
        engine.step((torch.tensor([7]),))
    # The step was cut off in its middle, so that its successors would compute with anything.
    with pytest.raises(UserError, match=r"An earlier step failed in its middle.*make a new engine"):
        engine.step((torch.tensor([0]),))


ASSERTED = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA`."


def test_an_assertion_of_a_gpu_is_the_batchs_fault_whenever_the_host_learns_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU reports it in a later op, or where the host reads what a step computed."""
    engine = Engine(parse(LOOK_UP))
    result = engine.step((torch.tensor([0]),))

    def fail(*_: object) -> None:
        raise RuntimeError(ASSERTED)

    monkeypatch.setattr(torch.Tensor, "__float__", fail)
    with pytest.raises(
        UserError, match=r"kernel on the GPU refused a value.* in the step or .* before it"
    ):
        print(result.loss)
    monkeypatch.undo()
    monkeypatch.setattr(EagerKernel, "__call__", fail)
    with pytest.raises(
        UserError, match=r"refused a value.*in last_micro_step:0 .* or in an op before"
    ):
        engine.step((torch.tensor([0]),))


def test_paths_name_tensors_of_nested_batches() -> None:
    x = torch.zeros(1)
    leaves = flatten({"a": (x, [x]), "b": {"c": x, "n": 3}})
    assert (list(leaves.tensors), leaves.constants) == (["a.0", "a.1.0", "b.c"], {"b.n": 3})
    assert list(flatten((x, x)).tensors) == ["0", "1"]


def test_one_rank_alone_equals_lockstep() -> None:
    program = lowered(mlp(clip=0.5), 3, 1)
    engine, lockstep = begun(Engine(program)), begun(Lockstep(program))
    for ((batch,),) in random_batches(4, 1):
        result, (expected,) = engine.step(batch), lockstep.step([[batch]])
        assert result.loss == float(expected.loss)
        assert result.mean_loss == result.loss
        assert expected.grad_norm is not None
        assert result.grad_norm == float(expected.grad_norm)
    require_same(engine.full_state(), lockstep.full_state())
    engine.close()


TRAVEL = """zeroir 1
mesh dp=1
streams compute:device copy_in:device copy_out:device io:disk
report loss %loss
report batch_loss %loss
buffer %x : f32[8] device state = value x
buffer %a : f32[8] host state
buffer %b : f32[8] host state = value b
buffer %disk : f32[8] disk state = value disk
buffer %y : f32[8] device state = value y
buffer %loss : f32[8] device state = value loss
section last_micro_step {
  0: alloc %a stream=copy_out
  1: !0 = to_host %x[2:6] -> %a[2:6] stream=copy_out
  2: wait !0 on=io
  3: !1 = store %a[2:6] -> %disk[2:6] stream=io
  4: !2 = load %disk[2:6] -> %b[2:6] stream=io
  5: wait !2 on=copy_in
  6: !3 = to_device %b[2:6] -> %y[2:6] stream=copy_in
  7: wait !1 on=copy_out
  8: release %a stream=copy_out
  9: wait !3 on=host
  10: fill %x[2:6] = 0.0 stream=compute
}
section update {
}
"""


def test_buffers_travel_between_device_host_and_disk() -> None:
    """x goes out to the disk and comes back as y, each leg on a stream of its own."""
    program = parse(TRAVEL)
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
    content = NamedContent(name="rng")
    rng = Buffer(
        name="rng", dtype=DType.I64, numel=3, space=Space.HOST, role=Role.RNG, holds=content
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
    lockstep = Lockstep(evaluating_what_is_handed_on(program, content))
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
    update = Section(name=UPDATE, body=body, exit=crossing)
    sections = (Section(name=LAST_MICRO_STEP, body=()), update)
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
        streams = engine.rank_program.executor._streams
        monkeypatch.setattr(streams, "finish", partial(done.append, "waited"))
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
from tests.runtime.support import begun, lowered, random_batches
from tests.support.programs import mlp
from tests.support.fake_world import join_fake_world
from zeroir.runtime.comm.job import Backend
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings

join_fake_world(5, 64)
logical = mlp(precision="bf16", clip=1.0, dim=64)
for stage in range(4):
    program = lowered(logical, stage, 64)
    engine = begun(Engine(program, EngineSettings(backend=Backend.FAKE)))
    engine.step(random_batches(1, 1)[0][0][0])
    for buffer in program.buffers:
        if buffer.is_persistent:
            assert engine.buffer(buffer.name).numel() == buffer.numel
    engine.close()
"""


@pytest.mark.slow
@pytest.mark.dist
def test_one_rank_of_a_pretended_world_runs_every_stage() -> None:
    subprocess.run([sys.executable, "-c", FAKE], cwd=ROOT, timeout=120, check=True)
