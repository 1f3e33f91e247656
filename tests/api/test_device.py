"""Programs that are captured for a device, and what becomes of them on another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zeroir
from tests.support.programs import mlp
from zeroir.config.precision import Precision
from zeroir.errors import ModelWarning, UserError
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.kernels.other_devices import require_device

SAVED = r"there aten\.native_layer_norm\.default.* saves torch\.bfloat16\[3, 1\] for the backward, not torch\.float32"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def compiled(device: str | None, precision: str = "bf16") -> zeroir.CompiledProgram:
    """A program whose backward takes the statistics of norms from the forward."""
    return zeroir.compile(
        Net(),
        torch.ones(3, 8),
        world_size=1,
        precision=Precision(dtype=precision, device=device),  # type: ignore[arg-type]
        recompute=zeroir.Recompute(select_saved=False),
    )


def test_a_program_says_its_device_where_results_depend_on_it() -> None:
    assert compiled("auto", "fp32").program.options.texts.get("device") is None
    assert compiled("auto").program.options.texts["device"] == "cpu"
    on_cuda = compiled("cuda")
    assert (
        on_cuda.program.options.texts["device"] == on_cuda.logical.options.texts["device"] == "cuda"
    )
    assert "captured for cuda" in str(on_cuda)
    assert compiled("cuda", "fp32").program.options.texts["device"] == "cuda"


def test_a_program_for_another_device_is_compiled_again() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    wanted = compiled("cpu").engine()
    torch.manual_seed(0)
    program = compiled("cuda")
    with pytest.warns(ModelWarning, match=f"captured for CUDA and is compiled again.*{SAVED}"):
        engine = program.engine()
    assert engine.program.options.texts["device"] == "cpu"
    assert engine.step(x).loss == wanted.step(x).loss


def test_without_an_example_it_is_refused(tmp_path: Path) -> None:
    compiled("cuda").save(tmp_path / "net.zir")
    loaded = zeroir.load(tmp_path / "net.zir")
    with pytest.raises(
        UserError, match=f"^The program was captured for CUDA and cannot run.*{SAVED}"
    ):
        loaded.engine(model=Net())
    with pytest.raises(UserError, match=f"cannot run on the CPU.*{SAVED}.*--device cpu"):
        Lockstep(loaded.program)


def test_one_that_keeps_such_results_within_segments_runs_anywhere() -> None:
    program = zeroir.compile(
        Net(),
        torch.ones(3, 8),
        world_size=1,
        precision=zeroir.Precision(dtype="bf16", device="cuda"),
    ).program
    assert program.options.texts["device"] == "cuda"
    Lockstep(program)
    for device in ("cpu", "cuda"):
        require_device(program, torch.device(device))
        require_device(mlp(), torch.device(device))


def test_a_cpus_program_is_refused_on_cuda() -> None:
    with pytest.raises(
        UserError, match=r"captured for the CPU and cannot run on CUDA.*float32\[3, 1\]"
    ):
        require_device(compiled("cpu").program, torch.device("cuda"))


def test_a_device_is_one_of_two() -> None:
    assert Precision(device="auto").device is None  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--device is tpu, but should be 'cpu' or 'cuda'"):
        Precision(device="tpu")  # type: ignore[arg-type]


def test_dims_are_no_difference_between_devices() -> None:
    rows = torch.export.Dim("rows", max=8)
    program = zeroir.compile(Net(), torch.ones(3, 8), world_size=1, shapes=(rows, 8)).program
    assert program.dims
    assert "device" not in program.options.texts or program.options.texts["device"] == "auto"
