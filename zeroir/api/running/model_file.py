"""The code of the model file that a program was compiled from, for an engine that follows it between steps."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, NamedTuple, cast

from zeroir.api.model_of_program import change_of
from zeroir.api.running.signatures import left_out
from zeroir.errors import ModelWarning, UserError

if TYPE_CHECKING:
    from torch import nn

    from zeroir.api.compilations import Compiled
    from zeroir.artifact import Artifact
    from zeroir.frontend.source.source import ModelSource
    from zeroir.frontend.watch.watch import Watch
    from zeroir.runtime.comm.job import Job


class CodeOfFile(NamedTuple):
    """The present state of a source's code, and the source that other programs can be compiled from, if any.

    ``narrowings`` say that the code lets sizes decide.
    """

    watch: Watch
    source: ModelSource | None = None
    narrowings: tuple[str, ...] = ()

    def follow_from(self, artifact: Artifact, job: Job) -> None:
        """Let the first step find what the file's code reads otherwise than when the program was compiled, on any rank.

        Such is a variable of the environment, or the rank. All ranks call this together.
        """
        from zeroir.runtime.comm.job import exchanged_texts

        if self.source is None:
            return
        values = dict(artifact.model_values)
        texts = [json.dumps(sorted(self.watch.differing(values)))]
        if not job.is_alone:
            texts = exchanged_texts(texts[0], job.device)
        names = {name for text in texts for name in cast("list[str]", json.loads(text))}
        self.watch.compiled_from({name: values[name] for name in sorted(names)})


def code_of(compiled: Compiled, source: ModelSource, rank: int) -> CodeOfFile:
    """Return the state of a source's code, for a program that was read from a file or compiled from a model file.

    The module of a model file is built once more, without values, so that the file's functions may change it. Other
    programs can be compiled only from the file that the program itself was compiled from, and with the same versions of
    torch and zeroir. Where the module cannot be built without values, the state is that of the loss alone, nothing else
    can be compiled, and rank 0 says so.
    """
    from zeroir.frontend.source.module_source import with_module_in_hand
    from zeroir.frontend.source.source import capitalised
    from zeroir.frontend.watch.watch import Watch
    from zeroir.torch_ops.opaque import opaque_modules, run_in, words_of

    opaque = opaque_modules(compiled.program.segments)
    if source.file is None:
        return CodeOfFile(Watch.of(source, opaque=opaque))
    try:
        module = _without_values(source)
        source = source if module is None else with_module_in_hand(source, module)
    except UserError:
        module = None
    if module is None:
        if rank == 0:
            warnings.warn(
                f"{capitalised(source.names.model)} cannot be built without values: what functions of its file change "
                "in it does not count, and batches of sizes for which its code decides otherwise are refused.",
                ModelWarning,
                stacklevel=2,
            )
        return CodeOfFile(Watch.of(source, opaque=opaque))
    run_in(source.model(), words_of(compiled.program.segments))
    watch = Watch.of(source, opaque=opaque)
    if not _is_of(compiled.artifact, source):
        return CodeOfFile(watch)
    return CodeOfFile(watch, source, _narrowings(compiled, source))


def _without_values(source: ModelSource) -> nn.Module | None:
    """Build the module of a model file without values; return None if that is not possible."""
    import torch

    from zeroir.runtime.state.initial_module import built_without_values
    from zeroir.runtime.training.random_states import host_generators_kept

    with host_generators_kept():
        try:
            with torch.device("meta"):
                return source.build()
        except UserError:
            # Code that reads a checkpoint, as from_pretrained does, refuses the meta device.
            module = built_without_values(source.build)
    return module if all(each.is_meta for each in module.parameters()) else None


def _is_of(artifact: Artifact, source: ModelSource) -> bool:
    """Return whether a program was compiled here, from this model file and the user's modules that it imports."""
    import torch

    from zeroir import __version__
    from zeroir.frontend.source.entry import read_model_file

    file = source.file
    return (
        (artifact.torch_version, artifact.zeroir_version) == (torch.__version__, __version__)
        and artifact.model_imports is not None
        and file is not None
        and file.sha256 == artifact.model_sha256
        and change_of(read_model_file(str(file.path)), artifact) is None
    )


def _narrowings(compiled: Compiled, source: ModelSource) -> tuple[str, ...]:
    """Say that the code lets sizes decide, if the program is for fewer sizes than were asked for."""
    from zeroir.frontend.source.source import capitalised

    ranges = " and ".join(left_out(compiled))
    code = f"{capitalised(source.names.model)} lets the sizes of the batch decide"
    return (f"{code}, and the program is right only where {ranges}",) if ranges else ()
