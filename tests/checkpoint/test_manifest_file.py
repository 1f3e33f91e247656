"""Manifests come back as they were, and no other bytes are a manifest."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import cast

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue

from tests.support.checkpoint_files import (
    ORIGIN,
    manifests,
    rank_bytes,
    save_checkpoint,
    signed_manifest,
)
from zeroir.checkpoint.checksums import checksum_of
from zeroir.checkpoint.manifest import VERSION, Manifest, Piece, Record, StoredFile, StoredTensor
from zeroir.checkpoint.manifest_file import manifest_bytes, parse_manifest
from zeroir.checkpoint.reading import CheckpointFiles, read_manifest, verify_all
from zeroir.errors import InternalError, UserError

PATH = "runs/step-00000001/manifest.json"
Edit = dict[str, JsonValue]


@pytest.mark.slow
@given(manifests())
def test_manifests_come_back(manifest: Manifest) -> None:
    data = manifest_bytes(manifest)
    again = parse_manifest(data, PATH)
    assert again == manifest
    assert manifest_bytes(again) == data


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_metrics_that_json_has_not_come_back(value: float) -> None:
    data = manifest_bytes(Manifest(step=1, origin=ORIGIN, metrics={"loss": value}))
    assert repr(parse_manifest(data, PATH).metrics["loss"]) == repr(value)


@given(manifests(), st.data())
def test_no_flipped_bit_passes(manifest: Manifest, data: st.DataObject) -> None:
    whole = bytearray(manifest_bytes(manifest))
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UserError, match=f"'{PATH}' is"):
        parse_manifest(bytes(whole), PATH)


def test_no_bit_of_a_manifest_is_free_and_no_part_is_a_manifest() -> None:
    whole = manifest_bytes(Manifest(step=1, origin=ORIGIN, metrics={"loss": 0.1}))
    for bit in range(len(whole) * 8):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UserError, match=f"'{PATH}' is"):
            parse_manifest(bytes(flipped), PATH)
    for length in range(len(whole)):
        with pytest.raises(UserError, match=f"'{PATH}' is"):
            parse_manifest(whole[:length], PATH)


def test_the_checksum_is_that_of_the_json_that_python_writes() -> None:
    document = json.loads(manifest_bytes(Manifest(step=1, origin=ORIGIN)))
    text = json.dumps(document["manifest"], separators=(",", ":")).encode()
    assert document["checksum"] == f"xxh3_128:{xxhash.xxh3_128_hexdigest(text)}"


def plain_manifest() -> Edit:
    """The JSON of a small manifest."""
    manifest = Manifest(step=1, origin=ORIGIN)
    return cast("Edit", json.loads(manifest_bytes(manifest))["manifest"])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"version": [2, 0]}, r"has version \[2, 0\] of .* this zeroir reads \[1, 0\]"),
        ({"version": [1, 1], "more": 1}, r"has version \[1, 1\] of the format"),
        ({"version": None}, "has version None"),
        ({"format": "other"}, "is not the manifest of a checkpoint of zeroir"),
        ({"more": 1}, "is damaged: more: Extra inputs"),
        ({"step": "many"}, "is damaged: step: "),
    ],
)
def test_what_this_version_cannot_read_is_refused(edit: Edit, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_manifest(signed_manifest({**plain_manifest(), **edit}), PATH)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"manifest":1,"checksum":2}\n',
        b'{"checksum":"xxh3_128:","manifest":NaN}\n',
        b"[" * 100_000,
        signed_manifest([]),
        signed_manifest({"step": 1, "format": None}),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(UserError, match=f"'{PATH}' is"):
        parse_manifest(data, PATH)


@given(manifests())
def test_a_piece_that_is_missing_is_noticed(manifest: Manifest) -> None:
    flat = manifest.flats[0]
    master = flat.quantities[0]
    covered = {
        element
        for parameter in flat.parameters
        for element in range(parameter.offset, parameter.offset + prod(parameter.shape))
    }
    for piece in master.pieces:
        rest = tuple(kept for kept in master.pieces if kept != piece)
        quantities = (master.model_copy(update={"pieces": rest}), *flat.quantities[1:])
        edited = _with_flat(manifest, quantities=quantities)
        if covered.isdisjoint(range(piece.start, piece.stop)):
            manifest_bytes(edited)
        else:
            with pytest.raises(InternalError, match="no tensor has element"):
                manifest_bytes(edited)


@given(manifests())
def test_an_element_in_two_tensors_is_noticed(manifest: Manifest) -> None:
    flat = manifest.flats[0]
    moment = flat.quantities[1]
    if not moment.pieces:
        return
    twice = moment.model_copy(update={"pieces": (*moment.pieces, moment.pieces[0])})
    with pytest.raises(InternalError, match=r"(?s)exp_avg of .* has elements in several tensors"):
        manifest_bytes(_with_flat(manifest, quantities=(flat.quantities[0], twice)))


def _with_flat(manifest: Manifest, **update: object) -> Manifest:
    return manifest.model_copy(update={"flats": (manifest.flats[0].model_copy(update=update),)})


def _file(name: str, **update: object) -> StoredFile:
    checksum = checksum_of(b"")
    tensor = StoredTensor(name="t", dtype="f32", numel=2, checksum=checksum)
    sums = {"checksum": checksum, "header_checksum": checksum}
    file = StoredFile(name=name, size_bytes=100, tensors=(tensor,), **sums)
    return file.model_copy(update=update)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        *(
            ((_file(name),), f"'{name}' is not a name of a file")
            for name in ("../x", "/etc/passwd", "..", "manifest.json")
        ),
        ((_file("a"), _file("a")), "the file a stands twice"),
        ((_file("a", size_bytes=17),), "a is smaller than its tensors"),
        ((_file("a", tensors=_file("a").tensors * 2),), "the tensor of a t stands twice"),
    ],
)
def test_files_are_in_the_folder(files: tuple[StoredFile, ...], problem: str) -> None:
    manifest = Manifest(step=1, origin=ORIGIN, files=files)
    with pytest.raises(InternalError, match=problem):
        manifest_bytes(manifest)
    with pytest.raises(UserError, match=f"is damaged: .*{problem}"):
        parse_manifest(signed_manifest(json.loads(manifest.model_dump_json())), PATH)


@given(manifests(), st.sampled_from(["file", "tensor", "stop"]))
def test_pieces_name_tensors_of_their_size(manifest: Manifest, field: str) -> None:
    flat = manifest.flats[0]
    moment = flat.quantities[1]
    if not moment.pieces:
        return
    last = max(moment.pieces, key=lambda piece: piece.stop)
    update: dict[str, object] = {field: last.stop + 1 if field == "stop" else "none"}
    wrong: Piece = last.model_copy(update=update)
    pieces = tuple(wrong if piece == last else piece for piece in moment.pieces)
    quantities = (flat.quantities[0], moment.model_copy(update={"pieces": pieces}))
    with pytest.raises(InternalError, match=r"(?s)exp_avg of .* (does not exist|which has)"):
        manifest_bytes(_with_flat(manifest, quantities=quantities))


# ---- The format: checkpoints of every released version are read as they were meant, and no field changes unseen


DATA = Path(__file__).parents[1] / "data" / "checkpoints"
LOCK = DATA / "manifest_lock.json"
CURRENT = DATA / f"{VERSION[0]}.{VERSION[1]}"
NUMEL = 6


def test_checkpoints_of_every_version_are_read(update_golden: bool) -> None:
    if update_golden and not CURRENT.exists():
        save_checkpoint(str(CURRENT), step=7, numel=NUMEL, metrics={"loss": 0.1})
    released = sorted(path for path in DATA.iterdir() if path.is_dir())
    assert CURRENT in released, "run this test with --update-golden"
    for path in released:
        manifest = read_manifest(str(path))
        verify_all(str(path), manifest)
        assert (manifest.step, manifest.metrics) == (7, {"loss": 0.1})
        with CheckpointFiles(path=str(path), manifest=manifest) as files:
            for quantity in manifest.flats[0].quantities:
                for rank, piece in enumerate(quantity.pieces):
                    data = files.bytes(piece.file, piece.tensor, 0, NUMEL)
                    assert data == rank_bytes(7, rank, NUMEL)[piece.tensor]


def test_the_fields_are_the_locked_ones(update_golden: bool) -> None:
    # Other modules have records of their own, which no file contains.
    records = [
        record for record in Record.__subclasses__() if record.__module__ == Record.__module__
    ]
    schema = {
        "version": list(VERSION),
        "records": {record.__name__: _fields(record) for record in records},
    }
    if update_golden:
        LOCK.write_text(json.dumps(schema, indent=1) + "\n", "utf-8")
    if json.loads(LOCK.read_text("utf-8")) != schema:
        pytest.fail(
            "The fields of the manifest changed. Once its version is released, raise VERSION in "
            "zeroir/checkpoint/manifest.py, by a minor version if new fields have defaults; then run this test with "
            "--update-golden and name the change in CHANGELOG.md."
        )


def _fields(record: type[Record]) -> dict[str, str]:
    """The fields of a class as the source has them: their types and defaults."""
    return {
        name: record.__annotations__[name]
        + ("" if field.is_required() else f" = {field.default!r}")
        for name, field in record.model_fields.items()
    }
