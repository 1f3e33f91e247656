"""``zeroir run --save`` and ``--resume``: a run in parts is the whole run, bit for bit; one sentence says why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Zeroir
from tests.support.checkpoint_files import signed_manifest
from tests.support.resuming import (
    GENERATOR,
    MODEL,
    SCHEDULE,
    contents,
    losses,
    reports,
    saved_paths,
)
from tests.support.zygote import run_forked
from zeroir.api import load_program
from zeroir.cli.app import run_command


def compiled(folder: Path, source: str = MODEL, schedule: str = SCHEDULE) -> Path:
    (folder / "model.py").write_text(source)
    path = folder / "model.zir"
    options = ["--world-size", "2", "--lr", "0.05", "--schedule", schedule]
    assert run_command(["compile", str(folder / "model.py"), *options, "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # In one process, workers would cost more than they show.
    return compiled(tmp_path_factory.mktemp("resume"), MODEL.replace("WORKERS = 2", "WORKERS = 0"))


@pytest.fixture(scope="module")
def saved(program: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 2, 4 and 5 of a run on one rank."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    arguments = ["run", str(program), "--model", str(program.with_suffix(".py")), "--steps", "5"]
    assert run_command([*arguments, "--save", str(folder), "--save-every", "2"]) == 0
    return folder


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """A copy of these checkpoints."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


def run(zeroir: Zeroir, program: Path, *arguments: str | Path) -> tuple[int, str, str]:
    model = ("--model", program.with_suffix(".py"), "--log-every", "1", "--json")
    answer = zeroir("run", program, *model, *arguments)
    return answer.exit_code, answer.out, answer.err


@pytest.mark.slow
@pytest.mark.dist
def test_three_resumes_within_an_epoch_are_the_whole_run(tmp_path: Path) -> None:
    """Losses, and every bit that training goes on from; with workers, on two ranks that shard everything."""
    program = compiled(tmp_path)

    def train(steps: int, folder: str) -> dict[int, float]:
        given = ("run", program, "--nproc", "2", "--steps", str(steps), "--log-every", "1")
        more = ("--model", "model.py", "--json", "--save", folder, "--eval-every", "2")
        made = run_forked("zeroir", (*given, *more), tmp_path, {"OMP_NUM_THREADS": "1"})
        assert made.returncode == 0, made.stderr
        return losses(made.stdout)

    whole = train(9, "whole")
    parts: dict[int, float] = {}
    for steps in (2, 4, 6, 9):
        part = train(steps, "parts")
        assert not part.keys() & parts.keys()
        parts |= part
    assert parts == whole
    assert list(parts) == list(range(1, 10))
    assert contents(tmp_path / "parts/step-00000009") == contents(tmp_path / "whole/step-00000009")
    # A run of one rank goes on from two, in the same order of samples.
    given = ("run", program, "--steps", "7", "--resume", "parts/step-00000004", "--json")
    alone = run_forked("zeroir", (*given, "--model", "model.py"), tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert "Resumed from parts/step-00000004, saved by 2 ranks after 4 of 7 steps." in alone.stderr


def test_it_goes_on_from_the_newest(zeroir: Zeroir, program: Path, own: Path) -> None:
    code, out, err = run(zeroir, program, "--steps", "7", "--save", own)
    assert (code, list(losses(out))) == (0, [6, 7])
    assert f"Resumed from {own}/step-00000005, saved by 1 rank after 5 of 7 steps." in err
    assert saved_paths(own)[-1] == "step-00000007"
    code, out, err = run(zeroir, program, "--steps", "7", "--save", own)
    assert (code, out) == (0, "")
    assert "There is no step left: ask for more --steps." in err


@pytest.mark.slow
def test_a_checkpoint_of_a_script(
    zeroir: Zeroir, program: Path, saved: Path, tmp_path: Path
) -> None:
    """It has values, but no position in the data, unless it was saved within a step, which only the script can end."""
    engine = load_program(program).engine(model=program.with_suffix(".py"), self_check=False)
    engine.load(saved / "step-00000002")
    batch = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    engine.step(batch)
    engine.save(tmp_path / "between")
    engine.step([batch, batch])
    engine.micro_step(batch, is_last=False)
    engine.save(tmp_path / "within")
    engine.close()
    code, out, err = run(zeroir, program, "--steps", "4", "--resume", tmp_path / "between")
    assert (code, list(losses(out))) == (0, [4])
    assert "It has no position in the data, which begins anew." in err
    within = ("--resume", tmp_path / "within", "--micro-steps", "2")
    code, out, err = run(zeroir, program, "--steps", "5", *within)
    assert (code, out) == (2, "")
    assert "was saved within a step (micro-steps taken: 1)" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["", "step-00000002"])
