"""Workspaces of segments as a profile measured them, instead of the declared bounds."""

from __future__ import annotations

from dataclasses import replace

from zeroir.cost.machine import Machine
from zeroir.ir.analysis.instances import at_largest
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Segment
from zeroir.workspace.segments import EAGER


def with_measured_workspaces(program: Program, machine: Machine) -> Program:
    """Return the program with the workspaces that a profile measured on this machine, for the segments that it ran.

    The figures apply to the kernels that the profile ran, eager or Inductor.
    """
    if not machine.has_workspaces:
        return program
    # Measurements are of segments with plain sizes, and memory is planned for the largest ones.
    segments = tuple(
        _measured(segment, plain.digest(), machine)
        for segment, plain in zip(program.segments, at_largest(program).segments, strict=True)
    )
    return replace(program, segments=segments)


def _measured(segment: Segment, digest: str, machine: Machine) -> Segment:
    measured = machine.segments.get(digest)
    if measured is None or measured.workspace_bytes is None:
        return segment
    others = (pair for pair in segment.workspace_bytes if pair[0] != EAGER)
    return replace(segment, workspace_bytes=((EAGER, measured.workspace_bytes), *others))
