"""What views see, against torch's own operators."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.examples import examples
from tests.support.lowering import codes
from tests.support.programs import mlp
from zeroir.ir.dtypes import DType
from zeroir.ir.segments.allowlist import allowed_ops
from zeroir.ir.segments.segment import Node, NodeArg, Ref, TensorType
from zeroir.ir.segments.views import (
    BITCAST,
    ViewError,
    is_same_type,
    is_view,
    mistyped,
    parts,
    shares_storage,
)
from zeroir.ir.text import parse, print_program
from zeroir.torch_ops.types import TORCH_DTYPE
from zeroir.verify import verify

DTYPES = {dtype: name for name, dtype in TORCH_DTYPE.items()}


def operator(name: str) -> Callable[..., object]:
    namespace, packet, overload = name.split(".")
    found: Callable[..., object] = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return found


def kind_of(tensor: Tensor) -> TensorType:
    return TensorType(dtype=DTYPES[tensor.dtype], shape=tuple(tensor.shape), stride=tensor.stride())


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of at most four dimensions that lies in its storage as some chain of views would have it."""
    shape = draw(st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, 4, 6]), max_size=4))
    x = torch.zeros(shape)
    for _ in range(draw(st.integers(0, 3))):
        match draw(st.integers(0, 3)):
            case 0:
                x = x.permute(draw(st.permutations(range(x.ndim))))
            case 1 if x.ndim and x.numel():
                x = x[..., draw(st.integers(0, x.shape[-1] - 1)) :: draw(st.integers(1, 2))]
            case 2:
                x = x.unsqueeze(0).expand(draw(st.integers(1, 2)), *x.shape)
            case _:
                pass
    return x


SMALL = st.integers(-4, 6)
DIM = st.integers(-4, 4)
SIZES = st.lists(st.integers(-1, 6), max_size=5).map(tuple)
DIMS = st.lists(DIM, max_size=4).map(tuple)
ARGUMENTS: dict[str, st.SearchStrategy[tuple[NodeArg, ...]]] = {
    "aten._unsafe_view.default": st.tuples(SIZES),
    "aten.alias.default": st.just(()),
    "aten.detach.default": st.just(()),
    "aten.diagonal.default": st.tuples(SMALL, DIM, DIM) | st.just(()),
    "aten.expand.default": st.tuples(SIZES),
    "aten.lift_fresh.default": st.just(()),
    "aten.permute.default": st.tuples(DIMS),
    "aten.select.int": st.tuples(DIM, SMALL),
    "aten.slice.Tensor": st.tuples(DIM, SMALL | st.none(), SMALL | st.none(), st.integers(0, 3))
    | st.tuples(DIM, st.just(1), st.just(2**63 - 1))
    | st.just(()),
    "aten.split.Tensor": st.tuples(SMALL, DIM) | st.tuples(SMALL),
    "aten.split_with_sizes.default": st.tuples(SIZES, DIM) | st.tuples(SIZES),
    "aten.squeeze.default": st.just(()),
    "aten.squeeze.dim": st.tuples(DIM),
    "aten.squeeze.dims": st.tuples(DIMS),
    "aten.t.default": st.just(()),
    "aten.transpose.int": st.tuples(DIM, DIM),
    "aten.unbind.int": st.tuples(DIM) | st.just(()),
    "aten.unfold.default": st.tuples(DIM, SMALL, SMALL),
    "aten.unsqueeze.default": st.tuples(DIM),
    "aten.view.default": st.tuples(SIZES),
}


def fitting(draw: st.DrawFn, name: str, x: Tensor) -> tuple[NodeArg, ...]:
    """Arguments that torch takes more often than chance would have it."""
    rank = max(x.ndim, 1)
    match name:
        case "aten.view.default" | "aten._unsafe_view.default":
            runs = draw(st.permutations([size for size in x.shape if size != 1]))
            joined = draw(st.booleans()) and len(runs) > 1
            return (tuple([runs[0] * runs[1], *runs[2:]] if joined else [1, *runs]),)
        case "aten.expand.default":
            sizes = [draw(st.sampled_from([size, -1])) if size != 1 else 3 for size in x.shape]
            return ((*draw(st.sampled_from([(), (2,), (1, 2)])), *sizes),)
        case "aten.permute.default":
            return (tuple(draw(st.permutations(range(-x.ndim, 0)))),)
        case "aten.split_with_sizes.default":
            dim = draw(st.integers(-rank, rank - 1))
            extent = x.shape[dim] if x.ndim else 0
            first = draw(st.integers(0, extent))
            return ((first, extent - first), dim)
        case _:
            return draw(ARGUMENTS[name])


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, Tensor, tuple[NodeArg, ...]]:
    name, x = draw(st.sampled_from(sorted(ARGUMENTS))), draw(tensors())
    if draw(st.booleans()):
        return name, x, fitting(draw, name, x)
    return name, x, draw(ARGUMENTS[name])


