"""A program: one SPMD training step for every rank of a mesh, as plain data.

A program consists of a header (mesh, communicators, streams, bounds), flats (the place of each parameter), buffers,
segments, sections, the bindings to the outside (inputs, outputs, module buffers, optimizer groups, losses, weight), and
its origin (options, pass specs, fingerprint of the model). The order of every tuple is part of the program, and its
text is canonical.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Final

from zeroir.ir.analysis.copies import CopyOf, copies
from zeroir.ir.analysis.effects import effects
from zeroir.ir.bounds import Bound
from zeroir.ir.buffers import Buffer, Region
from zeroir.ir.contents import Content
from zeroir.ir.dtypes import DType
from zeroir.ir.fields import Declares, Flag, Form, NameKind, Refers, Word
from zeroir.ir.mesh import STREAMS, Communicator, Executor, Mesh, Stream
from zeroir.ir.ops import Algorithm, Decide, Op, Transfer
from zeroir.ir.options import NO_OPTIONS, Options
from zeroir.ir.reports import Quantity, ReportBinding, Storing
from zeroir.ir.segments.operators import Operator
from zeroir.ir.segments.segment import Segment
from zeroir.ir.sizes import Dim

MICRO_STEP: Final = "micro_step"
LAST_MICRO_STEP: Final = "last_micro_step"
UPDATE: Final = "update"
EVALUATE: Final = "evaluate"
SAVE: Final = "save"
STEP_SECTIONS: Final = (MICRO_STEP, LAST_MICRO_STEP, UPDATE)
SECTION_NAMES: Final = (*STEP_SECTIONS, EVALUATE, SAVE)
"""A training step is ``micro_step`` k − 1 times, ``last_micro_step``, ``update``. ``micro_step`` is absent when a
program is compiled for k = 1. With ``Program.interleaved`` = g each of the two runs g micro-batches, so ``micro_step``
runs k/g − 1 times. ``evaluate`` may run between steps, and only leaves its loss and its outputs. ``save`` may run
between steps and between micro-steps. It copies the training state to snapshots in host memory."""

PARAMETER_ALIGNMENT_NUMEL: Final = 64
"""Each parameter starts at a multiple of this many elements of its flat, for any world size."""

SHARD_ALIGNMENT_NUMEL: Final = 256
"""A flat is padded to a multiple of world size × this many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter's place in a flat: elements ``[offset, offset + numel)``, row-major in ``shape``.

    ``aliases`` are the other fully-qualified names of a tied parameter.
    """

    syntax: ClassVar[str] = "{name} : {shape} offset={offset} [alias={aliases}]..."

    name: Annotated[str, Declares(NameKind.PARAMETER)]
    offset: int
    shape: tuple[int, ...]
    aliases: tuple[Annotated[str, Declares(NameKind.PARAMETER)], ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements of the parameter."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """The flat space of one (unit, dtype, trainable): its parameters in first-use order.

    ``dtype`` is the dtype with which the segments compute. ``padded_numel`` includes the zeros between and after
    parameters.
    """

    syntax: ClassVar[str] = "{name} : {dtype}{padded_numel} unit={unit} {is_trainable} {slots}"

    name: Annotated[str, Declares(NameKind.FLAT)]
    unit: Annotated[str, Declares(NameKind.UNIT)]
    dtype: DType
    is_trainable: Annotated[bool, Flag("trainable", "frozen")]
    padded_numel: Annotated[int, Form.BRACKETED]
    slots: Annotated[tuple[Slot, ...], Form.LINES]

    @property
    def numel(self) -> int:
        """Number of elements of the parameters alone."""
        return sum(slot.numel for slot in self.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """Intervals of flats that share an algorithm and hyper-parameters, as ``(flat, start, stop)``.

    ``lr`` and ``hyper`` are the scalar buffers of the settings at rest: the host writes them there, and each step reads
    these values, from there or from a copy.
    """

    syntax: ClassVar[str] = "{name} {algorithm} ({intervals}) lr={lr} hyper={hyper}"

    name: Annotated[str, Declares(NameKind.GROUP)]
    algorithm: Algorithm
    intervals: tuple[Annotated[tuple[str, int, int], Form.INTERVAL], ...]
    lr: Annotated[str, Refers(NameKind.BUFFER, "group {name} has its settings in")]
    hyper: Annotated[str, Refers(NameKind.BUFFER, "group {name} has its settings in")]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBinding:
    """One tensor of a batch: its path in the user's tuple or dict, and the buffer that receives it."""

    syntax: ClassVar[str] = "{path} : {dtype}{shape} -> {buffer}"

    path: Annotated[str, Declares(NameKind.INPUT)]
    buffer: Annotated[str, Refers(NameKind.BUFFER, "input {path} is bound to")]
    dtype: DType
    shape: tuple[int, ...]


