"""The laws, each in its own file, which ``zeroir explain`` prints and from which the table of ``docs/ir.md`` is made.

A file has the law and its reasons, a minimal program that breaks it, the remedy, and the modules that check it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Final


class Stage(StrEnum):
    """The stage of the proof that checks a law; a stage runs only if the previous ones found nothing."""

    STRUCTURE = "first"
    ORDERING = "once the structure holds"
    VALUES = "once the ordering holds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A law, as read from its file.

    ``title`` names what it rules out, ``rules_out`` is the full sentence, ``remedy`` is the usual one, as one sentence.
    ``modules`` are the files that check it, ``text`` the whole file.
    """

    code: str
    title: str
    rules_out: str
    remedy: str
    stage: Stage
    modules: tuple[str, ...]
    text: str


_FORM: Final = re.compile(
    r"# (?P<code>Z\d{3}): (?P<title>[^\n]*)\n\n"
    r"Rules out: (?P<rules_out>[^\n]*)\.\n\n.*\n\n"
    r"Remedy: (?P<remedy>[^\n]*)\n\n"
    rf"Checked (?P<stage>{'|'.join(Stage)}): (?P<modules>`.*`)\.\n",
    re.DOTALL,
)


def _law(text: str) -> Law:
    form = _FORM.fullmatch(text)
    assert form is not None, text
    return Law(
        code=form["code"],
        title=form["title"],
        rules_out=form["rules_out"],
        remedy=form["remedy"],
        stage=Stage(form["stage"]),
        modules=tuple(re.findall(r"`([^`]*)`", form["modules"])),
        text=text,
    )


def _laws() -> Mapping[str, Law]:
    files = (file for file in resources.files(__name__).iterdir() if file.name.endswith(".md"))
    laws = sorted((_law(file.read_text("utf-8")) for file in files), key=lambda law: law.code)
    return {law.code: law for law in laws}


CODES: Final = _laws()
"""Every law by its code."""

LAWS: Final = {code: law for code, law in CODES.items() if law.stage is not Stage.STRUCTURE}
"""The laws of the whole program, which reports list; the others concern each declaration and each op on its own."""
