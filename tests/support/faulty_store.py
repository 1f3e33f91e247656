"""A driver of S3 that fails at a given request, and what is left of a save that it disturbs.

``scenario`` saves a checkpoint into a folder that has two, and removes the oldest. ``trial`` runs it in a process of
its own with one fault, then reads with the usual driver what is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import get_context
from typing import Final
from unittest import mock

import fsspec
import numpy as np
from s3fs import S3FileSystem
from s3fs.core import sync_wrapper

from zeroir.checkpoint import fsspec_storage
from zeroir.checkpoint.folder import CheckpointFolder
from zeroir.checkpoint.manifest import Manifest, Origin
from zeroir.checkpoint.publish import begin
from zeroir.checkpoint.reading import read_manifest, verify_all
from zeroir.checkpoint.safetensors_header import StoredTensorSpec
from zeroir.checkpoint.storages import open_storage
from zeroir.checkpoint.writing import write_file
from zeroir.errors import UserError

SCHEME: Final = "faulty"
NEWEST: Final = 3
"""The step that the scenario saves; steps 1 and 2 are there before."""
_PART_NUMEL: Final = 1_400_000
"""5.6 MB, a part of an upload, of which only the last may be below 5 MiB."""
_CHANGES: Final = {"put_object", "upload_part", "complete_multipart_upload", "delete_object"}
_LATE_S: Final = 20


class Kind(Enum):
    """What happens at the request."""

    TIMEOUT_BEFORE = "an error that passes, without the effect"
    TIMEOUT_AFTER = "an error that passes, after the effect"
    LATE = "the request and its repetitions time out, and have their effect at the very end"
    OUTAGE = "no request succeeds from here on"
    OUTAGE_AFTER = "the effect, and no request succeeds from here on"
    REFUSED = "an error that lasts"
    LOST = "success without the effect, if the request was to change something"
    KILL_BEFORE = "the process is killed"
    KILL_AFTER = "the effect, and the process is killed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault at a request, counted from 0."""

    request: int
    kind: Kind


@dataclass(slots=True, kw_only=True)
class Injector:
    """Counts requests and lets the one of the fault fail."""

    fault: Fault | None
    methods: list[str] = field(default_factory=list)
    late: list[Callable[[], object]] = field(default_factory=list)
    late_request: tuple[str, object] | None = None
    """The method and the object of the requests that are late."""

    def register(self) -> None:
        """Let fsspec open ``faulty://`` URLs with a driver of S3 that this injector disturbs."""
        intended = S3FileSystem._call_s3

        async def disturbed(
            driver: S3FileSystem, method: str, *more: object, **keywords: object
        ) -> object:
            async def carry_out() -> object:
                return await intended(driver, method, *more, **keywords)

            request = len(self.methods)
            self.methods.append(method)
            fault = self.fault
            if fault is None or request < fault.request:
                return await carry_out()
            if fault.kind is Kind.LATE and request == fault.request:
                self.late_request = method, keywords.get("Key")
            if self.late_request == (method, keywords.get("Key")):
                self.late.append(carry_out)
                raise TimeoutError("the request is on its way")
            if fault.kind is Kind.LOST and method not in _CHANGES:
                return await carry_out()
            return await self._fail(fault.kind, request == fault.request, carry_out)

        members = {
            "protocol": SCHEME,
            "_call_s3": disturbed,
            "call_s3": sync_wrapper(disturbed),
        }
        fsspec.register_implementation(
            SCHEME, type("FaultyS3", (S3FileSystem,), members), clobber=True
        )

    async def _fail(self, kind: Kind, is_first: bool, carry_out: Callable[[], object]) -> object:
        if not is_first and kind not in (Kind.OUTAGE, Kind.OUTAGE_AFTER):
            return await _awaited(carry_out)
        match kind:
            case Kind.TIMEOUT_BEFORE:
                raise TimeoutError("the request timed out")
            case Kind.TIMEOUT_AFTER:
                await _awaited(carry_out)
                raise TimeoutError("the answer was lost")
            case Kind.LATE:
                return await _awaited(carry_out)
            case Kind.OUTAGE:
                raise ConnectionError("the store is unreachable")
            case Kind.OUTAGE_AFTER:
                if is_first:
                    await _awaited(carry_out)
                raise ConnectionError("the store is unreachable")
            case Kind.REFUSED:
                raise PermissionError(errno.EACCES, "Access Denied")
            case Kind.LOST:
                return {"ETag": '"lost"'}
            case Kind.KILL_BEFORE:
                os.kill(os.getpid(), signal.SIGKILL)
            case Kind.KILL_AFTER:
                await _awaited(carry_out)
                os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


