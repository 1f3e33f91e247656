"""The capture of a model, from a file or a module: its logical program, before any pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zeroir.api.captured import Captured
from zeroir.api.widest_capture import widest
from zeroir.artifact import Artifact
from zeroir.config import CompileOptions, options_of, replaced
from zeroir.config.shapes import shapes_text
from zeroir.errors import ModelWarning, UserError

if TYPE_CHECKING:
    from zeroir.api.keywords import CompileKeywords
    from zeroir.frontend.source.module_source import FrozenModules
    from zeroir.frontend.source.source import LossFunction, Model, ModelSource, WeightFunction
    from zeroir.ir.program import Program
    from zeroir.torch_ops.batches import Batch


def capture(model: str | Path, options: CompileOptions) -> Captured:
    """Trace a model file."""
    return capture_source(file_source(model), options)


def capture_source(
    source: ModelSource, options: CompileOptions, *, takes_example: bool = False
) -> Captured:
    """Trace a source.

    Where the code treats the sizes of the example batch apart from others, the program is for others, unless it has to
    take the example. Where it lets remainders of sizes decide, the program is for those of the example. The returned
    options name the device, unless none was chosen and no result depends on it.
    """
    return widest(source, options, _captured, takes_example=takes_example)


def _captured(source: ModelSource, options: CompileOptions) -> Captured:
    import torch

    from zeroir import __version__
    from zeroir.frontend import trace
    from zeroir.runtime.kernels.other_devices import first_difference
    from zeroir.torch_ops.globals import torch_globals_kept

    with torch_globals_kept():
        traced = trace(source, _for_device_here(options))
    program = traced.program
    requested = options_of(program)
    other = "cpu" if requested.precision.device == "cuda" else "cuda"
    if options.precision.device is None and first_difference(program, other) is None:
        program = replace(program, options=replaced(requested, device=None))
        traced = replace(traced, program=program)
    file = source.file
    artifact = Artifact(
        logical=program,
        scheduled=program,
        model_path=source.names.model if file is None else str(_from_here(file.path)),
        model_factory="" if file is None else file.factory,
        model_sha256="" if file is None else file.sha256,
        model_imports=None if file is None else tuple(sorted(file.imports.items())),
        model_values=tuple(sorted(traced.values.items())),
        torch_version=torch.__version__,
        zeroir_version=__version__,
        offload_folder=options.offload.folder,
    )
    return Captured(artifact=artifact, traced=traced)


def _for_device_here(options: CompileOptions) -> CompileOptions:
    """Return the options with the device of this machine, where none is chosen."""
    from zeroir.runtime.device.driver import driver

    if options.precision.device is not None:
        return options
    return replaced(options, device="cuda" if driver().is_available() else "cpu")


def require_opaque_modules(program: Program, source: ModelSource, options: CompileOptions) -> None:
    """Let this process know the modules whose code the program runs as it is: those of the source.

    Raises:
        UserError: if the source's are others.
    """
    from zeroir.torch_ops.opaque import (
        not_here,
        opaque_call,
        register_call,
        unknown_words,
        words_of,
    )

    unknown = unknown_words(program.segments)
    if not unknown:
        return
    captured: frozenset[str] = frozenset()
    # A module without an example batch cannot be captured.
    with warnings.catch_warnings(action="ignore", category=ModelWarning), suppress(UserError):
        captured = words_of(capture_source(source, options).artifact.logical.segments)
    # The first part is that of the model that was captured.
    calls = {word.partition("_")[2]: opaque_call(word) for word in captured}
    for word in unknown:
        call = calls.get(word.partition("_")[2])
        if call is None:
            raise UserError(not_here(word))
        register_call(word, call)


def file_source(model: str | Path) -> ModelSource:
    """Execute a model file and return it as a source."""
    from zeroir.frontend.source import entry
    from zeroir.torch_ops.globals import torch_globals_kept

    with torch_globals_kept():
        return entry.load_model_file(str(model))


def given_source(
    model: Model,
    batch: Batch,
    loss: LossFunction | None,
    weight: WeightFunction | None,
    frozen: FrozenModules | None = None,
) -> ModelSource:
    """Return the source that the arguments of ``compile_model`` or ``plan`` describe.

    Raises:
        UserError: if they are wrong, or the model file cannot be executed.
    """
    if isinstance(model, str | Path):
        given = {"batch": batch, "loss": loss, "weight": weight}
        for name, value in given.items():
            if value is not None:
                raise UserError(
                    f"{name}= has no effect on a model file: define `{name}` in {model} instead."
                )
        if frozen is not None:
            raise UserError(
                "frozen= has no effect on a model file: let the module that its factory returns have frozen modules as "
                "submodules."
            )
        return file_source(model)
    if not callable(model):
        raise UserError(
            "The model must be the path of a model file, a torch.nn.Module or a function that makes one, not "
            f"{type(model).__name__}."
        )
    if batch is None:
        raise UserError(
            "A module is traced with an example batch of one rank, and none is given: pass it as batch=."
        )
    from zeroir.frontend.source.module_source import source_of

    return source_of(model, batch, loss, weight, frozen)


def with_shapes_text(
    options: CompileKeywords, make_source: Callable[[], ModelSource]
) -> CompileKeywords:
    """Return the options with shapes as a text, which may be given as ``torch.export`` takes them.

    Raises:
        UserError: if they are no shapes of the example batch.
    """
    shapes = options.get("shapes")
    if shapes is None or isinstance(shapes, str):
        return options
    from zeroir.frontend.source.given_shapes import given_shapes

    return {**options, "shapes": shapes_text(given_shapes(shapes, make_source().batch()))}


def _from_here(path: Path) -> Path:
    """Return the path relative to the working directory if it is inside; a run follows only such paths."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
