"""``zeroir run`` follows the code of the model file: sizes by which it decides, and what its functions change."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor

from tests.cli.conftest import Zeroir
from tests.support.zygote import run_forked
from zeroir import artifact
from zeroir.api.compiling import load_program
from zeroir.frontend.source.entry import load_model_file
from zeroir.torch_ops.globals import torch_globals_kept

MODEL = """
import torch
from torch import nn
from torch.export import Dim

BETA = 0.0
NET = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.tau = 1.0

    def forward(self, x):
        if x.shape[0] > 5:
            x = x.tanh()
        return (self.line(x).square().mean() + BETA) / self.tau


def model():
    global NET
    NET = Net()
    return NET


def batch():
    return torch.zeros(3, 4)


def shapes():
    return (Dim("rows", max=8), 4)


def weight(batch):
    return 1.0


def batches(rank, world_size, seed):
    global BETA
    for step in range(1000):
        BETA = 0.25 * step
        NET.tau = 1.0 + step
        rows = (3, 7, 5, 8)[(step + rank) % 4]
        yield torch.randn(rows, 4, generator=torch.Generator().manual_seed(7 * step + rank))
"""
STEPS = 6


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    before = Path.cwd()
    os.chdir(tmp_path)
    yield path
    os.chdir(before)


def eager_losses(model: Path, world_size: int) -> list[float]:
    """Train in plain PyTorch, and return the mean losses over all ranks."""
    source = load_model_file(str(model))
    assert source.batches is not None
    with torch_globals_kept():
        torch.manual_seed(0)
        net = source.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses: list[float] = []
    data = [iter(source.batches(rank, world_size, 0)) for rank in range(world_size)]
    for _ in range(STEPS):
        of_ranks: list[Tensor] = [
            net(batch) if source.loss is None else cast("Tensor", source.loss(net, batch))
            for batch in map(next, data)
        ]
        optimizer.zero_grad()
        torch.autograd.backward(torch.stack(of_ranks).sum() / world_size)
        optimizer.step()
        losses.append(sum(loss.item() for loss in of_ranks) / world_size)
    return losses


def printed_losses(out: str) -> list[float]:
    return [json.loads(line)["loss"] for line in out.splitlines()]


SGD = ("--optimizer", "sgd", "--lr", "0.1")
RUN = ("run", "model.zir", "--steps", str(STEPS), "--log-every", "1", "--json")


@pytest.mark.slow
def test_sizes_and_numbers_of_the_model_file_count(zeroir: Zeroir, model: Path) -> None:
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    answer = zeroir(*RUN)
    assert answer.exit_code == 0, answer.err
    assert printed_losses(answer.out) == eager_losses(model, 1)
    assert answer.err.count("was compiled in") == 1, answer.err
    assert answer.err.count("compiled again") == 1, answer.err
    assert "tau, which model.py:19 reads, is 2.0 now" in answer.err
    assert "_zeroir_model" not in answer.err


@pytest.mark.slow
def test_a_size_of_the_other_side_compiles_once_though_nothing_else_changed(
    zeroir: Zeroir, model: Path
) -> None:
    text = MODEL.replace("BETA = 0.25 * step", "BETA = 0.0").replace("1.0 + step", "1.0")
    model.write_text(text)
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    answer = zeroir(*RUN)
    assert answer.exit_code == 0, answer.err
    assert printed_losses(answer.out) == eager_losses(model, 1)
    (line,) = answer.err.splitlines()
    assert line.startswith(
        "The model in model.py lets the sizes of the batch decide, and the program is right only where rows <= 5: a "
        "program for batches such as rows 7 was compiled in "
    )


@pytest.mark.slow
def test_of_another_file_nothing_is_compiled(zeroir: Zeroir, model: Path) -> None:
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    model.write_text(MODEL + "\n# changed\n")
    answer = zeroir(*RUN, "--allow-model-change")
    assert answer.exit_code == 2
    assert "tau, which model.py:19 reads, is 2.0 now, but was 1.0" in answer.err
    model.write_text(MODEL.replace("NET.tau = 1.0 + step", "").replace("BETA = 0.25 * step", ""))
    answer = zeroir(*RUN, "--allow-model-change")
    assert answer.exit_code == 2
    assert "rows from 1 to 5" in answer.err


def test_with_another_version_of_torch_nothing_is_compiled(zeroir: Zeroir, model: Path) -> None:
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    program = model.with_suffix(".zir")
    artifact.save(replace(artifact.load(program), torch_version="2.11.0"), program)
    answer = zeroir(*RUN)
    assert answer.exit_code == 2
    assert "tau, which model.py:19 reads, is 2.0 now, but was 1.0" in answer.err


@pytest.mark.slow
def test_modules_that_the_file_imports_while_it_runs_are_followed(
    zeroir: Zeroir, model: Path
) -> None:
    """Also where they are imported already."""
    model.with_name("scale_of_living_run.py").write_text("FACTOR = 1.0\n")
    text = MODEL.replace("BETA = 0.0\n", "SCALE = import_module('scale_of_living_run')\n", 1)
    text = text.replace("import torch\n", "import torch\nfrom importlib import import_module\n", 1)
    text = text.replace("BETA = 0.25 * step", "SCALE.FACTOR = 0.25 * step")
    model.write_text(text.replace("+ BETA", "+ SCALE.FACTOR").replace("global BETA", "pass"))
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    answer = zeroir(*RUN)
    assert answer.exit_code == 0, answer.err
    assert printed_losses(answer.out) == eager_losses(model, 1)


@pytest.mark.slow
def test_a_model_that_refuses_the_meta_device_is_followed(zeroir: Zeroir, model: Path) -> None:
    """As ``from_pretrained`` does; its parameters have no values on the way."""
    check = "    if torch.get_default_device().type == 'meta':\n        raise RuntimeError('no')\n"
    model.write_text(MODEL.replace("    global NET\n", f"    global NET\n{check}"))
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    answer = zeroir(*RUN)
    assert answer.exit_code == 0, answer.err
    assert printed_losses(answer.out) == eager_losses(model, 1)


@pytest.mark.slow
def test_a_model_that_reads_its_first_values_is_not_followed(zeroir: Zeroir, model: Path) -> None:
    read = "    NET = Net()\n    assert abs(NET.line.weight.sum().item()) < 100\n"
    model.write_text(MODEL.replace("    NET = Net()\n", read))
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    answer = zeroir(*RUN)
    assert answer.exit_code == 2
    assert "The model in model.py cannot be built without values: what functions" in answer.err
    assert "rows from 1 to 5" in answer.err


@pytest.mark.slow
def test_a_teacher_and_frozen_layers_of_the_file_count(zeroir: Zeroir, model: Path) -> None:
    """The file makes one module, however often it is asked."""
    text = MODEL.replace("    NET = Net()\n", "    NET = NET or Net()\n")
    text = text.replace("        BETA = 0.25 * step\n", "        TEACHER.weight.mul_(1.5)\n")
    text = text.replace("1.0 + step", "1.0\n        NET.line.requires_grad_(step not in (2, 3))")
    text = text.replace("self.line = ", "self.first = nn.Linear(4, 4)\n        self.line = ")
    text = text.replace("self.line(x)", "self.line(self.first(x))")
    text += """

