"""One rank that trains a module in hand and the same model from its file: ``python -m tests.api.in_hand_workers``."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zeroir
from zeroir.api.compiled import CompiledProgram
from zeroir.ir.text import print_program

STEPS = 3
FILE = """
import torch
from tests.api.in_hand_workers import Net, example, loss

def model():
    return Net()

def batch():
    return example(0, 0)
"""


@dataclass(frozen=True)
class Sample:
    """A batch of a class that torch knows nothing about, with constants."""

    tokens: Tensor
    labels: Tensor
    smoothing: float
    weights: tuple[Tensor, None]


class Net(nn.Module):
    """Tied weights, dropout, running statistics, a frozen layer, a hook and a submodule in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        blocks = [nn.Linear(8, 8) for _ in range(5)]
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.resting = nn.BatchNorm1d(8).eval()
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        blocks[1].register_forward_hook(lambda _, __, output: output * 1.5)
        register: Callable[..., object] = blocks[2].weight.register_hook
        register(lambda gradient: gradient * 0.5)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens).mean(1)
        for block in self.blocks:
            x = x + self.dropout(block(x).tanh())
        logits: Tensor = self.head(self.resting(self.norm(self.frozen(x))))
        return logits


def loss(module: nn.Module, batch: Sample) -> tuple[Tensor, dict[str, Tensor]]:
    assert isinstance(batch, Sample)
    logits = module(batch.tokens)
    weight, nothing = batch.weights
    assert nothing is None
    value = F.cross_entropy(logits, batch.labels, weight, label_smoothing=batch.smoothing)
    return value, {"logits": logits}


def example(rank: int, step: int) -> Sample:
    generator = torch.Generator().manual_seed(31 * rank + step)
    return Sample(
        tokens=torch.randint(11, (6, 4), generator=generator),
        labels=torch.randint(11, (6,), generator=generator),
        smoothing=0.125,
        weights=(torch.rand(11, generator=generator), None),
    )


def make_module() -> nn.Module:
    """The module that an engine of the file builds with seed 5."""
    torch.manual_seed(5)
    return Net()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def trained(compiled: CompiledProgram, rank: int) -> tuple[list[float], dict[str, Tensor]]:
    engine = compiled.engine(seed=5, self_check=False)
    losses = [engine.step(example(rank, step)).loss for step in range(STEPS)]
    parameters = engine.full_parameters()
    engine.close()
    return losses, parameters


def require_equal_training(path: str, rank: int, world_size: int, stage: int) -> None:
    """A module in hand, and at stage 3 a function, give the program of the file, and train to the same bits."""
    # Its classes have weights, so the mean over labels is another.
    mean = zeroir.MicroSteps(mean_over="batches")
    from_file = zeroir.compile(
        path, stage=stage, world_size=world_size, micro_steps=mean, evaluate=False
    )
    losses, parameters = trained(from_file, rank)
    # Each stage compiles anew, so the function is left to one of them.
    functions = [Net] if stage == 3 else []
    makers: list[Callable[[], nn.Module] | nn.Module] = [make_module(), *functions]
    for model in makers:
        before = state_of(model) if isinstance(model, nn.Module) else {}
        compiled = zeroir.compile(
            model,
            example(0, 0),
            loss=loss,
            stage=stage,
            world_size=world_size,
            micro_steps=mean,
            evaluate=False,
        )
        if isinstance(model, nn.Module):
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, before[name]), name
        assert without_lines(compiled) == without_lines(from_file)
        found_losses, found = trained(compiled, rank)
        assert found_losses == losses
        for name, value in parameters.items():
            assert torch.equal(found[name], value), name


def without_lines(compiled: CompiledProgram) -> str:
    """The text of a program, but for the lines of the model."""
    segments = tuple(
        replace(segment, nodes=tuple(replace(node, source="") for node in segment.nodes))
        for segment in compiled.program.segments
    )
    return print_program(replace(compiled.program, segments=segments))


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    folder = Path(os.environ["TEST_FOLDER"])
    path = folder / f"model{rank}.py"
    path.write_text(FILE)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
    )
    for stage in (0, 3):
        require_equal_training(str(path), rank, world_size, stage)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
