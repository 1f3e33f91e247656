"""Recurrent networks in plain operators against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from zeroir.torch_ops import neutral_ops

NO_SEEDS = torch.empty(0, dtype=torch.int64)


def outputs(module: nn.Module, x: Tensor, *states: object) -> list[Tensor]:
    y, last = module(x, *states)
    return [y, *([last] if isinstance(last, Tensor) else last)]


def compare(module: nn.Module, x: Tensor, *states: object) -> None:
    found: list[list[Tensor]] = []
    for is_neutral in (False, True):
        with neutral_ops(NO_SEEDS) if is_neutral else torch.enable_grad():
            results = outputs(module, x, *states)
        loss = torch.stack([result.cos().sum() for result in results]).sum()
        found.append([*results, *torch.autograd.grad(loss, [x, *module.parameters()])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "module",
    [
        nn.LSTM(3, 4),
        nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True),
        nn.LSTM(3, 4, 2, bias=False, proj_size=2),
        nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2),
        nn.GRU(3, 4, 2, bidirectional=True),
        nn.GRU(3, 4, bias=False, batch_first=True),
        nn.RNN(3, 4, 3),
        nn.RNN(3, 4, bidirectional=True, nonlinearity="relu"),
    ],
    ids=str,
)
def test_networks_equal_torchs(module: nn.Module) -> None:
    torch.manual_seed(0)
    compare(module.double(), torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True))


def test_first_states_and_single_sequences() -> None:
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    h, c = torch.randn(2, 1, 4, dtype=torch.float64)
    compare(nn.LSTM(3, 4).double(), x, (h, c))
    compare(nn.GRU(3, 4).double(), x, h)


def test_dropout_is_between_layers_and_uses_the_seeds() -> None:
    x = torch.randn(5, 2, 3)
    module = nn.LSTM(3, 4, 3, dropout=0.5)
    seeds = torch.arange(4)
    with neutral_ops(seeds) as mode:
        first = module(x)[0]
    assert mode.sites == 2
    with neutral_ops(seeds):
        assert torch.equal(module(x)[0], first)
    with neutral_ops(seeds + 1):
        assert not torch.equal(module(x)[0], first)
    with neutral_ops(seeds) as mode:
        module.eval()(x)
    assert mode.sites == 0


def test_packed_sequences_are_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 3), torch.ones(2, 3)])
    network = nn.GRU(3, 4)
    with neutral_ops(NO_SEEDS), pytest.raises(NotImplementedError, match="packed sequences"):
        network(packed)
