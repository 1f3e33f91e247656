"""What is saved comes back: at every stage, mesh and precision, and for every optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.numerics.test_whole_parameters import CHOICES, MODEL
from tests.runtime.support import (
    Values,
    begun,
    initial_flats,
    lowered,
    random_batches,
    require_same,
)
from tests.runtime.workers_cases import varied, weight_of_values
from tests.support.eager import traced
from tests.support.evaluations import evaluating_what_is_handed_on
from tests.support.examples import examples
from tests.support.lowering import proved_for
from tests.support.programs import mlp
from zeroir.checkpoint.manifest import MASTER
from zeroir.checkpoint.reading import read_manifest
from zeroir.config import make_options
from zeroir.errors import CheckpointWarning
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.contents import EMA, PARAM, FlatContent
from zeroir.ir.program import Program
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.lockstep import Lockstep

LAYOUTS = st.sampled_from(
    [(stage, world, None) for stage in range(4) for world in (1, 2, 3, 4, 5, 7)]
    + [(stage, 4, 2) for stage in range(4)]
    + [(3, 6, 3)]
)
"""Stage, world size and replicas."""
PRECISIONS = st.sampled_from(["fp32", "bf16", "fp16"])


def trained(program: Program, steps: int = 2) -> Lockstep:
    lockstep = begun(Lockstep(program))
    for batches in random_batches(steps, program.mesh.world_size):
        lockstep.step(batches)
    return lockstep


def saved(state: Values, flat: str, quantity: str) -> Tensor | None:
    """A quantity as a checkpoint has it: parameters as masters, and averages that are not there as parameters."""
    weights = state.get((flat, MASTER), state.get((flat, PARAM)))
    if quantity in (PARAM, MASTER):
        return weights
    return state.get((flat, quantity), weights if quantity == EMA else None)


def resharded(program: Program, source: Lockstep) -> Lockstep:
    """Another program with the values of one that trained, by way of whole tensors in memory."""
    state = source.full_state()
    values: dict[str, Tensor] = {}
    theirs = source.buffers(0)
    for buffer in program.buffers:
        content = buffer.holds
        if isinstance(content, FlatContent):
            value = saved(state, content.flat, content.quantity)
            if value is not None:
                values[buffer.name] = value
    lockstep = Lockstep(program)
    lockstep.initialise_flats(values)
    for rank in range(program.mesh.world_size):
        own = lockstep.buffers(rank)
        own["step"].copy_(theirs["step"])
        if has_loss_scaling(program) and has_loss_scaling(source.program):
            own["loss_scale"].copy_(theirs["loss_scale"])
    return lockstep


def has_loss_scaling(program: Program) -> bool:
    return "overflow" in program.buffer_by_name


@pytest.mark.slow
@given(PRECISIONS, LAYOUTS, st.booleans(), PRECISIONS, LAYOUTS, st.booleans())
@examples(60)
def test_any_layout_and_precision_goes_on_with_any(
    precision: str,
    layout: tuple[int, int, int | None],
    has_average: bool,
    other_precision: str,
    other_layout: tuple[int, int, int | None],
    other_has_average: bool,
) -> None:
    source = trained(perceptron(precision, layout, has_average=has_average))
    other = perceptron(other_precision, other_layout, has_average=other_has_average)
    lockstep, expected = Lockstep(other), resharded(other, source)
    with TemporaryDirectory() as folder:
        source.save(f"{folder}/saved")
        with noting(is_expected=has_average != other_has_average):
            lockstep.load(f"{folder}/saved")
    before = source.full_state()
    for (flat, quantity), values in lockstep.full_state().items():
        value = saved(before, flat, quantity)
        assert value is not None
        assert torch.equal(values, value.to(values.dtype)), (flat, quantity)
    for batches in random_batches(2, other.mesh.world_size, seed=4):
        losses, expected_losses = (
            [float(result.loss) for result in each.step(batches)] for each in (lockstep, expected)
        )
        assert losses == expected_losses
    require_same(lockstep.full_state(), expected.full_state())


@cache
def perceptron(
    precision: str, layout: tuple[int, int, int | None], *, has_average: bool
) -> Program:
    ema = 0.9 if has_average else None
    return lowered(mlp(dim=40, precision=precision, clip=0.5, ema=ema), *layout)


def noting(*, is_expected: bool) -> AbstractContextManager[object]:
    return (
        pytest.warns(CheckpointWarning, match="moving averages") if is_expected else nullcontext()
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon in groups", "shampoo, otherwise", "adafactor", "lion"])
def test_states_of_whole_parameters_come_back(tmp_path: Path, name: str) -> None:
    logical = traced(MODEL, **CHOICES[name])
    batch = load_model_file(MODEL).batch()
    programs = [
        proved_for(
            logical, make_options({**CHOICES[name], "stage": stage, "world_size": world_size})
        )
        for stage, world_size in ((3, 2), (1, 3))
    ]
    source, other = (Lockstep(program) for program in programs)
    source.initialise(load_model_file(MODEL).model, 0)
    for step in range(2):
        source.step([[varied(batch, step, rank)] for rank in range(2)])
    source.save(str(tmp_path / "saved"))
    other.load(str(tmp_path / "saved"))
    require_same(
        {key: t for key, t in other.full_state().items() if key[1] != "direction"},
        {key: t for key, t in source.full_state().items() if key[1] != "direction"},
    )
    # And at the same world size the run goes on as if nothing had happened.
    again = Lockstep(programs[0])
    again.load(str(tmp_path / "saved"))
    for step in range(2, 4):
        batches = [[varied(batch, step, rank)] for rank in range(2)]
        losses = [[float(r.loss) for r in each.step(batches)] for each in (source, again)]
        assert losses[0] == losses[1]
    require_same(source.full_state(), again.full_state())


TRAPS = Path(__file__).parents[1] / "support" / "models" / "traps.py"


@pytest.mark.slow
def test_buffers_and_dropout_go_on(tmp_path: Path) -> None:
    """Running statistics differ between ranks; frozen, tied and unused parameters come back, too."""
    program = proved_for(traced(TRAPS), make_options({"stage": 3, "world_size": 3}))
    model_file = load_model_file(str(TRAPS))
    source, again = Lockstep(program, seed=3), Lockstep(program, seed=4)
    source.initialise(model_file.model, 0)
    batches = [[[varied(model_file.batch(), step, rank)] for rank in range(3)] for step in range(4)]
    for step in batches[:2]:
        source.step(step)
    source.save(str(tmp_path / "saved"))
    manifest = read_manifest(str(tmp_path / "saved"))
    statistics = {b.name for b in manifest.buffers if len(b.ranks) == 1}
    assert "norm.running_mean" in statistics
    assert "norm.num_batches_tracked" not in statistics  # The ranks have one number.
    again.load(str(tmp_path / "saved"))
    for rank in range(3):
        for name, values in source.buffers(rank).items():
            if name in {binding.buffer for binding in program.module_buffers}:
                assert torch.equal(values, again.buffers(rank)[name]), name
    for step in batches[2:]:
        losses = [[float(r.loss) for r in each.step(step)] for each in (source, again)]
        assert losses[0] == losses[1]
    require_same(source.full_state(), again.full_state())


@pytest.mark.parametrize("layout", [(0, 3, None), (1, 4, 2), (2, 4, None), (3, 4, 2)])
def test_every_element_is_written_once(tmp_path: Path, layout: tuple[int, int, int | None]) -> None:
    """No tensor is empty, no two hold an element, and ranks with equal elements share the work."""
    program = lowered(mlp(dim=40, precision="fp16"), *layout)
    trained(program).save(str(tmp_path / "saved"))
    manifest = read_manifest(str(tmp_path / "saved"))
    assert len(manifest.files) == program.mesh.world_size
    numel_by_tensor = {
        (file.name, tensor.name): tensor.numel for file in manifest.files for tensor in file.tensors
    }
    assert all(numel_by_tensor.values())
    for flat in manifest.flats:
        stop = max(p.offset + torch.Size(p.shape).numel() for p in flat.parameters)
        assert {quantity.name for quantity in flat.quantities} == {
            "master",
            "exp_avg",
            "exp_avg_sq",
        }
        for quantity in flat.quantities:
            at = 0
            for piece in quantity.pieces:
                assert piece.start == at
                numel = numel_by_tensor.pop((piece.file, piece.tensor))
                assert numel == piece.stop - piece.start
                at = piece.stop
            assert at == stop
    assert not numel_by_tensor


def test_what_steps_hand_on_comes_from_the_checkpoint(tmp_path: Path) -> None:
    """A gathered copy that crosses the boundary between steps has the values of the last load, not of the last step."""
    program = lowered(mlp(), 3, 2)
    content = FlatContent(quantity=PARAM, flat="blocks.0")
    program = evaluating_what_is_handed_on(program, content)
    ((batch,), (other,)) = random_batches(1, 2)[0]
    source, lockstep = Lockstep(program), Lockstep(program)
    values = initial_flats(program, seed=1)
    source.initialise_flats(values)
    source.save(str(tmp_path / "saved"))
    lockstep.initialise_flats(initial_flats(program, seed=2))
    before = float(lockstep.evaluate([batch, other])[1].loss)
    lockstep.load(str(tmp_path / "saved"))
    after = float(lockstep.evaluate([batch, other])[1].loss)
    assert before != after == float(values["blocks.0.param"][3])


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_had_begun_goes_on_with_the_accumulating_program(
    tmp_path: Path, stage: int, *, is_weighted: bool
) -> None:
    """An engine that has not met several batches yet makes itself ready for the rest of the step."""
    weight = weight_of_values if is_weighted else None

    def accumulating() -> Program:
        return lowered(mlp(micro_steps=2, is_weighted=is_weighted), stage, 1)

    def engine_for_one_batch() -> Engine:
        program = lowered(mlp(is_weighted=is_weighted), stage, 1)
        return Engine(program, EngineSettings(weight=weight), accumulating=accumulating)

    ((first, second, third),) = random_batches(1, 1, micro_steps=3)[0]
    source = engine_for_one_batch()
    source.initialise_flats(initial_flats(source.program))
    source.micro_step(first, is_last=False)
    source.micro_step(second, is_last=False)
    source.save(tmp_path / "saved")
    source.micro_step(third)
    expected = source.update()

    engine = engine_for_one_batch()
    loaded = engine.load(tmp_path / "saved")
    assert (loaded.micro_steps, engine.step_count) == (2, 0)
    engine.micro_step(third)
    result = engine.update()
    assert (result.loss, result.weight) == (expected.loss, expected.weight)
    require_same(engine.full_state(), source.full_state())

    program = lowered(mlp(micro_steps=2, clip=0.5, is_weighted=is_weighted), stage, 1)
    other = Engine(program, EngineSettings(weight=weight))
    with pytest.warns(
        CheckpointWarning, match="after 2 micro-steps of a step: that step begins anew"
    ):
        assert other.load(tmp_path / "saved").micro_steps == 0
    other.step([first, second, third])
