"""Values that no program can take end with a sentence: huge numbers, odd batches, models that change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir, assert_refused
from tests.cli.test_bad_input import LINE
from tests.support.stored_program import STORED

DIGITS = "9" * 4000
MORE_DIGITS = "9" * 5000
"""More than Python converts to an integer."""
BATCHES = "\ndef batches(rank, world_size, seed, start_step=0):\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "line.py"
    path.write_text(LINE)
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        *(["run", STORED, "--steps", "1", option] for option in ("--log", "--trace")),
        *(["run", STORED, "--steps", "1", option] for option in ("--machine", "--tensorboard")),
        *(["checkpoint", name] for name in ("ls", "show", "verify")),
        *([name] for name in ("run", "show", "export", "import", "compile", "plan", "report")),
        ["compile", STORED, "--config"],
        ["simulate", STORED, "--machine"],
        ["report", STORED, "-o"],
    ],
    ids=lambda arguments: " ".join(each for each in arguments if isinstance(each, str)),
)
@pytest.mark.parametrize("is_folder", [False, True])
def test_paths_that_are_too_long(
    zeroir: Zeroir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str | Path],
    is_folder: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = "x" * 300 + ("/x" if is_folder else "")
    output = ["-o", "out"] if arguments[0] in ("export", "import", "compile", "plan") else []
    answer = zeroir(*arguments, path, *output)
    assert_refused(answer, "xxx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("digits", [DIGITS, MORE_DIGITS], ids=["4000", "5000"])
@pytest.mark.parametrize(
    "options",
    [
        ["--micro-steps"],
        ["--world-size"],
        ["--memory-budget"],
        ["--prefetch-budget"],
        ["--precision", "fp16", "--loss-scale-window"],
    ],
    ids=lambda options: options[-1],
)
def test_options_of_thousands_of_digits(
    zeroir: Zeroir, model: Path, options: list[str], digits: str
) -> None:
    answer = zeroir("compile", model, *options, digits, "-o", model.with_suffix(".zir"))
    assert_refused(answer, options[-1], "99999…99999")
    assert len(answer.err) < 500
    assert list(model.parent.iterdir()) == [model]


@pytest.mark.parametrize("budget", [DIGITS, MORE_DIGITS, "1e99", "999999999TB"])
def test_budgets_beyond_any_machine(zeroir: Zeroir, budget: str) -> None:
    answer = zeroir("verify", STORED, "--budget", budget)
    assert_refused(answer, "memory", "80GB")
    assert len(answer.err) < 300


@pytest.mark.parametrize("seed", ["18446744073709551616", "9223372036854775808", DIGITS])
@pytest.mark.parametrize("command", ["run", "check", "profile"])
def test_seeds_that_torch_does_not_take(
    zeroir: Zeroir, model: Path, command: str, seed: str
) -> None:
    output = ["-o", model.with_suffix(".toml")] if command == "profile" else []
    target = model if command == "check" else STORED
    assert_refused(zeroir(command, target, "--seed", seed, *output), "--seed")


def test_the_largest_seed(zeroir: Zeroir, model: Path) -> None:
    answer = zeroir("check", model, "--seed", str(2**63 - 1), "--steps", "1", "--world-size", "2")
    assert answer.exit_code == 0, answer.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = " + "[" * 3000 + "]" * 3000, "nests deeper than any machine does"),
        ("x = 1\n" * 2_000_000, "is far too long"),
    ],
    ids=["nested", "long"],
)
def test_machine_files(zeroir: Zeroir, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(text)
    assert_refused(zeroir("simulate", STORED, "--machine", path), "machine.toml", words)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
@pytest.mark.parametrize(
    "arguments", [["show", str(STORED)], ["show", str(STORED), "--json"], ["explain", "Z402"]]
)
def test_an_output_that_is_not_in_utf8(encoding: str, arguments: list[str]) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "zeroir", *arguments],
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        check=False,
    )
    assert (made.returncode, made.stderr) == (0, b"")
    assert made.stdout.decode(encoding)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ('torch.ones(2, 3, device="meta")', "on the meta device, where tensors have no values"),
        ("torch.eye(3).to_sparse()", "of layout sparse_coo"),
        ("torch.eye(3).to_mkldnn()", "of layout _mkldnn"),
        ("torch.nested.nested_tensor([torch.ones(3)], layout=torch.jagged)", "a nested tensor"),
    ],
)
def test_batches_without_dense_values(zeroir: Zeroir, model: Path, tensor: str, words: str) -> None:
    model.write_text(LINE.replace("torch.ones(2, 3)", tensor))
    assert_refused(zeroir("compile", model), "The input 0 of batch()", words)
    model.write_text(LINE + BATCHES + f"    while True: yield ({tensor},)\n")
    assert_refused(zeroir("check", model, "--world-size", "1"), "The input 0 of the batch", words)


FAILING = {
    "    raise ValueError('no data')\n": "ValueError: no data",
    "    return None\n": "returned NoneType; it must return an iterable",
    "    yield None\n": "The batch has the constant None at '0'",
    "    raise SystemExit(3)\n": "batches() failed",
}


@pytest.mark.slow
def test_batches_that_fail(zeroir: Zeroir, model: Path) -> None:
    program = model.with_suffix(".zir")
    assert zeroir("compile", model, "--world-size", "1", "-o", program).exit_code == 0
    run = ("run", program, "--steps", "2", "--model", model, "--allow-model-change")
    for body, words in FAILING.items():
        model.write_text(LINE + BATCHES + body)
        assert_refused(zeroir(*run), words)
        assert_refused(zeroir("check", model, "--world-size", "1"), words)


def test_a_factory_that_makes_no_model(zeroir: Zeroir, model: Path) -> None:
    for name in ("batch", "torch", "Line"):
        answer = zeroir("compile", f"{model}:{name}", "-o", model.with_suffix(".zir"))
        assert answer.exit_code == (0 if name == "Line" else 2)
        assert "Traceback" not in answer.err


def test_an_init_that_adds_parameters(zeroir: Zeroir, model: Path) -> None:
    adds = "    m.register_parameter('extra', torch.nn.Parameter(torch.ones(2)))\n"
    model.write_text(LINE + "\ndef init(m):\n" + adds)
    assert_refused(zeroir("check", model), "init()", "adds the parameter extra", "model()")


@pytest.mark.parametrize("more", ["torch.nn.Parameter(torch.ones(3))", "torch.nn.Linear(3, 3)"])
def test_a_forward_that_adds_parameters(zeroir: Zeroir, model: Path, more: str) -> None:
    forward = "    def forward(self, x):\n"
    model.write_text(LINE.replace(forward, f"{forward}        self.more = {more}\n"))
    assert_refused(zeroir("compile", model), "adds the parameter more", "model()")