Constant = bool | int | float | str | None
"""A value in a batch that is not a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBinding:
    """One constant of the batch with which the model was traced: its path, and its value.

    The program computes what the model does with this value, so a batch with another one is rejected.
    """

    syntax: ClassVar[str] = "{path} = {value}"

    path: Annotated[str, Declares(NameKind.CONSTANT)]
    value: Annotated[Constant, Form.CONSTANT]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputBinding:
    """One tensor that the engine reads in addition to the loss, and its buffer, row-major in ``shape``.

    It is a part of what an evaluation returns. ``path`` is its place there: empty if it is all of it, otherwise the
    steps that lead to it, ``['logits']`` for a key of a dict, ``[0]`` for an item of a list, ``(0)`` of a tuple,
    ``.logits`` for an attribute. With ``stored`` it is a tensor that the user's code stores somewhere, as a hook does
    that keeps activations, and ``path`` says where.
    """

    syntax: ClassVar[str] = "{path} : {dtype}{shape} <- {buffer} [stored={stored}]"

    path: Annotated[str, Declares(NameKind.OUTPUT), Form.QUOTED]
    buffer: Annotated[str, Refers(NameKind.BUFFER, "output {path} is bound to")]
    dtype: DType
    shape: tuple[int, ...]
    stored: Storing | None = None

    @property
    def is_of_steps(self) -> bool:
        """Whether micro-steps write it, and not evaluations."""
        return self.stored is Storing.STEP


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleBufferBinding:
    """A registered buffer or lifted constant of the model and its buffer in the program.

    A binding whose ``name`` begins with ``constant.`` is not an attribute of the model: its row-major little-endian
    elements are ``data``.
    """

    syntax: ClassVar[str] = "{name} : {shape} -> {buffer}  [data={data}]"

    name: Annotated[str, Declares(NameKind.MODULE_BUFFER)]
    buffer: Annotated[str, Refers(NameKind.BUFFER, "module buffer {name} is bound to")]
    shape: tuple[int, ...]
    data: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalarBinding:
    """The content of a scalar buffer before the first step, one number per element."""

    syntax: ClassVar[str] = "{buffer} = ({values})"

    buffer: Annotated[str, Refers(NameKind.BUFFER, "an initial value is bound to")]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """The computation of a micro-batch's weight: a segment's only result, one number, from input buffers' tensors.

    The host computes it from the batch, before a micro-step.
    """

    syntax: ClassVar[str] = "{segment}({arguments})"

    segment: Annotated[str, Refers(NameKind.SEGMENT, "the weight is computed by")]
    arguments: tuple[
        Annotated[str, Refers(NameKind.BUFFER, "the weight is computed from")], ...
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """A region and its content; with ``after``, only once that pending event is done."""

    syntax: ClassVar[str] = "{region} = {content} [after {after}]"

    region: Region
    content: Content
    after: Annotated[str, Refers(NameKind.EVENT)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """An event issued before a boundary and awaited after it, and the stream of the op that signals it."""

    syntax: ClassVar[str] = "{event} stream={stream}"

    event: Annotated[str, Refers(NameKind.EVENT)]
    stream: Annotated[str, Refers(NameKind.STREAM)]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of memory at one end of a section.

    Persistent buffers have their resting content unless a holding says otherwise. ``live`` names the temporary buffers
    that are live; their contents are undefined where no holding covers them. At a boundary every stream is ordered
    after everything before it, except the ops that signal ``pending`` events.
    """

    syntax: ClassVar[str] = """
        live {live}
        {holdings}
        pending {pending}
    """

    live: tuple[Annotated[str, Refers(NameKind.BUFFER)], ...] = ()
    holdings: tuple[Holding, ...] = ()
    pending: tuple[Pending, ...] = ()


