"""What torch copies or views by the sizes of a batch gives the types that a program declares, and eager's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.evaluate import at_rest, fill_from, run_section
from zeroir.config import make_options
from zeroir.frontend import load_model_file
from zeroir.frontend.lowering.tracing import trace_model
from zeroir.ir.analysis.instances import instance
from zeroir.ir.program import LAST_MICRO_STEP
from zeroir.torch_ops import neutral_ops

FILE = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        {forward}

def model():
    return Padded()

def batch():
    return torch.ones(3, 5, 8)

def loss(module, batch):
    return module(batch).square().mean()

def shapes():
    return (Dim("rows", max=4), Dim("length", max=9), 8)
"""

FORWARDS = {
    "padding of a tensor": (
        "y = self.first(x).transpose(1, 2).contiguous().transpose(1, 2);"
        "return self.last(F.pad(y, (0, 0, 0, -y.shape[1] % 4)))"
    ),
    "padding of a gradient": (
        "y = F.pad(self.first(x), (0, 0, 0, -x.shape[1] % 4));"
        "turned = y.transpose(1, 2).contiguous().cos();"
        "return turned * self.last.bias[:, None] + self.last.weight.sum()"
    ),
    "padding of images with channels last": (
        "y = self.first(x)[None].to(memory_format=torch.channels_last);"
        "return self.last(F.pad(y, (0, 0, 0, -x.shape[1] % 4)))[0]"
    ),
    "cutting": (
        "y = self.first(x).transpose(1, 2).contiguous().transpose(1, 2);"
        "return self.last(F.pad(y, (0, 0, 0, -(x.shape[1] // 2))).cos())"
    ),
    "a layer of what is transposed": (
        "y = self.first(x).transpose(1, 2).contiguous().transpose(1, 2);return self.last(y)"
    ),
    "a layer of what is transposed and flat": (
        "y = self.first(x).transpose(1, 2).contiguous().transpose(1, 2);"
        "return F.linear(input=y.flatten(0, 1), weight=self.last.weight, bias=self.last.bias)"
    ),
    "a layer that is transposed then": (
        "y = self.first(x).transpose(1, 2).contiguous().cos();"
        "return y * self.last.bias[:, None] + self.last.weight.sum()"
    ),
    "a product of what is transposed": (
        "y = self.first(x).transpose(1, 2).contiguous().transpose(1, 2);"
        "return y @ self.last.weight + self.last.bias.sum()"
    ),
    "a product that is transposed then": (
        "y = (x @ self.first.weight).transpose(1, 2).contiguous().cos();"
        "return y * self.last.bias[:, None] + self.last.weight.sum() + self.first.bias.sum()"
    ),
    "products of heads": (
        "y = self.first(x).repeat(1, 1, 128).unflatten(2, (2, 512)).transpose(1, 2);"
        "y = (y @ y.transpose(2, 3)).softmax(-1) @ y;"
        "return y.transpose(1, 2)[..., :8] * self.last.bias + self.last.weight.sum()"
    ),
    "products of heads that share keys": (
        "q = self.first(x).repeat(1, 1, 128).unflatten(2, (2, 512)).transpose(1, 2);"
        "k = self.last(x).repeat(1, 1, 64)[:, None];"
        "return torch.matmul(torch.matmul(q, k.transpose(2, 3)).softmax(-1), k)"
    ),
    "products of heads that repeat keys": (
        "q = self.first(x).repeat(1, 1, 128).unflatten(2, (2, 512)).transpose(1, 2);"
        "k = self.last(x).repeat(1, 1, 64)[:, None, None].expand(-1, -1, 2, -1, -1);"
        "k = k.reshape(q.shape);"
        "return torch.matmul(torch.matmul(q, k.transpose(2, 3)).softmax(-1), k)"
    ),
}


QUICK = ("padding of a gradient", "cutting", "a product of what is transposed")


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=[] if what in QUICK else [pytest.mark.slow]) for what in FORWARDS],
)
def test_one_row_gives_the_bits_of_eager_pytorch(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(FILE.format(forward=FORWARDS[what]))
    file = load_model_file(str(path))
    options = make_options({"world_size": 1, "mean_over": "batches"})
    program = trace_model(file, options).program
    assert [dim.minimum for dim in program.dims] == [1, 1]
    model = file.model()
    parameters = dict(model.named_parameters())
    for rows, length in ((1, 4), (1, 8), (1, 9), (1, 1), (2, 4), (3, 7), (4, 8)):
        here = instance(program, {"rows": rows, "length": length})
        batch = torch.rand(rows, length, 8)
        memory = at_rest(here)
        memory[here.inputs[0].buffer].copy_(batch.flatten())
        fill_from(here, memory, parameters)
        with neutral_ops(torch.arange(0)):
            expected = model(batch).square().mean()
        gradients = torch.autograd.grad(expected, list(parameters.values()))
        run_section(here, LAST_MICRO_STEP, memory)
        assert torch.equal(memory["loss"][0], expected.detach())
        by_name = dict(zip(parameters, gradients, strict=True))
        for flat in here.flats:
            for slot in flat.slots:
                found = memory[f"{flat.name}.grad"][slot.offset : slot.offset + slot.numel]
                assert torch.equal(found, by_name[slot.name].flatten()), (slot.name, rows, length)
