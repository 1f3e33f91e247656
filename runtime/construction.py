"""The user's module, built whole by the user's own code, and its tensors by name.

The values are those of ``torch.manual_seed(seed); model()``, because exactly that runs. In a job only rank 0 builds the
module, and sends the values to the other ranks (see ``initial``).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zeroir.errors import UserError
from zeroir.ir.program import Program
from zeroir.runtime.tensors import IR_DTYPE
from zeroir.torch_ops.globals import torch_globals_kept

Factory = Callable[[], nn.Module]


class ModuleTensors:
    """The tensors of a module by fully-qualified name."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._tensors = dict(module.named_buffers(remove_duplicate=False))
        self._tensors.update(module.named_parameters(remove_duplicate=False))
        self._last: tuple[str, Tensor] | None = None

    def tensor(self, name: str) -> Tensor:
        """The tensor, not a copy; UserError where the module has none of that name."""
        value: object = self._tensors.get(name)
        if value is None:  # a tensor that is a plain attribute
            with contextlib.suppress(AttributeError):
                value = operator.attrgetter(name)(self._module)
        if isinstance(value, Tensor):
            return value.detach()
        raise UserError(
            f"The model has no parameter or buffer '{name}', which the program was compiled with; "
            "compile it again from this model file."
        )

    def elements(self, name: str) -> Tensor:
        """The tensor, flat and row-major: a view, or a copy that is kept until the next call for another name."""
        if self._last is None or self._last[0] != name:
            self._last = name, self.tensor(name).reshape(-1)
        return self._last[1]


def construct(program: Program, factory: Factory, seed: int) -> ModuleTensors:
    """Build the module that the program was compiled from, under ``torch.manual_seed(seed)``.

    torch's generators and other globals are restored, because the ranks that build no module do not change theirs.

    Raises:
        UserError: where the module lacks a tensor of the program, or it has a different shape or no values.
    """
    with torch_globals_kept():
        torch.manual_seed(seed)
        module = ModuleTensors(factory())
    shapes = {slot.name: slot.shape for flat in program.flats for slot in flat.slots}
    shapes |= {b.name: b.shape for b in program.module_buffers if b.data is None}
    for name, shape in shapes.items():
        tensor = module.tensor(name)
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"The model's '{name}' has the shape {list(tensor.shape)}, but the program was compiled with "
                f"{list(shape)}; compile it again from this model file."
            )
        if tensor.is_meta or tensor.dtype not in IR_DTYPE:
            reason = "is on the meta device" if tensor.is_meta else f"has the dtype {tensor.dtype}"
            raise UserError(
                f"The model's '{name}' {reason}, so the program has no values to begin with; let the model make it on "
                "the CPU, in a dtype that it was compiled with."
            )
    return module
