"""Properties of every logical program that the frontend emits."""

import math
from functools import cache
from pathlib import Path

import pytest

from tests.support.eager import traced
from zeroir.config import make_options
from zeroir.frontend import load_model_file
from zeroir.frontend.capture.capture import capture
from zeroir.frontend.lowering import tracing
from zeroir.ir.buffers import Role, contiguous_stride
from zeroir.ir.ops import Alloc, Compute, Mode, OptimizerStep, Release
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.ir.segments.segment import Segment, TensorType
from zeroir.ir.text import parse, print_program
from zeroir.verify import verify

MODELS = Path(__file__).parents[1] / "support" / "models"
GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
TRAPS = MODELS / "traps.py"
FAST = [(GPT, "fp32", 1), (TRAPS, "bf16", 3)]
SLOW = [(GPT, "fp16", 1), (GPT, "bf16", 3), (TRAPS, "fp32", 1), (TRAPS, "fp16", 1)]
CASES = [
    pytest.param(
        (path, precision, micro_steps),
        id=f"{path.stem}-{precision}-{micro_steps}",
        marks=() if (path, precision, micro_steps) in FAST else pytest.mark.slow,
    )
    for path, precision, micro_steps in FAST + SLOW
]


@cache
def program_of(path: Path, precision: str, micro_steps: int) -> Program:
    return traced(path, precision=precision, micro_steps=micro_steps, clip=1.0)


@pytest.fixture(params=CASES)
def program(request: pytest.FixtureRequest) -> Program:
    return program_of(*request.param)


def computes(program: Program) -> list[Compute]:
    body = program.section_by_name[LAST_MICRO_STEP].body
    return [op for op in body if isinstance(op, Compute)]


def is_dense(kind: TensorType) -> bool:
    order = sorted(range(len(kind.shape)), key=lambda i: (-kind.stride[i], -kind.shape[i]))
    shape = tuple(kind.shape[i] for i in order if kind.shape[i] != 1)
    stride = tuple(kind.stride[i] for i in order if kind.shape[i] != 1)
    return stride == contiguous_stride(shape)


@pytest.mark.slow
def test_the_verifier_accepts_it(program: Program) -> None:
    report = verify(program)
    assert report.is_valid, report.findings


@pytest.mark.slow
def test_its_text_parses_to_the_same_program(program: Program) -> None:
    assert parse(print_program(program)) == program


@pytest.mark.slow
def test_tracing_again_gives_the_same_program() -> None:
    options = make_options({"world_size": 1, "clip": 1.0})
    again = capture(load_model_file(str(GPT)), options.precision.dtype, options.precision.keep_fp32)
    assert tracing.program_of(again, options) == program_of(GPT, "fp32", 1)


@pytest.mark.slow
def test_temporaries_begin_and_end_once(program: Program) -> None:
    for section in program.sections:
        allocs = [op.buffer for op in section.body if isinstance(op, Alloc)]
        releases = [op.buffer for op in section.body if isinstance(op, Release)]
        assert sorted(allocs) == sorted(set(allocs))
        assert sorted(allocs) == sorted(releases)
        temporary = {buffer.name for buffer in program.buffers if not buffer.is_persistent}
        assert set(allocs) <= temporary


@pytest.mark.slow
def test_parameters_are_bound_by_name_to_their_slot(program: Program) -> None:
    for op in computes(program):
        for argument in op.arguments:
            if argument.parameter is not None:
                flat, slot = program.parameter_by_name[argument.parameter]
                region = argument.view.region
                assert region.buffer == f"{flat.name}.param"
                assert (region.offset, argument.view.shape) == (slot.offset, slot.shape)
            else:
                assert program.buffer_by_name[argument.view.region.buffer].role is not Role.PARAM


@pytest.mark.slow
def test_nothing_that_only_views_or_casts_a_parameter_is_stored(program: Program) -> None:
    for op in computes(program):
        segment = program.segment_by_name[op.segment]
        derived = {i for i, argument in enumerate(op.arguments) if argument.parameter is not None}
        index = len(segment.inputs)
        for node in segment.nodes:
            refs = [ref.index for ref in node.refs()]
            is_cheap = node.op in ("aten.t.default", "aten.view.default", "aten._to_copy.default")
            if is_cheap and set(refs) <= derived:
                derived.add(index)
            index += len(node.results)
        assert not derived.intersection(segment.outputs)


