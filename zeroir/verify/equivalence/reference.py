"""Compares a schedule with its logical program: the same contributions, loss, and settings of the update."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from zeroir.ir import ops
from zeroir.ir.analysis.effects import effects
from zeroir.ir.buffers import Region, Role, whole
from zeroir.ir.contents import Content, NamedContent
from zeroir.ir.dtypes import DType
from zeroir.ir.program import LAST_MICRO_STEP, UPDATE, Program
from zeroir.ir.reports import Quantity
from zeroir.verify.equivalence.slices import is_sliced, slice_numel, slice_region
from zeroir.verify.interpreter.decisions import NORM_ORDER
from zeroir.verify.interpreter.domain import Decision, Elements, PieceList, Statistic, Term, Zero
from zeroir.verify.interpreter.section_run import SectionRun, Stepped

Runs = Mapping[str, SectionRun]
"""The run of each section, by its name."""

_DEFINED = (Quantity.LOSS, Quantity.BATCH_LOSS, Quantity.EVAL_LOSS)
"""Quantities that the logical program defines."""
_CHANGE_BOTH = "Change the logical program, and lower it again."


class Mismatch(NamedTuple):
    """A difference, its section (None for the whole program), the op to look at, and the remedy."""

    sentence: str
    section: str | None = None
    line: int | None = None
    advice: str = ""


def mismatches(
    program: Program, runs: Runs, reference: Program, expected: Runs
) -> Iterator[Mismatch]:
    """Yield the differences between the computations of the program and of the reference.

    ``expected`` are the runs of the reference with the micro-batches of a section one after the other.
    """
    yield from _header(program, reference)
    yield from _reports(program, reference)
    yield from _bindings(program, reference)
    yield from _gradients(program, runs, expected)
    yield from _roundings(runs, expected)
    yield from _sums(runs, expected)
    yield from _named_values(program, runs, reference, expected)
    yield from _settings(runs, expected)
    yield from _optimizer_steps(runs, expected)


def _header(program: Program, reference: Program) -> Iterator[Mismatch]:
    """Compare parameters, micro-steps and seeds. A schedule may choose the lengths of flats, and so their padding."""
    flats, expected_flats = ({f.name: f for f in p.flats} for p in (program, reference))
    for name in sorted({*flats, *expected_flats}):
        flat, expected = flats.get(name), expected_flats.get(name)
        if flat is None or expected is None:
            yield Mismatch(f"flat {name} is in one of the two programs only")
        elif flat != replace(expected, padded_numel=flat.padded_numel):
            yield Mismatch(
                f"flat {name} has other parameters, places or another dtype than in the logical program",
                advice=_CHANGE_BOTH,
            )
    for comm in reference.comms:
        own = program.comm_by_name.get(comm.name)
        ranks = program.mesh.world_size if own is None or own.ranks is None else own.ranks
        if comm.ranks not in (None, ranks):
            yield Mismatch(
                f"the program is for {ranks} ranks, but the logical program for {comm.ranks}",
                advice="Compile the model again for these ranks.",
            )
    counts = [p.options.texts.get("micro_steps", "1") for p in (program, reference)]
    if counts[0] != counts[1]:
        yield Mismatch(
            f"a step has {counts[0]} micro-steps, in the logical program {counts[1]}",
            advice=_CHANGE_BOTH,
        )
    groups = [[(group.name, group.algorithm) for group in p.groups] for p in (program, reference)]
    if groups[0] != groups[1]:
        yield Mismatch(
            "the optimizer has other groups than in the logical program", advice=_CHANGE_BOTH
        )
    seeds = [{b.holds: b for b in p.buffers if b.role is Role.RNG} for p in (program, reference)]
    if seeds[0].keys() != seeds[1].keys() or any(
        slice_numel(program, drawn.name) < slice_numel(reference, seeds[1][holds].name)
        if program.interleaved != reference.interleaved
        else drawn.numel != seeds[1][holds].numel
        for holds, drawn in seeds[0].items()
    ):
        yield Mismatch("seeds are drawn for other places than in the logical program")


def _reports(program: Program, reference: Program) -> Iterator[Mismatch]:
    """Check that the engine reads the same quantities, and the losses of micro-batches from the same buffers.

    Z408 proves the other quantities of each program on their own.
    """
    reported, expected = program.report_of, reference.report_of
    for quantity in expected:
        if quantity not in reported:
            yield Mismatch(f"{quantity} is not reported, as it is in the logical program")
        elif quantity in _DEFINED and reported[quantity] != expected[quantity]:
            yield Mismatch(
                f"{quantity} is reported from another buffer than in the logical program"
            )
    for quantity in reported:
        if quantity in _DEFINED and quantity not in expected:
            yield Mismatch(f"{quantity} is reported, which it is not in the logical program")


def _bindings(program: Program, reference: Program) -> Iterator[Mismatch]:
    """Compare the bindings to the outside: inputs, outputs, module buffers, constants, initial values of scalars."""
    for what, bound, expected in (
        ("input", _bound_inputs(program), _bound_inputs(reference)),
        ("output", _bound_outputs(program), _bound_outputs(reference)),
        ("constant", _constants(program), _constants(reference)),
        ("module buffer", _bound_buffers(program), _bound_buffers(reference)),
    ):
        for name in sorted({*bound, *expected}):
            if bound.get(name) != expected.get(name):
                yield Mismatch(
                    f"{what} {name} is bound to another value than in the logical program",
                    advice=_CHANGE_BOTH,
                )
    for buffer in reference.buffers:
        if not isinstance(buffer.holds, NamedContent):
            continue
        for name in program.buffers_by_content.get(buffer.holds, ()):
            own = program.buffer_by_name[name]
            if own.dtype is not buffer.dtype:
                # Otherwise values from outside would be read with another dtype.
                yield Mismatch(
                    f"%{name} holds the value {buffer.holds.name} in {own.dtype}, and in the logical program it has "
                    f"the dtype {buffer.dtype}",
                    advice=_CHANGE_BOTH,
                )
    first, expected_first = ({b.buffer: b.values for b in p.scalars} for p in (program, reference))
    for buffer in reference.buffers:
        if is_sliced(reference, buffer) and buffer.name in expected_first:
            # Each micro-batch starts with the same value.
            times = program.interleaved // reference.interleaved
            expected_first[buffer.name] *= times
    for name in sorted({*first, *expected_first}):
        values, expected_values = first.get(name, ()), expected_first.get(name, ())
        # A scalar without an initial value starts with zeros.
        are_zeros = not any(values) and not any(expected_values)
        if name in reference.buffer_by_name and not are_zeros and values != expected_values:
            yield Mismatch(
                f"%{name} begins with another value than in the logical program",
                advice=_CHANGE_BOTH,
            )


def _bound_inputs(program: Program) -> Mapping[str, Hashable]:
    return {b.path: (_held(program, b.buffer), b.shape) for b in program.inputs}


def _bound_outputs(program: Program) -> Mapping[str, Hashable]:
    return {
        b.path if b.stored is None else f"{b.path}, stored in each {b.stored},": (
            _held(program, b.buffer),
            b.shape,
        )
        for b in program.outputs
    }


def _constants(program: Program) -> Mapping[str, Hashable]:
    """Return the constants by path, as texts: True differs from 1, and NaN equals NaN."""
    return {b.path: (type(b.value).__name__, repr(b.value)) for b in program.batch_constants}


def _bound_buffers(program: Program) -> Mapping[str, Hashable]:
    return {b.name: (_held(program, b.buffer), b.shape, b.data) for b in program.module_buffers}


def _held(program: Program, name: str) -> Content | None:
    buffer = program.buffer_by_name.get(name)
    return None if buffer is None else buffer.holds


def _gradients(program: Program, runs: Runs, expected: Runs) -> Iterator[Mismatch]:
    """Compare the contributions to each gradient."""
    for section, expected_run in expected.items():
        if section not in runs:
            yield Mismatch(f"section {section} of the logical program is missing")
            continue
        run = runs[section]
        for name in sorted({*run.contributions, *expected_run.contributions}):
            numbers = run.contributions.get(name, [])
            if sorted(numbers) != sorted(expected_run.contributions.get(name, [])):
                yield Mismatch(
                    f"the gradient of {name} is not made of the values of the logical program",
                    section,
                    contributor(program, section, name),
                )


def _roundings(runs: Runs, expected: Runs) -> Iterator[Mismatch]:
    """Compare the dtypes in which sums of contributions are stored, sent and added over ranks.

    A sum may only be stored in a dtype in which the logical program stores the same sum, or in a wider one. Ranks add
    it in the narrowest of those dtypes, to which each reduction rounds its result.
    """
    held = {each for run in expected.values() for each in run.held}
    narrowest: dict[tuple[str, tuple[Term, ...]], DType] = {}
    for flat, dtype, terms in held:
        known = narrowest.setdefault((flat, terms), dtype)
        if dtype.itemsize_bytes < known.itemsize_bytes:
            narrowest[flat, terms] = dtype
    for section, run in runs.items():
        for rounded, line in run.roundings.items():
            if rounded not in held:
                yield Mismatch(
                    f"the gradient of flat {rounded.flat} passes through {rounded.dtype}, which it does not in the "
                    "logical program",
                    section,
                    line,
                    f"Let gradients of flat {rounded.flat} travel and stay in the dtype that the logical program "
                    "gives them.",
                )
        for reduced, line in run.reductions.items():
            dtype = narrowest.get((reduced.flat, reduced.terms), reduced.dtype)
            if reduced.dtype is not dtype:
                yield Mismatch(
                    f"ranks add up the gradient of flat {reduced.flat} in {reduced.dtype}, but the logical program "
                    f"holds these contributions in {dtype}",
                    section,
                    line,
                    f"Let ranks add them up in {dtype}, and widen the sum.",
                )


def _sums(runs: Runs, expected: Runs) -> Iterator[Mismatch]:
    """Compare the additions of contributions, with their dtypes, because every addition rounds."""
    expected_sums = {added for run in expected.values() for added in run.sums}
    for section, run in runs.items():
        for added, line in run.sums.items():
            if added not in expected_sums:
                yield Mismatch(
                    f"contributions to the gradient of flat {added.flat} are added in {added.dtype}, in another "
                    "order or dtype than in the logical program, and so are rounded in another way",
                    section,
                    line,
                    "Add the same contributions to each other in the same dtype, as the logical program does.",
                )


def contributor(program: Program, section: str, name: str) -> int | None:
    """Return the line of the section's first op that contributes to the gradient of a parameter."""
    home = program.parameter_by_name.get(name)
    for line, op in enumerate(program.section_by_name[section].body):
        if not isinstance(op, ops.Compute):
            continue
        for destination in op.destinations:
            if destination is None or destination.gradient is None:
                continue
            if program.parameter_by_name.get(destination.gradient) == home:
                return line
    return None


