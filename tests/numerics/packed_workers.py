"""One rank that trains a Llama on packed documents, its own: ``python -m tests.numerics.packed_workers``."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import zeroir
from tests.runtime.support import join
from tests.support.models import packed_llama

STEPS, RANKS, LR = 3, 3, 0.5


def module() -> nn.Module:
    torch.manual_seed(7)
    return packed_llama.model()


def main() -> None:
    rank = int(os.environ["RANK"])
    join()
    compiled = zeroir.compile(
        module(),
        packed_llama.batch(),
        shapes=packed_llama.shapes(),
        world_size=RANKS,
        stage=3,
        optimizer="sgd",
        lr=LR,
        evaluate=False,
    )
    engine = compiled.engine()
    losses = [
        engine.step(batch).mean_loss
        for batch in islice(packed_llama.batches(rank, RANKS, seed=1), STEPS)
    ]
    found = engine.full_parameters()
    if rank == 0:
        trained = Path(os.environ["TEST_FOLDER"]) / "trained.safetensors"
        save_file({**found, "losses": torch.tensor(losses)}, trained)
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
