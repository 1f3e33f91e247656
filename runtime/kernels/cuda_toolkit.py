"""Finds the headers of CUDA that the host code of a GPU's kernels is compiled with. No compiler of CUDA's is needed."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import Final

_USUAL_PLACE: Final = Path("/usr/local/cuda")
_HEADERS: Final = ("cuda.h", "cuda_runtime_api.h", "crt/host_defines.h", "nv/target")
"""Those that Inductor's code includes, each from another package of pip's."""

NO_HEADERS: Final = (
    "there are no headers of CUDA; run `pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl`, or set "
    "CUDA_HOME to a CUDA toolkit."
)


def cuda_toolkit(packages: Path | None = None) -> Path | None:
    """Return the folder of a CUDA toolkit, or of the same folders that pip installs; None where there is none.

    The order is torch's: ``CUDA_HOME`` or ``CUDA_PATH``, the toolkit of ``nvcc``, and ``/usr/local/cuda``. After them
    come the headers among pip's ``packages``, which default to those of this Python.
    """
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named:
        return Path(named)
    if (compiler := shutil.which("nvcc")) is not None:
        return Path(compiler).parents[1]
    if _USUAL_PLACE.exists():
        return _USUAL_PLACE
    folder = Path(sysconfig.get_path("purelib")) if packages is None else packages
    return next((each for each in folder.glob("nvidia/cu*") if _has_headers(each)), None)


def _has_headers(toolkit: Path) -> bool:
    return all((toolkit / "include" / header).is_file() for header in _HEADERS)
