"""Submodules that treat each size by itself run as they are, and sizes that Python's functions return are sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from zeroir.api.compiled import CompiledProgram
from zeroir.errors import ModelWarning, ShapesError
from zeroir.torch_ops.opaque import opaque_modules

SHAPES = ((3, 6), (5, 9), (2, 3), (8, 16))


class Inner(nn.Module):
    """A submodule with code that a test gives."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.line(x))


class Net(nn.Module):
    """A line, and the submodule ``inner``."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Inner(code)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.first(x))
        return y.square().mean()


def word_by_word(x: Tensor) -> Tensor:
    state, states = torch.zeros_like(x[:, 0]), []
    for word in range(x.shape[1]):
        state = torch.tanh(x[:, word] + 0.5 * state)
        states.append(state)
    return torch.stack(states, 1)


def as_plain_number(x: Tensor) -> Tensor:
    return x / int(x.shape[0])


def in_pieces(x: Tensor) -> Tensor:
    return torch.cat([piece * piece.shape[1] for piece in torch.split(x, 4, 1)], 1)


def rounded(x: Tensor) -> Tensor:
    return x * round(x.shape[1] * 0.6)


def compiled(net: nn.Module, **options: object) -> CompiledProgram:
    dims = (Dim("rows", max=8), Dim("length", max=16), 4)
    of_batches = zeroir.MicroSteps(mean_over="batches")
    given = {"optimizer": "sgd", "lr": 0.1, "world_size": 1, "shapes": dims, **options}
    return zeroir.compile(net, torch.randn(3, 6, 4), micro_steps=of_batches, **given)  # type: ignore[arg-type]


def require_bits_of_eager(net: nn.Module, made: CompiledProgram) -> None:
    """Train on batches of several shapes, and compare each loss."""
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = made.engine(self_check=False)
    for rows, length in SHAPES:
        batch = torch.randn(rows, length, 4)
        loss = plain(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert engine.step(batch).loss == loss.item(), (rows, length)
    assert engine.program is made.program  # one for all shapes
    engine.close()


@pytest.mark.parametrize("code", [word_by_word, as_plain_number, in_pieces, rounded])
def test_a_submodule_that_treats_each_size_by_itself_runs_as_it_is(
    code: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    net = Net(code)
    with pytest.warns(ModelWarning, match=r"The code of inner runs as it is.*of_any_size.py:\d+"):
        made = compiled(net)
    assert [*opaque_modules(made.program.segments)] == ["inner"]
    require_bits_of_eager(net, made)


def test_none_refuses_such_a_submodule() -> None:
    with pytest.raises(ShapesError, match=r"of_any_size.py:\d+ lets .* only where length = 6"):
        compiled(Net(word_by_word), units=zeroir.Units(opaque="none"))


def test_the_models_own_code_that_treats_each_size_by_itself_is_refused() -> None:
    """All parameters would be gathered at once."""

    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(word_by_word(x))

    with pytest.raises(ShapesError, match=r"of_any_size.py:\d+ lets .* only where length = 6"):
        compiled(Whole(as_plain_number))


def contrasted(x: Tensor) -> Tensor:
    """The loss of models such as CLIP."""
    logits = x.mean(1) @ x.flatten(1)[:, :4].T
    return F.cross_entropy(logits, torch.arange(len(logits)))


def divided_by_tensors(x: Tensor) -> Tensor:
    length = x.shape[1]
    by = torch.tensor([length, 2.5, 1 / math.sqrt(length)])
    return x / by.sum() + torch.as_tensor(length, dtype=torch.float32) + torch.tensor(len(x))


@pytest.mark.filterwarnings("error:The code of:zeroir.errors.ModelWarning")
@pytest.mark.parametrize("code", [contrasted, divided_by_tensors])
def test_len_and_tensors_of_sizes_are_traced(code: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    net = Net(code)
    made = compiled(net)
    assert not opaque_modules(made.program.segments)
    require_bits_of_eager(net, made)


class Padded(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.pad = nn.ZeroPad1d((0, count))

    def forward(self, x: Tensor) -> Tensor:
        padded: Tensor = self.pad(x.mT)
        return padded.mT / int(x.shape[1])


@pytest.mark.filterwarnings("ignore:The code of:zeroir.errors.ModelWarning")
def test_modules_of_one_class_may_return_other_sizes() -> None:
    torch.manual_seed(0)
    net = Net(lambda x: x)
    net.inner.add_module("one", one := Padded(1))
    net.inner.add_module("two", two := Padded(2))
    net.inner.code = lambda x: torch.cat([one(x), two(x)], 1)
    made = compiled(net)
    assert sorted(opaque_modules(made.program.segments)) == ["inner.one", "inner.two"]
    require_bits_of_eager(net, made)
