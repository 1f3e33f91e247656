"""Checks that a region exists, and that it can have a content."""

from __future__ import annotations

from dataclasses import replace

from zeroir.ir.buffers import Region
from zeroir.ir.contents import (
    DIRECTION,
    EMA,
    GRAD,
    MASTER,
    PARAM,
    Content,
    FlatContent,
    WeightContent,
)
from zeroir.ir.optimizers.catalogue import OWN_STATES
from zeroir.ir.optimizers.forms import QUANTITIES_OF_BLOCKS, block_numel
from zeroir.ir.own_coordinates import OWN_COORDINATES, own_numel
from zeroir.ir.program import (
    SHARD_ALIGNMENT_NUMEL,
    Program,
)
from zeroir.verify.context import spell


def region_problem(program: Program, region: Region) -> tuple[str, str] | None:
    """Return code and message for a region that does not exist."""
    buffer = program.buffer_by_name.get(region.buffer)
    if buffer is None:
        return "Z001", f"buffer %{region.buffer} is not declared"
    where = spell(region, program)
    if region.offset < 0 or region.numel < 0 or region.stop > buffer.numel:
        return "Z003", f"{where} is not inside %{buffer.name}, which has {buffer.numel} elements"
    return _slice_problem(program, region, where) or _part_problem(program, region, where)


def _part_problem(program: Program, region: Region, where: str) -> tuple[str, str] | None:
    if region.part is None:
        return None
    start, stop = region.part
    numel = replace(region, part=None).local_numel(program.mesh)
    if not 0 <= start <= stop <= numel:
        return "Z003", f"{where} is not inside the {numel} elements that a rank names by it"
    return None


def _slice_problem(program: Program, region: Region, where: str) -> tuple[str, str] | None:
    if region.shard is None:
        return None
    if not program.mesh.has_axis(region.shard):
        return "Z001", f"{where} is cut along the undeclared axis {region.shard}"
    size = program.mesh.size(region.shard)
    if region.numel % size:
        return (
            "Z003",
            f"{where} has {region.numel} elements, which {size} ranks cannot share equally",
        )
    return None


def content_problem(program: Program, content: Content, numel: int) -> str | None:
    """Return why a region of ``numel`` local elements cannot have the content."""
    if isinstance(content, WeightContent):
        is_on_mesh = all(program.mesh.has_axis(axis) for axis in content.reduced)
        return None if is_on_mesh else "is reduced over an undeclared axis"
    if not isinstance(content, FlatContent):
        return None
    flat = program.flat_by_name.get(content.flat)
    if flat is None:
        return f"holds elements of the undeclared flat {content.flat}"
    count = 1
    if content.shard is not None:
        if not program.mesh.has_axis(content.shard):
            return f"is cut along the undeclared axis {content.shard}"
        count = program.mesh.size(content.shard)
    if content.stride is not None:
        sentence = _stride_problem(content, content.stride, numel)
        if sentence is not None:
            return sentence
    stop = content.offset + (content.stride or numel) * (count - 1) + numel
    length = flat.padded_numel
    if content.quantity in QUANTITIES_OF_BLOCKS:
        length = -(-flat.padded_numel // block_numel(content.quantity))
    elif content.quantity in OWN_COORDINATES:
        # Shards may be padded; elements after the last one are never read.
        length = -(-own_numel(content.quantity, flat) // (count * SHARD_ALIGNMENT_NUMEL)) * (
            count * SHARD_ALIGNMENT_NUMEL
        )
    own_state = OWN_STATES.get(content.quantity)
    is_kept_whole = own_state is not None and not own_state.is_sharded
    if is_kept_whole:
        length = own_numel(content.quantity, flat)
    if content.offset < 0 or stop > length:
        return f"holds elements [{content.offset}:{stop}] of flat {flat.name}, which has {length}"
    if is_kept_whole and content.shard is not None:
        return f"holds a slice of the {content.quantity} of flat {flat.name}, which each rank keeps whole"
    if content.quantity == GRAD and content.micro is None:
        return "holds a gradient, but does not say of which micro-steps"
    if content.quantity != GRAD and (content.micro is not None or content.reduced):
        return f"gives {content.quantity} an attribute that only gradients have"
    if content.guessed and (content.quantity == GRAD or not content.version):
        return f"holds guessed {content.quantity}, but only parameters and states after a step are guessed"
    if any(not program.mesh.has_axis(axis) for axis in content.reduced):
        return "is reduced over an undeclared axis"
    if content.quantity in (GRAD, MASTER) and not flat.is_trainable:
        return f"holds {content.quantity} of the frozen flat {flat.name}"
    return None


def _stride_problem(content: FlatContent, stride: int, numel: int) -> str | None:
    """Return why a region of ``numel`` local elements cannot have parts of slices whose starts are ``stride`` apart."""
    if content.shard is None:
        return "has a stride, but is not cut along an axis"
    if content.quantity in (PARAM, MASTER, GRAD, EMA, DIRECTION, *OWN_STATES):
        return f"holds {content.quantity} with a stride, which only an optimizer state has"
    if stride <= numel:
        return f"has the stride {stride} and {numel} elements: each rank's part must be less than its slice"
    return None
