"""Compare a compiled program on virtual ranks with eager PyTorch replicas, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import compile_with
from zeroir.config import CompileOptions, replaced
from zeroir.errors import UserError
from zeroir.report.names import counted, shortened
from zeroir.report.opaque_code import OpaqueCode, traced_units

if TYPE_CHECKING:
    from torch import Tensor

    from zeroir.api.checks.reference import EagerReplicas
    from zeroir.frontend.source.source import ModelSource
    from zeroir.ir.program import Program
    from zeroir.runtime.execution.lockstep import Lockstep
    from zeroir.torch_ops.batches import Batch

_ROUNDING = {"fp32": 64 * 2.0**-23, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""The tolerance of one step with other kernels: 64 rounding errors in FP32, or one in 16 bits."""

_NORM_ROUNDING = 64 * 2.0**-23
"""The tolerance of a norm, which the program sums in FP32 shard by shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A value whose difference between program and reference exceeds the tolerance; ``step`` counts from 1.

    A reference that is infinite or NaN differs from every value.
    """

    step: int
    what: str
    program: float
    reference: float
    relative: float

    def __str__(self) -> str:
        if not math.isfinite(self.reference):
            return (
                f"step {self.step}: {self.what} is {self.reference} in eager PyTorch itself, so nothing can be "
                "compared with it; lower the learning rate, or look for values in the data that the model cannot take"
            )
        return (
            f"step {self.step}: {self.what} is {self.program:.9g}, the reference has {self.reference:.9g} "
            f"(relative difference {self.relative:.2e})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of a comparison.

    ``tolerance`` is relative to the largest element; 0 means bitwise equality. ``norm_tolerance`` is that of the norm
    of a step's gradients, None if they are not clipped or their norms not compared. ``drawn`` are the different values
    of ``dims`` that batches were made for; there are none where the model's own batches were compared. ``units`` are
    those of the program, and ``opaque`` the modules whose code it runs as it is.
    """

    model: str
    stage: int
    world_size: int
    precision: str
    steps: int
    tolerance: float
    losses: tuple[tuple[float, ...], ...]
    differences: tuple[Difference, ...]
    mesh: str | None = None
    kernels: str = "eager"
    norm_tolerance: float | None = None
    dims: tuple[str, ...] = ()
    drawn: tuple[tuple[int, ...], ...] = ()
    units: tuple[str, ...] = ()
    opaque: tuple[OpaqueCode, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Whether no difference exceeds the tolerance."""
        return not self.differences

    def to_json(self) -> dict[str, object]:
        """Return the comparison as plain data."""
        return {"is_equal": self.is_equal, **asdict(self)}

    def __str__(self) -> str:
        ranks, steps = counted(self.world_size, "rank"), counted(self.steps, "step")
        ranks += "" if self.mesh is None else f" ({self.mesh})"
        what = f"{self.model} at stage {self.stage} on {ranks} in {self.precision}, {steps}"
        exactly = "bit for bit" if self.tolerance == 0 else f"within {self.tolerance:.1e}"
        replicas = counted(self.world_size, "eager replica")
        if self.is_equal:
            compared = "losses and parameters" if self.kernels == "eager" else "losses"
            norms = ""
            if self.norm_tolerance is not None:
                norms = f", and the norms that clip gradients within {self.norm_tolerance:.1e}"
            return f"{what}: {compared} equal {replicas} {exactly}{norms}.{self._lines()}"
        lines = [f"{what}: not equal to {replicas} {exactly}."]
        lines += [f"  {difference}" for difference in self.differences[:20]]
        if len(self.differences) > 20:
            lines.append(f"  … and {len(self.differences) - 20} more")
        return "\n".join(lines) + self._lines()

    def _lines(self) -> str:
        """Return the lines on sizes that were drawn and on the units, after the others."""
        traced = traced_units(self.units, self.opaque)
        units = f"Traced: {' '.join(shortened(traced)) or 'no unit as a whole'}."
        return "\n".join(["", *self._drawn_lines(), units, *map(_line_of, self.opaque)])

    def _drawn_lines(self) -> list[str]:
        if not self.drawn:
            return []
        shown = [" × ".join(map(str, sizes)) for sizes in self.drawn[:8]]
        shown += [] if len(self.drawn) <= 8 else [f"{len(self.drawn) - 8} more"]
        return [f"Drawn sizes of {' × '.join(self.dims)}: {', '.join(shown)}."]


def _line_of(code: OpaqueCode) -> str:
    modules, units = code["modules"], code["units"]
    names = ", ".join(name or "the model itself" for name in modules)
    around = "" if modules == units else f" in {' '.join(shortened(units))}"
    return f"Runs as it is: {names}{around}: {code['reason'] or 'it was chosen.'}"


def check_model(
    model: str,
    options: CompileOptions,
    *,
    steps: int,
    seed: int,
    kernels: str = "eager",
    draw_shapes: bool = False,
) -> Comparison:
    """Compile a model, run it on lockstep and on eager replicas from the same initial state, and compare.

    The comparison covers the losses of every rank and step, those of an evaluation before every step, and at the end
    the parameters, their moving averages and every rank's module buffers (running statistics). They must be bitwise
    equal. With clipping, the norm of each step may differ by 64 rounding errors of FP32, because the program sums it
    shard by shard, and the replicas are clipped by the program's. With kernels other than eager ones only the losses
    are compared. They may differ by 64 rounding errors of FP32, or one of the 16-bit dtype, for each step: an optimizer
    that uses signs turns the rounding of a gradient near zero into a full update. The comparison ends, not equal, with
    the first step whose loss is infinite or NaN in the reference.

    Sizes that depend on dims are drawn, the smallest and the largest among them, where the options have shapes or the
    model has no batches of its own, or with ``draw_shapes``.

    Raises:
        UserError: where nothing can be drawn, because the program has no dims.
    """
    from zeroir.torch_ops.globals import torch_globals_kept

    with torch_globals_kept():
        return _compared(model, options, steps, seed, kernels, draw_shapes=draw_shapes)


def _compared(
    model: str, options: CompileOptions, steps: int, seed: int, kernels: str, *, draw_shapes: bool
) -> Comparison:
    from zeroir.api.model_of_program import load_model
    from zeroir.frontend.source.entry import importing_from

    if options.precision.device is None:
        # The comparison is one on the CPU.
        options = replaced(options, device="cpu")
    compiled = compile_with(model, options)
    if draw_shapes and not compiled.program.dims:
        raise UserError(
            "--draw-shapes is for a program with dims: name the sizes that differ from batch to batch by --shapes, or "
            "by a function shapes() in the model file."
        )
    source = load_model(compiled.artifact, compiled.path)
    # Batches of the file fit the shapes of the file.
    draws = draw_shapes or options.shapes is not None or source.batches is None
    with importing_from(source):
        return _compared_with(
            model,
            compiled,
            source,
            options,
            steps=steps,
            seed=seed,
            kernels=kernels,
            draws=bool(compiled.program.dims) and draws,
        )


def _compared_with(
    model: str,
    compiled: CompiledProgram,
    source: ModelSource,
    options: CompileOptions,
    *,
    steps: int,
    seed: int,
    kernels: str,
    draws: bool,
) -> Comparison:
    from zeroir.api.checks.reference import replicas_of
    from zeroir.api.running.engines import kernel_backend
    from zeroir.runtime.execution.batch import inputs_of, shape_of
    from zeroir.runtime.execution.lockstep import Lockstep
    from zeroir.runtime.training.lr_schedule import Scheduler

    program = compiled.program
    reference = replicas_of(compiled.logical, source, options, seed=seed, steps=steps)
    backend = kernel_backend(kernels)
    folder = compiled.artifact.offload_folder
    lockstep = Lockstep(
        program,
        seed=seed,
        schedule_seed=seed,
        kernels=backend,
        weight=source.weight,
        disk_folder=None if folder is None else Path(folder),
    )
    lockstep.initialise(source.model, seed)
    scheduler: Scheduler | None = None
    if options.schedule is not None:
        scheduler = Scheduler(options.schedule, lockstep.optimizer.param_groups, steps)
    streams = [
        _drawn(program, source, rank, seed)
        if draws
        else _batches(source, rank, options.world_size, seed)
        for rank in range(options.world_size)
    ]
    drawn: list[tuple[int, ...]] = []
    is_exact = kernels == "eager"
    tolerance = 0.0 if is_exact else steps * _ROUNDING[options.precision.dtype]
    differences: list[Difference] = []
    is_state_compared = is_exact
    losses: list[tuple[float, ...]] = []
    for step in range(1, steps + 1):
        batches = [[next(stream) for _ in range(options.micro_steps.count)] for stream in streams]
        for batch in (batch for stream in batches for batch in stream):
            inputs_of(program, batch)  # Its error is clearer than that of eager PyTorch.
            drawn += [shape_of(program, batch)] if draws else []
        evaluations = _evaluations(lockstep, reference, step, batches, tolerance)
        results = lockstep.step(batches)
        norm = results[0].grad_norm if is_exact else None
        expected = reference.step(batches, clipped_by=norm)
        if scheduler is not None:
            skipped = results[0].is_skipped
            scheduler.step(is_skipped=skipped is not None and bool(skipped > 0))
        # Batches of weight 0 do not count, and the mean of no loss is NaN.
        counted = [any(map(reference.weight, micro_batches)) for micro_batches in batches]
        computed = [
            float(result.loss) if is_counted else 0.0
            for result, is_counted in zip(results, counted, strict=True)
        ]
        expected = [
            loss if is_counted else 0.0 for loss, is_counted in zip(expected, counted, strict=True)
        ]
        losses.append(tuple(computed))
        for rank, (loss, wanted_loss) in enumerate(zip(computed, expected, strict=True)):
            differences += _compare(step, f"the loss of rank {rank}", loss, wanted_loss, tolerance)
        if not all(math.isfinite(loss) for loss in expected):
            is_state_compared = False
            break
        differences += evaluations
        if norm is not None and reference.norm is not None:
            differences += _compare(
                step,
                "the norm of the gradients",
                float(norm),
                float(reference.norm),
                _NORM_ROUNDING,
            )
    parameters = lockstep.full_parameters() if is_state_compared else {}
    for name, wanted in reference.parameters().items() if parameters else ():
        differences += _compare_tensors(steps, name, parameters[name], wanted, tolerance)
    averages = reference.averages() if is_state_compared else {}
    averaged = lockstep.full_parameters(ema=True) if averages else {}
    for name, wanted in averages.items():
        what = f"the average of {name}"
        differences += _compare_tensors(steps, what, averaged[name], wanted, tolerance)
    for rank, replica in enumerate(reference.replicas):
        ours, theirs = lockstep.buffers(rank), dict(replica.named_buffers(remove_duplicate=False))
        for binding in program.module_buffers:
            if binding.name in theirs and is_state_compared:
                what, wanted = f"{binding.name} of rank {rank}", theirs[binding.name]
                differences += _compare_tensors(
                    steps, what, ours[binding.buffer], wanted, tolerance, may_be_infinite=True
                )
    return Comparison(
        model=model,
        stage=options.stage,
        world_size=options.world_size,
        precision=options.precision.dtype,
        steps=steps,
        tolerance=tolerance,
        losses=tuple(losses),
        differences=tuple(differences),
        mesh=options.mesh,
        kernels=kernels,
        dims=tuple(dim.name for dim in program.dims) if draws else (),
        drawn=tuple(dict.fromkeys(drawn)),
        norm_tolerance=None if options.clip is None or not is_exact else _NORM_ROUNDING,
        units=compiled.units,
        opaque=tuple(compiled.summary()["opaque"]),
    )


def _evaluations(
    lockstep: Lockstep,
    reference: EagerReplicas,
    step: int,
    batches: Sequence[Sequence[Batch]],
    tolerance: float,
) -> list[Difference]:
    """Return the differences of each rank's evaluation of its first micro-batch before a step.

    There are none if the program has no evaluation.
    """
    if lockstep.program.eval_loss is None:
        return []
    first = [micro_batches[0] for micro_batches in batches]
    expected = reference.evaluate(first)
    computed = [float(evaluation.loss) for evaluation in lockstep.evaluate(first)]
    return [
        difference
        for rank, (loss, wanted_loss) in enumerate(zip(computed, expected, strict=True))
        if reference.weight(first[rank])
        for difference in _compare(
            step, f"the evaluated loss of rank {rank}", loss, wanted_loss, tolerance
        )
    ]


def _compare(
    step: int, what: str, ours: float, theirs: float, tolerance: float
) -> Iterator[Difference]:
    relative = abs(ours - theirs) / max(abs(theirs), 2.0**-126)  # NaN where the reference is NaN
    if not relative <= tolerance:
        yield Difference(step=step, what=what, program=ours, reference=theirs, relative=relative)


def _compare_tensors(
    step: int,
    what: str,
    ours: Tensor,
    theirs: Tensor,
    tolerance: float,
    *,
    may_be_infinite: bool = False,
) -> Iterator[Difference]:
    """Yield the element that differs most, relative to the largest element; NaN differs most.

    With ``may_be_infinite`` equal infinities do not differ; masks contain them.
    """
    if not theirs.numel():
        return
    actual, wanted = ours.double().flatten(), theirs.double().flatten()
    gap = (actual - wanted).abs()
    if may_be_infinite:
        gap[actual == wanted] = 0.0
    at = int(gap.argmax())  # the first NaN, if there is one
    relative = float(gap[at] / wanted.abs().max().clamp(min=2.0**-126))
    if not relative <= tolerance:
        yield Difference(
            step=step,
            what=f"{what} at element {at}",
            program=float(actual[at]),
            reference=float(wanted[at]),
            relative=relative,
        )


def _drawn(program: Program, source: ModelSource, rank: int, seed: int) -> Iterator[Batch]:
    """Yield a rank's batches of drawn sizes, made from the example."""
    import torch

    from zeroir.api.checks.drawn_batches import batch_of_sizes, drawn_sizes

    generator = torch.Generator().manual_seed((seed * 1_000_003 + rank) % 2**63)
    for sizes in drawn_sizes(program, rank, seed):
        yield batch_of_sizes(program, source.batch(), sizes, generator)


def _batches(source: ModelSource, rank: int, world_size: int, seed: int) -> Iterator[Batch]:
    """Yield the source's batches, or variations of its example, different on every rank and step."""
    from zeroir.runtime.data.training_data import RankOfData, TrainingData

    if source.batches is not None:
        data = TrainingData(source.batches, RankOfData(rank=rank, world_size=world_size, seed=seed))
        for step in count(1):
            yield data.take(step)
    import torch

    from zeroir.torch_ops.batches import with_tensors

    generator = torch.Generator().manual_seed((seed * 1_000_003 + rank) % 2**63)

    def vary(tensor: Tensor) -> Tensor:
        # Values are only shuffled, so that targets and indices stay in the range that the model requires.
        order = torch.randperm(tensor.numel(), generator=generator)
        return tensor.flatten()[order].view(tensor.shape)

    while True:
        yield with_tensors(source.batch(), vary)
