"""Collectives agree between ranks: every rank issues the same sequence, with sizes that fit the axis."""

from __future__ import annotations

from zeroir.ir import ops
from zeroir.ir.program import Program
from zeroir.verify.context import Findings, spell, title


def check_collectives(program: Program, findings: Findings) -> None:
    """Check that each collective fits its axis: then every group of ranks agrees on it."""
    for section in program.sections:
        for line, op in enumerate(section.body):
            if not isinstance(op, ops.Collective):
                continue
            comm = program.comm_by_name[op.comm]
            sentence = _misfit(program, op, comm.ranks or program.mesh.size(comm.axis))
            if sentence is not None:
                findings.add("Z201", sentence, section=section, line=line)


def _misfit(program: Program, op: ops.CollectiveOp, size: int) -> str | None:
    if isinstance(op, ops.Broadcast) and not 0 <= op.root < size:
        return f"broadcast from rank {op.root} of an axis that has {size}"
    for pair in op.pairs:
        source = pair.source.local_numel(program.mesh)
        destination = pair.destination.local_numel(program.mesh)
        match op:
            case ops.Gather():
                wanted = source * size
            case ops.ReduceScatter():
                wanted = source // size if source % size == 0 else -1
            case _:
                wanted = source
        if destination != wanted:
            return (
                f"{title(op)} over {size} ranks takes {spell(pair.source, program)} of {source} elements "
                f"to {spell(pair.destination, program)} of {destination}"
            )
    return None
