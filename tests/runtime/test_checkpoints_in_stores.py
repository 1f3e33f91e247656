"""Real processes save to a store, and others go on with what is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from tests.runtime.support import Ranks, begun, lowered, require_success
from tests.support.programs import mlp
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.reading import read_manifest, verify_all
from zeroir.runtime.execution.lockstep import Lockstep


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_save_to_a_store_and_load_from_it(
    tmp_path: Path, s3_bucket: str, s3_environment: Mapping[str, str]
) -> None:
    # The driver looks the host's name up in a thread, even when the interpreter is about to end.
    endpoint = s3_environment["AWS_ENDPOINT_URL"].replace("127.0.0.1", "localhost")
    environment = {**s3_environment, "AWS_ENDPOINT_URL": endpoint}
    url = f"{s3_bucket}/runs"
    for scenario, world_size in (("save", 2), ("load", 3)):
        folder = tmp_path / scenario
        folder.mkdir()
        ranks = Ranks(
            world_size,
            folder,
            scenario,
            url,
            module="tests.runtime.store_workers",
            environment=environment,
        )
        require_success(ranks.wait())
        for listed in CheckpointFolder(root=url).list():
            verify_all(listed.path, read_manifest(listed.path))
    assert [listed.step for listed in CheckpointFolder(root=url).list()] == [2, 1]


def test_the_file_of_a_rank_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the store fails in passing: the bytes of the state can be read again."""
    lockstep = begun(Lockstep(lowered(mlp(), 2, 2)))
    write = MemoryFile.write
    failures = [TimeoutError("slow"), ConnectionResetError("gone")]

    def failing(file: MemoryFile, data: memoryview) -> int:
        if failures and file.tell() > 0:
            raise failures.pop()
        return int(write(file, data))

    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(MemoryFile, "write", failing, raising=False)
    path = "memory://again/step-00000000"
    lockstep.save(path)
    assert not failures
    verify_all(path, read_manifest(path))
    MemoryFileSystem.store.clear()
