"""The program with which an engine runs the user's code as it is, in eager PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from zeroir.api.running.signatures import accumulating
from zeroir.errors import ModelWarning, UserError
from zeroir.ir.program import MICRO_STEP

if TYPE_CHECKING:
    from zeroir.api.compilations import Compiled
    from zeroir.artifact import Artifact
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.signatures import Signatures
    from zeroir.runtime.engine.watched_code import WatchedCode


class Lower(Protocol):
    """Lowers the logical program of an artefact."""

    def __call__(self, artifact: Artifact) -> Compiled:
        """Return the compiled program."""


def compiled_eagerly(
    compiled: Compiled,
    engine: Engine,
    lower: Lower,
    code: WatchedCode,
    step_counts: Mapping[str, int],
    others: Collection[str],
) -> Signatures:
    """Return a program whose steps call the user's code, for an engine that follows ``code``.

    ``others`` names the tensors of the model that the engine has beside those of the running program.

    Raises:
        UserError: if the engine was not made from a module in this process.
    """
    from zeroir.frontend.lowering.eager_tracing import eager_options, trace_eagerly
    from zeroir.runtime.engine.signatures import Signatures
    from zeroir.runtime.engine.watched_code import CompiledAgain, UnwatchedCode
    from zeroir.torch_ops.globals import torch_globals_kept

    source = compiled.source
    if source is None or not source.is_in_hand:
        raise UserError(
            "engine.eager() runs the code of the module that zeroir.compile was given, and the engine was made from "
            "a file or a function."
        )
    options = eager_options(compiled.requested)
    with torch_globals_kept(), warnings.catch_warnings(action="ignore", category=ModelWarning):
        logical = trace_eagerly(source, options, engine.program, others, step_counts)
    artifact = replace(compiled.artifact, logical=replace(logical, options=options))
    eager = lower(artifact)
    if MICRO_STEP in engine.program.section_by_name and not eager.accumulates:
        eager = eager.specialise(micro_steps=2)
    return Signatures(
        CompiledAgain(
            program=eager.program,
            code=UnwatchedCode(code),
            accumulating=accumulating(eager, engine.rank),
        )
    )
