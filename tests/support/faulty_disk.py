"""A disk that fails at a given call of the system, and what is left of a training run that keeps buffers on it.

``scenario`` trains, saves checkpoints and reads the state. ``trial`` runs it in a process of its own with one fault.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final
from unittest import mock

import torch

from tests.passes.numbers import initial
from tests.support.lowering import applied
from tests.support.pipelines import for_stage
from tests.support.programs import mlp
from zeroir.checkpoint.damage import verify_checkpoint
from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.passes.offload.offload_optimizer import OffloadOptimizer
from zeroir.passes.offload.offload_parameters import OffloadParameters
from zeroir.passes.offload.offload_to_disk import OffloadToDisk
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.engine.opened_program import EngineSettings
from zeroir.torch_ops.batches import Batch

STEPS: Final = 2
LIMIT_S: Final = 120
"""A process that takes longer hangs."""


class Kind(Enum):
    """What happens at the call: an error of the system, fewer bytes than asked for, or the end of the process."""

    EIO = "the disk fails"
    ENOSPC = "the disk is full"
    EDQUOT = "the quota is used up"
    EACCES = "permission is denied"
    ESTALE = "the server has forgotten the file"
    OUTAGE = "the disk fails from here on"
    HALF = "half of the bytes"
    ONE = "one byte"
    NONE = "no byte"
    TRUNCATED = "the file is shortened before it"
    KILL_BEFORE = "the process is killed"
    KILL_AFTER = "the process is killed after it"


_OF_TRANSFERS: Final = (Kind.HALF, Kind.ONE, Kind.NONE)

_ERRORS: Final = {
    Kind.EIO: errno.EIO,
    Kind.OUTAGE: errno.EIO,
    Kind.ENOSPC: errno.ENOSPC,
    Kind.EDQUOT: errno.EDQUOT,
    Kind.EACCES: errno.EACCES,
    Kind.ESTALE: errno.ESTALE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault at a call, counted from 0."""

    call: int
    kind: Kind


def possible_faults(calls: Sequence[str]) -> list[Fault]:
    """Every fault at every call that it may befall."""
    return [
        Fault(call=number, kind=kind)
        for kind in Kind
        for number, name in enumerate(calls)
        if not (kind in _OF_TRANSFERS and name not in ("read", "write"))
        if not (kind is Kind.TRUNCATED and name != "read")
    ]


@dataclass(slots=True, kw_only=True)
class Injector:
    """Counts the calls of the system for files in a folder, and lets the one of the fault go wrong."""

    folder: str
    fault: Fault | None
    calls: list[str] = field(default_factory=list)
    descriptors: set[int] = field(default_factory=set)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Come between the engine and the system, in this process."""
        intended_open, intended_control = os.open, fcntl.fcntl
        allocate, read, write = os.posix_fallocate, os.preadv, os.pwritev

        def opened(path: str, flags: int, mode: int = 0o777) -> int:
            if os.fspath(path) != self.folder:
                return intended_open(path, flags, mode)
            descriptor = self._call("open", 0, lambda: intended_open(path, flags, mode))
            self.descriptors.add(descriptor)
            return descriptor

        def controlled(descriptor: int, command: int, value: int = 0) -> int:
            if descriptor not in self.descriptors or command != fcntl.F_SETFL:
                return intended_control(descriptor, command, value)
            return self._call(
                "bypass", descriptor, lambda: intended_control(descriptor, command, value)
            )

        def allocated(descriptor: int, offset: int, size: int) -> None:
            def act() -> int:
                allocate(descriptor, offset, size)
                return 0

            self._call("allocate", descriptor, act)

        def was_read(descriptor: int, targets: Sequence[memoryview], offset: int) -> int:
            return self._transfer("read", read, descriptor, targets, offset)

        def written(descriptor: int, sources: Sequence[memoryview], offset: int) -> int:
            return self._transfer("write", write, descriptor, sources, offset)

        with (
            mock.patch.object(os, "open", opened),
            mock.patch.object(os, "posix_fallocate", allocated),
            mock.patch.object(os, "preadv", was_read),
            mock.patch.object(os, "pwritev", written),
            mock.patch.object(fcntl, "fcntl", controlled),
        ):
            yield

    def _transfer(
        self,
        name: str,
        intended: Callable[[int, Sequence[memoryview], int], int],
        descriptor: int,
        parts: Sequence[memoryview],
        offset: int,
    ) -> int:
        (part,) = parts
        kind = self._due(name)
        match kind:
            case Kind.HALF:
                part = part[: len(part) // 2]
            case Kind.ONE | Kind.NONE:
                return 1 if kind is Kind.ONE else 0
            case _:
                pass
        return self._done(kind, descriptor, lambda: intended(descriptor, [part], offset))

    def _call(self, name: str, descriptor: int, act: Callable[[], int]) -> int:
        return self._done(self._due(name), descriptor, act)

    def _due(self, name: str) -> Kind | None:
        """What happens at this call."""
        call = len(self.calls)
        self.calls.append(name)
        fault = self.fault
        if fault is None or call < fault.call:
            return None
        return fault.kind if call == fault.call or fault.kind is Kind.OUTAGE else None

    def _done(self, kind: Kind | None, descriptor: int, act: Callable[[], int]) -> int:
        if kind in _ERRORS:
            raise OSError(_ERRORS[kind], os.strerror(_ERRORS[kind]))
        if kind is Kind.TRUNCATED:
            os.ftruncate(descriptor, 0)
        if kind is Kind.KILL_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        result = act()
        if kind is Kind.KILL_AFTER:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


@cache
def offloaded() -> Program:
    """A small program that keeps its optimizer and parameters on disk."""
    to_disk = (OffloadOptimizer(), OffloadParameters(), OffloadToDisk(piece_numel=4096))
    return applied(mlp(blocks=1, dim=96, precision="bf16"), (*for_stage(3, 1), *to_disk))


def scenario(folder: Path, checkpoints: Path) -> list[torch.Tensor]:
    """Train, with checkpoints; the state at the end."""
    program = offloaded()
    engine = Engine(program, EngineSettings(disk_folder=folder))
    engine.initialise_flats(initial(program))
    generator = torch.Generator().manual_seed(3)
    (binding,) = program.inputs
    for step in range(STEPS):
        batch: Batch = {binding.path: torch.randn(binding.shape, generator=generator)}
        engine.step(batch)
        engine.save(checkpoints / f"step-{step}", wait=step % 2 == 0)
    state = [value for _, value in sorted(engine.full_state().items())]
    engine.close()
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a trial: ``finished``, ``refused`` (one sentence), ``killed`` or what is wrong."""

    ended: str
    problems: tuple[str, ...]


