"""The recorder misses nothing, and the disk forgets whatever was not synchronised."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tools.checkpoints import recorder
from tools.checkpoints.forgetful_disk import ForgetfulDisk, Loss

pytestmark = pytest.mark.skipif(not recorder.has_compiler(), reason="no C compiler here")

PRELUDE = """
import errno, os, shutil, sys, threading
from pathlib import Path
from tools.checkpoints.recorder import Recorder
root, log = Path(sys.argv[1]), Path(sys.argv[2])
recorder = Recorder()
recorder.start(root, log)
os.chdir(root)

def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)

def write(path, content):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorder.build(tmp_path_factory.mktemp("recorder"))


def recorded(library: Path, folder: Path, script: str) -> tuple[Path, list[recorder.FileOperation]]:
    """What a script did below the folder, and its log."""
    root, log = folder / "root", folder / "log"
    root.mkdir()
    made = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(root), str(log)],
        env={
            **os.environ,
            "LD_PRELOAD": str(library),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return root, list(recorder.read_log(log))


def tree(folder: Path) -> dict[str, bytes | None]:
    """The paths below a folder with the contents of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def cut(
    root: Path, operations: list[recorder.FileOperation], target: Path, loss: Loss, seed: int = 0
) -> dict[str, bytes | None]:
    """The paths after all operations and a power cut."""
    disk = ForgetfulDisk(root)
    for operation in operations:
        disk.apply(operation)
    target.mkdir()
    disk.cut(target, loss, Random(seed))
    return tree(target)


def test_the_log_of_many_operations_gives_the_same_folder(library: Path, tmp_path: Path) -> None:
    script = """
os.makedirs("a/b/c")
write("a/one", b"1" * 100_000)
with open("a/two", "wb", buffering=0) as file:
    file.write(b"second")
    file.seek(20)
    file.write(b"far")
    file.truncate(21)
with open("a/two", "ab") as file:
    file.write(b"appended")
Path("a/three").write_text("replaced")
Path("a/three").write_text("3")
os.replace("a/three", "a/b/four")
fd = os.open("a/b", os.O_RDONLY)
os.mkdir("inner", dir_fd=fd)
with open(os.open("inner/five", os.O_WRONLY | os.O_CREAT, dir_fd=fd), "wb") as file:
    file.writelines([b"5", b"five"])
os.pwrite(os.open("a/b/six", os.O_WRONLY | os.O_CREAT), b"six", 3)
os.writev(os.open("a/b/seven", os.O_WRONLY | os.O_CREAT), [b"se", b"ven"])
os.link("a/one", "a/b/also one")
os.rename("a/b", "moved")
os.makedirs("doomed/too")
Path("doomed/too/file").write_text("gone")
shutil.rmtree("doomed")
threads = [threading.Thread(target=write, args=(f"t{i}", bytes([i]) * 10_000)) for i in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
(root.parent / "elsewhere").write_text("not recorded")
recorder.mark("the end")
"""
    root, operations = recorded(library, tmp_path, script)
    disk = ForgetfulDisk(root)
    for operation in operations:
        disk.apply(operation)
    (tmp_path / "copy").mkdir()
    disk.write(tmp_path / "copy")
    assert tree(tmp_path / "copy") == tree(root)
    assert operations[-1].path == "the end"


GOOD = """
os.mkdir(".aside")
write(".aside/file", b"content")
sync(".aside")
os.rename(".aside", "whole")
sync(".")
"""


def test_what_was_synchronised_stays(library: Path, tmp_path: Path) -> None:
    root, operations = recorded(library, tmp_path, GOOD)
    for number, loss in enumerate([*Loss, *[Loss.RANDOM] * 20]):
        left = cut(root, operations, tmp_path / str(number), loss, seed=number)
        assert left == {"whole": None, "whole/file": b"content"}


def test_what_was_not_synchronised_may_be_lost(library: Path, tmp_path: Path) -> None:
    """Each missing call loses a file, its bytes, or a name."""
    for number, (missing, loss, expected) in enumerate(
        [
            ("os.fsync(file.fileno())", Loss.ALL, {"whole": None, "whole/file": b""}),
            ("os.fsync(file.fileno())", Loss.DATA, {"whole": None, "whole/file": b""}),
            ('sync(".aside")', Loss.ALL, {"whole": None}),
            ('sync(".")', Loss.FOLDERS, {}),
        ]
    ):
        script = PRELUDE + GOOD
        assert missing in script
        script = script.replace(missing, "pass")
        (tmp_path / str(number)).mkdir()
        root, operations = recorded(library, tmp_path / str(number), script)
        assert cut(root, operations, tmp_path / str(number) / "cut", loss) == expected


def test_a_cut_may_leave_any_part(library: Path, tmp_path: Path) -> None:
    script = """
for number in range(4):
    with open(f"{number}", "wb", buffering=0) as file:
        file.write(b"first")
        file.write(b"second")
"""
    root, operations = recorded(library, tmp_path, script)
    states = [cut(root, operations, tmp_path / str(seed), Loss.RANDOM, seed) for seed in range(60)]
    assert len({len(state) for state in states}) >= 4
    contents = {content for state in states for content in state.values()}
    assert contents == {b"", b"first", b"\0\0\0\0\0second", b"firstsecond"}


def test_a_chosen_operation_fails(library: Path, tmp_path: Path) -> None:
    script = """
recorder.fail(1, errno.EACCES)
os.mkdir("zero")
try:
    os.mkdir("one")
except PermissionError:
    os.mkdir("two")
recorder.fail(0, errno.ENOSPC)
file = open("full", "wb", buffering=0)
"""
    with pytest.raises(AssertionError, match="No space left"):
        recorded(library, tmp_path, script)
    assert sorted(tree(tmp_path / "root")) == ["two", "zero"]


def test_a_disk_fills_up_in_the_middle_of_a_write(library: Path, tmp_path: Path) -> None:
    script = """
with open("full", "wb", buffering=0) as file:
    recorder.fail(0, errno.ENOSPC)
    assert file.write(b"12345678") == 4
    for call in (lambda: file.write(b"5"), lambda: os.mkdir("more")):
        try:
            call()
        except OSError as error:
            assert error.errno == errno.ENOSPC
        else:
            raise AssertionError
os.unlink("full")
assert recorder.count() == 4, recorder.count()
recorder.fail(-1, 0)
os.mkdir("more")
"""
    root, _ = recorded(library, tmp_path, script)
    assert tree(root) == {"more": None}
