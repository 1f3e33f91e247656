"""Checks a user's batch against the inputs of a program, and copies it into the input buffers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zeroir.errors import BatchError
from zeroir.ir.analysis.micro_batches import slice_region
from zeroir.ir.program import ConstantBinding, InputBinding, Program
from zeroir.ir.sizes import Size
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.torch_ops.batches import Batch, BatchLeaves, flatten, is_same_constant
from zeroir.torch_ops.types import TORCH_DTYPE

Shape = tuple[int, ...]
"""The values of the dims of a program, in their order, for one micro-batch; empty without dims."""


def write_inputs(program: Program, memory: RankMemory, batch: Batch, micro_batch: int) -> None:
    """Copy a batch, after the checks of ``inputs_of``, to a micro-batch's slices of the program's input buffers."""
    for binding, tensor in inputs_of(program, batch):
        region = slice_region(program, binding.buffer, micro_batch, tensor.numel())
        memory.region(region).view(tensor.shape).copy_(tensor, non_blocking=True)


def shape_of(program: Program, batch: Batch) -> Shape:
    """Return the values of the program's dims in a batch.

    Raises:
        BatchError: where a tensor has another number of dimensions, a dim would be outside its range, or two tensors
            give it different values.
    """
    if not program.dims:
        return ()
    tensors = flatten(batch).tensors
    values: dict[str, tuple[int, str]] = {}
    for binding in program.inputs:
        tensor = tensors.get(binding.path)
        if tensor is None or tensor.dim() != len(binding.shape):
            continue  # inputs_of says so
        for size, number in zip(binding.shape, tensor.shape, strict=True):
            linear = size.linear if isinstance(size, Size) else None
            if linear is None:
                continue  # inputs_of compares it
            dim, value = linear.dim, linear.value_of_dim(number)
            if value is None:
                prefix = "" if str(size) == dim.name else f"{size} with "
                raise BatchError(
                    f"The batch's '{binding.path}' has a dimension of {number}, but the program was compiled for "
                    f"{prefix}{dim.name} from {dim.minimum} to {dim.maximum}: give other batches, or compile for these."
                )
            known, path = values.setdefault(dim.name, (value, binding.path))
            if known != value:
                raise BatchError(
                    f"The batch's '{path}' gives {dim.name} the value {known}, and '{binding.path}' {value}: the "
                    "program was compiled for batches in which both have the same."
                )
    missing = next((dim.name for dim in program.dims if dim.name not in values), None)
    if missing is not None:
        raise BatchError(
            f"The batch has no tensor with the dim {missing}: give batches like the example that it was compiled with."
        )
    return tuple(values[dim.name][0] for dim in program.dims)


def inputs_of(program: Program, batch: Batch) -> list[tuple[InputBinding, Tensor]]:
    """Return the tensor of a batch for each input of the program.

    Raises:
        BatchError: where the structure, a shape, a dtype or a constant of the batch is not the compiled one, or a
            tensor has no values to copy.
    """
    leaves = flatten(batch)
    for constant in program.batch_constants:
        _check_constant(constant, leaves)
    values = dict(zip((dim.name for dim in program.dims), shape_of(program, batch), strict=True))
    inputs = [(binding, _checked(binding, leaves, values)) for binding in program.inputs]
    if len(leaves.tensors) > len(inputs) or len(leaves.constants) > len(program.batch_constants):
        raise _unknown(program, leaves)
    return inputs


def has_other_sizes(program: Program, batch: Batch) -> bool:
    """Return whether a batch has sizes that the program does not take, and is like its batches otherwise."""
    leaves = flatten(batch)
    tensors, constants = leaves.tensors, leaves.constants
    is_alike = (
        tensors.keys() == {binding.path for binding in program.inputs}
        and constants.keys() == {binding.path for binding in program.batch_constants}
        and all(
            tensors[each.path].dtype is TORCH_DTYPE[each.dtype]
            and tensors[each.path].dim() == len(each.shape)
            for each in program.inputs
        )
        and all(is_same_constant(constants[c.path], c.value) for c in program.batch_constants)
    )
    if not is_alike:
        return False
    try:
        values = dict(
            zip((dim.name for dim in program.dims), shape_of(program, batch), strict=True)
        )
    except BatchError:
        return True
    return any(
        tuple(tensors[each.path].shape) != _shape_at(each, values) for each in program.inputs
    )


def _shape_at(binding: InputBinding, values: Mapping[str, int]) -> Shape:
    return tuple(s.at(values) if isinstance(s, Size) else s for s in binding.shape)


def _checked(binding: InputBinding, leaves: BatchLeaves, values: Mapping[str, int]) -> Tensor:
    tensor = leaves.tensors.get(binding.path)
    shape = _shape_at(binding, values)
    expected = _describe(str(TORCH_DTYPE[binding.dtype]), shape)
    if tensor is None:
        found = (
            f"has the constant {leaves.constants[binding.path]!r} at '{binding.path}'"
            if binding.path in leaves.constants
            else f"has no '{binding.path}'"
        )
        raise BatchError(
            f"The batch {found}; the program was compiled for {expected} there: {_REMEDY}."
        )
    if tuple(tensor.shape) != shape or tensor.dtype is not TORCH_DTYPE[binding.dtype]:
        actual = _describe(str(tensor.dtype), tuple(tensor.shape))
        remedy = _DROP_LAST if _is_shorter(tuple(tensor.shape), shape) else _REMEDY
        raise BatchError(
            f"The batch's '{binding.path}' is {actual}, but the program was compiled for {expected}: {remedy}, or "
            "compile for the new ones."
        )
    return tensor


def _is_shorter(shape: tuple[int, ...], compiled: tuple[int, ...]) -> bool:
    """Return whether a tensor differs from the compiled shape only in having fewer samples."""
    return bool(shape and compiled) and shape[0] < compiled[0] and shape[1:] == compiled[1:]


def _check_constant(binding: ConstantBinding, leaves: BatchLeaves) -> None:
    path = binding.path
    if path in leaves.tensors:
        tensor = leaves.tensors[path]
        actual = _describe(str(tensor.dtype), tuple(tensor.shape))
    elif path not in leaves.constants:
        raise BatchError(
            f"The batch has no '{path}'; the program was compiled for the constant {binding.value!r} there: {_REMEDY}."
        )
    elif is_same_constant(leaves.constants[path], binding.value):
        return
    else:
        actual = f"{leaves.constants[path]!r:.80}"
    raise BatchError(
        f"The batch's '{path}' is {actual}, but the program was compiled for the constant {binding.value!r:.80} there: "
        "compile for the new value, or make it a tensor."
    )


def _unknown(program: Program, leaves: BatchLeaves) -> BatchError:
    """Return the error for a tensor or constant that the program does not use."""
    bound = {binding.path for binding in program.inputs}
    bound |= {binding.path for binding in program.batch_constants}
    path = next(path for path in (*leaves.tensors, *leaves.constants) if path not in bound)
    return BatchError(
        f"The batch has a '{path}', which the program was not compiled for and would ignore: {_REMEDY}, or compile for "
        "the new ones."
    )


_DROP_LAST = (
    "the last batch of an epoch is shorter where the number of samples is no multiple of the batch size, so pass "
    "drop_last=True to the DataLoader"
)
_REMEDY = "give batches like the example that it was compiled with"


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype.removeprefix('torch.')}{list(shape)}"
