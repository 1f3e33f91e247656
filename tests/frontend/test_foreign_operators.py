"""Operators that a library or the model registers are part of programs by rule, and programs declare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.captures import captured
from tests.support.eager import traced
from zeroir.api.checks.check import check_model
from zeroir.api.compiled import CompiledProgram
from zeroir.api.compiling import compile_model
from zeroir.artifact import from_bytes, to_bytes
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.frontend.source.entry import load_model_file
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.ir.segments.operators import Operator, declaration_problem
from zeroir.ir.segments.segment import Node, Ref, Segment, TensorType
from zeroir.ir.text import parse, print_program
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.execution.handlers import LocalRanks
from zeroir.runtime.kernels.choice import KernelBackend
from zeroir.runtime.kernels.foreign import require_registered
from zeroir.runtime.kernels.self_check import check_kernels
from zeroir.runtime.kernels.stand_ins import call_key, node_key
from zeroir.torch_ops.purity import ImpureOperatorError, Rule, breach, declarations, pure_call
from zeroir.verify import verify

MODELS = Path(__file__).parents[1] / "support" / "models"
MODEL = MODELS / "operators.py"
POWER = "samples.power.default"


@pytest.fixture(scope="module")
def compiled() -> CompiledProgram:
    return compile_model(MODEL, stage=3, world_size=1)


# ---------------------------------------------------------------------------------------------------------- programs


@pytest.mark.slow
def test_a_program_declares_the_operators_that_torch_does_not_have(
    compiled: CompiledProgram,
) -> None:
    program = compiled.program
    assert [operator.name for operator in program.operators] == [
        POWER,
        "samples.power_backward.default",
    ]
    schema = '(Tensor x, SymInt[] exponents, float scale=1., str way="sum") -> Tensor[]'
    # The model file itself registers them, so no module can be imported instead.
    assert program.operators[0] == Operator(name=POWER, schema=schema)
    assert parse(print_program(program)) == program
    assert from_bytes(to_bytes(compiled.artifact)) == compiled.artifact


TRITON_OP = """
import torch

