"""A model whose training draws random numbers wherever it may, and what is left of a run of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from zeroir.checkpoint.manifest import Manifest
from zeroir.checkpoint.reading import read_manifest

MODEL = """
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import zeroir

WORKERS = 2
DELAY_S = 0.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)
        )

    def forward(self, x, y):
        return F.cross_entropy(self.layers(x), y)


class Samples:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(DELAY_S)
        noise = random.random() + np.random.rand()
        return torch.full((8,), index / 50) + noise * torch.randn(8), torch.tensor(index % 4)


def model():
    return Net()


def batch():
    return torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)


def batches(rank, world_size, seed, start_step=0):
    return zeroir.ResumableLoader(
        Samples(), batch_size=4, rank=rank, world_size=world_size, seed=seed, num_workers=WORKERS
    )


def eval_batches(rank, world_size, seed):
    # From the global generator, whose state a checkpoint keeps.
    yield torch.randn(4, 8), torch.randint(4, (4,))
"""

GENERATOR = """

def batches(rank, world_size, seed):
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    while True:
        yield torch.randn(4, 8, generator=generator), torch.randint(4, (4,), generator=generator)
"""
"""Follows ``MODEL`` to replace its loader by a function without ``start_step``."""

SCHEDULE = "cosine{warmup=2,total=12}"


def losses(text: str) -> dict[int, float]:
    """The losses that ``zeroir run --json`` printed, by step."""
    return {int(line["step"]): line["loss"] for line in reports(text) if "loss" in line}


def reports(text: str) -> list[Mapping[str, float]]:
    """The JSON objects that a command printed."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def saved_paths(folder: Path) -> list[str]:
    """The names of the checkpoints in a folder."""
    return sorted(path.name for path in folder.glob("step-*"))


def contents(checkpoint: Path) -> dict[str, object]:
    """Everything in a checkpoint that training goes on from, bit by bit: tensors are represented by their checksums."""
    manifest = read_manifest(str(checkpoint))
    return {
        "step": manifest.step,
        "tensors": _tensors(manifest),
        "scalars": manifest.scalars,
        "groups": manifest.groups,
        "shared": manifest.shared,
        "ranks": [rank.state for rank in manifest.ranks],
    }


def _tensors(manifest: Manifest) -> dict[tuple[str, str], str]:
    return {(f.name, t.name): t.checksum for f in manifest.files for t in f.tensors}
