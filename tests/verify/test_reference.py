"""The reference page is complete, and its program is canonical, valid text."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import pytest

from tests.support.arbitrary import op_types
from zeroir.ir.buffers import Role, Space
from zeroir.ir.contents import Micro
from zeroir.ir.dtypes import DType
from zeroir.ir.mesh import Executor
from zeroir.ir.ops import OP_CLASSES, Algorithm, Op, Reduction, op_name
from zeroir.ir.text import parse, print_program
from zeroir.ir.text.syntax import slots
from zeroir.verify import verify

PAGE = (Path(__file__).parents[2] / "docs" / "ir.md").read_text("utf-8")
GRAMMAR = "".join(re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL))
OPS = PAGE.partition("## Ops")[2].partition("\n## ")[0]


def test_its_program_is_canonical_and_valid() -> None:
    (text,) = re.findall(r"```zir\n(.*?)```", PAGE, re.DOTALL)
    program = parse(text)
    assert print_program(program) == text
    assert verify(program).is_valid


@pytest.mark.parametrize("kind", op_types(), ids=lambda kind: kind.__name__)
def test_every_op_has_its_line(kind: type) -> None:
    name = op_name(kind)
    assert f'"{name}"' in GRAMMAR
    assert re.search(rf"^\|[^|]*`{name}`[^|]*\|[^|]*\|[^|]*\|$", OPS, re.MULTILINE)


@pytest.mark.parametrize("kind", OP_CLASSES, ids=lambda kind: kind.__name__)
def test_every_word_of_an_op_is_in_the_grammar(kind: type[Op]) -> None:
    for slot in slots(kind, kind.syntax):
        for word in slot.words.split():
            assert f'"{word}"' in GRAMMAR


@pytest.mark.parametrize("kind", [DType, Role, Space, Executor, Micro, Algorithm, Reduction])
def test_every_spelling_is_in_the_grammar(kind: type[Enum]) -> None:
    for member in kind:
        assert f'"{member.value}"' in GRAMMAR
