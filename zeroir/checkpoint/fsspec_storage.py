"""Checkpoints in object stores that fsspec opens: ``s3://bucket/runs``, ``gs://…``, ``memory://…``.

An object store has no rename. The files of a checkpoint are written to its final prefix, each with the writer's token
in its name, so that no two jobs write to one object. The manifest is written last. It is created only if there is none,
where the store can guarantee that, and read back. A checkpoint is visible to readers once it has a manifest. Removal
begins with the manifest.

A request that fails may have taken effect, or may take effect later. So a job that has sent a manifest never removes
the files that it names; they are left to ``leftovers``, which waits a day.
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
"""The part size of uploads. S3 allows 10,000 parts, so a rank's file may have 312 GiB."""

RANGE_BYTES: Final = 8 << 20
RANGES: Final = 4
"""How many ranges of ``RANGE_BYTES`` are read at a time, where the driver can."""

LEFTOVER_AGE: Final = timedelta(days=1)
"""The age of the newest file from which files without a manifest are leftovers; before, a job may still be saving."""

_PROBE_NAME: Final = ".writable"
_RANK_FILE: Final = re.compile(r".+-(?P<token>[0-9a-f]{12})\.safetensors")


class Writable(Protocol):
    """A file that fsspec has opened for writing."""

    def write(self, data: memoryview, /) -> int:
        """Append bytes."""

    def close(self) -> None:
        """Upload the rest."""


class Driver(Protocol):
    """The methods of ``fsspec.spec.AbstractFileSystem`` that are used here."""

    def ls(self, path: str, detail: bool) -> list[dict[str, object]]:
        """Return names, types and sizes in a folder."""

    def info(self, path: str) -> dict[str, object]:
        """Return the type and size of a path."""

    def exists(self, path: str) -> bool:
        """Return whether there is a file or a folder."""

    def modified(self, path: str) -> datetime:
        """Return the time when a file was written."""

    def open(self, path: str, mode: str, block_size: int) -> Writable:
        """Open a file."""

    def pipe_file(self, path: str, value: bytes, mode: str = ...) -> None:
        """Write a whole file; with ``mode="create"`` only if there is none."""

    def cat_file(self, path: str) -> bytes:
        """Return the content of a file."""

    def cat_ranges(
        self, paths: list[str], starts: list[int], ends: list[int], *, on_error: str
    ) -> list[bytes]:
        """Read ranges of files, several at a time where the driver can."""

    def rm_file(self, path: str) -> None:
        """Remove a file."""

    def makedirs(self, path: str, exist_ok: bool) -> None:
        """Make a folder and those above it."""


