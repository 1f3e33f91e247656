"""The ``.zir`` file: a compiled program that can be stored, sent and proved again, and that can run no code.

It is msgpack with a fixed envelope, holds plain data only, names only ops of the allow-list, and
has the same bytes for the same contents. Loading checks its form; whether the program is valid is
for ``zeroir.verify``.
"""

from __future__ import annotations

from zeroir.artifact.file import (
    Artifact,
    envelope,
    from_bytes,
    load,
    save,
    to_bytes,
)
from zeroir.artifact.schema import SCHEMA_VERSION, program_digest

__all__ = [
    "SCHEMA_VERSION",
    "Artifact",
    "envelope",
    "from_bytes",
    "load",
    "program_digest",
    "save",
    "to_bytes",
]
