"""Processes that compile segments, and go on with those of the next test: to import the compiler takes seconds."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from zeroir.runtime.kernels import compile_pool


@contextmanager
def kept() -> Iterator[None]:
    """Within the block, engines of this process take such a process where one is idle, and leave it when they end."""
    idle: list[subprocess.Popen[bytes]] = []
    start = compile_pool._start

    def put_back(self: compile_pool._CompileProcess, *_: object) -> None:
        if self._process is not None:
            idle.append(self._process)
            self._process = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_pool, "_start", lambda: idle.pop() if idle else start())
        patch.setattr(compile_pool._CompileProcess, "__exit__", put_back)
        yield
    for process in idle:
        worker = compile_pool._CompileProcess()
        worker._process = process
        worker._end()
