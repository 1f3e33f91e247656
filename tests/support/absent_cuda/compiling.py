"""Compiles segments for a CUDA device that is not there: ``python -m tests.support.absent_cuda.compiling``.

Its arguments are a toolkit (``library.build_toolkit``), a folder, and architectures such as 90. Each subfolder has a
file ``request``, for ``compile_worker``; it gets the library and the binaries of the first architecture, and
``kernels.json``, which describes the kernels for the interpreter. For the other architectures the same kernels are
compiled, too. The process pretends to have a device where Inductor asks for one; this module alone knows how.
"""

from __future__ import annotations

# ruff: noqa: ANN401 - Triton has no types
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.utils.cpp_extension

from tests.support.absent_cuda import PACKAGES
from tests.support.absent_cuda.library import load
from zeroir.runtime.kernels import compile_worker
from zeroir.runtime.kernels.compile_worker import compile_segment, unpacked
from zeroir.runtime.kernels.stand_ins import StandIns

REQUEST = "request"
KERNELS = "kernels.json"


class AbsentDriver:
    """What Triton asks of a driver. Binaries are not loaded."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self.utils = self

    def get_current_target(self) -> object:
        return _target(self.architecture)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 163 * 1024, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *_: object) -> tuple[int, ...]:
        module, function, registers, spills, most_threads = 1, 1, 0, 0, 1024
        return module, function, registers, spills, most_threads

    def launcher_cls(self, *_: object) -> object:
        return lambda *_: None


def _target(architecture: int) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", architecture, 32)


@contextlib.contextmanager
def pretended(toolkit: Path, architectures: list[int]) -> Iterator[dict[str, object]]:
    """Let Inductor compile for the device within the block; yield what it says of kernels, by names of binaries."""
    import torch._inductor.codegen.wrapper as wrappers
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as triton_support
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.codecache import CudaKernelParamCache
    from torch._inductor.runtime import hints, triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime import driver

    architecture = architectures[0]
    driver.set_active(AbsentDriver(architecture))
    described: dict[str, object] = {}
    properties = {
        "multi_processor_count": 132,
        "major": architecture // 10,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "max_threads_per_block": 1024,
        "warp_size": 32,
    }

    def properties_of(device: torch.device) -> hints.DeviceProperties:
        if device.type == "cuda":
            return hints.DeviceProperties("cuda", 0, cc=architecture, **properties)
        return hints.DeviceProperties(device.type, 0, multi_processor_count=1, cc=0)

    def compile_kernels(self: wrappers.PythonWrapperCodegen) -> None:
        """Compile what a device would run to find the quickest of its variants, and take the first variant."""
        scope: dict[str, Any] = {}
        exec(f"{self.kernel_autotune_defs.getvalue()}\nasync_compile.wait(globals())", scope)
        for kernel in scope.values():
            if not isinstance(kernel, CachingAutotuner):
                continue
            launcher = kernel.launchers[0]
            kernel.save_gpu_kernel(0, launcher)  # type: ignore[no-untyped-call]
            saved = CudaKernelParamCache.get(kernel.inductor_meta["kernel_name"])
            assert saved is not None
            described[Path(saved["cubin_path"]).name] = {
                "source": Path(kernel.fn.fn.__code__.co_filename).read_text(),
                "name": kernel.fn.__name__,
                "signature": kernel.triton_meta["signature"],
                "constants": {**kernel.triton_meta["constants"], **launcher.config.kwargs},
            }

    compile_one = triton.compile

    def compile_for_all(source: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        for other in architectures[1:]:
            compile_one(source, target=_target(other), options=options, **more)
        return compile_one(source, target=target, options=options, **more)

    fastest = {
        "triton.autotune_pointwise": False,
        "compile_threads": 1,
        "aot_inductor.compile_wrapper_opt_level": "O0",
    }
    having = SimpleNamespace(**properties, minor=0, name="absent", total_memory=80 * 10**9)
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(fastest))
        for owner, name, value in (
            (torch.version, "cuda", "13.0"),
            (torch.cuda, "get_device_properties", lambda *_: having),
            (torch.cuda, "get_device_capability", lambda *_: (architecture // 10, 0)),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "device_count", lambda: 1),
            (torch.utils.cpp_extension, "CUDA_HOME", str(toolkit)),
            (triton_support, "has_triton", lambda: True),
            (compile_fx, "has_triton", lambda: True),
            (scheduler, "has_triton", lambda: True),
            (hints.DeviceProperties, "create", staticmethod(properties_of)),
            (CudaInterface, "get_device_properties", staticmethod(lambda *_: having)),
            (CudaInterface, "is_bf16_supported", staticmethod(lambda *_, **__: True)),
            (CudaInterface, "exchange_device", staticmethod(lambda _: 0)),
            (CudaInterface, "maybe_exchange_device", staticmethod(lambda _: 0)),
            (triton_helpers, "set_driver_to_gpu", lambda: None),
            (wrappers.PythonWrapperCodegen, "generate_and_run_autotune_block", compile_kernels),
            (triton, "compile", compile_for_all),
            (compile_worker, "driver", lambda: SimpleNamespace(set_device=lambda _: None)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield described


def main(toolkit: Path, folder: Path, architectures: list[int]) -> None:
    """Compile every request of a folder."""
    sys.path.append(str(PACKAGES))
    load(toolkit)
    stand_ins = StandIns()
    for request in sorted(folder.glob(f"*/{REQUEST}")):
        place = request.parent / "library"
        place.mkdir()
        with pretended(toolkit, architectures) as described:
            asked = replace(unpacked(request.read_bytes()), device="cuda:0", folder=str(place))
            compile_segment(asked, stand_ins)
        (request.parent / KERNELS).write_text(json.dumps(described))


if __name__ == "__main__":
    _, toolkit, folder, *architectures = sys.argv
    main(Path(toolkit), Path(folder), [int(each) for each in architectures])
