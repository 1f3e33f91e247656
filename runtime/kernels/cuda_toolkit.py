"""Finds the headers of CUDA that the host code of a GPU's kernels is compiled with. No compiler of CUDA's is needed."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Final

_USUAL_PLACE: Final = Path("/usr/local/cuda")
_HEADERS: Final = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "nv/target")
"""Those that Inductor's code includes, from three packages of pip's."""

NO_HEADERS: Final = (
    "there are no headers of CUDA; run `pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl`, or set "
    "CUDA_HOME to a CUDA toolkit."
)


def cuda_toolkit(packages: Path | None = None) -> Path | None:
    """Return the folder of a CUDA toolkit, or of the same folders that pip installs; None where there is none.

    ``CUDA_HOME`` or ``CUDA_PATH`` name one. Else it is the first with headers of these: that of ``nvcc``, as torch
    looks for it, ``/usr/local/cuda``, and those among pip's ``packages``, which default to those of this Python.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    compiler = shutil.which("nvcc")
    folder = Path(sysconfig.get_path("purelib")) if packages is None else packages
    places = (
        *(() if compiler is None else (Path(compiler).parents[1],)),
        *(_USUAL_PLACE, *sorted(folder.glob("nvidia/cu*"))),
    )
    return next(filter(_has_headers, places), None)


def _has_headers(toolkit: Path) -> bool:
    return all((toolkit / "include" / header).is_file() for header in _HEADERS)
