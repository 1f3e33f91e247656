"""The stages of a trace: capture, units, unit calls, segments, program."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from zeroir.config import CompileOptions, replaced
from zeroir.config.shapes import BatchShapes, of_classes, parse_shapes, shapes_text
from zeroir.config.steps import BATCHES, ELEMENTS
from zeroir.errors import ModelWarning, Remainders, UserError
from zeroir.frontend.capture.capture import capture
from zeroir.frontend.capture.captured_model import CapturedModel
from zeroir.frontend.capture.code_contexts import note_on_small_checkpoints, recomputed_units
from zeroir.frontend.capture.followed_numbers import capture_with_numbers
from zeroir.frontend.lowering.accumulate import accumulate
from zeroir.frontend.lowering.loss_weight import LossWeight, loss_weight, may_count_differently
from zeroir.frontend.lowering.lower import lower as lower_calls
from zeroir.frontend.lowering.micro_batch_weights import add_micro_batch_weights, weighed_by
from zeroir.frontend.lowering.partition import partition
from zeroir.frontend.lowering.segment_calls import SegmentCall
from zeroir.frontend.lowering.segments import cut
from zeroir.frontend.lowering.unit_call import UnitCall
from zeroir.frontend.lowering.units import ROOT, ROOT_PRE, UnitModules, find_units
from zeroir.frontend.source.outside_reads import OutsideReads
from zeroir.frontend.source.source import NOTHING_EARLIER, Earlier, ModelSource
from zeroir.frontend.watch.stored_tensors import KeptTensors
from zeroir.ir.program import Program
from zeroir.torch_ops.followed_numbers import FollowedNumbers
from zeroir.workspace.segments import declared


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A logical program, whose options are those given and those that the model sets, such as units to recompute.

    ``outside`` are the tensors of the user's code, outside the model, by the names of their constants, and ``numbers``
    the numbers that the program follows; ``kept`` are the places where the code stores tensors, and ``reads`` the files
    and variables of the environment that it reads. ``narrowings`` say which lines of code let sizes decide, so that
    dims are narrowed, and ``remainders`` are those that may decide instead. ``values`` are those that the code of a
    model file reads.
    """

    program: Program
    outside: Mapping[str, Tensor]
    numbers: FollowedNumbers | None
    kept: KeptTensors
    reads: OutsideReads
    narrowings: tuple[str, ...]
    remainders: Remainders | None
    values: Mapping[str, str]


