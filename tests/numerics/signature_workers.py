"""One rank whose model decides by the length of a batch: ``python -m tests.numerics.signature_workers``."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim

import zeroir
from tests.runtime.support import join
from zeroir.api import CompiledProgram
from zeroir.errors import ModelWarning, UserError, ZeroirError
from zeroir.runtime.engine.engine import Engine

VOCABULARY, LONG, MICRO_STEPS = 13, 8, 2
ONE_SIDED = (False, True, True, False, True, False)
"""Whether the batches of a step are long ones, in the first steps."""
STEPS = len(ONE_SIDED) + 4
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


def is_long(rank: int, step: int, micro_step: int) -> bool:
    """Whether a batch is a long one: all of a step, then those of a micro-step, then those of some ranks."""
    if step < len(ONE_SIDED):
        return ONE_SIDED[step]
    return bool((micro_step if step == len(ONE_SIDED) else rank + step * micro_step) % 2)


def batch_of(rank: int, step: int, micro_step: int) -> Batch:
    chance = torch.Generator().manual_seed(100 * step + 10 * micro_step + rank)
    length = (
        2
        + (rank + 3 * micro_step + step) % (LONG - 1)
        + (LONG - 1) * is_long(rank, step, micro_step)
    )
    tokens = torch.randint(VOCABULARY, (2 + (rank + step) % 3, length), generator=chance)
    is_kept = torch.rand(tokens.shape, generator=chance) < 0.6
    is_kept[0, 0] = True
    return tokens, torch.where(is_kept, tokens, -100)


def counted(batch: Batch) -> Tensor:
    """Return the number of labels that the loss counts, computed apart from the program."""
    return (batch[1] != -100).sum()


def compiled_for(world_size: int, options: Mapping[str, object]) -> CompiledProgram:
    torch.manual_seed(7)
    shapes = (Dim("rows", max=4), Dim("length", min=2, max=16))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* the sizes of the batch decide", ModelWarning)
        return zeroir.compile(
            Sided(),
            batch_of(0, 0, 0),
            shapes=(shapes, shapes),
            world_size=world_size,
            lr=0.05,
            # Others are lowered for several micro-batches when the first step has them.
            micro_steps=MICRO_STEPS if options["stage"] == 3 else 1,
            **options,  # type: ignore[arg-type]
        )


class Crossed(nn.Module):
    """Calls its layers in another order for long batches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(self.b(x).tanh()) if x.shape[0] > LONG else self.b(self.a(x))
        return y.square().mean()


def refuse_crossed(rank: int, world_size: int) -> None:
    """Check that ranks do not run programs at the same time that communicate in different orders."""
    torch.manual_seed(7)
    shapes = (Dim("rows", max=2 * LONG), 4)
    compiled = zeroir.compile(
        Crossed(),
        torch.zeros(3, 4),
        shapes=shapes,
        units="a,b",
        stage=3,
        world_size=world_size,
        evaluate=False,
    )
    engine = compiled.engine()
    losses: list[float] = []
    for rows in (3, LONG + 1, 5):
        losses.append(engine.step(torch.ones(rows, 4)).loss)
        with pytest.raises(UserError, match=r"signature_workers\.py:\d+ .* in different orders"):
            engine.step(torch.ones(LONG + rank, 4))
    # Each micro-step is of one side.
    losses.append(engine.step([torch.ones(2, 4), torch.ones(LONG + 2, 4)]).loss)
    assert losses[0] > losses[2], losses
    assert losses[1] > losses[3], losses
    engine.close()


