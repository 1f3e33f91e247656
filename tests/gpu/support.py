"""Programs of the example, their runs on the CPU that GPU runs are compared with, and bytes by torch's counters."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from examples import gpt
from zeroir.api import compile_with
from zeroir.config import make_options
from zeroir.frontend.source.entry import load_model_file
from zeroir.frontend.source.source import ModelSource
from zeroir.ir.buffers import Buffer, Space
from zeroir.ir.program import Program
from zeroir.memory.placement import places_to_run
from zeroir.runtime.engine.engine import Engine
from zeroir.runtime.execution.cuda import CudaStreams
from zeroir.runtime.execution.lockstep import Lockstep
from zeroir.torch_ops.batches import Batch

ROOT = Path(__file__).parents[2]
STEPS = 6
SEED = 3
ALIGNMENT_BYTES = 512
"""What CUDA's caching allocator rounds small requests up to."""

TOLERANCE = {"fp32": 1e-5, "bf16": 2**-8, "fp16": 2**-11}
"""Relative differences of the example's losses that kernels with other orders of additions may make in a few steps:
one rounding of the compute dtype, and in FP32 what AdamW's first steps, which look at signs, make of its roundings."""

MLP_TOLERANCE = {"fp32": 1e-5, "bf16": 2**-6, "fp16": 2**-9}
"""The same for ``mlp``, whose few elements average less: four roundings, relative and absolute."""


@cache
def example_file() -> ModelSource:
    """``examples/gpt.py``."""
    return load_model_file(str(ROOT / "examples" / "gpt.py"))


@cache
def example(stage: int, world_size: int, precision: str) -> Program:
    """The scheduled program of ``examples/gpt.py``."""
    options = {"stage": stage, "world_size": world_size, "precision": precision}
    return compile_with(ROOT / "examples" / "gpt.py", make_options(options)).program


def example_batches(steps: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    """The first batches of a rank that is alone."""
    batches = gpt.batches(0, 1, SEED)
    return [next(batches) for _ in range(steps)]


@cache
def example_losses(precision: str) -> Tensor:
    """The losses of the example on one rank of the CPU reference; they are the same at every stage."""
    lockstep = Lockstep(example(0, 1, precision), seed=SEED)
    lockstep.initialise(example_file().model, SEED)
    results = [lockstep.step([[batch]])[0] for batch in example_batches()]
    return torch.stack([result.loss for result in results])


def losses_of(engine: Engine, batches: Sequence[Batch]) -> Tensor:
    """The loss of every step, on the CPU."""
    return torch.tensor([engine.step(batch).loss for batch in batches])


def persistent(program: Program) -> list[Buffer]:
    """What a rank holds on its device between steps."""
    return [b for b in program.buffers if b.is_persistent and b.space is Space.DEVICE]


def held_bytes(program: Program) -> list[int]:
    """What a rank has allocated on its device: each persistent buffer, and one block for all temporary ones."""
    sizes = [buffer.size_bytes for buffer in persistent(program)]
    placement = places_to_run(program).get(Space.DEVICE)
    return sizes if placement is None else [*sizes, placement.size_bytes]


def rounded_bytes(sizes: list[int]) -> int:
    """Bytes that the caching allocator gives to allocations of up to 1 MiB each."""
    return sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes)


def requested_bytes() -> int:
    """Bytes that were asked of the allocator and not given back, before any rounding."""
    gc.collect()
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def allocated_bytes() -> int:
    """Bytes that the allocator has given out, as it rounds them."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def result_bytes(engine: Engine) -> list[int]:
    """The sizes of the tensors of the last step's result, which the engine keeps: the loss, its mean over ranks, …"""
    if engine.last_result is None:
        return []
    rank = engine.last_result.rank
    values = (getattr(rank, field.name) for field in fields(rank))
    return [value.nbytes for value in values if isinstance(value, Tensor)]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let torch raise where the host waits for the device.

    The first use in a process warns that the mode is a prototype, and sets it all the same.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def reserved_and_allocated() -> tuple[int, int]:
    """Bytes that the allocator holds, and that it has given out."""
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


def torch_stream(streams: CudaStreams, name: str) -> torch.cuda.Stream:
    """The stream of that name of a program, as torch has it."""
    return cast("torch.cuda.Stream", streams.stream(name))
