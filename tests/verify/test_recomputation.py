"""Values keep their numbers in changed segments: recomputed, passed as views, or computed from a dropout mask."""

from __future__ import annotations

import pytest
import torch

import zeroir.torch_ops  # noqa: F401 - registers our operators
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import Node, Ref, TensorType
from zeroir.ir.text import parse
from zeroir.passes.common.storages import dropout_applied
from zeroir.torch_ops.types import TORCH_DTYPE
from zeroir.verify.interpreter.domain import NamedKey, Numbering
from zeroir.verify.interpreter.value_numbers import CallOperand, Segments

X = CallOperand(NamedKey("x", 0))
SEED = CallOperand(NamedKey("rng", 0))


def program(*segments: str) -> Program:
    return parse("zeroir 1\nmesh dp=1\n" + "\n".join(segments))


def numbers(made: Program) -> Segments:
    return Segments(made, Numbering(), by_node=True)


def operand(found: Segments, name: str, *operands: CallOperand, output: int = 0) -> CallOperand:
    """The value in a buffer that an output of the segment is written to."""
    result = found.results(name, operands)[output]
    return CallOperand(result.key, result.shift)


FORWARD = """segment @forward($0: f32[4,4]) {
  $1 = aten.exp.default($0) : f32[4,4]
  $2 = aten.mm.default($1, $1) : f32[4,4]
  return ($1, $2)
}"""
SAVED = """segment @saved($0: f32[4,4], $1: f32[4,4]) {
  $2 = aten.mul.Tensor($0, $1) : f32[4,4]
  return ($2)
}"""


def again(op: str = "aten.exp.default($0)", product: str = "aten.mul.Tensor($2, $1)") -> str:
    return f"""segment @again($0: f32[4,4], $1: f32[4,4]) {{
  $2 = {op} : f32[4,4]
  $3 = {product} : f32[4,4]
  return ($3)
}}"""


def is_same(recomputing: str, x: CallOperand = X) -> bool:
    """Whether a backward that recomputes ``exp(x)`` has the same value as one that receives it."""
    found = numbers(program(FORWARD, SAVED, recomputing))
    one, other = (operand(found, "forward", X, output=i) for i in (0, 1))
    wanted = found.results("saved", (one, other))
    return found.results("again", (x, other)) == wanted


def test_a_value_computed_once_more_is_the_same() -> None:
    assert is_same(again())


@pytest.mark.parametrize(
    "recomputing",
    [
        again("aten.exp2.default($0)"),
        again("aten.exp.default($1)"),
        again("aten.mul.Tensor($0, 1.0)"),
        again(product="aten.mul.Tensor($1, $2)"),
        again(product="aten.mul.Tensor($2, $2)"),
    ],
    ids=["op", "operand", "scaled", "swapped", "twice"],
)
def test_a_value_computed_otherwise_is_another(recomputing: str) -> None:
    assert not is_same(recomputing)


@pytest.mark.parametrize(
    "x", [CallOperand(NamedKey("y", 0)), CallOperand(NamedKey("x", 1)), CallOperand(NamedKey("x", 0), 1)],
    ids=["buffer", "version", "elements"],
)  # fmt: skip
def test_a_value_computed_from_something_else_is_another(x: CallOperand) -> None:
    assert not is_same(again(), x)


def test_zero_and_minus_zero_are_different_constants() -> None:
    def constant(text: str) -> str:
        return again(product=f"aten.mul.Tensor($2, {text})")

    numbering = Numbering()
    made = [program(constant(text)) for text in ("0.0", "-0.0", "0")]
    found = {Segments(p, numbering, by_node=True).results("again", (X, X)) for p in made}
    assert len(found) == 3
    assert len({p.segment_by_name["again"].digest() for p in made}) == 3


# ---------------------------------------------------------------------------------------------------------- views

T = "segment @t($0: f32[4,4]) {\n  $1 = aten.t.default($0) : f32[4,4;1,4]\n  $2 = aten.neg.default($1) : f32[4,4;1,4]\n  return ($2)\n}"  # noqa: E501


