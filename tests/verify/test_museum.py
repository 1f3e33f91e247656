"""Published bugs of sharded training: the law that refuses each, and the page that lists them."""

from __future__ import annotations

from datetime import date
from functools import cache
from pathlib import Path

import pytest

from tests.verify.museum.exhibit import Exhibit
from tests.verify.museum.gradients import GRADIENTS
from tests.verify.museum.memory import MEMORY, ORDER
from tests.verify.museum.page import page
from tests.verify.museum.subjects import Subject
from tests.verify.museum.unseen import UNSEEN, UNWRITABLE
from tests.verify.museum.updates import UPDATES
from zeroir.verify import Report, verify

PAGE = Path(__file__).parents[2] / "docs" / "museum.md"
EXHIBITS = (*MEMORY, *ORDER, *GRADIENTS, *UPDATES)
REST = (*UNSEEN, *UNWRITABLE)


@cache
def undamaged(make: Subject) -> Report:
    return verify(*make())


@cache
def refusal(exhibit: Exhibit) -> Report:
    return verify(exhibit.damaged(), exhibit.make()[1])


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda exhibit: exhibit.report.name)
def test_a_published_mistake_is_refused(exhibit: Exhibit) -> None:
    assert undamaged(exhibit.make).findings == ()
    finding = refusal(exhibit).findings[0]
    assert finding.code == exhibit.code, finding.render()
    assert exhibit.culprit in finding.sentence, finding.render()


def test_reports_are_listed_once_with_a_day() -> None:
    reports = [exhibit.report for exhibit in EXHIBITS] + [bug.report for bug in REST]
    assert len({report.url for report in reports}) == len(reports)
    assert all(date.fromisoformat(report.date) for report in reports)


def test_the_page_has_what_the_verifier_says(update_golden: bool) -> None:
    text = page(
        {
            "Memory": [(one, refusal(one).findings[0]) for one in MEMORY],
            "Order, collectives and checkpoints": [
                (one, refusal(one).findings[0]) for one in ORDER
            ],
            "Gradients": [(one, refusal(one).findings[0]) for one in GRADIENTS],
            "The update": [(one, refusal(one).findings[0]) for one in UPDATES],
        },
        UNSEEN,
        UNWRITABLE,
    )
    if update_golden:
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text("utf-8") == text, "look at the change; --update-golden accepts it"
