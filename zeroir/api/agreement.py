"""The ranks of a run compare their options before the first step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from zeroir.api.run_options import RunOptions
from zeroir.errors import UserError

if TYPE_CHECKING:
    from zeroir.runtime.rendezvous import JobRank


_OWN: Final = ("model", "allow_model_change", "log", "tensorboard", "machine", "as_json")
"""Options that say where a rank finds something, or what rank 0 writes: ranks may differ in them."""


def require_same_options(job_rank: JobRank, options: RunOptions) -> None:
    """Compare the options that decide what a rank does in a step with those of rank 0; all ranks call this together.

    Raises:
        UserError: on the first rank that differs, naming an option. Ranks that do different things hang or crash.
        PeerError: on the other ranks.
    """
    from zeroir.runtime.comm.job import PeerError, exchanged_texts

    if job_rank.world_size == 1:
        return
    every: list[Mapping[str, object]] = [
        json.loads(text)
        for text in exchanged_texts(json.dumps(_common(options), default=str), job_rank.device)
    ]
    for rank, given in enumerate(every):
        for name in sorted(given.keys() | every[0].keys()):
            if given.get(name) != every[0].get(name):
                kind = UserError if rank == job_rank.rank else PeerError
                raise kind(
                    f"Rank {rank} was started with {_shown(name, given.get(name))}, but rank 0 with "
                    f"{_shown(name, every[0].get(name))}: start every rank with the same options."
                )


def _common(options: RunOptions) -> dict[str, object]:
    """The options that all ranks must share, by their names on the command line."""
    values = {name: value for name, value in asdict(options).items() if name not in _OWN}
    nested: dict[str, object] = {**values.pop("offload")}
    saving: dict[str, object] = values.pop("save") or {}
    values["timeout"] = values.pop("timeout_s")
    nested |= {"save" if name == "folder" else _SAVING[name]: v for name, v in saving.items()}
    return {name.replace("_", "-"): value for name, value in {**values, **nested}.items()}


_SAVING: Final = {"every": "save-every", "keep": "keep", "keep_best": "keep-best"}


def _shown(name: str, value: object) -> str:
    match value:
        case None:
            return f"no --{name}"
        case bool():
            return f"--{'' if value else 'no-'}{name}"
        case _:
            return f"--{name} {value}"
