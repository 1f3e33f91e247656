"""Operators of the model whose kernels are Triton's, on the device and, by other kernels of their own, on the CPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.gpu.support import SEED, TOLERANCE, losses_of
from zeroir.api.compiling import compile_model
from zeroir.frontend import load_model_file
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.runtime.kernels.choice import KernelBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
]

MODEL = """
import torch
import triton
import triton.language as tl
from torch import nn

BLOCK = 128

@triton.jit
def scale_kernel(x, y, numel, scale, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    is_inside = at < numel
    tl.store(y + at, scale * tl.load(x + at, mask=is_inside), mask=is_inside)

@torch.library.custom_op("on_cuda::scaled", mutates_args=(), device_types="cuda")
def scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    source = x.contiguous()
    y = torch.empty_like(source)
    scale_kernel[(triton.cdiv(y.numel(), BLOCK),)](source, y, y.numel(), scale, block=BLOCK)
    return y

@scaled.register_kernel("cpu")
def _(x, scale):
    return scale * x.contiguous()

@scaled.register_fake
def _(x, scale):
    return torch.empty_like(x.contiguous())

def save(ctx, inputs, output):
    _, ctx.scale = inputs

scaled.register_autograd(lambda ctx, grad: (scaled(grad, ctx.scale), None), setup_context=save)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(24, 40), nn.Linear(40, 8)

    def forward(self, x):
        return self.second(scaled(torch.tanh(self.first(x)), 0.5)).square().mean()

def model():
    return Model()

def batch():
    return torch.randn(12, 24)
"""

TRITON_OP = MODEL.replace(
    '@torch.library.custom_op("on_cuda::scaled", mutates_args=(), device_types="cuda")',
    '@torch.library.triton_op("on_cuda::scaled", mutates_args=())',
).replace("scale_kernel[(", "torch.library.wrap_triton(scale_kernel)[(")


@pytest.mark.parametrize("kernels", KernelBackend)
@pytest.mark.parametrize("model", [MODEL, TRITON_OP], ids=["custom_op", "triton_op"])
def test_a_triton_operator_trains_as_its_cpu_kernel_does(
    device: torch.device,
    model: str,
    kernels: KernelBackend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZEROIR_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "model.py"
    path.write_text(model)
    program = compile_model(path, stage=3, world_size=1, lr=0.01).program
    assert [operator.name for operator in program.operators] == ["on_cuda.scaled.default"]
    model_file = load_model_file(str(path))
    batches = [model_file.batch() for _ in range(4)]
    reference = Engine(program, EngineSettings(seed=SEED))
    # Compiled code calls operators that have no C function through the dispatcher, which no graph can hold.
    engine = Engine(
        program,
        EngineSettings(kernels=kernels, seed=SEED, self_check=True, cuda_graphs=False),
        device=device,
    )
    for each in (reference, engine):
        each.initialise(model_file.model, SEED)
    expected, losses = losses_of(reference, batches), losses_of(engine, batches)
    reference.close()
    engine.close()
    torch.testing.assert_close(losses, expected, rtol=TOLERANCE["fp32"], atol=0.0)
