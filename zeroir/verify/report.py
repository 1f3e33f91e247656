"""Reports of the verifier: findings, the laws that they break, and the error that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zeroir.errors import UserError
from zeroir.verify.laws import CODES, LAWS

PROVED = "proved"

_LONGEST_LINE = 210


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One broken law.

    ``sentence`` says what is wrong. ``section`` and ``line`` identify the op; ``line`` is its index in the section,
    from 0, or None if no single op is wrong. ``op`` is the op's text, ``window`` the text of the five lines around
    it. ``history`` lists what the section does to each buffer involved (``%b: allocated @12, gathered @14``),
    ``sources`` the lines of the model that the op came from. ``advice`` says what to do in this case, where that is
    more specific than the remedy of the law.
    """

    code: str
    sentence: str
    section: str | None = None
    line: int | None = None
    op: str = ""
    window: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    advice: str = ""

    @property
    def remedy(self) -> str:
        """The remedy, as one sentence."""
        return self.advice or CODES[self.code].remedy

    @property
    def place(self) -> str:
        """``section:line``, the section alone, or ``program``."""
        if self.section is None:
            return "program"
        return self.section if self.line is None else f"{self.section}:{self.line}"

    def render(self) -> str:
        """Return the long form, several lines."""
        lines = [f"{self.code} {self.place}: {self.sentence}"]
        lines += [f"    {_shortened(line)}" for line in self.window]
        lines += [f"  {line}" for line in self.history]
        lines += [f"  from {source}" for source in self.sources]
        lines.append(f"  {self.remedy} See `zeroir explain {self.code}`.")
        return "\n".join(lines)


def _shortened(line: str) -> str:
    """Return the beginning and the end of a very long line, such as that of a compute op with many operands."""
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE * 2 // 3]} … {line[-_LONGEST_LINE // 3 :]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings in the order of the checks.

    Ordering is checked if the structure is valid, values if both are.
    """

    findings: tuple[Finding, ...] = ()
    asked: tuple[str, ...] = tuple(LAWS)
    unexamined: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_valid(self) -> bool:
        """Whether no law is broken."""
        return not self.findings

    @property
    def laws(self) -> Mapping[str, str]:
        """For each law's code ``proved``, the first finding's sentence, or why it was not checked.

        Z106 is listed only if memory is planned, Z301 if a budget is given, Z406 if a logical program is, and
        Z501 to Z503 if there are pages.
        """
        results = {code: self.unexamined.get(code, PROVED) for code in self.asked}
        for finding in reversed(self.findings):
            results[finding.code] = f"{finding.place}: {finding.sentence}"
        return results

    def render(self, limit: int = 10) -> str:
        """Return the long form of the first findings; empty if there are none."""
        parts = [finding.render() for finding in self.findings[:limit]]
        if len(self.findings) > limit:
            parts.append(f"... and {len(self.findings) - limit} more findings")
        return "\n\n".join(parts)


class VerificationError(UserError):
    """A program that breaks a law; ``report`` has the findings."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.render())
        self.report = report
