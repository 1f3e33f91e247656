"""The ``.zir`` file: a compiled program that can be stored, sent and proved again, and that contains no code.

The file is msgpack with a fixed envelope. It holds only plain data, names only pure ops, which are on the list or
declared with their schemas, and has equal bytes for equal contents. Loading checks the form of the file;
``zeroir.verify`` checks the program.
"""

from __future__ import annotations

from zeroir.artifact.file import (
    Artifact,
    ConfigRecord,
    envelope,
    from_bytes,
    load,
    require_program,
    save,
    to_bytes,
)
from zeroir.artifact.schema import SCHEMA_VERSION, program_digest

__all__ = [
    "SCHEMA_VERSION",
    "Artifact",
    "ConfigRecord",
    "envelope",
    "from_bytes",
    "load",
    "program_digest",
    "require_program",
    "save",
    "to_bytes",
]
