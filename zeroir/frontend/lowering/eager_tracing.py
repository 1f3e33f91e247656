"""A program whose steps call the user's code as it is, in eager PyTorch, in place of an earlier program's segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from zeroir.config import CompileOptions, replaced
from zeroir.config.shapes import parse_shapes
from zeroir.frontend.capture.capture import capture
from zeroir.frontend.capture.precision import compute_dtype
from zeroir.frontend.lowering.loss_weight import LossWeight
from zeroir.frontend.lowering.tracing import BatchWeights, program_of
from zeroir.frontend.opaque.eager_step import EagerLoss
from zeroir.frontend.source.source import Earlier, ModelSource
from zeroir.ir.buffers import Role
from zeroir.ir.program import Program
from zeroir.torch_ops.opaque import opaque_modules


def eager_options(options: CompileOptions) -> CompileOptions:
    """Return the options of a program without those that say something of its segments.

    Nothing is updated before all of the code has run: where it fails, the step is discarded.
    """
    return replaced(
        options,
        units=None,
        opaque=None,
        recompute=(),
        evaluate=False,
        outputs=(),
        memory_budget=None,
        overlap_update=False,
        speculate=False,
    )


def trace_eagerly(
    source: ModelSource,
    options: CompileOptions,
    present: Program,
    others: Iterable[str],
    step_counts: Mapping[str, int],
) -> Program:
    """Return a logical program that computes what ``present``, a program of the source, does.

    It has the same flats, and one call runs the code of a micro-step. Batches have the weights that they have there.
    ``others`` names tensors of the model that an engine has beside those of the present program.
    """
    precision = options.precision
    drawn = sum(buffer.numel for buffer in present.buffers if buffer.role is Role.RNG)
    sites = drawn // present.interleaved
    names = (*(each.name for each in present.module_buffers), *others)
    held = {name: slot.name for name, (_, slot) in present.parameter_by_name.items()}
    loss = EagerLoss(
        source,
        held | {name: name for name in names},
        sites,
        tuple(opaque_modules(present.segments)),
        compute_dtype(precision.dtype),
        tuple(precision.keep_fp32),
    )
    earlier = Earlier(flats=present.flats, step_counts=step_counts)
    own = replace(source, build=loss.build, loss=loss, earlier=earlier)
    shapes = {} if options.shapes is None else parse_shapes(options.shapes)
    captured = capture(own, precision.dtype, precision.keep_fp32, evaluate=False, shapes=shapes)
    computed: LossWeight | None = None
    segment, weighing = present.weighing_segment, present.weighing
    if segment is not None and weighing is not None:
        paths = {binding.buffer: binding.path for binding in present.inputs}
        computed = LossWeight(
            segment=segment,
            paths=tuple(paths[buffer] for buffer in weighing.arguments),
            may_differ=True,
            may_ever_differ=True,
        )
    weights = BatchWeights(are_used=present.weight is not None, computed=computed)
    return program_of(captured, options, weights, earlier)