def _weighing(program: Program) -> tuple[str, tuple[str, ...]] | None:
    """Return what computes the weights of batches: the digest of the segment, and the buffers of its inputs."""
    segment = program.weighing_segment
    if program.weighing is None or segment is None:
        return None
    return segment.digest(), program.weighing.arguments


def _named_values(
    program: Program, runs: Runs, reference: Program, expected: Runs
) -> Iterator[Mismatch]:
    """Compare the loss, and every other scalar that the logical program names."""
    if program.rank != reference.rank:
        yield Mismatch("the rank goes to another buffer than in the logical program")
    if program.weight != reference.weight:
        yield Mismatch("the weights of batches go to another buffer than in the logical program")
    if _weighing(program) != _weighing(reference):
        yield Mismatch(
            "the weights of batches are computed in another way than in the logical program"
        )
    losses = (reference.loss, reference.batch_loss, reference.eval_loss)
    summed_loss = reference.report_of.get(Quantity.SUMMED_LOSS)
    named = [b.name for b in reference.buffers if isinstance(b.holds, NamedContent)]
    decided = {
        region.buffer
        for op in reference.ops()
        if isinstance(op, ops.GradNorm | ops.CheckFinite | ops.Decide)
        for region in effects(op).writes + effects(op).accumulates
    }
    for section in reference.section_by_name:
        if section not in runs:
            continue
        for name in named:
            if name not in program.buffer_by_name:
                yield Mismatch(f"%{name} of the logical program is missing", section)
                continue
            if name in decided and section == LAST_MICRO_STEP:
                continue  # The decision may be taken early: its results are compared after the update.
            # The update sums the loss over ranks, which another law checks.
            with_axes = summed_loss is None or name != summed_loss.buffer
            home, after = reference.buffer_by_name[name], expected[section]
            regions = [whole(program.buffer_by_name[name])]
            if program.interleaved != reference.interleaved and is_sliced(reference, home):
                # An update or an evaluation does not change what it does not use: slice 0.
                count = len(after.slices.get(name, [home]))
                regions = [slice_region(program, name, i, home.numel) for i in range(count)]
                if slice_numel(program, name) < home.numel:
                    yield Mismatch(f"%{name} has no place for {count} micro-batches", section)
                    continue
            wanted = after.slices.get(name) or [after.memory.read(whole(home))]
            held = [runs[section].memory.read(region) for region in regions]
            if [_content(p, with_axes) for p in held] != [_content(p, with_axes) for p in wanted]:
                what = "the loss" if name in losses else f"%{name}"
                yield Mismatch(f"{what} is not the value of the logical program", section)


