"""Traces models on fake tensors of a CUDA device that is not there: ``python -m tests.support.absent_cuda.traced``.

Its arguments are the guard (``library.build_guard``), a folder, and models with a precision, such as
``bf16:causal/llama``. A file of the folder gets what was found of each.

The product needs no such device: its tensors are on the CPU, and say otherwise while an operator looks. So this process
is a judge of it.

* The trace: autograd, composite operators and the model's own code see tensors of the device.
* The replay: each segment of a program that was captured for the device runs its eager kernel on them. Whatever leaves
  a segment needs the declared type, so segments take as much as they can (``select_saved`` is off).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

if __name__ == "__main__":
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import torch
import torch._subclasses.functional_tensor as functional_tensor
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import zeroir
from tests.support.absent_cuda.compared_models import Made, made
from zeroir.api.capture import given_source
from zeroir.config.precision import FloatName
from zeroir.frontend.capture import capture as frontend
from zeroir.frontend.capture.captured_graph import CapturedGraph
from zeroir.ir import ops
from zeroir.ir.segments.bindings import bindings
from zeroir.ir.segments.segment import Segment, TensorType
from zeroir.runtime.kernels.eager import CopyToDestination, compile_eager
from zeroir.runtime.kernels.graph import host_inputs
from zeroir.torch_ops._torch_device_tensors import DeviceTensorMode
from zeroir.torch_ops.types import TORCH_DTYPE

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

Result = tuple[str, tuple[int, ...], tuple[int, ...]] | None
"""The dtype, the shape and the strides of a result, if there is one."""


class Call(NamedTuple):
    """A node of a graph: its operator and results."""

    op: str
    results: tuple[Result, ...]


class Judged(NamedTuple):
    """What the judge found: the calls of a trace, or why there is none; the calls of a replay, and the first fault."""

    calls: list[Call]
    why_not: str
    replayed: int
    fault: str


class OnDevice(DeviceTensorMode):
    """A mode in which tensors are made on the device."""

    depth = 0

    def __enter__(self) -> Any:  # noqa: ANN401 - torch's own return type
        if self.depth == 0:
            CUDA.__enter__()
        self.depth += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self.depth -= 1
        if self.depth == 0:
            CUDA.__exit__(*error)


def calls_of(model: Made, precision: FloatName, device: str) -> list[Call]:
    """The calls of a model's graph that the frontend captures for a device."""
    source = given_source(model.module, model.batch, model.loss, None)
    # Every block is traced, so that the order of nodes is that of the code.
    captured = frontend.capture(
        source, precision, (), evaluate=False, fewest_equal_calls=10**6, device=device
    )
    return _calls(captured.joint)


def _calls(graph: CapturedGraph) -> list[Call]:
    def result(number: int) -> Result:
        kind = graph.types[number]
        return None if kind is None else (kind.dtype.value, tuple(kind.shape), tuple(kind.stride))

    return [Call(node.op, tuple(map(result, node.results))) for node in graph.nodes]


@contextlib.contextmanager
def tensors_on_the_device() -> Iterator[None]:
    """Let the frontend trace tensors of the device.

    Torch without CUDA has no kernels of it, and takes an operator apart that has none. Those of the CPU stand in.
    """

    def is_composite(func: torch._ops.OpOverload, flat_args: Sequence[object]) -> bool:
        has_tensor = any(isinstance(arg, Tensor) for arg in flat_args)
        return not (has_tensor and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU))

    with contextlib.ExitStack() as stack:
        for module in (proxy_tensor, functional_tensor):
            stack.enter_context(
                patch.object(module, "autograd_would_have_decomposed", is_composite)
            )
        mode = lambda env=None, device="cpu": OnDevice(env)  # noqa: ARG005, E731 - it replaces a function
        stack.enter_context(patch.object(frontend, "fake_mode", mode))
        yield


def judged(name: str, precision: FloatName) -> Judged:
    """Trace a model and replay its program."""
    calls: list[Call] = []
    why_not = ""
    try:
        with tensors_on_the_device():
            calls = calls_of(made(name), precision, "cpu")
    except zeroir.UserError as error:
        why_not = str(error)
    model = made(name)
    program = zeroir.compile(
        model.module,
        model.batch,
        loss=model.loss,
        stage=2,
        world_size=2,
        precision=zeroir.Precision(dtype=precision, device="cuda"),
        recompute=zeroir.Recompute(select_saved=False),
    ).program
    replayed, fault = 0, ""
    done: set[object] = set()
    for op in program.ops():
        if not isinstance(op, ops.Compute):
            continue
        segment, bound = program.segment_by_name[op.segment], tuple(bindings(op))
        if (segment.digest(), bound) not in done:
            done.add((segment.digest(), bound))
            count, problem = replay(segment, bound)
            replayed += count
            fault = fault or problem
    return Judged(calls, why_not, replayed, fault)


def replay(segment: Segment, bound: Sequence[Any]) -> tuple[int, str]:
    """Run an eager kernel on tensors of the device; return the number of its calls, and what is wrong with one."""
    types, on_host = segment.types(), host_inputs(segment)
    with torch.no_grad(), FakeTensorMode():
        kernel = compile_eager(segment, bound, CUDA)
        values: list[Tensor | None] = [None] * kernel.values
        for index, kind in enumerate(segment.inputs):
            values[index] = _tensor(kind, kind.stride, CPU if index in on_host else CUDA)
        destinations = [
            None if binding is None else _tensor(types[output], binding.stride, CUDA)
            for output, binding in zip(segment.outputs, bound, strict=True)
        ]
        for number, step in enumerate(kernel.steps):
            try:
                if isinstance(step, CopyToDestination):
                    made_value, target = values[step.plan.value], step.target(destinations)
                    assert made_value is not None
                    if made_value.dtype != target.dtype or made_value.shape != target.shape:
                        return number, f"@{segment.name} has {made_value} for {target}"
                step(values, destinations)
            except Exception as error:  # noqa: BLE001 - any exception of a kernel is a fault
                return number, f"@{segment.name}: {str(error).splitlines()[0]}"
    return len(kernel.steps), ""


def _tensor(kind: TensorType | None, stride: Sequence[int], device: torch.device) -> Tensor:
    assert kind is not None
    return torch.empty_strided(kind.shape, stride, dtype=TORCH_DTYPE[kind.dtype], device=device)


def main(_guard: str, folder: str, *models: str) -> None:
    """Judge models, and write what was found."""
    warnings.simplefilter("ignore")
    # Kernels that are never called: torch takes these operators apart where they are not there.
    kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for operator in ("silu_backward", "mish_backward"):
        kernels.impl(operator, lambda *_: None, "CUDA")
    for number, model in enumerate(models):
        precision, _, name = model.partition(":")
        found = judged(name, cast("FloatName", precision))
        (Path(folder) / f"{number:03}").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
