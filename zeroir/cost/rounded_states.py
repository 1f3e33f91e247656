"""The kernels with which an update widens states of 8 bits and rounds them again, apart from the update itself.

``runtime/eight_bit/rounding.py`` runs them for each chunk of elements, one after the other. On a host compiled code
does the same (``runtime/eight_bit/rounding.cpp``).
"""

from __future__ import annotations

from typing import Final

from zeroir.ir import ops
from zeroir.ir.program import Program
from zeroir.workspace.op_scratch import CODED_CHUNK_NUMEL

_WIDENING_BYTES: Final = (1 + 4) + (4 + 4) + (4 + 4)
"""Bytes per element read and written for its codes as indices, their values, and the product with the scale."""

_ROUNDING_BYTES: Final = (4 + 4) + 4 + (4 + 4) + (4 + 4) + (4 + 4) + (4 + 4) + 9 + 5 + 3 + 2
"""The same for the absolute value, the largest one, the quotient, the upper half of the bits in two steps, its bound,
the comparison, the code, its successor, and the copy."""

_COMPILED_BYTES: Final = (1 + 4 + 4) + 4 + (4 + 4) + (4 + 4 + 4) + (4 + 4 + 1)
"""The bytes that compiled code reads and writes in caches, including tables: for widening, the largest value, the
quotients, their elements of the table, and the codes."""

_KERNELS: Final = 3 + 13
"""The kernels of one state; two of them process only the scales."""


def rounding_bytes(program: Program, op: ops.Op) -> int:
    """Return the bytes that an op reads and writes to widen its states and to round them; 0 if they have 32 bits."""
    if not isinstance(op, ops.OptimizerStep) or not op.scales:
        return 0
    numel = op.param.local_numel(program.mesh)
    return len(op.states) * numel * (_WIDENING_BYTES + _ROUNDING_BYTES)


def compiled_rounding_bytes(program: Program, op: ops.Op) -> int:
    """Return the same for compiled code on a host, all of it in caches."""
    if not isinstance(op, ops.OptimizerStep) or not op.scales:
        return 0
    return len(op.states) * op.param.local_numel(program.mesh) * _COMPILED_BYTES


def rounding_kernels(program: Program, op: ops.Op) -> int:
    """Return the number of kernels that an op launches beyond one; 0 if its states have 32 bits."""
    if not isinstance(op, ops.OptimizerStep) or not op.scales:
        return 0
    chunks = -(-op.param.local_numel(program.mesh) // CODED_CHUNK_NUMEL)
    return chunks * (len(op.states) * _KERNELS + 1) - 1
