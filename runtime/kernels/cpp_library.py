"""Libraries of our own C++ code for the CPU, compiled once for this machine and kept in the cache of kernels."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from zeroir.artifact.cache_folder import cache_folder
from zeroir.runtime.kernels.cache import KernelCache, code_key

_LIBRARY: Final = "library.so"

_FLAGS: Final = (
    "-std=c++17",
    "-O3",
    "-march=native",
    # Each operation rounds separately.
    "-ffp-contract=off",
    # No bit of a result depends on these two, but without them loops are not vectorised.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
)

_LONGEST_S: Final = 120.0
"""Seconds after which the compiler counts as hanging; it normally needs less than one."""


class NoLibraryError(Exception):
    """The library is not available, for the given reason."""


def cpp_compiler() -> str | None:
    """Return the C++ compiler: ``CXX``, or one that Inductor looks for; None where there is none."""
    named = os.environ.get("CXX")
    names = [named] if named else ["g++", "clang++"]
    return next((name for name in names if shutil.which(name)), None)


NO_COMPILER: Final = "there is no C++ compiler; install g++ or clang++, or name one in CXX."


def load_cpp_library(source: Path) -> ctypes.CDLL:
    """Load the library of one C++ file, which includes only headers of the language.

    Its functions run without the GIL. Processes of one host compile it once.

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
