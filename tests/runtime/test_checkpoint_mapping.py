"""Elements of buffers are found wherever the parameters stand in a checkpoint: an oracle of whole tensors by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from zeroir.checkpoint.manifest import (
    MASTER,
    Manifest,
    Origin,
    Piece,
    StoredFlat,
    StoredParameter,
    StoredQuantity,
)
from zeroir.errors import UserError
from zeroir.ir.buffers import Buffer, Role, Space
from zeroir.ir.contents import FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.layout import Parameter, layout
from zeroir.ir.mesh import Axis, Mesh
from zeroir.ir.optimizers.catalogue import OWN_STATES
from zeroir.ir.own_coordinates import extents
from zeroir.ir.program import PARAMETER_ALIGNMENT_NUMEL, Flat, Program
from zeroir.runtime.checkpoint.mapping import StoredElements, StoredParameters
from zeroir.runtime.checkpoint.parts import quantity_numel

SHAPES = st.lists(
    st.sampled_from([(), (1,), (7,), (64,), (3, 5), (16, 8), (2, 3, 4), (0, 4), (300,)]),
    min_size=1,
    max_size=8,
)
QUANTITIES = ("param", "exp_avg", *OWN_STATES)


def flats_of(parameters: list[Parameter], generator: random.Random, world_size: int) -> list[Flat]:
    """The parameters in any order, in any number of flats."""
    order = generator.sample(parameters, len(parameters))
    flats: list[Flat] = []
    while order:
        count = generator.randint(1, len(order))
        slots, numel = layout(order[:count], world_size)
        flats.append(
            Flat(
                name=f"flat{len(flats)}",
                unit="u",
                dtype=DType.F32,
                is_trainable=True,
                padded_numel=numel,
                slots=slots,
            )
        )
        order = order[count:]
    return flats


def values_of(flat: Flat, quantity: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """A number of its own for each element of each parameter, the same in every layout; zeros between them."""
    numel = max(quantity_numel(flat, quantity), flat.padded_numel)
    values = np.zeros(numel)
    for extent in extents(quantity, flat):
        first = 1 + 10_000 * int(extent.slot.name[1:])
        elements = slice(extent.offset, extent.offset + extent.numel)
        values[elements] = np.arange(first, first + extent.numel)
    return values


def stored(
    flats: list[Flat], quantity: str, generator: random.Random
) -> tuple[Manifest, dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]]:
    """A manifest whose pieces are cut anywhere, and its tensors."""
    tensors: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = {}
    stored_flats: list[StoredFlat] = []
    for flat in flats:
        values = values_of(flat, quantity)
        stop = quantity_numel(flat, quantity)
        cuts = sorted({0, stop, *(generator.randint(0, stop) for _ in range(3))})
        pieces: list[Piece] = []
        for first, last in pairwise(cuts):
            name = f"{flat.name}[{first}:{last}]"
            tensors[name] = values[first:last]
            pieces.append(Piece(file="f", tensor=name, start=first, stop=last))
        generator.shuffle(pieces)
        stored_flats.append(
            StoredFlat(
                name=flat.name,
                dtype="f32",
                is_trainable=True,
                parameters=tuple(
                    StoredParameter(
                        name=s.aliases[0] if s.aliases else s.name,
                        aliases=(s.name,) if s.aliases else (),
                        offset=s.offset,
                        shape=s.shape,
                    )
                    for s in flat.slots
                ),
                quantities=(
                    StoredQuantity(
                        name=MASTER if quantity == "param" else quantity,
                        dtype="f32",
                        pieces=tuple(pieces),
                    ),
                ),
            )
        )
    origin = Origin(zeroir="0", world_size=1, saved_at="")
    return Manifest(step=0, origin=origin, flats=tuple(stored_flats)), tensors


@given(SHAPES, st.sampled_from(QUANTITIES), st.integers(1, 5), st.randoms(use_true_random=False))
@examples(300)
def test_every_element_comes_from_its_parameter(
    shapes: list[tuple[int, ...]], quantity: str, world_size: int, generator: random.Random
) -> None:
    parameters = [
        Parameter(name=f"p{i}", shape=shape, aliases=(f"tied{i}",) if i % 3 == 1 else ())
        for i, shape in enumerate(shapes)
    ]
    manifest, tensors = stored(flats_of(parameters, generator, 1), quantity, generator)
    source = StoredParameters(manifest, "saved")
    flats = flats_of(parameters, generator, world_size)
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=world_size),)), flats=tuple(flats))
    for flat in flats:
        expected = values_of(flat, quantity)
        is_sharded = quantity in ("param", "exp_avg") and generator.random() < 0.7
        numel = flat.padded_numel // world_size if is_sharded else len(expected)
        buffer = Buffer(name="b", dtype=DType.F32, numel=numel, space=Space.DEVICE, role=Role.STATE)
        content = FlatContent(quantity=quantity, flat=flat.name, shard="dp" if is_sharded else None)
        for rank in range(world_size):
            target = np.zeros(numel)
            for elements in source.elements(program, buffer, content, rank):
                count = elements.stop - elements.start
                assert count > 0
                target[elements.offset : elements.offset + count] = tensors[elements.tensor][
                    elements.start : elements.stop
                ]
            start = rank * numel if is_sharded else 0
            assert np.array_equal(target, expected[start : start + numel])


def read(
    shapes: list[tuple[int, ...]], pieces: Callable[[int], list[Piece]]
) -> list[StoredElements]:
    """What is read of the first moments of one flat on one rank from a checkpoint with these pieces."""
    slots, numel = layout([Parameter(name=f"p{i}", shape=s) for i, s in enumerate(shapes)], 1)
    flat = Flat(
        name="a", unit="u", dtype=DType.F32, is_trainable=True, padded_numel=numel, slots=slots
    )
    manifest, _ = stored([flat], "exp_avg", random.Random(0))
    (saved,) = manifest.flats
    new = tuple(pieces(quantity_numel(flat, "exp_avg")))
    quantities = (saved.quantities[0].model_copy(update={"pieces": new}),)
    flats = (saved.model_copy(update={"quantities": quantities}),)
    source = StoredParameters(manifest.model_copy(update={"flats": flats}), "saved")
    program = Program(mesh=Mesh(axes=(Axis(name="dp", size=1),)), flats=(flat,))
    buffer = Buffer(name="b", dtype=DType.F32, numel=numel, space=Space.DEVICE, role=Role.STATE)
    content = FlatContent(quantity="exp_avg", flat="a")
    return list(source.elements(program, buffer, content, 0))


def test_parameters_that_follow_one_another_are_read_at_once() -> None:
    """With the padding between them: a flat of the same layout is one read, not one for each parameter."""
    (found,) = read([(5,)] * 6, lambda stop: [Piece(file="f", tensor="t", start=0, stop=stop)])
    last = 5 * PARAMETER_ALIGNMENT_NUMEL + 5
    assert (found.start, found.stop, found.offset) == (0, last, 0)


def test_a_manifest_that_leaves_out_elements_is_refused() -> None:
    with pytest.raises(UserError, match="has no element"):
        read([(100,)], lambda stop: [Piece(file="f", tensor="t", start=7, stop=stop)])
