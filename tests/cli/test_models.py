"""``zeroir check``: the example and the model of traps equal eager replicas at every stage; a Llama trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import GPT, Zeroir
from tests.cli.test_run import run

FOLDER = Path(__file__).parents[1] / "support" / "models"
MODELS: dict[str, str | Path] = {
    "gpt": GPT,
    "llama": FOLDER / "llama.py",
    "traps": FOLDER / "traps.py",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stage", "precision", "optimizer"),
    [
        ("traps", 0, "fp32", "sgd"),
        ("traps", 1, "bf16", "momentum"),
        ("traps", 2, "bf16", "adam"),
        ("traps", 2, "fp16", "adamw"),
        ("traps", 3, "fp32", "adam"),
        # A CPU has no fast product in fp16, so the larger model goes without.
        ("gpt", 1, "bf16", "adamw"),
    ],
)
def test_equal_to_eager_replicas(
    zeroir: Zeroir, model: str, stage: int, precision: str, optimizer: str
) -> None:
    options = ["--stage", str(stage), "--precision", precision, "--world-size", "3"]
    options += ["--optimizer", optimizer, "--weight-decay", "0.1"]
    answer = zeroir("check", MODELS[model], *options, "--steps", "3", "--json")
    assert answer.exit_code == 0, answer.out + answer.err
    assert answer.json["tolerance"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "micro_steps"), [(1, 2), (3, 3)])
def test_accumulation_equals_eager_replicas(zeroir: Zeroir, stage: int, micro_steps: int) -> None:
    options = ["--stage", str(stage), "--micro-steps", str(micro_steps), "--precision", "bf16"]
    answer = zeroir("check", MODELS["llama"], *options, "--world-size", "3", "--json")
    assert answer.exit_code == 0, answer.out + answer.err


@pytest.mark.slow
@pytest.mark.dist
def test_trains_on_processes(zeroir: Zeroir, tmp_path: Path) -> None:
    path = tmp_path / "model.zir"
    assert zeroir("compile", MODELS["llama"], "--world-size", "2", "-o", path).exit_code == 0
    model = ("--model", MODELS["llama"])
    options = ("--nproc", "2", "--steps", "3", "--log-every", "1", *model)
    lines = succeed("run", "model.zir", *options, cwd=tmp_path)
    losses = [float(line.split("loss")[1].split()[0]) for line in lines]
    assert len(losses) == 3
    # It repeats its one example batch, so the loss falls.
    assert losses[-1] < losses[0]


def succeed(*arguments: str | Path, cwd: Path) -> list[str]:
    made = run(*arguments, cwd=cwd)
    assert made.returncode == 0, made.stderr
    return made.stdout.splitlines()
