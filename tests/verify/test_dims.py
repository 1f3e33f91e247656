"""Programs with dims are proved for all shapes, and damaged sizes are found, also those that fit the example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor

from examples import any_length
from tests.support.models import any_size
from tests.support.mutate_slices import SLICE_MUTATIONS
from tests.support.subjects import subject
from zeroir.api.compiling import compile_model
from zeroir.artifact.schema import SchemaError, pack, unpack
from zeroir.config.steps import MicroSteps
from zeroir.errors import BatchError
from zeroir.ir.analysis.instances import (
    SIZED_FIELDS,
    instance,
    segments_at_ends,
    sizes_in,
    with_integers,
)
from zeroir.ir.analysis.micro_batches import micro_batches_of_ops
from zeroir.ir.program import Program
from zeroir.ir.sizes import Size
from zeroir.ir.text import ParseError, parse, print_program
from zeroir.runtime.execution.batch import inputs_of, shape_of
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.declared import misdeclared
from zeroir.verify import verify
from zeroir.verify.equivalence.slices import micro_batches_of_lines

OPTIONS: dict[str, dict[str, object]] = {
    "stage 3": {"stage": 3},
    "bf16, accumulating": {"stage": 2, "precision": "bf16", "micro_steps": 2},
    "offloaded": {"stage": 1, "precision": "bf16", "offload": "optimizer"},
    "recomputed": {"stage": 3, "recompute": "*"},
    "unit by unit": {
        "stage": 3, "recompute": "*", "micro_steps": MicroSteps(count=2, order="layer"),
    },
}  # fmt: skip


@cache
def compiled(name: str) -> tuple[Program, Program]:
    program = compile_model(any_length.__file__, world_size=2, **OPTIONS[name])  # type: ignore[arg-type]
    return program.program, program.logical


@pytest.mark.parametrize(
    "name",
    [name if name == "stage 3" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS],
)
def test_a_program_with_dims_is_valid_at_every_shape(name: str) -> None:
    program, logical = compiled(name)
    assert [dim.name for dim in program.dims] == ["length", "rows"]
    for values in ({"rows": 1, "length": 2}, {"rows": 5, "length": 17}):
        assert verify(instance(program, values), instance(logical, values)).is_valid
    text = print_program(program)
    assert "i64[rows,length]" in text
    assert print_program(parse(text)) == text
    assert unpack(Program, pack(program)) == program


def test_every_size_of_a_program_is_found() -> None:
    """Fields that may hold none by their types are left out of the search."""
    program, _ = compiled(next(iter(OPTIONS)))
    expected: set[Size] = set()
    rest: list[object] = [getattr(program, name) for name in SIZED_FIELDS]
    while rest:
        value = rest.pop()
        if isinstance(value, Size):
            expected.add(value)
        elif isinstance(value, tuple):
            rest.extend(value)
        elif dataclasses.is_dataclass(value):
            rest.extend(getattr(value, field.name) for field in dataclasses.fields(value))
    assert expected == {*sizes_in(tuple(getattr(program, name) for name in SIZED_FIELDS))}


def damages(program: Program, seed: int) -> Iterator[tuple[str, Program]]:
    """Yield programs of which one size, chosen by chance, is another one."""
    rows, length = (next(d for d in program.dims if d.name == n).size for n in ("rows", "length"))
    changes: dict[str, Callable[[Size], int]] = {
        "the number at the bound": int,
        "another dim": lambda size: sum(
            c * _product([rows if d.name == "length" else length] * p for d, p in m)
            for c, m in size.terms
        ),
        "one more": lambda size: size + 1,
        "the example's": lambda size: size.at({"rows": 3, "length": 12}),
        "twice": lambda size: size * 2,
    }
    chance = Random(seed)
    sizes = list(sizes_in((program.buffers, program.segments, program.sections)))
    for what, change in changes.items():
        for _ in range(4):
            victim, seen = chance.choice(sizes), 0
            target = chance.randrange(3)

            def damaged(size: int, victim: Size = victim, target: int = target) -> int:
                nonlocal seen
                if not isinstance(size, Size) or size != victim:
                    return size
                seen += 1
                return change(size) if seen == target + 1 else size  # noqa: B023

            yield what, with_integers(program, damaged)


def _product(factors: Iterator[list[int]]) -> int:
    product = 1
    for group in factors:
        for factor in group:
            product = product * factor
    return product


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_a_size_that_is_another_one_is_found_or_changes_nothing(name: str) -> None:
    """A buffer may be larger than what it holds, for example."""
    program, logical = compiled(name)
    expected = trained(program)
    refused = 0
    for what, damaged in damages(program, seed=len(name)):
        # Opening a program compares what operators make with the types that it declares.
        if not verify(damaged, logical).is_valid or misdeclared(segments_at_ends(damaged)):
            refused += 1
            continue
        for key, value in trained(damaged).items():
            assert torch.equal(value, expected[key]), (what, key)
    assert refused >= 7


@pytest.mark.slow
def test_values_of_another_micro_batch_are_refused_or_change_nothing() -> None:
    program, logical = compiled("unit by unit")
    expected, refused = trained(program), 0
    for kind, mutation in SLICE_MUTATIONS.items():
        for seed in range(12):
            damaged = mutation(program, Random(seed))
            if damaged is None or not verify(damaged, logical).is_valid:
                refused += 1
                continue
            for key, value in trained(damaged).items():
                assert torch.equal(value, expected[key]), (kind, seed, key)
    assert refused >= 40


SECTION = """zeroir 1
mesh dp=1
dim length from=1 to=16
interleaved 2
buffer %x : f32[32] device input = value x
buffer %a : f32[length] device activation
buffer %b : f32[length] device activation
input x : f32[length] -> %x

