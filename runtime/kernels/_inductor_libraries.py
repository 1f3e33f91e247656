"""Loads and runs the libraries that ``_inductor_private`` makes of segments; this imports nothing of the compiler.

A library has a C interface. Only this module uses what torch has to call it.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final, Protocol

import torch
from torch import Tensor

from zeroir.errors import InternalError
from zeroir.runtime.device.driver import driver

LIBRARY: Final = "kernel.so"
EXTERN_CALLS: Final = "kernel.json"
"""A file beside the library that describes its calls of operators without a C function."""

_FUNCTION: Final = "zeroir_run"
"""The function that ``segment.h`` exports; a library without it contains a model in AOTInductor's container."""

_PLACE: Final = "zeroir_place"
"""The library's function that returns the device of the segment."""


class Library(Protocol):
    """A compiled segment."""

    def __call__(self, tensors: list[Tensor], /) -> object:
        """Run on arguments and destinations, on the current stream."""


def load_library(folder: Path, device: torch.device) -> Library:
    """Load the result of ``compile_library``.

    Raise RuntimeError or OSError where it does not match this torch or machine.
    """
    import zeroir.torch_ops  # noqa: F401 - libraries look zeroir's operators up by name

    path = folder / LIBRARY
    if (folder / EXTERN_CALLS).exists():
        return _runner(path, device)
    library = ctypes.CDLL(str(path))
    if hasattr(library, _FUNCTION):
        return _SegmentFunction(library, device, folder)
    return _AotModel(library, device, folder)


def _runner(path: Path, device: torch.device) -> Library:
    if device.type == "cpu":
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(path), 1).run
    binaries = str(path.parent)
    run = torch._C._aoti.AOTIModelContainerRunnerCuda(str(path), 1, str(device), binaries).run

    def on_device(tensors: list[Tensor], /) -> None:
        # It asks the device whether the segment's last call is done, and fails permanently if that call was captured.
        if driver().is_capturing():
            raise RuntimeError("a compiled segment calls operators that exist only in Python")
        run(tensors)

    return on_device


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _handles(tensors: list[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return handles of tensors, which the library owns."""
    capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)
    return (ctypes.c_void_p * len(capsules))(*[_pointer(capsule, None) for capsule in capsules])


def _current_stream(device: torch.device) -> int | None:
    """Return the handle of the current stream; None on the CPU, which has none."""
    return driver().stream_handle(device) if device.type == "cuda" else None


def _check(code: int) -> None:
    if code != 0:
        raise InternalError(f"a compiled segment failed with code {code}; see the lines above")


class _SegmentFunction:
    """The function of a library, called without the GIL; several threads may call it on the CPU."""

    def __init__(self, library: ctypes.CDLL, device: torch.device, folder: Path) -> None:
        if device.type == "cuda":
            place = library[_PLACE]
            place.argtypes = [ctypes.c_int32, ctypes.c_char_p]
            place.restype = None
            place(device.index or 0, str(folder).encode())
        run = library[_FUNCTION]
        run.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._run = run
        self._device = device

    def __call__(self, tensors: list[Tensor], /) -> None:
        handles = _handles(tensors)
        _check(self._run(handles, len(handles), _current_stream(self._device)))


class _AotModel:
    """A model in AOTInductor's container, called through its C interface without the GIL.

    torch's own runner holds the GIL, which would stop work that overlaps with the segment, such as communication. On a
    GPU it also waits for the segment's last call, because several threads may call it; here only one thread does.
    """

    def __init__(self, library: ctypes.CDLL, device: torch.device, folder: Path) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        create = self._library.AOTInductorModelContainerCreateWithDevice
        create.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_char_p,
            ctypes.c_char_p,
        ]
        binaries = None if device.type == "cpu" else str(folder).encode()
        _check(create(ctypes.byref(self._handle), 1, str(device).encode(), binaries))
        run = self._library.AOTInductorModelContainerRun
        if device.type == "cuda":
            run = self._library.AOTInductorModelContainerRunSingleThreaded
        array, size = ctypes.c_void_p, ctypes.c_size_t
        run.argtypes = [ctypes.c_void_p, array, size, array, size, ctypes.c_void_p, ctypes.c_void_p]
        self._run = run
        self._device = device
        self._results = (ctypes.c_void_p * 1)()

    def __call__(self, tensors: list[Tensor], /) -> None:
        handles = _handles(tensors)
        stream = _current_stream(self._device)
        _check(self._run(self._handle, handles, len(handles), self._results, 0, stream, None))
