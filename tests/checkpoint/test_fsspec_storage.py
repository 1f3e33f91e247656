"""Checkpoints in stores: an emulator of S3 over HTTP, and fsspec's store in memory."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.support.checkpoint_files import save_checkpoint
from zeroir.checkpoint import fsspec_storage
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.fsspec_storage import FsspecStorage, open_store
from zeroir.checkpoint.publish import begin
from zeroir.checkpoint.reading import CheckpointFiles, read_manifest, verify_all
from zeroir.checkpoint.safetensors_header import StoredTensorSpec
from zeroir.checkpoint.storage import join
from zeroir.checkpoint.storages import open_storage
from zeroir.checkpoint.writing import write_file
from zeroir.errors import UserError

SPEC = StoredTensorSpec(name="weight", dtype="u8", numel=4)
FILE = [(SPEC, [memoryview(b"abcd")])]


@pytest.fixture
def memory_root() -> Iterator[str]:
    yield "memory://bucket/runs"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["s3", "memory"])
def root(request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        bucket: str = request.getfixturevalue("s3_bucket")
        return f"{bucket}/runs/a"
    memory: str = request.getfixturevalue("memory_root")
    return memory


def test_a_checkpoint_goes_there_and_back(root: str) -> None:
    folder = CheckpointFolder(root=root)
    refused: list[UserError] = []
    with folder.lock() as held:
        paths = [held.next_path(step) for step in (1, 2)]
        manifests = [save_checkpoint(path, step=step) for step, path in enumerate(paths, 1)]
        again = folder.next_path(2)
        save_checkpoint(again, step=2)
        assert again == join(root, "step-00000002-2")
        assert [listed.path for listed in folder.list()] == [again, *reversed(paths)]
        for path, manifest in zip(paths, manifests, strict=True):
            assert read_manifest(path) == manifest
            verify_all(path, manifest)
        removed = held.retain(1, verified=again, refused=refused.append)
        assert (sorted(removed), refused) == (paths, [])
        assert [entry.name for entry in open_storage(root).entries(root)] == ["step-00000002-2"]


@pytest.mark.slow
def test_slices_are_read_by_ranges(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_storage, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(fsspec_storage, "RANGE_BYTES", 1 << 10)
    storage = open_storage(s3_bucket)
    assert isinstance(storage, FsspecStorage)
    data = bytes(range(256)) * (12 << 12)
    spec = StoredTensorSpec(name="weight", dtype="u8", numel=len(data))
    draft = begin(join(s3_bucket, "step-00000001"))
    parts = [memoryview(data)[start : start + (5 << 20)] for start in range(0, len(data), 5 << 20)]
    stored = write_file(storage, draft.folder, draft.file_name(0), [(spec, parts)])
    driver = fsspec.filesystem("s3", use_listings_cache=False)
    details = driver.info(join(draft.folder, stored.name))
    assert details["ETag"].endswith('-3"'), "the object was not sent in three parts"
    ranges: list[tuple[int, int]] = []
    fetch = storage.driver.cat_ranges

    def recorded(
        paths: list[str], starts: list[int], ends: list[int], *, on_error: str
    ) -> list[bytes]:
        ranges.extend(zip(starts, ends, strict=True))
        return fetch(paths, starts, ends, on_error=on_error)

    monkeypatch.setattr(storage.driver, "cat_ranges", recorded)
    file = storage.open(join(draft.folder, stored.name))
    buffer = memoryview(bytearray(10_000))
    header_bytes = stored.size_bytes - len(data)
    assert file.read_into(buffer, header_bytes + 5_000_000) == 10_000
    assert bytes(buffer) == data[5_000_000:5_010_000]
    assert sum(stop - start for start, stop in ranges) == 10_000
    assert file.read_into(buffer, stored.size_bytes - 3) == 3
    assert file.read_into(buffer, stored.size_bytes) == 0


def test_without_a_manifest_there_is_nothing(root: str) -> None:
    folder = CheckpointFolder(root=root)
    path = folder.next_path(7)
    draft = begin(path)
    write_file(open_storage(path), draft.folder, draft.file_name(0), FILE)
    assert folder.list() == ()
    assert folder.next_path(7) == path
    with pytest.raises(UserError, match="is not a checkpoint"):
        read_manifest(path)
    # The next save of this step takes the place, and removes what the first one left.
    manifest = save_checkpoint(path, step=7)
    verify_all(path, manifest)
    names = {entry.name for entry in open_storage(path).entries(path)}
    assert names == {"manifest.json", *(file.name for file in manifest.files)}


def test_of_two_jobs_at_one_path_one_wins(root: str) -> None:
    """Both write their files; the second to publish is refused, and takes nothing of the first with it."""
    path = join(root, "step-00000001")
    late = begin(path)
    storage = open_storage(path)
    write_file(storage, late.folder, late.file_name(0), FILE)
    first = save_checkpoint(path, step=1)
    with pytest.raises(UserError, match="a checkpoint never replaces anything"):
        storage.publish(late.folder, path, b"{}\n")
    late.abandon()
    verify_all(path, read_manifest(path))
    assert read_manifest(path) == first


def test_the_manifest_is_created_by_a_conditional_request(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look before it does not suffice: both of two jobs may look before either writes."""
    path = join(s3_bucket, "step-00000001")
    manifest = save_checkpoint(path, step=1)
    storage = open_store(path)
    monkeypatch.setattr(storage.driver, "exists", lambda _: False)
    with pytest.raises(UserError, match="a checkpoint never replaces anything"):
        storage.publish(path, path, b"{}\n")
    assert read_manifest(path) == manifest