@torch.library.triton_op("kernels_of_file::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    # Here stands wrap_triton(kernel)[grid](x, y, ...); the fake kernel executes it, too.
    return torch.empty_like(x)

@half.register_kernel("cpu")
def _(x):
    return x / 2

half.register_autograd(lambda _, grad: half(grad))
"""


def test_a_triton_operator_is_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracer does not look into it, and its module is that of the user's function."""
    (tmp_path / "kernels_of_file.py").write_text(TRITON_OP)
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "from kernels_of_file import half\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return half(super().forward(x)).square().mean()\n"
        "def model():\n"
        "    return Model(2, 2)\n"
        "def batch():\n"
        "    return torch.randn(3, 2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (operator,) = traced(path, evaluate=False).operators
    assert operator == Operator(
        name="kernels_of_file.half.default", schema="(Tensor x) -> Tensor", module="kernels_of_file"
    )
    options = make_options({"stage": 2, "world_size": 2, "evaluate": False})
    assert check_model(str(path), options, steps=1, seed=0).is_equal


@pytest.mark.parametrize(
    ("operator", "problem"),
    [
        (Operator(name="a.b.c", schema="(Tensor(a!) x) -> Tensor"), "rule of mutation"),
        (Operator(name="a.b.c", schema="(Tensor(a) x) -> Tensor(a)"), "rule of aliasing"),
        (Operator(name="a.b.c", schema="(Tensor x) -> int"), "not from tensors, numbers and words"),
        (Operator(name="a.b.c", schema="(Tensor x) -> ()"), "not from tensors, numbers and words"),
        (Operator(name="a.b.c", schema="(Generator x) -> Tensor"), "not from tensors"),
        (Operator(name="aten.from_file.default", schema="(str x) -> Tensor"), "namespace of torch"),
        (Operator(name="profiler.b.c", schema="() -> Tensor"), "namespace of torch"),
        (Operator(name="builtins.eval", schema="(str x) -> Tensor"), "NAMESPACE.NAME.OVERLOAD"),
        (Operator(name="a.b.c", schema="() -> Tensor", module="os; x"), "no name of a module"),
    ],
)
def test_a_program_may_not_declare_every_operator(operator: Operator, problem: str) -> None:
    assert problem in (declaration_problem(operator) or "")


def with_nodes(program: Program, change: Callable[[Node], Node]) -> Program:
    def changed(segment: Segment) -> Segment:
        return replace(segment, nodes=tuple(map(change, segment.nodes)))

    return replace(program, segments=tuple(map(changed, program.segments)))


def test_the_verifier_and_the_reader_refuse_other_calls(compiled: CompiledProgram) -> None:
    program = compiled.program
    as_path = with_nodes(
        program,
        lambda node: replace(node, kwargs=(("way", "/etc/passwd"),)) if node.op == POWER else node,
    )
    first, *_ = program.operators
    damages = {
        "does not declare it as an operator of a library": replace(program, operators=()),
        "takes the text '/etc/passwd'": as_path,
        "breaks the rule of mutation": replace(
            program, operators=(replace(first, schema="(Tensor(a!) x) -> Tensor"),)
        ),
    }
    for sentence, damaged in damages.items():
        findings = verify(damaged).findings
        assert {finding.code for finding in findings} == {"Z008"}
        assert any(sentence in str(finding) for finding in findings), findings
        with pytest.raises(UserError, match=sentence):
            from_bytes(to_bytes(replace(compiled.artifact, scheduled=damaged)))


# ------------------------------------------------------------------------------------------------------------- rules


@pytest.fixture(scope="module")
def library() -> None:
    """Operators that each break one rule, and one whose schema breaks none."""
    seeded = torch.Tag.nondeterministic_seeded
    for schema in (
        "pure(Tensor x, int n, str way) -> (Tensor, Tensor[])",
        "mutation(Tensor(a!) x) -> Tensor",
        "nothing(Tensor x) -> ()",
        "aliasing(Tensor(a) x) -> Tensor(a)",
        "generator(Tensor x, Generator? g) -> Tensor",
        "number(Tensor x) -> (Tensor, float)",
        "shape(Tensor x) -> Tensor",
        "storage(Storage x) -> Tensor",
        "seeded(Tensor x) -> Tensor",
    ):
        name = schema.partition("(")[0]
        tags = (seeded,) if name == "seeded" else ()
        torch.library.define(f"rules::{name}", schema.removeprefix(name), tags=tags)
    torch.library.impl("rules::shape", "CPU", lambda x: x * 2)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("pure", None),
        ("mutation", Rule.MUTATION),
        ("nothing", Rule.MUTATION),
        ("aliasing", Rule.ALIASING),
        ("generator", Rule.RANDOMNESS),
        ("seeded", Rule.RANDOMNESS),
        ("number", Rule.HOST_READS),
        ("storage", Rule.TENSORS),
    ],
)
@pytest.mark.usefixtures("library")
def test_each_rule_has_a_name(name: str, rule: Rule | None) -> None:
    broken = breach(getattr(torch.ops.rules, name).default)
    assert (None if broken is None else broken.rule) is rule
    assert rule is None or f"breaks the rule of {rule}: it " in str(broken)


@pytest.mark.usefixtures("library")
def test_calls_break_rules_that_no_schema_tells() -> None:
    op = torch.ops.rules.shape.default
    x = torch.ones(2, requires_grad=True)
    result = pure_call(op, lambda: op(x.detach()))
    assert isinstance(result, Tensor)
    assert result.tolist() == [2.0, 2.0]
    with pytest.raises(ImpureOperatorError, match="rule of gradients: it has no autograd formula"):
        pure_call(op, lambda: op(x))

    def dynamic() -> Tensor:
        raise torch._subclasses.fake_tensor.DynamicOutputShapeException(op)

    with pytest.raises(ImpureOperatorError, match="rule of host reads: it makes a shape"):
        pure_call(op, dynamic)


