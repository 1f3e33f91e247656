"""Runs kernels that Inductor wrote for a GPU in Triton's interpreter, where a library launches them.

Import this before Triton: it reads ``TRITON_INTERPRET`` once.
"""

from __future__ import annotations

# ruff: noqa: ANN401 - Triton has no types
import ctypes
import importlib.util
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.support.absent_cuda import PACKAGES

os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(PACKAGES))

import torch._inductor.runtime.triton_helpers as triton_helpers
import triton.language as tl
from triton.runtime import interpreter

_NUMBERS: Final[dict[str, Any]] = {
    "i1": ctypes.c_bool,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
"""How a launch holds numbers, by their types in a kernel's signature."""

_LAUNCH: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *(ctypes.c_char_p, ctypes.c_char_p),
    *(ctypes.c_uint, ctypes.c_uint, ctypes.c_uint),
    ctypes.POINTER(ctypes.c_void_p),
)

_ELEMENTARY: Final[dict[str, Callable[..., Any]]] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atan2": np.arctan2,
    "atanh": np.arctanh,
    "ceil": np.ceil,
    "cos": np.cos,
    "cosh": np.cosh,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fabs": np.abs,
    "floor": np.floor,
    "fmod": np.fmod,
    "isinf": np.isinf,
    "isnan": np.isnan,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "nearbyint": np.rint,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "signbit": np.signbit,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "tan": np.tan,
    "tanh": np.tanh,
    "trunc": np.trunc,
}
"""Functions of CUDA's libdevice, which the interpreter does not know."""


class _Libdevice:
    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = _ELEMENTARY[name]

        def compute(*tensors: Any) -> Any:
            handles = [tl.to_tensor(tensor).handle for tensor in tensors]
            with np.errstate(all="ignore"):
                result = np.asarray(function(*(handle.data for handle in handles)))
            kind = tensors[0].type
            if result.dtype == np.bool_:
                kind = tl.int1 if not kind.is_block() else kind.with_element_ty(tl.int1)
                return tl.tensor(interpreter.TensorHandle(result, tl.int1), kind)
            data = result.astype(handles[0].data.dtype)
            return tl.tensor(interpreter.TensorHandle(data, handles[0].dtype), kind)

        return compute


class InterpretedKernels:
    """The kernels that libraries launch through ``library`` (``device.cpp``); ``launched`` names those that ran."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.launched: list[str] = []
        self._kernels: dict[str, dict[str, Any]] = {}
        self._functions: dict[str, Any] = {}
        self._modules = Path(tempfile.mkdtemp())
        # The library calls it as long as it is loaded.
        self._callback = _LAUNCH(self._launch)
        library.absent_cuda_launches(self._callback)
        _let_the_interpreter_run_all()

    def add(self, described: Path) -> None:
        """Add the kernels that a file of ``compiling`` describes."""
        self._kernels |= json.loads(described.read_text())

    def _launch(self, path: bytes, _name: bytes, x: int, y: int, z: int, arguments: Any) -> int:
        try:
            binary = Path(path.decode())
            if not binary.stat().st_size:
                raise FileNotFoundError(binary)
            kernel = self._kernels[binary.name]
            function = self._functions.get(binary.name)
            if function is None:
                function = self._functions[binary.name] = self._function(kernel)
            function[x, y, z](**_arguments(kernel, arguments))
        except Exception:  # noqa: BLE001 - no exception passes through the library
            traceback.print_exc()
            return 1
        self.launched.append(kernel["name"])
        return 0

    def _function(self, kernel: dict[str, Any]) -> Any:
        path = self._modules / f"kernel_{len(self._functions)}.py"
        path.write_text(kernel["source"])
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        vars(module)["libdevice"] = _Libdevice()
        return getattr(module, kernel["name"]).fn


def _arguments(kernel: dict[str, Any], addresses: Any) -> dict[str, Any]:
    """Return a kernel's arguments by name: pointers, numbers, and constants, which no launch passes."""
    values: dict[str, Any] = {}
    passed = 0
    for name, kind in kernel["signature"].items():
        if kind == "constexpr":
            values[name] = kernel["constants"][name]
            continue
        held = ctypes.cast(addresses[passed], ctypes.POINTER(_NUMBERS.get(kind, ctypes.c_uint64)))[
            0
        ]
        if kind.startswith("*"):
            pointer = tl.str_to_ty(kind, None)
            handle = interpreter.TensorHandle(np.array([held], dtype=np.uint64), pointer)
            values[name] = tl.tensor(handle, pointer)
        else:
            values[name] = held
        passed += 1
    return values


def _let_the_interpreter_run_all() -> None:
    """Let it take pointers as they are, compute what only a GPU's own library does, and mend its atomic additions.

    Of a mask that is broadcast its own code reads the elements that lie in memory behind the first.
    """

    def kept(_: object, args: Iterable[object], kwargs: object) -> tuple[Iterable[object], object]:
        return args, kwargs

    builder = interpreter.InterpreterBuilder
    add_atomically = builder.create_atomic_rmw

    def added(self: Any, how: Any, *operands: Any) -> Any:
        *tensors, order, scope = operands
        for tensor in tensors:
            tensor.data = np.ascontiguousarray(tensor.data)
        return add_atomically(self, how, *tensors, order, scope)

    builder.create_atomic_rmw = added
    executor = interpreter.GridExecutor
    executor._init_args_hst = kept
    executor._restore_args_dev = lambda *_: None
    vars(triton_helpers)["libdevice"] = _Libdevice()
    triton_helpers.set_driver_to_gpu = lambda: None
