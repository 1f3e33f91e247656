"""The file of verdicts, one line of JSON for each mutant that was judged."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel


class Line(BaseModel):
    """The verdict on one mutant."""

    package: str
    module: str
    function: str
    diff: str
    outcome: str
    run: int
    left: int
    seconds: float
    test: str | None

    @property
    def key(self) -> tuple[str, str, str]:
        """As ``Mutant.key``."""
        return self.module, self.function, self.diff

    @property
    def is_noticed(self) -> bool:
        """Whether a test has failed, hung or crashed."""
        return self.outcome not in ("survived", "unreached")


def read_verdicts(file: Path) -> dict[tuple[str, str, str], Line]:
    """The last verdict on each mutant. A line that was being written when the process ended is cut off."""
    text = file.read_text("utf-8") if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, "utf-8")
    return {line.key: line for line in map(Line.model_validate_json, whole.splitlines())}
