"""Kernels are compared with their operators before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, inf, nan, nn

from tests.support.programs import mlp
from tests.support.zygote import run_forked, second_zygote
from tools.conformance.judge import ThreeUnitModel, batch_of
from tools.conformance.samples import Sample, chosen, subjects
from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import compile_model
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.frontend.lowering.tracing import trace_model
from zeroir.frontend.source.module_source import source_of
from zeroir.ir import ops
from zeroir.ir.buffers import Role
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Node, Segment, TensorType
from zeroir.ir.text import parse, print_program
from zeroir.quantize import WeightFormat, quantize_frozen
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.base import Kernel
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.kernels.declared import misdeclared
from zeroir.runtime.kernels.differences import difference, is_beyond_noise
from zeroir.runtime.kernels.self_check import SelfCheckResult, check_kernels

MODELS = Path(__file__).parents[1] / "support" / "models"
MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = torch.relu(self.second(torch.relu(self.first(x))))
        return torch.as_strided(h, (2, 8), (16, 1), 8).square().mean()

def model():
    return Model()

def batch():
    return torch.randn(4, 8)
"""


@pytest.fixture(scope="module")
def strided(tmp_path_factory: pytest.TempPathFactory) -> CompiledProgram:
    path = tmp_path_factory.mktemp("strided") / "model.py"
    path.write_text(MODEL)
    return compile_model(path, stage=3, world_size=1, units="*")


def reading_storage(program: Program) -> Program:
    """The program with torch's own strided views, which count from the beginning of all buffers."""

    def node(one: Node) -> Node:
        is_ours = one.op == "zeroir.strided.default"
        return replace(one, op="aten.as_strided.default") if is_ours else one

    def segment(one: Segment) -> Segment:
        return replace(one, nodes=tuple(node(each) for each in one.nodes))

    return replace(program, segments=tuple(segment(one) for one in program.segments))


def checked(program: Program) -> SelfCheckResult:
    engine = Engine(program)
    local_ranks: LocalRanks = engine.rank_program.executor.local_ranks
    try:
        return check_kernels(local_ranks, KernelBackend.EAGER)
    finally:
        engine.close()


def test_a_kernel_that_reads_another_buffer_is_found(strided: CompiledProgram) -> None:
    damaged = reading_storage(strided.program)
    assert damaged != strided.program
    with pytest.raises(UserError, match=r"segment @\S+, as called for .* differs in \d+ elements"):
        Engine(damaged, EngineSettings(self_check=True))
    Engine(damaged).close()
    Engine(strided.program, EngineSettings(self_check=True)).close()


@pytest.mark.parametrize(
    "name", ["convnet", *(pytest.param(name, marks=pytest.mark.slow) for name in ("t5", "traps"))]
)
def test_the_kernels_of_models_are_judged_and_right(name: str) -> None:
    found = checked(compile_model(MODELS / f"{name}.py", world_size=1, stage=3).program)
    assert not found.skipped
    assert found.compared


