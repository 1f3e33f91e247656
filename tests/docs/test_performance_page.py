"""The figures of docs/performance.md are those of its records."""

from __future__ import annotations

import json
import re

from tools import performance_page


def test_every_table_is_made_from_its_record() -> None:
    page = performance_page.PAGE.read_text()
    assert performance_page.rendered(page) == page


def test_a_figure_that_was_changed_by_hand_is_found() -> None:
    page = performance_page.PAGE.read_text()
    changed = re.sub(r"\| 0\.\d\d \|", "| 0.01 |", page, count=1)
    assert changed != page
    assert performance_page.rendered(changed) == page


def test_records_say_how_they_were_made() -> None:
    records = sorted(performance_page.RECORDS.glob("*.json"))
    assert records
    for path in records:
        assert json.loads(path.read_text())["about"]["torch"]
