"""The ranks of a job compare their model files, and those of a run their options, before the first step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from zeroir.api.running.run_options import LOWERING_ROWS, RunOptions
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.frontend.source.source import ModelSource
    from zeroir.runtime.distributed.rendezvous import JobRank


def require_same_options(
    job_rank: JobRank, options: RunOptions, changes: Mapping[str, object]
) -> None:
    """Compare the options that determine a rank's work in a step with those of rank 0; collective over all ranks.

    Raises:
        UserError: on the first rank that differs, naming an option. Otherwise the ranks would hang or crash.
        PeerError: on the other ranks.
    """
    for rank, name, given, of_rank_0 in _differences(job_rank, _common(options, changes)):
        raise _kind(rank, job_rank)(
            f"Rank {rank} was started with {_shown(name, given)}, but rank 0 with {_shown(name, of_rank_0)}: start "
            "every rank with the same options."
        )


def require_same_model(job_rank: JobRank, source: ModelSource) -> None:
    """Compare the model file, and the user's modules that it imports, with those of rank 0; collective over all ranks.

    A program does not contain the data and the initial values, which come from the model file.

    Raises:
        UserError: on the first rank that differs, naming the file or module.
        PeerError: on the other ranks.
    """
    file = source.file
    hashes = {} if file is None else {"model file": file.sha256}
    if file is not None:
        hashes |= {f"module {name}": sha256 for name, sha256 in file.imports.items()}
    for rank, name, given, of_rank_0 in _differences(job_rank, hashes):
        raise _kind(rank, job_rank)(
            f"Rank {rank} has another {name} than rank 0 (SHA-256 {_shortened(given)} against "
            f"{_shortened(of_rank_0)}): start every rank with the same model file, and the same modules beside it."
        )


def _differences(
    job_rank: JobRank, own: Mapping[str, object]
) -> Iterator[tuple[int, str, object, object]]:
    """Yield each value that differs from rank 0: the rank, the name, and both values. Collective over all ranks."""
    from zeroir.runtime.comm.job import exchanged_texts

    if job_rank.world_size == 1:
        return
    texts = exchanged_texts(json.dumps(own, default=str), job_rank.device)
    every: list[Mapping[str, object]] = [json.loads(text) for text in texts]
    for rank, given in enumerate(every):
        for name in sorted(given.keys() | every[0].keys()):
            if given.get(name) != every[0].get(name):
                yield rank, name, given.get(name), every[0].get(name)


def _kind(rank: int, job_rank: JobRank) -> type[UserError]:
    """Return the class of the error about a difference on a rank, so that its own message comes first."""
    from zeroir.runtime.comm.job import PeerError

    return UserError if rank == job_rank.rank else PeerError


def _common(options: RunOptions, changes: Mapping[str, object]) -> dict[str, object]:
    """Return the options that all ranks must share, by their names on the command line."""
    rows = options.rows()
    values = {
        row.flag: options.value(name) for name, row in rows.items() if not row.option.is_of_one_rank
    }
    values |= {LOWERING_ROWS[name].flag: value for name, value in changes.items()}
    return {flag.removeprefix("--"): value for flag, value in values.items()}


def _shown(name: str, value: object) -> str:
    match value:
        case None:
            return f"no --{name}"
        case bool():
            return f"--{'' if value else 'no-'}{name}"
        case _:
            return f"--{name} {value}"


def _shortened(sha256: object) -> str:
    return "none" if sha256 is None else f"{str(sha256)[:16]}…"