def test_a_refusal_has_the_line_of_the_model(tmp_path: Path) -> None:
    """A number that an operator returns would be a constant of the program, without a node in any graph."""
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "@torch.library.custom_op('rules_of_file::total', mutates_args=())\n"
        "def total(x: torch.Tensor) -> float:\n"
        "    return float(x.sum())\n"
        "total.register_fake(lambda x: 1.0)\n"
        "class Model(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x).mean() * total(x)\n"
        "def model():\n"
        "    return Model(2, 2)\n"
        "def batch():\n"
        "    return torch.ones(1, 2)\n"
    )
    with pytest.raises(
        UserError,
        match=r"model\.py:8 uses the operator rules_of_file\.total\.default, which breaks the "
        r"rule of host reads: it returns float to the host",
    ):
        captured(load_model_file(str(path)), "fp32", (), opaque="none")


# ----------------------------------------------------------------------------------------------------------- running


def test_an_operator_must_be_registered_as_declared(compiled: CompiledProgram) -> None:
    program = compiled.program
    require_registered(program)
    first, *others = program.operators
    damages = {
        r"samples.gone.default, which nothing has registered in this process: import lib.ops,": replace(
            first, name="samples.gone.default", module="lib.ops"
        ),
        r"samples.gone.default, which nothing .*: run the code that registers it": replace(
            first, name="samples.gone.default"
        ),
        r"as \(Tensor x\) -> Tensor, but here it is registered as \(Tensor x, ": replace(
            first, schema="(Tensor x) -> Tensor"
        ),
    }
    for sentence, operator in damages.items():
        with pytest.raises(UserError, match=sentence):
            require_registered(replace(program, operators=(operator, *others)))


def test_the_self_check_compares_its_kernels(compiled: CompiledProgram) -> None:
    """Groups of rows have valid ends there, and none of the operators refuses the numbers."""
    engine = Engine(compiled.program)
    local_ranks: LocalRanks = engine.rank_program.executor.local_ranks
    result = check_kernels(local_ranks, KernelBackend.EAGER)
    engine.close()
    assert result.compared == 3
    assert not result.skipped


def test_a_compiler_knows_a_call_by_its_arguments() -> None:
    op, x = torch.ops.samples.power.default, torch.ones(2, 3)
    kind = TensorType(dtype=DType.F32, shape=(2, 3), stride=(3, 1))
    node = Node(op=POWER, args=(Ref(0), (1, 2), 2), kwargs=(("way", "mean"),), results=())
    key = node_key(node, [kind])
    assert key == call_key(op, (x, [1, 2], 2.0, "mean"), {})
    assert key == call_key(op, (x, [1, 2]), {"scale": 2.0, "way": "mean"})
    others = ((x, [1, 2], 2.0), (x, [1, 3], 2.0, "mean"), (x[:1], [1, 2], 2.0, "mean"))
    assert all(key != call_key(op, args, {}) for args in others)


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "changes an argument": lambda x: x.add_(1).clone(),
    "returns memory that an argument": lambda x: x[:],
    "makes other results when it is called again": torch.rand_like,
    r"makes torch.float32\[1\] where its fake kernel makes": lambda x: x.sum().reshape(1),
}


@pytest.mark.parametrize("sentence", LIES)
def test_the_self_check_finds_an_operator_that_does_otherwise(
    sentence: str, compiled: CompiledProgram
) -> None:
    name = f"lie{list(LIES).index(sentence)}"
    torch.library.define(f"lies::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"lies::{name}", "CPU", LIES[sentence])
    torch.library.register_fake(f"lies::{name}", torch.empty_like)
    op = f"lies.{name}.default"

    def lying(node: Node) -> Node:
        is_power = node.op == "samples.power_backward.default"
        return replace(node, op=op, args=node.args[:1]) if is_power else node

    program = with_nodes(compiled.program, lying)
    operators = (*program.operators, *declarations([op]))
    with pytest.raises(UserError, match=f"The operator {op}.* {sentence}"):
        Engine(replace(program, operators=operators), EngineSettings(self_check=True))


def test_training_equals_eager_replicas() -> None:
    options = make_options({"stage": 3, "world_size": 3})
    comparison = check_model(str(MODEL), options, steps=2, seed=0)
    assert comparison.is_equal, str(comparison)
