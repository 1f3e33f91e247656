"""Checkpoints of states of 8 bits: the same bytes in any layout, and FP32 states rounded or codes widened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.support import begun, lowered, random_batches
from tests.support.examples import examples
from tests.support.programs import mlp
from zeroir.checkpoint.reading import read_manifest
from zeroir.errors import CheckpointWarning
from zeroir.ir.eight_bit_states import BLOCK_NUMEL, blocks_numel, code_values
from zeroir.ir.optimizers.forms import ABSMAX, CODES, is_signed
from zeroir.ir.program import Program
from zeroir.runtime.eight_bit.rounding import Scratch, narrow
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.lockstep import Lockstep

SHAPE = (4, 20)
LAYOUTS = st.sampled_from(
    [(stage, world, None) for stage in range(4) for world in (1, 2, 3, 4)] + [(3, 4, 2)]
)
"""Stage, world size and replicas."""


def trained(program: Program, steps: int = 3) -> Lockstep:
    lockstep = begun(Lockstep(program))
    for batches in random_batches(steps, program.mesh.world_size, shape=SHAPE):
        lockstep.step(batches)
    return lockstep


def states_of(lockstep: Lockstep, program: Program) -> Mapping[tuple[str, str], Tensor]:
    """The states of each parameter, without padding: codes and scales as they are."""
    states: dict[tuple[str, str], Tensor] = {}
    whole = lockstep.full_state()
    for flat in program.flats:
        for slot in flat.slots:
            for quantity in (*CODES, *CODES.values(), *ABSMAX.values()):
                values = whole.get((flat.name, quantity))
                if values is None:
                    continue
                start, stop = slot.offset, slot.offset + slot.numel
                if quantity in ABSMAX.values():
                    start, stop = start // BLOCK_NUMEL, blocks_numel(stop)
                states[slot.name, quantity] = values[start:stop].clone()
    return states


def equal(
    first: Mapping[tuple[str, str], Tensor], second: Mapping[tuple[str, str], Tensor]
) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.slow
@given(LAYOUTS, LAYOUTS, st.sampled_from(["adamw", "lion", "momentum"]))
@examples(40)
def test_any_layout_goes_on_with_the_same_bytes(
    layout: tuple[int, int, int | None], other_layout: tuple[int, int, int | None], optimizer: str
) -> None:
    logical = mlp(dim=24, features=20, precision="bf16", optimizer=optimizer, has_codes=True)
    program, other = lowered(logical, *layout), lowered(logical, *other_layout)
    source, target = trained(program), Lockstep(other)
    with TemporaryDirectory() as folder:
        source.save(f"{folder}/saved")
        target.load(f"{folder}/saved")
        again = Lockstep(program)
        again.load(f"{folder}/saved")
    assert equal(states_of(source, program), states_of(target, other))
    for batches in random_batches(2, program.mesh.world_size, seed=4, shape=SHAPE):
        losses = [[float(r.loss) for r in each.step(batches)] for each in (source, again)]
        assert losses[0] == losses[1]
    assert equal(states_of(source, program), states_of(again, program))


def rounded(states: Mapping[tuple[str, str], Tensor]) -> Mapping[tuple[str, str], Tensor]:
    """What FP32 states are to become, parameter by parameter."""
    coded: dict[tuple[str, str], Tensor] = {}
    for (name, state), values in states.items():
        count = blocks_numel(values.numel())
        padded = torch.zeros(count * BLOCK_NUMEL)
        padded[: values.numel()] = values
        codes, scales = torch.empty(padded.numel(), dtype=torch.uint8), torch.empty(count)
        narrow(
            padded, codes, scales, Scratch(padded.numel(), codes.device), signed=is_signed(state)
        )
        coded[name, CODES[state]] = codes[: values.numel()]
        coded[name, ABSMAX[state]] = scales
    return coded


def widened(states: Mapping[tuple[str, str], Tensor]) -> Mapping[tuple[str, str], Tensor]:
    wide: dict[tuple[str, str], Tensor] = {}
    for state, quantity in CODES.items():
        table = torch.tensor(code_values(signed=is_signed(state)))
        for (name, own), codes in states.items():
            if own == quantity:
                scales = states[name, ABSMAX[state]].repeat_interleave(BLOCK_NUMEL)
                wide[name, state] = table[codes.int()] * scales[: codes.numel()]
    return wide


@pytest.mark.parametrize(
    "layouts",
    [
        ((0, 1), (3, 2)),
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (((3, 3), (2, 4)), ((1, 4), (0, 2)))
        ),
    ],
)
def test_states_of_other_bits_are_converted(
    tmp_path: Path, layouts: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    """Parameters begin elsewhere in the two programs, and FP32 shards begin within blocks."""
    (stage, world_size), (other_stage, other_world_size) = layouts
    wide = lowered(mlp(dim=24, features=20), stage, world_size)
    coded = lowered(mlp(dim=24, features=20, has_codes=True), other_stage, other_world_size)
    source, target = trained(wide), Lockstep(coded)
    source.save(str(tmp_path / "wide"))
    with pytest.warns(CheckpointWarning, match="states of 32 bits .* are rounded to 8 bits"):
        target.load(str(tmp_path / "wide"))
    assert equal(states_of(target, coded), rounded(states_of(source, wide)))
    target.save(str(tmp_path / "coded"))
    back = Lockstep(wide)
    with pytest.warns(CheckpointWarning, match="states of 8 bits .* are widened to 32 bits"):
        back.load(str(tmp_path / "coded"))
    assert equal(states_of(back, wide), widened(states_of(target, coded)))
    assert all(
        torch.equal(value, source.full_parameters()[name])
        for name, value in back.full_parameters().items()
    )


def test_a_checkpoint_has_two_bytes_for_each_parameter(tmp_path: Path) -> None:
    program = lowered(mlp(dim=256, features=64, has_codes=True), 3, 2)
    trained_program = begun(Lockstep(program))
    trained_program.save(str(tmp_path / "saved"))
    manifest = read_manifest(str(tmp_path / "saved"))
    itemsizes = {"u8": 1, "f32": 4}
    stored = sum(
        itemsizes[quantity.dtype] * (piece.stop - piece.start)
        for flat in manifest.flats
        for quantity in flat.quantities
        if quantity.name in {*CODES.values(), *ABSMAX.values()}
        for piece in quantity.pieces
    )
    assert 2 < stored / program.parameters_numel < 2.1


def test_the_state_dictionary_has_fp32_states() -> None:
    program = lowered(mlp(dim=24, features=20, has_codes=True), 0, 1)
    engine = begun(Engine(program))
    for batches in random_batches(2, 1, shape=SHAPE):
        engine.step(batches[0])
    states = cast("dict[str, dict[str, Tensor]]", engine.optimizer_state_dict()["state"])
    engine.close()
    source = begun(Lockstep(program))
    for batches in random_batches(2, 1, shape=SHAPE):
        source.step(batches)
    for (name, state), values in widened(states_of(source, program)).items():
        _, slot = program.parameter_by_name[name]
        assert torch.equal(states[name][state], values.view(slot.shape))
    assert {key for of in states.values() for key in of} == {"exp_avg", "exp_avg_sq", "step"}