def test_a_view_that_is_given_is_the_view_that_is_made() -> None:
    given = "segment @given($0: f32[4,4;1,4]) {\n  $1 = aten.neg.default($0) : f32[4,4;1,4]\n  return ($1)\n}"
    found = numbers(program(FORWARD, T, given))
    one = operand(found, "forward", X, output=1)
    assert found.results("t", (one,)) == found.results("given", (one,))


def test_a_square_read_by_columns_is_not_one_read_by_rows() -> None:
    rows = (
        "segment @rows($0: f32[4,4]) {\n  $1 = aten.mm.default($0, $0) : f32[4,4]\n  return ($1)\n}"
    )
    columns = "segment @columns($0: f32[4,4;1,4]) {\n  $1 = aten.mm.default($0, $0) : f32[4,4]\n  return ($1)\n}"
    found = numbers(program(FORWARD, rows, columns))
    one = operand(found, "forward", X, output=1)
    assert found.results("rows", (one,)) != found.results("columns", (one,))
    assert found.results("rows", (X,)) != found.results("columns", (X,))


def test_parts_of_one_storage_differ() -> None:
    half = "segment @half($0: f32[2,4]) {\n  $1 = aten.neg.default($0) : f32[2,4]\n  return ($1)\n}"
    cut = """segment @cut($0: f32[4,4]) {
  $1, $2 = aten.split.Tensor($0, 2) : (f32[2,4], f32[2,4])
  $3 = aten.neg.default($1) : f32[2,4]
  $4 = aten.neg.default($2) : f32[2,4]
  return ($3, $4)
}"""
    found = numbers(program(FORWARD, half, cut))
    key, _ = operand(found, "forward", X, output=1)
    one, other = found.results("cut", (CallOperand(key),))
    assert found.results("half", (CallOperand(key),)) == (one,)
    assert found.results("half", (CallOperand(key, 8),)) == (other,)
    assert one != other


# -------------------------------------------------------------------------------------------------------- dropout


DROPOUT = """segment @dropout($0: f32[4,4], $1: i64[1]) {
  $2, $3 = zeroir.dropout.default($0, 0.25, $1) : (f32[4,4], bool[4,4])
  return ($2, $3)
}"""


def applied(scale: float) -> str:
    return f"""segment @applied($0: f32[4,4], $1: bool[4,4]) {{
  $2 = aten.mul.Tensor($0, $1) : f32[4,4]
  $3 = aten.mul.Tensor($2, {scale!r}) : f32[4,4]
  return ($3)
}}"""


def test_what_is_dropped_out_is_what_its_mask_makes() -> None:
    for scale, seed, is_equal in (
        (4 / 3, SEED, True),
        (1.25, SEED, False),
        (4 / 3, CallOperand(SEED.key, 1), False),
    ):
        found = numbers(program(DROPOUT, applied(scale)))
        wanted = found.results("dropout", (X, SEED))[0]
        mask = operand(found, "dropout", X, seed, output=1)
        assert (found.results("applied", (X, mask))[0] == wanted) == is_equal


@pytest.mark.parametrize("p", [0.0, 0.1, 0.25, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.F16])
def test_the_definition_of_dropout_has_its_bits(dtype: DType, p: float) -> None:
    x = torch.randn(8, 33, generator=torch.Generator().manual_seed(0)).to(TORCH_DTYPE[dtype])
    kind = TensorType(dtype=dtype, shape=(8, 33), stride=(33, 1))
    flags = TensorType(dtype=DType.BOOL, shape=(8, 33), stride=(33, 1))
    node = Node(op="zeroir.dropout.default", args=(Ref(0), p, Ref(1)), results=(kind, flags))
    nodes = dropout_applied(node, Ref(1), Ref(2))
    assert nodes is not None
    wanted, mask = torch.ops.zeroir.dropout(x, p, torch.tensor([7]))
    values = [x, mask]
    for made in nodes:
        left, right = (values[a.index] if isinstance(a, Ref) else a for a in made.args)
        values.append(torch.ops.aten.mul.Tensor(left, right))
    assert torch.equal(values[-1], wanted)
    assert values[-1].dtype == wanted.dtype


def test_other_ops_have_no_such_definition() -> None:
    node = Node(op="aten.exp.default", args=(Ref(0),), results=(None,))
    assert dropout_applied(node, Ref(1), Ref(2)) is None
