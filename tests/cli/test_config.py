"""Configuration files on the command line: --config, zeroir.toml, and schedules in a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.api.test_config_file import MODEL
from tests.cli.conftest import Zeroir, assert_refused

DEEPSPEED = {
    "train_batch_size": 4,
    "steps_per_print": 10,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.01},
    },
    "zero_optimization": {"stage": 2},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and a DeepSpeed configuration."""
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_compile_prints_what_the_file_sets(zeroir: Zeroir) -> None:
    arguments = ("net.py", "--config", "ds.json", "--world-size", "2", "--beta2", "0.95")
    answer = zeroir("compile", *arguments)
    assert (answer.exit_code, answer.err) == (0, "")
    lines = [line.split() for line in answer.out.splitlines()]
    assert answer.out.startswith("Options with ds.json\n")
    assert ["stage", "2", "zero_optimization.stage"] in lines
    assert ["beta2", "0.95", "command", "line"] in lines
    assert ["weight_decay", "0.0", "DeepSpeed's", "default"] in lines
    assert ["micro_steps", "1", "train_batch_size"] in lines
    assert "steps_per_print: no meaning here; `zeroir run --log-every N`" in answer.out
    shown = zeroir("show", "net.zir")
    assert shown.out.startswith(answer.out.partition("program ")[0])
    facts = zeroir("compile", *arguments, "--json").json
    assert facts["config"] == "ds.json"
    assert facts["options"]["beta2"] == {"value": "0.95", "origin": "command line"}
    assert facts["options"]["stage"] == {"value": "2", "origin": "zero_optimization.stage"}
    assert len(facts["notes"]) == 1
    assert zeroir("show", "net.zir", "--json").json["options"] == facts["options"]


@pytest.mark.slow
def test_a_run_follows_the_schedule(zeroir: Zeroir, folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps({**DEEPSPEED, "train_batch_size": 2}))
    arguments = ("net.py", "--config", "ds.json", "--world-size", "1")
    assert zeroir("compile", *arguments).exit_code == 0
    answer = zeroir("run", "net.zir", "--steps", "7", "--log-every", "1", "--json")
    lrs = [json.loads(line)["lr"] for line in answer.out.splitlines()]
    assert lrs == [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01]
    lines = zeroir("run", "net.zir", "--steps", "4", "--log-every", "1").out.splitlines()
    assert [line.partition("lr ")[2].split()[0] for line in lines] == [
        "0.000e+00",
        "0.000e+00",
        "2.500e-03",
        "5.000e-03",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_the_total_of_a_schedule_is_that_of_the_run(zeroir: Zeroir) -> None:
    schedule = ("--schedule", "linear", "--lr", "0.5", "--optimizer", "sgd")
    assert zeroir("compile", "net.py", "--world-size", "1", *schedule).exit_code == 0
    answer = zeroir("run", "net.zir", "--steps", "5", "--log-every", "1", "--json")
    lrs = [json.loads(line)["lr"] for line in answer.out.splitlines()]
    assert lrs == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_without_a_schedule_no_learning_rate_is_printed(zeroir: Zeroir) -> None:
    assert zeroir("compile", "net.py", "--world-size", "1").exit_code == 0
    answer = zeroir("run", "net.zir", "--steps", "1", "--json")
    assert "lr" not in json.loads(answer.out)
    assert " lr " not in zeroir("run", "net.zir", "--steps", "1").out


FOUND = "Options come from zeroir.toml in the current folder.\n"


@pytest.mark.slow
def test_zeroir_toml_of_the_current_folder_is_used(zeroir: Zeroir, folder: Path) -> None:
    (folder / "zeroir.toml").write_text("stage = 1\nworld_size = 2\nlr = 0.25\n")
    answer = zeroir("compile", "net.py", "--lr", "0.5")
    assert (answer.exit_code, answer.err) == (0, FOUND)
    lines = [line.split() for line in answer.out.splitlines()]
    assert ["stage", "1", "zeroir.toml"] in lines
    assert ["lr", "0.5", "command", "line"] in lines
    checked = zeroir("check", "net.py", "--steps", "1")
    assert checked.err == FOUND
    assert "at stage 1 on 2 ranks" in checked.out
    other = zeroir("compile", "net.py", "--config", "ds.json", "--world-size", "2")
    assert (other.err, other.out.splitlines()[0]) == ("", "Options with ds.json")


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_check_and_plan_take_the_file(zeroir: Zeroir) -> None:
    config = ("--config", "ds.json", "--world-size", "2")
    checked = zeroir("check", "net.py", *config, "--steps", "3", "--json")
    assert (checked.json["is_equal"], checked.json["stage"]) == (True, 2)
    planned = zeroir("plan", "net.py", *config, "--most-tried", "10", "--json")
    assert planned.json["chosen"]["settings"]["stage"] == 2
    for answer in (checked, planned):
        assert answer.err.startswith("steps_per_print: no meaning here;")


@pytest.mark.parametrize("command", ["compile", "check", "plan"])
def test_a_wrong_file_is_one_sentence(zeroir: Zeroir, folder: Path, command: str) -> None:
    (folder / "bad.json").write_text('{"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}')
    assert_refused(
        zeroir(command, "net.py", "--config", "bad.json"),
        "Error: bad.json: zero_optimization.zenflow cannot be",
    )
