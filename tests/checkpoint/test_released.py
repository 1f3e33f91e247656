"""The format: checkpoints of every released version are read as they were meant, and no field changes unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.checkpoint_files import rank_bytes, save_checkpoint
from zeroir.checkpoint.manifest import VERSION, Record
from zeroir.checkpoint.reading import CheckpointFiles, read_manifest, verify_all

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
