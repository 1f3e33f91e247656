"""Programs whose flats are in several optimizer groups."""

from __future__ import annotations

from dataclasses import replace

from zeroir.ir import ops
from zeroir.ir.buffers import whole
from zeroir.ir.contents import NamedContent
from zeroir.ir.ops import GroupSettings, Op
from zeroir.ir.program import OptimizerGroup, Program, ScalarBinding


def in_groups(program: Program) -> Program:
    """The second parameter of each flat is in a group with another learning rate and another weight decay."""
    own: list[tuple[str, int, int]] = []
    rest: list[tuple[str, int, int]] = []
    for flat in program.flats:
        slots = sorted(flat.slots, key=lambda slot: slot.offset)
        if len(slots) == 1:
            rest.append((flat.name, 0, flat.padded_numel))
            continue
        start = slots[1].offset
        stop = slots[2].offset if len(slots) > 2 else flat.padded_numel
        rest.append((flat.name, 0, start))
        own.append((flat.name, start, stop))
        if stop < flat.padded_numel:
            rest.append((flat.name, stop, flat.padded_numel))
    (default,) = program.groups
    hyper = next(scalar.values for scalar in program.scalars if scalar.buffer == "hyper")
    names = {"lr": "lr.own", "hyper": "hyper.own"}
    extra = [
        replace(program.buffer_by_name[like], name=name, holds=NamedContent(name=name))
        for like, name in names.items()
    ]
    settings = GroupSettings(group="own", lr=whole(extra[0]), hyper=whole(extra[1]))
    grouped = {flat for flat, _, _ in own}
    homes = {
        buffer.name: flat.name
        for flat in program.flats
        for buffer in program.buffers
        if buffer.name.rpartition(".")[0] == flat.name
    }

    def told(op: Op) -> Op:
        if isinstance(op, ops.Direction | ops.OptimizerStep) and homes[op.grad.buffer] in grouped:
            return replace(op, others=(settings,))
        return op

    return replace(
        program,
        groups=(
            replace(default, intervals=tuple(rest)),
            OptimizerGroup(
                name="own",
                algorithm=default.algorithm,
                intervals=tuple(own),
                lr="lr.own",
                hyper="hyper.own",
            ),
        ),
        buffers=(*program.buffers, *extra),
        scalars=(
            *program.scalars,
            ScalarBinding(buffer="lr.own", values=(0.5,)),
            ScalarBinding(buffer="hyper.own", values=(*hyper[:-1], hyper[-1] + 0.25)),
        ),
        sections=tuple(replace(s, body=tuple(map(told, s.body))) for s in program.sections),
    )
