"""The memory of an op in addition to its buffers: the workspace of kernels, and other ops' temporary tensors.

Collectives count the copies in the dtype that is sent; NCCL also has memory of its own, which no program knows.
"""

from __future__ import annotations

from typing import Final, assert_never

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Space
from zeroir.ir.contents import FlatContent
from zeroir.ir.dtypes import DType
from zeroir.ir.eight_bit_states import blocks_numel
from zeroir.ir.ops import Mode, Op
from zeroir.ir.optimizers.declaration import StepScratch
from zeroir.ir.program import Program, Slot
from zeroir.workspace.scratch.allowance import SLACK_BYTES, product_allowance_bytes
from zeroir.workspace.segments import EAGER, eager_workspace

SQUARES_CHUNK_NUMEL: Final = 1 << 20
"""Squares are summed in pieces of this number of elements, counted from the start of a region.

So the bits depend on the region alone, and the scratch memory does not grow with it.
"""

CONVERTED_CHUNK_NUMEL: Final = 1 << 18
"""Elements that are added in another dtype are converted in pieces of this number."""

AVERAGED_CHUNK_NUMEL: Final = 1 << 20
"""Elements that one of our own optimizers, rather than a kernel of torch, updates together; they fit a cache."""

STEPPED_CHUNK_NUMEL: Final = 1 << 18
"""Elements that an optimizer of ours, rather than a kernel of torch, updates together; they fit a cache."""

CODED_CHUNK_NUMEL: Final = 1 << 20
"""The most elements whose 8-bit states are widened together: kernels on a GPU then take longer than their launches."""

CODED_CPU_CHUNK_NUMEL: Final = 1 << 18
"""The same for torch's operators on a CPU, where they fit a cache."""

CODED_THREAD_CHUNK_NUMEL: Final = 1 << 16
"""The same for each thread of compiled code on a CPU, where they fit the cache of a core."""

SPECULATED_CHUNK_NUMEL: Final = 1 << 18
"""Elements whose old values a speculative step keeps, and which it then updates, together; they fit a cache."""

_CODED_SCRATCH_BYTES: Final = 10
"""The bytes for rounding an element to codes: the upper half of its bits, a number, a code and a comparison."""

_SCALE_SCRATCH_BYTES: Final = 9
"""Two FP32 numbers and a comparison for the scale of each block."""

SCALAR_BYTES: Final = 32
"""The bound for every op that decides over scalars."""


def scratch_bytes(
    program: Program, op: Op, *, kernels: str = EAGER, space: Space | None = None
) -> int:
    """Return the most bytes that an op needs at once in addition to its buffers, on any rank.

    They are in the memory of the stream's executor, the device or the host; with a ``space`` only those in that space
    count. For ops over scalars the result is a bound, ``SCALAR_BYTES``, and for ``compute`` the declaration of its
    segment for these kernels, 0 if there is none.
    """
    if space is not None and scratch_space(program, op) is not space:
        return 0
    match op:
        case ops.Compute():
            return dict(program.segment_by_name[op.segment].workspace_bytes).get(kernels, 0)
        case ops.GradNorm():
            return max((_squares_bytes(program, source) for source in op.sources), default=0) + 4
        case ops.CheckFinite():
            return sum(_extremes_bytes(program, source) for source in op.sources) + SCALAR_BYTES
        case ops.Guess() | ops.Decide() | ops.UpdateScale() | ops.Scale():
            return SCALAR_BYTES
        case ops.Cast() if op.mode is Mode.ACCUMULATE:
            own, wanted = _dtype(program, op.source), _dtype(program, op.destination)
            numel = min(op.destination.local_numel(program.mesh), CONVERTED_CHUNK_NUMEL)
            return 0 if own is wanted else numel * wanted.itemsize_bytes
        case ops.Collective():
            return _wire_bytes(program, op)
        case ops.Memory() | ops.Wait() | ops.Elementwise() | ops.Transfer():
            return 0
        case ops.Direction():
            return _direction_bytes(program, op)
        case ops.OptimizerStep():
            return _step_bytes(program, op)
        case ops.SpeculativeStep() | ops.CommitStep():
            return _speculation_bytes(program, op)
        case ops.Average():
            chunk = 4 * min(op.average.local_numel(program.mesh), AVERAGED_CHUNK_NUMEL)
            return SCALAR_BYTES + (chunk if op.skip is None else 2 * chunk)
        case _:
            assert_never(op)


def _wire_bytes(program: Program, op: ops.CollectiveOp) -> int:
    """Return the bytes of the sources and results of a collective in the dtype that is sent, where it is another."""
    if op.wire_dtype is None:
        return 0
    converted = [
        region
        for pair in op.pairs
        for region in (pair.source, pair.destination)
        if _dtype(program, region) is not op.wire_dtype
    ]
    numel = sum(region.local_numel(program.mesh) for region in converted)
    return numel * op.wire_dtype.itemsize_bytes


