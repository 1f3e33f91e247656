"""What is saved comes back: at every stage, mesh and precision, for every optimizer, and otherwise a sentence."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    OptimizerStateType,
    StateDictOptions,
    set_optimizer_state_dict,
)

from tests.numerics.test_whole_parameters import CHOICES, MODEL
from tests.runtime.constructors import Mlp
from tests.runtime.support import initial_flats, lowered, random_batches
from tests.runtime.workers_cases import varied, weight_of_values
from tests.support.eager import traced
from tests.support.examples import examples
from tests.support.groups import in_groups
from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.checkpoint.manifest import MASTER
from zeroir.checkpoint.reading import read_manifest
from zeroir.config import make_options
from zeroir.errors import CheckpointWarning, UserError
from zeroir.frontend.entry import load_model_file
from zeroir.ir import ops
from zeroir.ir.buffers import Buffer, Region, Role, Space, whole
from zeroir.ir.contents import EMA, PARAM, FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.program import EVALUATE, Holding, Program, Section, State
from zeroir.passes.pipelines import lower
from zeroir.passes.save_state import SaveState
from zeroir.runtime.checkpoint import loading, saving
from zeroir.runtime.engine import Engine
from zeroir.runtime.lockstep import Lockstep

Values = Mapping[tuple[str, str], Tensor]
LAYOUTS = st.sampled_from(
    [(stage, world, None) for stage in range(4) for world in (1, 2, 3, 4, 5, 7)]
    + [(stage, 4, 2) for stage in range(4)]
    + [(3, 6, 3)]
)
"""Stage, world size and replicas."""
PRECISIONS = st.sampled_from(["fp32", "bf16", "fp16"])


def trained(program: Program, steps: int = 2) -> Lockstep:
    lockstep = Lockstep(program)
    lockstep.initialise_flats(initial_flats(program))
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
    ema, other_ema = (0.9 if has else None for has in (has_average, other_has_average))
    source = trained(lowered(mlp(dim=40, precision=precision, clip=0.5, ema=ema), *layout))
    other = lowered(mlp(dim=40, precision=other_precision, clip=0.5, ema=other_ema), *other_layout)
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


def noting(*, is_expected: bool) -> AbstractContextManager[object]:
    return (
        pytest.warns(CheckpointWarning, match="moving averages") if is_expected else nullcontext()
    )


def require_same(state: Values, expected: Values) -> None:
    assert state.keys() == expected.keys()
    for key, values in state.items():
        assert torch.equal(values, expected[key]), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon in groups", "shampoo, otherwise", "adafactor", "lion"])
def test_states_of_whole_parameters_come_back(tmp_path: Path, name: str) -> None:
    logical = traced(MODEL, **CHOICES[name])
    batch = load_model_file(MODEL).batch()
    programs = [
        lower(logical, make_options({**CHOICES[name], "stage": stage, "world_size": world_size}))
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
    program = lower(traced(TRAPS), make_options({"stage": 3, "world_size": 3}))
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
    """A gathered copy that crosses the joint between steps has the values of the last load, not of the last step."""
    program = lowered(mlp(), 3, 2)
    numel = program.flat_by_name["blocks.0"].padded_numel
    gathered = Buffer(
        name="gathered", dtype=DType.F32, numel=numel, space=Space.DEVICE, role=Role.GATHERED
    )
    content = FlatContent(quantity=PARAM, flat="blocks.0")
    state = State(
        live=(gathered.name,), holdings=(Holding(region=whole(gathered), content=content),)
    )
    body = (
        ops.Cast(
            source=Region(buffer=gathered.name, offset=3, numel=1),
            destination=Region(buffer="loss", offset=0, numel=1),
            stream="compute",
        ),
    )
    program = replace(
        program,
        buffers=(*program.buffers, gathered),
        sections=(Section(name=EVALUATE, entry=state, body=body, exit=state),),
        eval_loss="loss",
    )
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
        return Engine(program, accumulating=accumulating, weight=weight)

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
    other = Engine(program, weight=weight)
    with pytest.warns(
        CheckpointWarning, match="after 2 micro-steps of a step: that step begins anew"
    ):
        assert other.load(tmp_path / "saved").micro_steps == 0
    other.step([first, second, third])


# ---------------------------------------------------------------------------------------------------------- refusals


def engine_of(program: Program) -> Engine:
    engine = Engine(program)
    engine.initialise_flats(initial_flats(program))
    engine.step(random_batches(1, 1)[0][0])
    return engine


def saved_by(program: Program, folder: Path) -> Path:
    engine = engine_of(program)
    engine.save(folder / "saved")
    engine.close()
    return folder / "saved"


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (mlp(blocks=4), "has no parameter 'blocks.3.weight' (names like it are"),
        (mlp(blocks=2), "has a parameter 'blocks.2.weight', which the program lacks"),
        (mlp(features=7), "'pre.weight' has the shape [8, 6] in"),
        (mlp(optimizer="lion"), "was trained by adamw, and the program trains it by lion"),
        (mlp(optimizer="momentum"), "or load the weights alone (weights_only=True)"),
        (mlp(optimizer="sgd"), "compile the program with the optimizer of the checkpoint"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    tmp_path: Path, program: Program, message: str
) -> None:
    path = saved_by(lowered(mlp(), 2, 1), tmp_path)
    engine = Engine(lowered(program, 0, 1))
    engine.initialise_flats(initial_flats(program))
    before = {key: values.clone() for key, values in engine.full_state().items()}
    with pytest.raises(UserError) as refusal:
        engine.load(path)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert engine.step_count == 0
    require_same(engine.full_state(), before)


def test_a_damaged_file_is_refused_before_anything_changes(tmp_path: Path) -> None:
    path = saved_by(lowered(mlp(), 0, 1), tmp_path)
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.chmod(0o600)
    file.write_bytes(data)
    engine = engine_of(lowered(mlp(), 3, 1))
    before = {key: values.clone() for key, values in engine.full_state().items()}
    with pytest.raises(UserError, match=r"rank-00000\.safetensors"):
        engine.load(path)
    require_same(engine.full_state(), before)
    engine.step(random_batches(1, 1)[0][0])


def test_weights_alone_begin_a_new_training(tmp_path: Path) -> None:
    source = engine_of(lowered(mlp(), 0, 1))
    source.optimizer.param_groups[0]["lr"] = 0.5
    source.save(tmp_path / "saved", shared="not loaded")
    engine = Engine(lowered(mlp(optimizer="lion"), 3, 1))
    loaded = engine.load(tmp_path / "saved", weights_only=True)
    assert (engine.step_count, loaded.shared) == (0, None)
    assert engine.optimizer.param_groups[0]["lr"] == 0.01
    for name, values in source.full_parameters().items():
        assert torch.equal(engine.full_parameters()[name], values)
    fresh = Engine(lowered(mlp(optimizer="lion"), 3, 1))
    fresh.initialise_flats(
        {f"{f}.param": t for (f, q), t in source.full_state().items() if q == "param"}
    )
    batch = random_batches(1, 1)[0][0]
    assert engine.step(batch).loss == fresh.step(batch).loss
    require_same(engine.full_state(), fresh.full_state())


def test_a_checkpoint_of_weights_says_that_the_optimizer_begins_anew(tmp_path: Path) -> None:
    """As an import has it: one flat for each parameter, and no groups."""
    path = saved_by(lowered(mlp(), 0, 1), tmp_path)
    manifest = read_manifest(str(path))
    flats = tuple(
        flat.model_copy(
            update={"quantities": tuple(q for q in flat.quantities if q.name == MASTER)}
        )
        for flat in manifest.flats
    )
    weights = manifest.model_copy(update={"flats": flats, "groups": (), "scalars": ()})
    with patch.object(loading, "read_manifest", lambda _: weights):
        engine = Engine(lowered(mlp(), 2, 1))
        with pytest.warns(CheckpointWarning, match="has weights alone: the optimizer begins anew"):
            loaded = engine.load(path)
    assert loaded.notes == ("has weights alone: the optimizer begins anew",)
    state = engine.full_state()
    assert not any(values.any() for (_, quantity), values in state.items() if quantity == "exp_avg")


def test_settings_of_groups_come_back_by_name(tmp_path: Path) -> None:
    source = engine_of(lowered(in_groups(mlp()), 1, 1))
    default, own = source.optimizer.param_groups
    own |= {"lr": 0.25, "betas": (0.5, 0.75), "initial_lr": 0.125}
    default["lr"] = 0.0625
    source.save(tmp_path / "saved")

    engine = Engine(lowered(in_groups(mlp()), 3, 1))
    engine.load(tmp_path / "saved")
    for group, expected in zip(engine.optimizer.param_groups, (default, own), strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in expected.items() if k != "params"
        }
    batch = random_batches(1, 1, seed=3)[0][0]
    assert engine.step(batch).loss == source.step(batch).loss
    require_same(
        {key: t for key, t in engine.full_state().items() if key[1] == "exp_avg"},
        {key: t for key, t in source.full_state().items() if key[1] == "exp_avg"},
    )

    alone = Engine(lowered(mlp(), 3, 1))
    alone.load(tmp_path / "saved")
    assert alone.optimizer.param_groups[0]["lr"] == 0.0625
    alone.save(tmp_path / "alone")
    with pytest.warns(CheckpointWarning, match="no settings for the optimizer's group own"):
        Engine(lowered(in_groups(mlp()), 3, 1)).load(tmp_path / "alone")


def test_a_running_engine_goes_back(tmp_path: Path) -> None:
    """Settings that were written before count again after the load."""
    engine = engine_of(lowered(mlp(precision="fp16", clip=0.5, ema=0.5), 2, 1))
    engine.optimizer.param_groups[0] |= {"lr": 0.25, "betas": (0.5, 0.75)}
    batches = [step[0][0] for step in random_batches(3, 1, seed=6)]
    engine.step(batches[0])
    engine.save(tmp_path / "saved")
    losses = [engine.step(batch).loss for batch in batches]
    expected = {key: values.clone() for key, values in engine.full_state().items()}
    assert engine.load(tmp_path / "saved").step == engine.step_count == 2
    assert [engine.step(batch).loss for batch in batches] == losses
    require_same(engine.full_state(), expected)


# --------------------------------------------------------------------------------------------------- in the background


@contextmanager
def slow_writes() -> Iterator[threading.Event]:
    """Saves in the body write no file before the event is set."""
    go_on = threading.Event()
    write = saving.RankSave.write

    def slow(
        self: saving.RankSave, assignment: saving.Assignment, offer: saving.Offer
    ) -> saving.Written:
        assert go_on.wait(30)
        return write(self, assignment, offer)

    with patch.object(saving.RankSave, "write", slow):
        yield go_on


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    program = applied(lowered(mlp(), 3, 1), (SaveState(),))
    engine = engine_of(program)
    expected = {key: values.clone() for key, values in engine.full_state().items()}
    with slow_writes() as go_on:
        first = engine.save(tmp_path / "first", wait=False)
        engine.step(random_batches(1, 1)[0][0])
        assert not first.is_done
        threading.Timer(0.1, go_on.set).start()
        engine.save(tmp_path / "second")
        first.wait()
    # Training went on meanwhile, and the first checkpoint has what was there when it began.
    loaded = Engine(program)
    assert loaded.load(tmp_path / "first").step == 1
    require_same(loaded.full_state(), expected)
    assert loaded.load(tmp_path / "second").step == 2
    require_same(loaded.full_state(), engine.full_state())


def test_a_save_outlives_the_program_that_began_it(tmp_path: Path) -> None:
    """A step of several batches needs another program: its engine takes the place of the one that is being saved."""
    save_state = (SaveState(),)
    engine = Engine(
        applied(lowered(mlp(), 3, 1), save_state),
        accumulating=lambda: applied(lowered(mlp(micro_steps=2), 3, 1), save_state),
    )
    engine.initialise_flats(initial_flats(mlp()))
    (first,), (second,) = random_batches(2, 1, micro_steps=2)
    engine.step(first[0])
    expected = {key: values.clone() for key, values in engine.full_state().items()}
    with slow_writes() as go_on:
        engine.save(tmp_path / "first", wait=False)
        engine.step(second)
        go_on.set()
        engine.save(tmp_path / "second", wait=False).wait()
    again = Engine(lowered(mlp(), 0, 1))
    again.load(tmp_path / "first")
    require_same(again.full_state(), expected)
    again.load(tmp_path / "second")
    require_same(again.full_state(), engine.full_state())


def test_closing_waits_for_the_save_under_way(tmp_path: Path) -> None:
    engine = engine_of(applied(lowered(mlp(), 0, 1), (SaveState(),)))
    engine.save(tmp_path / "saved", wait=False, metrics={"loss": 2.5}, read_back=True)
    engine.close()
    assert read_manifest(str(tmp_path / "saved")).metrics == {"loss": 2.5}


def test_a_program_without_the_section_saves_while_training_waits(tmp_path: Path) -> None:
    engine = engine_of(lowered(mlp(), 0, 1))
    with pytest.raises(UserError, match="section `save`"):
        engine.save(tmp_path / "saved", wait=False)
    engine.save(tmp_path / "saved")


def test_state_that_cannot_be_saved_leaves_nothing(tmp_path: Path) -> None:
    engine = engine_of(lowered(mlp(), 0, 1))
    with pytest.raises(UserError, match="which a checkpoint cannot hold"):
        engine.save(tmp_path / "saved", state={"loader": threading.Event()})
    assert not list(tmp_path.iterdir())
    engine.save(tmp_path / "saved", state={"seen": 3, "order": torch.arange(5)})
    loaded = engine.load(tmp_path / "saved")
    state = loaded.state
    assert isinstance(state, dict)
    assert state["seen"] == 3
    assert torch.equal(state["order"], torch.arange(5))


# ------------------------------------------------------------------------------------------------- state dictionaries


@pytest.mark.parametrize("stage", range(4))
def test_the_state_dict_is_that_of_the_module(stage: int) -> None:
    engine = Engine(lowered(mlp(precision="bf16"), stage, 1))
    module = Mlp()
    engine.initialise(module, keep_module=True)
    expected = module.state_dict()
    state = engine.state_dict()
    assert list(state) == list(expected)
    for name, values in expected.items():
        assert torch.equal(state[name], values)
    engine.step(random_batches(1, 1)[0][0])
    module.load_state_dict(engine.state_dict())
    for name, values in engine.full_parameters().items():
        assert torch.equal(module.get_parameter(name), values)


def test_a_state_dict_is_taken_over() -> None:
    """The next step computes with the new weights alone, whatever the last one has left for it."""
    program = lowered(mlp(), 3, 1)
    engine = engine_of(program)
    torch.manual_seed(1)
    weights = Mlp().state_dict()
    assert engine.load_state_dict(weights) == ([], [])
    for name, values in engine.state_dict().items():
        assert torch.equal(values, weights[name])
    again = engine_of(program)
    missing, unknown = again.load_state_dict({"post.weight": weights["post.weight"]}, strict=False)
    assert len(missing) == 7
    assert unknown == []
    again.load_state_dict(weights)
    batch = random_batches(1, 1, seed=8)[0][0]
    assert engine.step(batch).loss == again.step(batch).loss


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"post.wieght": torch.zeros(6, 8)},
            "has 'post.wieght', which the model lacks (names like",
        ),
        ({"post.weight": torch.zeros(6, 9)}, "'post.weight' has the shape [6, 9], but [6, 8]"),
        ({}, "lacks 'pre.weight'"),
    ],
)
def test_a_state_dict_of_another_model_changes_nothing(
    change: dict[str, Tensor], message: str
) -> None:
    engine = engine_of(lowered(mlp(), 2, 1))
    before = {key: values.clone() for key, values in engine.full_state().items()}
    state = {**Mlp().state_dict(), **change} if change else {}
    with pytest.raises(UserError) as refusal:
        engine.load_state_dict(state)
    assert message in str(refusal.value)
    require_same(engine.full_state(), before)


def test_the_optimizer_state_is_that_of_torch() -> None:
    """A torch optimizer that loads it takes the same next step."""
    program = lowered(mlp(), 3, 1)
    engine = engine_of(program)
    module = Mlp()
    module.load_state_dict(engine.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.01)
    set_optimizer_state_dict(
        module,
        optimizer,
        optim_state_dict=cast("OptimizerStateType", engine.optimizer_state_dict()),
        options=StateDictOptions(full_state_dict=True),
    )
    for group in optimizer.param_groups:
        assert group["lr"] == 0.01
    for name, parameter in module.named_parameters():
        own = optimizer.state[parameter]
        (flat,) = (f for f in program.flats if any(s.name == name for s in f.slots))
        (slot,) = (s for s in flat.slots if s.name == name)
        for quantity in ("exp_avg", "exp_avg_sq"):
            whole = engine.full_state()[flat.name, quantity]
            values = whole[slot.offset : slot.offset + slot.numel].view(slot.shape)
            assert torch.equal(own[quantity], values)
        assert own["step"] == 1
