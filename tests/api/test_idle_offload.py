"""An option that moves something out of device memory never does nothing in silence."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from zeroir.api.compiled import CompiledProgram, specialised
from zeroir.api.compiling import compile_model
from zeroir.api.search.idle_offload import idle_offload
from zeroir.config.offload import Offload
from zeroir.errors import OffloadWarning

BATCH = torch.ones(16, 96)


class Blocks(nn.Module):
    """Four equal blocks, of which the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x).relu()
        return x.square().mean()


@pytest.fixture(scope="module")
def compiled() -> CompiledProgram:
    return compile_model(Blocks(), BATCH, world_size=1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"page_optimizer": "1GiB"}, "--page-optimizer 1GiB has no effect: all states, 227.3 kB"),
        ({"offload": "activations"}, "--offload activations has no effect: no value of 64 KiB"),
        (
            {"offload": "gradients", "offload_units": "blocks.0"},
            "--offload gradients has no effect: nothing is trained in these units.",
        ),
        (
            {"offload": "optimizer", "offload_units": "blocks.0"},
            "--offload optimizer has no effect: nothing is trained in these units.",
        ),
    ],
)
def test_a_warning_says_that_nothing_moves(
    compiled: CompiledProgram, options: Mapping[str, object], why: str
) -> None:
    with pytest.warns(OffloadWarning) as warned:
        specialised(compiled, options)
    (warning,) = warned
    assert str(warning.message).startswith(why)


def test_no_warning_where_something_moves(compiled: CompiledProgram) -> None:
    outside = compiled.specialise(
        offload=Offload(what=("optimizer", "gradients", "parameters"), fraction=1e-9)
    )
    paged = compiled.specialise(offload=Offload(page_optimizer="64KiB", page_bytes="16KiB"))
    speculating = compile_model(
        Blocks(),
        BATCH,
        world_size=1,
        offload=Offload(what=("optimizer",), speculate=True),
        clip=1.0,
    )
    assert idle_offload(outside.program, outside.options) == ()
    assert idle_offload(speculating.program, speculating.options) == ()
    assert idle_offload(paged.program, paged.options) == ()