def content(run: SectionRun, region: Region, *, with_axes: bool = False) -> Hashable:
    """Return the content of a named value; statistics and decisions only by kind.

    ``with_axes`` includes the axes that a value was summed over or is sharded along.
    """
    return _content(run.memory.read(region), with_axes)


def _content(held: PieceList, with_axes: bool) -> Hashable:
    pieces: list[Hashable] = []
    for a, b, value in held:
        match value:
            case Elements():
                axes = (value.summed, value.strides) if with_axes else ()
                pieces.append((a, b, value.key, value.shift, axes))
            case Zero():
                pieces.append((a, b, "zero"))
            case Decision():
                pieces.append((a, b, value.what))
            case Statistic():
                pieces.append((a, b, value.kind))
            case _:
                pieces.append((a, b, type(value).__name__))
    return tuple(pieces)


def _settings(runs: Runs, expected: Runs) -> Iterator[Mismatch]:
    """Compare the settings of decisions and of loss scaling, whatever sections these are in."""
    expected_settings = {setting for run in expected.values() for setting in run.settings}
    settings = {setting for run in runs.values() for setting in run.settings}
    for section, run in runs.items():
        for setting, line in run.settings.items():
            if setting not in expected_settings:
                yield Mismatch(
                    "the norm adds up gradients in another order than in the logical program, "
                    "and so is rounded in another way"
                    if setting[0] == NORM_ORDER
                    else "the update has other settings than in the logical program",
                    section,
                    line,
                    _CHANGE_BOTH,
                )
    if settings < expected_settings:
        yield Mismatch(
            "the update lacks a decision or a loss scaling of the logical program", UPDATE
        )


