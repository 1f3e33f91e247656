"""Converts a module to the dtypes in which it trains: 16-bit parameters, except where FP32 is kept.

Modules with running statistics, and modules that ``keep_fp32`` names, keep FP32 parameters; such a module receives its
floating inputs in FP32 and returns its outputs in the compute dtype. Registered buffers keep their dtype, and so do
frozen parameters in 8-bit floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from zeroir.config.precision import FloatName
from zeroir.errors import UserError
from zeroir.frontend.source.source import capitalised
from zeroir.torch_ops.batches import Batch, with_tensors

T = TypeVar("T")

_COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: FloatName) -> torch.dtype:
    """Return the dtype of parameters, activations and gradients."""
    return _COMPUTE_DTYPE[precision]


def apply_precision(module: nn.Module, precision: FloatName, keep_fp32: Sequence[str] = ()) -> None:
    """Convert the floating parameters of a module in place and install casts around the modules that stay FP32.

    ``keep_fp32`` are patterns (``*``, ``?``, ``[...]``) of names of modules or parameters; a parameter's name selects
    the whole module that contains it.

    Raises:
        UserError: if a pattern matches nothing.
    """
    dtype = compute_dtype(precision)
    fp32_modules = _fp32_modules(module, keep_fp32)
    done: set[int] = set()
    for name, child in module.named_modules():
        child_dtype = torch.float32 if _is_inside(name, fp32_modules) else dtype
        for parameter in child.parameters(recurse=False):
            if id(parameter) not in done and is_converted(parameter):
                parameter.data = parameter.data.to(child_dtype)
            done.add(id(parameter))
    _cast_around(module, fp32_modules, dtype)


@contextmanager
def fp32_casts(
    module: nn.Module, dtype: torch.dtype, keep_fp32: Sequence[str] = ()
) -> Iterator[None]:
    """Within the block let the modules that stay FP32 cast as in a module to which ``apply_precision`` was applied."""
    handles = _cast_around(module, _fp32_modules(module, keep_fp32), dtype)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cast_around(
    module: nn.Module, names: Sequence[str], dtype: torch.dtype
) -> list[RemovableHandle]:
    """Cast what modules that stay FP32 are called with and return; ``dtype`` is that of the others."""
    handles: list[RemovableHandle] = []
    for name in () if dtype is torch.float32 else names:
        child = module.get_submodule(name)
        handles += (
            child.register_forward_pre_hook(
                lambda _, args, kwargs: cast_floating((args, kwargs), torch.float32),
                with_kwargs=True,
                prepend=True,
            ),
            child.register_forward_hook(lambda _, __, output: cast_floating(output, dtype)),
        )
    return handles


def is_converted(parameter: nn.Parameter) -> bool:
    """Return whether a program has a parameter in the dtype of its precision: a float that is not a frozen code."""
    is_code = parameter.dtype == torch.float8_e4m3fn and not parameter.requires_grad
    return parameter.dtype.is_floating_point and not is_code


def note_on_precision(module: nn.Module, precision: FloatName, name: str) -> str | None:
    """Return a sentence on parameters of a module, called ``name``, in a dtype that the program does not train in.

    FP32 parameters need none: a program of lower precision keeps them as its master weights.
    """
    trained = {torch.float32, compute_dtype(precision)}
    for parameter, values in module.named_parameters():
        if is_converted(values) and values.dtype not in trained:
            dtype = str(values.dtype).removeprefix("torch.")
            others = [key for key, each in _COMPUTE_DTYPE.items() if each is values.dtype]
            hint = (
                f": compile with --precision {others[0]} unless this is meant." if others else "."
            )
            return (
                f"{capitalised(name)} has parameters in {dtype}, such as {parameter}, and the program converts them, "
                f"because its precision is {precision}{hint}"
            )
    return None


def cast_floating(value: T, dtype: torch.dtype) -> T:
    """Return a value of the same structure with all floating tensors cast to one dtype."""
    result: T = pytree.tree_map_only(
        Tensor, lambda x: x.to(dtype) if x.dtype.is_floating_point else x, value
    )
    return result


def with_floats_cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """Return a batch of the same types with all floating tensors cast to one dtype."""
    return with_tensors(batch, lambda x: x.to(dtype) if x.dtype.is_floating_point else x)


def _fp32_modules(module: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the outermost modules that keep FP32."""
    names: set[str] = set()
    for pattern in patterns:
        matches = {n for n, _ in module.named_modules() if n and fnmatchcase(n, pattern)}
        matches |= {
            name.rpartition(".")[0]
            for name, _ in module.named_parameters(remove_duplicate=False)
            if fnmatchcase(name, pattern)
        }
        if not matches:
            raise UserError(
                f"--keep-fp32 {pattern} matches no module or parameter of the model; names look like "
                f"{_example(module)}."
            )
        names |= matches
    names |= {name for name, child in module.named_modules() if _has_running_statistics(child)}
    return tuple(name for name in sorted(names) if not _is_inside(name, names - {name}))


def _has_running_statistics(module: nn.Module) -> bool:
    return any(
        name.startswith("running_") and buffer is not None
        for name, buffer in module.named_buffers(recurse=False)
    )


def _is_inside(name: str, outer: Sequence[str] | set[str]) -> bool:
    return any(not top or name == top or name.startswith(f"{top}.") for top in outer)


def _example(module: nn.Module) -> str:
    names = [name for name, _ in module.named_parameters()]
    return names[len(names) // 2] if names else "layers.0.weight"
