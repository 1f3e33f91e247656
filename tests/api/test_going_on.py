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


class AnyRows(nn.Module):
    """A module with dropout, for batches of any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


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
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_step_goes_on_with_a_program_for_longer_batches(stage: int) -> None:
    """Sums of the micro-steps before the change count, and the parameters are those of a step without it."""

    def program(most: int, micro_steps: int = 2) -> CompiledProgram:
        torch.manual_seed(0)
        return zeroir.compile(
            AnyRows(),
            torch.zeros(3, 4),
            shapes=f"0: rows<={most}, 4",
            stage=stage,
            micro_steps=micro_steps,
            optimizer="sgd",
            lr=0.1,
            world_size=1,
        )

    batches = [torch.randn(rows, 4) for rows in (3, 2, 7, 5)]
    ends: list[dict[str, Tensor]] = []
    for first in (program(4), program(8)):
        engine = first.engine(self_check=False)
        for index, batch in enumerate(batches):
            if index == 2 and first.program.dims[0].maximum == 4:
                engine.go_on_with(program(8).program)
            engine.micro_step(batch, is_last=index == 3)
        loss = engine.update().loss
        engine.step(batches)
        ends.append({**engine.full_parameters(), "loss": torch.tensor(loss)})
        if len(ends) == 2:
            engine.micro_step(batches[0], is_last=False)
            with pytest.raises(UserError, match=r"has other sums of micro-steps, .* before go_on"):
                engine.go_on_with(program(8, micro_steps=1).program)
        engine.close()
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name]), name
