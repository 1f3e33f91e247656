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
