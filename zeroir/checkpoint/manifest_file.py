"""The bytes of ``manifest.json``: ``{"checksum": …, "manifest": …}`` in a canonical form, so that any damage shows.

The form is that of Python's ``json.dumps(…, separators=(",", ":"))`` with a final newline. The checksum is that of the
manifest's value in the same form, without the newline.
"""

from __future__ import annotations

import json
import re
from typing import Final

from pydantic import JsonValue, ValidationError

from zeroir.checkpoint.checksums import PREFIX, checksum_of
from zeroir.checkpoint.consistency import contradictions
from zeroir.checkpoint.manifest import FORMAT, VERSION, Manifest
from zeroir.errors import DamagedCheckpointError, InternalError, UserError

LARGEST_BYTES: Final = 1 << 30
"""The largest manifest: a few thousand ranks that save a hundred flats each need less."""

_HEAD: Final = re.compile(rb'\{"checksum":"(%s[0-9a-f]{32})","manifest":' % PREFIX.encode())
HEAD_BYTES: Final = len('{"checksum":"","manifest":') + len(checksum_of(b""))
"""The bytes before the text of the manifest."""

_TAIL: Final = b"}\n"


def manifest_bytes(manifest: Manifest) -> bytes:
    """Serialize a manifest to the bytes of ``manifest.json``.

    Raises:
        InternalError: if the manifest contradicts itself, so that no reader would accept it.
        UserError: if it is larger than readers accept.
    """
    problem = next(contradictions(manifest), None)
    if problem is not None:
        raise InternalError(f"The manifest of a checkpoint contradicts itself: {problem}.")
    data = _document(_canonical(json.loads(manifest.model_dump_json())))
    if len(data) > LARGEST_BYTES:
        raise UserError(
            f"The manifest of the checkpoint would have {len(data)} bytes, and {LARGEST_BYTES} is the limit: save "
            "large state as arrays or tensors, whose bytes are in other files."
        )
    return data


def require_head(head: bytes, path: str) -> None:
    """Check the first ``HEAD_BYTES`` of a file, so that no other large file is read as a manifest.

    Raises:
        DamagedCheckpointError: if no manifest begins with them.
    """
    if not _HEAD.fullmatch(head):
        raise _damaged(path, "it does not begin as a manifest does")


def parse_manifest(data: bytes, path: str) -> Manifest:
    """Parse the bytes of a manifest file; ``path`` is for messages.

    Raises:
        DamagedCheckpointError: if ``manifest_bytes`` returns other bytes for this manifest, or it contradicts itself.
    """
    require_head(data[:HEAD_BYTES], path)
    text = data[HEAD_BYTES : -len(_TAIL)]
    if data != _document(text):
        raise _damaged(path, "its checksum is not that of its text")
    try:
        value = json.loads(text)
        is_canonical = _canonical(value) == text
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "it is not JSON, or nested too deeply") from error
    if not is_canonical:
        raise _damaged(path, "its text is not in the form in which manifests are written")
    _require_version(value, path)
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = [".".join(str(part) for part in first["loc"])] if first["loc"] else []
        raise _damaged(path, ": ".join([*place, first["msg"]])) from error
    problem = next(contradictions(manifest), None)
    if problem is not None:
        raise _damaged(path, problem)
    return manifest


def _document(text: bytes) -> bytes:
    """Return the bytes of the file for the text of a manifest."""
    return b'{"checksum":"%s","manifest":%s%s' % (checksum_of(text).encode(), text, _TAIL)


def _canonical(value: JsonValue) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _require_version(value: JsonValue, path: str) -> None:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UserError(f"'{path}' is not the manifest of a checkpoint of zeroir.")
    version = value.get("version")
    is_known = (
        isinstance(version, list)
        and all(type(number) is int for number in version)
        and version[:1] == [VERSION[0]]
        and version <= list(VERSION)
    )
    if not is_known:
        raise UserError(
            f"'{path}' has version {version} of the format, and this zeroir reads {list(VERSION)}: "
            f"use the version of zeroir that saved it, or a later one."
        )


def _damaged(path: str, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"'{path}' is damaged: {problem}; use another checkpoint.")