@pytest.mark.parametrize("error", [NotImplementedError("no such mode"), TypeError("mode")])
def test_a_driver_without_exclusive_creation(
    memory_root: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write = MemoryFileSystem.pipe_file

    def plain(driver: MemoryFileSystem, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode != "overwrite":
            raise error
        write(driver, path, value)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", plain)
    path = join(memory_root, "step-00000001")
    first = save_checkpoint(path, step=1)
    with pytest.raises(UserError, match="a checkpoint never replaces anything"):
        open_storage(path).publish(path, path, b"{}\n")
    assert read_manifest(path) == first


def test_what_is_no_checkpoint_of_ours_is_neither_joined_nor_removed(root: str) -> None:
    driver = open_store(root).driver
    path = join(root, "step-00000001")
    save_checkpoint(path, step=1)
    notes = fsspec_storage._inner(join(path, "notes.txt"))
    driver.pipe_file(notes, b"mine")
    open_storage(root).remove(path)
    assert driver.exists(notes)
    assert CheckpointFolder(root=root).list() == ()
    with pytest.raises(UserError, match="it exists"):
        begin(path)


def test_leftovers_are_a_day_old(memory_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A younger file may belong to a job that is saving."""
    folder = CheckpointFolder(root=memory_root)
    for step in (1, 2):
        draft = begin(folder.next_path(step))
        for rank in range(2):
            write_file(open_storage(memory_root), draft.folder, draft.file_name(rank), FILE)
    save_checkpoint(folder.next_path(3), step=3)
    ages = {"step-00000001": timedelta(days=2), "step-00000003": timedelta(days=9)}

    def modified(driver: MemoryFileSystem, path: str) -> datetime:
        del driver
        name = path.split("/")[-2]
        # One of the second step's files is old, the other young.
        young = timedelta(hours=1) if "rank-00001" in path else timedelta(days=2)
        return datetime.now(UTC) - ages.get(name, young)

    monkeypatch.setattr(MemoryFileSystem, "modified", modified)
    with folder.lock():
        names = [entry.name for entry in open_storage(memory_root).entries(memory_root)]
    assert names == ["step-00000002", "step-00000003"]
    verify_all(folder.list()[0].path, read_manifest(folder.list()[0].path))


def test_a_whole_file_is_written_again(memory_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the parts can be iterated again; a generator's cannot."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    storage = open_storage(memory_root)
    failures: list[OSError] = [TimeoutError("slow"), ConnectionResetError("gone")]
    write = fsspec.implementations.memory.MemoryFile.write

    def failing(file: object, data: memoryview) -> int:
        if failures and data.nbytes == 4:
            raise failures.pop(0)
        return int(write(file, data))

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "write", failing, raising=False)
    stored = write_file(storage, memory_root, "a.safetensors", FILE)
    assert storage.size_bytes(join(memory_root, "a.safetensors")) == stored.size_bytes
    failures += [TimeoutError("slow"), TimeoutError("slow")]
    with pytest.raises(UserError, match="slow; check the network"):
        write_file(storage, memory_root, "b.safetensors", [(SPEC, iter([memoryview(b"abcd")]))])
    assert storage.size_bytes(join(memory_root, "b.safetensors")) is None
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.ENOSPC, "No space"), "(its disk is full|No space):"),
        (PermissionError("Access Denied"), r"the store refuses it \(Access Denied\)"),
        (NotImplementedError(), "name another store"),
        (TimeoutError(), "TimeoutError; check the network"),
        (OSError(errno.EINVAL, "The bucket\nis odd."), "The bucket is odd: check the URL"),
    ],
)
def test_a_store_that_fails_at_any_request_is_told_in_one_sentence(
    memory_root: str, monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    earlier = join(memory_root, "step-00000001")
    save_checkpoint(earlier, step=1)
    for method in ("ls", "info", "open", "pipe_file", "cat_file", "exists"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MemoryFileSystem, method, _raising(error))
            with pytest.raises(UserError) as refusal:
                save_checkpoint(join(memory_root, f"new-{method}"), step=2)
        assert re.search(sentence, str(refusal.value)), method
        assert "\n" not in str(refusal.value)
        # If the manifest cannot be read back, the checkpoint may be there.
        assert ("It is not known" in str(refusal.value)) == (method == "cat_file")
    for listed in CheckpointFolder(root=memory_root).list():
        verify_all(listed.path, read_manifest(listed.path))
    assert read_manifest(earlier).step == 1


def _raising(error: Exception) -> object:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


def test_manifests_that_stay_are_said(memory_root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that keeps what is removed, as under a retention policy, keeps whole checkpoints."""
    path = join(memory_root, "step-00000001")
    manifest = save_checkpoint(path, step=1)
    monkeypatch.setattr(MemoryFileSystem, "rm_file", lambda *_: None)
    with pytest.raises(UserError, match=r"manifest\.json' cannot be removed: the store keeps it"):
        open_storage(path).remove(path)
    verify_all(path, manifest)


@pytest.mark.parametrize("removals", [0, 1, 2])
def test_a_removal_that_ends_early_leaves_a_whole_checkpoint_or_none(
    memory_root: str, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    path = join(memory_root, "step-00000001")
    save_checkpoint(path, step=1)
    remove = MemoryFileSystem.rm_file
    removed: list[str] = []

    def ending(driver: MemoryFileSystem, inner: str) -> None:
        if len(removed) == removals:
            raise PermissionError("Access Denied")
        remove(driver, inner)
        removed.append(inner)

    monkeypatch.setattr(MemoryFileSystem, "rm_file", ending)
    with pytest.raises(UserError, match="Access Denied"):
        open_storage(path).remove(path)
    listed = CheckpointFolder(root=memory_root).list()
    assert len(listed) == (removals == 0)
    for each in listed:
        verify_all(each.path, read_manifest(each.path))


def test_a_manifest_that_a_store_loses_is_missed(
    memory_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", lambda *_, **__: None)
    with pytest.raises(UserError, match="was written and is not there"):
        save_checkpoint(join(memory_root, "step-00000001"), step=1)


def test_a_truncated_and_a_foreign_object_are_named(root: str) -> None:
    path = join(root, "step-00000001")
    manifest = save_checkpoint(path, step=1)
    driver = open_store(root).driver
    victim = manifest.files[1].name
    inner = fsspec_storage._inner(join(path, victim))
    whole = driver.cat_file(inner)
    for bad, problem in ((whole[:-1], "bytes instead of"), (whole[:-1] + b"?", "checksum")):
        driver.rm_file(inner)
        driver.pipe_file(inner, bad)
        with pytest.raises(UserError, match=problem) as refusal:
            verify_all(path, manifest)
        assert victim in str(refusal.value)
    driver.rm_file(inner)
    with (
        pytest.raises(UserError, match="missing"),
        CheckpointFiles(path=path, manifest=manifest) as files,
    ):
        files.bytes(victim, "flat.master", 0, 1)


def test_a_missing_bucket(s3_environment: Mapping[str, str]) -> None:
    """Nothing creates one: the name may be a slip of the pen."""
    del s3_environment
    root = "s3://no-such-bucket/runs"
    with pytest.raises(UserError, match="bucket does not exist: create the bucket"):
        CheckpointFolder(root=root).lock().__enter__()
    with pytest.raises(UserError, match="bucket does not exist: create the bucket"):
        save_checkpoint(join(root, "step-00000001"), step=1)
    with pytest.raises(UserError, match="is not a checkpoint"):
        read_manifest(join(root, "step-00000001"))
    assert not fsspec.filesystem("s3", use_listings_cache=False).exists("no-such-bucket")


def test_missing_credentials(
    s3_environment: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert name in s3_environment
        monkeypatch.delenv(name)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        with pytest.raises(UserError, match=r"give the credentials .* AWS_ACCESS_KEY_ID"):
            save_checkpoint("s3://bucket/step-00000001", step=1)
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_a_driver_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsspec.core.url_to_fs", _raising(ImportError("Install s3fs to access S3")))
    with pytest.raises(UserError, match=r"Install s3fs to access S3\): run 'pip install s3fs'"):
        open_store("s3://bucket/x")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nope://bucket/x", "Protocol not known: nope"),
        ("simplecache::s3://bucket/x", "chains several file systems"),
        ("file:///tmp/x", "name it without 'file://'"),
    ],
)
def test_urls_that_name_no_store(url: str, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        open_storage(url)
    assert sentence in str(refusal.value)
