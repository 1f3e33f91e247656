"""Engines of compiled programs: initialised, and following the code that the program was compiled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zeroir.api.capture import require_opaque_modules
from zeroir.api.running.eager_steps import Lower, compiled_eagerly
from zeroir.api.running.model_file import code_of
from zeroir.api.running.outside_memory import (
    host_memory_bytes,
    local_ranks,
    outside_bytes,
    require_host_memory,
)
from zeroir.api.running.signatures import accumulating, compiled_after_change, signatures_of

if TYPE_CHECKING:
    from zeroir.api.compilations import Compiled
    from zeroir.frontend.source.source import ModelSource
    from zeroir.runtime.distributed.rendezvous import JobRank
    from zeroir.runtime.engine.engine import Engine
    from zeroir.runtime.engine.opened_program import EngineSettings
    from zeroir.runtime.state.initial_module import StateSource


def opened_engine(
    compiled: Compiled,
    lower: Lower,
    source: ModelSource,
    job_rank: JobRank,
    settings: EngineSettings,
    *,
    state: StateSource | None,
    keep_module: bool,
    ignore: Sequence[str],
    compile_again: bool,
) -> Engine:
    """Open an engine as ``CompiledProgram.open_engine`` does; ``lower`` lowers the programs of eager steps."""
    from zeroir.frontend.capture.precision import apply_precision
    from zeroir.frontend.source.meta_copy import deep_copy
    from zeroir.frontend.watch.watch import Watch
    from zeroir.runtime.engine.engine import Engine
    from zeroir.torch_ops.opaque import opaque_modules

    artifact, program = compiled.artifact, compiled.program
    require_opaque_modules(program, source, compiled.options)
    ignored = (ignore,) if isinstance(ignore, str) else ignore
    own = compiled.watch if source is compiled.source else None
    watch = None if own is None else own.copied()
    if watch is not None:
        watch.ignore(ignored)
        watch.require_unchanged(is_step=False)
    require_host_memory(
        outside_bytes(program), ranks=local_ranks(), memory_bytes=host_memory_bytes()
    )
    folder = artifact.offload_folder
    engine = Engine(
        program,
        replace(
            settings, weight=source.weight, disk_folder=None if folder is None else Path(folder)
        ),
        device=job_rank.device,
        accumulating=accumulating(compiled, job_rank.rank),
    )
    precision = compiled.options.precision
    engine.initialise(
        source.model() if source.is_in_hand else source.model,
        settings.seed,
        state=state,
        keep_module=keep_module,
        deep_copy=deep_copy,
        adapt=partial(apply_precision, precision=precision.dtype, keep_fp32=precision.keep_fp32),
    )
    code = None
    if watch is None:
        # Names in a model file refer to the module that was built last.
        if compile_again:
            code = code_of(compiled, source, job_rank.rank)
            watch = code.watch
            if code.source is not None:
                compiled = compiled.from_file(code.source, code.narrowings)
        else:
            watch = Watch.of(source, opaque=opaque_modules(program.segments))
        watch.ignore(ignored)
    watch.remember()
    if code is not None:
        code.follow_from(artifact, engine.job)
    again = partial(compiled_after_change, compiled, engine, watch)
    engine.follow(
        watch,
        signatures_of(compiled, engine, watch),
        again if compile_again and compiled.compile_again is not None else None,
    )
    engine.compile_eagerly_with(partial(compiled_eagerly, compiled, engine, lower))
    return engine
