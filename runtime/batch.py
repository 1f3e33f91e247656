"""Checks a user's batch against the inputs of a program, and copies it into the input buffers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from zeroir.errors import UserError
from zeroir.ir.program import InputBinding, Program
from zeroir.runtime.rank_memory import RankMemory
from zeroir.runtime.tensors import TORCH_DTYPE
from zeroir.torch_ops.batches import Batch, undense_kind


def flatten(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by path: positions and keys joined by dots, such as ``0`` or ``labels``."""
    tensors: dict[str, Tensor] = {}
    _collect(batch, "", tensors)
    return tensors


def _collect(value: object, path: str, tensors: dict[str, Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors[path or "0"] = value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _collect(item, f"{path}.{key}" if path else str(key), tensors)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            _collect(item, f"{path}.{index}" if path else str(index), tensors)


def write_inputs(program: Program, memory: RankMemory, batch: Batch) -> None:
    """Copy a batch to the program's input buffers; see :func:`inputs_of`."""
    for binding, tensor in inputs_of(program, batch):
        memory.buffer(binding.buffer).view(binding.shape).copy_(tensor, non_blocking=True)


def inputs_of(program: Program, batch: Batch) -> list[tuple[InputBinding, Tensor]]:
    """The tensor of a batch for each input of the program.

    Raises:
        UserError: where the structure, a shape or a dtype of the batch is not the compiled one, or a tensor has no
            values to copy.
    """
    tensors = flatten(batch)
    inputs: list[tuple[InputBinding, Tensor]] = []
    for binding in program.inputs:
        tensor = tensors.get(binding.path)
        _check(binding, tensor)
        assert tensor is not None
        inputs.append((binding, tensor))
    # Inputs that the model never reads have no buffer, so further tensors are no error.
    return inputs


def _check(binding: InputBinding, tensor: Tensor | None) -> None:
    kind = None if tensor is None else undense_kind(tensor)
    if kind is not None:
        raise UserError(
            f"The batch's '{binding.path}' is {kind}; yield dense tensors with values, like the model file's batch()."
        )
    expected = _describe(str(TORCH_DTYPE[binding.dtype]), binding.shape)
    if tensor is None:
        raise UserError(
            f"The batch has no '{binding.path}'; the program was compiled for {expected} there: "
            "yield batches like the model file's batch()."
        )
    if tuple(tensor.shape) != binding.shape or tensor.dtype is not TORCH_DTYPE[binding.dtype]:
        actual = _describe(str(tensor.dtype), tuple(tensor.shape))
        raise UserError(
            f"The batch's '{binding.path}' is {actual}, but the program was compiled for {expected}: "
            "yield batches like the model file's batch(), or compile for the new ones."
        )


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype.removeprefix('torch.')}{list(shape)}"
