"""Checkpoints in stores that fsspec opens: ``s3://bucket/runs``, ``gs://…``, ``memory://…``.

A store has no rename. The files of a checkpoint are written under its own name, each with the writer's token in its
name, so that no two jobs write to one object. The manifest comes last. It is created only if there is none, where the
store can promise that, and read back. Readers find a checkpoint by its manifest; without one there is nothing to see.
Removing goes the other way round: the manifest first.

A request that fails may still have had its effect, or have it later. Whoever has sent a manifest therefore never
removes the files that it names; they are left to ``leftovers``, which waits a day.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

import fsspec
from fsspec.spec import AbstractBufferedFile

from zeroir.checkpoint.manifest import MANIFEST_NAME
from zeroir.checkpoint.storage import CHECKPOINT_NAME, Entry, join
from zeroir.checkpoint.store_errors import Access, attempt, failure
from zeroir.errors import UserError

PART_BYTES = 32 << 20
"""The size of the parts of an upload. S3 takes 10,000 of them: files of up to 312 GiB for each rank."""

RANGE_BYTES: Final = 8 << 20
RANGES: Final = 4
"""Slices are read as ranges of so many bytes, so many at a time where the driver can."""

LEFTOVER_AGE: Final = timedelta(days=1)
"""Files without a manifest belong to a job that is still saving, until nothing was added to them for so long."""

_PROBE_NAME: Final = ".writable"
_RANK_FILE: Final = re.compile(r".+-(?P<token>[0-9a-f]{12})\.safetensors")


class Writable(Protocol):
    """What fsspec opens for writing."""

    def write(self, data: memoryview, /) -> int:
        """Append bytes."""

    def close(self) -> None:
        """Send the rest."""


class Driver(Protocol):
    """A file system of fsspec, in so far as it is used here; see ``fsspec.spec.AbstractFileSystem``."""

    def ls(self, path: str, detail: bool) -> list[dict[str, object]]:
        """Names, types and sizes in a folder."""

    def info(self, path: str) -> dict[str, object]:
        """The type and size of a path."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or a folder."""

    def modified(self, path: str) -> datetime:
        """When a file was written."""

    def open(self, path: str, mode: str, block_size: int) -> Writable:
        """Open a file."""

    def pipe_file(self, path: str, value: bytes, mode: str = ...) -> None:
        """Write a whole file; with the mode ``create`` only if there is none."""

    def cat_file(self, path: str) -> bytes:
        """A whole file."""

    def cat_ranges(
        self, paths: list[str], starts: list[int], ends: list[int], *, on_error: str
    ) -> list[bytes]:
        """Ranges of files, several at a time where the driver can."""

    def rm_file(self, path: str) -> None:
        """Remove a file."""

    def makedirs(self, path: str, exist_ok: bool) -> None:
        """Make a folder and those above it."""


