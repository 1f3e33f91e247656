"""Libraries of our own C++ code for the CPU, compiled for this machine once and kept in the cache of kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from zeroir.runtime.kernels.cache import KernelCache, cache_folder, code_key

_LIBRARY: Final = "library.so"

_FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-march=native",
    # Each operation rounds by itself.
    "-ffp-contract=off",
    # No bit of a result depends on these two, but without them loops are not vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)

_LONGEST_S: Final = 120.0
"""A compiler that takes longer does not answer; it needs less than a second."""


class NoLibraryError(Exception):
    """The reason for which there is no library."""


def cpp_compiler() -> str | None:
    """The C++ compiler: ``CXX``, or one that Inductor looks for; None where there is none."""
    named = os.environ.get("CXX")
    names = [named] if named else ["g++", "clang++"]
    return next((name for name in names if shutil.which(name)), None)


NO_COMPILER: Final = "there is no C++ compiler; install g++ or clang++, or name one in CXX."


def load_cpp_library(source: Path) -> ctypes.CDLL:
    """The library of one C++ file, which includes no headers but the language's.

    Its functions run without the interpreter's lock. Processes of one host compile it once.

    Raises:
        NoLibraryError: where the cache lacks it and it cannot be compiled, or it does not load.
    """
    cache = KernelCache(cache_folder())
    key = code_key(source.read_bytes(), _FLAGS)
    try:
        folder = cache.find(key)
        if folder is None:
            with cache.locked(key, wait=True):
                folder = cache.find(key) or _compile(source, cache, key)
        return ctypes.CDLL(str(folder / _LIBRARY))
    except (OSError, subprocess.SubprocessError) as error:
        raise NoLibraryError(str(error)) from error


def _compile(source: Path, cache: KernelCache, key: str) -> Path:
    compiler = cpp_compiler()
    if compiler is None:
        raise NoLibraryError(NO_COMPILER)
    with cache.draft() as draft:
        compiled = subprocess.run(
            [compiler, *_FLAGS, "-o", str(draft / _LIBRARY), str(source)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LONGEST_S,
            check=False,
        )
        if compiled.returncode:
            said = compiled.stderr.strip().splitlines() or ["it said nothing."]
            raise NoLibraryError(f"{compiler} ended with code {compiled.returncode}: {said[0]}")
        return cache.keep(key, draft)
