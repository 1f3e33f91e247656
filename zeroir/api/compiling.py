"""Compile a model, or read a program from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from zeroir import artifact as artifacts
from zeroir.api.capture import capture_source, file_source, given_source, with_shapes_text
from zeroir.api.compiled import CompiledProgram, require_valid, with_proof, with_report, with_source
from zeroir.api.config_file import Config, resolve_options
from zeroir.api.keywords import CompileKeywords, flat_values, is_torchs
from zeroir.api.lowering import lower
from zeroir.artifact import Artifact, ConfigRecord
from zeroir.config import CompileOptions
from zeroir.errors import InternalError, ShapesError
from zeroir.ir.analysis.instances import instance, segments_at_ends
from zeroir.ir.sizes import Size
from zeroir.verify import Report, VerificationError, verify

if TYPE_CHECKING:
    from zeroir.cost.machine import Machine
    from zeroir.frontend.source.module_source import FrozenModules
    from zeroir.frontend.source.source import (
        Earlier,
        LossFunction,
        Model,
        ModelSource,
        WeightFunction,
    )
    from zeroir.ir.program import Program
    from zeroir.torch_ops.batches import Batch


def compile_model(
    model: Model,
    batch: Batch = None,
    *,
    loss: LossFunction | None = None,
    weight: WeightFunction | None = None,
    frozen: FrozenModules | None = None,
    config: Config | None = None,
    **options: Unpack[CompileKeywords],
) -> CompiledProgram:
    """Compile a model file, a module, or a function that makes the module.

    A model file is named as on the command line: ``path/to/model.py`` or ``package.module``, followed by ``:build`` or
    ``:build(layers=12)`` for another factory than ``model``.

    ``batch`` is an example micro-batch of one rank. It is required, except for a model file, which has its own. The
    loss is what the module's forward returns, or ``loss(module, batch)``, which returns it or a pair of it and outputs.
    ``weight`` returns the weight of a batch. ``frozen`` is a module that the loss uses and that is not trained, such as
    a teacher, or several of them by their names: the program shards them as it does the model's frozen parameters, and
    ``engine.update_frozen`` changes them. ``config`` is DeepSpeed's configuration, as its file or its contents, or a
    TOML file of options. ``shapes`` says which sizes differ from batch to batch: as ``torch.export`` takes it, such as
    ``{"input_ids": (Dim("batch", max=16), Dim("length", max=8192))}``, or as a text, such as
    ``"input_ids: batch<=16, length<=8192"``.

    The other keywords are options, which override the configuration. Related options are one object, such as
    ``offload=zeroir.Offload(what="optimizer", to="disk:/nvme")``, which may be shortened to its first option
    (``offload="optimizer"``). ``optimizer`` is a name, one of ``zeroir.optim`` with its settings, a class of
    ``torch.optim``, or an instance of one over the parameters of a module, whose groups the program takes over: what it
    does not have is not trained, neither of the module nor of others that the loss uses.

    A module stays unchanged; its values are used when an engine is made.

    Raises:
        UserError: if the file, the module, the batch or an option is wrong.
    """
    return compile_following(
        None, model, batch, loss=loss, weight=weight, frozen=frozen, config=config, **options
    )


def compile_following(
    earlier: Earlier | None,
    model: Model,
    batch: Batch = None,
    *,
    loss: LossFunction | None = None,
    weight: WeightFunction | None = None,
    frozen: FrozenModules | None = None,
    config: Config | None = None,
    **options: Unpack[CompileKeywords],
) -> CompiledProgram:
    """Compile as ``compile_model`` does, a program that goes on with an earlier one of the model."""
    source = given_source(model, batch, loss, weight, frozen)
    if earlier is not None:
        source = replace(source, earlier=earlier)
    options = with_shapes_text(options, lambda: source)
    optimizer = options.get("optimizer")
    if is_torchs(optimizer):
        from zeroir.api.torch_optimizers import translated

        given = flat_values({name: each for name, each in options.items() if name != "optimizer"})
        translation = translated(optimizer, model, given)
        source, given = translation.source(source), dict(translation.options)
    else:
        given = flat_values(options)
    resolved = resolve_options(config, given, lambda: source, giver="argument")
    compiled = compile_source(source, resolved.options, resolved.record)
    if compiled.watch is not None and is_torchs(optimizer):
        from zeroir.api.torch_optimizers import instances

        compiled.watch.optimizers = instances(optimizer)
    return compiled


def compile_with(model: str | Path, options: CompileOptions) -> CompiledProgram:
    """Compile a model file with validated options."""
    return compile_source(file_source(model), options)


def compile_source(
    source: ModelSource,
    options: CompileOptions,
    config: ConfigRecord | None = None,
    *,
    takes_example: bool = False,
) -> CompiledProgram:
    """Compile a source with validated options; ``config`` is the file that they come from, if any.

    The program takes batches of the example's sizes if it has to, or if these are not treated apart from all others.
    """
    captured = capture_source(source, options, takes_example=takes_example)
    artifact = replace(captured.artifact, config=config)
    try:
        lowered = lower(artifact.logical, is_kept=True)
    except VerificationError as error:
        _require_every_size(artifact.logical, error.report.findings[0].sentence)
        raise InternalError(f"The traced program is broken before any pass. {error}") from error
    from zeroir.runtime.kernels.declared import misdeclared

    problem = misdeclared(segments_at_ends(lowered.proof.program))
    if problem is not None:
        _require_every_size(artifact.logical, problem)
        raise InternalError(f"The program declares results that torch does not compute: {problem}.")
    compiled = with_proof(artifact, lowered)
    compiled = replace(compiled, compile_source=compile_again)
    return with_source(compiled, source, captured.traced, partial(compile_again, source))


def compile_again(
    source: ModelSource,
    options: CompileOptions,
    config: ConfigRecord | None,
    earlier: Earlier,
    batch: Batch = None,
) -> CompiledProgram:
    """Compile a source as it is now, as ``compiled.Compile`` says."""
    source = replace(source, earlier=earlier)
    if batch is not None:
        source = replace(source, batch=lambda: batch)
    return compile_source(source, options, config, takes_example=batch is not None)


def _require_every_size(logical: Program, problem: str) -> None:
    """Raise ShapesError where a broken program is right at the largest or smallest sizes, with the dims at fault."""
    ends = [
        {dim.name: dim.maximum for dim in logical.dims},
        {dim.name: dim.minimum for dim in logical.dims},
    ]
    for right, other in (ends, reversed(ends)):
        if logical.dims and _is_right(logical, right):
            line = _line_of_size(logical, problem)
            raise ShapesError(
                f"{line or 'The model'} does not compute the same for all sizes that its shapes allow. Narrow the "
                f"dims, or let the model's code not depend on them: {problem}.",
                (dim for dim in right if not _is_right(logical, {**right, dim: other[dim]})),
            )


def _line_of_size(logical: Program, problem: str) -> str:
    """Return ``file:line`` of the first tensor that has a size which a problem names, or spans as many elements."""
    for node in (node for segment in logical.segments for node in segment.nodes):
        for kind in node.results:
            if kind is None or not node.source:
                continue
            span = 1 + sum((n - 1) * step for n, step in zip(kind.shape, kind.stride, strict=True))
            if any(
                f" {size} " in problem for size in (span, *kind.shape) if isinstance(size, Size)
            ):
                return node.source
    return ""


def _is_right(logical: Program, values: Mapping[str, int]) -> bool:
    from zeroir.runtime.kernels.declared import misdeclared

    program = instance(logical, values)
    return verify(program).is_valid and misdeclared(program.segments) is None


def lowered_for(artifact: Artifact, options: CompileOptions, machine: Machine) -> CompiledProgram:
    """Lower a captured model with these options, which must not change the capture.

    Its segments declare the workspaces that were measured on the machine, if there are any.
    """
    artifact = replace(artifact, logical=replace(artifact.logical, options=options))
    return with_proof(artifact, lower(artifact.logical, machine), machine=machine)


def load_program(path: str | Path) -> CompiledProgram:
    """Read a ``.zir`` file and verify it.

    Raises:
        UserError: if the file is missing or damaged, has a newer schema, or breaks a law.
    """
    return require_valid(load_unverified(path))


def load_unverified(
    path: str | Path, *, budget_bytes: int | None = None, machine: Machine | None = None
) -> CompiledProgram:
    """Read a ``.zir`` file and verify it, without raising if its report is not valid.

    ``budget_bytes`` of device memory are part of the verification if given. Workspaces that were measured on
    ``machine`` replace the declared ones.
    """
    artifact = artifacts.load(Path(path))
    compiled = CompiledProgram(
        artifact=artifact,
        report=Report(),
        path=Path(path),
        compile_source=compile_again,
    )
    return with_report(compiled, budget_bytes, machine)
