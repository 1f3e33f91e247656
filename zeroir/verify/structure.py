"""Each op by itself: its names exist, its regions lie inside their buffers, dtypes, sizes and spaces agree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import assert_never

from zeroir.ir import ops
from zeroir.ir.buffers import Region, Role, Space, View, contiguous_stride, span_numel
from zeroir.ir.dtypes import DType
from zeroir.ir.effects import Effects, effects
from zeroir.ir.mesh import HOST, Executor
from zeroir.ir.ops import Mode, Op
from zeroir.ir.program import Program
from zeroir.ir.segment import TensorType
from zeroir.ir.views import is_same_stride
from zeroir.verify.context import Findings, spell, title
from zeroir.verify.declarations import region_problem

Problem = tuple[str, str]

LANES_NUMEL = 64
"""Optimizer steps begin and end at multiples of this, as parameters do. A CPU's kernels take FP32 vectors of 4 to 16
elements, and round the elements behind the last whole vector in another way."""


def check_structure(program: Program, findings: Findings) -> None:
    """Check every op of every section; several problems of one op are several findings."""
    checker = _Checker(program)
    for section in program.sections:
        # An event that is pending at the entry may be signalled anew: what crosses one joint may cross the next.
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
        self.mesh = program.mesh
        self.buffers = program.buffer_by_name
        self.executors = {stream.name: stream.executor for stream in program.streams}
        self.outputs = {s.name: s.output_types() for s in program.segments}
        self.compared: Mapping[str, tuple[Callable[[Region], object], str, str]] = {
            "Z004": (self._dtype, "is {}", "{}"),
            "Z005": (self._numel, "has {} elements", "{}"),
            "Z006": (self._space, "is on {}", "on {}"),
        }
        self._checked: set[Region] = set()

    def problems(self, op: Op, events: set[str]) -> Iterator[Problem]:
        """Everything wrong with one op."""
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
                yield from self._in_memory(op, op.destination)
            case ops.Scale():
                yield from self._in_memory(op, op.region, op.by)
                yield from self._scalar(op, "by", op.by)
                yield from self._floating(op, "multiplies", op.region)
            case ops.GradNorm() | ops.CheckFinite():
                yield from self._scalar(op, "destination", op.destination, DType.F32)
                yield from self._floating(op, "reads", *op.sources)
            case ops.Decide():
                yield from self._decide(op)
            case ops.Direction():
                yield from self._direction(op)
            case ops.OptimizerStep():
                yield from self._optimizer_step(op)
            case ops.Average():
                yield from self._average(op)
            case ops.UpdateScale():
                yield from self._scalar(op, "skip", op.skip, DType.F32)
                yield from self._scalar(op, "weight", op.weight, DType.F32)
                if self._numel(op.state) != 3 or self._dtype(op.state) is not DType.F32:
                    yield "Z004", f"update_scale needs f32[3] in {self._spell(op.state)}"
            case ops.Transfer():
                yield from self._transfer(op)
            case _:
                assert_never(op)

    # ------------------------------------------------------------------------------------------------------ helpers

    def _spell(self, region: Region) -> str:
        return spell(region, self.program)

    def _dtype(self, region: Region) -> DType:
        return self.buffers[region.buffer].dtype

    def _space(self, region: Region) -> Space:
        return self.buffers[region.buffer].space

    def _role(self, region: Region) -> Role:
        return self.buffers[region.buffer].role

    def _numel(self, region: Region) -> int:
        return region.local_numel(self.mesh)

    def _scalar(
        self, op: Op, name: str, region: Region | None, dtype: DType | None = None
    ) -> Iterator[Problem]:
        if region is None:
            return
        if self._numel(region) != 1:
            yield (
                "Z005",
                f"{title(op)} needs one element as {name}, {self._spell(region)} has {self._numel(region)}",
            )
        if dtype is not None and self._dtype(region) is not dtype:
            yield (
                "Z004",
                f"{title(op)} needs {dtype} as {name}, {self._spell(region)} is {self._dtype(region)}",
            )

    def _alike(
        self, op: Op, codes: Iterable[str], first: Region, *others: Region
    ) -> Iterator[Problem]:
        """Regions must have the same dtype (Z004), number of elements (Z005) or space (Z006), as ``codes`` say."""
        for region in others:
            for code in codes:
                value_of, told, told_briefly = self.compared[code]
                value, region_value = value_of(first), value_of(region)
                if value != region_value:
                    difference = f"{told.format(value)}, {self._spell(region)} {told_briefly.format(region_value)}"
                    yield code, f"{title(op)}: {self._spell(first)} {difference}"

    def _floating(self, op: Op, verb: str, *regions: Region) -> Iterator[Problem]:
        for region in regions:
            if not self._dtype(region).is_floating:
                yield "Z004", f"{title(op)} {verb} {self._spell(region)}, which is not floating"

    def _in_memory(self, op: Op, *regions: Region) -> Iterator[Problem]:
        for region in regions:
            if self._space(region) is Space.DISK:
                yield "Z006", f"{title(op)} cannot work on {self._spell(region)}, which is on disk"

    def _executor(self, op: ops.IssuedOp, op_effects: Effects) -> Iterator[Problem]:
        """The executor of the stream must be the one that works on the memory of the op."""
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
                space = self._space(changed)
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
        """The regions of an op are in one space, except hyper-parameters, which the host always reads."""
        is_judged_alone = isinstance(op, ops.Cast) or (
            isinstance(op, ops.Direction | ops.OptimizerStep)
            and any(region == s.hyper for s in op.settings)
        )
        if not is_judged_alone and self._space(region) is not self._space(changed):
            used = f"uses {self._spell(region)} in {self._space(region)} memory"
            changes = f"changes {self._spell(changed)} in {self._space(changed)} memory"
            yield "Z006", f"{title(op)} {used} and {changes}"

    def _apart(self, op: Op, op_effects: Effects) -> Iterator[Problem]:
        """No op reads an element that it writes, or writes one twice; for collectives, computes and casts see there."""
        if isinstance(op, ops.Collective | ops.Compute | ops.Cast):
            return
        written = [*op_effects.writes, *op_effects.accumulates]
        yield from self._disjoint(op, written)
        for source in op_effects.reads:
            if any(source.overlaps(target) for target in written):
                yield "Z010", f"{title(op)} reads {self._spell(source)}, which it overwrites"
                return

    # -------------------------------------------------------------------------------------------------------- ops

    def _collective(self, op: ops.CollectiveOp) -> Iterator[Problem]:
        comm = self.program.comm_by_name.get(op.comm)
        if comm is None:
            yield "Z001", f"{title(op)} uses the undeclared communicator {op.comm}"
            return
        if not op.pairs:
            yield "Z005", f"{title(op)} moves nothing: it has no pairs"
        for pair in op.pairs:
            yield from self._alike(op, ("Z004",), pair.source, pair.destination)
            for region in (pair.source, pair.destination):
                if self._space(region) is not Space.DEVICE:
                    yield "Z006", f"{title(op)} needs {self._spell(region)} on the device"
            yield from self._in_place(op, pair, comm.axis)
        exposed = _exposed_destination(op.pairs)
        if exposed is not None:
            where = f"{self._spell(exposed)} is written by one pair"
            yield "Z010", f"{title(op)}: {where} and read by another of the same launch"
        wire = op.wire_dtype
        if wire is not None:
            for pair in op.pairs:
                if wire.is_floating is not self._dtype(pair.source).is_floating:
                    what = f"{self._spell(pair.source)} of {self._dtype(pair.source)}"
                    yield "Z004", f"{title(op)} cannot send {what} as {wire}"
        written = [pair.destination for pair in op.pairs]
        if op.staging is not None:
            written.append(op.staging)
            for pair in op.pairs:
                if pair.source.overlaps(op.staging):
                    yield (
                        "Z010",
                        f"{title(op)} stages over its own source {self._spell(pair.source)}",
                    )
        yield from self._disjoint(op, written)

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
            where = f"from {self._spell(source)} to {self._spell(destination)}"
            yield "Z010", f"{title(op)} {where} overlaps itself without working in place"

    def _disjoint(self, op: Op, regions: list[Region]) -> Iterator[Problem]:
        if len(regions) < 2:
            return
        ordered = sorted(regions, key=lambda region: (region.buffer, region.offset))
        for first, second in pairwise(ordered):
            if first.overlaps(second):
                yield "Z010", f"{title(op)} writes elements of {self._spell(second)} twice"
                return

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
                            f"compute @{op.segment} overwrites {self._spell(earlier)}, to which it has added",
                        )
            (written if is_write else added).append(destination.view.region)
        yield from self._disjoint(op, written)

    def _parameter(self, op: ops.Compute, name: str, view: View) -> Iterator[Problem]:
        home = self.program.parameter_by_name.get(name)
        if home is None:
            yield "Z001", f"compute @{op.segment} names the undeclared parameter {name}"
            return
        shape = home[1].shape
        where = f"compute @{op.segment}: {self._spell(view.region)}"
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
        """A result must fill its destination: elements that it left out would count as written."""
        where = f"compute @{op.segment}: destination {number}"
        span = span_numel(view.shape, view.stride)
        if span < view.numel:
            yield "Z005", f"{where} writes elements more than once"
        elif max(span, self._numel(view.region)) > view.numel:
            left_out = max(span, self._numel(view.region)) - view.numel
            yield (
                "Z005",
                f"{where} leaves {left_out} of the elements of {self._spell(view.region)} unwritten",
            )

    def _view(self, op: ops.Compute, what: str, view: View, kind: TensorType) -> Iterator[Problem]:
        where = f"compute @{op.segment}: {what} {self._spell(view.region)}"
        if len(view.shape) != len(view.stride):
            yield "Z005", f"{where} has {len(view.shape)} sizes and {len(view.stride)} strides"
            return
        if view.shape != kind.shape or not is_same_stride(view.shape, view.stride, kind.stride):
            wanted = f"{list(kind.shape)} with strides {list(kind.stride)}"
            layout = f"{list(view.shape)} with strides {list(view.stride)}"
            yield "Z005", f"{where} is {layout}, the segment has {wanted}"
        if self._dtype(view.region) is not kind.dtype:
            yield "Z004", f"{where} is {self._dtype(view.region)}, the segment has {kind.dtype}"
        if any(step < 0 for step in view.stride) or span_numel(
            view.shape, view.stride
        ) > self._numel(view.region):
            yield "Z003", f"{where} does not fit its {self._numel(view.region)} elements"
        # The host reads a seed when it launches the kernel, so the device does not wait for a copy.
        is_seed = self._role(view.region) is Role.RNG and self._space(view.region) is Space.HOST
        if self._space(view.region) is not Space.DEVICE and not is_seed:
            yield "Z006", f"{where} is not on the device"

    def _cast(self, op: ops.Cast) -> Iterator[Problem]:
        yield from self._in_memory(op, op.source, op.destination)
        yield from self._alike(op, ("Z005", "Z006"), op.source, op.destination)
        if op.source.overlaps(op.destination) and op.source != op.destination:
            yield (
                "Z010",
                f"cast from {self._spell(op.source)} to {self._spell(op.destination)} overlaps itself",
            )

    def _decide(self, op: ops.Decide) -> Iterator[Problem]:
        for name, region in (
            ("step", op.step),
            ("gradient_divisor", op.gradient_divisor),
            ("overflow", op.overflow),
            ("norm", op.norm),
            ("skip", op.skip),
            ("weight", op.weight),
        ):
            yield from self._scalar(op, name, region, DType.F32)
        if op.loss_scale is not None and self._dtype(op.loss_scale) is not DType.F32:
            yield "Z004", f"decide needs f32 as loss_scale, {self._spell(op.loss_scale)} is not"
        if op.skip is None and op.overflow is not None:
            yield "Z005", "decide needs skip, because it is given overflow"
        if op.skip is not None and op.overflow is None and op.weight is None:
            yield "Z005", "decide needs overflow or weight, because it is given skip"
        if (op.norm is None) != (op.max_norm is None):
            yield "Z005", "decide needs norm and max_norm together, or neither"
        if op.divisor < 1:
            yield "Z005", f"decide divides by {op.divisor}"

    def _direction(self, op: ops.Direction) -> Iterator[Problem]:
        dtype = op.algorithm.direction_dtype
        if dtype is None:
            yield "Z005", f"{op.algorithm} works element by element, and has no direction"
            return
        yield from self._states(op)
        yield from self._alike(op, ("Z005", "Z004", "Z006"), op.grad, *op.states)
        yield from self._alike(op, ("Z005", "Z006"), op.grad, op.direction)
        yield from self._in_lanes(op, op.grad, *op.states)
        for region, wanted in ((op.grad, DType.F32), (op.direction, dtype)):
            yield from self._typed(op, region, wanted)
        yield from self._in_memory(op, op.grad)
        yield from self._told(op)

    def _optimizer_step(self, op: ops.OptimizerStep) -> Iterator[Problem]:
        dtype = op.algorithm.direction_dtype
        if dtype is None:
            yield from self._states(op)
            yield from self._alike(op, ("Z005", "Z004", "Z006"), op.param, op.grad, *op.states)
        else:
            yield from self._whole_step(op, dtype)
        yield from self._in_lanes(op, op.param, op.grad, *op.states)
        yield from self._typed(op, op.param, DType.F32)
        yield from self._in_memory(op, op.param)
        yield from self._told(op)

    def _whole_step(self, op: ops.OptimizerStep, dtype: DType) -> Iterator[Problem]:
        """The directions, and the parameters where they are read, are those of whole flats."""
        if op.states:
            yield "Z005", f"{op.algorithm} keeps its states in `direction`, optimizer_step has some"
        yield from self._typed(op, op.grad, dtype)
        yield from self._alike(op, ("Z006",), op.param, op.grad)
        needs_whole = op.algorithm.factors_name is not None
        if (op.factors is not None) is not needs_whole:
            problem = "needs factors" if needs_whole else "has no factors"
            yield "Z005", f"optimizer_step: {op.algorithm} {problem}"
        if op.factors is not None:
            yield from self._typed(op, op.factors, DType.F32)
            yield from self._alike(op, ("Z006",), op.param, op.factors)
        if op.whole is not None:
            yield from self._alike(op, ("Z004", "Z006"), op.param, op.whole)

    def _states(self, op: ops.Direction | ops.OptimizerStep) -> Iterator[Problem]:
        count = len(op.algorithm.state_names)
        if len(op.states) != count:
            yield "Z005", f"{op.algorithm} keeps {count} states, {title(op)} has {len(op.states)}"

    def _in_lanes(
        self, op: ops.Direction | ops.OptimizerStep, *regions: Region
    ) -> Iterator[Problem]:
        for region in regions:
            if region.offset % LANES_NUMEL or self._numel(region) % LANES_NUMEL:
                where = (
                    f"{self._spell(region)} off the {LANES_NUMEL} elements that its kernels take"
                )
                yield "Z003", f"{title(op)} cuts {where} at a time, which changes the rounding"

    def _typed(self, op: Op, region: Region, dtype: DType) -> Iterator[Problem]:
        if self._dtype(region) is not dtype:
            what = f"{self._spell(region)} of {self._dtype(region)}"
            yield "Z004", f"{title(op)} uses {what}: it needs {dtype}"

    def _told(self, op: ops.Direction | ops.OptimizerStep) -> Iterator[Problem]:
        """The scalars, and the settings of each group."""
        yield from self._scalar(op, "step", op.step, DType.F32)
        yield from self._scalar(op, "gradient_divisor", op.gradient_divisor, DType.F32)
        yield from self._scalar(op, "skip", op.skip, DType.F32)
        named: set[str] = set()
        for settings in op.settings:
            yield from self._scalar(op, "lr", settings.lr, DType.F64)
            hyper, numel = settings.hyper, len(op.algorithm.hyper_names)
            if self._dtype(hyper) is not DType.F64 or self._numel(hyper) != numel:
                what = f"{op.algorithm} needs f64[{numel}] in {self._spell(hyper)}"
                yield "Z004", f"{title(op)}: {what}: {', '.join(op.algorithm.hyper_names)}"
            if settings.group in named:
                yield "Z403", f"{title(op)} has settings for group {settings.group} twice"
            named.add(settings.group)

    def _average(self, op: ops.Average) -> Iterator[Problem]:
        yield from self._alike(op, ("Z005", "Z004", "Z006"), op.param, op.average)
        dtype = self._dtype(op.average)
        if dtype is not DType.F32:
            yield "Z004", f"average changes {self._spell(op.average)} of {dtype}: it needs f32"
        yield from self._in_memory(op, op.param)
        yield from self._scalar(op, "skip", op.skip, DType.F32)
        if not 0 <= op.decay <= 1:
            yield "Z005", f"average has a decay of {op.decay}, which is not from 0 to 1"

    def _transfer(self, op: ops.TransferOp) -> Iterator[Problem]:
        for region, space in ((op.source, op.from_space), (op.destination, op.to_space)):
            if self._space(region) is not space:
                yield (
                    "Z006",
                    f"{title(op)} needs {self._spell(region)} on {space}, it is on {self._space(region)}",
                )
        yield from self._alike(op, ("Z005", "Z004"), op.source, op.destination)


def _exposed_destination(pairs: Sequence[ops.Pair]) -> Region | None:
    """A destination that overlaps the source of another pair, if any does."""
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
