"""What segments declare is what torch's operators make; a program that says otherwise never runs."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from tests.support.programs import mlp
from tools.conformance.judge import ThreeUnitModel, batch_of
from tools.conformance.samples import chosen, subjects
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.frontend.lowering.tracing import trace_model
from zeroir.frontend.source.module_source import source_of
from zeroir.ir.text import parse, print_program
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.declared import misdeclared

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
    with pytest.raises(UserError, match=r"^The program cannot run: node \d+ of segment @"):
        Lockstep(program)


@pytest.mark.slow
def test_asking_does_not_import_the_compiler() -> None:
    """It takes a second or more, on every rank. What torch keeps with its functions is as before."""
    script = """
import sys
import torch
from tests.support.programs import mlp
from zeroir.runtime.kernels.declared import misdeclared
assert misdeclared(mlp().segments) is None
assert "torch._dynamo" not in sys.modules, torch.__version__
from torch._decomp import decomposition_table
kept = [f for f in decomposition_table.values() if "__dynamo_disable" in vars(getattr(f, "__wrapped__", f))]
assert not kept, (torch.__version__, kept[:3])
import torch._dynamo
assert torch._dynamo.__file__ and torch.compile
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
def test_what_else_is_asked_of_the_compiler_is_imported() -> None:
    script = """
import sys
import torch
from zeroir.runtime.kernels.compiler_import import compiler_not_imported
with compiler_not_imported():
    import torch._dynamo
    assert torch._dynamo.config.cache_size_limit
assert sys.modules["torch._dynamo"].__file__
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_modules_in_16_bits_declare_what_torch_makes_on_any_device(precision: str) -> None:
    """Meta kernels make what a GPU's make, such as statistics in FP32 where a CPU keeps them in 16 bits."""
    options = make_options({"world_size": 1, "precision": precision, "units": "unit_*"})
    misdeclared_by_name: dict[str, str] = {}
    traced_count = 0
    for name in filter(is_module, subjects()):
        for sample in chosen(name, 1):
            model = partial(ThreeUnitModel, sample)
            source = source_of(model, batch_of(sample), None, None)
            try:
                program = trace_model(source, options).program
            except UserError:
                # What has no program in FP32 has none here; a few more need values of one dtype.
                continue
            traced_count += 1
            clause = misdeclared(program.segments)
            if clause is not None:
                misdeclared_by_name[name] = clause
    assert not misdeclared_by_name
    assert traced_count > 90


def is_module(name: str) -> bool:
    return name.startswith("module ")
