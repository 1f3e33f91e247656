"""Notes on offload options that have no effect on a program."""

from __future__ import annotations

import warnings

from zeroir.config import CompileOptions
from zeroir.config.offload_places import ACTIVATIONS, GRADIENTS, OPTIMIZER
from zeroir.errors import OffloadWarning
from zeroir.ir import ops
from zeroir.ir.buffers import Role, Space
from zeroir.ir.byte_sizes import format_bytes
from zeroir.ir.program import Program
from zeroir.ir.update_ops import ParameterStep


def warn_of_idle_offload(program: Program, options: CompileOptions) -> None:
    """Warn of each offload option that has no effect on a scheduled program."""
    for sentence in idle_offload(program, options):
        warnings.warn(sentence, OffloadWarning, stacklevel=3)


def idle_offload(program: Program, options: CompileOptions) -> tuple[str, ...]:
    """Return a sentence on each offload option that has no effect on a scheduled program, with the reason."""
    sentences: list[str] = []
    offload = options.offload
    if offload.page_optimizer is not None and not _roles_in(program, Space.DEVICE) & {Role.PAGE}:
        sentences.append(
            f"--page-optimizer {offload.page_optimizer} has no effect: {_why_no_pages(program)}."
        )
    outside = _roles_in(program, Space.HOST, Space.DISK)
    is_moved = {
        OPTIMIZER: _is_updated_on_host(program),
        GRADIENTS: Role.GRAD in outside,
        ACTIVATIONS: Role.SAVED in outside,
    }
    reasons = {
        OPTIMIZER: "nothing is trained in these units",
        GRADIENTS: "nothing is trained in these units",
        ACTIVATIONS: _why_no_activations(program),
    }
    sentences += [
        f"--offload {kind} has no effect: {reasons[kind]}."
        for kind in offload.what
        if not is_moved.get(kind, True)
    ]
    return tuple(sentences)


def _roles_in(program: Program, *spaces: Space) -> set[Role]:
    return {buffer.role for buffer in program.buffers if buffer.space in spaces}


def _is_updated_on_host(program: Program) -> bool:
    steps = (op for op in program.ops() if isinstance(op, ParameterStep))
    return any(program.buffer_by_name[op.param.buffer].space is Space.HOST for op in steps)


def _why_no_pages(program: Program) -> str:
    states = sum(buffer.size_bytes for buffer in program.buffers if buffer.role is Role.STATE)
    if not states:
        return "the optimizer keeps no states"
    return f"all states, {format_bytes(states)} on each rank, stay on the device"


def _why_no_activations(program: Program) -> str:
    units = {op.unit for op in program.step_ops() if isinstance(op, ops.Compute)}
    if len(units) == 1:
        return "the model is one unit, so no other unit computes while a value is away"
    return "no value of 64 KiB or more is away while two other units compute"
