"""The figures of the documents are those of their records."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tools import record_tables


def test_every_table_is_made_from_its_record() -> None:
    for path in record_tables.PAGES:
        page = path.read_text()
        assert record_tables.rendered(page) == page, path


def test_a_place_without_a_record_stays_empty(tmp_path: Path) -> None:
    page = "<!-- record peers.json -->\n<!-- end -->\n"
    assert record_tables.rendered(page, tmp_path) == page


def test_a_figure_that_was_changed_by_hand_is_found() -> None:
    page = (record_tables.DOCS / "performance.md").read_text()
    changed = re.sub(r"\| 0\.\d\d \|", "| 0.01 |", page, count=1)
    assert changed != page
    assert record_tables.rendered(changed) == page


def test_records_say_how_they_were_made() -> None:
    records = sorted(record_tables.RECORDS.glob("*.json"))
    assert records
    for path in records:
        assert json.loads(path.read_text())["about"]["torch"]
