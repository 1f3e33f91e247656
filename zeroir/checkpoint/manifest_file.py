"""The bytes of ``manifest.json``: ``{"checksum": …, "manifest": …}`` in one form only, which no damage keeps.

The form is that of Python's ``json.dumps(…, separators=(",", ":"))`` with a final newline. The checksum is that of the
manifest's value in the same form, without the newline.
"""

from __future__ import annotations

import json

from pydantic import JsonValue, ValidationError

from zeroir.checkpoint.checksums import checksum_of
from zeroir.checkpoint.consistency import contradictions
from zeroir.checkpoint.manifest import FORMAT, VERSION, Manifest
from zeroir.errors import DamagedCheckpointError, InternalError, UserError


def manifest_bytes(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``.

    Raises:
        InternalError: if the manifest contradicts itself; no reader would accept it.
    """
    problem = next(contradictions(manifest), None)
    if problem is not None:
        raise InternalError(f"The manifest of a checkpoint contradicts itself: {problem}.")
    return _document(_canonical(json.loads(manifest.model_dump_json())))


def parse_manifest(data: bytes, path: str) -> Manifest:
    """The manifest in the bytes of a file; ``path`` is for messages.

    Raises:
        DamagedCheckpointError: if the bytes are not those that ``manifest_bytes`` gives for some manifest, or it
            contradicts itself.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "it is not JSON") from error
    if not isinstance(document, dict) or list(document) != ["checksum", "manifest"]:
        raise _damaged(path, "it is not a manifest")
    value = document["manifest"]
    try:
        text = _canonical(value)
    except ValueError as error:
        raise _damaged(path, "it has numbers that JSON has not") from error
    if data != _document(text):
        raise _damaged(path, "its checksum is not that of its text")
    _require_version(value, path)
    try:
        manifest = Manifest.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _damaged(path, f"{place}: {first['msg']}") from error
    problem = next(contradictions(manifest), None)
    if problem is not None:
        raise _damaged(path, problem)
    return manifest


def _document(text: bytes) -> bytes:
    """The bytes of the file for the text of a manifest."""
    return b'{"checksum":"%s","manifest":%s}\n' % (checksum_of(text).encode(), text)


def _canonical(value: JsonValue) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _require_version(value: JsonValue, path: str) -> None:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f"'{path}' is not the manifest of a checkpoint of zeroir.")
    version = value.get("version")
    if not isinstance(version, list) or version[:1] != [VERSION[0]] or version > list(VERSION):
        raise UserError(
            f"'{path}' has version {version} of the format, and this zeroir reads {list(VERSION)}: "
            f"use the version of zeroir that saved it, or a later one."
        )


def _damaged(path: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"'{path}' is damaged: {problem}; use another checkpoint.")
