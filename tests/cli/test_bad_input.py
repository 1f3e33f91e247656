"""Every wrong input ends with one clear sentence, exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir, assert_refused
from tests.support.stored_program import STORED

LINE = """
import torch

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x).square().sum()

def model():
    return Line()

def batch():
    return (torch.ones(2, 3),)
"""
BATCH = "import torch\ndef batch():\n    return (torch.ones(2),)\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        # One of each kind: a number, a type, a name; what a model has not; options that contradict each other.
        (["--stage", "7"], ["--stage", "7", "3"]),
        (["--world-size", "two"], ["--world-size", "two"]),
        (["--precision", "int8"], ["--precision", "fp32"]),
        (["--group", "nothing.*:lr=1"], ["--group nothing.*:lr=1 matches no trained parameter"]),
        (["--optimizer", "lbfgs"], ["--optimizer", "adamw"]),
        (["--lr", "nan"], ["--lr"]),
        (["--nesterov"], ["momentum"]),
        (["--bogus"], ["--bogus"]),
        (["--units", "nothing.*"], ["nothing.*"]),
        (["--mesh", "foo=2"], ["--mesh is foo=2", "replicate=2,shard=4", "'foo' is not an axis"]),
        (["--mesh", "replicate=2,shard=0"], ["--mesh", "shard must be at least 1"]),
        (["--mesh", "replicate=2,shard=two"], ["--mesh", "shard must be a number of ranks"]),
        (["--mesh", "replicate=2,shard=2,shard=2"], ["--mesh", "shard is given twice"]),
        (["--mesh", "replicate=2"], ["--mesh", "shard is missing"]),
        (["--mesh", "replicate=2000,shard=2000"], ["--mesh", "at most 1048576 ranks"]),
        (
            ["--mesh", "replicate=2,shard=2", "--world-size", "8"],
            ["--mesh replicate=2,shard=2 has 4 ranks", "--world-size is 8"],
        ),
    ],
)
def test_options(zeroir: Zeroir, tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    (tmp_path / "line.py").write_text(LINE)
    path = tmp_path / "line.zir"
    assert_refused(zeroir("compile", tmp_path / "line.py", *arguments, "-o", path), *words)
    assert list(tmp_path.iterdir()) == [tmp_path / "line.py"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def model(:\n", ["model.py:1", "not valid Python"]),
        (f"def model():\n    raise KeyError('gone')\n{BATCH}", ["gone", "model.py:2"]),
    ],
)
def test_model_files(zeroir: Zeroir, tmp_path: Path, source: str, words: list[str]) -> None:
    path, output = tmp_path / "model.py", tmp_path / "out.zir"
    path.write_text(source)
    assert_refused(zeroir("compile", path, "-o", output), *words)
    assert not output.exists()


def test_missing_files(zeroir: Zeroir, tmp_path: Path) -> None:
    assert_refused(zeroir("compile", tmp_path / "none.py"), "none.py")
    assert_refused(zeroir("show", tmp_path / "none.zir"), "none.zir")
    assert_refused(zeroir("run", tmp_path / "none.zir"), "none.zir")


def test_an_output_that_cannot_be_is_refused_before_any_work(
    zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model.py"
    model.write_text("raise AssertionError('the model was loaded')\n")
    assert_refused(zeroir("compile", model, "-o", tmp_path / "no" / "folder" / "x.zir"), "folder")
    for folder in ("", ".", tmp_path):
        assert_refused(zeroir("compile", model, "-o", folder), "is a folder")
    assert_refused(
        zeroir("compile", model, "-o", "model.py"), "model.py", "is not a compiled program"
    )
    assert list(tmp_path.iterdir()) == [model]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show"], ["PROGRAM is missing", "zeroir show --help"]),
        (["show", "a.zir", "b.zir"], ["one argument too many: 'b.zir'"]),
        (["compile", "model.py", "--stage"], ["--stage needs a value"]),
        (["export", "checkpoints"], ["-o is missing"]),
        (
            ["estimate", "--params", "7e9", "--at", "seq=4"],
            ["--layers, --hidden, --heads and --seq"],
        ),
        (["estimate", "--parameters", "7e9"], ["Unknown option: --parameters; --params"]),
        (["run", "a.zir", "--lr", "0.1"], ["--lr is an option of `zeroir compile`"]),
        (["run", "a.zir", "--step", "1"], ["Unknown option: --step. Did you mean --steps?"]),
        (
            ["run", "a.zir", "--timeout", "1"],
            ["--timeout is 1, but should be greater than or equal to 30"],
        ),
        (
            ["run", "a.zir", "--steps", "0"],
            ["--steps is 0, but should be greater than or equal to 1"],
        ),
        (["run", "a.zir", "--steps", "2.5"], ["--steps is 2.5, but should be a whole number"]),
        (["frobnicate"], ["frobnicate", "compile"]),
        (["show", "a.zir", "--sections", "update"], ["--sections", "--section"]),
        (["verify", "a.zir", "--budget", "lots"], ["'lots'", "80GB"]),
    ],
)
def test_usage(zeroir: Zeroir, arguments: list[str], words: list[str]) -> None:
    assert_refused(zeroir(*arguments), *words)


def test_unknown_names(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    assert_refused(zeroir("show", programs[3], "--unit", "blocks.9"), "blocks.9", "blocks.0")
    assert_refused(zeroir("show", programs[3], "--section", "warmup"), "warmup", "update")
    assert_refused(zeroir("explain", "Z999"), "Z999", "Z101")


def test_text_goes_with_a_section_alone(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    assert_refused(zeroir("show", programs[3], "--text", "--unit", "blocks.0"), "--text")
    assert_refused(zeroir("show", programs[3], "--text", "--json"), "--text")


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain"],
        *(
            pytest.param(["show", str(STORED), *flags], marks=pytest.mark.slow)
            for flags in ((), ("--text",), ("--json",))
        ),
    ],
)
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "zeroir", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [["explain"], pytest.param(["show", str(STORED), "--text"], marks=pytest.mark.slow)],
)
def test_a_full_disk_is_reported(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-m", "zeroir", *arguments]
        made = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert made.returncode == 2
    assert made.stderr == "Error: Not everything could be written: No space left on device.\n"


def test_damaged_programs(zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path) -> None:
    whole, path = programs[3].read_bytes(), tmp_path / "damaged.zir"
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for data in (b"", whole[:100], whole[:-1], flipped):
        path.write_bytes(data)
        assert_refused(zeroir("show", path), "damaged.zir")


def test_changed_model_file(zeroir: Zeroir, tmp_path: Path) -> None:
    model, program = tmp_path / "model.py", tmp_path / "model.zir"
    model.write_text(LINE)
    assert zeroir("compile", model, "--world-size", "1", "-o", program).exit_code == 0
    model.write_text(LINE + "# changed\n")
    import zeroir as package

    with pytest.raises(package.UserError, match="changed since"):
        package.load(program).engine()
    package.load(program).engine(allow_model_change=True).close()


@pytest.mark.slow
def test_a_model_file_that_moved(
    zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(LINE)
    assert zeroir("compile", "model.py:model", "--world-size", "1").exit_code == 0
    Path("other").mkdir()
    Path("model.py").rename("other/renamed.py")
    assert_refused(zeroir("run", "model.zir", "--steps", "1"), "model.py", "--model")
    for named in ("other/renamed.py", "other/renamed.py:model"):
        answer = zeroir("run", "model.zir", "--steps", "1", "--model", named)
        assert answer.exit_code == 0, answer.err
        assert "loss" in answer.out
    assert_refused(
        zeroir("run", "model.zir", "--steps", "1", "--model", "other/none.py"), "other/none.py"
    )


def test_ctrl_c_is_one_word_and_leaves_nothing(
    zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zeroir.artifact.save", interrupted)
    model = tmp_path / "line.py"
    model.write_text(LINE)
    answer = zeroir("compile", model, "-o", tmp_path / "line.zir")
    assert (answer.exit_code, answer.out, answer.err) == (130, "", "Interrupted.\n")
    assert list(tmp_path.iterdir()) == [model]