def test_each_gradient_is_written_once_and_then_accumulated(program: Program) -> None:
    modes: dict[str, list[Mode]] = {}
    for op in computes(program):
        for destination in op.destinations:
            if destination is not None and destination.gradient is not None:
                modes.setdefault(destination.gradient, []).append(destination.mode)
    trained = {slot.name for flat in program.flats if flat.is_trainable for slot in flat.slots}
    assert set(modes) == trained
    for parameter_modes in modes.values():
        assert parameter_modes == [Mode.WRITE] + [Mode.ACCUMULATE] * (len(parameter_modes) - 1)


def test_outputs_are_dense_and_no_node_is_dead(program: Program) -> None:
    for segment in program.segments:
        used = set(segment.outputs) | {ref.index for node in segment.nodes for ref in node.refs()}
        index = len(segment.inputs)
        assert set(range(index)) <= used
        for node in segment.nodes:
            assert used.intersection(range(index, index + len(node.results))), node
            index += len(node.results)
        for op in computes(program):
            if op.segment == segment.name:
                for kind, destination in zip(segment.output_types(), op.destinations, strict=True):
                    assert destination is not None
                    assert is_dense(kind) or destination.gradient is not None


def test_segments_of_equal_structure_are_shared(program: Program) -> None:
    digests = [segment.digest() for segment in program.segments]
    assert len(set(digests)) == len(digests)
    called = {op.segment for op in program.ops() if isinstance(op, Compute)}
    assert called == {s.name for s in program.segments}


def test_equal_blocks_share_their_segments() -> None:
    assert [segment.name for segment in program_of(GPT, "fp32", 1).segments] == [
        "root.pre.forward", "block.forward", "root.post.forward",
        "root.post.backward", "block.backward", "root.pre.backward",
        "root.pre.evaluate", "block.evaluate", "root.post.evaluate",
    ]  # fmt: skip
    traps = program_of(TRAPS, "bf16", 3)
    blocks = [op.segment for op in computes(traps) if op.unit.startswith("blocks")]
    assert blocks == ["block.forward"] * 4 + ["block.backward"] * 4


def test_every_flat_is_updated_unless_it_is_frozen(program: Program) -> None:
    steps = [op for op in program.section_by_name[UPDATE].body if isinstance(op, OptimizerStep)]
    updated = {op.param.buffer.rpartition(".")[0] for op in steps}
    assert updated == {flat.name for flat in program.flats if flat.is_trainable}
    for flat in program.flats:
        is_frozen = not flat.is_trainable
        assert is_frozen == (".frozen" in flat.name)
        assert (f"{flat.name}.grad" in program.buffer_by_name) == flat.is_trainable


def test_tied_and_unused_parameters_are_in_the_right_flats() -> None:
    program = program_of(TRAPS, "bf16", 3)
    flat, slot = program.parameter_by_name["head.weight"]
    assert (flat.unit, slot.name, slot.aliases) == ("root.pre", "tokens.weight", ("head.weight",))
    assert program.parameter_by_name["again.up.weight"][1].name == "blocks.0.up.weight"
    for name in ("unused.weight", "unused.bias", "frozen.weight"):
        assert not program.parameter_by_name[name][0].is_trainable
    assert program.parameter_by_name["norm.weight"][0].name == "root.post.fp32"
    bindings = {binding.name for binding in program.module_buffers if binding.data is None}
    statistics = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert bindings == {"scale", "mean", "bias"} | statistics
    assert program.buffer_by_name["rng"].numel == 4 * 2 + 2


def test_matrix_products_are_counted() -> None:
    program = program_of(GPT, "fp32", 1)
    (inputs,) = {binding.shape for binding in program.inputs}
    tokens = math.prod(inputs)
    weights = sum(
        slot.numel for flat in program.flats for slot in flat.slots
        if len(slot.shape) == 2 and slot.name != "positions.weight"
    )  # fmt: skip
    forward = sum(flops(program, op.segment) for op in computes(program) if "forward" in op.segment)
    backward = sum(
        flops(program, op.segment) for op in computes(program) if "backward" in op.segment
    )
    assert forward == 2 * tokens * weights
    assert backward == 2 * forward


def flops(program: Program, name: str) -> int:
    segment: Segment = program.segment_by_name[name]
    return sum(node.flops for node in segment.nodes if "attention" not in node.op)


def test_nodes_have_their_source_line() -> None:
    program = program_of(GPT, "fp32", 1)
    text = GPT.read_text().splitlines()
    for segment in program.segments:
        for node in segment.nodes:
            if node.source:
                name, _, line = node.source.partition(":")
                assert name == "gpt.py"
                assert text[int(line) - 1].strip()
    lines = [node.source for segment in program.segments for node in segment.nodes]
    assert sum(not line for line in lines) < 0.1 * len(lines)
