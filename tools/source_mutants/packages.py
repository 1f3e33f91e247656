"""The packages whose source is mutated, and their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

PACKAGES: Final = {
    "verify": ("zeroir/verify",),
    "passes": ("passes",),
    "memory": ("zeroir/memory", "zeroir/workspace"),
    "runtime": ("runtime",),
    "checkpoint": ("zeroir/checkpoint", "runtime/checkpoint"),
}
"""Folders of the repository. A file belongs to the last package that has it."""

TESTS: Final = {
    "verify": ("tests/verify",),
    "passes": ("tests/passes",),
    "memory": ("tests/memory", "tests/numerics"),
    "runtime": ("tests/runtime", "tests/data"),
    "checkpoint": ("tests/checkpoint", "tests/runtime"),
}
"""The folders whose tests judge a package first."""

_NEED_CUDA: Final = (
    "runtime/comm/nccl.py",
    "runtime/execution/cuda.py",
    "runtime/execution/cuda_events.py",
    "runtime/execution/cuda_graphs.py",
    "runtime/kernels/_inductor_libraries.py",
    "runtime/kernels/_inductor_private.py",
    "runtime/kernels/_inductor_sizes.py",
    "runtime/device/pinned_memory.py",
)
"""Files that run on CUDA devices alone, and those that depend on the inside of torch's compiler."""


def modules(root: Path) -> Iterator[tuple[str, Path, str]]:
    """The package, the file and the name of each module that is mutated."""
    packages = {
        file: package
        for package, folders in PACKAGES.items()
        for folder in folders
        for file in sorted((root / folder).rglob("*.py"))
    }
    for file, package in packages.items():
        place = file.relative_to(root)
        if place.as_posix() not in _NEED_CUDA:
            parts = place.with_suffix("").parts
            inside = parts if parts[0] == "zeroir" else ("zeroir", *parts)
            yield package, file, ".".join(part for part in inside if part != "__init__")
