"""The hyper-parameters with which the steps of a program start."""

from __future__ import annotations

from collections.abc import Iterator

from zeroir.ir import ops
from zeroir.ir.optimizers.declaration import Numbers
from zeroir.ir.program import Program


def first_hyper(program: Program, op: ops.StepOp) -> Iterator[Numbers]:
    """Yield the hyper-parameters of each group of a step, by name; all are 0 in a program without their values."""
    values = {scalar.buffer: scalar.values for scalar in program.scalars}
    names = op.algorithm.hyper_names
    for settings in op.settings:
        of_buffer = values.get(settings.hyper.buffer, ())
        of_group = of_buffer[settings.hyper.offset : settings.hyper.stop]
        yield dict(zip(names, of_group or (0.0,) * len(names), strict=True))
