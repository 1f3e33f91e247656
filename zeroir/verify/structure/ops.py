"""Checks of each op: its names exist, its regions are inside their buffers, dtypes, sizes and spaces agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.analysis.effects import Effects, effects
from zeroir.ir.buffers import Region, Role, Space, View, contiguous_stride, span_numel
from zeroir.ir.mesh import HOST, Executor
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import TensorType
from zeroir.ir.segments.views import is_same_stride
from zeroir.verify.context import Findings, title
from zeroir.verify.structure import update_ops as update_structure
from zeroir.verify.structure.operands import OperandChecks, Problem
from zeroir.verify.structure.regions import region_problem


def check_structure(program: Program, findings: Findings) -> None:
    """Check every op of every section; several problems of one op are several findings."""
    checker = _Checker(program)
    for section in program.sections:
        # An event that is pending at the entry may be signalled again: an event that crosses one boundary may cross the
        # next.
        events: set[str] = set()
        for line, op in enumerate(section.body):
            problems = list(checker.problems(op, events))
            names = _buffers(op, program) if problems else ()
            for code, sentence in problems:
                findings.add(code, sentence, section=section, line=line, buffers=names)
        if findings.is_full:
            return


def _buffers(op: Op, program: Program) -> tuple[str, ...]:
    op_effects = effects(op)
    regions = (*op_effects.reads, *op_effects.writes, *op_effects.accumulates)
    names = (*op_effects.allocs, *op_effects.frees, *(region.buffer for region in regions))
    return tuple(name for name in dict.fromkeys(names) if name in program.buffer_by_name)


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.buffers = program.buffer_by_name
        self.executors = {stream.name: stream.executor for stream in program.streams}
        self.outputs = {s.name: s.output_types() for s in program.segments}
        self.operands = OperandChecks(program)
        self._checked: set[Region] = set()

    def problems(self, op: Op, events: set[str]) -> Iterator[Problem]:
        """Yield all problems of one op."""
        if isinstance(op, ops.Wait):
            if op.on != HOST and op.on not in self.executors:
                yield "Z001", f"wait on the undeclared stream {op.on}"
            return
        if op.stream not in self.executors:
            yield "Z001", f"{title(op)} runs on the undeclared stream {op.stream}"
        if op.event is not None:
            if op.event in events:
                yield "Z002", f"event !{op.event} is signalled twice in one section"
            events.add(op.event)
        is_sound = True
        op_effects = effects(op)
        for region in (*op_effects.reads, *op_effects.writes, *op_effects.accumulates):
            if region in self._checked:
                continue
            problem = region_problem(self.program, region)
            if problem is None:
                self._checked.add(region)
            else:
                is_sound = False
                yield problem[0], f"{title(op)}: {problem[1]}"
        if is_sound:
            yield from self._own(op)
            yield from self._apart(op, op_effects)
            yield from self._executor(op, op_effects)

    def _own(self, op: ops.IssuedOp) -> Iterator[Problem]:
        match op:
            case ops.Memory():
                buffer = self.buffers.get(op.buffer)
                if buffer is None:
                    yield "Z001", f"{title(op)} of the undeclared buffer %{op.buffer}"
                elif buffer.is_persistent:
                    yield "Z007", f"{title(op)} of the persistent buffer %{op.buffer}"
            case ops.Collective():
                yield from self._collective(op)
            case ops.Compute():
                yield from self._compute(op)
            case ops.Cast():
                yield from self._cast(op)
            case ops.Fill():
                yield from self.operands.in_memory(op, op.destination)
            case ops.Scale():
                yield from self.operands.in_memory(op, op.region, op.by)
                yield from self.operands.scalar(op, "by", op.by)
                yield from self.operands.floating(op, "multiplies", op.region)
            case ops.Update():
                yield from update_structure.problems(self.operands, op)
            case ops.Transfer():
                yield from self._transfer(op)
            case _:
                assert_never(op)

    def _executor(self, op: ops.IssuedOp, op_effects: Effects) -> Iterator[Problem]:
        """Check that the executor of the stream is the one that works on the memory of the op."""
        match op:
            case ops.Memory():
                return
            case ops.Collective() | ops.Compute():
                space = Space.DEVICE
            case ops.Transfer():
                is_of_device = Space.DEVICE in (op.from_space, op.to_space)
                space = Space.DEVICE if is_of_device else Space.HOST
            case ops.Elementwise() | ops.Update():
                # The first region, in the order of the fields, that the op writes, or else the first it accumulates.
                changed, *others = (*op_effects.writes, *op_effects.accumulates)
                space = self.operands.space(changed)
                for region in (*others, *op_effects.reads):
                    yield from self._beside(op, region, changed)
            case _:
                assert_never(op)
        executor = self.executors.get(op.stream)
        if executor is not None and (executor is Executor.DEVICE) is not (space is Space.DEVICE):
            yield (
                "Z006",
                f"{title(op)} works on {space} memory, but stream {op.stream} is carried out by the {executor}",
            )

    def _beside(self, op: ops.IssuedOp, region: Region, changed: Region) -> Iterator[Problem]:
        """Check that the regions of an op are in one space, except hyper-parameters, which the host always reads."""
        is_judged_alone = isinstance(op, ops.Cast) or (
            isinstance(op, ops.Direction | ops.OptimizerStep)
            and any(region == s.hyper for s in op.settings)
        )
        if not is_judged_alone and self.operands.space(region) is not self.operands.space(changed):
            used = f"uses {self.operands.spell(region)} in {self.operands.space(region)} memory"
            changes = (
                f"changes {self.operands.spell(changed)} in {self.operands.space(changed)} memory"
            )
            yield "Z006", f"{title(op)} {used} and {changes}"

    def _apart(self, op: Op, op_effects: Effects) -> Iterator[Problem]:
        """Check that no op reads an element that it writes, or writes one twice.

        Collectives, computes and casts have own checks.
        """
        if isinstance(op, ops.Collective | ops.Compute | ops.Cast):
            return
        written = [*op_effects.writes, *op_effects.accumulates]
        yield from self.operands.disjoint(op, written)
        for source in op_effects.reads:
            if any(source.overlaps(target) for target in written):
                yield (
                    "Z010",
                    f"{title(op)} reads {self.operands.spell(source)}, which it overwrites",
                )
                return

    def _collective(self, op: ops.CollectiveOp) -> Iterator[Problem]:
        comm = self.program.comm_by_name.get(op.comm)
        if comm is None:
            yield "Z001", f"{title(op)} uses the undeclared communicator {op.comm}"
            return
        if not op.pairs:
            yield "Z005", f"{title(op)} moves nothing: it has no pairs"
        for pair in op.pairs:
            yield from self.operands.alike(op, ("Z004",), pair.source, pair.destination)
            for region in (pair.source, pair.destination):
                if self.operands.space(region) is not Space.DEVICE:
                    yield "Z006", f"{title(op)} needs {self.operands.spell(region)} on the device"
            yield from self._in_place(op, pair, comm.axis)
        exposed = _exposed_destination(op.pairs)
        if exposed is not None:
            where = f"{self.operands.spell(exposed)} is written by one pair"
            yield "Z010", f"{title(op)}: {where} and read by another of the same launch"
        wire = op.wire_dtype
        if wire is not None:
            for pair in op.pairs:
                if wire.is_floating is not self.operands.dtype(pair.source).is_floating:
                    what = (
                        f"{self.operands.spell(pair.source)} of {self.operands.dtype(pair.source)}"
                    )
                    yield "Z004", f"{title(op)} cannot send {what} as {wire}"
        written = [pair.destination for pair in op.pairs]
        if op.staging is not None:
            written.append(op.staging)
            for pair in op.pairs:
                if pair.source.overlaps(op.staging):
                    yield (
                        "Z010",
                        f"{title(op)} stages over its own source {self.operands.spell(pair.source)}",
                    )
        yield from self.operands.disjoint(op, written)

    def _in_place(self, op: ops.CollectiveOp, pair: ops.Pair, axis: str) -> Iterator[Problem]:
        source, destination = pair.source, pair.destination
        if not source.overlaps(destination):
            return
        is_exact = source == destination
        match op:
            case ops.Gather():
                is_exact = is_exact or source == _slice(destination, axis)
            case ops.ReduceScatter():
                is_exact = is_exact or destination == _slice(source, axis)
            case _:
                pass
        if not is_exact:
            where = f"from {self.operands.spell(source)} to {self.operands.spell(destination)}"
            yield "Z010", f"{title(op)} {where} overlaps itself without working in place"

    def _compute(self, op: ops.Compute) -> Iterator[Problem]:
        segment = self.program.segment_by_name.get(op.segment)
        if segment is None:
            yield "Z001", f"compute calls the undeclared segment @{op.segment}"
            return
        outputs = self.outputs[op.segment]
        for bound, count, formal, wanted in (
            ("arguments", len(op.arguments), "inputs", len(segment.inputs)),
            ("destinations", len(op.destinations), "outputs", len(outputs)),
        ):
            if count != wanted:
                sizes = f"has {count} {bound}, the segment {wanted} {formal}"
                yield "Z005", f"compute @{op.segment} {sizes}"
                return
        for i, (argument, kind) in enumerate(zip(op.arguments, segment.inputs, strict=True)):
            yield from self._view(op, f"argument {i}", argument.view, kind)
            if argument.parameter is not None:
                yield from self._parameter(op, argument.parameter, argument.view)
        written: list[Region] = []
        added: list[Region] = []
        for i, (destination, kind) in enumerate(zip(op.destinations, outputs, strict=True)):
            if destination is None:
                continue
            yield from self._view(op, f"destination {i}", destination.view, kind)
            yield from self._filled(op, i, destination.view)
            if destination.gradient is not None:
                yield from self._parameter(op, destination.gradient, destination.view)
            is_write = destination.mode is Mode.WRITE
            if is_write:
                for earlier in added:
                    if earlier.overlaps(destination.view.region):
                        yield (
                            "Z010",
                            f"compute @{op.segment} overwrites {self.operands.spell(earlier)}, to which it has added",
                        )
            (written if is_write else added).append(destination.view.region)
        yield from self.operands.disjoint(op, written)

    def _parameter(self, op: ops.Compute, name: str, view: View) -> Iterator[Problem]:
        home = self.program.parameter_by_name.get(name)
        if home is None:
            yield "Z001", f"compute @{op.segment} names the undeclared parameter {name}"
            return
        shape = home[1].shape
        where = f"compute @{op.segment}: {self.operands.spell(view.region)}"
        if view.numel != home[1].numel or view.region.numel != home[1].numel:
            yield "Z005", f"{where} has {view.numel} elements, parameter {name} {home[1].numel}"
        elif view.shape != shape or not is_same_stride(
            shape, view.stride, contiguous_stride(shape)
        ):
            layout = f"{list(view.shape)} with strides {list(view.stride)}"
            yield (
                "Z005",
                f"{where} is used as {layout}, but parameter {name} is row-major {list(shape)}",
            )

    def _filled(self, op: ops.Compute, number: int, view: View) -> Iterator[Problem]:
        """Check that a result fills its destination: elements that it omitted would count as written."""
        where = f"compute @{op.segment}: destination {number}"
        span = span_numel(view.shape, view.stride)
        if span < view.numel:
            yield "Z005", f"{where} writes elements more than once"
        elif max(span, self.operands.numel(view.region)) > view.numel:
            left_out = max(span, self.operands.numel(view.region)) - view.numel
            yield (
                "Z005",
                f"{where} leaves {left_out} of the elements of {self.operands.spell(view.region)} unwritten",
            )

    def _view(self, op: ops.Compute, what: str, view: View, kind: TensorType) -> Iterator[Problem]:
        where = f"compute @{op.segment}: {what} {self.operands.spell(view.region)}"
        if len(view.shape) != len(view.stride):
            yield "Z005", f"{where} has {len(view.shape)} sizes and {len(view.stride)} strides"
            return
        if view.shape != kind.shape or not is_same_stride(view.shape, view.stride, kind.stride):
            wanted = f"{list(kind.shape)} with strides {list(kind.stride)}"
            layout = f"{list(view.shape)} with strides {list(view.stride)}"
            yield "Z005", f"{where} is {layout}, the segment has {wanted}"
        if self.operands.dtype(view.region) is not kind.dtype:
            yield (
                "Z004",
                f"{where} is {self.operands.dtype(view.region)}, the segment has {kind.dtype}",
            )
        if any(step < 0 for step in view.stride) or span_numel(
            view.shape, view.stride
        ) > self.operands.numel(view.region):
            yield "Z003", f"{where} does not fit its {self.operands.numel(view.region)} elements"
        # The host reads a seed when it launches the kernel, so the device does not wait for a copy.
        is_seed = (
            self.operands.role(view.region) is Role.RNG
            and self.operands.space(view.region) is Space.HOST
        )
        if self.operands.space(view.region) is not Space.DEVICE and not is_seed:
            yield "Z006", f"{where} is not on the device"

    def _cast(self, op: ops.Cast) -> Iterator[Problem]:
        yield from self.operands.in_memory(op, op.source, op.destination)
        yield from self.operands.alike(op, ("Z005", "Z006"), op.source, op.destination)
        if op.source.overlaps(op.destination) and op.source != op.destination:
            yield (
                "Z010",
                f"cast from {self.operands.spell(op.source)} to {self.operands.spell(op.destination)} overlaps itself",
            )

    def _transfer(self, op: ops.TransferOp) -> Iterator[Problem]:
        for region, space in ((op.source, op.from_space), (op.destination, op.to_space)):
            actual = self.operands.space(region)
            if actual is not space:
                where = self.operands.spell(region)
                yield "Z006", f"{title(op)} needs {where} on {space}, it is on {actual}"
        yield from self.operands.alike(op, ("Z005", "Z004"), op.source, op.destination)


def _exposed_destination(pairs: Sequence[ops.Pair]) -> Region | None:
    """Return a destination that overlaps the source of another pair, if there is one."""
    both = [(pair.destination, i, True) for i, pair in enumerate(pairs)]
    both += [(pair.source, i, False) for i, pair in enumerate(pairs)]
    both.sort(key=lambda item: (item[0].buffer, item[0].offset, item[0].stop))
    # Of the regions written and those read so far, the two with the largest stop: one may be of the same pair.
    farthest: dict[bool, list[tuple[int, int]]] = {}
    buffer: str | None = None
    for region, i, is_written in both:
        if region.buffer != buffer:
            buffer, farthest = region.buffer, {True: [], False: []}
        for stop, j in farthest[not is_written]:
            if j != i and stop > region.offset:
                return pairs[i if is_written else j].destination
        farthest[is_written] = sorted([*farthest[is_written], (region.stop, i)])[-2:]
    return None


def _slice(region: Region, axis: str) -> Region:
    return Region(buffer=region.buffer, offset=region.offset, numel=region.numel, shard=axis)
