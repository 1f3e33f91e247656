"""The options of offloading on the command line: what compiles also trains, and resumes with others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir, assert_refused
from tests.cli.test_bad_input import LINE
from zeroir.api import load_program
from zeroir.ir.buffers import Role, Space

MODEL = """
import torch
from torch import nn


def model():
    torch.manual_seed(0)
    return Net()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).relu()
        return (x**2).mean()


def batch():
    return (torch.zeros(4, 96),)


def batches(rank, world_size, seed, start_step=0):
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    for _ in range(start_step):
        torch.randn(4, 96, generator=generator)
    while True:
        yield (torch.randn(4, 96, generator=generator),)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return "net.py"


def losses(text: str) -> list[float]:
    documents = [json.loads(line) for line in text.splitlines()]
    return [document["loss"] for document in documents if "loss" in document]


@pytest.mark.slow
def test_a_budget_that_needs_offloading(zeroir: Zeroir, model: str) -> None:
    budget = ("--world-size", "1", "--memory-budget", "600kB")
    assert_refused(zeroir("compile", model, *budget), "Z301", "--offload ")
    made = zeroir("compile", model, *budget, "--offload", "adaptive", "-o", "net.zir")
    assert made.exit_code == 0, made.err
    assert "\nOffloaded: optimizer" in made.out
    program = load_program("net.zir").program
    assert {b.space for b in program.buffers if b.role is Role.STATE} >= {Space.HOST}


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_that_offloads_continues_one_that_does_not(zeroir: Zeroir, model: str) -> None:
    assert zeroir("compile", model, "--world-size", "1", "-o", "net.zir").exit_code == 0
    steps = ("--log-every", "1", "--json", "--seed", "3")
    plain = zeroir("run", "net.zir", "--steps", "4", *steps)
    elsewhere = ("--offload", "optimizer,gradients,parameters", "--offload-units", "blocks.*")
    first = zeroir("run", "net.zir", "--steps", "1", *steps, "--save", "c", *elsewhere)
    second = zeroir("run", "net.zir", "--steps", "3", *steps, "--save", "c")
    third = zeroir("run", "net.zir", "--steps", "4", *steps, "--save", "c", *elsewhere)
    assert first.exit_code == second.exit_code == third.exit_code == 0, third.err
    found = losses(first.out) + losses(second.out) + losses(third.out)
    assert [repr(loss) for loss in found] == [repr(loss) for loss in losses(plain.out)]


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_with_other_bits_is_what_compiling_with_them_makes(
    zeroir: Zeroir, model: str
) -> None:
    assert zeroir("compile", model, "--world-size", "1", "-o", "32.zir").exit_code == 0
    eight = zeroir("compile", model, "--world-size", "1", "--optimizer-bits", "8", "-o", "8.zir")
    assert eight.exit_code == 0, eight.err
    steps = ("--log-every", "1", "--json", "--steps", "4")
    compiled = zeroir("run", "8.zir", *steps)
    traced = zeroir("run", "32.zir", *steps, "--optimizer-bits", "8")
    assert traced.exit_code == 0, traced.err
    assert losses(traced.out) == losses(compiled.out) != losses(zeroir("run", "32.zir", *steps).out)


@pytest.mark.slow
@pytest.mark.dist
def test_states_of_8_bits_on_disk_and_in_pages_are_those_of_a_device(
    zeroir: Zeroir, model: str, tmp_path: Path
) -> None:
    bits = ("--world-size", "1", "--optimizer-bits", "8", "--no-overlap-update")
    assert zeroir("compile", model, *bits, "-o", "8.zir").exit_code == 0
    (tmp_path / "nvme").mkdir()
    steps = ("--log-every", "1", "--json", "--seed", "3")
    plain = zeroir("run", "8.zir", "--steps", "4", *steps, "--save", "plain")
    on_disk = ("--offload", "optimizer,parameters", "--offload-to", "disk:nvme")
    first = zeroir("run", "8.zir", "--steps", "2", *steps, "--save", "moved", *on_disk)
    in_pages = ("--page-optimizer", "16KiB", "--page-bytes", "4KiB")
    second = zeroir("run", "8.zir", "--steps", "4", *steps, "--save", "moved", *in_pages)
    assert plain.exit_code == first.exit_code == second.exit_code == 0, first.err + second.err
    assert "on the disk" in first.err
    assert "Resumed from moved" in second.err
    found = losses(first.out) + losses(second.out)
    assert [repr(loss) for loss in found] == [repr(loss) for loss in losses(plain.out)]
    last = tuple(f"{folder}/step-00000004" for folder in ("plain", "moved"))
    assert zeroir("checkpoint", "diff", *last, "--exit-code").exit_code == 0


WRONG = {
    ("--offload", "optimiser"): "--offload is optimiser, but should be some of optimizer",
    ("--offload-to", "disk:x"): "--offload-to disk:x needs --offload",
    ("--offload", "optimizer", "--offload-units", "c.*"): "names no unit with `c.*`",
    ("--offload", "optimizer", "--page-optimizer", "1GB"): "1GB updates on the device",
}


@pytest.mark.slow
@pytest.mark.dist
def test_options_of_a_run_are_checked(zeroir: Zeroir, model: str) -> None:
    assert zeroir("compile", model, "--world-size", "1", "-o", "net.zir").exit_code == 0
    for options, words in WRONG.items():
        assert_refused(zeroir("run", "net.zir", *options), words)


def test_a_model_of_one_unit_without_states_has_nothing_to_move(
    zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(LINE)
    moved = ("--offload", "activations", "--page-optimizer", "1MiB", "--page-bytes", "64KiB")
    answer = zeroir("compile", "line.py", "--optimizer", "sgd", *moved)
    assert answer.exit_code == 0
    first, second = answer.err.splitlines()
    assert first.startswith("Warning: --page-optimizer 1MiB has no effect: the optimizer keeps no")
    assert second.startswith("Warning: --offload activations has no effect: the model is one unit")