def trace_model(source: ModelSource, options: CompileOptions) -> TracedModel:
    """Run the stages of ``zeroir.frontend.trace``."""
    shapes: BatchShapes = {}
    if options.shapes is not None:
        shapes = parse_shapes(options.shapes)
    elif source.shapes is not None:
        shapes = source.shapes()
        options = replaced(options, shapes=shapes_text(shapes) or None)
    shapes = of_classes(shapes, source.classes)
    captured = capture_with_numbers(
        source,
        lambda numbers: capture(
            source,
            options.precision.dtype,
            options.precision.keep_fp32,
            evaluate=options.evaluate.is_on,
            outputs=options.evaluate.outputs,
            shapes=shapes,
            numbers=numbers,
            opaque=options.units.opaque,
            ranks=options.world_size,
            device=options.precision.device or "cpu",
        ),
    )
    if captured.ranks is not None and options.mesh is not None:
        raise UserError(
            f"{captured.joint.place} asks for the number of ranks or gathers tensors of all of them, which is not "
            "possible on a mesh of two axes: leave --mesh out."
        )
    units = find_units(captured.module, options.units.modules, captured.opaque)
    notes = [*captured.notes]
    if captured.checkpoints and not options.recompute.units:
        options = replaced(options, recompute=recomputed_units(captured.checkpoints, units))
        note = note_on_small_checkpoints(captured.checkpoints, units)
        notes += [] if note is None else [note]
    weights, note = _weights(source, captured, options, has_dims=bool(shapes))
    notes += [] if note is None else [note]
    for note in notes:
        warnings.warn(note, ModelWarning, stacklevel=2)
    program = program_of(captured, options, weights, source.earlier)
    return TracedModel(
        program=program,
        outside=captured.outside,
        numbers=captured.numbers,
        kept=captured.kept,
        reads=captured.reads,
        narrowings=captured.narrowings,
        remainders=captured.remainders,
        values=captured.values,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWeights:
    """The weights of batches: whether the program has them, and how they are computed if not by the user.

    Where it has none, their computation shows whether batches are alike.
    """

    are_used: bool
    computed: LossWeight | None = None


def _weights(
    source: ModelSource, captured: CapturedModel, options: CompileOptions, *, has_dims: bool
) -> tuple[BatchWeights, str | None]:
    """Return the weights of batches, and a note where there should be weights, but none follow from the loss.

    Raises:
        UserError: if the option says what the loss or a weight of the user contradicts.
    """
    said = options.micro_steps.mean_over
    if source.weight is not None:
        if said is not None:
            raise UserError(
                f"--mean-over {said} and a weight of batches contradict each other: leave one of them out."
            )
        return BatchWeights(are_used=True), None
    if said == BATCHES:
        return BatchWeights(are_used=False), None
    # A loss of tensors of all ranks is no mean over elements of this rank's batch.
    weight = (
        None
        if captured.is_gathering
        else loss_weight(captured.joint, captured.example, is_near_1=options.precision.is_fp16)
    )
    if weight is not None:
        are_used = said == ELEMENTS or weight.may_differ
        computed = weight if are_used or weight.may_ever_differ else None
        return BatchWeights(are_used=are_used, computed=computed), None
    if said == ELEMENTS:
        raise UserError(
            "--mean-over elements is for a loss that is one mean over elements of the batch, such as cross_entropy, "
            "and this one is not: give batches a weight (weight=, or a function weight(batch) in the model file)."
        )
    note: str | None = None
    if captured.is_gathering:
        return BatchWeights(are_used=False), None
    if has_dims or may_count_differently(captured.joint, captured.example):
        note = (
            "The mean over the job is that of its batches' losses, however many labels or rows a batch has, because "
            "the loss is not one mean over elements of the batch: give batches a weight (weight=, or a function "
            "weight(batch) in the model file), or say --mean-over batches."
        )
    return BatchWeights(are_used=False), note


def program_of(
    captured: CapturedModel,
    options: CompileOptions,
    weights: BatchWeights = BatchWeights(are_used=False),
    earlier: Earlier = NOTHING_EARLIER,
) -> Program:
    """Return the logical program of a captured model, which goes on with an earlier one."""
    if not options.evaluate.is_on:
        captured = replace(captured, evaluation=None)
    units = find_units(captured.module, options.units.modules, captured.opaque)
    canonical = {
        name: info.name for info in captured.parameters for name in (info.name, *info.aliases)
    }
    unit_calls = partition(captured.joint, units, canonical)
    if (
        options.units.modules is not None
        and units.labels
        and all(call.unit not in units.labels for call in unit_calls)
    ):
        raise UserError(
            f"--units {options.units.modules} names only modules that the model never calls, such as lists; name what "
            "they contain."
        )
    calls = cut(captured.joint, unit_calls, canonical)
    evaluation_calls: tuple[SegmentCall, ...] = ()
    if captured.evaluation is not None:
        joint = captured.evaluation.joint
        evaluation_calls = cut(
            joint,
            partition(joint, units, canonical),
            canonical,
            forward="evaluate",
            existing={call.segment.name: call.segment for call in calls}.values(),
        )
    owners = {info.name: _owner(info.name, units, unit_calls) for info in captured.parameters}
    program = lower_calls(captured, calls, owners, options, evaluation_calls, earlier)
    if weights.are_used:
        program = add_micro_batch_weights(program)
    if weights.computed is not None:
        program = weighed_by(program, weights.computed.segment, weights.computed.paths)
    if options.micro_steps.count > 1:
        program = accumulate(program)
    return declared(program)


def _owner(parameter: str, units: UnitModules, unit_calls: list[UnitCall]) -> str:
    """Return the unit of a parameter that no segment uses: its module's, otherwise the first part of the root."""
    root = next((c.unit for c in unit_calls if c.unit.startswith(ROOT)), ROOT_PRE)
    return units.unit_of(parameter) or root
