"""What segments declare is what torch's operators make; a program that says otherwise never runs."""

from __future__ import annotations

import pytest

from tests.support.programs import mlp
from zeroir.errors import UserError
from zeroir.ir.text import parse, print_program
from zeroir.runtime.kernels.declared import misdeclared
from zeroir.runtime.lockstep import Lockstep

PROGRAM = mlp(blocks=1, dim=4, features=4, batch=2, precision="bf16", keep_fp32=True)
TEXT = print_program(PROGRAM)

DAMAGES = {
    "a shape": ("aten.mm.default($9, $8) : bf16[4,4]", "aten.mm.default($9, $8) : bf16[2,8]"),
    "a dtype": ("aten.relu.default($8) : bf16[2,4]", "aten.relu.default($8) : f16[2,4]"),
    "a rank": ("aten.mean.default($7) : f32[]", "aten.mean.default($7) : f32[1]"),
    "a call that torch refuses": ("aten.relu.default($8)", "aten.relu.default($8, 1)"),
    "operands that do not fit": ("aten.mm.default($5, $3)", "aten.mm.default($9, $3)"),
}


def test_every_node_of_a_right_program_is_right() -> None:
    assert misdeclared(PROGRAM.segments) is None


@pytest.mark.parametrize("name", DAMAGES)
def test_a_program_that_declares_something_else_does_not_run(name: str) -> None:
    old, new = DAMAGES[name]
    assert old in TEXT
    program = parse(TEXT.replace(old, new))
    with pytest.raises(
        UserError, match=r"^The program cannot run: node \d+ of segment @.*compile it"
    ):
        Lockstep(program)
