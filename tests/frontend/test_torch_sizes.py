"""Torch's symbols and guards that the frontend uses: these tests name the part that a new torch changes."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tests.frontend.test_torch_private import attempt
from zeroir.frontend._torch_private import fake_mode
from zeroir.frontend._torch_sizes import DimEnv, NoPolynomialError, has_dims, size_of, stride_of
from zeroir.ir.sizes import Dim, Size, quotient

ROWS = Dim(name="rows", minimum=1, maximum=8)
LENGTH = Dim(name="length", minimum=2, maximum=64)


def traced(compute: Callable[[Tensor], Tensor]) -> tuple[DimEnv, Tensor]:
    """Return what a function makes of a tensor of shape (rows, length, 4), without data."""
    env = attempt(lambda: DimEnv({ROWS: 3, LENGTH: 5}))
    with attempt(lambda: fake_mode(env)):
        x = torch.empty([env.symint(size) for size in (ROWS.size, LENGTH.size, 4)])
        return env, attempt(lambda: compute(x))


def test_sizes_are_polynomials_of_dims() -> None:
    env, x = traced(lambda x: torch.cat([x.flatten(0, 1), x.flatten(0, 1)[1:]]))
    assert has_dims([x])
    assert [size_of(size) for size in x.shape] == [ROWS.size * LENGTH.size * 2 - 1, 4]
    assert env.symint(7) == 7
    assert not has_dims([torch.empty(3)])


def test_quotients_are_sizes() -> None:
    env, x = traced(lambda x: x[:, : x.shape[1] // 2])
    assert size_of(x.shape[1]) == quotient(LENGTH.size, 2)
    # Torch asks for the layout which sizes are 1.
    assert all(each.text.endswith("!= 1") for each in env.assumptions)


def test_a_view_finds_a_size_from_sums() -> None:
    def heads(x: Tensor) -> Tensor:
        shorter = x.transpose(0, 1)[x.shape[1] // 3 :]
        return shorter.reshape(*shorter.shape[:2], -1, 2)

    env, x = traced(heads)
    assert size_of(x.shape[2]) == 2
    assert not any("%" in each.text or "Mod" in each.text for each in env.assumptions)


def _flat(x: Tensor) -> Tensor:
    return torch.ops.aten._unsafe_view(x, [x.shape[0] * x.shape[1], 4])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "view",
    [
        _flat,
        lambda x: x[:, 1:],
        lambda x: x.transpose(0, 1).unsqueeze(0),
        lambda x: x.view(torch.int32),
        lambda x: torch.ops.aten._unsafe_view(x[:, :, :2], [x.shape[0], x.shape[1], 1, 2]),
    ],
)
def test_views_are_those_of_torch(view: Callable[[Tensor], Tensor]) -> None:
    """Also those that the mode makes from its cache, which are the second ones here."""
    _, x = traced(lambda x: x)
    expected = view(torch.empty(3, 5, 4))
    assert isinstance(x, FakeTensor)
    with x.fake_mode:
        for result in (attempt(lambda: view(x)), attempt(lambda: view(x))):
            sizes = [size_of(size) for size in result.shape]
            steps = [stride_of(step) for step in result.stride()]
            assert [_at_example(n) for n in sizes] == [*expected.shape]
            assert [_at_example(n) for n in steps] == [*expected.stride()]
            assert result.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert _at_example(size_of(result.storage_offset())) == expected.storage_offset()
            assert result.dtype == expected.dtype
            assert not result.requires_grad


def _at_example(size: int) -> int:
    return size.at({"rows": 3, "length": 5}) if isinstance(size, Size) else size


def test_a_view_of_a_contiguous_tensor_asks_nothing() -> None:
    _, x = traced(lambda x: x)
    assert isinstance(x, FakeTensor)
    with x.fake_mode, mock.patch.object(DimEnv, "evaluate_expr") as asked:
        assert size_of(_flat(x).shape[0]) == ROWS.size * LENGTH.size
    asked.assert_not_called()


def test_a_stride_counts_a_size_of_0_as_0() -> None:
    env = DimEnv({ROWS: 3, LENGTH: 5})
    with fake_mode(env):
        rows = torch.empty([env.symint(size) for size in (LENGTH.size, ROWS.size)])
        shorter = rows[:, :-1].clone()
        larger = torch.sym_max(1, shorter.shape[1])  # type: ignore[no-untyped-call]
    assert [stride_of(step) for step in shorter.stride()] == [ROWS.size - 1, 1]
    with pytest.raises(NoPolynomialError):
        size_of(larger)


def test_a_size_that_is_no_polynomial_is_named() -> None:
    env, x = traced(lambda x: x[:, : x.shape[1] // x.shape[0]])
    del env
    with pytest.raises(NoPolynomialError, match="length//rows") as refusal:
        size_of(x.shape[1])
    assert refusal.value.dims == ("rows", "length")


def _padded(x: Tensor) -> Tensor:
    pad = (4 - x.shape[1] % 4) % 4
    blocks = torch.cat([x, x.new_zeros(x.shape[0], pad, 4)], 1).reshape(x.shape[0], -1, 4, 4)
    return blocks.transpose(1, 2).flatten(1, 2)[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("compute", "height"),
    [
        (lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1), lambda length: quotient(length + 1, 2)),
        (lambda: nn.Conv2d(4, 4, 2, stride=2), lambda length: quotient(length, 2)),
        (lambda: nn.MaxPool2d(3, 2, 1), lambda length: quotient(length + 1, 2)),
        (lambda: nn.Sequential(*[nn.MaxPool2d(3, 2, 1)] * 2), lambda length: quotient(length + 3, 4)),
        (lambda: lambda x: x.unfold(2, 2, 2), lambda length: quotient(length, 2)),
    ],
)  # fmt: skip
def test_heights_after_strides_are_quotients(
    compute: Callable[[], Callable[[Tensor], Tensor]], height: Callable[[int], int]
) -> None:
    for factor in (1, 4):
        env = DimEnv({ROWS: 3, LENGTH: 5})
        with fake_mode(env):
            sides = [env.symint(LENGTH.size * factor)] * 2
            x = torch.empty(2, 4, *sides)
            x = compute()(x)
        assert size_of(x.shape[2]) == height(LENGTH.size * factor)
        assert env.assumptions == ()


def test_padding_to_a_multiple_is_undone_by_a_slice() -> None:
    _, x = traced(_padded)
    assert [size_of(size) for size in x.shape] == [ROWS.size, LENGTH.size, 4]


@pytest.mark.parametrize(
    ("compute", "assumption"),
    [
        (lambda x: x * 2 if x.shape[0] > 4 else x, "rows <= 4"),
        (lambda x: x + torch.empty(5, 4), "length = 5"),
        (lambda x: x if x.shape[0] < x.shape[1] else x * 2, "rows < length"),
        (lambda x: x * 2 if x.shape[0] == 1 else x, "rows != 1"),
        (lambda x: x * 2 if x.shape[0] % 2 else x, "-rows + 2*(((rows + 1)//2)) != 0"),
        (lambda x: x * len(range(x.shape[0])), "rows = 3"),
    ],
)
def test_what_a_trace_assumes_is_named(
    compute: Callable[[Tensor], Tensor], assumption: str
) -> None:
    env, _ = traced(compute)
    (made,) = [each for each in env.assumptions if each.text == assumption]
    assert made.line.startswith("test_torch_sizes.py:")
    assert made.dims == tuple(name for name in ("rows", "length") if name in assumption)