async def _awaited(carry_out: Callable[[], object]) -> object:
    result = carry_out()
    assert asyncio.iscoroutine(result)
    return await result


def save(folder: CheckpointFolder, step: int) -> str:
    """Save a checkpoint of two ranks, whose first file is sent in parts and whose second by one request."""
    draft = begin(folder.next_path(step))
    try:
        stored = []
        for rank, numel in enumerate((_PART_NUMEL + 1_000, 1_000)):
            data = memoryview(np.full(numel, step + rank, "f4").data)
            parts = [data[start : start + _PART_NUMEL] for start in range(0, numel, _PART_NUMEL)]
            spec = StoredTensorSpec(name="weight", dtype="f32", numel=numel)
            name = draft.file_name(rank)
            storage = open_storage(draft.folder)
            stored.append(write_file(storage, draft.folder, name, [(spec, parts)]))
        origin = Origin(zeroir="test", world_size=2, saved_at="2026-01-01T00:00:00Z")
        return draft.publish(Manifest(step=step, origin=origin, files=tuple(stored)))
    except UserError:
        draft.abandon()
        raise


def scenario(root: str) -> None:
    """Save the newest checkpoint, read it back, and keep two."""
    folder = CheckpointFolder(root=root)
    with folder.lock() as held:
        path = save(folder, NEWEST)
        verify_all(path, read_manifest(path))
        held.retain(2, verified=path, refused=_raise)


def _raise(error: UserError) -> None:
    raise error


def use_small_parts() -> None:
    """Send files above 5 MiB, the least that S3 takes, in parts."""
    fsspec_storage.PART_BYTES = 5 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a trial has left. ``ended`` is ``saved``, ``refused`` (one sentence) or ``killed``."""

    ended: str
    whole: frozenset[int]
    broken: frozenset[int]
    """The steps of checkpoints that readers find, and that are not what was saved."""

    @property
    def is_half_visible(self) -> bool:
        """Whether readers find a checkpoint that is not whole."""
        return bool(self.broken)

    @property
    def is_lost(self) -> bool:
        """Whether a checkpoint is missing that was there before, and was to be kept, or whose save has succeeded."""
        return not {2} | ({NEWEST} if self.ended == "saved" else set()) <= self.whole


def count_requests(bucket: str) -> list[str]:
    """The methods of the requests of an undisturbed scenario."""
    root = f"{bucket}/undisturbed"
    _prepare(root)
    injector = Injector(fault=None)
    injector.register()
    scenario(_faulty(root))
    return injector.methods


def trial(bucket: str, name: str, fault: Fault, environment: Mapping[str, str]) -> Outcome:
    """Run the scenario with a fault in a process of its own, and look at what is there afterwards."""
    root = f"{bucket}/{name}"
    _prepare(root)
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    child = context.Process(target=_run_child, args=(root, fault, dict(environment)))
    child.start()
    child.join()
    ended = {0: "saved", 2: "refused", -signal.SIGKILL: "killed"}.get(child.exitcode or 0)
    if ended is None:
        raise AssertionError(f"{fault} ended with {child.exitcode}")
    whole, broken = set(), set()
    for listed in CheckpointFolder(root=root).list():
        try:
            verify_all(listed.path, read_manifest(listed.path))
            whole.add(listed.step)
        except UserError:
            broken.add(listed.step)
    return Outcome(ended=ended, whole=frozenset(whole), broken=frozenset(broken))


def _prepare(root: str) -> None:
    use_small_parts()
    folder = CheckpointFolder(root=root)
    for step in (1, 2):
        save(folder, step)


def _run_child(root: str, fault: Fault, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    use_small_parts()
    injector = Injector(fault=fault)
    injector.register()
    code = 0
    try:
        with mock.patch("time.sleep"):
            scenario(_faulty(root))
    except UserError as error:
        code = 2 if "\n" not in str(error) else 1
    if injector.late:
        _carry_out_late(injector.late[0])
    os._exit(code)


def _carry_out_late(carry_out: Callable[[], object]) -> None:
    from fsspec.asyn import get_loop

    result = carry_out()
    assert asyncio.iscoroutine(result)
    arrived = asyncio.run_coroutine_threadsafe(result, get_loop())
    with contextlib.suppress(TimeoutError):
        # The driver repeats what the store refuses, such as a part of an upload that has ended.
        arrived.exception(_LATE_S)


def _faulty(root: str) -> str:
    return root.replace("s3://", f"{SCHEME}://", 1)