TEACHER = nn.Linear(4, 4).requires_grad_(False)
nn.init.constant_(TEACHER.weight, 0.1)


def loss(module, x):
    return module(x) + TEACHER(x).square().mean() * module.first.weight.mean()
"""
    model.write_text(text)
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    answer = zeroir(*RUN)
    assert answer.exit_code == 0, answer.err
    assert printed_losses(answer.out) == eager_losses(model, 1)
    assert "TEACHER.weight has other values now" in answer.err
    assert "line.weight and 1 more parameters: trained" in answer.err


@pytest.mark.slow
def test_an_engine_of_a_file_follows_it_too(zeroir: Zeroir, model: Path) -> None:
    model.write_text(MODEL.replace("1.0 + step", "1.0").replace("0.25 * step", "0.0"))
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    engine = load_program(model.with_suffix(".zir")).engine(self_check=False)
    source = load_model_file(str(model))
    assert source.batches is not None
    batches = iter(source.batches(0, 1, 0))
    with torch_globals_kept():
        source.model()  # which the file's batches() changes
    losses = [engine.step(next(batches)).loss for _ in range(STEPS)]
    engine.close()
    assert losses == eager_losses(model, 1)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_compile_together(zeroir: Zeroir, model: Path) -> None:
    assert zeroir("compile", model.name, *SGD, "--world-size", "3", "--stage", "3").exit_code == 0
    made = run_forked("zeroir", [*RUN, "--nproc", "3"], model.parent, {"OMP_NUM_THREADS": "1"})
    assert made.returncode == 0, made.stderr
    assert printed_losses(made.stdout) == pytest.approx(eager_losses(model, 3), rel=1e-6)
    # At the first step the ranks have batches of both sides already.
    assert made.stderr.count("was compiled in") == 2, made.stderr
    assert made.stderr.count("compiled again") == 1, made.stderr


@pytest.mark.slow
def test_values_of_the_environment_at_the_import_of_the_file_count(
    zeroir: Zeroir, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MODEL.replace("import torch\n", "import os\nimport torch\n", 1)
    text = text.replace("BETA = 0.0", 'GAIN = float(os.environ.get("GAIN", "1"))\nBETA = 0.0')
    text = text.replace("1.0 + step", "1.0").replace("0.25 * step", "0.0")
    model.write_text(text.replace("+ BETA", "* GAIN"))
    assert zeroir("compile", model.name, *SGD, "--world-size", "1").exit_code == 0
    monkeypatch.setenv("GAIN", "3")
    answer = zeroir(*RUN)
    assert printed_losses(answer.out) == eager_losses(model, 1)
    assert "GAIN, which model.py:21 reads, is 3.0 now, but was 1.0" in answer.err


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_is_read_at_the_import_of_the_file_counts(zeroir: Zeroir, model: Path) -> None:
    """Rank 0 read what the program was compiled from, and rank 1 another value, which its data changes back."""
    text = MODEL.replace("import torch\n", "import os\nimport torch\n", 1)
    model.write_text(text.replace("BETA = 0.0", 'BETA = float(os.environ.get("RANK", "0"))'))
    assert zeroir("compile", model.name, *SGD, "--world-size", "2").exit_code == 0
    made = run_forked("zeroir", [*RUN, "--nproc", "2"], model.parent, {"OMP_NUM_THREADS": "1"})
    assert made.returncode == 0, made.stderr
    assert "BETA, which model.py:20 reads" in made.stderr
    assert printed_losses(made.stdout) == pytest.approx(eager_losses(model, 2), rel=1e-6)


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_whose_code_alone_changes_is_refused(zeroir: Zeroir, model: Path) -> None:
    model.write_text(MODEL.replace("1.0 + step", "2.0 if step > 2 and rank == 1 else 1.0"))
    assert zeroir("compile", model.name, *SGD, "--world-size", "3").exit_code == 0
    made = run_forked("zeroir", [*RUN, "--nproc", "3"], model.parent, {"OMP_NUM_THREADS": "1"})
    assert made.returncode == 2, made.stderr
    assert (
        "rank 1 began to compile again in step 4 (tau, which model.py:19 reads, is 2.0 now"
        in made.stderr
    )
    assert "Traceback" not in made.stderr
