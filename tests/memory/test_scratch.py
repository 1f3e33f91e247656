"""What the eager kernels hold while they carry out one op, by torch's allocator events, is what the formulas say.

Every op is called with tensors of several dtypes, shapes and strides, and its results are dropped, written to
destinations, copied to ones with other strides, and added to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.memory.nodes import Argument, Case, bound, segment_of, taken, unwanted
from tools.list_aten_ops import PATH
from zeroir.errors import UserError
from zeroir.ir.ops import Mode
from zeroir.ir.segments.allowlist import listed_ops
from zeroir.ir.segments.segment import Node
from zeroir.runtime.kernels.calls import operator, out_overload
from zeroir.workspace.segments import can_fill, eager_workspace

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
I64, BOOL = torch.int64, torch.bool
FLOATS = (F32, BF16, F16)

OneCall = tuple[str, tuple[Argument, ...], dict[str, Argument]]


def one(op: str, *args: Argument, **kwargs: Argument) -> OneCall:
    return op, args, kwargs


def of(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def layouts(*shape: int, dtype: torch.dtype) -> list[Tensor]:
    """Row-major, with the dimensions the other way round in memory, and expanded from one row."""
    last = len(shape) - 1
    return [
        of(*shape, dtype=dtype),
        of(*reversed(shape), dtype=dtype).permute(*range(last, -1, -1)),
        of(1, *shape[1:], dtype=dtype).expand(shape),
    ]


def elementwise() -> Iterator[OneCall]:
    for name, a, b in itertools.product(
        ("add", "mul", "div", "eq"), (F32, BF16, I64, BOOL), (F32, F16, I64)
    ):
        yield one(f"aten.{name}.Tensor", of(6, 5, dtype=a), of(6, 5, dtype=b))
        yield one(f"aten.{name}.Tensor", of(5, 6, dtype=a).t(), of(dtype=b))
    for name, a, number in itertools.product(
        ("add", "mul", "div", "lt"), (F32, BF16, F64, I64), (2, 0.5)
    ):
        yield one(f"aten.{name}.Scalar", of(6, 5, dtype=a), number)
    for a in (F32, BF16, I64):
        yield one("aten.where.self", of(6, 5, dtype=BOOL), of(6, 5, dtype=a), of(dtype=F32))
        yield one("aten.isinf.default", of(6, 5, dtype=a))
        yield one("aten.exp.default", of(6, 5, dtype=a))
        yield one("aten.any.default", of(6, 5, dtype=a))
    yield one("aten.clamp.Tensor", of(6, 5, dtype=F16), of(), of())


def reductions() -> Iterator[OneCall]:
    for dtype, dims in itertools.product(
        (*FLOATS, I64), ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
    ):
        for x in layouts(4, 6, 5, dtype=dtype):
            yield one("aten.sum.dim_IntList", x, dims, True)
            if dtype is not I64:
                yield one("aten.mean.dim", x, dims)
    for dtype in FLOATS:
        yield one("aten.sum.dim_IntList", of(4, 6, 5, 3, dtype=dtype), (0, 2, 3))
        yield one("aten.mean.default", of(6, 5, dtype=dtype))
        for x in layouts(4, 6, 10, dtype=dtype):
            yield one("aten._softmax.default", x, 1, False)
            out = torch.softmax(x.float(), 1).to(dtype)
            yield one("aten._softmax_backward_data.default", x, out, 1, dtype)


def copies() -> Iterator[OneCall]:
    for dtype, shape in itertools.product((*FLOATS, BOOL), ((60, 60), (59, 61), (130, 70))):
        yield one("aten.t.default", of(*shape, dtype=dtype))
        yield one("aten.clone.default", of(*shape, dtype=dtype).t())
    yield one("aten.slice_scatter.default", of(6, 5)[:, 1:], of(6, 2), 1, 0, 2)
    yield one("aten.select_scatter.default", of(6, 5), of(5), 0, 2)
    yield one("aten.copy.default", of(6, 5)[1:3], of(2, 5))


def lookups() -> Iterator[OneCall]:
    rows = (of(4, 6, dtype=I64), of(6, dtype=I64).expand(4, 6), of(6, 4, dtype=I64).t())
    for dtype, indices in itertools.product(FLOATS, rows):
        yield one("aten.embedding.default", of(20, 8, dtype=dtype), indices)
        for grad in layouts(4, 6, 8, dtype=dtype)[:2]:
            for padding, is_scaled in ((-1, False), (2, False), (-1, True)):
                yield one(
                    "aten.embedding_dense_backward.default", grad, indices, 20, padding, is_scaled
                )


def norms() -> Iterator[OneCall]:
    for dtype in FLOATS:
        weight = of(32, dtype=dtype)
        for x in layouts(4, 6, 32, dtype=dtype)[:2]:
            yield one("aten.native_layer_norm.default", x, (32,), weight, weight, 1e-5)
            _, mean, deviation = torch.native_layer_norm(x, (32,), weight, weight, 1e-5)
            for mask in ((True, True, True), (True, False, False), (False, True, True)):
                yield one(
                    "aten.native_layer_norm_backward.default",
                    *(x, of(4, 6, 32, dtype=dtype), (32,), mean, deviation, weight, weight, mask),
                )
        for shape in ((7,), (2, 6, 16)):
            yield one("zeroir.dropout.default", of(*shape, dtype=dtype), 0.1, of(1, dtype=I64))
        channels = of(8), of(8), of(8), torch.ones(8)
        image = of(4, 8, 5, 5, dtype=dtype)
        steps = of(4, 5, 8, dtype=dtype).transpose(1, 2)
        yield one("zeroir.batch_norm.default", steps, *channels, False, 0.1, 1e-5)
        for x in (image, image.to(memory_format=torch.channels_last), of(2, 8, dtype=dtype)):
            yield one("zeroir.batch_norm.default", x, *channels, True, 0.1, 1e-5)
            yield one("zeroir.batch_norm.default", x, *channels, False, 0.1, 1e-5)
            out, *statistics = torch.ops.zeroir.batch_norm(x, *channels, True, 0.1, 1e-5)[:3]
            yield one(
                "zeroir.batch_norm_backward.default",
                *(out, x, channels[0], None, None, *statistics, True, 1e-5),
            )


def products() -> Iterator[OneCall]:
    for dtype, (n, k, m) in itertools.product((*FLOATS, F64), ((4, 5, 6), (32, 48, 64))):
        a = (of(n, k, dtype=dtype), of(k, n, dtype=dtype).t(), of(n, 2 * k, dtype=dtype)[:, ::2])
        b = (of(k, m, dtype=dtype), of(m, k, dtype=dtype).t(), of(dtype=dtype).expand(k, m))
        for left, right in itertools.product(a, b):
            yield one("aten.mm.default", left, right)
        yield one("aten.addmm.default", of(m, dtype=dtype), a[0], b[1])
        batches = (of(3, n, k, dtype=dtype), of(n, 3, k, dtype=dtype).transpose(0, 1))
        for left in batches:
            yield one("aten.bmm.default", left, of(3, m, k, dtype=dtype).transpose(1, 2))


def grouped_products() -> Iterator[OneCall]:
    """Of rows, of columns, and summed over rows; the second of three groups is empty."""
    operands = (((16, 8), (3, 8, 24)), ((3, 8, 24), (24, 16)), ((24, 16), (16, 8)))
    for dtype, (first, second) in itertools.product((F32, BF16), operands):
        ends = torch.tensor([8, 8, 16], dtype=torch.int32)
        for op in ("aten._grouped_mm.default", "zeroir.grouped_mm.default"):
            yield one(op, of(*first, dtype=dtype), of(*second, dtype=dtype), ends)
            turned = of(*second[:-2], second[-1], second[-2], dtype=dtype).transpose(-2, -1)
            yield one(op, of(*first, dtype=dtype), turned, ends)


def convolutions() -> Iterator[OneCall]:
    for dtype, (channels, stride, side) in itertools.product(
        FLOATS, ((3, 1, 3), (8, 2, 3), (16, 2, 1))
    ):
        yield from convolution(
            of(4, channels, 16, 16, dtype=dtype), of(8, channels, side, side, dtype=dtype), stride
        )
    for dtype in (*FLOATS, F64):
        image, line, block = of(2, 8, 12, 12, dtype=dtype), (2, 8, 30), (2, 4, 6, 6, 6)
        yield from convolution(image, of(8, 2, 3, 3, dtype=dtype), groups=4)
        yield from convolution(image, of(8, 1, 3, 3, dtype=dtype), groups=8)
        yield from convolution(image, of(16, 8, 3, 3, dtype=dtype), dilation=2)
        yield from convolution(image, of(8, 6, 4, 4, dtype=dtype), 2, is_transposed=True)
        yield from convolution(of(*line, dtype=dtype), of(5, 8, 4, dtype=dtype))
        yield from convolution(of(*block, dtype=dtype), of(5, 4, 3, 3, 3, dtype=dtype))
        yield from convolution(image[:1], of(5, 8, 3, 3, dtype=dtype))


def convolution(
    x: Tensor,
    weight: Tensor,
    stride: int = 1,
    *,
    dilation: int = 1,
    groups: int = 1,
    is_transposed: bool = False,
) -> Iterator[OneCall]:
    """A convolution and its gradients."""
    rank, side = x.dim() - 2, weight.shape[-1]
    zeros = (0,) * rank
    how = (
        *((stride,) * rank, (side // 2,) * rank, (dilation,) * rank),
        *(is_transposed, zeros, groups),
    )
    yield one("aten.convolution.default", x, weight, None, *how)
    grad = torch.ops.aten.convolution(x, weight, None, *how)
    yield one(
        "aten.convolution_backward.default",
        *(grad, x, weight, (grad.shape[1],), *how, (True, True, True)),
    )


def attention() -> Iterator[OneCall]:
    shapes = (
        *((2, 4, 4, 12, 12, 8, 8), (1, 2, 1, 200, 70, 32, 32), (1, 2, 2, 5, 17, 7, 7)),
        (2, 4, 2, 12, 17, 8, 6),  # which the CPU's fused kernel refuses
    )
    for dtype, (batch, heads, kv_heads, length, kv_length, dim, v_dim) in itertools.product(
        FLOATS, shapes
    ):
        k = of(batch, kv_heads, kv_length, dim, dtype=dtype)
        v = of(batch, kv_heads, kv_length, v_dim, dtype=dtype)
        masks = (
            None,
            of(1, 1, length, kv_length, dtype=BOOL),
            of(1, 1, length, kv_length, dtype=dtype),
        )
        for q, mask in itertools.product(
            (
                of(batch, heads, length, dim, dtype=dtype),
                of(batch, length, heads, dim, dtype=dtype).transpose(1, 2),
                of(batch, heads, dim, length, dtype=dtype).transpose(2, 3),
            ),
            masks,
        ):
            yield one("zeroir.attention.default", q, k, v, mask, False, None)
            out, lse = torch.ops.zeroir.attention(q, k, v, mask, False, None)
            yield one(
                "zeroir.attention_backward.default",
                *(torch.zeros_like(out), q, k, v, mask, out, lse, False, None),
            )


def bounded() -> Iterator[OneCall]:
    for dtype, shape in itertools.product(FLOATS, ((16, 64), (3, 5), (200, 7))):
        x, y = of(*shape, dtype=dtype), of(*shape, dtype=dtype)
        indices, ones = of(*shape, dtype=I64), torch.ones(shape, dtype=dtype)
        for reduction in range(3):
            yield one("aten.mse_loss.default", x, y, reduction)
            yield one("aten.smooth_l1_loss.default", x, y, reduction, 1.0)
            yield one("aten.huber_loss.default", x, y, reduction, 1.0)
            yield one("aten.binary_cross_entropy.default", x, y, None, reduction)
            yield one("aten.binary_cross_entropy.default", x, y, ones, reduction)
            logits = "aten.binary_cross_entropy_with_logits.default"
            yield one(logits, x, y, ones, ones[0], reduction)
        backward = "aten.binary_cross_entropy_backward.default"
        yield one(backward, torch.ones((), dtype=dtype), x, y, ones, 1)
        for dim in range(2):
            yield one("aten.logsumexp.default", x, (dim,))
            yield one("aten.sort.default", x, dim)
            yield one("aten.topk.default", x, 2, dim)
            yield one("aten.gather.default", x, dim, indices)
            yield one("aten.scatter.src", x, dim, indices, y)
            yield one("aten.scatter_add.default", x, dim, indices, y)
            rows = of(1, shape[1], dtype=I64).expand(shape)
            yield one("aten.scatter_add.default", x, dim, rows, y)
        image = of(2, 3, *shape, dtype=dtype)
        for scale in (2.0, 0.5):
            yield one("aten.upsample_nearest2d.vec", image, None, (scale, scale))
            yield one("aten.upsample_bilinear2d.vec", image, None, False, (scale, scale))
            yield one("aten.upsample_bicubic2d.vec", image, None, False, (scale, scale))


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(bounded, marks=pytest.mark.slow),
        copies,
        lookups,
        elementwise,
        reductions,
        norms,
        *(
            pytest.param(calls, marks=pytest.mark.slow)
            for calls in (
                products,
                grouped_products,
                convolutions,
                attention,
            )
        ),
    ],
    ids=lambda calls: calls.__name__,
)
def test_the_formulas_are_what_the_allocator_says(calls: Callable[[], Iterator[OneCall]]) -> None:
    require_declared(calls)


@pytest.mark.slow
@pytest.mark.parametrize("calls", [products, convolutions], ids=lambda calls: calls.__name__)
def test_what_is_allowed_is_enough_without_onednn(calls: Callable[[], Iterator[OneCall]]) -> None:
    """As on CPUs that it does not know, where torch computes itself or by another library."""
    (is_enabled, *_) = torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    try:
        require_declared(calls)
    finally:
        torch.backends.mkldnn.set_flags(_enabled=is_enabled)  # type: ignore[no-untyped-call]


def require_declared(calls: Callable[[], Iterator[OneCall]]) -> None:
    """What is counted is equal, and what is allowed is enough."""
    cases = [case for call in calls() for case in bindings_of(call)]
    wrong: list[str] = []
    for case, found in zip(cases, taken(cases), strict=True):
        declared = eager_workspace(case.segment, case.outputs)
        if found.counted_bytes != declared.counted_bytes or found.peak_bytes > declared.most_bytes:
            wrong.append(f"{described(case)} declares {declared} and takes {found}")
    assert not wrong, f"under torch {torch.__version__}: " + "; ".join(wrong[:10])
    assert len(cases) > 20


def bindings_of(call: OneCall) -> list[Case]:
    """The call with its results dropped, written, copied to rows, and added to destinations."""
    op, args, kwargs = call
    segment, tensors = segment_of(op, *args, **kwargs)
    ways = [unwanted(segment), bound(segment), bound(segment, dense=True)]
    if all(kind.dtype.is_floating for kind in segment.output_types()):
        ways.append(bound(segment, Mode.ACCUMULATE))
    return [Case(segment=segment, outputs=outputs, tensors=tensors) for outputs in ways]


def described(case: Case) -> str:
    (node,) = case.segment.nodes
    kinds = ", ".join(
        f"{kind.dtype}{list(kind.shape)} by {list(kind.stride)}" for kind in case.segment.inputs
    )
    modes = [None if one is None else f"{one.mode} by {list(one.stride)}" for one in case.outputs]
    return f"{node.op} of {kinds} to {modes}"


def test_what_can_be_filled_is_what_torch_fills() -> None:
    """The list that the memory model goes by names the operators that the kernels give memory to."""
    checked = 0
    for op in sorted(listed_ops(PATH.name)):
        try:
            function = operator(op)
        except UserError:  # an operator of another torch
            continue
        node = Node(op=op, args=(None, None, None, None, True), results=(None,))
        assert can_fill(node) == (out_overload(function) is not None), (op, torch.__version__)
        checked += 1
    assert checked > 1000
