"""The order of collectives on every rank, judged by torch's own analysis of Flight Recorder dumps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.torch_judges import flight_recorder_verdicts
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from tests.support.zygote import run_forked
from zeroir.cost.tasks import step_sections
from zeroir.ir import ops
from zeroir.ir.program import Program
from zeroir.report.flight_recorder import flight_recorder_dumps
from zeroir.report.plain_pickle import dumps


def scheduled(
    stage: int,
    ranks: int,
    replicas: int | None = None,
    *,
    micro_steps: int = 1,
    clip: float | None = None,
    bucket: int = 0,
    overlap_update: bool = False,
) -> Program:
    return applied(
        mlp(blocks=3, micro_steps=micro_steps, clip=clip),
        for_stage(stage, ranks, replicas=replicas, bucket=bucket, overlap_update=overlap_update),
    )


def analysed(folder: Path) -> str:
    """The output of torch's own analysis of the dumps in a folder."""
    made = run_forked("torch.distributed.flight_recorder.fr_trace", [folder], folder)
    assert made.returncode == 0, made.stderr
    return made.stdout + made.stderr


def write(dumped: list[Any], folder: Path) -> None:
    for rank, dump in enumerate(dumped):
        (folder / f"rank_{rank}").write_bytes(dumps(dump))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("ranks", "replicas", "choices"),
    [
        (3, None, {"clip": 1.0}),
        (4, None, {"bucket": 1 << 20}),
        (4, 2, {"micro_steps": 3}),
        (6, 2, {"overlap_update": True}),
    ],
)
def test_torch_finds_all_ranks_in_step(
    stage: int, ranks: int, replicas: int | None, choices: dict[str, Any], tmp_path: Path
) -> None:
    program = scheduled(stage, ranks, replicas, **choices)
    write(list(flight_recorder_dumps(program, source="mlp.zir")), tmp_path)
    verdicts = flight_recorder_verdicts(tmp_path)
    groups = {comm.name: len(program.mesh.groups(comm.axis)) for comm in program.comms}
    issued = [
        op.comm
        for section in step_sections(program)
        for op in section.body
        if isinstance(op, ops.Collective)
    ]
    assert issued
    assert len(verdicts) == sum(groups[comm] for comm in issued)
    assert all(verdicts)


@pytest.mark.parametrize("replicas", [None, 2])
def test_torch_sees_two_collectives_swapped_on_one_rank(
    replicas: int | None, tmp_path: Path
) -> None:
    dumped: list[Any] = list(flight_recorder_dumps(scheduled(3, 4, replicas), source="mlp.zir"))
    entries = dumped[2]["entries"]
    first, second = next(
        (i, j)
        for i, a in enumerate(entries)
        for j, b in enumerate(entries)
        if a["pg_id"] == b["pg_id"] and a["input_sizes"] != b["input_sizes"]
    )
    numbered = ("record_id", "collective_seq_id", "op_id")
    before = [{name: entries[i][name] for name in numbered} for i in (first, second)]
    entries[first], entries[second] = (entries[second] | before[0], entries[first] | before[1])
    write(dumped, tmp_path)
    assert not all(flight_recorder_verdicts(tmp_path))


def test_torch_sees_a_collective_that_one_rank_leaves_out(tmp_path: Path) -> None:
    dumped: list[Any] = list(flight_recorder_dumps(scheduled(2, 3), source="mlp.zir"))
    dumped[1]["entries"].pop()
    write(dumped, tmp_path)
    assert not all(flight_recorder_verdicts(tmp_path))


@pytest.mark.slow
def test_the_analysis_takes_the_folder_as_it_is(tmp_path: Path) -> None:
    dumped: list[Any] = list(flight_recorder_dumps(scheduled(3, 3), source="mlp.zir"))
    write(dumped, tmp_path)
    consistent = analysed(tmp_path)
    assert "Error type" not in consistent
    entries = dumped[0]["entries"]
    entries[0]["input_sizes"], entries[0]["profiling_name"] = [[1]], "nccl:all_reduce"
    write(dumped, tmp_path)
    broken = analysed(tmp_path)
    assert "Culprit rank" in broken
