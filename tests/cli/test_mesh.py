"""Hybrid sharding on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import zeroir as package
from tests.cli.conftest import Zeroir
from tests.cli.test_bad_input import LINE
from tests.cli.test_run import run
from zeroir.api.running.engines import lowered_again_note
from zeroir.errors import UserError

MESH = ("--mesh", "replicate=2,shard=2")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "line.py"
    path.write_text(LINE)
    return path


def test_both_axes_are_named_and_accounted_for(zeroir: Zeroir, model: Path) -> None:
    path = model.parent / "line.zir"
    facts = zeroir("compile", model, *MESH, "-o", path, "--json").json
    assert facts["mesh"] == {"replicate": 2, "shard": 2}
    assert facts["world_size"] == 4
    assert set(facts["laws"].values()) == {"proved"}
    program = package.load(path).program
    full = sum(flat.padded_numel * flat.dtype.itemsize_bytes for flat in program.flats)
    over = facts["collective_bytes_by_axis"]
    assert over.keys() == {"replicate", "shard"}
    assert over["replicate"]["all_reduce"] == full // 2
    assert over["shard"]["reduce_scatter"] == full
    assert over["shard"]["all_reduce"] == over["replicate"]["all_gather"] == 0

    shown = zeroir("show", path).out
    for words in ("mesh replicate=2 shard=2", "over replicate", "over shard"):
        assert words in shown
    text = zeroir("show", path, "--text").out
    assert "comm across axis=replicate" in text
    assert " mesh=replicate=2,shard=2 " in text.partition("\n")[0].replace('"', "")
    assert zeroir("verify", path).exit_code == 0

    compiled = package.load(path)
    refitted = compiled.specialise(world_size=6)
    assert lowered_again_note(compiled.program, 6) == "Compiled for 4 ranks, lowered again for 6."
    assert [axis.size for axis in refitted.program.mesh.axes] == [3, 2]
    assert refitted.options.mesh == "replicate=3,shard=2"
    with pytest.raises(UserError, match="start a multiple of 2 ranks"):
        compiled.specialise(world_size=3)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_that_fill_no_group_are_reported_once(zeroir: Zeroir, model: Path) -> None:
    path = model.parent / "line.zir"
    assert zeroir("compile", model, *MESH, "-o", path).exit_code == 0
    made = run("run", path, "--nproc", "3", "--steps", "1", cwd=model.parent)
    assert made.returncode == 2
    assert made.stderr.count("start a multiple of 2 ranks") == 1
    assert "Traceback" not in made.stderr