def test_it_goes_on_from_a_path(
    zeroir: Zeroir, program: Path, saved: Path, tmp_path: Path, resume: str
) -> None:
    """A folder of checkpoints stands for the newest of them; nothing is saved without ``--save``."""
    code, out, _ = run(zeroir, program, "--steps", "6", "--resume", saved / resume)
    assert code == 0
    assert list(losses(out)) == [6] if not resume else [3, 4, 5, 6]
    assert saved_paths(saved) == ["step-00000002", "step-00000004", "step-00000005"]
    code, whole, _ = run(zeroir, program, "--steps", "6", "--save", tmp_path / "new")
    assert losses(out).items() <= losses(whole).items()


@pytest.mark.slow
def test_going_back_needs_a_folder_of_its_own(
    zeroir: Zeroir, program: Path, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later resume would find what is left behind; a restart of the same job goes on from its own."""
    back = ("--steps", "6", "--save", own, "--resume", own / "step-00000002")
    code, out, err = run(zeroir, program, *back)
    assert (code, out) == (2, "")
    assert f"would leave behind, the newest '{own}/step-00000005'" in " ".join(err.split())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    code, out, err = run(zeroir, program, *back)
    assert (code, list(losses(out))) == (0, [6])
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    newest = ("--steps", "7", "--save", own, "--resume", own / "step-00000006")
    code, out, err = run(zeroir, program, *newest)
    assert (code, list(losses(out))) == (0, [7])


def damage(folder: Path, step: int) -> None:
    file = folder / f"step-{step:08}" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)


def test_a_damaged_checkpoint_is_refused_for_the_one_before(
    zeroir: Zeroir, program: Path, own: Path
) -> None:
    damage(own, 5)
    (own / "step-00000004/rank-00000.safetensors").unlink()
    code, out, err = run(zeroir, program, "--steps", "6", "--save", own)
    assert (code, list(losses(out))) == (0, [3, 4, 5, 6])
    assert f"of '{own}/step-00000005/rank-00000.safetensors' is not what was saved" in err
    assert f"'{own}/step-00000004/rank-00000.safetensors' is not what was saved" in err
    assert f"Resumed from {own}/step-00000002" in err
    # The damaged one stays for whoever wants to look at it, and the new one has another name.
    assert "step-00000005" in saved_paths(own)


def test_a_checkpoint_that_was_refused_is_not_kept_for_a_whole_one(
    zeroir: Zeroir, program: Path, own: Path
) -> None:
    damage(own, 5)
    code, _, err = run(zeroir, program, "--steps", "5", "--save", own, "--keep", "2")
    assert code == 0
    assert saved_paths(own) == [f"step-0000000{name}" for name in ("4", "5", "5-2")]
    assert err.count("It does not count among those of --keep.") == 1


def test_no_whole_checkpoint_is_no_reason_to_begin_anew(
    zeroir: Zeroir, program: Path, own: Path
) -> None:
    for step in (2, 4, 5):
        damage(own, step)
    code, out, err = run(zeroir, program, "--steps", "6", "--save", own)
    assert (code, out) == (2, "")
    assert "None of the 3 checkpoints beside" in err


@pytest.mark.slow
@pytest.mark.dist
def test_damage_that_another_rank_found(tmp_path: Path) -> None:
    """Each rank reads a share of the files, so that rank 0 may hear of the damage alone."""
    program = compiled(tmp_path, MODEL.replace("WORKERS = 2", "WORKERS = 0"))

    def train(steps: str) -> tuple[dict[int, float], str]:
        given = ("run", program, "--nproc", "2", "--steps", steps, "--log-every", "1", "--json")
        more = ("--model", "model.py", "--save", "saved", "--save-every", "1")
        made = run_forked("zeroir", (*given, *more), tmp_path, {"OMP_NUM_THREADS": "1"})
        assert made.returncode == 0, made.stderr
        return losses(made.stdout), made.stderr

    train("3")
    file = tmp_path / "saved/step-00000003/rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    part, err = train("4")
    assert list(part) == [3, 4]
    assert "Rank 1 could not load its part of the checkpoint: Tensor " in err
    assert "saved/step-00000003/rank-00001.safetensors' is not what was saved" in err
    assert err.count("is not what was saved") == 1


@pytest.mark.slow
def test_retention(zeroir: Zeroir, program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    saving = ("--save", folder, "--save-every", "1", "--keep", "2", "--keep-best", "eval_loss")
    code, out, err = run(zeroir, program, "--steps", "6", "--eval-every", "1", *saving)
    assert code == 0, err
    evaluated = {line["step"]: line["eval_loss"] for line in reports(out) if "eval_loss" in line}
    best = min(evaluated, key=lambda step: evaluated[step])
    assert saved_paths(folder) == [f"step-{step:08}" for step in sorted({best, 5, 6})]


@pytest.mark.slow
def test_a_generator_is_made_again_and_skipped(zeroir: Zeroir, tmp_path: Path) -> None:
    program = compiled(tmp_path, MODEL + GENERATOR)
    _, whole, _ = run(zeroir, program, "--steps", "5")
    folder = tmp_path / "saved"
    _, out, _ = run(zeroir, program, "--steps", "3", "--save", folder)
    code, more, err = run(zeroir, program, "--steps", "5", "--save", folder)
    assert code == 0
    assert losses(out) | losses(more) == losses(whole)
    assert "batches() takes no start_step, so the 3 batches that it had given were made" in err


@pytest.mark.slow
def test_a_schedule_for_another_number_of_steps(zeroir: Zeroir, tmp_path: Path) -> None:
    program = compiled(tmp_path, MODEL.replace("WORKERS = 2", "WORKERS = 0"), "linear")
    folder = tmp_path / "saved"
    _, out, _ = run(zeroir, program, "--steps", "2", "--save", folder)
    code, more, err = run(zeroir, program, "--steps", "4", "--save", folder)
    assert code == 0
    lrs = [line["lr"] for line in reports(out + more) if "lr" in line]
    assert lrs == pytest.approx([0.05, 0.025, 0.025, 0.0125])
    assert "The schedule was for 2 steps, and is for 4 from now on." in err


BEST = ("--save", "x", "--keep", "1", "--keep-best", "eval_loss")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--save-every", "2"), "--save-every has an effect only with --save"),
        (("--keep", "2"), "--keep has an effect only with --save"),
        (("--save", "x", "--keep-best", "loss"), "--keep-best has an effect only with --keep"),
        (
            ("--save", "x", "--keep", "1", "--keep-best", "accuracy"),
            "--keep-best is accuracy, but should be 'loss' or 'eval_loss'",
        ),
        (BEST, "add --eval-every"),
        (
            (*BEST, "--save-every", "3", "--eval-every", "2"),
            "make --save-every (3) a multiple of --eval-every (2)",
        ),
        (("--resume", "missing"), "'missing' is not a checkpoint"),
        (("--save", "/dev/null/x"), "'/dev/null' cannot be written"),
        (("--save", "x" * 300), "xxx' cannot be written: the name is too long"),
        (("--save", "x" * 300 + "/x"), "xxx/x' cannot be written: the name is too long"),
        (("--resume", "x" * 300), "xxx' cannot be read: File name too long"),
        (("--machine", "moon"), "There is no machine 'moon': choose"),
        (("--tensorboard", "/dev/null"), "'/dev/null' cannot be a folder for TensorBoard"),
        (("--log", "/missing/log.jsonl"), "Name a file in a folder that you may write to."),
    ],
)
def test_options_that_contradict_each_other(
    zeroir: Zeroir, program: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    code, out, err = run(zeroir, program, "--steps", "2", *arguments)
    assert (code, out) == (2, "")
    assert sentence in " ".join(err.split())


def test_a_state_that_no_run_has_saved_is_refused(zeroir: Zeroir, program: Path, own: Path) -> None:
    path = own / "step-00000005" / "manifest.json"
    manifest = json.loads(path.read_bytes())["manifest"]
    del manifest["ranks"][0]["state"]["random"]
    path.write_bytes(signed_manifest(manifest))
    code, out, err = run(zeroir, program, "--steps", "6", "--resume", own / "step-00000005")
    assert (code, out) == (2, "")
    assert "The states of random generators cannot be set here" in err


def test_two_runs_do_not_share_a_folder(zeroir: Zeroir, program: Path, own: Path) -> None:
    code, out, err = run(zeroir, program, "--steps", "6", "--save", own, "--resume", "none")
    assert (code, out) == (2, "")
    assert "has checkpoints of an earlier run" in err


def test_another_seed_is_refused(zeroir: Zeroir, program: Path, own: Path) -> None:
    code, out, err = run(zeroir, program, "--steps", "6", "--save", own, "--seed", "4")
    assert (code, out) == (2, "")
    assert "was trained with the seed 0, not 4: resume it with --seed 0." in " ".join(err.split())
