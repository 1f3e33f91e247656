"""Logical programs with what real models have and the small ones have not, made from their text."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.passes.example_programs import LOGICAL
from tests.support.programs import mlp
from zeroir.ir.program import Program
from zeroir.ir.text import parse, print_program


def frozen() -> Program:
    """The example program with the weight of unit ``a`` frozen: it has no gradient and no backward."""
    return _edited(
        LOGICAL,
        without=[r"buffer %a\.(grad|mom)", r"%a\.grad = grad", r"compute @a\.back", r"param=%a\."],
        replaced=[("unit=a trainable", "unit=a frozen"), ("(a[0:256], b", "(b")],
    )


def called_twice() -> Program:
    """Three blocks of which the last is the first one again: one flat, two forwards, two backwards."""
    return _edited(
        mlp(blocks=3),
        without=[
            r"buffer %blocks\.2\.(param|grad|exp)",
            r"%blocks\.2\.grad = ",
            r"param=%blocks\.2",
        ],
        replaced=[
            (", blocks.2[0:256]", ""),
            # The last block's backward runs first: it writes, and the first block's adds to it.
            ("grad blocks.0.weight: ", "grad blocks.0.weight: += "),
            ("grad blocks.0.bias: ", "grad blocks.0.bias: += "),
            ("blocks.2.weight: ", "blocks.0.weight: "),
            ("blocks.2.bias: ", "blocks.0.bias: "),
            ("%blocks.2.param", "%blocks.0.param"),
            ("%blocks.2.grad", "%blocks.0.grad"),
            ("unit=blocks.2 stream", "unit=blocks.0 stream"),
        ],
        without_flat="blocks.2",
    )


def _edited(
    program: Program,
    *,
    without: Sequence[str],
    replaced: Sequence[tuple[str, str]],
    without_flat: str = "",
) -> Program:
    text = re.sub(r"^ +\d+: ", "  ", print_program(program), flags=re.M)
    if without_flat:
        text = re.sub(rf"^flat {re.escape(without_flat)} .*?^}}\n", "", text, flags=re.M | re.S)
    lines = [line for line in text.split("\n") if not any(re.search(p, line) for p in without)]
    text = "\n".join(lines)
    for old, new in replaced:
        text = text.replace(old, new)
    return parse(text)
