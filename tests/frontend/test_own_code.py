"""A loss function, or a model's own forward, that decides by values runs as it is after the modules that it calls."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from zeroir.api.checks.check import check_model
from zeroir.api.compiled import CompiledProgram
from zeroir.config import make_options
from zeroir.errors import ModelWarning, UserError
from zeroir.ir.segments.allowlist import OPAQUE_OPS
from zeroir.runtime.engine.engine import Engine

Batch = tuple[Tensor, Tensor]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


def hardest(values: Tensor) -> Tensor:
    return values[values > values.mean()].mean()


def loss_of_hardest(net: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return hardest((net(x) - y).square().mean(1))


class Whole(Layers):
    """Its own forward computes the loss, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        made = super().forward(x) * self.scale
        return made if y is None else hardest((made - y).square().mean(1))


class Guarded(Layers):
    """It asks for values before it calls a module."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if x.amax() > 90:
            raise ValueError("A number is beyond 90.")
        assert x.isfinite().all()
        assert y is not None
        return hardest((super().forward(x) - y).square().mean(1))


class Chosen(Layers):
    """Its layers get some of the rows."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        return hardest((super().forward(x[x.mean(1) > 0]) - y).square().mean(1))


class Skipping(Layers):
    """It calls a layer where values say so."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        assert y is not None
        made = self.first(x)
        if made.mean() > -100:
            made = self.second(made)
        return hardest((made[:, :4] - y).square().mean(1))


def batch_of(seed: int, rows: int = 6) -> Batch:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=chance), torch.randn(rows, 4, generator=chance)


def compiled(
    net: nn.Module, loss: Callable[[nn.Module, Batch], Tensor] | None = None, **options: object
) -> CompiledProgram:
    given = {"optimizer": "sgd", "lr": 0.1, "world_size": 1, **options}
    with pytest.warns(ModelWarning, match=r"runs as it is, in eager PyTorch after the modules"):
        return zeroir.compile(net, batch_of(0), loss=loss, **given)  # type: ignore[arg-type]


def require_bits_of_eager(
    engine: Engine,
    plain: nn.Module,
    loss: Callable[[nn.Module, Batch], Tensor],
    rows: tuple[int, ...] = (6, 6, 6),
) -> None:
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step, count in enumerate(rows):
        batch = batch_of(step, count)
        expected = loss(plain, batch)
        optimizer.zero_grad()
        torch.autograd.backward(expected)
        optimizer.step()
        assert engine.step(batch).loss == expected.item()
    engine.close()


def of_forward(net: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = net(*batch)
    return loss


@pytest.mark.parametrize("shapes", [None, ((Dim("rows", max=9), 4), (Dim("rows", max=9), 4))])
def test_a_loss_function_that_chooses_rows_has_the_bits_of_eager_pytorch(shapes: object) -> None:
    torch.manual_seed(0)
    net = Layers()
    plain = copy.deepcopy(net)
    options = {} if shapes is None else {"shapes": shapes}
    alike = zeroir.MicroSteps(mean_over="batches")
    made = compiled(net, loss_of_hardest, micro_steps=alike, **options)
    rows = (6, 6, 6) if shapes is None else (6, 9, 3, 7)
    require_bits_of_eager(made.engine(self_check=False), plain, loss_of_hardest, rows)


def test_the_models_own_forward_gathers_no_parameter_of_a_submodule() -> None:
    torch.manual_seed(0)
    net = Whole()
    plain = copy.deepcopy(net)
    made = compiled(net)
    nodes = [n for s in made.program.segments for n in s.nodes if n.op == OPAQUE_OPS[0]]
    (operands,) = {n.args[0] for n in nodes if isinstance(n.args[0], tuple)} or {()}
    # The results of two layers, the batch's two tensors, and the parameter ``scale``.
    assert all(len(n.args[0]) == 5 for n in nodes if isinstance(n.args[0], tuple)), operands
    assert "the model's own forward" in str(made)
    require_bits_of_eager(made.engine(self_check=False), plain, of_forward)


def test_checks_before_a_module_is_called_fail_at_the_step() -> None:
    torch.manual_seed(0)
    net = Guarded()
    plain = copy.deepcopy(net)
    made = compiled(net)
    x, y = batch_of(0)
    engine = made.engine(self_check=False)
    with pytest.raises(
        UserError, match=r"own forward, .* failed at .*test_own_code.py:\d+: ValueError: A number"
    ):
        engine.step((x + 100, y))
    engine.close(return_values=False)
    engine = made.engine(model=copy.deepcopy(plain), self_check=False)
    require_bits_of_eager(engine, plain, of_forward)


def test_code_that_decides_what_a_module_gets_or_which_is_called_is_refused() -> None:
    with pytest.raises(UserError, match=r"test_own_code.py:\d+ uses the values .* --opaque root"):
        zeroir.compile(Chosen(), batch_of(0), world_size=1)
    with pytest.raises(UserError, match=r"test_own_code.py:\d+ uses the values .* --opaque root"):
        zeroir.compile(Skipping(), batch_of(0), world_size=1)
    with pytest.raises(UserError, match=r"test_own_code.py:\d+ uses the values"):
        zeroir.compile(Whole(), batch_of(0), world_size=1, units=zeroir.Units(opaque="none"))


def weight_of(net: nn.Module) -> Tensor:
    weight: Tensor = cast("Layers", net).first.weight
    return weight


def with_a_weight_of_a_layer(net: nn.Module, batch: Batch) -> Tensor:
    return loss_of_hardest(net, batch) + weight_of(net).square().sum()


def spectral_with_a_weight_of_a_layer(net: nn.Module, batch: Batch) -> Tensor:
    """Nothing in it depends on values, so that it can be called without any."""
    outputs: Tensor = torch.fft.rfft(net(batch[0])).abs()
    loss: Tensor = outputs.mean() + weight_of(net).norm()
    return loss


def with_noise_of_torch(net: nn.Module, batch: Batch) -> Tensor:
    noise = torch.randn_like(batch[0])
    return loss_of_hardest(net, (batch[0] + noise, noise))


def with_noise_of_python(net: nn.Module, batch: Batch) -> Tensor:
    return loss_of_hardest(net, (batch[0] * random.random(), batch[1]))


def with_noise_of_numpy(net: nn.Module, batch: Batch) -> Tensor:
    return loss_of_hardest(net, (batch[0] * float(np.random.rand()), batch[1]))


history: list[Tensor] = []


def with_a_history(net: nn.Module, batch: Batch) -> Tensor:
    loss = loss_of_hardest(net, batch)
    history.append(loss.detach())
    return loss


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (with_a_weight_of_a_layer, r"uses first\.weight of a module itself"),
        (spectral_with_a_weight_of_a_layer, r"uses first\.weight of a module itself"),
        (with_a_history, r"changes test_own_code\.py:history at every call"),
        (with_noise_of_torch, "draws random numbers before it calls the model"),
        (with_noise_of_python, "draws random numbers before it calls the model"),
        (with_noise_of_numpy, "draws random numbers before it calls the model"),
    ],
)
def test_what_a_second_call_would_compute_otherwise_is_refused(
    loss: Callable[[nn.Module, Batch], Tensor], sentence: str
) -> None:
    """A layer keeps its values where they are, so code that used them would use those of the first step."""
    with pytest.raises(
        UserError, match=rf"^\S*test_own_code.py:\d+: The loss function, .*{sentence}"
    ):
        zeroir.compile(Layers(), batch_of(0), loss=loss, world_size=1)


counts = {"steps": 0}
annealed = 1.0


def with_side_effects(net: nn.Module, batch: Batch) -> Tensor:
    """It asks for the type of a parameter, too, and scales the batch before it calls the model."""
    counts["steps"] += 1
    x, y = batch
    losses = (net(x * annealed) - y).square().mean(1)
    parameter = weight_of(net)
    ones = torch.ones(parameter.shape[0], dtype=parameter.dtype, device=parameter.device)
    return hardest(losses) * ones.mean() * counts["steps"]


@pytest.mark.filterwarnings("ignore:The code of the loss function:zeroir.errors.ModelWarning")
def test_what_it_changes_is_changed_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward calls it, too."""
    torch.manual_seed(0)
    net = Layers()
    plain = copy.deepcopy(net)
    found: list[list[float]] = []
    for engine in (None, compiled(net, with_side_effects).engine(self_check=False)):
        counts["steps"] = 0
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        losses: list[float] = []
        for step in range(4):
            monkeypatch.setitem(globals(), "annealed", 1.0 + step)
            if engine is not None:
                losses.append(engine.step(batch_of(step)).loss)
                continue
            loss = with_side_effects(plain, batch_of(step))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        assert counts["steps"] == 4
        found.append(losses)
    assert found[0] == found[1]


FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.second(self.dropout(self.first(x).tanh()))

def model():
    return Net()

def loss(net, batch):
    values = net(batch).square().mean(1)
    return values[values > values.mean()].mean()

def batch():
    return torch.randn(6, 4)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*runs as it is:zeroir.errors.ModelWarning")
@pytest.mark.parametrize(
    "options", [{"stage": 3}, {"stage": 2, "micro_steps": 3, "precision": "bf16"}]
)
def test_a_model_file_equals_eager_replicas(tmp_path: Path, options: dict[str, object]) -> None:
    path = tmp_path / "hardest.py"
    path.write_text(FILE)
    given = {"world_size": 3, "optimizer": "sgd", "lr": 0.1, **options}
    result = check_model(str(path), make_options(given), steps=3, seed=0)
    assert result.is_equal, str(result)
    assert re.search(r"Runs as it is: the loss function", str(result)), str(result)