def calls_of_the_system(root: Path) -> tuple[list[str], list[torch.Tensor]]:
    """The calls of an undisturbed scenario, and its state at the end. It runs in this process."""
    disk, checkpoints = _folders(root)
    injector = Injector(folder=str(disk), fault=None)
    with injector.installed():
        state = scenario(disk, checkpoints)
    return injector.calls, state


def trial(root: Path, fault: Fault, expected: list[torch.Tensor]) -> Outcome:
    """Run the scenario with a fault in a process of its own, and look at what is there afterwards."""
    disk, checkpoints = _folders(root)
    context = get_context("forkserver")
    # What the scenario would import in each process.
    lazily = ["torch.fx.experimental.symbolic_shapes", "zeroir.memory.first_fit"]
    context.set_forkserver_preload([__name__, *lazily])
    child = context.Process(target=_run_child, args=(disk, checkpoints, fault, expected))
    child.start()
    child.join(LIMIT_S)
    problems: list[str] = []
    if child.is_alive():
        child.kill()
        child.join()
        problems.append("it hangs")
    ended = {0: "finished", 2: "refused", -signal.SIGKILL: "killed"}.get(child.exitcode or 0)
    if ended is None:
        problems.append(f"it ended with {child.exitcode}")
    if (ended == "killed") != (fault.kind in (Kind.KILL_BEFORE, Kind.KILL_AFTER)):
        problems.append(f"it ended: {ended}")
    problems += [f"it left {path}" for path in disk.iterdir()]
    for path in checkpoints.glob("step-*"):
        problems += [damage.sentence for damage in verify_checkpoint(str(path)).damages]
    return Outcome(ended=ended or "wrong", problems=tuple(problems))


def _folders(root: Path) -> tuple[Path, Path]:
    for folder in (disk := root / "disk", checkpoints := root / "checkpoints"):
        folder.mkdir(parents=True)
    return disk, checkpoints


def _run_child(disk: Path, checkpoints: Path, fault: Fault, expected: list[torch.Tensor]) -> None:
    gc.freeze()
    try:
        with Injector(folder=str(disk), fault=fault).installed():
            state = scenario(disk, checkpoints)
        code = 0 if all(map(torch.equal, state, expected)) else 3
    except UserError as error:
        sentence = str(error)
        is_plain = "\n" not in sentence and sentence.startswith("Rank 0 cannot")
        code = 2 if is_plain and f"'{disk}'" in sentence else 4
        if code == 4:
            print(sentence, flush=True)
    os._exit(code)
