"""Compiles missing segments in several worker processes at once, each of them once per host.

Every rank of a host goes through the missing segments twice. First it compiles those that no other rank has locked,
starting at a different one than the others. Then it waits for the rest. So ranks share the work, and another rank takes
over the segment of a rank that is killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

import zeroir
from zeroir.artifact.cache_folder import cache_folder
from zeroir.runtime.kernels.cache import KernelCache
from zeroir.runtime.kernels.compile_worker import Request, packed, receive, send
from zeroir.runtime.kernels.cuda_toolkit import cuda_toolkit


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """This rank's share of its host's cores, on which all ranks of the host compile."""

    rank: int = 0
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> HostShare:
        """Read torchrun's variables; without torchrun this process has the whole host."""

        def number(name: str, default: int) -> int:
            text = os.environ.get(name, "")
            return int(text) if text.isdigit() else default

        return cls(
            rank=number("RANK", 0),
            local_rank=number("LOCAL_RANK", number("RANK", 0)),
            local_world_size=max(1, number("LOCAL_WORLD_SIZE", 1)),
        )

    def workers(self, jobs: int) -> int:
        """Return the most processes that compile for this rank."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return max(1, min(jobs, (cores or 1) // self.local_world_size))


def compile_missing(
    missing: Mapping[str, Request], cache: KernelCache, host_share: HostShare
) -> dict[str, str]:
    """Compile segments by key into the cache; return the reasons, by key, for those that failed."""
    keys = list(missing)
    start = host_share.local_rank * len(keys) // host_share.local_world_size
    waiting: SimpleQueue[tuple[str, bool]] = SimpleQueue()
    for key in keys[start:] + keys[:start]:
        waiting.put((key, False))
    errors: dict[str, str] = {}

    def work() -> None:
        with _CompileProcess() as worker:
            while True:
                try:
                    key, is_second_try = waiting.get_nowait()
                except Empty:
                    return
                with cache.locked(key, wait=is_second_try) as is_locked:
                    if not is_locked:
                        waiting.put((key, True))
                    elif cache.find(key) is None:
                        with cache.draft() as draft:
                            error = worker.compile(replace(missing[key], folder=str(draft)))
                            if error is None:
                                cache.keep(key, draft)
                            else:
                                errors[key] = error

    with ThreadPoolExecutor(host_share.workers(len(keys))) as threads:
        futures = [threads.submit(work) for _ in range(host_share.workers(len(keys)))]
    for future in futures:
        future.result()
    return errors


class _CompileProcess:
    """A compiler process; it starts with the first request, and again after it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _CompileProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def compile(self, request: Request) -> str | None:
        """Compile a segment; return the reason where it fails."""
        if self._process is None:
            self._process = _start()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, packed(request))
            answer = receive(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            self._end()
            return f"the process that compiles ended with code {process.returncode}"
        return answer.decode() or None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
        process.wait()


def _start() -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    # Later processes reuse Inductor's headers and its findings about the compiler.
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    # Segments are already compiled in parallel; for a GPU's kernels Inductor would start as many processes again.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # Torch looks for a toolkit, but not for headers that pip has installed.
    if (toolkit := cuda_toolkit()) is not None:
        environment.setdefault("CUDA_HOME", str(toolkit))
    # The worker is not a rank of the job.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    home = str(Path(zeroir.__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(
        [home, *filter(None, [environment.get("PYTHONPATH")])]
    )
    environment["PYTHONWARNINGS"] = "ignore"
    return subprocess.Popen(
        [sys.executable, "-m", "zeroir.runtime.kernels.compile_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
