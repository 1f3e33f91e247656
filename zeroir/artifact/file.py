"""Writing and reading ``.zir`` files.

The envelope is the same for every schema, so that errors distinguish a damaged file from a newer one::

    8 bytes   magic
    2 + 2     schema version: major, minor       (all numbers big-endian)
    8         length of the body
    32        SHA-256 of everything above and the body
    …         the body: one msgpack map, the fields of Artifact
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from zeroir.artifact.outputs import MAGIC, PROGRAM, write_whole
from zeroir.artifact.schema import SCHEMA_VERSION, SchemaError, TextError, pack, unpack
from zeroir.config import options_of
from zeroir.errors import InternalError, UserError
from zeroir.ir.limits import LARGEST_FILE_BYTES
from zeroir.ir.program import Program
from zeroir.ir.segments.allowlist import refusal
from zeroir.ir.segments.operators import call_problem, declaration_problem

_HEAD: Final = struct.Struct(">8sHHQ")
_DIGEST_BYTES: Final = 32
_START: Final = _HEAD.size + _DIGEST_BYTES
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRecord:
    """The configuration file that options came from.

    ``origins`` are pairs of an option and the place that set it: a key of the file, "command line" or "argument", or
    a default of the file's format. ``notes`` are lines on keys that have no meaning.
    """

    name: str
    origins: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """The contents of a ``.zir`` file.

    ``logical`` is the program for one device, before any pass, so that the file can be lowered again for another world
    size or stage without the model. ``scheduled`` is the program that runs; it names its passes. ``model_path`` and
    ``model_factory`` name the source of the parameters' initial values, and ``model_sha256`` is the hash of that file.
    Where a module in hand or a function was compiled, there is no file: ``model_path`` is its name in words, and
    ``model_factory`` and ``model_sha256`` are empty. ``model_imports`` are the user's modules that the file imports, as
    pairs of name and SHA-256; None in files without them. ``model_values`` are the numbers and texts that the file's
    code read when it was traced, as pairs of name and ``repr``. ``config`` is the configuration file of the
    compilation. ``offload_folder`` is the folder on the disk that a run uses for what is offloaded there, unless it
    names another.
    """

    logical: Program
    scheduled: Program
    model_path: str
    model_factory: str = "model"
    model_sha256: str
    model_imports: tuple[tuple[str, str], ...] | None = None
    model_values: tuple[tuple[str, str], ...] = ()
    torch_version: str
    zeroir_version: str
    config: ConfigRecord | None = None
    offload_folder: str | None = None

    @property
    def has_model_file(self) -> bool:
        """Whether the program was compiled from a model file."""
        return bool(self.model_factory)

    @property
    def passes(self) -> tuple[str, ...]:
        """The specs of the passes that made ``scheduled`` from ``logical``."""
        return self.scheduled.passes


def to_bytes(artifact: Artifact) -> bytes:
    """Return the bytes of the file, the same for equal artefacts.

    Raises:
        UserError: if a name cannot be stored.
        InternalError: if a field has the wrong type.
    """
    body = pack(artifact)
    try:
        unpack(Artifact, body)
    except TextError as error:
        raise UserError(
            f"{error.place} cannot be stored: {error.message}; change this name in the model."
        ) from error
    except SchemaError as error:
        raise InternalError(f"Cannot store {error.place}: {error.message}.") from error
    return envelope(body)


def envelope(body: bytes, version: tuple[int, int] = SCHEMA_VERSION) -> bytes:
    """Return the bytes of a file with any body; ``version`` is the (major, minor) version of its schema."""
    head = _HEAD.pack(MAGIC, *version, len(body))
    return head + hashlib.sha256(head + body).digest() + body


def from_bytes(data: bytes, name: str = "<bytes>") -> Artifact:
    """Return the artefact in the bytes of a file; errors call the file ``name``.

    Raises:
        UserError: if the bytes are no program, are damaged, have another schema, or name an op that may not run or an
            option that is wrong.
    """
    length = _body_length(data, name)
    _, major, minor, _ = _HEAD.unpack_from(data)
    body = data[_START:]
    if len(body) < length:
        raise UserError(
            f"'{name}' is cut off: it has {len(body)} of {length} bytes of its body; copy or "
            "compile it again."
        )
    digest = hashlib.sha256(data[: _HEAD.size])
    digest.update(body)
    if len(body) != length or digest.digest() != data[_HEAD.size : _START]:
        raise UserError(
            f"'{name}' is damaged: its contents do not match its SHA-256; copy or compile it again."
        )
    if major != SCHEMA_VERSION[0]:
        remedy = "upgrade zeroir" if major > SCHEMA_VERSION[0] else "compile it again"
        raise UserError(
            f"'{name}' has schema {major}.{minor} and this zeroir reads schema "
            f"{SCHEMA_VERSION[0]}: {remedy}."
        )
    artifact = _decoded(body, name, (major, minor))
    for program in (artifact.logical, artifact.scheduled):
        _check_ops(program, name)
    return replace(
        artifact,
        logical=_with_options(artifact.logical, name),
        scheduled=_with_options(artifact.scheduled, name),
    )


def save(artifact: Artifact, path: str | Path) -> None:
    """Write the file completely or not at all: readers never see a part of it.

    Raises:
        UserError: if the path cannot be written, or is a file that is no program.
    """
    write_whole(Path(path), to_bytes(artifact), PROGRAM)


def load(path: str | Path) -> Artifact:
    """Read a file; see :func:`from_bytes`.

    Raises:
        UserError: also if the file cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = bytearray(file.read(_START))
            stop = _START + _body_length(data, str(path))
            # One more byte shows that the file is too long. A device may have no end, so it is not read further.
            while len(data) <= stop:
                chunk = file.read(min(_CHUNK_BYTES, stop + 1 - len(data)))
                if not chunk:
                    break
                data += chunk
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    return from_bytes(bytes(data), str(path))


