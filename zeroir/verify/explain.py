"""The long form of each code of the verifier: what it rules out, why, and a minimal program that breaks it."""

from __future__ import annotations

from importlib import resources

from zeroir.verify.codes import CODES

__all__ = ["CODES", "explain"]


def explain(code: str) -> str:
    """The explanation of a code, as Markdown with programs in ``zir`` blocks.

    Raises:
        KeyError: where no law has the code.
    """
    law = CODES[code]
    text = resources.files("zeroir.verify") / "explanations" / f"{code}.md"
    body = text.read_text(encoding="utf-8").strip()
    return f"# {code}: {law.title}\n\n{body}\n\nRemedy: {law.remedy}\n"
