"""Builds ``device.cpp`` into a folder like that of a CUDA toolkit, and ``tracing.cpp``."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.absent_cuda import PACKAGES

SOURCE = Path(__file__).with_name("device.cpp")
_LIBRARY = "libtorch_cuda.so"


def build_toolkit(folder: Path) -> None:
    """Fill an empty folder with what Inductor looks for: headers, libcuda and libtorch_cuda."""
    include, lib = folder / "include", folder / "lib64"
    lib.mkdir(parents=True)
    (headers,) = PACKAGES.glob("nvidia/*/include")
    include.symlink_to(headers)
    (lib / "operators.inc").write_text(_operators())
    more = ("-DUSE_CUDA", f"-I{lib}", f"-I{include}", f"-Wl,-soname,{_LIBRARY}")
    _build(SOURCE, lib / _LIBRARY, more)
    # A script for the linker: one library stands in for both.
    (lib / "libcuda.so").write_text("INPUT(-ltorch_cuda)\n")


def build_guard(library: Path) -> None:
    """Build what lets torch trace fake tensors of the device."""
    _build(SOURCE.with_name("tracing.cpp"), library, ())


def _build(source: Path, library: Path, more: Sequence[str]) -> None:
    of_torch = Path(torch.__file__).parent
    subprocess.run(
        [
            *("g++", "-O0", "-std=c++20", "-shared", "-fPIC", "-w", *more),
            *(f"-I{of_torch / 'include' / path}" for path in ("", "torch/csrc/api/include")),
            *(source, "-o", library, f"-L{of_torch / 'lib'}", "-lc10", "-ltorch_cpu"),
        ],
        check=True,
    )


def load(toolkit: Path) -> ctypes.CDLL:
    """Load the library for all libraries that are loaded later, whose symbols it then defines before torch does."""
    return ctypes.CDLL(str(toolkit / "lib64" / _LIBRARY), mode=ctypes.RTLD_GLOBAL)


def _operators() -> str:
    """Return functions of torch's C interface on CUDA that call those on the CPU with the same arguments."""
    on_cpu, on_cuda = _declared("cpu"), _declared("cuda")
    functions: list[str] = []
    for name, arguments in on_cuda.items():
        if on_cpu.get(name) == arguments:
            passed = ", ".join(argument.split()[-1] for argument in arguments.split(","))
            functions.append(
                f"AOTI_TORCH_EXPORT AOTITorchError aoti_torch_cuda_{name}({arguments}) {{\n"
                f"  return aoti_torch_cpu_{name}({passed});\n}}"
            )
    return "\n".join(functions)


def _declared(device: str) -> dict[str, str]:
    """Return the arguments of each function that a header of torch's declares for a device."""
    headers = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_torch/generated"
    text = (headers / f"c_shim_{device}.h").read_text()
    return dict(re.findall(rf"AOTITorchError aoti_torch_{device}_(\w+)\((.*?)\);", text))
