"""What benchmarks wrote down keeps what the project promises."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tools import random_shapes, record_file
from tools.bench_offload import OFFLOADS
from tools.bench_predict import MODELS, MOST_ERROR, STAGES
from tools.source_mutants.packages import PACKAGES
from zeroir.ir.byte_sizes import parse_bytes

RECORDS = Path(__file__).parents[2] / "docs" / "records"


def test_every_recorded_prediction_is_near_what_was_measured() -> None:
    record = json.loads((RECORDS / "predict.json").read_text())
    rows = [dict(zip(record["head"], row, strict=True)) for row in record["rows"]]
    expected = {(Path(model).stem, str(stage)) for model in MODELS for stage in STAGES}
    assert {(row["model"], row["stage"]) for row in rows} == expected
    for row in rows:
        assert abs(float(row["error"].rstrip("%"))) <= 100 * MOST_ERROR, row


def test_a_training_with_states_of_8_bits_ends_with_the_loss_of_one_with_32() -> None:
    record = json.loads((RECORDS / "eight-bit.json").read_text())
    assert record["about"]["steps"] >= 2000
    rows = [dict(zip(record["head"], row, strict=True)) for row in record["rows"]]
    assert {row["bits"] for row in rows} == {"32", "8"}
    for row in rows:
        assert abs(float(row["difference"].rstrip(" %"))) <= 1.0, row
        assert row["bits"] == "32" or float(row["bytes of states a parameter"]) <= 2.1


def table(record: str, part: str) -> list[dict[str, str]]:
    content = json.loads((RECORDS / record).read_text())[part]
    return [dict(zip(content["head"], row, strict=True)) for row in content["rows"]]


def test_offloading_copied_what_was_planned_and_beside_segments() -> None:
    rows = {row["offloaded"]: row for row in table("bench-offload.json", "traffic")}
    assert set(rows) == {"nothing", *OFFLOADS}
    plain = rows.pop("nothing")
    for row in rows.values():
        assert row["as planned"] == "every step"
        assert float(row["beside segments"].rstrip("%")) >= 50
        assert parse_bytes(row["device"]) < parse_bytes(plain["device"])


def test_a_thousand_steps_of_random_shapes_compiled_nothing_and_have_the_bits_of_eager_pytorch() -> (
    None
):
    record = json.loads((RECORDS / "random-shapes.json").read_text())
    assert (record["about"]["ranks"], record["about"]["micro_steps"]) == (4, 3)
    rows = [dict(zip(record["head"], row, strict=True)) for row in record["rows"]]
    assert [row.pop("training") for row in rows] == list(random_shapes.TRAININGS)
    assert int(rows[0]["steps"].replace(",", "")) >= 1000
    for row in rows:
        assert int(row.pop("steps").replace(",", "")) >= 100
        assert int(row.pop("shapes")) > 100
        assert set(row.values()) == {"0"}, row


def test_updates_and_disks_reached_their_shares() -> None:
    content = json.loads((RECORDS / "bench-offload.json").read_text())["rates"]
    shares = {row[0]: float(row[-1].rstrip("%")) for row in content["rows"]}
    least = {
        "an update alone": 70,
        "an update in a step": 70,
        "reading a disk": 80,
        "writing a disk": 80,
    }
    for what, share in least.items():
        assert shares[what] >= share, what


def test_models_on_paper_fit_their_machines() -> None:
    rows = table("bench-offload.json", "paper")
    assert {row["model"] for row in rows} == {"gpt_10b", "llama_13b", "llama_70b", "gpt_175b"}
    for row in rows:
        for space in ("device", "host", "disk"):
            needed, _, limit = row[space].partition(" of ")
            assert needed == "0" or parse_bytes(needed) <= parse_bytes(limit), row


# ---- The file that a benchmark writes what it measured to


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
    (command,) = found["about"]["commands"]
    assert command[:3] == ["python", "-m", "tools.bench_x"]
    assert found["about"]["rounds"] == 2
    record_file.write(path, "bench_x", {}, after=[["python", "-m", "tools.bench_x", "--first"]])
    commands = record_file.commands_of(path)
    assert commands == [["python", "-m", "tools.bench_x", "--first"], command]
    assert record_file.commands_of(tmp_path / "none.json") == []
    record_file.write(None, "bench_x", {})
    assert [one.name for one in tmp_path.iterdir()] == ["x.json"]


def test_models_of_transformers_take_batches_of_any_shape() -> None:
    record = json.loads((RECORDS / "models.json").read_text())
    every = dict(zip(record["head"], record["rows"][-1], strict=True))
    assert every["kind"] == "all"
    assert int(every["compile for one shape"]) > 50
    assert int(every["share"].rstrip("%")) >= 90


def test_every_package_has_mutants_that_tests_were_asked_about() -> None:
    record = json.loads((RECORDS / "source-mutants.json").read_text())
    rows = {row[0]: list(map(int, row[1:-1])) for row in record["rows"]}
    assert set(rows) == {*PACKAGES, "all"}
    for made, noticed, survived, unreached, unfinished in rows.values():
        assert made == noticed + survived
        assert unreached + unfinished <= survived
    packages = [counts for package, counts in rows.items() if package != "all"]
    assert [sum(column) for column in zip(*packages, strict=True)] == rows["all"]
