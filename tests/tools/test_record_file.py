"""The file that a benchmark writes what it measured to."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tools import record_file


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    record_file.add_option(parser)
    return parser


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    parser: argparse.ArgumentParser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "none" / "x.json"):
        with pytest.raises(SystemExit) as stopped:
            parser.parse_args(["--record", str(path)])
        assert stopped.value.code == 2
        assert f"{path} cannot be written" in capsys.readouterr().err


def test_a_record_says_how_it_was_made(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    path = parser.parse_args(["--record", str(tmp_path / "x.json")]).record
    record_file.write(path, "bench_x", {"rows": [["1"]]}, {"rounds": 2})
    found = json.loads(path.read_text())
    assert found["rows"] == [["1"]]
    assert found["about"]["command"][:3] == ["python", "-m", "tools.bench_x"]
    assert found["about"]["rounds"] == 2
    record_file.write(None, "bench_x", {})
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]
