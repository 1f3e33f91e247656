"""Every wrong input ends with one clear sentence, exit code 2, no traceback, and nothing half-written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import GPT, Answer, Zeroir


BATCH = "import torch\ndef batch():\n    return (torch.ones(2),)\n"


def assert_refused(answer: Answer, *words: str) -> None:
    assert answer.exit_code == 2
    assert answer.out == ""
    assert "Traceback" not in answer.err
    assert answer.err.startswith("Error: ")
    for word in words:
        assert word in answer.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stage", "7"], ["--stage", "7", "3"]),
        (["--world-size", "0"], ["--world-size", "0"]),
        (["--world-size", "two"], ["--world-size", "two"]),
        (["--precision", "int8"], ["--precision", "fp32"]),
        (["--optimizer", "lion"], ["--optimizer", "adamw"]),
        (["--lr", "nan"], ["--lr"]),
        (["--nesterov"], ["momentum"]),
        (["--bogus"], ["--bogus"]),
        (["--keep-fp32", "nothing.*"], ["nothing.*"]),
        (["--units", "nothing.*"], ["nothing.*"]),
    ],
)
def test_options(
    zeroir: Zeroir, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    path = tmp_path / "gpt.zir"
    # keep-fp32 only means something beside a 16-bit precision
    extra = ["--precision", "bf16"] if "--keep-fp32" in arguments else []
    assert_refused(zeroir("compile", GPT, *arguments, *extra, "-o", path), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def model(:\n", ["model.py:1", "not valid Python"]),
        ("x = 1\n", ["no function `model`"]),
        ("def model():\n    return 1\n\ndef batch():\n    return (1,)\n", ["batch()", "tensor"]),
        (f"def model():\n    return 1\n{BATCH}", ["model()", "torch.nn.Module"]),
        (f"def model():\n    raise KeyError('gone')\n{BATCH}", ["gone", "model.py:2"]),
        ("import no_such_module_anywhere\n", ["no_such_module_anywhere", "model.py:1"]),
    ],
)
def test_model_files(zeroir: Zeroir, tmp_path: Path, source: str, words: list[str]) -> None:
    path = tmp_path / "model.py"
    path.write_text(source)
    output = tmp_path / "out.zir"
    assert_refused(zeroir("compile", path, "-o", output), *words)
    assert not output.exists()


def test_missing_files(zeroir: Zeroir, tmp_path: Path) -> None:
    assert_refused(zeroir("compile", tmp_path / "none.py"), "none.py")
    assert_refused(zeroir("show", tmp_path / "none.zir"), "none.zir")
    assert_refused(zeroir("run", tmp_path / "none.zir"), "none.zir")


def test_unwritable_output(zeroir: Zeroir, tmp_path: Path) -> None:
    assert_refused(zeroir("compile", GPT, "-o", tmp_path / "no" / "folder" / "x.zir"), "folder")


def test_unknown_names(zeroir: Zeroir, programs: dict[int, Path]) -> None:
    assert_refused(zeroir("show", programs[3], "--unit", "blocks.9"), "blocks.9", "blocks.0")
    assert_refused(zeroir("show", programs[3], "--section", "warmup"), "warmup", "update")
    assert_refused(zeroir("explain", "Z999"), "Z999", "Z101")


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_truncated_program(
    zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path, length: int
) -> None:
    path = tmp_path / "cut.zir"
    path.write_bytes(programs[3].read_bytes()[:length])
    assert_refused(zeroir("show", path), "cut.zir")


def test_flipped_bit(zeroir: Zeroir, programs: dict[int, Path], tmp_path: Path) -> None:
    data = bytearray(programs[3].read_bytes())
    data[len(data) // 2] ^= 1
    path = tmp_path / "flipped.zir"
    path.write_bytes(data)
    assert_refused(zeroir("verify", path), "flipped.zir")


def test_changed_model_file(zeroir: Zeroir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "import torch\n"
        "def model():\n    return M()\n"
        "class M(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.w = torch.nn.Linear(3, 3)\n"
        "    def forward(self, x):\n        return self.w(x).sum()\n"
        "def batch():\n    return (torch.ones(2, 3),)\n"
    )
    model, program = tmp_path / "model.py", tmp_path / "model.zir"
    model.write_text(source)
    assert zeroir("compile", model, "--world-size", "1", "-o", program).exit_code == 0
    model.write_text(source + "# changed\n")
    import zeroir as package

    with pytest.raises(package.UserError, match="changed since"):
        package.load(program).engine()
    package.load(program).engine(allow_model_change=True).close()
