"""The program that ``zeroir run`` trains with, lowered again if the job or the run's options require another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from zeroir.api.compiled import CompiledProgram, specialised
from zeroir.api.compiling import compile_source
from zeroir.api.running.engines import lowered_again_note
from zeroir.api.running.outside_memory import outside_bytes, outside_note, require_disk_folder
from zeroir.api.running.run_options import RunOptions
from zeroir.api.sentences import say, warnings_as_sentences
from zeroir.config import changed
from zeroir.errors import UserError
from zeroir.ir.byte_sizes import format_bytes

if TYPE_CHECKING:
    from zeroir.frontend.source.source import ModelSource
    from zeroir.ir.program import Program
    from zeroir.runtime.distributed.rendezvous import JobRank


def with_optimizer_bits(
    compiled: CompiledProgram, source: ModelSource, changes: Mapping[str, object]
) -> CompiledProgram:
    """Return the program with optimizer states of the requested bits; traced again if it has others.

    Raises:
        UserError: if its optimizer does not support them.
    """
    bits = changes.get("optimizer_bits")
    if bits in (None, compiled.options.optimizer.bits):
        return compiled
    options = changed(compiled.requested, optimizer_bits=bits)
    traced = compile_source(source, options, compiled.config)
    return replace(traced, path=compiled.path)


def fitted_to_job(
    compiled: CompiledProgram,
    job_rank: JobRank,
    options: RunOptions,
    changes: Mapping[str, object],
) -> CompiledProgram:
    """Lower the program once for the job's world size and the run's options; rank 0 prints notes on it.

    Raises:
        UserError: if they conflict; in fp16 with ``--check-finite``, where gradients that are not finite are a part of
            loss scaling.
    """
    with same_on_all_ranks(job_rank):
        if options.check_finite and compiled.options.precision.is_fp16:
            raise UserError(
                "--check-finite has no meaning in fp16, where steps with gradients that are not finite are skipped: "
                "leave it out."
            )
        note = lowered_again_note(compiled.program, job_rank.world_size)
        compiled = specialised(
            compiled,
            changes,
            world_size=job_rank.world_size,
            updates_last=options.check_finite,
        )
        outside = outside_bytes(compiled.program)
        require_disk_folder(outside, compiled.artifact.offload_folder)
    if job_rank.rank == 0:
        notes = note, construction_note(compiled.program), outside_note(outside)
        for sentence in filter(None, notes):
            say(sentence)
    return compiled


_NOTABLE_BYTES: Final = 1 << 30


def construction_note(program: Program) -> str | None:
    """Return a note on the host memory that rank 0 needs to build the model; None if it is below 1 GiB."""
    numel = sum(flat.numel for flat in program.flats)
    if 4 * numel < _NOTABLE_BYTES:
        return None
    return (
        f"Rank 0 builds the whole model and sends it to the other ranks; until then its host needs "
        f"{format_bytes(4 * numel)} more memory, if the model is in FP32."
    )


@contextmanager
def same_on_all_ranks(job_rank: JobRank) -> Iterator[None]:
    """Run a body whose errors and warnings are the same on every rank, and report only rank 0's."""
    from zeroir.runtime.comm.job import PeerError

    try:
        with warnings_as_sentences(is_silent=job_rank.rank != 0):
            yield
    except UserError as error:
        if job_rank.rank == 0:
            raise
        raise PeerError(str(error)) from error
