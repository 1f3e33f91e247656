"""``zeroir run --eval-every``: evaluations between steps, their reports, and what they need."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.cli.conftest import Zeroir, assert_refused
from tests.support.evaluating import model as source
from tests.support.zygote import run_forked
from zeroir.api.compiling import load_program
from zeroir.cli.app import run_command
from zeroir.errors import BatchError, UserError
from zeroir.ir.program import Program
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.runtime.training import evaluations
from zeroir.runtime.training.evaluations import Evaluations
from zeroir.torch_ops.batches import Batch

FILE = str(source.__file__)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval_every") / "model.zir"
    given = ["compile", FILE, "--world-size", "2", "-o", str(path)]
    assert run_command(given) == 0
    return path


def lines(text: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_it_reports_the_mean_over_batches(zeroir: Zeroir, program: Path) -> None:
    answer = zeroir(
        *("run", program, "--model", FILE, "--steps", "5", "--eval-every", "2"),
        *("--log-every", "1", "--seed", "5", "--json"),
    )
    assert answer.exit_code == 0, answer.err
    found = [line for line in lines(answer.out) if "eval_loss" in line]
    # After every second step, and after the last.
    assert [line["step"] for line in found] == [2, 4, 5]
    assert all(line["eval_batches"] == 3 for line in found)
    assert [line["step"] for line in lines(answer.out) if "loss" in line] == [1, 2, 3, 4, 5]
    lockstep = Lockstep(one_rank(program), seed=5)
    lockstep.initialise(source.model, 5)
    batches = source.batches(0, 1, 5)
    for _ in range(2):
        lockstep.step([[next(batches)]])
    losses = [float(lockstep.evaluate([b])[0].loss) for b in source.eval_batches(0, 1, 5)]
    assert found[0]["eval_loss"] == sum(losses) / 3


def one_rank(path: Path) -> Program:
    return load_program(path).specialise(world_size=1).program


@pytest.mark.slow
def test_a_line_of_text(zeroir: Zeroir, program: Path) -> None:
    answer = zeroir("run", program, "--model", FILE, "--steps", "2", "--eval-every", "2")
    assert answer.exit_code == 0, answer.err
    assert "step     2  eval loss " in answer.out
    assert "  3 batches per rank  " in answer.out


@pytest.mark.slow
@pytest.mark.dist
def test_the_mean_is_over_all_ranks(program: Path, tmp_path: Path) -> None:
    given = ("run", program, "--model", FILE, "--nproc", "2", "--steps", "1", "--seed", "5")
    made = run_forked(
        "zeroir", [*given, "--eval-every", "1", "--json"], tmp_path, {"OMP_NUM_THREADS": "1"}
    )
    assert made.returncode == 0, made.stderr
    (found,) = [line for line in lines(made.stdout) if "eval_loss" in line]
    lockstep = Lockstep(load_program(program).program, seed=5)
    lockstep.initialise(source.model, 5)
    lockstep.step([[next(source.batches(rank, 2, 5))] for rank in range(2)])
    sums = [0.0, 0.0]
    given_batches = zip(*(source.eval_batches(rank, 2, 5) for rank in range(2)), strict=True)
    for batches in given_batches:
        for rank, evaluation in enumerate(lockstep.evaluate(batches)):
            sums[rank] += float(evaluation.loss)
    assert found["eval_loss"] == (sums[0] / 2 + sums[1] / 2) / 3


@pytest.mark.slow
def test_a_file_without_eval_batches_is_one_sentence(zeroir: Zeroir, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    text = Path(FILE).read_text()
    file.write_text(text.replace("def eval_batches(", "def other_batches("))
    path = tmp_path / "model.zir"
    assert zeroir("compile", file, "--world-size", "1", "-o", path).exit_code == 0
    answer = zeroir("run", path, "--model", file, "--steps", "2", "--eval-every", "1")
    assert_refused(answer, "Error: --eval-every needs a function eval_batches(rank, world_size")
    assert "step" not in answer.out


@pytest.mark.slow
def test_a_program_without_evaluations_is_one_sentence(zeroir: Zeroir, tmp_path: Path) -> None:
    path = tmp_path / "model.zir"
    given = ("compile", FILE, "--world-size", "1", "--no-evaluate", "-o", path)
    assert zeroir(*given).exit_code == 0
    assert_refused(
        zeroir("run", path, "--model", FILE, "--steps", "2", "--eval-every", "1"),
        "compiled with --no-evaluate",
    )


class Engine:
    """One of several ranks; ``shares`` are the means that the job gives."""

    loss = weight = 1.0

    def __init__(self, shares: list[float]) -> None:
        self.shares = iter(shares)

    def average(self, value: float) -> float:
        assert value in (0.0, 1.0)
        return next(self.shares)

    def evaluate(self, batch: Batch) -> Engine:
        if batch is None:
            raise BatchError("The batch is none.")
        return self


@pytest.mark.parametrize(
    ("own", "shares", "reason"),
    [
        (2, [1.0, 1.0, 0.5], "yields 2 batches on this rank and more on another"),
        (3, [1.0, 1.0, 0.5], "yields more than 2 batches here than on another rank"),
        (0, [0.0], "yields no batch"),
    ],
)
def test_ranks_yield_equally_many_batches(own: int, shares: list[float], reason: str) -> None:
    def batches() -> Iterator[Batch]:
        return islice(source.batches(0, 1, 0), own)

    engine = Engine(shares)
    with pytest.raises(UserError, match=reason):
        evaluations.evaluate(engine, Evaluations(every=1, batches=batches), 1)


def test_eval_batches_that_fail_name_their_line() -> None:
    def batches() -> Iterator[Batch]:
        yield source.batch()
        raise RuntimeError("no more data")

    engine = Engine([1.0])
    with pytest.raises(UserError, match=r"eval_batches\(\) failed after step 7 .*no more data"):
        evaluations.evaluate(engine, Evaluations(every=1, batches=batches), 7)


def test_a_wrong_batch_of_an_evaluation_is_told_from_one_of_training() -> None:
    engine = Engine([1.0])
    with pytest.raises(UserError, match=r"^eval_batches\(\) gave a wrong batch 1: The batch"):
        evaluations.evaluate(engine, Evaluations(every=1, batches=lambda: iter([None])), 7)
