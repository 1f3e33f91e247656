"""Files of every released schema are always readable, with the same contents.

``tests/data/schema_MAJOR_MINOR.zir`` was written by that schema, and ``.txt`` beside it is the text
of its scheduled program. ``--update-golden`` writes those of the present schema and leaves the
others alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.support.stored_program import STORED
from zeroir import artifact as artifacts
from zeroir.artifact import Artifact
from zeroir.ir.text import parse, print_program
from zeroir.verify import verify

DATA = Path(__file__).parents[1] / "data"


@torch.library.custom_op("fixture::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


scaled.register_fake(lambda x, *_: torch.empty_like(x))


class Factor(torch.autograd.function.FunctionCtx):
    by: float


def keep_factor(ctx: Factor, inputs: tuple[Tensor, float], output: Tensor) -> None:
    assert output.shape == inputs[0].shape
    ctx.by = inputs[1]


def scaled_backward(ctx: Factor, grad: Tensor) -> tuple[Tensor, None]:
    return scaled(grad, ctx.by), None


scaled.register_autograd(scaled_backward, setup_context=keep_factor)


class Net(nn.Module):
    """Two linear layers of one weight, batch norm, an operator of our own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(x)
        for layer in self.layers:
            hidden = nn.functional.dropout(layer(hidden).relu(), 0.1, self.training)
        logits: Tensor = self.head(scaled(hidden, 1.5))
        return logits


def loss(net: Net, batch: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
    logits = net(batch["x"])
    mean = nn.functional.cross_entropy(
        logits.float(), batch["y"], label_smoothing=float(batch["smoothing"])
    )
    return mean, {"logits": logits}


def make() -> Artifact:
    """Most features: see the options; a tied parameter, running statistics, dropout, a constant, outputs, weights."""
    zeroir.register_workspace(scaled, lambda x, _: 4 * x.shape[0])
    batch = {"x": torch.ones(4, 8), "y": torch.zeros(4, dtype=torch.int64), "smoothing": 0.1}
    compiled = zeroir.compile(
        Net(),
        batch,
        loss=loss,
        stage=3,
        world_size=2,
        precision="fp16",
        optimizer="muon",
        group=["head:lr=0.0001"],
        clip=1.0,
        ema=0.99,
        micro_steps=zeroir.MicroSteps(count=2, order="layer", mean_over="elements"),
        units="layers.*",
    )
    return compiled.artifact


def released() -> list[Path]:
    return sorted({STORED, *DATA.glob("schema_*_*.zir")})


@pytest.mark.slow
@pytest.mark.parametrize("path", released(), ids=lambda path: path.stem)
def test_a_released_schema_is_read_as_it_was_meant(path: Path, update_golden: bool) -> None:
    text = path.with_suffix(".txt")
    if update_golden and path == STORED:
        written = make()
        artifacts.save(written, path)
        text.write_text(print_program(written.scheduled), "utf-8")
    artifact = artifacts.load(path)
    assert print_program(artifact.scheduled) == text.read_text("utf-8")
    assert parse(text.read_text("utf-8")) == artifact.scheduled
    assert verify(artifact.scheduled, reference=artifact.logical).is_valid


def test_the_present_schema_has_its_file() -> None:
    assert STORED.exists(), "run this file with --update-golden"
    data = STORED.read_bytes()
    assert artifacts.to_bytes(artifacts.from_bytes(data)) == data
