"""The small programs that show what each pass does; ``golden`` holds what each pass makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from zeroir.frontend.lowering.accumulate import accumulate
from zeroir.ir.options import WrittenOptions
from zeroir.ir.text import parse

_FOLDER: Final = Path(__file__).parent

LOGICAL: Final = parse((_FOLDER / "example.zir").read_text("utf-8"))
ACCUMULATING: Final = replace(
    accumulate(LOGICAL), options=WrittenOptions.of({**LOGICAL.options.texts, "micro_steps": "2"})
)
SAVING: Final = parse((_FOLDER / "saved.zir").read_text("utf-8"))
KEEPING: Final = parse((_FOLDER / "kept.zir").read_text("utf-8"))
AWAY: Final = parse((_FOLDER / "away.zir").read_text("utf-8"))
CLIPPED: Final = parse((_FOLDER / "clipped.zir").read_text("utf-8"))
