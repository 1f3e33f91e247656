"""Training that stops at values that are not finite names the parameter, or the tensor of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import zeroir
from zeroir.errors import UserError
from zeroir.runtime.data.training_data import RankOfData, TrainingData
from zeroir.runtime.training.train import train
from zeroir.runtime.training.training_state import TrainingState
from zeroir.torch_ops.batches import Batch


class Net(nn.Module):
    """Where an input of the second layer is 0, the root has no derivative, and the loss is finite all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False)
        self.third = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        root: Tensor = self.second(x).square().sum(1).sqrt().mean()
        loss: Tensor = (self.first(y) ** 2).mean() + self.third(y).mean()
        return loss + root


def trained(engine: zeroir.Engine, batches: list[Batch], micro_steps: int = 1) -> list[float]:
    def of_rank(_rank: int, _world_size: int, _seed: int, start_step: int) -> Iterator[Batch]:
        return iter(batches[start_step:])

    data = TrainingData(of_rank, RankOfData(rank=0, world_size=1, seed=0))
    training = TrainingState(engine=engine, data=data, scheduler=None, seed=0)
    return train(
        training,
        steps=engine.step_count + len(batches) // micro_steps,
        micro_steps=micro_steps,
        check_finite=True,
        report=lambda _: None,
    )


@pytest.mark.parametrize(("micro_steps", "clip"), [(1, None), (2, 1.0)])
def test_the_first_parameter_with_such_a_gradient_is_named(
    micro_steps: int, clip: float | None
) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    compiled = zeroir.compile(
        Net(), (x, y), clip=clip, world_size=1, evaluate=False, micro_steps=micro_steps
    ).specialise(updates_last=True)
    engine = compiled.engine(self_check=False)
    good, bad = (x, y), (torch.zeros(4, 3), y)
    assert len(trained(engine, [good] * micro_steps, micro_steps)) == 1
    sentence = (
        r"at step 2.* the first of 1 such parameters out of 5 is 'second\.weight' of the unit root"
    )
    with pytest.raises(UserError, match=sentence):
        trained(engine, [bad, *[good] * (micro_steps - 1)], micro_steps)


def test_the_tensor_of_the_batch_is_named() -> None:
    x = torch.randn(4, 3)
    engine = zeroir.compile(Net(), (x, x), world_size=1, evaluate=False).engine(self_check=False)
    with pytest.raises(UserError, match=r"at step 1, because the batch's '1' has values"):
        trained(engine, [(x, torch.full_like(x, torch.inf))])