def weighing_bytes(program: Program) -> int:
    """Return the most bytes that the weight of a batch needs before a micro-step, where the program computes it."""
    segment = program.weighing_segment
    return 0 if segment is None else int(eager_workspace(segment).most_bytes)


def scratch_space(program: Program, op: Op) -> Space:
    """Return the memory of an op's scratch: the device's on a stream of the device, the host's on any other."""
    return Space.HOST if effects(op).stream in program.streams_off_device else Space.DEVICE


def _direction_bytes(program: Program, op: ops.Direction) -> int:
    """Return the bytes of a chunk of new states, where the old ones may have to be kept."""
    if op.skip is None or not op.states:
        return SCALAR_BYTES
    return SCALAR_BYTES + 4 * min(op.grad.local_numel(program.mesh), STEPPED_CHUNK_NUMEL)


def _step_bytes(program: Program, op: ops.OptimizerStep) -> int:
    """Return the bytes of an optimizer step: none for torch's fused kernels, a bound for the others."""
    declaration = op.algorithm.declaration
    if declaration.whole is not None:
        scratch = (declaration.whole.scratch(slot.shape) for slot in _slots(program, op))
        chunk_bytes = _chunk_bytes(program, op.param, _APPLIED_NUMBERS)
        return max(map(_parameter_bytes, scratch), default=0) + chunk_bytes
    chunk_bytes = _chunk_bytes(program, op.param, declaration.scratch_numbers)
    if op.scales:
        return _codes_bytes(program, op, chunk_bytes)
    return chunk_bytes + SCALAR_BYTES if chunk_bytes else 0


_APPLIED_NUMBERS: Final = 2
"""FP32 numbers for each element of a chunk in which an update on whole parameters is applied."""


def _chunk_bytes(program: Program, param: Region, numbers: int) -> int:
    """Return the bytes of so many FP32 numbers for each element of a chunk of our own optimizers."""
    return 4 * numbers * min(param.local_numel(program.mesh), STEPPED_CHUNK_NUMEL)


def _parameter_bytes(scratch: StepScratch) -> int:
    """Return the bytes of the step of one parameter, including a library's part."""
    product = scratch.product
    library_bytes = SLACK_BYTES if product is None else product_allowance_bytes(*product)
    return scratch.own_bytes + library_bytes + SCALAR_BYTES


def _speculation_bytes(program: Program, op: ops.SpeculativeStep | ops.CommitStep) -> int:
    """Return the bytes of a chunk of the gradient in FP32, and of the step of a chunk."""
    gradient = 4 * min(op.param.local_numel(program.mesh), SPECULATED_CHUNK_NUMEL)
    numbers = op.algorithm.declaration.scratch_numbers
    own = _chunk_bytes(program, op.param, numbers) + SCALAR_BYTES if numbers else 0
    return gradient + own


def _codes_bytes(program: Program, op: ops.OptimizerStep, update_bytes: int) -> int:
    """Return the bytes of one chunk: its widened states, rounding, and the update or the new scales and their zeros.

    On a CPU it is a bound: chunks are smaller there, and compiled code rounds without scratch memory.
    """
    numel = min(op.param.local_numel(program.mesh), CODED_CHUNK_NUMEL)
    of_elements = numel * (4 * len(op.states) + _CODED_SCRATCH_BYTES)
    return (
        of_elements + max(update_bytes, _SCALE_SCRATCH_BYTES * blocks_numel(numel)) + SCALAR_BYTES
    )


def _slots(program: Program, op: ops.OptimizerStep) -> tuple[Slot, ...]:
    """Return the parameters of the flat that a step on whole parameters updates."""
    param = program.at_rest(op.param)
    holds = None if param is None else program.buffer_by_name[param.buffer].holds
    return program.flat_by_name[holds.flat].slots if isinstance(holds, FlatContent) else ()


def _dtype(program: Program, region: Region) -> DType:
    return program.buffer_by_name[region.buffer].dtype


def _squares_bytes(program: Program, source: Region) -> int:
    """Return the bytes of the squares of one piece, in FP32, and their sum."""
    numel = min(source.local_numel(program.mesh), SQUARES_CHUNK_NUMEL)
    converted = 0 if _dtype(program, source) is DType.F32 else 4 * numel
    return 4 * numel + max(converted, 4)


def _extremes_bytes(program: Program, source: Region) -> int:
    """Return the bytes of the smallest and the largest element, stacked with others', and of the finiteness test."""
    return 2 * (_dtype(program, source).itemsize_bytes + 11)