@pytest.mark.slow
@examples(1000)
@given(call=calls())
def test_a_view_sees_what_torch_lets_it_see(call: tuple[str, Tensor, tuple[NodeArg, ...]]) -> None:
    name, x, args = call
    node = Node(op=name, args=(Ref(0), *args), results=())
    try:
        made = operator(name)(x, *args)
        # torch itself lets a scalar be expanded to a negative size beside an empty dimension
        assume(not isinstance(made, Tensor) or all(size >= 0 for size in made.shape))
    except (RuntimeError, IndexError):
        with pytest.raises(ViewError):
            parts(node, kind_of(x))
        return
    results = list(made) if isinstance(made, list | tuple) else [made]
    found = parts(node, kind_of(x))
    assert found is not None
    assert len(found) == len(results)
    for part, result in zip(found, results, strict=True):
        assert isinstance(result, Tensor)
        assert is_same_type(part.kind, kind_of(result))
        if result.numel():
            assert x.storage_offset() + part.offset == result.storage_offset()


STRIDED = "zeroir.strided.default"


@examples(300)
@given(x=tensors(), where=st.lists(st.tuples(SMALL, SMALL), max_size=3), offset=st.integers(-2, 12))
def test_a_strided_view_stays_within_what_it_is_a_view_of(
    x: Tensor, where: list[tuple[int, int]], offset: int
) -> None:
    size, stride = (tuple(pair[i] for pair in where) for i in (0, 1))
    node = Node(op=STRIDED, args=(Ref(0), size, stride, offset), results=())
    span = (
        0
        if 0 in x.shape
        else 1 + sum((s - 1) * t for s, t in zip(x.shape, x.stride(), strict=True))
    )
    last = offset + sum((s - 1) * t for s, t in where)
    is_inside = min((offset, *size, *stride)) >= 0 and (0 in size or last < span)
    if not is_inside:
        with pytest.raises(ViewError):
            parts(node, kind_of(x))
        return
    made = operator(STRIDED)(x, size, stride, offset)
    assert isinstance(made, Tensor)
    (part,) = parts(node, kind_of(x)) or ()
    assert part.kind == kind_of(made)
    assert x.storage_offset() + part.offset == made.storage_offset()


def test_every_view_that_a_segment_may_name_has_a_rule() -> None:
    """What shares storage by torch's schema, and may be named, is told by its arguments."""
    for name in sorted(allowed_ops()):
        try:
            schema = operator(name)._schema  # type: ignore[attr-defined]
        except AttributeError:  # an op that another supported torch has
            continue
        if any(result.alias_info is not None for result in schema.returns):
            assert shares_storage(name), name
    assert {*ARGUMENTS, STRIDED} == {name for name in allowed_ops() if is_view(name)}
    x = torch.ones(4)
    assert torch.ops.aten._unsafe_view(x, [2, 2]).data_ptr() == x.data_ptr()


@examples(200)
@given(x=tensors(), dtype=st.sampled_from([DType.F64, DType.F32, DType.BF16, DType.U8]))
def test_a_bit_cast_has_the_type_that_torch_gives_it(x: Tensor, dtype: DType) -> None:
    assume(x.storage_offset() % 2 == 0)  # in memory of our own every value begins at a multiple
    node = Node(op=BITCAST, args=(Ref(0), dtype), results=(kind_of(x),))
    try:
        made = kind_of(x.view(TORCH_DTYPE[dtype]))
    except RuntimeError:
        assert mistyped(node, [kind_of(x)]) is not None
        return
    assert mistyped(Node(op=BITCAST, args=node.args, results=(made,)), [kind_of(x)]) is None


DAMAGES = {
    "alias for t": ("aten.t.default($1)", "aten.alias.default($1)"),
    "another order": ("aten.t.default($1)", "aten.permute.default($1, [0, 1])"),
    "no order": ("aten.t.default($1)", "aten.permute.default($1, [0, 0])"),
    "a dimension twice": ("aten.t.default($1)", "aten.transpose.int($1, 0, 0)"),
    "beyond the storage": ("aten.t.default($1) : f32[4,4;1,4]", "aten.t.default($1) : f32[4,4;1,900]"),
    "too many arguments": ("aten.t.default($1)", "aten.t.default($1, 1)"),
    "a float": ("aten.t.default($1)", "aten.transpose.int($1, 0, 1.0)"),
    "no result": ("$2 = aten.t.default($1) : f32[4,4;1,4]", "$2 = aten.t.default($1) : none"),
    "one that writes": ("aten.t.default($1)", "zeroir.store.default($1, $0)"),
    "one that is not known": ("aten.t.default($1)", "zeroir.t.default($1)"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_view_that_is_declared_otherwise_is_refused(name: str) -> None:
    text = print_program(mlp(blocks=1, dim=4, features=4, batch=2))
    old, new = DAMAGES[name]
    assert old in text
    report = verify(parse(text.replace(old, new)))
    assert codes(report) == {"Z008"}
