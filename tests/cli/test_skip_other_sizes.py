"""``zeroir run --skip-other-sizes``: batches of sizes that the program does not take are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir, assert_refused
from tests.support.zygote import run_forked

MODEL = """
import torch
from torch import nn
from torch.export import Dim

ROWS = {rows}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        return self.line(x if x.shape[0] > 2 else x.tanh()).square().mean()


def model():
    return Net()


def batch():
    return torch.zeros(3, 4)


def shapes():
    return (Dim("rows", max=5), 4)


def weight(batch):
    return 1.0


def batches(rank, world_size, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in ROWS:
            x = torch.randn(6 + rows + rank, 4, generator=generator)[: rows + rank]
            if KEEPS_ALL or len(x) <= 5:
                yield x


KEEPS_ALL = {keeps_all}
"""


def losses(text: str) -> list[float]:
    documents = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [each["loss"] for each in documents if "loss" in each]


def program(zeroir: Zeroir, folder: Path, rows: list[int], *, keeps_all: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL.format(rows=rows, keeps_all=keeps_all))
    path = folder / "model.zir"
    answer = zeroir("compile", folder / "model.py", "--world-size", "1", "-o", path)
    assert answer.exit_code == 0, answer.err
    return path


@pytest.mark.slow
def test_training_goes_on_with_the_next_batch(
    zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [3, 9, 2, 7, 6, 4]
    run = ("run", program(zeroir, tmp_path / "all", rows), "--log-every", "1", "--json")
    only = program(zeroir, tmp_path / "fitting", rows, keeps_all=False)
    expected = losses(zeroir("run", only, *run[2:], "--steps", "5").out)
    refused = zeroir(*run, "--steps", "5")
    assert refused.exit_code == 2
    assert "dimension of 9" in refused.err
    answer = zeroir(*run, "--steps", "5", "--skip-other-sizes", "--save", tmp_path / "saved")
    assert answer.exit_code == 0, answer.err
    assert losses(answer.out) == expected
    assert "Rank 0 left out 4 batches of sizes" in answer.err
    # What was left out counts for the position.
    more = zeroir(*run, "--steps", "8", "--skip-other-sizes", "--save", tmp_path / "saved")
    assert losses(more.out) == losses(zeroir("run", only, *run[2:], "--steps", "8").out)[5:]


def test_batches_that_all_have_other_sizes_end_the_job(
    zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = program(zeroir, tmp_path / "large", [8])
    answer = zeroir("run", path, "--steps", "2", "--skip-other-sizes")
    assert_refused(answer, "1,000 batches in a row before step 1 have sizes")


@pytest.mark.slow
@pytest.mark.dist
def test_each_rank_leaves_out_its_own(
    zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = program(zeroir, tmp_path / "ranks", [5, 3, 9, 1])
    command = ["run", str(path), "--nproc", "2", "--steps", "4", "--skip-other-sizes"]
    answer = run_forked("zeroir", command, tmp_path)
    assert answer.returncode == 0, answer.stderr
    text = answer.stdout + answer.stderr
    assert "Rank 0 left out 1 batch " in text
    assert "Rank 1 left out 4 batches " in text
