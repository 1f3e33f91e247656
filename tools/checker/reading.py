"""Reads the envelope and the body of a ``.zir`` file; every field of the body is compared with a closed schema."""

from __future__ import annotations

import hashlib
import json
import struct
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgpack

_HEAD: Final = struct.Struct(">8sHHQ")
_MAGIC: Final = b"\x89zeroir\n"
_MAJOR: Final = 3
_DIGEST_BYTES: Final = 32
_LARGEST_BODY: Final = 2**30
_LONGEST_TEXT: Final = 100_000
_DEEPEST: Final = 64
_TURNING: Final = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"

ITEM_BYTES: Final = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2, "f8_e4m3": 1, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1,
}  # fmt: skip

_PAGE: Final = Path(__file__).parents[2] / "docs/ir.md"
_USUAL_STREAMS: Final = [
    {"name": name, "executor": executor}
    for name, executor in (
        ("compute", "device"), ("gather", "device"), ("reduce", "device"), ("copy_in", "device"),
        ("copy_out", "device"), ("optimizer", "host"), ("io", "disk"),
    )
]  # fmt: skip


class NoProgramError(Exception):
    """The file is not a program that this checker can read; the message is one sentence."""


class FileRecord:
    """A map of the file: its class, and its fields as attributes."""

    def __init__(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields)
        self.kind = kind

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the schema says which fields there are
        raise AttributeError(f"{self.kind} has no field {name}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FileRecord) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(sorted(self.__dict__.items(), key=lambda item: item[0])))


def read_file(path: str, *, with_dims: bool = False) -> FileRecord:
    """Return both programs of a file, with what stands beside them; their sizes may depend on dims where that is said.

    Raises:
        NoProgramError: if the file cannot be read, or is not a program of this schema.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise NoProgramError(f"'{path}' cannot be read: {error.strerror or error}.") from error
    try:
        return read_bytes(data, with_dims=with_dims)
    except NoProgramError as error:
        raise NoProgramError(f"'{path}' {error}.") from None


def read_bytes(data: bytes, *, with_dims: bool = False) -> FileRecord:
    """Return both programs in the bytes of a file; the sentence of a NoProgramError lacks its subject."""
    start = _HEAD.size + _DIGEST_BYTES
    if len(data) < start or not data.startswith(_MAGIC):
        raise NoProgramError("is no compiled program")
    _, major, minor, length = _HEAD.unpack_from(data)
    head, digest, body = data[: _HEAD.size], data[_HEAD.size : start], data[start:]
    if length > _LARGEST_BODY or len(body) != length:
        raise NoProgramError(f"has {len(body)} bytes after its head, which announces {length}")
    if hashlib.sha256(head + body).digest() != digest:
        raise NoProgramError("does not match its SHA-256")
    if major != _MAJOR:
        raise NoProgramError(f"has schema {major}.{minor}; this checker reads schema {_MAJOR}")
    try:
        plain = msgpack.unpackb(body, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise NoProgramError("has a body that is no msgpack") from error
    try:
        artifact = _Schema().decoded("Artifact", plain, "", 0)
    except RecursionError as error:
        raise NoProgramError("nests too deep") from error
    assert isinstance(artifact, FileRecord)
    for program in (artifact.logical, artifact.scheduled):
        if (program.dims or program.sizes) and not with_dims:
            raise NoProgramError("has sizes that depend on dims, which this checker does not read")
    return artifact


def _fail(place: str, wanted: str) -> NoProgramError:
    return NoProgramError(f"has no {wanted} at {place.lstrip('.') or 'its top'}")


class _Schema:
    """The block of the page that describes the body."""

    def __init__(self) -> None:
        self._rules: dict[str, list[str]] = {}
        block = (
            _PAGE.read_text("utf-8").partition("<!-- schema -->")[2].partition("<!-- end -->")[0]
        )
        name = ""
        for line in block.splitlines():
            words = line.split()
            if line[:1].isalpha():
                name = words.pop(0)
                self._rules[name] = words
            elif name and words:
                self._rules[name] += words

    def decoded(self, kind: str, value: object, place: str, depth: int) -> Any:  # noqa: ANN401
        """Return the value as records, tuples and plain values; a NoProgramError where it is none of a type."""
        if kind.endswith("?"):
            return None if value is None else self.decoded(kind[:-1], value, place, depth)
        if kind.endswith("*"):
            if not isinstance(value, list):
                raise _fail(place, "list")
            of = kind[:-1]
            return tuple(
                self.decoded(of, item, f"{place}[{i}]", depth) for i, item in enumerate(value)
            )
        if kind == "arg":
            return _argument(value, place, depth)
        rule = self._rules.get(kind)
        if rule is None:
            return _plain(kind, value, place)
        if rule[:1] != ["="]:
            return self._record(kind, value, place, depth)
        words = " ".join(rule[1:])
        if "|" in words:
            tag = value.get("type") if isinstance(value, dict) else None
            if not isinstance(value, dict) or tag not in words.split(" | "):
                raise _fail(place, kind)
            return self._record(
                str(tag), {k: v for k, v in value.items() if k != "type"}, place, depth
            )
        if words.startswith("("):
            kinds = words.strip("()").split()
            if not isinstance(value, list) or len(value) != len(kinds):
                raise _fail(place, "tuple")
            return tuple(
                self.decoded(k, v, place, depth) for k, v in zip(kinds, value, strict=True)
            )
        if value not in words.split():
            raise _fail(place, kind)
        return value

    def _record(self, kind: str, value: object, place: str, depth: int) -> FileRecord:
        if not isinstance(value, dict):
            raise _fail(place, kind)
        fields: dict[str, Any] = {}
        for word in self._rules[kind]:
            name, _, rest = word.partition(":")
            of, has_default, default = rest.partition("=")
            where = f"{place}.{name}"
            if name in value:
                fields[name] = self.decoded(of, value[name], where, depth)
            elif not has_default:
                raise _fail(where, of)
            elif default == "null":
                fields[name] = (
                    self.decoded(of, _USUAL_STREAMS, where, depth) if name == "streams" else None
                )
            else:
                fields[name] = self.decoded(of, json.loads(default), where, depth)
        if value.keys() - fields.keys():
            raise _fail(
                f"{place}.{min(map(str, value.keys() - fields.keys()))}", "such field in the schema"
            )
        if "kind" in fields:
            fields["kind_"] = fields.pop("kind")
        return FileRecord(kind, fields)


def _plain(kind: str, value: object, place: str) -> object:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    match kind:
        case "str" if isinstance(value, str):
            for c in value if not (value.isascii() and value.isprintable()) else "":
                if c in _TURNING or unicodedata.category(c) in {"Cc", "Zl", "Zp", "Cs"}:
                    raise _fail(place, "text without control characters")
            if len(value) <= _LONGEST_TEXT:
                return value
        case "int" if is_whole:
            assert isinstance(value, int)
            if -(2**63) <= value < 2**63:
                return value
        case "float" if is_whole or isinstance(value, float):
            return float(value)  # type: ignore[arg-type]
        case "bool" if isinstance(value, bool):
            return value
        case "bytes" if isinstance(value, bytes):
            return value
        case "constant" if value is None or isinstance(value, bool | int | float | str):
            return value
        case _:
            pass
    raise _fail(place, kind)


def _argument(value: object, place: str, depth: int) -> object:
    """An argument of a node; a list begins with the word that says its type, and becomes a tuple."""
    if not isinstance(value, list):
        return _plain("constant", value, place)
    match value:
        case ["ref", int() as index]:
            return "ref", index
        case ["symbol" | "dtype" | "int" as tag, str() as name]:
            return tag, _plain("str", name, place)
        case ["list", list() as items] if depth < _DEEPEST:
            return "list", tuple(_argument(item, place, depth + 1) for item in items)
    raise _fail(place, "argument")
