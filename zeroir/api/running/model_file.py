"""The code of the model file that a program was compiled from, for an engine that follows it between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from zeroir.api.running.signatures import left_out
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.api.compilations import Compiled
    from zeroir.artifact import Artifact
    from zeroir.frontend.source.source import ModelSource
    from zeroir.frontend.watch.watch import Watch


class CodeOfFile(NamedTuple):
    """The present state of a source's code, and the source that other programs can be compiled from, if any.

    ``narrowings`` say that the code lets sizes decide.
    """

    watch: Watch
    source: ModelSource | None = None
    narrowings: tuple[str, ...] = ()


def code_of(compiled: Compiled, source: ModelSource) -> CodeOfFile:
    """Return the state of a source's code, for a program that was read from a file or compiled from a model file.

    The module of a model file is built once more, on the meta device, so that the file's functions may change it.
    Other programs can be compiled only from the file that the program itself was compiled from. Where the module cannot
    be built without values, the state is that of the loss alone, and nothing else can be compiled.
    """
    from zeroir.frontend.source.module_source import with_module_in_hand
    from zeroir.frontend.watch.watch import Watch
    from zeroir.runtime.training.random_states import host_generators_kept
    from zeroir.torch_ops.opaque import opaque_modules, run_in, words_of

    opaque = opaque_modules(compiled.program.segments)
    if source.file is None:
        return CodeOfFile(Watch.of(source, opaque=opaque))
    try:
        with host_generators_kept():
            source = with_module_in_hand(source)
    except UserError:
        return CodeOfFile(Watch.of(source, opaque=opaque))
    run_in(source.model(), words_of(compiled.program.segments))
    watch = Watch.of(source, opaque=opaque)
    if not _is_of(compiled.artifact, source):
        return CodeOfFile(watch)
    return CodeOfFile(watch, source, _narrowings(compiled, source))


def _is_of(artifact: Artifact, source: ModelSource) -> bool:
    """Return whether a program was compiled from this model file, and the user's modules that it imports."""
    file, imports = source.file, artifact.model_imports
    return (
        file is not None
        and file.sha256 == artifact.model_sha256
        and imports is not None
        and dict(imports) == dict(file.imports)
    )


def _narrowings(compiled: Compiled, source: ModelSource) -> tuple[str, ...]:
    """Say that the code lets sizes decide, if the program is for fewer sizes than were asked for."""
    from zeroir.frontend.source.source import capitalised

    ranges = " and ".join(left_out(compiled))
    code = f"{capitalised(source.names.model)} lets the sizes of the batch decide"
    return (f"{code}, and the program is right only where {ranges}",) if ranges else ()
