"""One rank whose model decides by the length of a batch: ``python -m tests.numerics.signature_workers``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from tests.runtime.support import join
from zeroir.api import CompiledProgram
from zeroir.errors import ModelWarning

VOCABULARY, LONG, MICRO_STEPS = 13, 8, 2
SIDES = (False, True, True, False, True, False)
"""Whether the batches of a step are long ones."""
Batch = tuple[Tensor, Tensor]


class Sided(nn.Module):
    """Computes something else for long batches, with the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            if tokens.shape[1] > LONG:
                hidden = hidden + block(hidden.cumsum(1)).sigmoid() * hidden
            else:
                hidden = hidden + block(hidden).tanh()
        logits = self.head(hidden).view(-1, VOCABULARY)
        return F.cross_entropy(logits, labels.view(-1), ignore_index=-100)


def batch_of(rank: int, step: int, micro_step: int) -> Batch:
    chance = torch.Generator().manual_seed(100 * step + 10 * micro_step + rank)
    length = 2 + (rank + 3 * micro_step + step) % (LONG - 1) + (LONG - 1) * SIDES[step]
    tokens = torch.randint(VOCABULARY, (2 + (rank + step) % 3, length), generator=chance)
    is_kept = torch.rand(tokens.shape, generator=chance) < 0.6
    is_kept[0, 0] = True
    return tokens, torch.where(is_kept, tokens, -100)


def counted(batch: Batch) -> Tensor:
    """Return the number of labels that the loss counts, computed apart from the program."""
    return (batch[1] != -100).sum()


def compiled_for(world_size: int, stage: int) -> CompiledProgram:
    torch.manual_seed(7)
    shapes = (Dim("rows", max=4), Dim("length", min=2, max=16))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* the sizes of the batch decide", ModelWarning)
        return zeroir.compile(
            Sided(),
            batch_of(0, 0, 0),
            shapes=(shapes, shapes),
            world_size=world_size,
            stage=stage,
            lr=0.05,
            # Others are lowered for several micro-batches when the first step has them.
            micro_steps=MICRO_STEPS if stage == 3 else 1,
        )


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    compiled = compiled_for(world_size, int(os.environ["STAGE"]))
    engine = compiled.engine()
    losses: list[float] = []
    programs: dict[int, bool] = {}
    for step in range(len(SIDES)):
        batches = [batch_of(rank, step, micro) for micro in range(MICRO_STEPS)]
        evaluated = engine.evaluate(batches[0]).loss
        if step % 2:
            losses.append(engine.step(batches).loss)
        else:
            for each in batches:
                engine.micro_step(each)
            losses.append(engine.update().loss)
        losses.append(evaluated)
        programs[id(engine.program)] = engine.program.dims[0].minimum > LONG
    assert sorted(programs.values()) == [False, True], programs
    found = {**engine.full_parameters(), f"losses{rank}": torch.tensor(losses)}
    save_file(found, Path(os.environ["TEST_FOLDER"]) / f"trained{rank}.safetensors")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
