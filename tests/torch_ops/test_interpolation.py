"""Interpolation between sizes that differ from batch to batch gives the bits of eager PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from zeroir.errors import UserError

BATCHES = zeroir.MicroSteps(mean_over="batches")


class Resized(nn.Module):
    """Resizes by each operator, to sizes of the batch and by factors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        image = x * self.weight[:, None, None]
        line, cube = image.mean(3), image[..., None].expand(-1, -1, -1, -1, 2)
        height, width = x.shape[2:]
        resized = [
            F.interpolate(line, size=height + 3, mode="linear"),
            F.interpolate(line, scale_factor=2, mode="nearest"),
            F.interpolate(cube, size=(width, height, 3), mode="trilinear", align_corners=True),
            F.interpolate(cube, scale_factor=(2, 1.5, 1), mode="nearest-exact"),
            F.interpolate(image, scale_factor=0.5, mode="area"),
            F.interpolate(image, (width, height), mode="bicubic"),
            F.interpolate(image, scale_factor=2.5, mode="bilinear"),
            F.interpolate(image, scale_factor=1.5, mode="bicubic", recompute_scale_factor=True),
            F.interpolate(image, (7, width), mode="bilinear", antialias=True),
            F.interpolate(image, (height // 2, 5), mode="bicubic", antialias=True),
            nn.Upsample(scale_factor=2)(image),
        ]
        loss: Tensor = sum((each.square().mean() for each in resized), torch.zeros(()))
        return loss


@pytest.mark.slow
def test_every_mode_gives_the_bits_of_eager_pytorch() -> None:
    torch.manual_seed(0)
    net = Resized()
    plain = copy.deepcopy(net)
    height, width = (Dim(name, min=4, max=16) for name in ("height", "width"))
    shapes = (2, 3, height, width)
    compiled = zeroir.compile(
        net, torch.randn(2, 3, 9, 7), shapes=shapes, optimizer="sgd", lr=0.1, micro_steps=BATCHES
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = compiled.engine()
    for sizes in ((9, 7), (4, 16), (13, 13), (16, 5)):
        batch = torch.randn(2, 3, *sizes)
        optimizer.zero_grad()
        loss = plain(batch)
        loss.backward()
        optimizer.step()
        assert engine.step(batch).loss == loss.item(), sizes
    engine.close()
    assert torch.equal(net.weight, plain.weight)


def test_a_factor_that_float64_rounds_is_refused() -> None:
    class Thirds(Resized):
        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = F.interpolate(x, scale_factor=1 / 3).mean() * self.weight.sum()
            return loss

    shapes = (2, 3, 4, Dim("width", min=4, max=16))
    with pytest.raises(UserError, match=r"test_interpolation\.py:\d+.*scale_factor"):
        zeroir.compile(Thirds(), torch.randn(2, 3, 4, 6), shapes=shapes, micro_steps=BATCHES)
