"""An engine goes on with programs for other batches, and gives a module in hand its values back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zeroir
from zeroir.api import CompiledProgram
from zeroir.errors import UserError


class Net(nn.Module):
    """Its forward has a constant that depends on the shape of the batch, but whose own shape does not."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.norm.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = ((self.norm(self.layer(x)) + 1) ** 3).mean()
        return loss * torch.tensor([1.0 + x.shape[0]])[0]


def compiled(module: nn.Module, rows: int) -> CompiledProgram:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return zeroir.compile(
        module, torch.zeros(rows, 4), optimizer=optimizer, clip=1.0, evaluate=False, world_size=1
    )


def test_training_goes_on_with_other_batches_and_ends_in_the_module() -> None:
    torch.manual_seed(0)
    plain = Net()
    module = Net()
    module.load_state_dict(plain.state_dict())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    first = compiled(module, 6)
    programs = {6: first.program, 2: compiled(module, 2).program}
    engine = first.engine(self_check=False)
    assert not engine.last_result
    assert module.layer.weight.is_meta
    for rows in (6, 2, 6):
        engine.go_on_with(programs[rows])
        batch = torch.randn(rows, 4)
        optimizer.zero_grad()
        loss = plain(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        engine.optimizer.param_groups[0]["lr"] = 0.1
        engine.micro_step(batch)
        engine.optimizer.step()
        assert engine.last_result is not None
        assert engine.last_result.loss == pytest.approx(loss.item(), rel=1e-5)
        assert engine.last_result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    assert engine.step_count == 3

    trained = engine.state_dict(only_trained=True)
    assert plain.state_dict().keys() - trained.keys() == {"norm.bias"}
    torch.testing.assert_close(trained["layer.weight"], plain.layer.weight.detach())
    weight = module.layer.weight
    engine.return_values(module)
    assert module.layer.weight is weight
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor)
    with pytest.raises(UserError, match=r"is another one in the program to go on with"):
        engine.go_on_with(compiled(Net(5), 6).program)
    with pytest.raises(UserError, match=r"no 'layer\.weight' of the shape"):
        engine.return_values(Net(5))
    engine.micro_step(torch.randn(6, 4))
    with pytest.raises(UserError, match="before go_on_with"):
        engine.go_on_with(programs[2])
