"""Reports of training reach the terminal, the file of JSON lines and TensorBoard, from rank 0 alone."""

from __future__ import annotations

import io
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroir.runtime.training.checkpoint_schedule import SaveReport
from zeroir.runtime.training.evaluations import EvaluationReport
from zeroir.runtime.training.progress import reporter
from zeroir.runtime.training.train import AnyReport, StepReport

STEP = StepReport(
    step=20,
    loss=2.5,
    lr=3e-4,
    loss_scale=65536.0,
    is_skipped=False,
    grad_norm=1.25,
    seconds=0.5,
    remaining_s=40.0,
    per_second=2048.0,
    unit="tokens",
    mfu=0.4123,
    memory_bytes=3_200_000_000,
)
REPORTS: list[AnyReport] = [
    STEP,
    EvaluationReport(step=20, loss=2.75, batches=3, seconds=0.1),
    SaveReport(step=20, path="saved/step-20"),
]


def reported(
    *, rank: int = 0, as_json: bool = False, log: Path | None = None, folder: Path | None = None
) -> str:
    out, err = io.StringIO(), io.StringIO()
    with reporter(
        rank,
        100,
        steps_done=10,
        as_json=as_json,
        out=out,
        err=err,
        log=log,
        tensorboard=folder,
    ) as report:
        for each in REPORTS:
            report(each)
    assert not err.getvalue()
    return out.getvalue()


def test_a_line_has_everything_that_a_step_has() -> None:
    first, second, third = reported().splitlines()
    assert first == (
        "step    20  loss 2.5000  lr 3.000e-04  scale 65536  norm 1.25  500 ms  2,048 tokens/s  MFU 41.2%  3.20 GB"
    )
    assert second.startswith("step    20  eval loss 2.7500")
    assert third == "step    20  saved saved/step-20"


def test_the_log_has_what_json_prints_and_goes_on_after_earlier_lines(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    printed = reported(as_json=True, log=log)
    assert log.read_text() == printed
    reported(log=log)
    assert log.read_text() == printed * 2
    step = json.loads(printed.splitlines()[0])
    assert step["remaining_seconds"] == 40
    assert (step["mfu"], step["loss_scale"], step["memory_bytes"]) == (0.4123, 65536, 3.2e9)
    assert reported(rank=1, log=log) == ""
    assert log.read_text() == printed * 2


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_the_numbers_of_each_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reported(folder=tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scalars = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    assert {name: event.value for name, (event,) in scalars.items()}["loss"] == STEP.loss
    assert {event.step for (event,) in scalars.values()} == {20}
    assert {"lr", "grad_norm", "mfu", "tokens_per_second", "eval_loss"} <= scalars.keys()