def require_program(path: str | Path) -> None:
    """Look at the beginning of a file.

    Raises:
        UserError: where it cannot be read, or is no program.
    """
    try:
        with Path(path).open("rb") as file:
            _body_length(file.read(_START), str(path))
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}.") from error


def _body_length(data: bytes | bytearray, name: str) -> int:
    """Return the length of the body in bytes; a UserError if the data have no complete envelope of a program."""
    _check_magic(bytes(data[:_START]), name)
    if len(data) < _START:
        raise UserError(f"'{name}' is cut off after {len(data)} bytes: copy or compile it again.")
    length: int = _HEAD.unpack_from(data)[-1]
    if length > LARGEST_FILE_BYTES:
        raise UserError(
            f"'{name}' is damaged: it announces {length:,} more bytes, more than any program has; copy or compile "
            "it again."
        )
    return length


def _check_magic(data: bytes, name: str) -> None:
    if data.startswith(MAGIC):
        return
    if data.startswith(b"zeroir "):
        raise UserError(
            f"'{name}' is the text of a program, not a compiled one: give the .zir file that "
            "'zeroir compile' wrote."
        )
    if data and MAGIC.startswith(data):
        raise UserError(f"'{name}' is cut off after {len(data)} bytes: copy or compile it again.")
    raise UserError(
        f"'{name}' is not a zeroir program: give a .zir file that 'zeroir compile' wrote."
    )


def _decoded(body: bytes, name: str, version: tuple[int, int]) -> Artifact:
    written = f"schema {version[0]}.{version[1]}"
    read = f"{SCHEMA_VERSION[0]}.{SCHEMA_VERSION[1]}"
    remedy = "upgrade zeroir" if version > SCHEMA_VERSION else "compile it again"
    try:
        return unpack(Artifact, body)
    except SchemaError as error:
        place = f" at {error.place}" if error.place else ""
        raise UserError(
            f"'{name}' ({written}) cannot be read by this zeroir (schema {read}): "
            f"{error.message}{place}; {remedy}."
        ) from error


def _with_options(program: Program, name: str) -> Program:
    """Return the program with the options that its texts describe; UserError if one is wrong."""
    try:
        return replace(program, options=options_of(program))
    except UserError as error:
        raise UserError(f"'{name}' has a wrong option: {error} Compile it again.") from None


def _check_ops(program: Program, name: str) -> None:
    for operator in program.operators:
        reason = declaration_problem(operator)
        if reason is not None:
            raise UserError(
                f"'{name}' is refused: it declares the operator '{operator.name}', which {reason}; compile it again "
                "from a model that you trust."
            )
    declared = program.operator_by_name
    for segment in program.segments:
        for node in segment.nodes:
            reason = refusal(node.op, declared) or call_problem(node, declared)
            if reason is not None:
                raise UserError(
                    f"'{name}' is refused: segment @{segment.name} calls '{node.op}', which "
                    f"{reason}; compile it again from a model that you trust."
                )
