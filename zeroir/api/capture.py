"""The capture of a model, from a file or a module: its logical program, before any pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zeroir.artifact import Artifact
from zeroir.config import CompileOptions
from zeroir.config.shapes import parse_shapes, shapes_text
from zeroir.errors import ModelWarning, ShapesError, UserError
from zeroir.ir.sizes import Dim

if TYPE_CHECKING:
    from torch import Tensor

    from zeroir.api.keywords import CompileKeywords
    from zeroir.frontend.source.module_source import FrozenModules
    from zeroir.frontend.source.source import LossFunction, Model, ModelSource, WeightFunction
    from zeroir.frontend.watch.stored_tensors import KeptTensors
    from zeroir.ir.program import Program
    from zeroir.torch_ops.batches import Batch
    from zeroir.torch_ops.followed_numbers import FollowedNumbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """An artefact with only a logical program, and its options including those that the model itself sets.

    ``outside`` are the tensors of the user's code, outside the model, by the names of their constants, and ``numbers``
    the numbers that the program follows; ``kept`` are the places where the code stores tensors. ``narrowings`` say
    which lines of code let sizes decide, so that dims are narrowed.
    """

    artifact: Artifact
    options: CompileOptions
    outside: Mapping[str, Tensor]
    kept: KeptTensors
    numbers: FollowedNumbers | None = None
    narrowings: tuple[str, ...] = ()


def capture(model: str | Path, options: CompileOptions) -> Captured:
    """Trace a model file."""
    return capture_source(file_source(model), options)


def capture_source(
    source: ModelSource, options: CompileOptions, *, takes_example: bool = False
) -> Captured:
    """Trace a source.

    Where the code treats the sizes of the example batch apart from those beside them, the program is for the latter,
    unless it has to take the example.
    """
    try:
        return _captured(source, options)
    except ShapesError as error:
        beside = None if takes_example else _source_beside(source, options, error.dims)
        if beside is None:
            raise
        try:
            return _captured(beside, options)
        except UserError:
            raise error from None


def _source_beside(
    source: ModelSource, options: CompileOptions, names: frozenset[str]
) -> ModelSource | None:
    """Return the source with an example batch in which dims of these names have other values; None if none has."""
    import torch

    from zeroir.api.checks.drawn_batches import with_sizes
    from zeroir.frontend.capture.shapes import dim_env
    from zeroir.torch_ops.batches import flatten

    if options.shapes is None:
        return None
    shapes = parse_shapes(options.shapes)
    example = source.batch()
    tensors = flatten(example).tensors
    env, _ = dim_env(shapes, {path: tuple(x.shape) for path, x in tensors.items()})
    present = {} if env is None else env.examples
    if names.isdisjoint(dim.name for dim in present):
        return None
    other = {
        dim.name: _beside(value, dim) if dim.name in names else value
        for dim, value in present.items()
    }
    batch = with_sizes(example, shapes, other, torch.Generator().manual_seed(0))
    return replace(source, batch=lambda: batch)


def _beside(value: int, dim: Dim) -> int:
    return value + 1 if value < dim.maximum else value - 1


def _captured(source: ModelSource, options: CompileOptions) -> Captured:
    import torch

    from zeroir import __version__
    from zeroir.frontend import trace
    from zeroir.torch_ops.globals import torch_globals_kept

    with torch_globals_kept():
        traced = trace(source, options)
    file = source.file
    artifact = Artifact(
        logical=traced.program,
        scheduled=traced.program,
        model_path=source.names.model if file is None else str(_from_here(file.path)),
        model_factory="" if file is None else file.factory,
        model_sha256="" if file is None else file.sha256,
        model_imports=None if file is None else tuple(sorted(file.imports.items())),
        model_values=tuple(sorted(traced.values.items())),
        torch_version=torch.__version__,
        zeroir_version=__version__,
        offload_folder=options.offload.folder,
    )
    return Captured(
        artifact=artifact,
        options=traced.options,
        outside=traced.outside,
        numbers=traced.numbers,
        kept=traced.kept,
        narrowings=traced.narrowings,
    )


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
