"""CUDA devices, and AMD's, by ``torch.cuda``.

Torch has no public interface for cleaning up after a capture, in particular after a failed one; all private interfaces
used are here.
"""

from __future__ import annotations

import contextlib
import warnings
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from zeroir.runtime.device.interface import DeviceStream, TimedEvent
from zeroir.runtime.device.pinned_memory import pinned_empty


class CudaDriver:
    """The CUDA devices of this process."""

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def set_device(self, device: torch.device) -> None:
        torch.cuda.set_device(device)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def processor(self, device: torch.device) -> tuple[object, ...]:
        capability = torch.cuda.get_device_capability(device)
        return ("cuda", torch.version.cuda, torch.version.hip, self.name(device), capability)

    def new_stream(self, device: torch.device) -> DeviceStream:
        return cast("DeviceStream", torch.cuda.Stream(device))  # type: ignore[no-untyped-call]

    def current_stream(self, device: torch.device) -> DeviceStream:
        return cast("DeviceStream", torch.cuda.current_stream(device))

    def stream_handle(self, device: torch.device) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def on(self, stream: DeviceStream | None) -> AbstractContextManager[object]:
        return torch.cuda.stream(cast("torch.cuda.Stream | None", stream))

    def timed_event(self) -> TimedEvent:
        return cast("TimedEvent", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def new_graph_pool(self) -> _CudaGraphPool:
        return _CudaGraphPool()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def pinned_empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # CUDA creates a context on the device on which it is asked to pin.
        with torch.cuda.device(device):
            return pinned_empty(numel, dtype)

    def peak_bytes(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)

    def allocated_bytes(self, device: torch.device) -> int:
        return torch.cuda.memory_allocated(device)

    def reset_peak_bytes(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def requested_bytes(self, device: torch.device, moment: str) -> int:
        return int(torch.cuda.memory_stats(device)[f"requested_bytes.all.{moment}"])

    def new_generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator(device)

    def random_state(self, device: torch.device) -> Tensor:
        return torch.cuda.get_rng_state(device)

    def set_random_state(self, state: Tensor, device: torch.device) -> None:
        torch.cuda.set_rng_state(state, device)


class _CudaGraphPool:
    """A pool of torch's; after a failed capture another one, because torch refuses a pool without graphs."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    def begin_capture(self, stream: DeviceStream) -> _CudaCapture:
        # The graph has its own memory and cannot use memory that was freed before.
        torch.cuda.synchronize(cast("torch.cuda.Stream", stream).device)
        torch.cuda.empty_cache()
        capture = _CudaCapture(pool=self, graph=torch.cuda.CUDAGraph())
        try:
            # Other threads, such as NCCL's own, may continue to call CUDA.
            capture.graph.capture_begin(pool=self.handle, capture_error_mode="thread_local")
        except BaseException:
            capture.abandon()
            raise
        return capture

    def renew(self) -> None:
        """Let later captures use another pool."""
        index, old = torch.cuda.current_device(), self.handle
        self.handle = torch.cuda.graph_pool_handle()
        try:
            torch._C._cuda_endAllocateToPool(index, old)
        except RuntimeError:
            return  # torch has already ended it
        torch._C._cuda_releasePool(index, old)


@dataclass(frozen=True, slots=True, kw_only=True)
class _CudaCapture:
    pool: _CudaGraphPool
    graph: torch.cuda.CUDAGraph

    def end(self) -> torch.cuda.CUDAGraph:
        with warnings.catch_warnings():
            # A section may have no work for the device, for example an all-reduce of one rank.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self.graph.capture_end()
        self._free_scratch()
        return self.graph

    def abandon(self) -> None:
        with contextlib.suppress(RuntimeError):
            self.graph.capture_end()
        self.graph.reset()
        self.pool.renew()
        self._free_scratch()

    def _free_scratch(self) -> None:
        # The scratch memory of matrix products belongs to the graph; otherwise torch would keep it until the process
        # ends.
        torch._C._cuda_clearCublasWorkspaces()