@dataclass(slots=True, kw_only=True)
class StoreOutput:
    """An object while it is written; it appears when it is finished. Large ones are sent in parts."""

    path: str
    driver: Driver
    file: Writable | None

    def write(self, data: memoryview) -> None:
        """Append bytes; some are kept in memory until a part is full.

        Raises:
            UserError: if a part cannot be sent.
        """
        try:
            self._open().write(data.cast("B") if data.nbytes else data)
        except Exception as error:
            raise failure(self.path, Access.WRITE, error) from error

    def finish(self) -> None:
        """Send the rest, and let the object appear.

        Raises:
            UserError: if the store refuses it.
        """
        try:
            self._open().close()
        except Exception as error:
            raise failure(self.path, Access.WRITE, error) from error
        self.file = None

    def abandon(self) -> None:
        """Drop what was sent, unless the object is finished."""
        file, self.file = self.file, None
        if file is None:
            return
        if isinstance(file, AbstractBufferedFile):
            # Otherwise its destructor would send the rest, and let half an object appear.
            file.closed = True
        drop = file.discard if isinstance(file, AbstractBufferedFile) else file.close
        with contextlib.suppress(Exception):
            drop()
        with contextlib.suppress(Exception):
            self.driver.rm_file(_inner(self.path))

    def _open(self) -> Writable:
        if self.file is None:
            raise ValueError(f"'{self.path}' is closed")
        return self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreInput:
    """An object while it is read, by ranges."""

    path: str
    driver: Driver
    size_bytes: int

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer of bytes; fewer are read only at the object's end.

        Raises:
            UserError: if the store fails, or sends other ranges than those asked for.
        """
        stop = min(offset + buffer.nbytes, self.size_bytes)
        for start in range(offset, stop, RANGE_BYTES * RANGES):
            self._read_ranges(buffer, offset, start, min(start + RANGE_BYTES * RANGES, stop))
        return max(stop - offset, 0)

    def close(self) -> None:
        """Nothing is open between two reads."""

    def _read_ranges(self, buffer: memoryview, offset: int, start: int, stop: int) -> None:
        starts = list(range(start, stop, RANGE_BYTES))
        stops = [min(begin + RANGE_BYTES, stop) for begin in starts]
        inner = _inner(self.path)

        def fetched() -> list[bytes]:
            parts = self.driver.cat_ranges([inner] * len(starts), starts, stops, on_error="raise")
            if [len(part) for part in parts] != [
                end - begin for begin, end in zip(starts, stops, strict=True)
            ]:
                raise OSError("the store sent other ranges than those asked for")
            return parts

        try:
            parts = attempt(fetched, self.path, Access.READ)
        except (FileNotFoundError, FileExistsError) as error:
            raise failure(self.path, Access.READ, error) from error
        for begin, end, part in zip(starts, stops, parts, strict=True):
            buffer[begin - offset : end - offset] = part


class StoreHold:
    """Nothing holds a prefix of a store."""

    def require(self) -> None:
        """Do nothing: a prefix is neither renamed nor replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsspecStorage:
    """A store, by the driver that fsspec has for its URLs."""

    driver: Driver

    def entries(self, folder: str) -> tuple[Entry, ...]:
        """What stands under a prefix, in the order of names; nothing if there is no such prefix."""
        inner = _inner(folder)
        try:
            details = attempt(lambda: self.driver.ls(inner, detail=True), folder, Access.READ)
        except FileNotFoundError:
            return ()
        entries = []
        for detail in details:
            path = str(detail["name"]).rstrip("/")
            parent, _, name = path.rpartition("/")
            # A store lists an object of the very name of a prefix as that prefix's entry.
            if name and parent.strip("/") == inner.strip("/"):
                entries.append(Entry(name=name, is_folder=detail["type"] == "directory"))
        return tuple(sorted(entries, key=lambda entry: entry.name))

    def size_bytes(self, path: str) -> int | None:
        """The size of an object; None if there is no such object."""
        inner = _inner(path)
        try:
            details = attempt(lambda: self.driver.info(inner), path, Access.READ)
        except FileNotFoundError:
            return None
        return int(str(details["size"])) if details["type"] == "file" else None

    def create(self, path: str) -> StoreOutput:
        """Begin an object whose name no other job uses."""
        inner = _inner(path)
        try:
            file = attempt(
                lambda: self.driver.open(inner, "wb", block_size=PART_BYTES), path, Access.WRITE
            )
        except (FileNotFoundError, FileExistsError) as error:
            raise failure(path, Access.WRITE, error) from error
        return StoreOutput(path=path, driver=self.driver, file=file)

    def open(self, path: str, *, from_disk: bool = False) -> StoreInput:
        """Open an object for reading; nothing of it is kept in memory."""
        del from_disk
        size_bytes = self.size_bytes(path)
        if size_bytes is None:
            raise UserError(f"'{path}' does not exist: name a folder that contains a checkpoint.")
        return StoreInput(path=path, driver=self.driver, size_bytes=size_bytes)

    def begin(self, target: str, token: str) -> str:
        """The target itself, where there may be files that killed jobs left, and nothing else."""
        del token
        strangers = [
            entry.name
            for entry in self.entries(target)
            if entry.is_folder or not _RANK_FILE.fullmatch(entry.name)
        ]
        if strangers or self.size_bytes(target) is not None:
            raise _exists(target)
        self._make_folders(target)
        return target

    def file_name(self, rank: int, token: str) -> str:
        """``rank-00000-TOKEN.safetensors`` and so on."""
        return f"rank-{rank:05}-{token}.safetensors"

    def publish(self, folder: str, target: str, manifest: bytes) -> None:
        """Create the manifest unless there is one, and read it back: the checkpoint appears if it is ours.

        Raises:
            UserError: if another job's checkpoint is there, or it is not certain that this one has appeared.
        """
        del folder
        path = join(target, MANIFEST_NAME)
        refusal = None
        try:
            self._create_whole(path, manifest)
        except UserError as error:
            refusal = error
        # An attempt that failed may have had its effect, and one that succeeded must have had it.
        try:
            stored = self._content(path)
        except UserError as error:
            raise UserError(
                f"{refusal or error} It is not known whether the checkpoint '{target}' has appeared."
            ) from error
        if stored == manifest:
            with contextlib.suppress(UserError):
                self._remove_files(target, sparing=manifest)
        elif stored is not None:
            raise _exists(target)
        else:
            raise refusal or UserError(
                f"'{path}' was written and is not there: save to another store."
            )

    def has_appeared(self, folder: str) -> bool:
        """Whether there is a manifest."""
        return self.size_bytes(join(folder, MANIFEST_NAME)) is not None

    def discard(self, folder: str, token: str, *, was_sent: bool) -> None:
        """Remove the files with a token, unless a manifest that names them may yet appear."""
        if was_sent:
            return
        for entry in self.entries(folder):
            match = _RANK_FILE.fullmatch(entry.name)
            if match is not None and match["token"] == token:
                self._remove_object(join(folder, entry.name))

    def remove(self, folder: str) -> None:
        """Remove the manifest, then the files; what is not a checkpoint's stays.

        Raises:
            UserError: if the store refuses it; while the manifest is there, all files are.
        """
        manifest = join(folder, MANIFEST_NAME)
        self._remove_object(manifest)
        if self.size_bytes(manifest) is not None:
            raise UserError(f"'{manifest}' cannot be removed: the store keeps it.")
        self._remove_files(folder, sparing=b"")

    def leftovers(self, root: str) -> tuple[str, ...]:
        """Prefixes without a manifest, under which are only files of ranks, the newest at least a day old."""
        return tuple(
            folder
            for entry in self.entries(root)
            if entry.is_folder
            and CHECKPOINT_NAME.fullmatch(entry.name)
            and self._is_leftover(folder := join(root, entry.name))
        )

    @contextlib.contextmanager
    def lock(self, root: str) -> Iterator[StoreHold]:
        """Write and remove an object, so that a store that refuses is found before it is needed.

        A store has no lock that ends with its holder. Two jobs may save to one prefix without harming a checkpoint,
        but each counts those of both when it removes old ones.
        """
        path = join(root, _PROBE_NAME)
        inner = _inner(path)
        self._make_folders(root)
        try:
            attempt(lambda: self.driver.pipe_file(inner, b"zeroir\n"), path, Access.WRITE)
        except (FileNotFoundError, FileExistsError) as error:
            raise failure(path, Access.WRITE, error) from error
        with contextlib.suppress(UserError):
            self._remove_object(path)
        yield StoreHold()

    def _make_folders(self, folder: str) -> None:
        """Make folders where the driver has some. Those of buckets have none, and would make a bucket."""
        if folder.partition("://")[0] in _WITH_FOLDERS:
            inner = _inner(folder)
            attempt(lambda: self.driver.makedirs(inner, exist_ok=True), folder, Access.WRITE)

    def _create_whole(self, path: str, data: bytes) -> None:
        """Create an object unless there is one, by one request where the driver can."""
        inner = _inner(path)

        def put() -> None:
            # Drivers may ignore or not know the mode: those get what they can promise, a look before.
            if self.driver.exists(inner):
                return
            try:
                self.driver.pipe_file(inner, data, mode="create")
            except (NotImplementedError, TypeError):
                self.driver.pipe_file(inner, data)

        try:
            with contextlib.suppress(FileExistsError):
                attempt(put, path, Access.WRITE)
        except FileNotFoundError as error:
            raise failure(path, Access.WRITE, error) from error

    def _content(self, path: str) -> bytes | None:
        """The bytes of a small object; None if there is no such object."""
        inner = _inner(path)
        try:
            return attempt(lambda: self.driver.cat_file(inner), path, Access.READ)
        except FileNotFoundError:
            return None

    def _remove_object(self, path: str) -> None:
        """Remove an object, if it is there.

        Raises:
            UserError: if the store refuses it.
        """
        inner = _inner(path)
        with contextlib.suppress(FileNotFoundError):
            attempt(lambda: self.driver.rm_file(inner), path, Access.WRITE)

    def _remove_files(self, folder: str, *, sparing: bytes) -> None:
        """Remove the files of ranks that a manifest does not name: those of jobs that did not finish."""
        for entry in self.entries(folder):
            if _RANK_FILE.fullmatch(entry.name) and entry.name.encode() not in sparing:
                self._remove_object(join(folder, entry.name))

    def _is_leftover(self, folder: str) -> bool:
        entries = self.entries(folder)
        if not entries or not all(
            _RANK_FILE.fullmatch(entry.name) and not entry.is_folder for entry in entries
        ):
            return False
        oldest = datetime.now(UTC) - LEFTOVER_AGE
        try:
            return all(self._modified(join(folder, entry.name)) < oldest for entry in entries)
        except (FileNotFoundError, NotImplementedError, UserError):
            # Another job finishes or cleans there, or the store keeps no times.
            return False

    def _modified(self, path: str) -> datetime:
        inner = _inner(path)
        time = attempt(lambda: self.driver.modified(inner), path, Access.READ)
        return time if time.tzinfo else time.replace(tzinfo=UTC)