@pytest.mark.parametrize("weights", ["nf4", "nf4_double", "int8", "fp8"])
@pytest.mark.parametrize("ignored", [0, 1], ids=["codes", "scales"])
def test_the_bytes_of_quantised_weights_count(
    weights: WeightFormat, ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that takes zeros for them is found."""
    frozen = quantize_frozen(nn.Linear(64, 64).requires_grad_(False), weights)
    source = source_of(
        nn.Sequential(frozen, nn.Linear(64, 8)),
        torch.ones(2, 64),
        lambda module, x: module(x).square().mean(),
        None,
    )
    program = trace_model(source, make_options({"evaluate": False})).program
    kernel_of = LocalRanks.kernel

    def ignoring(ranks: LocalRanks, op: ops.Compute) -> Kernel:
        def run(arguments: Sequence[Tensor], destinations: Sequence[Tensor | None]) -> None:
            places = [at for at, x in enumerate(arguments) if x.dtype == torch.uint8]
            given = list(arguments)
            for at in places[ignored : ignored + 1]:
                given[at] = torch.zeros_like(given[at])
            kernel_of(ranks, op)(given, destinations)

        return run

    assert checked(program).compared
    monkeypatch.setattr(LocalRanks, "kernel", ignoring)
    with pytest.raises(UserError, match="computes something else"):
        checked(program)


def test_equal_layers_are_compared_once() -> None:
    few, many = (checked(mlp(blocks=blocks, dim=4, features=4, batch=2)) for blocks in (3, 24))
    assert few == many


def test_the_check_leaves_buffers_and_torch_as_they_were(strided: CompiledProgram) -> None:
    before = torch.get_rng_state()
    engine = Engine(strided.program, EngineSettings(self_check=True))
    assert torch.equal(torch.get_rng_state(), before)
    for buffer in strided.program.buffers:
        if buffer.is_persistent and buffer.role is not Role.SNAPSHOT:
            held: Tensor = engine.buffer(buffer.name)
            assert not held.any(), buffer.name
    engine.close()


def test_a_users_engine_checks_itself_unless_told_otherwise(strided: CompiledProgram) -> None:
    scheduled = reading_storage(strided.program)
    damaged = replace(strided, artifact=replace(strided.artifact, scheduled=scheduled))
    with pytest.raises(UserError, match="Nothing was trained"):
        damaged.engine()
    damaged.engine(self_check=False).close()


MASKED = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).view(4, 8, 2, 3, 8).permute(3, 0, 2, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.bool()[:, None, None]).square().mean()

def model():
    return Model()

def batch():
    return torch.randn(4, 8, 16), torch.ones(4, 8, dtype=torch.int64)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("kept_compilers")
def test_kernels_agree_where_a_mask_excludes_all_keys(tmp_path: Path) -> None:
    """The check fills masks of integers with 0."""
    (tmp_path / "masked.py").write_text(MASKED)
    program = compile_model(tmp_path / "masked.py", world_size=1).program
    Engine(program, EngineSettings(kernels=KernelBackend.INDUCTOR, self_check=True)).close()


# ---- Results are compared where they are finite, and infinities and NaN with the same


MIXED = (1.0, -2.0, inf, -inf, nan)
ROUNDED = (1.0 + 2e-7, -2.0, inf, -inf, nan)


def numbers(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_infinities_and_nan_are_no_difference(dtype: torch.dtype) -> None:
    result, wanted = numbers(ROUNDED).to(dtype), numbers(MIXED).to(dtype)
    assert difference(result, wanted, 1e-6) is None
    assert not is_beyond_noise(result, wanted, result)


def test_a_finite_difference_beside_infinities_is_found() -> None:
    result, wanted = numbers((1.5, -2.0, inf, -inf, nan)), numbers(MIXED)
    assert difference(result, wanted, 1e-6) == (
        "differs in 1 elements, by up to 0.5 where the largest is 2"
    )
    assert is_beyond_noise(result, wanted, numbers(ROUNDED))


@pytest.mark.parametrize("element", range(5))
@pytest.mark.parametrize("value", [inf, -inf, nan, 3.0])
def test_infinity_where_another_value_is_due_is_found(element: int, value: float) -> None:
    wanted, result = numbers(MIXED), numbers(MIXED)
    result[element] = value
    if element in (0, 1) and value == 3.0:
        return  # a finite difference, as above
    is_same = bool(torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0)))
    found = difference(result, wanted, 1e-6)
    assert found is None if is_same else found is not None and "infinite or NaN" in found
    assert is_beyond_noise(result, wanted, wanted) is not is_same


def test_what_roundings_make_infinite_decides_nothing() -> None:
    result, wanted = numbers((1.0, inf)), numbers((1.0, 3.4e38))
    assert difference(result, wanted, 1e-6) is not None
    assert not is_beyond_noise(result, wanted, numbers((1.0, inf)))


# ---- What segments declare is what torch's operators make; a program that says otherwise never runs


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
def test_asking_does_not_import_the_compiler(tmp_path: Path) -> None:
    """It takes a second or more, on every rank. What torch keeps with its functions is as before."""
    script = """
import sys
import torch
from tests.support.programs import mlp
from tests.support.zygote import run_forked, second_zygote
from zeroir.runtime.kernels.declared import misdeclared
assert "torch._dynamo" not in sys.modules
assert misdeclared(mlp().segments) is None
assert "torch._dynamo" not in sys.modules, torch.__version__
from torch._decomp import decomposition_table
kept = [f for f in decomposition_table.values() if "__dynamo_disable" in vars(getattr(f, "__wrapped__", f))]
assert not kept, (torch.__version__, kept[:3])
import torch._dynamo
assert torch._dynamo.__file__ and torch.compile
"""
    require_runs(script, tmp_path)


@pytest.mark.slow
def test_what_else_is_asked_of_the_compiler_is_imported(tmp_path: Path) -> None:
    script = """
import sys
import torch
from zeroir.runtime.kernels.compiler_import import compiler_not_imported
assert "torch._dynamo" not in sys.modules
with compiler_not_imported():
    import torch._dynamo
    assert torch._dynamo.config.cache_size_limit
assert sys.modules["torch._dynamo"].__file__
"""
    require_runs(script, tmp_path)


def require_runs(script: str, folder: Path) -> None:
    """Fail unless a script runs in a process that has imported torch, but not its compiler."""
    (folder / "script.py").write_text(script)
    done = run_forked("script.py", (), folder, source=second_zygote)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_modules_in_16_bits_declare_what_torch_makes_on_any_device() -> None:
    """Meta kernels make what a GPU's make, such as statistics in FP32 where a CPU keeps them in 16 bits.

    Nothing that traces a module, but for the update, tells FP16 from bf16. So one whose nodes make values of one dtype
    each is traced in bf16 alone, and torch is asked of the same nodes in FP16.
    """
    misdeclared_by_name: dict[str, str] = {}
    traced, of_both = 0, 0
    for name in filter(is_module, subjects()):
        for sample in chosen(name, 1):
            program = program_in(sample, "bf16")
            if program is None:
                continue
            traced += 1
            segments = [*program.segments, *map(in_fp16, program.segments)]
            if any(map(makes_several_dtypes, program.segments)):
                own = program_in(sample, "fp16")
                assert own is not None
                segments += own.segments
                of_both += 1
            clause = misdeclared(segments)
            if clause is not None:
                misdeclared_by_name[name] = clause
    assert not misdeclared_by_name
    assert traced > 90
    assert of_both > 5


def is_module(name: str) -> bool:
    return name.startswith("module ")


def program_in(sample: Sample, precision: str) -> Program | None:
    """The logical program around a sample; None where there is none.

    What has no program in FP32 has none in 16 bits; a few more need values of one dtype.
    """
    given = {"world_size": 1, "precision": precision, "units": "unit_*", "mean_over": "batches"}
    source = source_of(partial(ThreeUnitModel, sample), batch_of(sample), None, None)
    try:
        return trace_model(source, make_options(given)).program
    except UserError:
        return None


def makes_several_dtypes(segment: Segment) -> bool:
    dtypes = [{each.dtype for each in node.results if each is not None} for node in segment.nodes]
    return any(len(of_node) > 1 for of_node in dtypes)


def in_fp16(segment: Segment) -> Segment:
    """The segment with FP16 wherever it has bf16."""

    def other(value: Any) -> Any:  # noqa: ANN401
        match value:
            case DType.BF16:
                return DType.F16
            case tuple():
                return tuple(map(other, value))
            case TensorType():
                return replace(value, dtype=other(value.dtype))
            case _:
                return value

    def node(one: Node) -> Node:
        changed = {name: other(getattr(one, name)) for name in ("args", "kwargs", "results")}
        return replace(one, **changed)

    nodes = tuple(map(node, segment.nodes))
    return replace(segment, inputs=other(segment.inputs), nodes=nodes)
