"""What an exhibit is: a public report, a program, and a change of its text that makes the same mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program

Edit = Callable[[str], str]
"""A change of a program's text."""


class Kind(StrEnum):
    """What a report is, as GitHub's addresses spell it."""

    ISSUE = "issues"
    PULL = "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A public report of a bug, or its fix: ``date`` is the day of the entry that describes the bug."""

    repository: str
    number: int
    kind: Kind
    date: str

    @property
    def url(self) -> str:
        """Return the address of the report."""
        return f"https://github.com/{self.repository}/{self.kind}/{self.number}"

    @property
    def name(self) -> str:
        """Return the repository and the number."""
        return f"{self.repository} #{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """A bug that a law refuses.

    ``happened`` tells what the report says, ``mistake`` what the damaged program does. ``make`` returns the schedule
    and its logical program, and ``damage`` changes the schedule's text. ``code`` is the law of the first finding, whose
    sentence has ``culprit``: the op or the buffer that is wrong.
    """

    report: Report
    happened: str
    mistake: str
    make: Callable[[], tuple[Program, Program]]
    damage: Edit
    code: str
    culprit: str

    def damaged(self) -> Program:
        """Return the program with the mistake."""
        before = print_program(self.make()[0])
        after = self.damage(before)
        assert after != before
        return parse(after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """A bug that no law can see, and why."""

    report: Report
    happened: str
    reason: str


def issue(repository: str, number: int, date: str) -> Report:
    """Return the report of an issue."""
    return Report(repository=repository, number=number, kind=Kind.ISSUE, date=date)


def pull(repository: str, number: int, date: str) -> Report:
    """Return the report of a pull request."""
    return Report(repository=repository, number=number, kind=Kind.PULL, date=date)


# ---------------------------------------------------------------------------------------------------- edits


def plain(line: str) -> str:
    """Return a line of text without its number and its padding."""
    return re.sub(r"^\d+: ", "", " ".join(line.split()))


def _at(lines: list[str], start: str, nth: int) -> int:
    """Return the number of the n-th line that begins like this, whether or not it signals an event."""
    found = [
        number
        for number, line in enumerate(lines)
        if re.sub(r"^!\S+ = ", "", plain(line)).startswith(start)
    ]
    return found[nth]


def _on_section(section: str, change: Callable[[list[str]], None]) -> Edit:
    """Return the edit that changes the lines of one section."""

    def edit(text: str) -> str:
        head, mark, rest = text.partition(f"section {section} {{\n")
        body, end, tail = rest.partition("\n}")
        assert mark, section
        lines = [re.sub(r"^ *\d+: ", "  ", line) for line in body.splitlines()]
        change(lines)
        return head + mark + "\n".join(lines) + end + tail

    return edit


def drop(section: str, *starts: str, nth: int = 0) -> Edit:
    """Leave out the lines that begin like these."""

    def change(lines: list[str]) -> None:
        for start in starts:
            del lines[_at(lines, start, nth)]

    return _on_section(section, change)


def move(section: str, start: str, before: str, *, nth: int = 0, before_nth: int = 0) -> Edit:
    """Put a line before another one."""

    def change(lines: list[str]) -> None:
        line = lines.pop(_at(lines, start, nth))
        lines.insert(_at(lines, before, before_nth), line)

    return _on_section(section, change)


def put(section: str, line: str, before: str, *, nth: int = 0) -> Edit:
    """Add a line before another one."""
    return _on_section(section, lambda lines: lines.insert(_at(lines, before, nth), f"  {line}"))


def alter(section: str, start: str, old: str, new: str, *, nth: int = 0) -> Edit:
    """Write something else in a line."""

    def change(lines: list[str]) -> None:
        number = _at(lines, start, nth)
        assert old in lines[number], lines[number]
        lines[number] = lines[number].replace(old, new)

    return _on_section(section, change)


def declare(old: str, new: str) -> Edit:
    """Write something else wherever the text has it, such as in the header."""

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return edit


def each(*edits: Edit) -> Edit:
    """Make several changes, one after the other."""

    def edit(text: str) -> str:
        for one in edits:
            text = one(text)
        return text

    return edit
