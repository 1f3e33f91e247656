"""``optimizer_bits`` in Python and in configuration files: whatever the units, a state has the same bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.api.test_config_file import resolved
from zeroir.errors import UserError
from zeroir.ir.eight_bit_states import BLOCK_NUMEL, blocks_numel
from zeroir.ir.optimizers.forms import ABSMAX, CODES
from zeroir.ir.program import Program
from zeroir.runtime.engine.engine import Engine


class Net(nn.Module):
    """Parameters of one element, of less than a block, and of several blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(nn.Linear(30, 30) for _ in range(3))
        self.norm = nn.LayerNorm(30)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        loss: Tensor = (self.scale * self.norm(x)).square().mean() + x.mean()
        return loss


def batches(count: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 30, generator=generator),) for _ in range(count)]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def codes_by_parameter(engine: Engine, program: Program) -> Mapping[tuple[str, str], Tensor]:
    by_parameter: dict[tuple[str, str], Tensor] = {}
    state = engine.full_state()
    for flat in program.flats:
        for slot in flat.slots:
            first, blocks = slot.offset // BLOCK_NUMEL, blocks_numel(slot.numel)
            for name in ("exp_avg", "exp_avg_sq"):
                codes = state[flat.name, CODES[name]][slot.offset : slot.offset + slot.numel]
                by_parameter[slot.name, CODES[name]] = codes.clone()
                scales = state[flat.name, ABSMAX[name]][first : first + blocks]
                by_parameter[slot.name, ABSMAX[name]] = scales.clone()
    return by_parameter


@pytest.mark.slow
def test_other_units_have_the_same_bytes_and_go_on(tmp_path: Path) -> None:
    (batch,) = batches(1)
    compiled = [
        zeroir.compile(net(), batch, world_size=1, stage=stage, units=units, optimizer_bits=8)
        for stage, units in ((3, None), (0, "min:100000"))
    ]
    assert len({len(each.program.flats) for each in compiled}) == 2
    engines = [each.engine() for each in compiled]
    for step in batches(3):
        losses = [float(engine.step(step).loss) for engine in engines]
        assert losses[0] == losses[1]
    states = [
        codes_by_parameter(engine, each.program)
        for engine, each in zip(engines, compiled, strict=True)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    engines[0].save(str(tmp_path / "saved"))
    for step in batches(2):
        engines[0].step(step)
        engines[1].step(step)
    engines[1].load(str(tmp_path / "saved"))
    loaded = codes_by_parameter(engines[1], compiled[1].program)
    assert all(torch.equal(value, loaded[key]) for key, value in states[0].items())
    for engine in engines:
        engine.close()


@pytest.mark.slow
def test_an_optimizer_of_torch_keeps_its_settings() -> None:
    (batch,) = batches(1)
    compiled = zeroir.compile(
        net(), batch, world_size=1, optimizer=torch.optim.Adam, lr=0.5, optimizer_bits=8
    )
    assert compiled.program.options.texts["optimizer_bits"] == "8"
    assert {group.algorithm.value for group in compiled.program.groups} == {"adam"}
    engine = compiled.engine()
    engine.step(batch)
    (group,) = engine.optimizer.param_groups
    assert group["lr"] == 0.5
    states = cast("dict[str, dict[str, Tensor]]", engine.optimizer_state_dict()["state"])
    assert {value.dtype for of in states.values() for value in of.values()} == {torch.float32}
    engine.close()


def test_a_configuration_file_sets_the_bits(tmp_path: Path) -> None:
    path = tmp_path / "options.toml"
    path.write_text('optimizer_bits = 8\ngroup = ["norm:optimizer_bits=32"]\n')

    options = resolved(path, {"world_size": 2}).options
    assert options.optimizer.bits == 8
    assert [each.bits for each in options.every_optimizer[1:]] == [32]
    path.write_text('optimizer_bits = 8\noptimizer = "shampoo"\n')
    with pytest.raises(UserError, match="shampoo works on whole parameters"):
        resolved(path, {"world_size": 2})
