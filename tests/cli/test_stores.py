"""``zeroir run --save s3://…`` on real processes, and the commands that read what is there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import GPT, Zeroir
from tests.support.zygote import run_forked
from zeroir.cli.app import run_command

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "gpt.zir"
    assert run_command(["compile", GPT, "--world-size", "2", "-o", str(path)]) == 0
    return path


def run(program: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_forked(
        "zeroir",
        ["run", program, "--nproc", "2", "--model", GPT, *arguments],
        folder,
        {"OMP_NUM_THREADS": "1"},
    )


def test_a_job_saves_to_a_store_and_goes_on_from_there(
    program: Path, tmp_path: Path, s3_bucket: str, zeroir: Zeroir
) -> None:
    saving = ["--save", f"{s3_bucket}/runs", "--save-every", "2", "--keep", "2", "--log-every", "1"]
    first = run(program, tmp_path, "--steps", "6", *saving)
    assert first.returncode == 0, first.stderr
    assert f"saved {s3_bucket}/runs/step-00000006" in first.stdout
    second = run(program, tmp_path, "--steps", "8", *saving)
    assert second.returncode == 0, second.stderr
    assert f"Resumed from {s3_bucket}/runs/step-00000006" in second.stdout + second.stderr
    whole = run(program, tmp_path, "--steps", "8", "--log-every", "8")
    loss = "step     8  loss "
    assert _after(loss, second.stdout) == _after(loss, whole.stdout)
    listing = zeroir("checkpoint", "ls", f"{s3_bucket}/runs")
    assert [line.split()[0] for line in listing.out.splitlines()[1:]] == [
        "step-00000008",
        "step-00000006",
    ]
    newest = f"{s3_bucket}/runs/step-00000008"
    assert zeroir("checkpoint", "verify", newest).exit_code == 0
    assert zeroir("export", newest, "-o", tmp_path / "out").exit_code == 0
    imported = zeroir(
        "import", tmp_path / "out" / "model.safetensors", "-o", f"{s3_bucket}/imported"
    )
    assert imported.exit_code == 0
    assert zeroir("checkpoint", "verify", f"{s3_bucket}/imported").exit_code == 0


def _after(label: str, text: str) -> str:
    return text.partition(label)[2].split()[0]


def test_a_store_that_refuses_is_found_before_training(
    program: Path, tmp_path: Path, s3_bucket: str
) -> None:
    done = run(program, tmp_path, "--steps", "4", "--save", f"{s3_bucket}-no-such/runs")
    assert done.returncode == 2
    assert "bucket does not exist: create the bucket, or name another one." in done.stderr
    assert "loss" not in done.stdout