@dataclass(frozen=True, slots=True)
class OpPosition:
    """The position of an op: the name of its section, and its index there.

    Only the position distinguishes two ops. Equal ops occur more than once, and sections may share the object of an op.
    """

    section: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A straight-line list of ops with its contract. Event names are unique within a section."""

    name: Annotated[str, Declares(NameKind.SECTION)]
    entry: State = field(default_factory=State)
    body: tuple[Op, ...]
    exit: State = field(default_factory=State)

    def positioned_ops(self) -> Iterator[tuple[OpPosition, Op]]:
        """Yield every op with its position, in order."""
        for index, op in enumerate(self.body):
            yield OpPosition(self.name, index), op


@dataclass(frozen=True, kw_only=True, repr=False)
class Program:
    """A program, as the module's docstring describes. ``options`` and ``passes`` are not used in execution.

    ``operators`` are the foreign operators that the nodes of segments call. ``reports`` are the values that the engine
    reads. ``dims`` are what sizes depend on (``zeroir/ir/sizes.py``). ``weight`` names the buffer that receives the
    weight of each micro-batch; without it each has the weight 1. ``weighing`` computes these weights; without it the
    user gives a function for them. Without the buffer, it shows whether batches are alike. ``rank`` names the buffer
    that receives the number of each rank, where the model uses it. ``interleaved`` is the number of micro-batches that
    a micro-step section runs, as ``zeroir/ir/analysis/micro_batches.py`` describes it.
    """

    syntax: ClassVar[str] = """
        pass {passes}
        [fingerprint {fingerprint}]
        mesh {mesh}
        comm {comms}
        streams {streams}...
        bound {bounds}
        dim {dims}
        report {reports}
        [weight {weight}]
        [weighing {weighing}]
        [rank {rank}]
        [interleaved {interleaved}]
        flat {flats}
        buffer {buffers}
        operator {operators}
        input {inputs}
        output {outputs}
        batch_constant {batch_constants}
        module_buffer {module_buffers}
        scalar {scalars}
        group {groups}
        segment {segments}
        section {sections}
    """

    mesh: Mesh
    comms: tuple[Communicator, ...] = ()
    streams: tuple[Stream, ...] = STREAMS
    bounds: tuple[Bound, ...] = ()
    dims: tuple[Dim, ...] = ()
    flats: tuple[Flat, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    operators: tuple[Operator, ...] = ()
    segments: tuple[Segment, ...] = ()
    sections: tuple[Section, ...] = ()
    inputs: tuple[InputBinding, ...] = ()
    outputs: tuple[OutputBinding, ...] = ()
    batch_constants: tuple[ConstantBinding, ...] = ()
    module_buffers: tuple[ModuleBufferBinding, ...] = ()
    scalars: tuple[ScalarBinding, ...] = ()
    groups: tuple[OptimizerGroup, ...] = ()
    reports: tuple[ReportBinding, ...] = ()
    weight: Annotated[str, Refers(NameKind.BUFFER, "the weight is bound to")] | None = None
    weighing: Weighing | None = None
    rank: Annotated[str, Refers(NameKind.BUFFER, "the rank is bound to")] | None = None
    interleaved: int = 1
    options: Options = NO_OPTIONS
    passes: tuple[Annotated[str, Word("the spec of a pass")], ...] = ()
    fingerprint: Annotated[str, Word("a fingerprint")] = ""

    def __repr__(self) -> str:
        name = f" {self.fingerprint[:12]}" if self.fingerprint else ""
        return f"<Program{name}: {self.outline}>"

    @property
    def outline(self) -> str:
        """Stage, precision, mesh, and the numbers of units and of ops, in one line."""
        option = self.options.texts
        facts = [f"stage {option['stage']}"] if "stage" in option else []
        facts += [option["precision"]] if "precision" in option else []
        facts.append("mesh " + " ".join(f"{axis.name}={axis.size}" for axis in self.mesh.axes))
        units = len({flat.unit for flat in self.flats})
        facts.append("1 unit" if units == 1 else f"{units} units")
        op_counts = ", ".join(f"{section.name} {len(section.body)}" for section in self.sections)
        return ", ".join(facts) + f"; ops in {op_counts}"

    @cached_property
    def buffer_by_name(self) -> Mapping[str, Buffer]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @cached_property
    def buffers_by_content(self) -> Mapping[Content, tuple[str, ...]]:
        """The names of the buffers with a resting content, in order, by that content."""
        names_by_content: dict[Content, list[str]] = {}
        for buffer in self.buffers:
            if buffer.holds is not None:
                names_by_content.setdefault(buffer.holds, []).append(buffer.name)
        return {content: tuple(names) for content, names in names_by_content.items()}

    @cached_property
    def report_of(self) -> Mapping[Quantity, ReportBinding]:
        """Reports by quantity."""
        return {report.quantity: report for report in self.reports}

    @property
    def loss(self) -> str | None:
        """The buffer of this rank's loss of the step, a sum over its micro-batches; None if none is reported."""
        return self._reported(Quantity.LOSS)

    @property
    def batch_loss(self) -> str | None:
        """The buffer of the losses of the micro-batches of a section; None if none is reported."""
        return self._reported(Quantity.BATCH_LOSS)

    @property
    def eval_loss(self) -> str | None:
        """The buffer of the loss of an evaluation; None if none is reported."""
        return self._reported(Quantity.EVAL_LOSS)

    @cached_property
    def counts_of_steps(self) -> tuple[str, ...]:
        """The buffers of the counts of steps: the reported one, and those of parameters that missed some."""
        decisions = (op for op in self.step_ops() if isinstance(op, Decide))
        more = (region.buffer for decision in decisions for region in decision.counts)
        reported = self._reported(Quantity.STEP)
        return tuple(dict.fromkeys(([] if reported is None else [reported]) + [*more]))

    @cached_property
    def counters(self) -> tuple[str, ...]:
        """The buffers of the scalars that steps advance: the counts of steps, and a loss scale that changes."""
        effects_of_step = [effects(op) for op in self.step_ops()]
        written = {region.buffer for e in effects_of_step for region in (*e.writes, *e.accumulates)}
        scale = self._reported(Quantity.LOSS_SCALE)
        return tuple(name for name in (*self.counts_of_steps, scale) if name in written)

    def _reported(self, quantity: Quantity) -> str | None:
        report = self.report_of.get(quantity)
        return None if report is None else report.buffer

    @cached_property
    def copies(self) -> Mapping[str, CopyOf]:
        """For each temporary buffer that is a copy of elements of one persistent buffer, what it is a copy of."""
        transfers = [op for op in self.ops() if isinstance(op, Transfer)]
        return copies(transfers, self.buffer_by_name, self.mesh)

    def at_rest(self, region: Region) -> Region | None:
        """Return the region of a persistent buffer that a region corresponds to: itself, or what it is a copy of.

        It has as many elements on each rank. Return None if the region is not a copy, or a slice of a copy of a
        slice.
        """
        if self.buffer_by_name[region.buffer].is_persistent:
            return region
        copy = self.copies.get(region.buffer)
        return None if copy is None else copy.region(region, self.mesh)

    @cached_property
    def streams_off_device(self) -> frozenset[str]:
        """The names of the streams that the host or a disk executes."""
        return frozenset(s.name for s in self.streams if s.executor is not Executor.DEVICE)

    @cached_property
    def operator_by_name(self) -> Mapping[str, Operator]:
        """Foreign operators by name."""
        return {operator.name: operator for operator in self.operators}

    @cached_property
    def segment_by_name(self) -> Mapping[str, Segment]:
        """Segments by name."""
        return {segment.name: segment for segment in self.segments}

    @property
    def weighing_segment(self) -> Segment | None:
        """The segment that computes the weight of a micro-batch, which no op calls; None if there is none."""
        return None if self.weighing is None else self.segment_by_name[self.weighing.segment]

    @cached_property
    def flat_by_name(self) -> Mapping[str, Flat]:
        """Flats by name."""
        return {flat.name: flat for flat in self.flats}

    @cached_property
    def parameter_by_name(self) -> Mapping[str, tuple[Flat, Slot]]:
        """The flat and slot of every parameter, by its name and by each alias."""
        return {
            name: (flat, slot)
            for flat in self.flats
            for slot in flat.slots
            for name in (slot.name, *slot.aliases)
        }

    @cached_property
    def comm_by_name(self) -> Mapping[str, Communicator]:
        """Communicators by name."""
        return {comm.name: comm for comm in self.comms}

    @cached_property
    def section_by_name(self) -> Mapping[str, Section]:
        """Sections by name."""
        return {section.name: section for section in self.sections}

    def ops(self) -> Iterator[Op]:
        """Yield every op of every section, in order."""
        for section in self.sections:
            yield from section.body

    def positioned_ops(self) -> Iterator[tuple[OpPosition, Op]]:
        """Yield every op of every section with its position, in order."""
        for section in self.sections:
            yield from section.positioned_ops()

    def step_ops(self) -> Iterator[Op]:
        """Yield every op of a training step's sections, in order."""
        for section in self.sections:
            if section.name in STEP_SECTIONS:
                yield from section.body

    @property
    def parameters_numel(self) -> int:
        """The number of parameters of the model, with tied ones once, frozen ones included, and without padding."""
        return sum(flat.numel for flat in self.flats)


def why_not_save(program: Program) -> str:
    """Return why a program has no section ``save``, in one sentence."""
    if program.passes:
        return "The program cannot save: it was made without a section `save`, so compile it again."
    return "The program cannot save: it is a logical program, and the pass `save-state` adds its section `save`."