class _StepOfElements(NamedTuple):
    """Elements ``[start, stop)`` of a parameter, the setting of their optimizer step, and the place of that op."""

    start: int
    stop: int
    setting: Hashable
    section: str
    line: int


_Steps = Mapping[str, Sequence[_StepOfElements]]
"""The optimizer steps of each parameter, by its name."""


def _optimizer_steps(runs: Runs, expected: Runs) -> Iterator[Mismatch]:
    """Compare the algorithm and the hyper-parameters of each element's optimizer step, and the decay of its average."""
    yield from _differing(
        _steps({name: run.steps for name, run in runs.items()}),
        _steps({name: run.steps for name, run in expected.items()}),
        "updated by another algorithm or other hyper-parameters",
    )
    yield from _differing(
        _steps({name: run.directions for name, run in runs.items()}),
        _steps({name: run.directions for name, run in expected.items()}),
        "given a direction by another algorithm or other hyper-parameters",
    )
    yield from _differing(
        _steps({name: run.averages for name, run in runs.items()}),
        _steps({name: run.averages for name, run in expected.items()}),
        "averaged with another decay",
    )


def _differing(steps: _Steps, expected_steps: _Steps, treated: str) -> Iterator[Mismatch]:
    """Yield the parameters that are ``treated`` in another way than in the logical program."""
    for name in sorted({*steps, *expected_steps}):
        own = steps.get(name, [])
        if [step[:3] for step in own] != [step[:3] for step in expected_steps.get(name, [])]:
            yield Mismatch(
                f"{name} is {treated} than in the logical program",
                own[0].section if own else UPDATE,
                own[0].line if own else None,
                _CHANGE_BOTH,
            )


def _steps(stepped: Mapping[str, Sequence[Stepped]]) -> _Steps:
    """Return the steps of each parameter in the order of its elements; adjacent ones with equal settings are merged.

    ``stepped`` has the steps of each section.
    """
    steps: dict[str, list[_StepOfElements]] = {}
    for section, section_steps in stepped.items():
        for name, start, stop, setting, line in section_steps:
            own = _StepOfElements(start, stop, setting, section, line)
            steps.setdefault(name, []).append(own)
    return {name: _joined(sorted(own, key=lambda s: s[:2])) for name, own in steps.items()}


def _joined(steps: list[_StepOfElements]) -> list[_StepOfElements]:
    joined: list[_StepOfElements] = []
    for step in steps:
        last = joined[-1] if joined else None
        if last is not None and last.stop == step.start and last.setting == step.setting:
            joined[-1] = last._replace(stop=step.stop)
        else:
            joined.append(step)
    return joined
