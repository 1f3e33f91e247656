"""A program's text as its items: one per flat, buffer, segment, section, … by its first words."""

from __future__ import annotations

from collections.abc import Mapping


def items(text: str) -> Mapping[str, str]:
    """Each item's lines by its key, such as ``buffer %a.param``, ``mesh`` or ``section update``; no comments."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for whole_line in text.splitlines():
        line = whole_line.split("//")[0].rstrip()
        if not line.strip():
            continue
        if not line.startswith(" ") and line != "}":
            lines = found.setdefault(_key(line), [])
        lines.append(line)
    return {key: "\n".join(lines) for key, lines in found.items()}


def _key(line: str) -> str:
    words = line.replace("(", " ").split()
    is_only_one = words[0] in ("zeroir", "mesh", "loss", "streams", "fingerprint")
    return words[0] if is_only_one else " ".join(words[:2])
