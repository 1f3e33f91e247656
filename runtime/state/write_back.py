"""Writes the values of an engine back to the user's module that they came from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.runtime.comm.base import Comm
from zeroir.runtime.memory.rank_memory import RankMemory
from zeroir.runtime.state.full_parameters import whole_parameters
from zeroir.runtime.state.named_tensors import NamedTensors
from zeroir.runtime.state.waiting_states import WaitingStates
from zeroir.torch_ops.absent_tensors import forget_home


def return_values(
    program: Program,
    memory: RankMemory,
    comm: Comm,
    module: nn.Module,
    device: torch.device,
    others: Mapping[str, Tensor] = MappingProxyType({}),
    waiting: WaitingStates | None = None,
) -> None:
    """Set a module's tensors to the present values, on ``device`` and in their own dtypes.

    All ranks call this together.

    One unit at a time is gathered. Buffers get the values of this rank. Tensors that the program does not hold are not
    changed, except those without values, which get those in ``others``.

    Raises:
        UserError: where the module lacks a tensor of the program.
    """
    tensors = NamedTensors(module)
    shapes = {name: slot.shape for name, (_, slot) in program.parameter_by_name.items()}
    held = [binding for binding in program.module_buffers if binding.data is None]
    shapes |= {binding.name: binding.shape for binding in held}
    for name, shape in shapes.items():
        if name not in tensors or tuple(tensors[name].shape) != shape:
            raise UserError(
                f"The module has no '{name}' of the shape {list(shape)}: give the module that the program was compiled "
                "from."
            )
    with torch.no_grad():
        for slot, (values,) in whole_parameters(
            program, [memory], comm, masters=True, waiting=waiting
        ):
            _put(tensors, slot.name, values, device)
        for binding in held:
            _put(tensors, binding.name, memory.buffer(binding.buffer).view(binding.shape), device)
        for name, values in others.items():
            if name in tensors and tensors[name].is_meta:
                _put(tensors, name, values, device)


def _put(tensors: NamedTensors, name: str, values: Tensor, device: torch.device) -> None:
    old = tensors[name]
    new = values.detach().to(device, old.dtype, copy=True)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
    tensors.replace(old, new)
    forget_home(tensors[name])
