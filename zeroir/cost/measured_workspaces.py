"""The memory of kernels as a profile measured it, in place of what is known of torch's own operators."""

from __future__ import annotations

from dataclasses import replace

from zeroir.cost.machine import Machine
from zeroir.ir.program import Program
from zeroir.ir.segment import Segment
from zeroir.workspace.segments import EAGER


def with_measured_workspaces(program: Program, machine: Machine) -> Program:
    """The program, whose segments declare what they took on this machine, as far as a profile has seen them.

    That holds for the kernels that the profile ran, whichever they were.
    """
    if not machine.has_workspaces:
        return program
    segments = tuple(_measured(segment, machine) for segment in program.segments)
    return replace(program, segments=segments)


def _measured(segment: Segment, machine: Machine) -> Segment:
    found = machine.segments.get(segment.digest())
    if found is None or found.workspace_bytes is None:
        return segment
    others = (pair for pair in segment.workspace_bytes if pair[0] != EAGER)
    return replace(segment, workspace_bytes=((EAGER, found.workspace_bytes), *others))