section last_micro_step {
  alloc %a  stream=compute
  alloc %b  stream=compute
  cast %x[0:length] -> %a  stream=compute
  cast %x[16:length+16] -> %b  stream=compute
  release %a  stream=compute
  release %b  stream=compute
}
"""
AGAIN = """  alloc %a  stream=compute
  cast %x[16:length+16] -> %a  stream=compute
  release %a  stream=compute
"""


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("", "", None),
        # One place serves one micro-batch after the other.
        ("  release %b", f"{AGAIN}  release %b", None),
        ("%x[16:length+16]", "%a", None),
        ("%x[16:length+16] -> %b", "%x[16:length+16] -> %a", "works on micro-batches 0, 1 of 2"),
        ("%x[0:length] -> %a", "%b -> %a", None),
        (
            "  release %a",
            "  cast %a -> %b  stream=compute\n  release %a",
            "works on micro-batches 0, 1",
        ),
        ("cast %x[0:length] -> %a", "fill %a = 0.0", "works on no micro-batch's values"),
        ("%x[16:length+16]", "%x[8:length+8]", "works on micro-batches 0, 1 of 2"),
        ("f32[32]", "f32[length*2]", "has a slice for each micro-batch, and its size"),
        ("last_micro_step", "evaluate", "works on micro-batches 1 of 1"),
    ],
)
def test_an_op_has_the_dims_of_one_micro_batch(old: str, new: str, sentence: str | None) -> None:
    assert old in SECTION
    report = verify(parse(SECTION.replace(old, new, 1)))
    found = [finding.sentence for finding in report.findings if finding.code == "Z203"]
    assert bool(found) == (sentence is not None), found
    assert all(sentence is not None and sentence in each for each in found), found


def assert_same_micro_batches(program: Program) -> None:
    for section in program.sections:
        assert micro_batches_of_lines(program, section) == [
            set(of_op) for of_op in micro_batches_of_ops(program, section)
        ]


@pytest.mark.parametrize("name", ["stage 3", "stage 3, unit by unit", "carried", "crossing"])
def test_verifier_and_engine_find_the_same_micro_batches(name: str) -> None:
    assert_same_micro_batches(subject(name).scheduled)


@pytest.mark.slow
def test_verifier_and_engine_find_the_same_micro_batches_where_sizes_depend_on_dims() -> None:
    program, _ = compiled("unit by unit")
    assert_same_micro_batches(program)
    for seed in range(40):
        for mutation in SLICE_MUTATIONS.values():
            damaged = mutation(program, Random(seed))
            if damaged is not None:
                assert_same_micro_batches(damaged)


def trained(program: Program) -> dict[str, Tensor]:
    """Train two steps on batches of other shapes for each rank: losses and parameters."""
    lockstep = Lockstep(program, seed=1)
    lockstep.initialise(any_length.model, 1)
    streams = [any_length.batches(rank, 2, seed=5) for rank in range(2)]
    count = int(program.options.texts["micro_steps"])
    values: dict[str, Tensor] = {}
    for step in range(2):
        batches = [[next(stream) for _ in range(count)] for stream in streams]
        for rank, result in enumerate(lockstep.step(batches)):
            values[f"loss {step} of rank {rank}"] = result.loss
    return values | lockstep.full_parameters()


@pytest.mark.slow
def test_a_program_with_quotients_is_one_text_and_one_file_and_valid_at_every_shape() -> None:
    result = compile_model(any_size.__file__, world_size=2, stage=3)
    for program in (result.program, result.logical):
        text = print_program(program)
        assert "((height+1)//4)" in text
        assert print_program(parse(text)) == text
        assert parse(text) == program
        assert unpack(Program, pack(program)) == program
    for values in ({"rows": 1, "height": 5, "width": 23}, {"rows": 2, "height": 14, "width": 7}):
        logical = instance(result.logical, values)
        assert verify(instance(result.program, values), logical).is_valid
        damaged = with_integers(
            result.program,
            lambda size: size + 1 if "//16" in str(size) and "*96" in str(size) else size,
        )
        assert not verify(damaged, result.logical).is_valid


@pytest.mark.parametrize(
    "text",
    [
        *("depth*2", "length*", "12", "length^99*rows^99", "x" * 3000),
        *("(length//0)", "((length)//2", "((length//2)//2)", "(depth//2)", "((length^99+rows)//2)"),
        "(length//128)",
    ],
)
def test_a_stored_size_that_is_none_is_refused(text: str) -> None:
    from zeroir.artifact.schema import _with_numbered_sizes, _with_sizes

    stored = _with_numbered_sizes(compiled("stage 3")[0])
    with pytest.raises(SchemaError):
        _with_sizes(replace(stored, sizes=(text, *stored.sizes[1:])))


def test_a_size_that_no_model_has_is_refused_in_a_text() -> None:
    text = print_program(compiled("stage 3")[0])
    for size, fact in (("rows^99", "more than"), ("9*" * 20_000 + "rows", "expected a size")):
        with pytest.raises(ParseError, match=fact):
            parse(text.replace("i64[rows,", f"i64[{size},", 1))


def test_a_batch_is_compared_with_sizes_of_several_dims() -> None:
    program = compiled("stage 3")[0]
    rows, length = (dim.size for dim in sorted(program.dims, key=lambda dim: dim.name)[::-1])
    ids, labels = program.inputs
    flat = replace(program, inputs=(ids, replace(labels, shape=(rows * length,))))
    tokens = any_length.batch_of(3, 12)
    assert shape_of(flat, tokens) == (12, 3)
    inputs_of(flat, {**tokens, "labels": tokens["labels"].flatten()})
    with pytest.raises(BatchError, match="labels"):
        inputs_of(flat, {**tokens, "labels": tokens["labels"].flatten()[1:]})


PROGRAM_WITH_A_PLACE = """
zeroir 1
mesh dp=2
comm gather axis=dp
dim length from=2 to=22
buffer %tokens : i64[length] device input = value tokens
buffer %table : f32[256] device scalar = value table
input tokens : i64[length] -> %tokens

section evaluate {{
  fill %table[{start}:{stop}] = 0.0  stream=compute
}}
"""


@pytest.mark.parametrize(
    ("start", "stop", "is_inside"),
    [
        ("-length+64", "-length+65", True),
        ("length^2-length*24+140", "length^2-length*24+141", False),
        ("-length^2+length*24+112", "-length^2+length*24+113", False),
    ],
)
def test_a_place_that_moves_back_where_a_dim_grows_is_inside_for_all_values(
    start: str, stop: str, is_inside: bool
) -> None:
    """All are inside for the largest and the smallest length."""
    program = parse(PROGRAM_WITH_A_PLACE.format(start=start, stop=stop))
    for values in ({"length": 2}, {"length": 22}):
        assert "Z003" not in str(verify(instance(program, values)))
    assert ("Z203" in str(verify(program))) != is_inside
