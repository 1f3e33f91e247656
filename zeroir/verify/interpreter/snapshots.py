"""Section ``save``: it copies the whole training state to snapshots, and changes nothing else.

The state is everything that the next step starts with and the host does not provide: for each flat its master weights,
or the parameters where it has none; optimizer states and averages; step counts and loss scales; and the module buffers
that a section writes. ``exits`` proves that each snapshot has the declared contents, and ``ordering`` that nothing
overwrites its source before the copy is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Buffer, Region, Role, Space, copied_region, whole
from zeroir.ir.contents import DIRECTION, GRAD, MASTER, PARAM, FlatContent, SnapshotContent
from zeroir.ir.program import SAVE, Program
from zeroir.verify.context import Findings, spell, title
from zeroir.verify.interpreter.intervals import IntervalMap
from zeroir.verify.structure.regions import region_problem


def check_snapshots(program: Program, findings: Findings) -> None:
    """Check the declarations of snapshots, their users, and that together they cover the whole state."""
    snapshots: dict[str, Buffer] = {}
    for buffer in program.buffers:
        if not isinstance(buffer.holds, SnapshotContent):
            continue
        snapshots[buffer.name] = buffer
        problem = _declared_problem(program, buffer, buffer.holds)
        if problem is not None:
            code, sentence = problem
            findings.add(code, f"buffer %{buffer.name} {sentence}", buffers=(buffer.name,))
    if findings.items:
        return
    _check_users(program, snapshots, findings)
    if SAVE in program.section_by_name:
        copied = {
            content.buffer: copied_region(content)
            for content in (buffer.holds for buffer in snapshots.values())
            if isinstance(content, SnapshotContent)
        }
        for name, what in _missing(program, copied):
            findings.add("Z407", f"no snapshot is a copy of {what} %{name}", buffers=(name,))
    elif snapshots:
        findings.add(
            "Z008", f"%{min(snapshots)} is a snapshot, but the program has no section {SAVE}"
        )


def _declared_problem(
    program: Program, buffer: Buffer, content: SnapshotContent
) -> tuple[str, str] | None:
    """Return why a buffer cannot be a snapshot of the region that it names."""
    region = copied_region(content)
    problem = region_problem(program, region)
    if problem is not None:
        return problem[0], f"is a copy of what does not exist: {problem[1]}"
    source, where = program.buffer_by_name[region.buffer], spell(region, program)
    if not source.is_persistent or source.role is Role.SNAPSHOT:
        return "Z008", f"is a snapshot of {where}, which has no content between sections to save"
    numel = region.local_numel(program.mesh)
    if (buffer.space, buffer.dtype, buffer.numel) != (Space.HOST, source.dtype, numel):
        is_now = f"is {buffer.dtype}[{buffer.numel}] on {buffer.space}"
        return "Z008", f"{is_now}, but {where} needs {source.dtype}[{numel}] on {Space.HOST}"
    if (region.offset, region.numel) != (0, source.numel):
        return "Z008", f"is a snapshot of {where}, a part of a buffer"
    if region.shard is not None and not _is_alike(source, region.shard):
        return "Z407", f"is a snapshot of {where}, but ranks along {region.shard} differ in it"
    section = program.section_by_name.get(SAVE)
    pending = () if section is None else (pending.event for pending in section.exit.pending)
    if content.event is not None and content.event not in pending:
        return "Z008", f"is complete after !{content.event}, which is not pending after {SAVE}"
    return None


def _is_alike(buffer: Buffer, axis: str) -> bool:
    """Return whether the ranks along an axis have the same elements in a buffer at rest."""
    return isinstance(buffer.holds, FlatContent) and buffer.holds.shard != axis


def _check_users(program: Program, snapshots: Mapping[str, Buffer], findings: Findings) -> None:
    """Check that only section ``save`` writes snapshots, nothing reads them, and ``save`` does nothing else."""
    sources: dict[Region, int] = {}
    for section in program.sections:
        for line, op in enumerate(section.body):
            op_effects = effects(op)
            written = (*op_effects.writes, *op_effects.accumulates)
            if section.name == SAVE and not _is_copy(op):
                sentence = f"{title(op)} is in section {SAVE}, which only copies to snapshots"
                findings.add("Z407", sentence, section=section, line=line)
                continue
            wrong: list[str] = []
            if section.name == SAVE:
                wrong += [r.buffer for r in written if r.buffer not in snapshots]
                wrong += [r.buffer for r in op_effects.reads if r.buffer in snapshots]
            elif snapshots:
                wrong += [r.buffer for r in (*op_effects.reads, *written) if r.buffer in snapshots]
            for name in wrong:
                findings.add(
                    "Z407",
                    f"{title(op)} uses %{name}: section {SAVE} copies to snapshots, and only the host reads them",
                    section=section,
                    line=line,
                    buffers=(name,),
                )
            for region in written if section.name == SAVE else ():
                sources[region] = sources.get(region, 0) + 1
    for region, count in sources.items():
        if count > 1:
            findings.add("Z407", f"section {SAVE} writes %{region.buffer} {count} times")


def _is_copy(op: ops.Op) -> bool:
    """Return whether an op may be in ``save``: a copy from the device, the host or a disk, or a wait."""
    match op:
        case ops.Cast():
            return op.mode is ops.Mode.WRITE
        case ops.ToHost() | ops.Load() | ops.Wait():
            return True
        case _:
            return False


def _missing(program: Program, copied: Mapping[str, Region]) -> Iterator[tuple[str, str]]:
    """Yield the buffers with elements of the state that no snapshot has, and a description of each."""
    flats = [(b, b.holds) for b in program.buffers if isinstance(b.holds, FlatContent)]
    has_masters = {content.flat for _, content in flats if content.quantity == MASTER}
    held: list[tuple[Buffer, FlatContent, tuple[range, ...]]] = []
    stops: dict[tuple[str, str], int] = {}
    for buffer, content in flats:
        is_cast = content.quantity == PARAM and content.flat in has_masters
        if content.quantity not in (GRAD, DIRECTION) and not is_cast:
            elements = _elements(program, buffer, content)
            held.append((buffer, content, elements))
            key = content.flat, content.quantity
            stops[key] = max(stops.get(key, 0), elements[-1].stop)
    saved = {key: IntervalMap(stop, False) for key, stop in stops.items()}
    for buffer, content, elements in held:
        if buffer.name in copied:
            for part in elements:
                saved[content.flat, content.quantity].write(part.start, part.stop, True)
    for buffer, content, elements in held:
        values = saved[content.flat, content.quantity]
        pieces = [piece for part in elements for piece in values.read(part.start, part.stop)]
        if not all(is_saved for _, _, is_saved in pieces):
            yield buffer.name, f"{content.quantity} of flat {content.flat},"
    for name, what in _beside_flats(program):
        region = copied.get(name)
        if region is None or region != whole(program.buffer_by_name[name]):
            yield name, what


def _elements(program: Program, buffer: Buffer, content: FlatContent) -> tuple[range, ...]:
    """Return the elements of its flat that a buffer has on each coordinate of its sharding axis."""
    count = 1 if content.shard is None else program.mesh.size(content.shard)
    step = buffer.numel if content.stride is None else content.stride
    starts = (content.offset + coordinate * step for coordinate in range(count))
    return tuple(range(start, start + buffer.numel) for start in starts)


def _beside_flats(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the scalars and module buffers of the state, and a description of each."""
    named: dict[str, str] = {}
    for op in program.ops():
        match op:
            case ops.Decide():
                for region in (op.step, *op.counts):
                    named.setdefault(region.buffer, "the step count")
            case ops.UpdateScale():
                named.setdefault(op.state.buffer, "the state of the loss scale")
            case ops.Compute():
                for destination in op.destinations:
                    name = "" if destination is None else destination.view.region.buffer
                    if name and program.buffer_by_name[name].role is Role.MODULE_BUFFER:
                        named.setdefault(name, "the module buffer")
            case _:
                pass
    yield from named.items()
