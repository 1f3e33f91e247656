"""Buffers on disk: every byte comes back, wherever a transfer begins and ends, with and without the page cache."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.faulty_disk import Kind, calls_of_the_system, trial
from tests.support.process_bytes import disk_bytes
from tools.fault_offload import draw
from zeroir.errors import UserError
from zeroir.runtime.disk.disk_buffers import DiskBuffers
from zeroir.runtime.disk.disk_rates import measure_disk
from zeroir.runtime.disk.requests import REQUEST_BYTES, Requests
from zeroir.runtime.disk.scratch_file import PAGE_BYTES, ScratchFile

SIZE_BYTES = 3 * REQUEST_BYTES
EDGES = (0, 1, 512, PAGE_BYTES - 1, PAGE_BYTES, 2 * PAGE_BYTES, REQUEST_BYTES, SIZE_BYTES)


def near_edges(most: int) -> st.SearchStrategy[int]:
    """Numbers up to ``most``, many of them near those where a transfer is cut."""
    near = st.builds(lambda edge, by: edge + by, st.sampled_from(EDGES), st.integers(-3, 3))
    return (near | st.integers(0, most)).filter(lambda number: 0 <= number <= most)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(near_edges(SIZE_BYTES))
    return start, draw(near_edges(SIZE_BYTES - start))


def memory(size_bytes: int, shift: int) -> torch.Tensor:
    """Memory that begins so many bytes behind a page."""
    octets = torch.empty(size_bytes + 2 * PAGE_BYTES, dtype=torch.uint8)
    start = -octets.data_ptr() % PAGE_BYTES + shift
    return octets[start : start + size_bytes]


@pytest.fixture(scope="module", params=["direct", "cached"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ScratchFile:
    made = ScratchFile(tmp_path_factory.mktemp("disk"), 0)
    if request.param == "cached":
        made.is_direct = False
        flags = fcntl.fcntl(made.descriptor, fcntl.F_GETFL)
        fcntl.fcntl(made.descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    elif not made.is_direct:
        pytest.skip("this file system has no direct reads and writes")
    made.reserve(SIZE_BYTES)
    return made


@pytest.mark.slow
@given(
    writes=st.lists(st.tuples(spans(), near_edges(PAGE_BYTES), st.integers(0, 255)), max_size=4),
    read=spans(),
    shift=near_edges(PAGE_BYTES),
)
@examples(40)
def test_what_is_written_is_read_wherever_it_stands(
    file: ScratchFile,
    writes: Sequence[tuple[tuple[int, int], int, int]],
    read: tuple[int, int],
    shift: int,
) -> None:
    requests = Requests(file)
    expected = torch.zeros(SIZE_BYTES, dtype=torch.uint8)
    requests.writing(0, expected, limit=SIZE_BYTES)()
    for (start, numel), own_shift, value in writes:
        source = memory(numel, own_shift).fill_(value)
        requests.writing(start, source, limit=start + numel)()
        expected[start : start + numel] = value
    start, numel = read
    target = memory(numel, shift)
    requests.reading(start, target)()
    assert torch.equal(target, expected[start : start + numel])


@given(sizes=st.lists(near_edges(3 * PAGE_BYTES), min_size=1, max_size=5))
@examples(20)
def test_buffers_begin_at_pages_as_zeros_and_end_in_none_of_another(sizes: Sequence[int]) -> None:
    disk = DiskBuffers(None, 0)
    disk.add({str(number): size for number, size in enumerate(sizes)})
    tensors = [torch.full((size,), 7, dtype=torch.uint8) for size in sizes]
    for number, tensor in enumerate(tensors):
        target = torch.ones_like(tensor)
        disk.reading(str(number), 0, target)()
        assert not target.any()
        disk.writing(str(number), 0, tensor)()
    for number, tensor in enumerate(tensors):
        target = torch.zeros_like(tensor)
        disk.reading(str(number), 0, target)()
        assert torch.equal(target, tensor)


def test_the_page_cache_is_left_out_and_every_byte_counted(tmp_path: Path) -> None:
    """Linux counts the bytes that a process reads from and writes to disks; copies in the page cache are none."""
    disk = DiskBuffers(tmp_path, 0)
    if not disk.is_direct:
        pytest.skip("this file system has no direct reads and writes")
    size_bytes = 4 * REQUEST_BYTES
    disk.add({"a": size_bytes})
    content = memory(size_bytes, 0).random_(255)
    before = disk_bytes()
    disk.writing("a", 0, content)()
    for _ in range(2):
        disk.reading("a", 0, content)()
    after = disk_bytes()
    assert [b - a for a, b in zip(before, after, strict=True)] == [2 * size_bytes, size_bytes]
    assert (disk.read_bytes, disk.written_bytes) == (2 * size_bytes, size_bytes)


@pytest.mark.slow
def test_parts_of_a_page_may_change_at_once(tmp_path: Path) -> None:
    """Two threads that write neighbouring elements do not undo what the other has written."""
    disk = DiskBuffers(tmp_path, 0)
    disk.add({"a": PAGE_BYTES})
    parts = [torch.full((512,), number, dtype=torch.uint8) for number in range(8)]
    writes = [disk.writing("a", 512 * number, part) for number, part in enumerate(parts)]
    for _ in range(20):
        disk.writing("a", 0, torch.full((PAGE_BYTES,), 255, dtype=torch.uint8))()
        threads = [ThreadPool(1) for _ in writes]
        for pool, write in zip(threads, writes, strict=True):
            pool.apply_async(write)
        for pool in threads:
            pool.close()
            pool.join()
        found = torch.empty(PAGE_BYTES, dtype=torch.uint8)
        disk.reading("a", 0, found)()
        assert torch.equal(found, torch.cat(parts))


# -------------------------------------------------------------------------------------------------- a disk that fails


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EIO, "its disk fails (Input/output error)"),
        (errno.ENOSPC, "its disk is full"),
        (errno.ESTALE, "its server has forgotten the file"),
        (errno.EINVAL, "Invalid argument"),
    ],
)
@pytest.mark.parametrize("size_bytes", [PAGE_BYTES, 3 * REQUEST_BYTES])
def test_a_failure_is_one_sentence_once_no_request_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str, size_bytes: int
) -> None:
    disk = DiskBuffers(tmp_path, 2)
    disk.add({"a": size_bytes})
    under_way = 0

    def fail(*_: object) -> int:
        nonlocal under_way
        under_way += 1
        time.sleep(0.01)
        under_way -= 1
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(os, "pwritev", fail)
    memory = torch.zeros(size_bytes, dtype=torch.uint8)
    for transfer, verb in ((disk.reading, "read"), (disk.writing, "write")):
        with pytest.raises(UserError) as caught:
            transfer("a", 0, memory)()
        assert under_way == 0
        sentence = f"Rank 2 cannot {verb} its buffers on disk in '{tmp_path}': {remedy}"
        assert str(caught.value).startswith(sentence)


def test_a_disk_that_gives_and_takes_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskBuffers(tmp_path, 0)
    disk.add({"a": PAGE_BYTES})
    memory = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(UserError, match="the file has become shorter"):
        disk.reading("a", 0, memory)()
    with pytest.raises(UserError, match="the disk takes no further bytes"):
        disk.writing("a", 0, memory)()


# ------------------------------------------------------------------------------------------------------- the folder


@pytest.fixture(params=["unnamed", "named"])
def naming(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems with files without names, and without."""
    if request.param == "unnamed":
        return
    intended = os.open

    def without(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return intended(path, flags, mode)

    monkeypatch.setattr(os, "open", without)


@pytest.mark.slow
@pytest.mark.usefixtures("naming")
def test_nothing_is_in_the_folder_and_its_space_returns(tmp_path: Path) -> None:
    size_bytes = 64 << 20
    disk = DiskBuffers(tmp_path, 0)
    disk.add({"a": size_bytes})
    taken = os.fstat(disk._file.descriptor).st_blocks * 512
    assert taken >= size_bytes
    assert list(tmp_path.iterdir()) == []
    descriptor = disk._file.descriptor
    del disk
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.usefixtures("naming")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("absent", "it does not exist"),
        ("file", "it is not a folder"),
        ("x" * 300, "the name is too long"),
    ],
    ids=["absent", "file", "long"],
)
def test_a_folder_that_takes_no_file(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^Rank 3 cannot keep its buffers .*{sentence}"):
        DiskBuffers(tmp_path / name, 3)


def test_the_rates_of_a_disk_are_positive(tmp_path: Path) -> None:
    meetings = 0

    def meet() -> None:
        nonlocal meetings
        meetings += 1

    rates = measure_disk(tmp_path, 0, meet, size_bytes=REQUEST_BYTES)
    assert min(rates.read_bytes_per_s, rates.write_bytes_per_s, rates.both_bytes_per_s) > 0
    assert 0 < rates.request_s < 1
    assert meetings > 4
    assert list(tmp_path.iterdir()) == []


# ---- Disks that fail under a training run: one clear sentence, no hang, no file left, and whole checkpoints


FAULTS = 12
"""One of each kind for each seed; ``tools/fault_offload.py`` tries more."""


@pytest.mark.slow
def test_a_call_that_goes_wrong(tmp_path: Path) -> None:
    calls, expected = calls_of_the_system(tmp_path / "undisturbed")
    faults = [fault for seed in range(2) for fault in draw(calls, FAULTS, seed)]
    assert {fault.kind for fault in faults} == set(Kind)
    for number, fault in enumerate(faults):
        outcome = trial(tmp_path / str(number), fault, expected)
        assert outcome.problems == (), (fault, calls[fault.call], outcome)
        is_transfer = calls[fault.call] in ("read", "write")
        if fault.kind in (Kind.HALF, Kind.ONE):
            assert outcome.ended == "finished"
        if fault.kind in (Kind.EIO, Kind.ENOSPC, Kind.OUTAGE) and is_transfer:
            assert outcome.ended == "refused"


_OPEN = """
import sys
from pathlib import Path
from zeroir.errors import UserError
from zeroir.runtime.disk.disk_buffers import DiskBuffers
try:
    DiskBuffers(Path(sys.argv[1]), 0).add({"a": 8 << 20})
except UserError as error:
    print(error)
"""


def refusal(folder: Path, *before: str, limit_bytes: int | None = None) -> str:
    """What 8 MiB on disk are refused with."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    command = [*before, sys.executable, "-c", _OPEN, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limit)
    return done.stdout.strip()


@pytest.mark.slow
def test_a_full_disk_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """A disk of 1 MB in memory, which only this process and its children see."""
    mount = f"mount -t tmpfs -o size=1M none {tmp_path} && exec "
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", f'{mount} "$@"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("this user may not mount anything")
    assert "is full (8.39 MB are needed, 1.05 MB are free)" in refusal(tmp_path, *inside)


@pytest.mark.slow
def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    sentence = refusal(tmp_path, limit_bytes=1 << 20)
    assert "the file is larger than its file system or your limits allow" in sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    as_nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if shutil.which("setpriv") is None:
        pytest.skip("no program here becomes another user")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    assert "you may not write there" in refusal(tmp_path, *as_nobody)