def open_store(url: str) -> FsspecStorage:
    """The storage of a URL.

    Credentials and endpoints come from where the driver looks for them, and from fsspec's own configuration
    (``FSSPEC_S3_ENDPOINT_URL`` and such, or files in ``~/.config/fsspec``).

    Raises:
        UserError: if fsspec has no driver for it, or the driver is not installed.
    """
    scheme = url.partition("://")[0]
    if "::" in url:
        raise UserError(f"'{url}' chains several file systems: name one, such as s3://bucket/runs.")
    if scheme in ("file", "local"):
        raise UserError(f"'{url}' is a folder of this machine: name it without '{scheme}://'.")
    try:
        # Other processes write to the store, so what was listed once says nothing.
        driver = fsspec.core.url_to_fs(url, use_listings_cache=False)[0]
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        remedy = f"run 'pip install {package}'" if package else "install it"
        raise UserError(f"'{url}' needs a driver of fsspec ({error}): {remedy}.") from error
    except Exception as error:
        raise UserError(
            f"'{url}' cannot be opened: {' '.join(str(error).split())}; name another store."
        ) from error
    return FsspecStorage(driver=driver)


_PACKAGES: Final = {
    "abfs": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "s3": "s3fs",
    "s3a": "s3fs",
    "sftp": "paramiko",
    "ssh": "paramiko",
}
"""The packages that have the drivers of common schemes."""

_WITH_FOLDERS: Final = frozenset(
    {"arrow_hdfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav", "webhdfs"}
)
"""Schemes of file systems in which a file needs a folder."""


def _inner(url: str) -> str:
    """The path of a URL inside its store, as its driver wants it."""
    inner: str = fsspec.get_filesystem_class(url.partition("://")[0])._strip_protocol(url)
    return inner


def _exists(target: str) -> UserError:
    return UserError(
        f"'{target}' cannot be written: it exists, and a checkpoint never replaces anything: name another path."
    )
