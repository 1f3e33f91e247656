"""The text of ``docs/museum.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tests.verify.museum.exhibit import Exhibit, Unseen
from zeroir.verify.report import Finding

_HEAD: Final = """# A museum of bugs

{refused} published bugs of FSDP, FSDP2, DeepSpeed, Megatron-LM and projects around them, with the law that refuses
each. Every exhibit is a program that the verifier proves, and a small change of its text that makes the reported
mistake. `tests/verify/test_museum.py` makes the change, and the sentences below are what `zeroir verify` says first.

The programs train a small perceptron, so names of buffers are not those of the reports. The first column links to the
report and gives the day of the entry that describes the bug. `zeroir explain CODE` explains a law, and the assumptions
of a proof are on [a page of their own](trust.md). No law sees [{unseen} further bugs](#not-seen-by-any-law), and
{unwritable} more [cannot be written as a program](#not-a-program).
"""


def page(
    exhibits: Mapping[str, Sequence[tuple[Exhibit, Finding]]],
    unseen: Sequence[Unseen],
    unwritable: Sequence[Unseen],
) -> str:
    """Return the page: a table for each group of exhibits, each with what the verifier says of it."""
    parts = [
        _HEAD.format(
            refused=sum(map(len, exhibits.values())),
            unseen=len(unseen),
            unwritable=len(unwritable),
        )
    ]
    for title, group in exhibits.items():
        parts.append(f"## {title}\n")
        parts.append("| report | what happened | the same mistake | law | sentence |")
        parts.append("|---|---|---|---|---|")
        parts += [
            f"| {_link(one)} | {one.happened} | {one.mistake} | {found.code} | `{found.sentence}` |"
            for one, found in group
        ]
        parts.append("")
    for title, rest in (("Not seen by any law", unseen), ("Not a program", unwritable)):
        parts.append(f"## {title}\n")
        parts.append("| report | what happened | why |")
        parts.append("|---|---|---|")
        parts += [f"| {_link(one)} | {one.happened} | {one.reason} |" for one in rest]
        parts.append("")
    return "\n".join(parts)


def _link(one: Exhibit | Unseen) -> str:
    return f"[{one.report.name}]({one.report.url}), {one.report.date}"
