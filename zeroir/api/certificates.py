"""Certificates of programs that hold, as files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from zeroir.artifact.outputs import CERTIFICATE, write_whole
from zeroir.verify.certificate.certificate import certificate

if TYPE_CHECKING:
    from zeroir.api.compiled import CompiledProgram

_DIGEST: Final = slice(20, 52)
"""Where the SHA-256 of a program stands in its file."""


def write_certificate(compiled: CompiledProgram, program: Path, path: Path) -> None:
    """Write why the laws hold in a program that was read from a file and proved.

    Raises:
        UserError: if the program has something that no certificate can say, or the file cannot be written.
    """
    import msgpack

    with program.open("rb") as file:
        digest = file.read(_DIGEST.stop)[_DIGEST]
    claims = certificate(compiled.program, compiled.logical, digest)
    write_whole(path, msgpack.packb(claims), CERTIFICATE)