class Annealed(nn.Module):
    """Has a number that only the code for long batches compares, and a text that all of it does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.kind = 1.0, "plain"

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x * self.scale))
        if x.shape[0] > LONG:
            y = y.tanh() if self.scale > 1.2 else y.sigmoid()
        loss: Tensor = (y if self.kind == "plain" else y.cos()).square().mean()
        return loss


def annealed_engine(world_size: int) -> tuple[Annealed, Engine]:
    """A module, and an engine that trains it on any number of rows."""
    torch.manual_seed(7)
    module = Annealed()
    compiled = zeroir.compile(
        module,
        torch.zeros(3, 4),
        shapes=(Dim("rows", max=2 * LONG), 4),
        stage=3,
        world_size=world_size,
        evaluate=False,
    )
    return module, compiled.engine()


def anneal(rank: int, world_size: int) -> None:
    """Change what the code reads while the ranks run different programs, and compare losses with the module's."""
    module, engine = annealed_engine(world_size)
    for scale, kind, rows in (
        *((1.0, "plain", (3, 3)), (0.9, "plain", (3, 9)), (0.8, "plain", (9, 3))),
        *((1.3, "plain", (9, 3)), (1.4, "plain", (3, 16)), (0.7, "plain", (2, 4))),
        *((0.6, "other", (2, 9)), (1.5, "other", (9, 2)), (0.5, "plain", (12, 2))),
    ):
        module.scale, module.kind = scale, kind
        x = torch.randn(rows[rank], 4)
        with torch.no_grad(), engine.gathered() as lent:
            assert isinstance(lent, Annealed)
            lent.scale, lent.kind = scale, kind
            expected = lent(x).item()
        assert engine.step(x).loss == expected, (scale, kind, rows)
    engine.close()


def mix(rank: int, world_size: int) -> None:
    """Let the first step of several batches be of one side at first, and then of both."""
    torch.manual_seed(7)
    module = Annealed()
    engine = zeroir.compile(
        module,
        torch.zeros(3, 4),
        micro_steps=zeroir.MicroSteps(mean_over="batches"),
        shapes=(Dim("rows", max=2 * LONG), 4),
        stage=3,
        world_size=world_size,
        evaluate=False,
    ).engine()
    for _ in range(2):
        batches = [torch.randn(3, 4), torch.randn(3 + LONG * rank, 4)]
        with torch.no_grad(), engine.gathered() as lent:
            losses = torch.stack([lent(batch) for batch in batches])
        assert engine.step(batches).loss == float(losses.sum() / 2)
    engine.close()


def refuse_other_numbers(rank: int, world_size: int) -> None:
    """Check that all ranks say so where a number, with which one program computes, differs between them."""
    module, engine = annealed_engine(world_size)
    for scale, rows in ((1.0, 3), (0.9, 3), (0.8, LONG + 1)):
        module.scale = scale
        engine.step(torch.randn(rows, 4))
    module.scale = 1.0 + 0.5 * rank
    with pytest.raises(ZeroirError, match="Rank 1 has another program than rank 0"):
        engine.step(torch.randn(LONG + 1, 4))
    engine.close()


def main() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    join()
    others = {
        "crossed": refuse_crossed,
        "annealed": anneal,
        "mixed": mix,
        "numbers": refuse_other_numbers,
    }
    other = next((others[each] for each in sys.argv if each in others), None)
    if other is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* the sizes of the batch decide", ModelWarning)
            other(rank, world_size)
        dist.destroy_process_group()
        return
    compiled = compiled_for(world_size, json.loads(os.environ["OPTIONS"]))
    engine = compiled.engine()
    losses: list[float] = []
    programs: dict[int, bool] = {}
    for step in range(STEPS):
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
        if step == STEPS - 2:  # where the ranks run different programs
            path = Path(os.environ["TEST_FOLDER"]) / "checkpoint"
            engine.save(path)
            engine.load(path)
    # Where the first step has several micro-batches, its program is lowered again after the evaluation before it.
    assert set(programs.values()) == {False, True}
    assert len(programs) <= 3, programs
    found = {**engine.full_parameters(), f"losses{rank}": torch.tensor(losses)}
    save_file(found, Path(os.environ["TEST_FOLDER"]) / f"trained{rank}.safetensors")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
