"""The meaning of a logical micro-step in forty lines: carry out its ops on torch tensors, in program order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

import zeroir.torch_ops  # noqa: F401 - registers our operators
from zeroir.ir import ops
from zeroir.ir.buffers import Region, View
from zeroir.ir.dtypes import DType
from zeroir.ir.program import Program
from zeroir.ir.segments.segment import NodeArg, Ref, Segment, Symbol
from zeroir.torch_ops.types import TORCH_DTYPE

Memory = dict[str, Tensor]


def at_rest(program: Program) -> Memory:
    """Persistent buffers, all NaN but for gradients' padding, scalars and constants."""
    memory = {b.name: _empty(b.dtype, b.numel) for b in program.buffers if b.is_persistent}
    for flat in program.flats:
        for name in (f"{flat.name}.param", f"{flat.name}.grad_sum"):
            if name in memory:
                memory[name].zero_()
    for scalar in program.scalars:
        memory[scalar.buffer].copy_(torch.tensor(scalar.values))
    for binding in program.module_buffers:
        if binding.data:
            target = memory[binding.buffer]
            target.copy_(torch.frombuffer(bytearray(binding.data), dtype=target.dtype))
    return memory


def fill_from(program: Program, memory: Memory, state: Mapping[str, Tensor]) -> None:
    """Copy a model's parameters and buffers, by name, into the buffers."""
    for flat in program.flats:
        for slot in flat.slots:
            part = memory[f"{flat.name}.param"][slot.offset : slot.offset + slot.numel]
            part.copy_(state[slot.name].detach().reshape(-1))
    for binding in program.module_buffers:
        if binding.data is None:
            memory[binding.buffer].copy_(state[binding.name].reshape(-1))


def run_section(program: Program, name: str, memory: Memory) -> None:
    for op in program.section_by_name[name].body:
        match op:
            case ops.Alloc():
                assert op.buffer not in memory
                buffer = program.buffer_by_name[op.buffer]
                memory[op.buffer] = _empty(buffer.dtype, buffer.numel)
            case ops.Release():
                del memory[op.buffer]
            case ops.Compute():
                inputs = [_view(memory, argument.view) for argument in op.arguments]
                outputs = call(program.segment_by_name[op.segment], inputs)
                for output, to in zip(outputs, op.destinations, strict=True):
                    if to is not None and to.mode is ops.Mode.WRITE:
                        _view(memory, to.view).copy_(output)
                    elif to is not None:
                        _view(memory, to.view).add_(output)
            case ops.Cast(mode=ops.Mode.WRITE):
                _region(memory, op.destination).copy_(_region(memory, op.source))
            case ops.Cast():
                _region(memory, op.destination).add_(_region(memory, op.source))
            case ops.Fill():
                _region(memory, op.destination).fill_(op.value)
            case _:
                raise NotImplementedError(type(op).__name__)


def call(segment: Segment, inputs: list[Tensor]) -> list[Tensor]:
    """Run a segment's nodes one by one, checking every type that it declares."""
    values: list[Tensor | None] = list(inputs)
    for value, kind in zip(inputs, segment.inputs, strict=True):
        assert (tuple(value.shape), value.stride()) == (kind.shape, kind.stride)
    for node in segment.nodes:
        func: Callable[..., Tensor | Sequence[Tensor | None]] = operator.attrgetter(node.op)(
            torch.ops
        )
        args = [_torch(arg, values) for arg in node.args]
        result = func(*args, **{key: _torch(arg, values) for key, arg in node.kwargs})
        results = [result] if isinstance(result, Tensor) else list(result)
        for found, expected in zip(results, node.results, strict=True):
            if expected is not None and found is not None:
                assert TORCH_DTYPE[expected.dtype] is found.dtype, node
                assert tuple(found.shape) == expected.shape, node
                steps = _steps(expected.shape, expected.stride)
                assert _steps(found.shape, found.stride()) == steps, node
        values += results
    return [output for output in (values[i] for i in segment.outputs) if output is not None]


def _steps(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides that matter: those of dimensions of more than one element."""
    return [step for size, step in zip(shape, stride, strict=True) if size > 1]


def _torch(arg: NodeArg, values: list[Tensor | None]) -> object:
    match arg:
        case Ref():
            return values[arg.index]
        case Symbol(name="device"):
            return torch.device("cpu")
        case Symbol():
            return getattr(torch, arg.name)
        case DType():
            return TORCH_DTYPE[arg]
        case tuple():
            return tuple(_torch(item, values) for item in arg)
        case _:
            return arg


def _empty(dtype: DType, numel: int) -> Tensor:
    return torch.full((numel,), float("nan") if dtype.is_floating else 1, dtype=TORCH_DTYPE[dtype])


def _region(memory: Memory, region: Region) -> Tensor:
    return memory[region.buffer][region.offset : region.stop]


def _view(memory: Memory, view: View) -> Tensor:
    return memory[view.region.buffer].as_strided(view.shape, view.stride, view.region.offset)