@dataclass(slots=True, kw_only=True)
class StoreOutput:
    """An object that is being written; it appears when it is finished. Large ones are uploaded in parts."""

    path: str
    driver: Driver
    file: Writable | None

    def write(self, data: memoryview) -> None:
        """Append bytes, and upload a part whenever one is complete.

        Raises:
            UserError: if a part cannot be uploaded.
        """
        try:
            self._open().write(data.cast("B") if data.nbytes else data)
        except Exception as error:
            raise failure(self.path, Access.WRITE, error) from error

    def finish(self) -> None:
        """Upload the rest, after which the object is visible.

        Raises:
            UserError: if the store refuses it.
        """
        try:
            self._open().close()
        except Exception as error:
            raise failure(self.path, Access.WRITE, error) from error
        self.file = None

    def abandon(self) -> None:
        """Discard what was uploaded, unless the object is finished."""
        file, self.file = self.file, None
        if file is None:
            return
        if isinstance(file, AbstractBufferedFile):
            # Otherwise its destructor would upload the rest, and a truncated object would appear.
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
    """An object that is read by ranges."""

    path: str
    driver: Driver
    size_bytes: int

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fill a buffer; fewer bytes are read only at the object's end.

        Raises:
            UserError: if the store fails, or returns other ranges than the requested ones.
        """
        stop = min(offset + buffer.nbytes, self.size_bytes)
        for start in range(offset, stop, RANGE_BYTES * RANGES):
            self._read_ranges(buffer, offset, start, min(start + RANGE_BYTES * RANGES, stop))
        return max(stop - offset, 0)

    def close(self) -> None:
        """Do nothing: between two reads nothing is open."""

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
    """The lock of a prefix, which object stores do not have."""

    def require(self) -> None:
        """Do nothing: a prefix can be neither renamed nor replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FsspecStorage:
    """An object store, accessed through fsspec's driver for the scheme of its URLs."""

    driver: Driver

    def entries(self, folder: str) -> tuple[Entry, ...]:
        """Return the names under a prefix in order; none if there is no such prefix."""
        inner = _inner(folder)
        try:
            details = attempt(lambda: self.driver.ls(inner, detail=True), folder, Access.READ)
        except FileNotFoundError:
            return ()
        entries = []
        for detail in details:
            path = str(detail["name"]).rstrip("/")
            parent, _, name = path.rpartition("/")
            # A store lists an object whose name equals the prefix as an entry of the prefix.
            if name and parent.strip("/") == inner.strip("/"):
                entries.append(Entry(name=name, is_folder=detail["type"] == "directory"))
        return tuple(sorted(entries, key=lambda entry: entry.name))

    def size_bytes(self, path: str) -> int | None:
        """Return the size of an object; None if there is no such object."""
        inner = _inner(path)
        try:
            details = attempt(lambda: self.driver.info(inner), path, Access.READ)
        except FileNotFoundError:
            return None
        return int(str(details["size"])) if details["type"] == "file" else None

    def create(self, path: str) -> StoreOutput:
        """Start an object whose name no other job uses."""
        inner = _inner(path)
        try:
            file = attempt(
                lambda: self.driver.open(inner, "wb", block_size=PART_BYTES), path, Access.WRITE
            )
        except (FileNotFoundError, FileExistsError) as error:
            raise failure(path, Access.WRITE, error) from error
        return StoreOutput(path=path, driver=self.driver, file=file)

    def open(self, path: str, *, from_disk: bool = False) -> StoreInput:
        """Open an object for reading; nothing of it is cached."""
        del from_disk
        size_bytes = self.size_bytes(path)
        if size_bytes is None:
            raise UserError(f"'{path}' does not exist: name a folder that contains a checkpoint.")
        return StoreInput(path=path, driver=self.driver, size_bytes=size_bytes)

    def begin(self, target: str, token: str) -> str:
        """Return the target itself; it may contain nothing but files that killed jobs left."""
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
        """Return a name such as ``rank-00000-TOKEN.safetensors``."""
        return f"rank-{rank:05}-{token}.safetensors"

    def publish(self, folder: str, target: str, manifest: bytes) -> None:
        """Create the manifest unless there is one, and read it back to find out whose checkpoint appeared.

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
        # A failed attempt may have taken effect, and a successful one must have.
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
        """Return whether there is a manifest."""
        return self.size_bytes(join(folder, MANIFEST_NAME)) is not None

    def discard(self, folder: str, token: str, *, was_sent: bool) -> None:
        """Remove the files with a token, unless a manifest that names them may still appear."""
        if was_sent:
            return
        for entry in self.entries(folder):
            match = _RANK_FILE.fullmatch(entry.name)
            if match is not None and match["token"] == token:
                self._remove_object(join(folder, entry.name))

    def remove(self, folder: str) -> None:
        """Remove the manifest, then the files of the checkpoint; other files stay.

        Raises:
            UserError: if the store refuses it; as long as the manifest is there, so are all files.
        """
        manifest = join(folder, MANIFEST_NAME)
        self._remove_object(manifest)
        if self.size_bytes(manifest) is not None:
            raise UserError(f"'{manifest}' cannot be removed: the store keeps it.")
        self._remove_files(folder, sparing=b"")

    def leftovers(self, root: str) -> tuple[str, ...]:
        """Return the prefixes with only files of ranks, no manifest, and the newest file at least a day old."""
        return tuple(
            folder
            for entry in self.entries(root)
            if entry.is_folder
            and CHECKPOINT_NAME.fullmatch(entry.name)
            and self._is_leftover(folder := join(root, entry.name))
        )

    @contextlib.contextmanager
    def lock(self, root: str) -> Iterator[StoreHold]:
        """Write and remove an object, so that a store that refuses this is noticed before the first save.

        A store has no lock that is released when its holder dies. Two jobs may save to one prefix without damage to a
        checkpoint, but each counts those of both when it removes old ones.
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
        """Make folders where the driver has them; for object stores this would create a bucket."""
        if folder.partition("://")[0] in _WITH_FOLDERS:
            inner = _inner(folder)
            attempt(lambda: self.driver.makedirs(inner, exist_ok=True), folder, Access.WRITE)

    def _create_whole(self, path: str, data: bytes) -> None:
        """Create an object unless it exists, in one request where the driver can."""
        inner = _inner(path)

        def put() -> None:
            # Drivers may ignore the mode or not know it; checking for the object first is the best they allow.
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
        """Return the bytes of a small object; None if there is no such object."""
        inner = _inner(path)
        try:
            return attempt(lambda: self.driver.cat_file(inner), path, Access.READ)
        except FileNotFoundError:
            return None

    def _remove_object(self, path: str) -> None:
        """Remove an object if it exists.

        Raises:
            UserError: if the store refuses it.
        """
        inner = _inner(path)
        with contextlib.suppress(FileNotFoundError):
            attempt(lambda: self.driver.rm_file(inner), path, Access.WRITE)

    def _remove_files(self, folder: str, *, sparing: bytes) -> None:
        """Remove the files of ranks that a manifest does not name, which jobs that did not finish left."""
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
            # Another job is finishing or removing it, or the store records no times.
            return False

    def _modified(self, path: str) -> datetime:
        inner = _inner(path)
        time = attempt(lambda: self.driver.modified(inner), path, Access.READ)
        return time if time.tzinfo else time.replace(tzinfo=UTC)


def open_store(url: str) -> FsspecStorage:
    """Open the storage of a URL.

    The driver takes credentials and endpoints from its usual sources and from fsspec's configuration
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
        # Other processes write to the store, so listings must not be cached.
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
"""The packages with the drivers of common schemes."""

_WITH_FOLDERS: Final = frozenset(
    {"arrow_hdfs", "ftp", "hdfs", "sftp", "smb", "ssh", "webdav", "webhdfs"}
)
"""Schemes of file systems in which a file's folder must exist."""


def _inner(url: str) -> str:
    """Return the path of a URL within its store, in the form that its driver expects."""
    inner: str = fsspec.get_filesystem_class(url.partition("://")[0])._strip_protocol(url)
    return inner


def _exists(target: str) -> UserError:
    return UserError(
        f"'{target}' cannot be written: it exists, and a checkpoint never replaces anything: name another path."
    )
