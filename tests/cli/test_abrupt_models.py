"""Models that end the process, or for which there is not enough memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir, assert_refused

MODEL = """
import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {make}
        self.linear = nn.Linear({size}, {size}, bias=False)

    def forward(self, x):
        {forward}
        return self.linear(x).square().mean()


def model():
    return Net()


def batch():
    return (torch.ones(2, {size}),)


def batches(rank, world_size, seed, start_step=0):
    {batches}
    while True:
        yield batch()
"""
REMEDY = "use more ranks, a higher stage, a lower precision or a smaller batch.\n"


def write(path: Path, *, size: int = 4, **lines: str) -> Path:
    parts = dict.fromkeys(("make", "forward", "batches"), "pass") | lines
    path.write_text(MODEL.format(size=size, **parts))
    return path


@pytest.mark.parametrize("what", ["compile", "check"])
def test_a_forward_that_ends_the_process(
    zeroir: Zeroir, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = zeroir(what, write(tmp_path / "model.py", forward="sys.exit(4)"))
    assert_refused(answer, "Error: The model's forward cannot be traced at ")
    assert answer.err.endswith("model.py:15: SystemExit: 4\n")
    assert not list(tmp_path.glob("*.zir"))


def test_batches_that_end_the_process(zeroir: Zeroir, tmp_path: Path) -> None:
    assert_refused(
        zeroir("check", write(tmp_path / "model.py", batches="sys.exit()"), "--steps", "1"),
        "model.py:28",
    )


def test_a_constructor_takes_more_memory_than_there_is(zeroir: Zeroir, tmp_path: Path) -> None:
    path = write(tmp_path / "model.py", make="torch.zeros(2**50, device='cpu')[0].item()")
    answer = zeroir("compile", path, "-o", tmp_path / "model.zir")
    assert (answer.exit_code, answer.out) == (2, "")
    assert answer.err == f"Error: model() failed at {path}:11, because memory ran out: {REMEDY}"


@pytest.mark.slow
def test_parameters_take_more_memory_than_there_is(zeroir: Zeroir, tmp_path: Path) -> None:
    path, program = write(tmp_path / "model.py", size=2**23), tmp_path / "model.zir"
    assert zeroir("compile", path, "--world-size", "1", "-o", program).exit_code == 0
    answer = zeroir("run", program, "--steps", "1")
    assert answer.exit_code == 2
    assert answer.err.endswith(
        f"Error: There is not enough memory for the program's buffers: {REMEDY}"
    )
    answer = zeroir("check", path, "--world-size", "2", "--steps", "1")
    assert answer.exit_code == 2
    assert answer.err == f"Error: model() failed at {path}:12, because memory ran out: {REMEDY}"
