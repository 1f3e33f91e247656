"""The glossary is one list: each term once, in order, with a definition in whole sentences."""

from __future__ import annotations

import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text("utf-8")
ENTRIES = re.findall(r"^\*\*(.+?)\*\* — (.+?)(?:\n\n|\Z)", TEXT + "\n", re.M | re.S)


def test_every_paragraph_is_an_entry() -> None:
    heading, introduction, *paragraphs = TEXT.strip().split("\n\n")
    assert heading.startswith("# ")
    assert introduction.endswith(".")
    assert len(paragraphs) == len(ENTRIES)


def test_every_term_stands_once_and_in_order() -> None:
    terms = [term.lower().replace("-", " ") for term, _ in ENTRIES]
    assert len(set(terms)) == len(terms)
    assert terms == sorted(terms)


def test_every_definition_ends_as_a_sentence() -> None:
    for term, definition in ENTRIES:
        assert definition.strip().endswith("."), term
