"""What benchmarks wrote down keeps what the project promises."""

from __future__ import annotations

import json
from pathlib import Path

from tools.bench_predict import MODELS, MOST_ERROR, STAGES

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
