"""Compiled segments on disk: a folder per key, written atomically, and locks between processes.

A key is a hash of everything that the compiled code depends on. An entry lists its files with their hashes, so that a
truncated or damaged one is compiled again.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from filelock import FileLock, Timeout

from zeroir import __version__
from zeroir.ir.segments.bindings import Binding
from zeroir.ir.segments.segment import Segment
from zeroir.runtime.device.driver import driver
from zeroir.runtime.kernels.graph import kernel_dims

FORMAT: Final = 4
"""The version of the entries' contents and of how they are compiled."""

_MANIFEST: Final = "entry.json"


def kernel_key(
    segment: Segment, bindings: Sequence[Binding | None], device: torch.device, threads: int
) -> str:
    """Return the SHA-256 of everything that a segment's compiled code depends on; ``threads`` run its loops."""
    parts = (
        FORMAT,
        __version__,
        torch.__version__,
        torch.version.git_version,
        _processor(device),
        threads if device.type == "cpu" else 0,
        segment.digest(),
        tuple(bindings),
        *((dim.name, dim.minimum, dim.maximum) for dim in kernel_dims(segment, bindings)),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def code_key(source: bytes, flags: Sequence[str]) -> str:
    """Return the SHA-256 of all that a library for this machine's CPU depends on, except the compiler's version."""
    parts = (FORMAT, source, tuple(flags), platform.system(), _processor(torch.device("cpu")))
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _processor(device: torch.device) -> tuple[object, ...]:
    """Return the processor whose instructions the code uses."""
    if device.type == "cuda":
        return driver().processor(device)
    return (device.type, platform.machine(), torch.backends.cpu.get_cpu_capability(), _cpu_flags())


def _cpu_flags() -> str:
    """Return the instruction sets of the CPU, because code is compiled for exactly this machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


class KernelCache:
    """The entries in one folder. Methods that write raise OSError where the folder is not writable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "kernels"

    def find(self, key: str) -> Path | None:
        """Return the folder of an entry, or None where it is missing, incomplete or damaged."""
        entry = self._folder / key
        try:
            manifest = json.loads((entry / _MANIFEST).read_bytes())
            files = manifest["files"]
            is_whole = bool(files) and all(_hash(entry / name) == files[name] for name in files)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return entry if is_whole else None

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """Yield a temporary folder beside the entries, to compile into."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix="draft-", dir=self._folder, ignore_cleanup_errors=True
        ) as name:
            # A folder inside the temporary one may be moved out of it.
            folder = Path(name) / "entry"
            folder.mkdir()
            yield folder

    def keep(self, key: str, draft: Path) -> Path:
        """Turn a draft into an entry; the caller holds the key's lock. A damaged entry of the key is replaced."""
        files = {path.name: _hash(path) for path in sorted(draft.iterdir())}
        (draft / _MANIFEST).write_text(json.dumps({"files": files}))
        entry = self._folder / key
        if entry.exists():
            shutil.rmtree(entry)
        draft.rename(entry)
        return entry

    @contextmanager
    def locked(self, key: str, *, wait: bool) -> Iterator[bool]:
        """Hold the key's lock in the block; without ``wait``, yield False where another process holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._folder / f"{key}.lock")
        try:
            lock.acquire(timeout=-1 if wait else 0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
