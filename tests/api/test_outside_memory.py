"""What a run keeps outside device memory is said, and refused where the machine has no room for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.lowering import applied
from tests.support.programs import mlp
from zeroir.api.running.outside_memory import (
    host_memory_bytes,
    outside_bytes,
    outside_note,
    require_disk_folder,
    require_host_memory,
)
from zeroir.config import make_options
from zeroir.errors import UserError
from zeroir.ir.buffers import Space
from zeroir.ir.program import Program
from zeroir.memory.states import snapshot_bytes
from zeroir.passes.pipelines import for_options

LOGICAL = mlp(blocks=2, dim=16)


def program(**offload: object) -> Program:
    options = make_options({"world_size": 2, **offload})
    return applied(replace(LOGICAL, options=options), for_options(options))


def test_nothing_is_said_where_nothing_is_offloaded() -> None:
    plain = program()
    assert snapshot_bytes(plain)
    assert outside_bytes(plain) == {}
    assert outside_note(outside_bytes(plain)) is None


def test_host_and_disk_are_said_apart() -> None:
    on_host = outside_bytes(program(offload="optimizer"))
    both = outside_bytes(program(offload="optimizer", offload_to="disk"))
    states = sum(
        b.size_bytes
        for b in program(offload="optimizer", offload_to="disk").buffers
        if b.space is Space.DISK
    )
    assert set(on_host) == {Space.HOST}
    assert both[Space.DISK] == states
    note = outside_note({Space.HOST: 1_500, Space.DISK: 2_000_000})
    assert note == "Each rank keeps 1.5 kB in host memory and 2.0 MB on the disk."


def test_ranks_that_need_more_than_the_machine_has_are_refused() -> None:
    sizes = {Space.HOST: 600}
    require_host_memory(sizes, ranks=2, memory_bytes=1200)
    require_host_memory(sizes, ranks=2, memory_bytes=None)
    with pytest.raises(UserError) as caught:
        require_host_memory(sizes, ranks=2, memory_bytes=1199)
    assert str(caught.value).startswith(
        "What 2 ranks of this machine keep in host memory takes 1.2 kB"
    )
    assert "--offload-to disk:FOLDER" in str(caught.value)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    require_disk_folder({Space.HOST: 1}, missing)
    require_disk_folder({Space.DISK: 1}, None)
    require_disk_folder({Space.DISK: 1}, str(tmp_path))
    with pytest.raises(UserError, match=r"There is no folder '.*missing' for what the disk keeps"):
        require_disk_folder({Space.DISK: 1}, missing)


def test_a_machine_has_some_memory() -> None:
    assert (host_memory_bytes() or 0) > 2**20
