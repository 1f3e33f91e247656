"""Log records: those of the user's libraries in a run, and zeroir's own in a script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import zeroir
from tests.cli.conftest import Zeroir
from tests.support.zygote import run_forked

MODEL = """
import logging

import torch
from torch import nn

log = logging.getLogger("nets")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x).mean()

def model():
    log.info("a layer")
    return Net()

def batch():
    log.debug("ones")
    return (torch.ones(1, 2),)
"""


@pytest.mark.slow
def test_a_run_shows_the_records_that_it_is_asked_for(zeroir: Zeroir, tmp_path: Path) -> None:
    model, program = tmp_path / "net.py", tmp_path / "net.zir"
    model.write_text(MODEL)
    assert zeroir("compile", model, "--world-size", "1", "-o", program).exit_code == 0
    arguments = ["run", str(program), "--steps", "1", "--model", str(model)]
    made = run_forked("zeroir", [*arguments, "--log-level", "info"], tmp_path)
    assert made.returncode == 0, made.stderr
    # The model is built with its values, and once without them for the file's functions to change.
    of_model = [line for line in made.stderr.splitlines() if " nets: " in line]
    assert of_model == ["rank 0 INFO nets: a layer"] * 2


def test_a_script_gets_zeroirs_notes_as_records(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.layer(x).mean())

    batch = (torch.ones(1, 2),)
    engine = zeroir.compile(Net(), batch, world_size=1).engine(self_check=False)
    with caplog.at_level("INFO", logger="zeroir"):
        engine.step([batch, batch])
    (note,) = [record for record in caplog.records if record.name == "zeroir"]
    assert "lowered again for steps of any number" in note.getMessage()
    assert capfd.readouterr() == ("", "")
