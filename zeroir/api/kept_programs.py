"""Lowered programs on disk, which are found by all that lowering depends on.

A model is traced each time it is compiled, so that no change of its code is missed; what a kept program saves is the
passes and their proofs. Its key is a hash of the logical program, of the passes with their options, and of the code of
zeroir that lowers and proves. It is a ``.zir`` file, so it is read as strictly as any, and verified anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from zeroir import artifact as artifacts
from zeroir.api.sentences import LOGGER
from zeroir.artifact import Artifact, program_digest
from zeroir.artifact.cache_folder import cache_folder
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.verify import verify

if TYPE_CHECKING:
    from zeroir.passes.base import Pass
    from zeroir.passes.manager import Proof

SWITCH: Final = "ZEROIR_KEEP_PROGRAMS"
"""The variable of the environment that switches this off, if it is ``off``."""

MOST_BYTES: Final = 1 << 30
"""The size of all kept programs together; those that were used longest ago are removed first."""

MOST_CONSTANTS_BYTES: Final = 64 << 20
"""A program with more bytes of constants, such as the weights of a module outside the model, is not kept.

Other values make another program, and a file has them twice.
"""

_FORMAT: Final = 1
_OWN_NAME: Final = re.compile(r"[0-9a-f]{64}\.zir|\.[0-9a-f]{64}\.zir\.[0-9a-f]+\.tmp")
_STALE_S: Final = 3600
"""The age of a file that is being written from which on its writer has ended."""

_LOWERING: Final = (
    *(
        "artifact",
        "checkpoint",
        "config",
        "deepspeed",
        "ir",
        "memory",
        "passes",
        "verify",
        "workspace",
    ),
    *("__init__.py", "errors.py", "schedules.py"),
)
"""The packages and modules of zeroir whose code decides what a logical program is lowered to."""


def proved(program: Program, passes: Sequence[Pass], prove: Callable[[], Proof]) -> Proof:
    """Return the proof of the program after these passes: a kept one, verified anew, or else that of ``prove``.

    Raises:
        UserError: if the switch is neither on nor off.
    """
    folder = cache_folder() / "programs" if _is_on() else None
    constants = (binding.data or b"" for binding in program.module_buffers)
    if folder is None or sum(map(len, constants)) > MOST_CONSTANTS_BYTES:
        return prove()
    path = folder / f"{key_of(program, passes)}.zir"
    proof = _found(path, program)
    if proof is None:
        proof = prove()
        _keep(path, program, proof.program)
    return proof


def key_of(program: Program, passes: Sequence[Pass]) -> str:
    """Return the SHA-256 of all that decides what a program is after these passes."""
    parts = (
        *(_FORMAT, artifacts.SCHEMA_VERSION, code_digest(), sys.version),
        *(program_digest(program), [step.spec() for step in passes]),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache
def code_digest() -> str:
    """Return the SHA-256 of the code that lowers and proves programs."""
    digest = hashlib.sha256()
    for file in lowering_files():
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def lowering_files() -> Iterator[Path]:
    """Yield the files of the code that lowers and proves programs, and of its data, in a fixed order."""
    root = Path(__file__).parents[1]
    for name in _LOWERING:
        place = root / name
        files = [place] if place.suffix else sorted(place.rglob("*"))
        yield from (file for file in files if file.is_file() and file.suffix != ".pyc")


def _is_on() -> bool:
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off"):
        raise UserError(f"The variable {SWITCH} is '{switch}': set it to on or off.")
    return switch == "on"


def _found(path: Path, program: Program) -> Proof | None:
    """Return the proof of a kept program; None if there is none. One that is not right is removed."""
    from zeroir.passes.manager import Proof

    if not path.exists():
        return None
    try:
        kept = artifacts.load(path)
    except UserError as error:
        problem = str(error)
    else:
        report = verify(kept.scheduled, reference=program)
        if kept.logical == program and report.is_valid:
            with contextlib.suppress(OSError):
                os.utime(path)
            # The file has no folder on a disk.
            return Proof(program=replace(kept.scheduled, options=program.options), report=report)
        problem = f"'{path}' is one of another model."
    if path.exists():  # another process may have removed it
        LOGGER.warning("A kept program is made again. %s", problem)
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    return None


def _keep(path: Path, logical: Program, scheduled: Program) -> None:
    """Write a program, if its folder is writable, and remove the oldest ones if there are too many."""
    from zeroir import __version__

    if path.exists():  # another rank has lowered it, too
        return
    kept = Artifact(
        logical=logical,
        scheduled=scheduled,
        model_path="a model",
        model_factory="",
        model_sha256="",
        torch_version="",
        zeroir_version=__version__,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        artifacts.save(kept, path)
        _remove_oldest(path.parent)
    except (OSError, UserError) as error:
        LOGGER.debug("The program is not kept: %s", error)


def _remove_oldest(folder: Path) -> None:
    now, total = time.time(), 0
    files: list[tuple[float, int, Path]] = []
    for file in filter(lambda file: _OWN_NAME.fullmatch(file.name), folder.iterdir()):
        with contextlib.suppress(FileNotFoundError):  # another process may have removed it
            status = file.stat()
            files.append((status.st_mtime, status.st_size, file))
    for used_at, size_bytes, file in sorted(files, reverse=True):
        total += size_bytes
        is_stale = file.suffix != ".zir" and now - used_at > _STALE_S
        if total > MOST_BYTES or is_stale:
            file.unlink(missing_ok=True)
